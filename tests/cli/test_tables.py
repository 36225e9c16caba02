"""`evalkit table`, `integrity` and `export` through the real entry point."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
import yaml

from evalkit.runs.folder import Run
from evalkit.tables.layout import layout_names
from tests.cli.test_root import Command, _no_settings, complains, evalkit
from tests.tables.test_measured import altered
from tests.tables.test_row_models import loaded
from tests.test_api import heavy_after

__all__ = ["_no_settings", "evalkit"]  # fixtures


@pytest.mark.parametrize("form", ["terminal", "latex", "markdown", "csv", "html"])
def test_formats(evalkit: Command, form: str) -> None:
    outcome = evalkit("table", "main_res", "--format", form)
    assert outcome.code == 0
    assert "41.2" in outcome.out
    assert outcome.err == ""


def test_csv_is_one(evalkit: Command) -> None:
    rows = list(csv.DictReader(io.StringIO(evalkit("table", "main_res", "--format", "csv").out)))
    assert [row["Avg."] for row in rows if row["key"] == "intg_1b"] == ["48.9"]


def test_as_printed(evalkit: Command) -> None:
    assert "2.18*" in evalkit("table", "app_long_contx").out
    printed = evalkit("table", "app_long_contx", "--as-printed").out
    assert ("2.18*" in printed, "1.81*" in printed) == (False, True)


def test_a_file_is_written_whole(evalkit: Command) -> None:
    outcome = evalkit("table", "main_res", "--format", "latex", "--standalone", "-o", "main_res.tex")
    assert outcome.out == "main_res.tex\n"
    assert Path("main_res.tex").read_text(encoding="utf-8").startswith(r"\documentclass")
    complains(evalkit("table", "main_res", "-o", "nowhere/x.tex"), 2, "nowhere/x.tex cannot be written")


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
    outcome = evalkit("table", "my_table.yaml", "--source", "runs", "--runs", "my_runs.yaml", "--stderr")
    assert outcome.code == 0
    results = finished.results()
    piqa = next(task for task in results.tasks if task.task == "piqa")
    assert f"{100 * piqa.accuracy:.1f}* ± {100 * (piqa.stderr or 0):.1f}" in outcome.out
    assert f"{100 * results.average.accuracy:.1f}*" in outcome.out
    assert r"A\_1 \& co" in evalkit("table", "my_table.yaml", "--source", "runs", "--runs", "my_runs.yaml",
                                    "--format", "latex").out  # fmt: skip
    complains(evalkit("table", "my_table.yaml"), 2, "table my_table has no published numbers", "--source runs")


def test_runs_alone(evalkit: Command, finished: Run) -> None:
    """By folder, and by their name in results/runs; `--runs RUN RUN …` and a run of no row."""
    shape = finished.manifest["loaded"]
    runs = [
        altered(finished, Path(f"results/runs/run{place}"), 0.0, {"loaded": shape | loaded(name)})
        for place, name in enumerate(("llama-125m-intg-2s", "llama-125m-intg-4s"))
    ]
    shown = evalkit("table", "sig_abl_main", "--source", "runs", "--runs", runs[0], "run1", "--format", "csv")
    assert shown.code == 0
    [average] = [row for row in csv.reader(io.StringIO(shown.out)) if row[0] == "Average"]
    assert [cell == "-" for cell in average[2:]] == [False, False, True, True, True, True]
    begin = ("table", "sig_abl_main", "--source", "runs", "--runs")
    complains(evalkit(*begin, runs[0], finished.folder), 2, "no row of table sig_abl_main", "--runs FILE.yaml")
    complains(evalkit(*begin, runs[0], "runs.yaml"), 2, "give one YAML file, or runs alone")
    complains(evalkit(*begin, "run7"), 2, "unknown run 'run7'")
    complains(evalkit("table", "main_res", "run0"), 2, "run0: a table has one NAME; give runs after --runs")


def test_audit(evalkit: Command) -> None:
    everything = evalkit("table", "--audit").out
    assert "app_long_contx" in everything
    assert "Rounding is decimal, half up" in everything
    assert "12 out of 16" in everything
    assert "5,760" in everything
    one = evalkit("table", "backbone_abl_main", "--audit").out
    assert "app_long_contx" not in one
    assert "40.3" in one
    assert (
        "holds by the printed averages only" in evalkit("table", "backbone_abl_main", "--audit", "--format", "csv").out
    )
    rows = list(csv.DictReader(io.StringIO(evalkit("table", "app_long_contx", "--audit", "--format", "csv").out)))
    [twelve] = [row for row in rows if row["key"] == "twelve_of_sixteen"]
    assert (twelve["printed"], twelve["recomputed"]) == ("12 out of 16", "11")
    assert twelve["why"].startswith("does not follow")


def test_the_documentation_lists_what_the_audit_finds(evalkit: Command) -> None:
    page = (Path(__file__).parents[2] / "docs" / "measurements" / "paper_audit.md").read_text(encoding="utf-8")
    assert evalkit("table", "--audit", "--format", "markdown").out in page


def test_integrity_and_export(evalkit: Command, finished: Run) -> None:
    shown = evalkit("integrity", finished.folder, "--tokens", "128B", "--rule", "acc")
    assert shown.code == 0
    assert "TinyLlama: believed scored by acc_norm" in shown.out
    outcome = evalkit("export", finished.folder, "--to", "hub", "--output", "out")
    assert outcome.out.split() == ["out/model_card.md", "out/.eval_results/evalkit.yaml"]
    complains(evalkit("export", finished.folder), 2, "--to")
    complains(evalkit("export", "nowhere", "--to", "hub"), 2, "unknown run 'nowhere'")


def test_tables_are_listed(evalkit: Command) -> None:
    listed = list(csv.DictReader(io.StringIO(evalkit("ls", "tables", "--format", "csv").out)))
    assert [row["table"] for row in listed] == layout_names()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["table"], ["name a table", "main_res", "--audit"]),
        (["table", "main_rse"], ["unknown table 'main_rse'", "did you mean 'main_res'"]),
        (["table", "main_res", "--source", "runs"], ["--source runs needs --runs FILE.yaml"]),
        (["table", "main_res", "--runs", "x.yaml"], ["--runs is for --source runs or both"]),
        (["table", "--audit", "--as-printed"], ["--audit and --as-printed"]),
        (["table", "main_res", "--stderr"], ["--stderr is for numbers of runs"]),
        (["table", "main_res", "--source", "paper"], ["--source", "'paper'"]),
        (["table", "main_res", "--source", "both", "--runs", "x.yaml", "--as-printed"], ["--as-printed"]),
    ],
)
def test_invalid_commands(evalkit: Command, arguments: list[str], words: list[str]) -> None:
    complains(evalkit(*arguments), 2, *words)


def test_invalid_files(evalkit: Command) -> None:
    complains(evalkit("table", "nowhere.yaml"), 1, "layout nowhere.yaml cannot be read")
    complains(evalkit("table", "main_res", "--source", "runs", "--runs", "x.yaml"), 1, "x.yaml cannot be read")


def test_a_table_is_made_without_heavy_imports(finished: Run, tmp_path: Path) -> None:
    """From the paper and from runs: without torch, transformers or pandas."""
    mapping = tmp_path / "runs.yaml"
    mapping.write_text(yaml.safe_dump({"rows": {"intg_125m": str(finished.folder)}}), encoding="utf-8")
    options = ["table", "main_res", "--source", "both", "--runs", str(mapping), "--stderr"]
    assert heavy_after(f"from evalkit.cli.root import cli\ncli.main({options!r}, standalone_mode=False)") == set()
