"""Overview of runs in a page: its numbers are those of results.json, and hostile names are only text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from evalkit.benchmarks.registry import benchmark_of
from evalkit.pages.overview import overview_panels
from evalkit.pages.page import Panel
from evalkit.reporting.table import Cell, Table, plain
from evalkit.runs.folder import RESULTS, Run
from tests.comparison.made import finished_run
from tests.test_api import heavy_after

NAMES = ["first", "second"]
HOSTILE = "</script><img src=x onerror=alert(1)>"


def cells_of(table: Table) -> dict[str, dict[str, Cell]]:
    """Return label of the line → label of the column → cell."""
    [group] = table.columns
    return {plain(line.label): dict(zip(map(plain, group.labels), line.cells, strict=True)) for line in table.lines}


def rows_of(table: Table) -> dict[str, list[str]]:
    """Return label of the line → its other texts."""
    return {plain(line.label): [*map(plain, line.facts), *(cell.value for cell in line.cells)] for line in table.lines}


def every(panels: tuple[Panel, ...]) -> Iterator[Panel]:
    for panel in panels:
        yield panel
        yield from every(panel.panels)


def test_the_summary_has_the_numbers_of_results_json(two_runs: list[Run]) -> None:
    summary, *_ = overview_panels(two_runs, NAMES)
    assert summary.title == "2 runs of zeroshot8"
    [table] = summary.reports[0].tables
    found = cells_of(table)
    for run, name in zip(two_runs, NAMES, strict=True):
        stored = json.loads((run.folder / RESULTS).read_text(encoding="utf-8"))
        tasks = [(benchmark_of(run).label(run, task["task"]).short, task) for task in stored["tasks"]]
        for label, one in [*tasks, *((mean["name"], mean) for mean in stored["averages"])]:
            assert float(found[name][label].value) == pytest.approx(100 * one["accuracy"], abs=0.0501), label
            assert float(found[name][label].spread) == pytest.approx(100 * one["stderr"], abs=0.0501), label
    assert len(found["first"]) == 3 + 3


def test_the_best_of_each_column_is_bold_and_equal_prints_are_equal(tmp_path: Path) -> None:
    runs = [finished_run(tmp_path, "a", 0.4), finished_run(tmp_path, "b", 0.4), finished_run(tmp_path, "c", 0.9)]
    [table] = overview_panels(runs, ["a", "b", "c"])[0].reports[0].tables
    found = cells_of(table)
    for column in found["a"]:
        assert [found[name][column].bold for name in "abc"] == [False, False, True], column
    [table] = overview_panels(runs[:2], ["a", "b"])[0].reports[0].tables
    assert all(cell.bold for line in table.lines for cell in line.cells)


def test_runs_under_other_settings_are_named(tmp_path: Path) -> None:
    runs = [finished_run(tmp_path, "a"), finished_run(tmp_path, "b", dtype="bfloat16")]
    notes = overview_panels(runs, NAMES)[0].reports[0].notes
    assert "second is measured differently than first (dtype: bfloat16, not float32)" in notes[-1]
    assert not any("differently" in note for note in overview_panels([runs[0]] * 2, NAMES)[0].reports[0].notes)


def test_a_run_has_its_report_and_its_subjects(two_runs: list[Run]) -> None:
    run = two_runs[0]
    panel = overview_panels([run], ["one"])[0]
    assert panel.reports == (benchmark_of(run).report(run),)
    subjects = next(one for one in panel.panels if one.title == "Results by subject")
    [table] = subjects.reports[0].tables
    assert table.name == "mmlu"
    found, stored = rows_of(table), run.stored["subtasks"]["mmlu"]
    assert len(found) == len(stored) == 19
    for one in stored:
        n, accuracy, _ = found[one["task"].removeprefix("mmlu_")]
        assert (int(n), float(accuracy)) == (one["n"], pytest.approx(100 * one["accuracy"], abs=0.0501))


def test_how_a_run_was_made(tmp_path: Path) -> None:
    template = {
        "name": "inst",
        "description": "described",
        "system": "Be brief.",
        "parts": [{"segment": "special", "text": "[INST]"}, {"segment": "context", "text": " {context}"}],
    }
    documents = {
        task: {"official": task != "boolq", "source": f"wheel of {task}", "count": 100}
        for task in ("arc_easy", "boolq", "mmlu")
    }
    more = {
        "template": template,
        "documents": documents,
        "command": ["evalkit", "run", "a model"],
        "revision": "step5",
        "loaded": {"window": 2048, "parameters": 1234567},
        "examples": {"mmlu": {"official": True, "source": "wheel of mmlu_dev", "count": 285}},
    }
    run = finished_run(tmp_path, "org/a", manifest=more, limit=20, num_fewshot=5)
    panel = next(one for one in every(overview_panels([run], ["one"])) if one.title == "How it was made")
    settings, sources = panel.reports[0].tables
    found = {label: value for label, [value] in rows_of(settings).items()}
    expected = {
        "checkpoint": "org/a",
        "revision": "step5",
        "fingerprint of its weights": "org/a",
        "dtype": "float32",
        "context window": "2,048 tokens",
        "parameters": "1,234,567",
        "documents": "the first 20 documents of each task",
        "solved examples": "5",
        "rule": "acc",
        "template": "inst",
        "system prompt": "Be brief.",
        "command": "evalkit run 'a model'",
        "date": run.manifest["created"],
        "run": run.manifest["id"],
    }
    assert {name: found.get(name) for name in expected} == expected
    rows = rows_of(sources)
    assert rows["BoolQ*"] == ["wheel of boolq", "40", "100", "1.5"]
    assert rows["MMLU"] == ["wheel of mmlu", "57", "100", "1.5"]
    assert rows["MMLU: solved examples"] == ["wheel of mmlu_dev", "", "285", ""]
    assert panel.reports[0].notes == ("*: not the official documents of boolq",)
    assert panel.prompts == (("Template inst", (("special", "[INST]"), ("context", " {context}"))),)


def test_pages_are_made_without_a_model(two_runs: list[Run]) -> None:
    read = (
        "from evalkit.pages.overview import overview_panels\n"
        "from evalkit.pages.comparisons import comparison_panels\n"
        "from evalkit.pages.overview import figure_panels\n"
        "from evalkit.pages.provenance import sources_panel\n"
        "from evalkit.comparison.sides import sides_of\n"
        "from evalkit.runs.folder import load_run\n"
        f"runs = [load_run(folder) for folder in {[str(run.folder) for run in two_runs]!r}]\n"
        "overview_panels(runs, ['a', 'b']), comparison_panels(sides_of(runs, []))\n"
        "figure_panels(runs, ['a', 'b']), sources_panel(runs)"
    )
    assert heavy_after(read) == {"pandas"}
