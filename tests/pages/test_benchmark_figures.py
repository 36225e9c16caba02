"""Figures of benchmarks in a page."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest

from evalkit.benchmarks.attention.groups import KINDS
from evalkit.benchmarks.attention.results import HEADS
from evalkit.pages.overview import anchor, figure_panels
from evalkit.runs.folder import Run, load_run
from tests.benchmarks.attention.made import made_run
from tests.pages.test_comparisons import texts
from tests.sealed import specification, write_run

NAMES = ["vanilla", "</script><img src=x>"]


@pytest.fixture
def analyses(tmp_path: Path) -> list[Run]:
    return [made_run(tmp_path, f"models/{name}", tokens=(65, 150)) for name in ("vanilla", "cog")]


def needle_run(root: Path) -> Run:
    about = specification("org/needle", suite="needle", documents={"needle": "hash"})
    manifest = {
        "kind": "needle",
        "specification": about,
        "rule": "needle",
        "groups": {},
        "group_sizes": {},
        "documents": {"needle": {"official": None, "source": "built-in 1", "count": 4}},
        "template": {"name": "plain"},
        "model": "org/needle",
    }
    found = {"depths": [0.0, 50.0], "lengths": [1000, 23456], "repeats": 1, "found": [[1.0, 0.0], [1.0, 0.25]]}
    tasks = [{"task": "needle", "n": 4, "found": 2}]
    averages = [{"name": "needles found", "accuracy": 0.5, "stderr": None}]
    table = pd.DataFrame({"length": [1000]})
    return load_run(
        write_run(root, manifest, {"tasks": tasks, "averages": averages} | found, {"needles.parquet": table})
    )


@pytest.mark.slow
def test_all_figures_of_analyses_with_all_runs_in_each(analyses: list[Run]) -> None:
    [panel] = figure_panels(analyses, NAMES)
    assert [figure.name for figure in panel.figures] == [f"figures-attention-{name}" for name in KINDS]
    assert panel.reports == ()
    for figure in panel.figures:
        ElementTree.fromstring(figure.svg)
        assert "<img" not in figure.svg
        assert all(name in texts(figure.svg) for name in NAMES) or figure.name.endswith("rank"), figure.name
        assert figure.words.endswith(f": {', '.join(NAMES)}.")
        assert figure.name == anchor(figure.name)
    assert figure_panels(analyses, NAMES) == (panel,)


def test_a_heatmap_of_each_needle_test(tmp_path: Path) -> None:
    run = needle_run(tmp_path)
    [panel] = figure_panels([run], ["one"])
    [figure] = panel.figures
    assert {"1,000", "23,456", "100", "25", "0"} <= texts(figure.svg)
    assert figure.words.endswith("one.")


def test_a_figure_that_cannot_be_drawn_is_named(analyses: list[Run], tmp_path: Path) -> None:
    (analyses[1].folder / HEADS).write_bytes(b"")
    attention, needle = figure_panels([*analyses, needle_run(tmp_path)], [*NAMES, "needle"])
    assert attention.figures == ()
    assert "cannot be drawn" in attention.reports[0].notes[0]
    assert needle.figures
