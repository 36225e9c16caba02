"""Comparisons in a page: their numbers are those of `compare`, and what cannot be paired is explained."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from evalkit.comparison.comparison import compare_sides
from evalkit.comparison.comparison_report import comparison_report, headline
from evalkit.comparison.curves import curve, curve_report
from evalkit.comparison.sides import Side, sides_of
from evalkit.pages.comparisons import comparison_panels, curve_panel
from evalkit.pages.page import Panel
from evalkit.runs.folder import SCORES, Run, load_run
from tests.comparison.made import finished_run, make_longbench
from tests.pages.test_overview import rows_of


def texts(svg: str) -> set[str]:
    return {(element.text or "").strip() for element in ElementTree.fromstring(svg).iter() if element.text}


def agreement(panel: Panel) -> dict[str, list[str]]:
    [found] = [one for one in panel.panels if one.title == "Agreement by document"]
    return rows_of(found.reports[0].tables[0])


def test_a_panel_has_the_report_of_compare(two_runs: list[Run]) -> None:
    sides = sides_of(two_runs, [])
    [panel] = comparison_panels(sides)
    [found] = compare_sides(sides)
    assert panel.reports == comparison_report([found]).parts
    assert panel.reports[0].verdict[0] == headline(found)
    assert panel.title == "second against first"


@pytest.mark.parametrize("rule", [None, "acc_norm"])
def test_agreement_is_a_group_by_of_the_score_tables(two_runs: list[Run], rule: str | None) -> None:
    [panel] = comparison_panels(sides_of(two_runs, []), rule)
    found = agreement(panel)
    right = []
    for run in two_runs:
        scores = run.scores.assign(value=run.scores["ll_continuation"])
        if rule:
            scores["value"] = scores["value"] / scores["chars"]
        best = scores.loc[scores.groupby(["task", "subtask", "doc_id"])["value"].idxmax()]
        right.append(best.set_index(["task", "subtask", "doc_id"])["choice"] == 0)
    a, b = right
    for task, label in (("arc_easy", "ARC-Easy"), ("boolq", "BoolQ"), ("mmlu", "MMLU")):
        mine, theirs = a[task], b[task]
        counts = [len(mine), (mine & theirs).sum(), (mine & ~theirs).sum(), (~mine & theirs).sum()]
        counts.append((~mine & ~theirs).sum())
        assert [int(text) for text in found[label]] == counts
        assert sum(counts[1:]) == counts[0]


def test_agreement_of_graded_scores(tmp_path: Path) -> None:
    scores = {"qasper": [0.1, 0.5, 0.9, 0.2]}, {"qasper": [0.3, 0.5, 0.1, 0.2]}
    runs = [
        load_run(make_longbench(tmp_path / "runs", one, model=f"org/{name}"))
        for one, name in zip(scores, "ab", strict=True)
    ]
    [panel] = comparison_panels(sides_of(runs, []))
    assert agreement(panel) == {"Qasper": ["4", "1", "2", "1"]}


def test_groups_of_seeds_have_no_agreement(tmp_path: Path) -> None:
    runs = [finished_run(tmp_path, f"org/{name}", seed=seed) for seed, name in enumerate("abcd", 1)]
    [panel] = comparison_panels([Side("old", tuple(runs[:2])), Side("new", tuple(runs[2:]))])
    assert [one.title for one in panel.panels] == ["MMLU by subject"]
    assert panel.reports[0].tables[1].name == "errors-B"


def test_sides_that_cannot_be_paired_are_explained(tmp_path: Path) -> None:
    first = finished_run(tmp_path, "org/a")
    other = {task: f"another hash of {task}" for task in ("arc_easy", "boolq", "mmlu")}
    damaged = finished_run(tmp_path, "org/damaged", seed=3)
    (damaged.folder / SCORES).write_bytes(b"")
    runs = [
        first,
        load_run(make_longbench(tmp_path / "runs", {"qasper": [0.1, 0.5]})),
        finished_run(tmp_path, "org/others", documents=other),
        damaged,
        finished_run(tmp_path, "org/paired", seed=2),
    ]
    kind, documents, broken, paired = comparison_panels(sides_of(runs, []))
    for panel, words in (
        (kind, "is of suite zeroshot8 and run"),
        (documents, "content hash of the documents"),
        (broken, "is damaged"),
    ):
        [sentence] = panel.reports[0].facts
        assert "is not compared with a: " in sentence
        assert words in sentence
        assert sentence.endswith(".")
        assert (panel.figures, panel.panels) == ((), ())
    assert paired.figures


def test_curves(tmp_path: Path) -> None:
    runs = [finished_run(tmp_path, f"org/step{step}", share) for step, share in ((100, 0.3), (200, 0.6), (300, 0.8))]
    found = [curve(Side("training", tuple(runs)))]
    panel = curve_panel(found)
    assert panel.reports == (curve_report(found),)
    [figure] = panel.figures
    assert figure == curve_panel(found).figures[0]
    assert {"ARC-Easy", "BoolQ", "MMLU", "Average"} <= texts(figure.svg)
    assert figure.words.startswith("Accuracy by training step of training")
