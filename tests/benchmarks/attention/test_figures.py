"""Figures of analyses: every drawn number is a plain group-by of the run's rows, and the files are complete."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from evalkit.benchmarks.attention.figure_runs import AnalysedRun
from evalkit.benchmarks.attention.figures import make, write
from evalkit.benchmarks.attention.groups import FigureRequest
from evalkit.errors import RunError, UsageError
from evalkit.runs.folder import Run
from tests.benchmarks.attention.made import made_run, whole_table

DOCUMENT = ["task", "subtask", "doc_id"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    root = tmp_path_factory.mktemp("runs")
    return [made_run(root, f"models/{name}", choices=2, tokens=(65, 150)) for name in ("vanilla", "cog", "diff")]


def analysed(runs: list[Run], *tasks: str) -> list[AnalysedRun]:
    return [AnalysedRun(run.manifest["model"].rpartition("/")[2], run, tasks) for run in runs]


def drawn(name: str, runs: list[Run], folder: Path, *tasks: str, **options: Any) -> pd.DataFrame:
    """Draw a figure and read its numbers back from the CSV. The PDF's text is text: TrueType, with a map to Unicode."""
    members, path = analysed(runs, *tasks), folder / f"{name}.pdf"
    assert write(make(name, members, FigureRequest(**options)), members, [path]) == [path, path.with_suffix(".csv")]
    assert path.read_bytes().startswith(b"%PDF") and b"/Subtype /Type0" in path.read_bytes()
    return pd.read_csv(path.with_suffix(".csv"))


def rows_of(run: Run, *measures: str, by_position: bool = False) -> pd.DataFrame:
    """Return the run's rows; several measures are added up."""
    table = whole_table(run)
    rows = table[table["measure"].isin(measures) & (table["position"].notna() == by_position)]
    keys = [*DOCUMENT, "choice", "layer", "head", "position"]
    return rows.groupby(keys, dropna=False)["value"].sum().reset_index()


def spread(rows: pd.DataFrame, band: str, *keys: str, how: str = "mean") -> pd.DataFrame:
    """Return mean and standard deviation, over heads of each head's mean, or over documents of each document's."""
    if band == "heads":
        values = rows.groupby([*keys, "head", *DOCUMENT])["value"].mean().groupby(level=[*keys, "head"]).mean()
    else:
        by_sequence = rows.groupby([*keys, *DOCUMENT, "choice"])["value"].agg(how)
        values = by_sequence.groupby(level=[*keys, *DOCUMENT]).mean()
    return values.groupby(level=list(keys)).agg(["mean", "std"])


def same(numbers: pd.DataFrame, run: Run, measure: str, expected: pd.DataFrame) -> None:
    part = numbers[(numbers["id"] == run.manifest["id"]) & (numbers["measure"] == measure)]
    part = part.set_index(list(expected.index.names)).sort_index()
    assert part.index.tolist() == expected.index.tolist() != []
    columns = ["value", "spread"][: expected.shape[1]]
    np.testing.assert_allclose(part[columns], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "measures", "default", "band"),
    [
        ("entropy", ["entropy_shifted", "entropy"], "samples", None),
        ("negative", ["bos_negative"], "heads", "samples"),
        ("summary", ["sink_abs_rate", "bos_abs", "distance", "similarity"], "heads", None),
    ],
)
def test_lines_by_layer(
    runs: list[Run], tmp_path: Path, name: str, measures: list[str], default: str, band: str | None
) -> None:
    numbers = drawn(name, runs, tmp_path, band=band)
    assert [*dict.fromkeys(numbers["measure"])] == measures
    for run in runs:
        for measure in measures:
            same(numbers, run, measure, spread(rows_of(run, measure), band or default, "layer"))


def test_by_position(runs: list[Run], tmp_path: Path) -> None:
    numbers = drawn("bos", runs, tmp_path, measure="entropy", band="heads")
    several = drawn("position", runs, tmp_path, layers=(0, 2), band="samples")
    maps = drawn("position", runs[:1], tmp_path, band="heads")
    for run in runs:
        rows = rows_of(run, "entropy", by_position=True)
        same(numbers, run, "entropy", spread(rows[rows["layer"] == 2], "heads", "position"))
        same(several, run, "entropy", spread(rows[rows["layer"] != 1], "samples", "layer", "position"))
    for measure in ("bos_abs", "entropy"):
        same(maps, runs[0], measure, spread(rows_of(runs[0], measure, by_position=True), "heads", "layer", "position"))


FOUR = {
    "BOS, special tokens, punctuation": ["bos", "special", "punctuation"],
    "content words": ["content"],
    "function words": ["function"],
    "other": ["other"],
}


def test_categories(runs: list[Run], tmp_path: Path) -> None:
    numbers = drawn("categories", runs, tmp_path, band="samples")
    paper = drawn("categories", runs, tmp_path, paper=True)
    for run in runs:
        sums = {}
        for title, names in FOUR.items():
            rows = rows_of(run, *(f"mass_abs_{name}" for name in names))
            same(numbers, run, f"mass_abs: {title}", spread(rows, "samples", "layer"))
            signed = rows_of(run, *(f"mass_{name}" for name in names))
            sums[title] = signed.groupby(["layer", "head"])["value"].mean()
        powers = pd.DataFrame(sums).map(math.exp)
        for title in FOUR:
            shares = (powers[title] / powers.sum(axis=1)).groupby(level="layer").agg(["mean", "std"])
            same(paper, run, f"mass: {title}", shares)
    # The shares of each layer sum to 1
    assert numbers["value"].sum() == pytest.approx(3 * len(runs))


def test_ranks(runs: list[Run], tmp_path: Path) -> None:
    numbers = drawn("rank", runs, tmp_path, measure="rank_stable")
    left, right = (numbers[numbers["panel"] == panel] for panel in dict.fromkeys(numbers["panel"]))
    medians = []
    for run in runs:
        rows = rows_of(run, "rank_stable")
        same(left, run, "rank_stable", spread(rows, "samples", "layer", how="median"))
        by_sequence = rows.groupby(["layer", *DOCUMENT, "choice"])["value"].median()
        medians.append(by_sequence.groupby(level=["layer", *DOCUMENT]).mean())
    assert {*right["run"]} == {"cog", "diff"}
    for run, own in zip(runs[1:], medians[1:], strict=True):
        share = (own > medians[0]).groupby(level="layer").mean()
        same(right, run, "rank_stable", pd.DataFrame({"share": share, "error": (share * (1 - share) / 9) ** 0.5}))


def test_heatmap(runs: list[Run], tmp_path: Path) -> None:
    numbers = drawn("heatmap", runs, tmp_path, measure="mass_content")
    for run in runs:
        same(numbers, run, "mass_content", rows_of(run, "mass_content").groupby(["layer", "head"])[["value"]].mean())


def test_options_that_cannot_be_used(runs: list[Run]) -> None:
    for request, name, noun in (
        (FigureRequest(measure="distance"), "bos", "'distance'"),
        (FigureRequest(band="heads"), "heatmap", "--band"),
        (FigureRequest(paper=True), "rank", "--paper"),
        (FigureRequest(layers=(-4,)), "bos", "--layers -4"),
    ):
        with pytest.raises(UsageError, match=noun):
            make(name, analysed(runs), request)


def test_files_that_cannot_be_written(runs: list[Run], tmp_path: Path) -> None:
    members = analysed(runs)
    figure = make("negative", members, FigureRequest())
    (tmp_path / "b.csv").mkdir()
    (tmp_path / "c.csv").write_text("mine\n")
    for name, error, noun in (("a.gif", UsageError, r"\.svg"), ("b.png", RunError, r"b\.csv"),
                              ("c.png", UsageError, r"c\.csv")):  # fmt: skip
        with pytest.raises(error, match=noun):
            write(figure, members, [tmp_path / name])
    assert (tmp_path / "c.csv").read_text() == "mine\n"
