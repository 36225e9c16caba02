"""`evalkit table` and `integrity` through the real entry point; snapshots have what they print."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from evalkit.runs.folder import Run
from tests.cli.test_root import Command, _no_settings, complains, evalkit
from tests.tables.runs import altered, loaded, mapped, written
from tests.test_api import heavy_after

__all__ = ["_no_settings", "evalkit"]  # fixtures


def test_runs_and_a_layout_of_ones_own(evalkit: Command, finished: Run) -> None:
    """The recipe of docs/tables.md."""
    written(
        Path("my_table.yaml"),
        caption="Mine",
        suite="zeroshot8",
        rows=[{"items": {"a": "A_1 & co", "b": None}}],
        columns=[{"items": {"piqa": None, "Average": "Avg."}}],
        marks={"bold": "highest in table"},
    )
    mapped(Path(), rows={"a": str(finished.folder)})
    command = ("table", "my_table.yaml", "--source", "runs", "--runs", "mapping.yaml")
    shown = evalkit(*command, "--stderr").out
    results = finished.results()
    piqa = next(task for task in results.tasks if task.task == "piqa")
    assert f"{100 * piqa.accuracy:.1f}* ± {100 * (piqa.stderr or 0):.1f}" in shown
    assert f"{100 * results.average.accuracy:.1f}*" in shown
    outcome = evalkit(*command, "--format", "latex", "--standalone", "-o", "mine.tex")
    assert outcome.out == "mine.tex\n"
    text = Path("mine.tex").read_text(encoding="utf-8")
    assert text.startswith(r"\documentclass") and r"A\_1 \& co" in text
    complains(evalkit("table", "my_table.yaml"), 2, "my_table", "--source runs")


def test_runs_alone(evalkit: Command, finished: Run) -> None:
    """By folder, and by their name in results/runs; `--runs RUN RUN …` and a run of no row."""
    shape = finished.manifest["loaded"]
    runs = [
        altered(finished, Path(f"results/runs/run{number}"), 0.0, {"loaded": shape | loaded(name)})
        for number, name in enumerate(("llama-125m-intg-2s", "llama-125m-intg-4s"))
    ]
    begin = ("table", "sig_abl_main", "--source", "runs", "--runs")
    shown = evalkit(*begin, runs[0], "run1", "--format", "csv")
    [average] = [row for row in csv.reader(io.StringIO(shown.out)) if row[0] == "Average"]
    assert [cell == "-" for cell in average[2:]] == [False, False, True, True, True, True]
    complains(evalkit(*begin, runs[0], finished.folder), 2, "sig_abl_main", "--runs")
    complains(evalkit(*begin, runs[0], "runs.yaml"), 2, "runs.yaml")
    complains(evalkit("table", "main_res", "run0"), 2, "run0")


def test_audit(evalkit: Command) -> None:
    page = (Path(__file__).parents[2] / "docs" / "measurements" / "paper_audit.md").read_text(encoding="utf-8")
    printed = evalkit("table", "--audit", "--format", "markdown").out
    assert " ".join(printed.split()) in " ".join(page.split())
    rows = list(csv.DictReader(io.StringIO(evalkit("table", "app_long_contx", "--audit", "--format", "csv").out)))
    [twelve] = [row for row in rows if row["key"] == "twelve_of_sixteen"]
    assert (twelve["printed"], twelve["recomputed"]) == ("12 out of 16", "11")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, ["main_res", "--audit"]),
        (["main_res", "--source", "runs"], 2, ["--source runs", "--runs"]),
        (["main_res", "--runs", "x.yaml"], 2, ["--runs", "--source"]),
        (["--audit", "--as-printed"], 2, ["--audit and --as-printed"]),
        (["main_res", "--stderr"], 2, ["--stderr"]),
        (["main_res", "--outcome", "brier"], 2, ["--outcome"]),
        (["main_res", "--source", "both", "--runs", "x.yaml", "--as-printed"], 2, ["--as-printed"]),
        (["nowhere.yaml"], 1, ["nowhere.yaml"]),
        (["main_res", "--source", "runs", "--runs", "x.yaml"], 1, ["x.yaml"]),
    ],
)
def test_invalid_commands(evalkit: Command, arguments: list[str], code: int, words: list[str]) -> None:
    complains(evalkit("table", *arguments), code, *words)


def test_a_table_is_made_without_heavy_imports(finished: Run, tmp_path: Path) -> None:
    """From the paper and from runs: without torch, transformers or pandas."""
    mapping = mapped(tmp_path, rows={"intg_125m": str(finished.folder)})
    options = ["table", "main_res", "--source", "both", "--runs", str(mapping), "--stderr"]
    assert heavy_after(f"from evalkit.cli.root import cli\ncli.main({options!r}, standalone_mode=False)") == set()
