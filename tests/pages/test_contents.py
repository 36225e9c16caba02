"""What a page of runs says: its numbers are those of results.json, `compare`, the rules and the score tables.

Of blocks of documents the tests read the documented layout themselves.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

import evalkit
from evalkit.attention.results import HEADS
from evalkit.benchmarks.registry import results_of
from evalkit.comparison.curves import curve
from evalkit.comparison.sides import Side, sides_of
from evalkit.errors import RunError
from evalkit.models.loading.locate import silent
from evalkit.pages.documents import ABSENT, document_data, encoded
from evalkit.pages.overview import figure_panels, result_panels
from evalkit.pages.page import Panel
from evalkit.pages.report import PageContents, comparison_panels, contents_of_runs, curve_panel, write_report
from evalkit.pages.tables import PageBenchmark, benchmark_report
from evalkit.reporting.table import Cell, Table, plain
from evalkit.runs.accuracies import available_rules
from evalkit.runs.folder import RESULTS, SCORES, Run, load_run
from evalkit.runs.rules import decide, find_rule, row_scores
from evalkit.runs.score_table import SEGMENTS
from tests.attention.made import made_run as made_analysis
from tests.comparison.made import compared, finished_run, make_longbench
from tests.sealed import specification, write_run

NAMES = ["first", "second"]
HOSTILE = "</script><img src=x>"
DIRECTION = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def cells(table: Table) -> dict[str, dict[str, Cell]]:
    """Label of the line → label of the column → cell."""
    [group] = table.columns
    return {plain(line.label): dict(zip(map(plain, group.labels), line.cells, strict=True)) for line in table.lines}


def texts(table: Table) -> dict[str, list[str]]:
    """Label of the line → its other texts."""
    return {plain(line.label): [*map(plain, line.facts), *(cell.value for cell in line.cells)] for line in table.lines}


def needles(root: Path, text: str, secrets: Sequence[str] = ("11", "12"), model: str = "") -> Run:
    """A finished needle test of two cases, both answered with the first secret."""
    lengths = (1000, 23456)
    about = specification(model := model or f"org/{text}", suite="needle", text=text)
    source = {"official": None, "source": text, "count": 1, "total": 1}
    manifest = {"kind": "needle", "specification": about, "rule": "needle", "groups": {}, "group_sizes": {},
                "documents": {f"needle@{length}": source for length in lengths},
                "template": {"name": "plain"},
                "model": model}  # fmt: skip
    scores = [{"score": score, "choice": 1.0, "bits_per_byte": 0.5} for score in (1.0, 0.25)]
    errors = dict.fromkeys(("stderr", "choice_stderr", "bits_stderr"))
    scale = {"metric": "score", "unit": "fraction", "higher_is_better": True}
    tasks = [{"task": f"needle@{length}", "n": 1, "chance": 0.125, "length": length, **scale, **errors, **of_length,
              "value": of_length["score"]} for length, of_length in zip(lengths, scores, strict=True)]  # fmt: skip
    results = {"tasks": tasks, "averages": [], "effective": {"length": 1000, "low": None, "high": None}}
    table = pd.DataFrame(scores).assign(
        task=[f"needle@{length}" for length in lengths], length=lengths, id="0", source="0", depth=50.0,
        references=[f'["{secret}"]' for secret in secrets], answer=secrets[0], ended="end", tokens=90, new_tokens=5,
        seconds=0.5)  # fmt: skip
    return load_run(write_run(root, manifest, results, {"answers.parquet": table}))


# Overview and figures


def panels_of(runs: list[Run], names: list[str]) -> tuple[list[Panel], list[Panel]]:
    """The panels of the results of runs of one suite, and of single runs."""
    [benchmark] = contents_of_runs(runs, given_names=names).benchmarks
    return result_panels(benchmark, 1)


def test_the_summary_and_each_run_are_results_json(two_runs: list[Run]) -> None:
    [summary], [folded] = panels_of(two_runs, NAMES)
    [table], of_runs = summary.reports[0].tables, folded.panels
    for run, name, panel in zip(two_runs, NAMES, of_runs, strict=True):
        stored = json.loads((run.folder / RESULTS).read_text(encoding="utf-8"))
        by_label = {results_of(run).label(task["task"]).short: task for task in stored["tasks"]}
        by_label |= {average["name"]: average for average in stored["averages"]}
        assert len(by_label) == len(cells(table)[name]) == 6
        for label, result in by_label.items():
            cell = cells(table)[name][label]
            expected = pytest.approx((100 * result["value"], 100 * result["stderr"]), abs=0.0501)
            assert (float(cell.value), float(cell.spread)) == expected, label
        assert panel.reports == (results_of(run).report(),)
        subjects, *_ = panel.panels[0].reports[0].tables
        for subject in run.stored["subtasks"]["mmlu"]:
            n, accuracy, _ = texts(subjects)[subject["task"].removeprefix("mmlu_")]
            assert (int(n), float(accuracy)) == (subject["n"], pytest.approx(100 * subject["value"], abs=0.0501))


def test_the_best_is_bold_among_runs_that_are_measured_alike(tmp_path: Path) -> None:
    a, b, c = (finished_run(tmp_path, name, share, seed=5) for name, share in (("a", 0.4), ("b", 0.9), ("c", 0.4)))
    other = finished_run(tmp_path, "other", 0.95, dtype="bfloat16")
    documents = finished_run(tmp_path, "documents", 0.95, documents={"arc_easy": "another hash"})
    for runs, bold in (
        ([a, b], "b"), ([a, c], ""), ([a, other, b, documents], "b"), ([a, b, c], "b"), ([a, other, c], ""),
        ([b, other], ""),
    ):  # fmt: skip
        [benchmark] = contents_of_runs(runs, given_names=[run.model for run in runs]).benchmarks
        report = benchmark_report(benchmark)
        [table], notes = report.tables, report.notes
        for column in zip(*(line.cells for line in table.lines), strict=True):
            assert [run.model for run, cell in zip(runs, column, strict=True) if cell.bold] == list(bold)
        assert any(note.startswith("bold") for note in notes) == bool(bold)
        differing = [note.partition(" ")[0] for note in notes if "none of its numbers is bold" in note]
        assert differing == [run.model for run in runs if run in (other, documents)]
    assert "bfloat16, not float32" in notes[-1] and notes[0].startswith("all documents; n: ")


def test_own_rules_that_differ_are_compared_under_one_that_both_support(tmp_path: Path) -> None:
    """As by `compare`, with a note; the numbers under different rules have no best."""
    a = finished_run(tmp_path, "a", 0.4, seed=5)
    b = finished_run(tmp_path, "b", 0.9, seed=6, manifest={"rule": "acc_norm"})
    [benchmark] = contents_of_runs([a, b], given_names=["a", "b"]).benchmarks
    report = benchmark_report(benchmark)
    assert not any(cell.bold for line in report.tables[0].lines for cell in line.cells)
    assert "b is not measured as a" in report.notes[-1] and "rule: acc_norm, not acc" in report.notes[-1]
    [panel], expected = comparison_panels(benchmark.sides, benchmark.rule), compared(a, b, rule="acc")
    shown = texts(panel.reports[0].tables[0])
    for task in expected.tasks:
        difference = next(
            cells[3] for label, cells in shown.items() if label.startswith(expected.labels[task.name].full)
        )
        assert float(difference) == pytest.approx(100 * task.difference, abs=0.051)
    assert any("own rules differ: acc, acc_norm" in note for note in panel.reports[0].notes)
    assert any(note.startswith("rule acc: ") for note in panel.reports[0].notes)


def drawn(svg: str) -> set[str]:
    """The texts of a figure."""
    assert "<img" not in svg and "<script" not in svg
    return {(element.text or "").strip() for element in ElementTree.fromstring(svg).iter()}


def test_a_figure_that_cannot_be_drawn_is_named(tmp_path: Path) -> None:
    broken = made_analysis(tmp_path, "models/vanilla", tokens=(65, 150))
    (broken.folder / HEADS).write_bytes(b"")
    attention, needle = figure_panels([broken, needles(tmp_path, "essays")], ["broken", HOSTILE])
    assert attention.figures == () and "cannot be drawn" in attention.reports[0].notes[0]
    assert {"1,000", "23,456", "100", "25"} <= drawn(needle.figures[1].svg)


def test_seeds_share_a_line_and_a_figure_of_zeros_is_named(tmp_path: Path) -> None:
    runs = [made_analysis(tmp_path, f"models/{name}", groups=("negative", "entropy"), unsigned=True) for name in "abc"]
    [panel] = figure_panels(runs, ["x seed 1", "x seed 2", "y"], ["x", "x", "y"])
    assert [figure.name.rpartition("-")[2] for figure in panel.figures] == ["entropy"]
    assert {"x (2 seeds)", "y"} <= drawn(panel.figures[0].svg)
    assert [*panel.reports[0].notes] == ["negative: not drawn, no run has negative weights on BOS"]


# Comparisons


def agreement(panel: Panel) -> dict[str, list[int]]:
    [inner] = [inner for inner in panel.panels if inner.title == "Agreement by document"]
    return {label: list(map(int, row)) for label, row in texts(inner.reports[0].tables[0]).items()}


@pytest.mark.parametrize("rule", ["acc", "acc_norm"])
def test_agreement_is_a_group_by_of_the_score_tables(two_runs: list[Run], rule: str) -> None:
    [panel] = comparison_panels(sides_of(two_runs, []), rule)
    keys, right = ["task", "subtask", "doc_id"], []
    for run in two_runs:
        value = run.scores["ll_continuation"] / (run.scores["chars"] if rule == "acc_norm" else 1)
        best = run.scores.loc[run.scores.assign(value=value).groupby(keys)["value"].idxmax()]
        right.append(best.set_index(keys)["choice"] == 0)
    for task, label in (("arc_easy", "ARC-Easy"), ("boolq", "BoolQ"), ("mmlu", "MMLU")):
        a, b = (of_run[task] for of_run in right)
        counts = [(a & b).sum(), (a & ~b).sum(), (~a & b).sum(), (~a & ~b).sum()]
        assert agreement(panel)[label] == [len(a), *counts]


def test_comparisons_and_curves(tmp_path: Path) -> None:
    graded = [load_run(make_longbench(tmp_path, {"qasper": scores}, model=name))
              for name, scores in (("a", [0.1, 0.5, 0.9, 0.2]), ("b", [0.3, 0.5, 0.1, 0.2]))]  # fmt: skip
    [panel] = comparison_panels(sides_of(graded, []))
    assert agreement(panel) == {"Qasper": [4, 1, 2, 1]}
    runs = [finished_run(tmp_path, f"org/step{step}", step / 400, seed=step) for step in (100, 200, 300)]
    [groups] = comparison_panels([Side("old", tuple(runs[:1])), Side("new", tuple(runs[1:]))])
    assert [inner.title for inner in groups.panels] == ["MMLU by subject"]
    [figure] = curve_panel([curve(Side("training", tuple(runs)))]).figures
    assert {"ARC-Easy", "BoolQ", "MMLU", "Average"} <= drawn(figure.svg)


def test_sides_that_cannot_be_compared_are_explained(tmp_path: Path) -> None:
    other = {task: f"another hash of {task}" for task in ("arc_easy", "boolq", "mmlu")}
    runs = [
        finished_run(tmp_path, "org/a"),
        load_run(make_longbench(tmp_path, {"qasper": [0.1, 0.5]})),
        finished_run(tmp_path, "org/others", documents=other),
        finished_run(tmp_path, "org/damaged", seed=3),
        finished_run(tmp_path, "org/paired", seed=2),
    ]
    (runs[3].folder / SCORES).write_bytes(b"")
    damaged = [*runs[:3], load_run(runs[3].folder), runs[4]]
    *refused, paired = comparison_panels(sides_of(damaged, []))
    for panel, noun in zip(refused, ("zeroshot8", "content hash", "is damaged"), strict=True):
        [sentence] = panel.reports[0].facts
        assert "is not compared with a: " in sentence and noun in sentence and panel.figures == ()
    assert paired.figures


# Documents


def decoded(block: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Header and arrays of a block, by its description."""
    data = gzip.decompress(base64.b64decode(block))
    size = int.from_bytes(data[:4], "little")
    header, body = json.loads(data[4 : 4 + size]), data[4 + size :]
    arrays = {}
    for name, (kind, offset, count) in header.pop("arrays").items():
        assert offset % 8 == (4 + size) % 8 == 0
        arrays[name] = np.frombuffer(body, f"<{kind}", count, offset)
    return header, arrays


@given(
    st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=4).filter(
        lambda header: "arrays" not in header
    ),
    arrays_of.arrays(np.float32, arrays_of.array_shapes(max_dims=2, max_side=7)),
    st.lists(st.integers(0, 255), max_size=9),
)
def test_blocks_are_read_back(header: dict[str, str], floats: np.ndarray, small: list[int]) -> None:
    contents, arrays = decoded(encoded(header, {"f": ("f4", floats), "u": ("u1", np.array(small, int))}))

    def shown(text: str) -> str:
        return DIRECTION.sub(lambda part: f"\\u{ord(part[0]):04x}", text.encode("utf-8", "replace").decode())

    assert contents == {shown(key): shown(text) for key, text in header.items()}
    np.testing.assert_array_equal(arrays["f"], floats.ravel())
    assert arrays["u"].tolist() == small
    with pytest.raises(OverflowError, match="gold"):
        encoded({}, {"gold": ("u1", np.array([256 + len(small)]))})


Data = dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]


def data_of(runs: list[Run], **options: Any) -> Data:
    """Task → its entry in the index, header and arrays."""
    data = document_data(runs, [f"run {number}" for number in range(len(runs))], silent, **options)
    return {entry["task"]: (entry, *decoded(data.blocks[entry["block"]])) for entry in data.index["tasks"]}


def margins(scores: Any, values: np.ndarray) -> list[float]:
    """Score of the gold choice less the best other."""
    by_document = []
    for _, rows in scores.assign(value=values).groupby(["subtask", "doc_id"], sort=False):
        gold = rows["choice"] == rows["gold"]
        by_document.append(float(rows["value"][gold].iloc[0] - rows["value"][~gold].max()))
    return by_document


def test_decisions_and_scores_are_the_rules_own(two_runs: list[Run]) -> None:
    for task, (entry, _, arrays) in data_of(two_runs).items():
        for number, run in enumerate(two_runs):
            scores = run.scores[run.scores["task"] == task].reset_index(drop=True)
            assert entry["rules"] == list(available_rules(run.scores))
            for rule in entry["rules"]:
                decided = decide(scores, find_rule(rule))
                assert arrays[f"{number}/{rule}/prediction"].tolist() == decided["prediction"].tolist()
                assert arrays[f"{number}/{rule}/tie"].astype(bool).tolist() == decided["tie"].tolist()
                expected = margins(scores, row_scores(scores, find_rule(rule)))
                np.testing.assert_allclose(arrays[f"{number}/{rule}/margin"], expected, rtol=2**-23)
                assert (np.sign(arrays[f"{number}/{rule}/margin"]) == np.sign(expected)).all()
            for name, kind in (("ll", np.float32), ("n", np.int32)):
                columns = scores[[f"{name}_{segment}" for segment in SEGMENTS]].to_numpy(kind)
                np.testing.assert_array_equal(arrays[f"{number}/{name}"], columns.ravel())


def test_runs_of_other_documents(tmp_path: Path) -> None:
    """Of other limits they share their documents, in the order of the first run; of other content they are apart."""
    short, whole = finished_run(tmp_path, "org/short", first=7), finished_run(tmp_path, "org/whole")
    for task, (entry, header, arrays) in data_of([short, whole]).items():
        decided = decide(whole.scores[whole.scores["task"] == task].reset_index(drop=True), find_rule("ppl"))
        assert entry["documents"] == entry["of"] == len(decided)
        missing = arrays["0/ppl/prediction"] == ABSENT
        assert missing.sum() == len(decided) - 7 and np.isnan(arrays["0/ppl/margin"][missing]).all()
        expected = decided.set_index(["subtask", "doc_id"])["prediction"]
        names = zip((entry["subtasks"][number] for number in arrays["subtask"]), header["ids"], strict=True)
        assert [expected[name] for name in names] == arrays["1/ppl/prediction"].tolist()
    other = finished_run(tmp_path, "org/other")
    rows = (other.scores["task"] == "boolq") & (other.scores["doc_id"] == 3)
    other.scores.loc[rows, "gold"] = 1 - other.scores.loc[rows, "gold"]
    with pytest.raises(RunError, match=r"other.*gold.*boolq document 3.*whole"):
        data_of([whole, other])
    # Each answer is beside the secret of its own text
    secrets = (["11", "12"], ["21", "22"])
    by_task = data_of([needles(tmp_path, text, own) for text, own in zip(("essays", "laws"), secrets, strict=True)])
    answered = []
    for _, header, _ in by_task.values():
        [of_run] = header["runs"].values()
        answered.append((*header["references"], *of_run["answers"]))
    assert sorted(answered) == [([secret], own[0]) for own in secrets for secret in own]


def test_prompts_are_the_texts_that_were_scored(checkpoint: Path, documents: Path, tmp_path: Path) -> None:
    """A prompt for each of two templates, of real documents."""
    runs = [
        evalkit.evaluate(checkpoint, tasks=("winogrande", "boolq", "mmlu"), template=template, data_dir=documents,
                         allow_unofficial_data=True, output=tmp_path, progress=evalkit.Progress(live=False))
        for template in ("inst", "plain")
    ]  # fmt: skip
    for task, (entry, header, arrays) in data_of(runs).items():
        assert [prompt["runs"] for prompt in header["prompts"]] == [[0], [1]]
        for prompt, run in zip(header["prompts"], runs, strict=True):
            [view] = results_of(run).views((task,), silent)
            for number, subtask in enumerate(arrays["subtask"]):
                text = view.texts[entry["subtasks"][subtask], header["ids"][number]]  # type: ignore[union-attr]
                choices = prompt["choices"][number]
                of_view = (text.common, *text.choices)
                for pieces, scored in zip((prompt["common"][number], *choices), of_view, strict=True):
                    assert [(SEGMENTS[segment], words) for segment, words in pieces] == list(map(tuple, scored))
                # Options that no continuation shows are given
                shown = header["options"][number] or [
                    "".join(words for segment, words in pieces if SEGMENTS[segment] == "continuation").strip()
                    for pieces in choices
                ]
                assert shown == [option.strip() for option in text.options]


@pytest.mark.slow
def test_two_analyses_of_a_model_are_no_seeds(tmp_path: Path) -> None:
    """Of two benchmarks of a study, whose sides have the same name, figures show a line each."""

    def figures(*benchmarks: PageBenchmark) -> str:
        write_report(PageContents(benchmarks), tmp_path / "page.html", print, with_documents=False)
        content = (tmp_path / "page.html").read_text(encoding="utf-8")
        return "".join(b64decode(coded).decode() for coded in re.findall(r"svg\+xml;base64,([\w+/=]+)", content))

    runs = tuple(made_analysis(tmp_path / name, f"models/{name}", seed=seed) for seed, name in enumerate("ab"))
    apart = [PageBenchmark(f"text {n}", (Side("model", (run,), ("",)),), (f"model {n}",)) for n, run in enumerate(runs)]
    together = PageBenchmark("text", (Side("model", runs, (" 1", " 2")),), ("model 1", "model 2"))
    assert "model (2 seeds)" not in figures(*apart) and "model (2 seeds)" in figures(together)
