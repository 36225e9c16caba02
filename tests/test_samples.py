"""results/samples: finished runs that every command reads at once, without a model and without this machine's paths."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import evalkit
from evalkit.cli import main
from evalkit.runs.folder import JOURNAL, MANIFEST, Run

ROOT = Path(__file__).parents[1]
SAMPLES = ROOT / "results" / "samples"
FOLDERS = sorted(path for path in SAMPLES.iterdir() if path.is_dir())


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> Callable[..., str]:
    """Run a command beside the samples; return what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")

    def run(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(list(words))
        out, err = capsys.readouterr()
        assert not ended.value.code, err
        return str(out)

    return run


def folder_of(name: str) -> str:
    [folder] = SAMPLES.glob(f"{name}-*")
    return str(folder)


def sample(name: str) -> Run:
    return evalkit.load_run(folder_of(name))


def test_they_are_small_finished_and_whole_without_journals_and_paths() -> None:
    """One of every kind; the demo checkpoint's are of all official documents."""
    files = [path for path in SAMPLES.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 15_000_000
    assert not [path for path in files if path.name in (JOURNAL, ".lock", ".owner")]
    runs = [evalkit.load_run(folder) for folder in FOLDERS]
    assert {run.kind for run in runs} == {"multiple_choice", "perplexity", "attention", "longbench", "needle"}
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


def test_tables_figures_and_pages(command: Callable[..., str], tmp_path: Path) -> None:
    pair = [folder_of(f"{name}-seed1-model-zeroshot8") for name in ("vanilla", "intg")]
    (tmp_path / "rows.yaml").write_text(json.dumps({"rows": dict(zip(("vanilla", "intg"), pair, strict=True))}))
    layout = str(ROOT / "examples" / "replication" / "layout.yaml")
    table = command("table", layout, "--source", "runs", "--runs", "rows.yaml", "--drop-empty")
    for folder in pair:
        average = evalkit.load_run(folder).results().average.accuracy
        assert f"{100 * average:.1f}" in table
    maps = [folder_of(f"{name}-seed1-model-attention") for name in ("vanilla", "intg")]
    command("figure", "entropy", *maps, "-o", "entropy.png")
    assert len((tmp_path / "entropy.csv").read_text(encoding="utf-8").splitlines()) > 8
    command("report", folder_of("demo-needle"), folder_of("demo-longbench"), "-o", "report.html")
    assert (tmp_path / "report.html").stat().st_size > 50_000


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
            assert printed[f"`{task.task}`"][number].split()[0] == f"{100 * task.accuracy:.1f}", task.task
        assert printed["Average"][number].split()[0] == f"{100 * found.average.accuracy:.1f}"
