"""results/samples: finished runs that every command reads at once, without a model and without this machine's paths."""

from __future__ import annotations

import re
from pathlib import Path

import evalkit
from evalkit.runs.folder import JOURNAL, MANIFEST, Run

ROOT = Path(__file__).parents[1]
SAMPLES = ROOT / "results" / "samples"
FOLDERS = sorted(path for path in SAMPLES.iterdir() if path.is_dir())


def sample(name: str) -> Run:
    [folder] = SAMPLES.glob(f"{name}-*")
    return evalkit.load_run(folder)


def test_they_are_small_finished_and_whole_without_journals_and_paths() -> None:
    """One of every kind; the demo checkpoint's are of all official documents."""
    files = [path for path in SAMPLES.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 15_000_000
    assert not [path for path in files if path.name in (JOURNAL, ".lock", ".owner")]
    runs = [evalkit.load_run(folder) for folder in FOLDERS]
    assert {run.kind for run in runs} == {"multiple_choice", "perplexity", "attention", "longbench", "ruler", "needle"}
    for run in runs:
        assert run.complete
        for name in run.files.keys() - {MANIFEST}:
            run.read(name)
        for path in run.folder.rglob("*.json"):
            texts = re.findall(r'"((?:[^"\\]|\\.)*)"', path.read_text(encoding="utf-8"))
            assert not [text for text in texts if re.match(r"(/|[A-Za-z]:\\)\w", text) or re.search(r"\s/\w+/", text)]
    for template in ("inst", "plain"):
        run = sample(f"demo-zeroshot8-{template}")
        assert sum(task["n"] for task in run.stored["tasks"]) == 34_507
        assert all(source["official"] for source in run.manifest["documents"].values())
        assert (run.template, run.manifest["specification"]["dtype"]) == (template, "bfloat16")


def test_the_pages_numbers_are_the_runs() -> None:
    text = (ROOT / "docs" / "samples.md").read_text(encoding="utf-8").partition("## The demo checkpoint")[2]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    printed = {line[0]: line[1:4] for line in cells}
    inst, plain = (sample(f"demo-zeroshot8-{template}") for template in ("inst", "plain"))
    results = (inst.results("ppl"), plain.results("acc"), plain.results("acc_norm"))
    for number, found in enumerate(results):
        for task in found.tasks:
            assert printed[f"`{task.task}`"][number].split()[0] == f"{100 * task.value:.1f}", task.task
        assert printed["Average"][number].split()[0] == f"{100 * found.average.value:.1f}"
