"""Tables from runs: the numbers are the runs', runs that do not match are rejected or marked, leads are tested."""

from __future__ import annotations

import json
import statistics
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from evalkit.benchmarks.registry import results_of
from evalkit.errors import UsageError
from evalkit.models.context.extension import Extension
from evalkit.reporting.table import Table, plain
from evalkit.runs.folder import RESULTS, SCORES, Run
from evalkit.studies.results import read_results
from evalkit.studies.tables import study_table
from evalkit.tables.fill import Number
from evalkit.tables.layout import load_layout
from evalkit.tables.measured import measure
from evalkit.tables.request import TableRequest, make
from evalkit.tables.rows import read_mapping
from tests.comparison.made import make_longbench, make_run, scores_of
from tests.printed import printed
from tests.sealed import reseal
from tests.studies.made import recorded, write_study
from tests.tables.runs import altered, lines, mapped, written

OWN: dict[str, Any] = {
    "suite": "zeroshot8",
    "marks": {"bold": "highest in table"},
    "rows": [{"items": {"one": "One", "two": "Two", "three": "Three"}}],
    "columns": [{"items": {"piqa": "PIQA", "mmlu": "MMLU"}}, {"items": {"Knowledge": "Klg.", "Average": "Avg."}}],
}


@pytest.fixture
def layout(tmp_path: Path) -> str:
    return written(tmp_path / "own.yaml", **OWN)


def numbers(layout: str, folder: Path, rule: str | None = None, **content: Any) -> dict[str, dict[str, Number]]:
    return measure(load_layout(layout), read_mapping(load_layout(layout), mapped(folder, **content)), rule).numbers


def filled(layout: str, folder: Path, source: str = "runs", *, options: Any = None, **content: Any) -> Table:
    return make(TableRequest(layout, source, mapped(folder, **content), **(options or {})))


@pytest.mark.parametrize("rule", [None, "acc_norm"])
def test_numbers_are_the_runs(layout: str, tmp_path: Path, finished: Run, rule: str | None) -> None:
    row = numbers(layout, tmp_path, rule, rows={"one": str(finished.folder)})["one"]
    results = finished.results(rule)
    expected = {task.task: (task.value, task.stderr) for task in results.tasks}
    expected |= {average.name: (average.value, average.stderr) for average in results.averages}
    assert row.keys() == expected.keys()
    for name, (accuracy, stderr) in expected.items():
        spread = row[name].spread
        assert float(row[name].value) == pytest.approx(100 * accuracy)
        assert (None if spread is None else float(spread)) == (None if stderr is None else pytest.approx(100 * stderr))


def test_rows_without_a_run_and_averages_of_fewer_tasks_are_dashes(layout: str, tmp_path: Path, finished: Run) -> None:
    folder = Path(altered(finished, tmp_path / "run"))
    results = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    for scored in results["rules"].values():
        scored["tasks"] = [task for task in scored["tasks"] if task["task"] != "piqa"]
    (folder / RESULTS).write_text(json.dumps(results), encoding="utf-8")
    reseal(folder)
    shown = lines(filled(layout, tmp_path, rows={"one": str(finished.folder), "two": str(folder)}))
    assert [[value == "-" for value in row] for row in shown.values()] == [
        [False] * 4, [True, False, True, True], [True] * 4
    ]  # fmt: skip


def test_seeds_are_averaged_with_their_deviation(layout: str, tmp_path: Path, finished: Run) -> None:
    seeds = [altered(finished, tmp_path / f"seed{n}", shift) for n, shift in enumerate((0.0, 0.1, 0.25))]
    number = numbers(layout, tmp_path, rows={"one": seeds})["one"]["piqa"]
    each = [float(numbers(layout, tmp_path, rows={"one": seed})["one"]["piqa"].value) for seed in seeds]
    assert len(set(each)) == 3
    assert float(number.value) == pytest.approx(statistics.mean(each))
    assert float(number.spread or 0) == pytest.approx(statistics.stdev(each))
    notes = filled(layout, tmp_path, rows={"one": seeds}, options={"spreads": True}).notes
    assert any("standard deviation over seeds" in plain(note) for note in notes)


def test_both_shows_the_difference_of_what_is_printed(tmp_path: Path, finished: Run) -> None:
    table = filled("main_res", tmp_path, "both", rows={"vanilla_125m": str(finished.folder)})
    published = [Fraction(value) for value in lines(make(TableRequest("main_res")))["vanilla_125m"]]
    first, second = table.sections[0].lines[:2]
    assert [Fraction(cell.value) - Fraction(cell.difference) for cell in first.cells] == published
    assert all(cell.difference == "" for cell in second.cells)


@pytest.mark.parametrize(
    ("changes", "manifest", "word"),
    [
        ({"limit": 2}, {}, "the first 2 documents of each task"),
        ({}, {"rule": "acc"}, "rule acc"),
    ],
)
def test_what_was_measured_otherwise_is_rejected_or_marked(
    layout: str, tmp_path: Path, finished: Run, changes: dict[str, Any], manifest: dict[str, Any], word: str
) -> None:
    rows = {"one": str(finished.folder), "two": altered(finished, tmp_path / "other", 0.0, manifest, **changes)}
    with pytest.raises(UsageError, match=rf"row 'two'.*{tmp_path / 'other'}.*{word}.*row 'one'.*--allow-mixed"):
        filled(layout, tmp_path, rows=rows)
    table = filled(layout, tmp_path, rows=rows, options={"mixed": True})
    letter = table.sections[0].lines[1].label[-1]
    assert letter.superscript
    [note] = [plain(note) for note in table.notes if plain(note).startswith(f"{letter.text}: ")]
    assert word in note
    if manifest:  # one rule for all makes runs of two rules alike
        of_rule = numbers(layout, tmp_path, rule="acc_norm", rows=rows)
        assert of_rule["one"] == of_rule["two"]


def test_what_no_run_measures_comes_from_a_csv(tmp_path: Path, finished: Run) -> None:
    suiteless = written(tmp_path / "suiteless.yaml", **{key: value for key, value in OWN.items() if key != "suite"})
    with pytest.raises(UsageError, match=r"row 'one': table suiteless.*values: FILE\.csv"):
        numbers(suiteless, tmp_path, rows={"one": str(finished.folder)})
    values = tmp_path / "mine.csv"
    values.write_text("model,passage_count,trec\nintg_1b,3.5,\n", encoding="utf-8")
    table = filled("app_long_contx", tmp_path, "both", values=str(values))
    assert (lines(table)["passage_count"], lines(table)["trec"]) == (["-", "-", "3.50"], ["-"] * 3)
    assert table.sections[4].lines[0].cells[2].difference == "+1.69"
    alone = filled("app_long_contx", tmp_path, values=str(values), options={"drop_empty": True})
    assert [[plain(label) for label in group.labels] for group in alone.columns] == [["Intg"]]


def test_rows_off_the_shelf_are_quoted(tmp_path: Path, finished: Run) -> None:
    """As the paper does: its own model is measured, and the others have the numbers of their reports, marked."""
    published, quoted = lines(make(TableRequest("res_intg_app"))), {"tinyllama", "cosmo"}

    def marks(table: Table) -> dict[str, str]:
        return {line.key: line.label[-1].text for line in table.lines if line.label[-1].superscript}

    rows, options = {"vanilla_1b": str(finished.folder)}, {"spreads": True, "drop_empty": True}
    table = filled("res_intg_app", tmp_path, "both", rows=rows, options=options)
    results = finished.results()
    measured = [f"{100 * task.value:.1f}" for task in (*results.tasks, results.average)]
    assert lines(table) == {key: published[key] for key in ("tinyllama", "cosmo")} | {"vanilla_1b": measured}
    for line in table.lines:
        assert [bool(cell.difference) for cell in line.cells] == [line.key not in quoted] * 9
        assert [bool(cell.spread) for cell in line.cells] == [line.key not in quoted] * 9
    assert marks(table) == {"vanilla_1b": "a"} | dict.fromkeys(quoted, "b")  # the run's documents are not official
    assert any(plain(note).startswith("b: published numbers, not measured here") for note in table.notes)
    path = write_study(tmp_path / "study.yaml", {"ours": "gone"}, {"zs": {"suite": "zeroshot8"}}, settings={})
    recorded(path, finished, {"ours on zs": "llama-1.2b-vanilla"})
    assert lines(study_table(read_results(path), TableRequest("res_intg_app", "runs"), None).table) == lines(table)
    both = rows | {"cosmo": altered(finished, tmp_path / "cosmo")}
    assert lines(filled("res_intg_app", tmp_path, rows=both)) == lines(table) | {"cosmo": measured}
    bits = filled("res_intg_app", tmp_path, rows=rows, options={"outcome": "bits_per_byte"})
    assert all(lines(bits)[key] == ["-"] * 9 for key in quoted) and not quoted & marks(bits).keys()


def test_a_table_of_longbench_says_what_was_run(tmp_path: Path) -> None:
    scores = {"trec": [0.5, 1.0], "lcc": [0.25, 0.75]}
    yarn = Extension("yarn", 8192, 2048, 4.0).specification()
    as_it_is, stretched = "no context extension", "context stretched from 2,048 to 8,192 tokens by yarn"
    runs = {words: str(make_longbench(tmp_path, scores, model=f"org/{n}", context_extension=of))
            for n, (words, of) in enumerate({as_it_is: None, stretched: yarn}.items())}  # fmt: skip
    for words, run in runs.items():
        table = filled("app_long_contx", tmp_path, rows={"vanilla_1b": run})
        assert {other: other in printed(table) for other in runs} == {other: other == words for other in runs}
        assert "YaRN" not in printed(table) and "; n = 2 of each task." in printed(table)
        assert lines(table)["trec"] == ["75.00", "-", "-"]
        both = filled("app_long_contx", tmp_path, "both", rows={"vanilla_1b": run})
        assert "YaRN" not in plain(both.caption) and any("published" in plain(note) and "YaRN" in plain(note)
                                                         for note in both.notes)  # fmt: skip
    assert all("YaRN" in plain(make(TableRequest("app_long_contx", as_printed=way)).caption) for way in (True, False))
    rows = {"vanilla_1b": runs[stretched], "intg_1b": runs[as_it_is]}
    with pytest.raises(UsageError, match=f"row 'intg_1b'.*{as_it_is}.*{stretched}.*--allow-mixed"):
        filled("app_long_contx", tmp_path, rows=rows)
    mixed = filled("app_long_contx", tmp_path, rows=rows, options={"mixed": True})
    assert f"a: {Path(runs[as_it_is]).name}: {as_it_is}, not {stretched}" in "\n".join(map(plain, mixed.notes))


@pytest.mark.parametrize("outcome", ["bits_per_byte", "margin"])
def test_a_table_of_a_continuous_outcome(finished: Run, tmp_path: Path, outcome: str) -> None:
    """Means over documents with three decimals; the best is the lowest, except of margins."""
    better = Path(altered(finished, tmp_path / "b"))
    scores = pd.read_parquet(better / SCORES)
    scores["ll_continuation"] += np.where(scores["choice"] == scores["gold"], 3.0, 0.0)
    scores.to_parquet(better / SCORES)
    reseal(better)
    rows = {"diff_125m": str(finished.folder), "intg_125m": str(better)}
    table = filled("main_res", tmp_path, rows=rows, options={"outcome": outcome, "drop_empty": True})
    key = f"margin:{finished.manifest['rule']}" if outcome == "margin" else outcome
    first, second = (line.cells for line in table.lines)
    for metric in results_of(finished).metrics(key):
        assert first[list(load_layout("main_res").measures).index(metric.task)].value == f"{metric.value:.3f}"
    for cell, other in zip(first, second, strict=True):
        difference = float(cell.value) - float(other.value)
        assert difference <= 0 if outcome == "margin" else difference >= 0
        assert (cell.bold, other.bold) == (difference == 0, True)
    assert first != second
    assert any(f"outcome {key}" in plain(note) for note in table.notes)


# Significant leads: compare's own tests, corrected over the whole table

TASKS = ("arc_easy", "piqa", "boolq")
N = 60
dice = np.random.default_rng(5)


def won(wins: int, losses: int) -> list[list[int]]:
    """Answers of two runs: so many documents only the first has right, so many only the second."""
    rest = N - wins - losses
    return [[1] * wins + [0] * losses + [1] * rest, [0] * wins + [1] * losses + [1] * rest]


def of_answers(folder: Path, model: str, clusters: list[int] | None = None, **right: list[int]) -> str:
    tables = {task: scores_of(task, answers, clusters=clusters if task == "boolq" else None)
              for task, answers in right.items()}  # fmt: skip
    return str(make_run(folder, tables, model=f"org/{model}"))


def two(folder: Path, clusters: list[int] | None = None, **pairs: list[list[int]]) -> dict[str, list[str]]:
    """Runs of rows one and two with given answers."""
    answers = {name: {task: pair[side] for task, pair in pairs.items()} for side, name in enumerate(("one", "two"))}
    return {name: [of_answers(folder, name, clusters, **right)] for name, right in answers.items()}


def leading(folder: Path, values: str | None = None, **rows: list[str]) -> set[str]:
    """The measures of which row one's lead is significant."""
    layout = written(folder / "leads.yaml", **OWN | {"columns": [{"items": dict.fromkeys(TASKS)}]})
    content = {"rows": rows} | ({"values": values} if values else {})
    table = filled(layout, folder, options={"significance": True, "rule": "acc"}, **content)
    first, *others = table.lines
    assert not any(cell.significant for line in others for cell in line.cells)
    return {task for task, cell in zip(TASKS, first.cells, strict=True) if cell.significant}


def test_holm_over_the_leads_of_the_table(tmp_path: Path) -> None:
    wins = {"arc_easy": (12, 1), "piqa": (10, 2), "boolq": (9, 3)}
    ps = [stats.binomtest(losses, wins + losses).pvalue for wins, losses in wins.values()]
    assert 3 * ps[0] < 0.05 < 2 * ps[1] and ps[1] < 0.05  # the second is significant alone, and not among three
    rows = two(tmp_path, **{task: won(*of_task) for task, of_task in wins.items()})
    assert leading(tmp_path, **rows) == {"arc_easy"}
    values = tmp_path / "mine.csv"
    values.write_text("model,piqa\ntwo,3\n", encoding="utf-8")
    assert leading(tmp_path, str(values), one=rows["one"]) == set()  # the next best is of no run
    fewer = of_answers(tmp_path, "three", **{task: won(8, 0)[1][:-1] for task in TASKS})
    with pytest.raises(UsageError, match=r"'one' and 'two'.*arc_easy"):
        leading(tmp_path, one=rows["one"], two=[fewer])


def test_documents_of_one_source_are_together_and_seeds_must_agree(tmp_path: Path) -> None:
    """Ten documents won are a lead; ten of two passages, or where one seed of three makes it, are not."""
    passages = [number // 5 * 5 for number in range(N)]
    assert leading(tmp_path, **two(tmp_path, passages, arc_easy=won(0, 0), piqa=won(10, 0), boolq=won(10, 0))) == {
        "piqa"
    }
    low = [(dice.random(N) < 0.3).astype(int).tolist() for _ in range(3)]
    high = [np.maximum(row, dice.random(N) < 0.6).astype(int).tolist() for row in low]
    behind = [of_answers(tmp_path, f"two{n}", arc_easy=row, piqa=row, boolq=row) for n, row in enumerate(low)]
    ahead = [of_answers(tmp_path, f"one{n}", arc_easy=row, piqa=low[n] if n else row, boolq=low[n])
             for n, row in enumerate(high)]  # fmt: skip
    assert leading(tmp_path, one=ahead, two=behind) == {"arc_easy"}
