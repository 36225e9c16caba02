"""results/samples: finished runs that every command reads at once, without a model and without this machine's paths."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

import evalkit
from evalkit.cli.root import cli
from evalkit.runs.folder import JOURNAL, MANIFEST, Run

ROOT = Path(__file__).parents[1]
SAMPLES = ROOT / "results" / "samples"
FOLDERS = sorted(path for path in SAMPLES.iterdir() if path.is_dir())
MOST_BYTES = 15_000_000


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """Run a command on the samples; return what it prints."""
    monkeypatch.setenv("EVALKIT_OUTPUT", str(SAMPLES))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")

    def run(*words: str) -> str:
        done = CliRunner().invoke(cli, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    return run


def sample(name: str) -> Run:
    [folder] = SAMPLES.glob(f"{name}-*")
    return evalkit.load_run(folder)


def test_they_are_small_and_have_no_journals() -> None:
    files = [path for path in SAMPLES.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES
    assert not [path for path in files if path.name in (JOURNAL, ".lock", ".owner")]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_each_is_finished_whole_and_without_paths(folder: Path) -> None:
    run = evalkit.load_run(folder)
    assert run.complete
    for name in run.files.keys() - {MANIFEST}:
        run.read(name)
    for path in folder.rglob("*.json"):
        texts = re.findall(r'"((?:[^"\\]|\\.)*)"', path.read_text(encoding="utf-8"))
        assert not [text for text in texts if re.match(r"(/|[A-Za-z]:\\)\w", text) or re.search(r"\s/\w+/", text)]


def test_every_kind_of_run_is_there() -> None:
    kinds = {evalkit.load_run(folder).kind for folder in FOLDERS}
    assert kinds == {"multiple_choice", "perplexity", "attention", "longbench", "needle"}


@pytest.mark.parametrize("template", ["inst", "plain"])
def test_the_demo_checkpoint_has_all_official_documents(template: str) -> None:
    run = sample(f"demo-zeroshot8-{template}")
    documents = run.manifest["documents"]
    assert (
        sum(source["count"] for source in documents.values()) == sum(task["n"] for task in run.stored["tasks"]) == 34507
    )
    assert all(source["official"] for source in documents.values())
    assert (run.template, run.manifest["specification"]["dtype"]) == (template, "bfloat16")


def test_commands_read_them(command: Callable[..., str], tmp_path: Path) -> None:
    assert str(len(FOLDERS)) in json.dumps(len(json.loads(command("ls", "runs", "--format", "json"))["runs"]))
    assert "34,507" in command("compare", "demo-zeroshot8-inst", "demo-zeroshot8-plain", "--rule", "acc")
    assert "acc_norm" in command("rescore", "demo-zeroshot8-plain", "--rule", "acc_norm")
    assert "boolq/" in command("show", "demo-zeroshot8-inst", "--task", "boolq", "--wrong", "--limit", "1")
    command("report", "demo-needle", "--output", "report.html")
    assert (tmp_path / "report.html").stat().st_size > 50_000
    command(
        "figure", "entropy", "vanilla-seed1-model-attention", "intg-seed1-model-attention", "--output", "entropy.png"
    )
    assert (tmp_path / "entropy.csv").stat().st_size > 100
    pair = ["vanilla-seed1-model", "intg-seed1-model"]
    assert "bits per byte" in command("compare", *(f"{name}-perplexity" for name in pair))
    mapping = {"rows": {"before": "demo-zeroshot8-inst", "after": "demo-zeroshot8-plain"}, "rule": "acc"}
    (tmp_path / "rows.yaml").write_text(json.dumps(mapping), encoding="utf-8")
    layout = str(ROOT / "examples" / "rounding.yaml")
    command("table", layout, "--source", "runs", "--runs", "rows.yaml", "--allow-mixed")


def rows(page: Path, heading: str) -> list[list[str]]:
    """Return the cells of the first table under a heading, without its head."""
    text = page.read_text(encoding="utf-8").partition(heading)[2]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2 : len(lines)]]


def test_the_pages_numbers_are_the_runs() -> None:
    inst, plain = (sample(f"demo-zeroshot8-{template}") for template in ("inst", "plain"))
    found = {"ppl": inst.results("ppl"), "acc": plain.results("acc"), "acc_norm": plain.results("acc_norm")}
    printed = {row[0]: row[1:4] for row in rows(ROOT / "docs" / "samples.md", "## The demo checkpoint")}
    for number, rule in enumerate(("ppl", "acc", "acc_norm")):
        for task in found[rule].tasks:
            assert printed[f"`{task.task}`"][number] == f"{100 * task.accuracy:.1f}", (rule, task.task)
        assert printed["Average"][number] == f"{100 * found[rule].average.accuracy:.1f}"
