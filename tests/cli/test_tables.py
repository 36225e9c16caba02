"""`evalkit table`, `integrity` and `export` through the real entry point; snapshots have what they print."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
import yaml

from evalkit.runs.folder import Run
from tests.cli.test_root import Command, _no_settings, complains, evalkit
from tests.tables.test_measured import altered
from tests.tables.test_row_models import loaded
from tests.test_api import heavy_after

__all__ = ["_no_settings", "evalkit"]  # fixtures


def test_a_file_is_written_whole(evalkit: Command) -> None:
    outcome = evalkit("table", "main_res", "--format", "latex", "--standalone", "-o", "main_res.tex")
    assert outcome.out == "main_res.tex\n"
    assert Path("main_res.tex").read_text(encoding="utf-8").startswith(r"\documentclass")


def test_runs_and_a_layout_of_ones_own(evalkit: Command, finished: Run) -> None:
    """The recipe of docs/tables.md."""
    layout = {
        "caption": "Mine",
        "suite": "zeroshot8",
        "rows": [{"items": {"a": "A_1 & co", "b": None}}],
        "columns": [{"items": {"piqa": None, "Average": "Avg."}}],
        "marks": {"bold": "highest in table"},
    }
    Path("my_table.yaml").write_text(yaml.safe_dump(layout, sort_keys=False), encoding="utf-8")
    Path("my_runs.yaml").write_text(yaml.safe_dump({"rows": {"a": str(finished.folder)}}), encoding="utf-8")
    command = ("table", "my_table.yaml", "--source", "runs", "--runs", "my_runs.yaml")
    shown = evalkit(*command, "--stderr").out
    results = finished.results()
    piqa = next(task for task in results.tasks if task.task == "piqa")
    assert f"{100 * piqa.accuracy:.1f}* ± {100 * (piqa.stderr or 0):.1f}" in shown
    assert f"{100 * results.average.accuracy:.1f}*" in shown
    assert r"A\_1 \& co" in evalkit(*command, "--format", "latex").out
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
    ("arguments", "words"),
    [
        ([], ["main_res", "--audit"]),
        (["main_res", "--source", "runs"], ["--source runs", "--runs"]),
        (["main_res", "--runs", "x.yaml"], ["--runs", "--source"]),
        (["--audit", "--as-printed"], ["--audit and --as-printed"]),
        (["main_res", "--stderr"], ["--stderr"]),
        (["main_res", "--source", "both", "--runs", "x.yaml", "--as-printed"], ["--as-printed"]),
    ],
)
def test_invalid_commands(evalkit: Command, arguments: list[str], words: list[str]) -> None:
    complains(evalkit("table", *arguments), 2, *words)


def test_invalid_files(evalkit: Command) -> None:
    complains(evalkit("table", "nowhere.yaml"), 1, "nowhere.yaml")
    complains(evalkit("table", "main_res", "--source", "runs", "--runs", "x.yaml"), 1, "x.yaml")


def test_a_table_is_made_without_heavy_imports(finished: Run, tmp_path: Path) -> None:
    """From the paper and from runs: without torch, transformers or pandas."""
    mapping = tmp_path / "runs.yaml"
    mapping.write_text(yaml.safe_dump({"rows": {"intg_125m": str(finished.folder)}}), encoding="utf-8")
    options = ["table", "main_res", "--source", "both", "--runs", str(mapping), "--stderr"]
    assert heavy_after(f"from evalkit.cli.root import cli\ncli.main({options!r}, standalone_mode=False)") == set()
