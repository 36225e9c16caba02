"""Tables filled from run folders: the numbers are the runs', and runs that do not match are rejected by name."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import statistics
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml

from evalkit.errors import EvalkitError, RunError, TableError, UnknownNameError, UsageError
from evalkit.reporting.table import Table, plain
from evalkit.runs.folder import RESULTS, Run, load_run, specification_id
from evalkit.tables.layout import load_layout
from evalkit.tables.measured import Measured, measure, read_mapping
from evalkit.tables.request import TableRequest, make
from tests.printed import printed
from tests.sealed import reseal

OWN = {
    "suite": "zeroshot8",
    "marks": {"bold": "highest in table"},
    "rows": [{"items": {"one": "One", "two": "Two", "three": "Three"}}],
    "columns": [{"items": {"piqa": "PIQA", "mmlu": "MMLU"}}, {"items": {"Knowledge": "Klg.", "Average": "Avg."}}],
}


@pytest.fixture
def layout(tmp_path: Path) -> str:
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(OWN, sort_keys=False), encoding="utf-8")
    return str(path)


def mapped(folder: Path, **content: Any) -> Path:
    path = folder / "mapping.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def altered(
    run: Run, folder: Path, shift: float = 0.0, manifest: dict[str, Any] | None = None, **specification: Any
) -> str:
    """A copy of a run of another specification, its accuracies higher by `shift`; the path as a user writes it."""
    shutil.copytree(run.folder, folder)
    content = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    content["specification"] |= {"checkpoint": {"weights": folder.name}} | specification
    content |= {"id": specification_id(content["specification"])} | (manifest or {})
    (folder / "manifest.json").write_text(json.dumps(content), encoding="utf-8")
    results = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    for scored in results["rules"].values():
        for task in scored["tasks"]:
            task["accuracy"] = min(1.0, task["accuracy"] + shift)
    (folder / RESULTS).write_text(json.dumps(results), encoding="utf-8")
    reseal(folder)
    return str(folder)


def measured(layout: str, folder: Path, rule: str | None = None, mixed: bool = False, **content: Any) -> Measured:
    return measure(load_layout(layout), read_mapping(mapped(folder, **content)), rule, mixed)


def lines(table: Table) -> dict[str, list[str]]:
    return {line.key: [cell.value for cell in line.cells] for section in table.sections for line in section.lines}


@pytest.mark.parametrize("rule", [None, "acc", "acc_norm"])
def test_numbers_are_the_runs(layout: str, tmp_path: Path, finished: Run, rule: str | None) -> None:
    found = measured(layout, tmp_path, rule, rows={"one": str(finished.folder)}).numbers["one"]
    results = finished.results(rule)
    expected = {task.task: (task.accuracy, task.stderr) for task in results.tasks}
    expected |= {average.name: (average.accuracy, average.stderr) for average in results.averages}
    assert found.keys() == expected.keys()
    for name, (accuracy, stderr) in expected.items():
        assert float(found[name].value) == pytest.approx(100 * accuracy)
        spread = found[name].spread
        assert (spread is None) == (stderr is None)
        assert stderr is None or float(spread or 0) == pytest.approx(100 * stderr)


def test_rows_without_a_run_are_dashes(layout: str, tmp_path: Path, finished: Run) -> None:
    path = mapped(tmp_path, rows={"one": str(finished.folder)})
    shown = lines(make(TableRequest(layout, "runs", path)))
    assert shown["two"] == shown["three"] == ["-"] * 4
    assert "-" not in shown["one"]


def test_an_average_of_fewer_tasks_is_a_dash(layout: str, tmp_path: Path, finished: Run) -> None:
    folder = Path(altered(finished, tmp_path / "run"))
    results = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    for scored in results["rules"].values():
        scored["tasks"] = [task for task in scored["tasks"] if task["task"] != "piqa"]
    (folder / RESULTS).write_text(json.dumps(results), encoding="utf-8")
    reseal(folder)
    shown = lines(make(TableRequest(layout, "runs", mapped(tmp_path, rows={"one": str(folder)}))))["one"]
    assert shown[0] == shown[2] == shown[3] == "-"
    assert shown[1] != "-"


def test_seeds_are_averaged_with_their_deviation(layout: str, tmp_path: Path, finished: Run) -> None:
    seeds = [altered(finished, tmp_path / f"seed{n}", shift) for n, shift in enumerate((0.0, 0.1, 0.25))]
    found = measured(layout, tmp_path, rows={"one": seeds}).numbers["one"]
    each = [float(measured(layout, tmp_path, rows={"one": seed}).numbers["one"]["piqa"].value) for seed in seeds]
    assert len(set(each)) == 3
    assert float(found["piqa"].value) == pytest.approx(statistics.mean(each))
    assert float(found["piqa"].spread or 0) == pytest.approx(statistics.stdev(each))
    table = make(TableRequest(layout, "runs", mapped(tmp_path, rows={"one": seeds}), spreads=True))
    assert any("standard deviation over seeds" in plain(note) for note in table.notes)
    with pytest.raises(UsageError, match="row 'one': two runs are of one checkpoint"):
        measured(layout, tmp_path, rows={"one": [seeds[0], seeds[0]]})
    checkpoint = finished.manifest["specification"]["checkpoint"]
    again = altered(finished, tmp_path / "again", dtype="bfloat16", checkpoint=checkpoint)
    with pytest.raises(UsageError, match="row 'one': two runs are of one checkpoint"):
        measured(layout, tmp_path, rows={"one": [str(finished.folder), again]})


def test_both_shows_the_difference_of_what_is_printed(tmp_path: Path, finished: Run) -> None:
    path = mapped(tmp_path, rows={"vanilla_125m": str(finished.folder)})
    table = make(TableRequest("main_res", "both", path))
    cells = table.sections[0].lines[0].cells
    for cell, published in zip(
        cells, ("51.3", "44.3", "24.7", "29.7", "62.8", "23.8", "57.1", "24.9", "39.8"), strict=True
    ):
        assert Fraction(cell.value) - Fraction(published) == Fraction(cell.difference)
        assert cell.difference[0] in "+-"
    assert all(cell.difference == "" for cell in table.sections[0].lines[1].cells)


@pytest.mark.parametrize(
    ("changes", "manifest", "word"),
    [
        ({"limit": 2}, {}, "the first 2 documents of each task"),
        ({"num_fewshot": 3}, {}, "3-shot"),
        ({"documents": {"piqa": "0" * 64}}, {}, "documents of piqa 000000000000"),
        ({"template": "0" * 64}, {}, "template's text 000000000000"),
        ({}, {"rule": "acc"}, "rule acc"),
    ],
)
def test_what_was_measured_otherwise_is_rejected_or_marked(
    layout: str, tmp_path: Path, finished: Run, changes: dict[str, Any], manifest: dict[str, Any], word: str
) -> None:
    rows = {"one": str(finished.folder), "two": altered(finished, tmp_path / "other", 0.0, manifest, **changes)}
    with pytest.raises(UsageError) as caught:
        measured(layout, tmp_path, rows=rows)
    for part in ("row 'two'", str(tmp_path / "other"), "row 'one'", word, "--allow-mixed"):
        assert part in str(caught.value)
    found = measured(layout, tmp_path, mixed=True, rows=rows)
    [note] = [plain(note) for note in found.notes if plain(note).startswith(f"{found.row_marks['two']}: ")]
    assert word in note
    label = make(TableRequest(layout, "runs", mapped(tmp_path, rows=rows), mixed=True)).sections[0].lines[1].label
    assert label[-1] == (found.row_marks["two"], False, False, False, False, True)


def test_one_rule_for_all_makes_runs_of_two_rules_alike(layout: str, tmp_path: Path, finished: Run) -> None:
    rows = {"one": str(finished.folder), "two": altered(finished, tmp_path / "other", 0.0, {"rule": "acc"})}
    found = measured(layout, tmp_path, rule="acc_norm", rows=rows)
    assert found.rule == "acc_norm"
    assert found.numbers["one"] == found.numbers["two"]


def test_unofficial_documents_are_said(layout: str, tmp_path: Path, finished: Run) -> None:
    found = measured(layout, tmp_path, rows={"one": str(finished.folder)})
    assert any("not the official documents of winogrande" in plain(note) for note in found.notes)
    assert found.row_marks == {"one": "a"}
    table = make(TableRequest(layout, "runs", mapped(tmp_path, rows={"one": str(finished.folder)})))
    for form in ("csv", "terminal", "markdown", "html", "latex"):
        said = printed(table, form).replace(r"\_", "_")
        assert "not the official documents of winogrande" in said, form
        assert re.search(r"One( \[a]|(<sup>|\\textsuperscript{)a[<}])", said), form
    rows = list(csv.reader(io.StringIO(printed(table, "csv"))))
    assert {len(row) for row in rows} == {len(rows[0])}
    assert [row[0] for row in rows] == ["key", "one", "two", "three", "note", "note"]


def test_invalid_runs(layout: str, tmp_path: Path, finished: Run) -> None:
    begun = Path(altered(finished, tmp_path / "begun"))
    (begun / RESULTS).unlink()
    with pytest.raises(RunError, match=r"row 'one': run .*begun is not finished"):
        measured(layout, tmp_path, rows={"one": str(begun)})
    with pytest.raises(UsageError, match="row 'one': unknown run 'nowhere'"):
        measured(layout, tmp_path, rows={"one": "nowhere"})
    with pytest.raises(UnknownNameError, match=r"unknown row of table own 'oen': did you mean 'one'"):
        measured(layout, tmp_path, rows={"oen": str(finished.folder)})
    with pytest.raises(UnknownNameError, match=r"unknown rule of run .* 'acc_nrom': did you mean 'acc_norm'"):
        measured(layout, tmp_path, rule="acc_nrom", rows={"one": str(finished.folder)})
    other = altered(finished, tmp_path / "other", suite="zeroshot9")
    with pytest.raises(UsageError, match=r"row 'one': run .*other is of suite zeroshot9, but table own"):
        measured(layout, tmp_path, rows={"one": other})


def test_the_other_reading_of_mmlu_fills_its_column_under_a_note(finished: Run, tmp_path: Path) -> None:
    other = Path(altered(finished, tmp_path / "other", suite="zeroshot8_text"))
    manifest = (other / "manifest.json").read_text(encoding="utf-8")
    results = (other / RESULTS).read_text(encoding="utf-8")
    (other / "manifest.json").write_text(manifest.replace('"mmlu"', '"mmlu_continuation"'), encoding="utf-8")
    (other / RESULTS).write_text(results.replace('"mmlu"', '"mmlu_continuation"'), encoding="utf-8")
    content = json.loads((other / "manifest.json").read_text(encoding="utf-8"))
    content["id"] = specification_id(content["specification"])
    (other / "manifest.json").write_text(json.dumps(content), encoding="utf-8")
    reseal(other)
    rows = {"vanilla_125m": str(finished.folder), "intg_125m": str(other)}
    found = measured("main_res", tmp_path, rows=rows)
    assert found.numbers["intg_125m"]["mmlu"] == found.numbers["vanilla_125m"]["mmlu"]
    assert any("MMLU (text) in the column of MMLU" in str(note) for note in found.notes)


def test_what_no_run_measures_comes_from_a_csv(tmp_path: Path, finished: Run) -> None:
    own = tmp_path / "suiteless.yaml"
    own.write_text(yaml.safe_dump({key: value for key, value in OWN.items() if key != "suite"}), encoding="utf-8")
    with pytest.raises(UsageError, match=r"row 'one': table suiteless shows .*values: FILE\.csv"):
        measured(str(own), tmp_path, rows={"one": str(finished.folder)})
    values = tmp_path / "mine.csv"
    values.write_text("model,passage_count,trec\nintg_1b,3.5,\n", encoding="utf-8")
    path = mapped(tmp_path, values=str(values))
    shown = lines(make(TableRequest("app_long_contx", "both", path)))
    assert shown["passage_count"] == ["-", "-", "3.50"]
    assert shown["trec"] == ["-", "-", "-"]
    assert make(TableRequest("app_long_contx", "both", path)).sections[4].lines[0].cells[2].difference == "+1.69"
    for text, word in (("model,passage_cuont\nintg_1b,1\n", "passage_cuont"), ("model,trec\nme,1\n", "'me'"),
                       ("model,trec\nintg_1b,x\n", "'x' is not a number")):  # fmt: skip
        values.write_text(text, encoding="utf-8")
        with pytest.raises(EvalkitError, match=word):
            make(TableRequest("app_long_contx", "runs", path))


def test_averages_are_never_given(tmp_path: Path, layout: str) -> None:
    values = tmp_path / "mine.csv"
    values.write_text("model,piqa,Average\none,1,2\n", encoding="utf-8")
    with pytest.raises(TableError, match="averages are computed"):
        measured(layout, tmp_path, values=str(values))


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("rows: [a]", "'rows' is "),
        ("rows: {one: []}", r"'rows\.one' is "),
        ("rows: {one: 3}", r"'rows\.one' is "),
        ("rows: {one: [a, '']}", r"'rows\.one\[1\]' is "),
        ("row: {one: a}", "unknown key 'row': did you mean 'rows'"),
        ("rule: acc", "must have 'rows', of models and their run folders, or 'values'"),
        ("- a", "valid dictionary"),
        ("rows: {}\nruels: acc", "unknown key 'ruels': did you mean 'rule'"),
        ("rows: {", "line 1: not valid YAML"),
        ("rows: ''\nrule: acc", "'rows' is "),
        ("rows: {}\nrule: ''", "'rule' is "),
        ("values: 2.5", "'values' is "),
    ],
)
def test_invalid_mappings(tmp_path: Path, content: str, word: str) -> None:
    path = tmp_path / "mapping.yaml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(TableError, match=word):
        read_mapping(path)


@pytest.mark.parametrize("content", ['values: "a\\0b.csv"', 'rows: {one: "a\\0b"}', 'rows: {one: [a, "a\\0b"]}'])
def test_paths_of_mappings_that_no_file_has(tmp_path: Path, content: str) -> None:
    path = tmp_path / "mapping.yaml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=rf"^mapping of runs {path}.* holds a NUL character$"):
        read_mapping(path)


# Significance


def test_a_clear_lead_is_marked_and_a_small_one_is_not(layout: str, tmp_path: Path, finished: Run) -> None:
    """With p-values put in the place of the test: only the best number, only where p is below 0.05."""
    rows = {"one": altered(finished, tmp_path / "a", 0.2), "two": str(finished.folder)}
    path = mapped(tmp_path, rows=rows)
    for p, expected in ((0.001, True), (0.2, False)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("evalkit.tables.row_models.p_value", lambda *_, p=p: p)
            table = make(TableRequest(layout, "runs", path, significance=True))
        leads = {line.key: [cell.significant for cell in line.cells] for line in table.sections[0].lines}
        assert leads == {"one": [expected] * 4, "two": [False] * 4, "three": [False] * 4}
    assert load_run(rows["one"]).manifest["id"] != finished.manifest["id"]
