"""Layouts without empty rows, with another caption and other titles."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from evalkit.benchmarks.registry import benchmark_of
from evalkit.errors import TableError, UnknownNameError, UsageError
from evalkit.reporting.table import Table, plain
from evalkit.runs.folder import SCORES, Run
from evalkit.tables.layout import load_layout
from evalkit.tables.measured import RunMapping
from evalkit.tables.request import TableRequest, made_of_runs, make, retitled, without_empty
from tests.printed import printed
from tests.sealed import reseal
from tests.tables.test_measured import altered, mapped

MAIN = load_layout("main_res")
KEYS = list(MAIN.models)
PARENTS = {"cog_all_125m": "cog_125m", "diff_all_125m": "diff_125m", "intg_all_125m": "intg_125m",
           "intg_all_1b": "intg_1b"}  # fmt: skip


@given(filled=st.sets(st.sampled_from(KEYS), min_size=1))
def test_what_is_left_is_what_has_numbers_in_the_same_order(filled: set[str]) -> None:
    """An indented row keeps the row that it belongs to, which names the model."""
    left = without_empty(MAIN, filled)
    needed = filled | {PARENTS[key] for key in filled if key in PARENTS}
    assert list(left.models) == [key for key in KEYS if key in needed]
    assert all(group.items for group in left.rows)
    assert left.columns == MAIN.columns


def test_models_in_columns() -> None:
    left = without_empty(load_layout("app_long_contx"), {"intg_1b"})
    assert list(left.models) == ["intg_1b"]
    assert left.rows == load_layout("app_long_contx").rows
    whole = load_layout("backbone_abl_main")
    assert [plain(group.title) for group in without_empty(whole, {"qwen2_intg"}).columns] == ["Qwen2"]


def cells(table: Table) -> dict[str, tuple[object, ...]]:
    return {line.key: line.cells for line in table.lines if any(cell.value != "-" for cell in line.cells)}


@pytest.mark.parametrize("source", ["runs", "both"])
def test_marks_averages_and_notes_stay(finished: Run, tmp_path: Path, source: str) -> None:
    rows = {
        key: altered(finished, tmp_path / key, 0.01 * place)
        for place, key in enumerate(("diff_125m", "intg_125m", "intg_all_1b"))
    }
    path = mapped(tmp_path, rows=rows)
    whole = make(TableRequest("main_res", source, path, spreads=True))
    left = make(TableRequest("main_res", source, path, spreads=True, drop_empty=True))
    assert cells(left) == cells(whole)
    assert left.notes == whole.notes
    assert [line.key for line in left.lines] == ["diff_125m", "intg_125m", "intg_1b", "intg_all_1b"]
    assert any(cell.bold for line in left.lines for cell in line.cells)
    for form in ("terminal", "latex", "markdown", "html"):
        assert "Cog" not in printed(left, form).partition("Bold: highest")[2], form


def test_nothing_is_left(finished: Run) -> None:
    with pytest.raises(UsageError, match="no row has a run, so --drop-empty leaves nothing"):
        made_of_runs(MAIN, RunMapping(None, {}), TableRequest("main_res", "runs", drop_empty=True))
    with pytest.raises(UsageError, match="--drop-empty is for numbers of runs"):
        make(TableRequest("main_res", drop_empty=True))


def test_caption_and_titles_in_every_format(finished: Run, tmp_path: Path) -> None:
    titles = {"125M parameters and 28B tokens": "~Small~ & *new*", "Reasoning": "Thought_1"}
    layout = retitled(MAIN, "50 % of **all**\n  & more_", titles, "here")
    mapping = RunMapping(None, {"intg_125m": (finished,)})
    made = made_of_runs(layout, mapping, TableRequest("main_res", "runs", drop_empty=True))
    expected = {
        "terminal": ("50 % of all & more_", "Small & new"),
        "latex": (r"\caption{50 \% of \textbf{all} \& more\_}", r"\textsc{Small} \& \textit{new}", r"Thought\_1"),
        "markdown": ("50 % of **all** \\& more\\_", "*new*"),
        "html": ("50 % of <strong>all</strong> &amp; more_", '<span class="sc">Small</span> &amp; <em>new</em>'),
    }
    for form, words in expected.items():
        text = printed(made, form)  # type: ignore[arg-type]
        for word in words:
            assert word in text, (form, word)
        assert "28B tokens" not in text
        assert "Zero-shot accuracy" not in text
    assert retitled(MAIN, None, {}, "here").caption == MAIN.caption
    assert retitled(MAIN, "", {}, "here").caption == ()


def test_invalid_captions_and_titles() -> None:
    with pytest.raises(
        UnknownNameError, match=r"unknown title of table main_res \(here\) 'Reasonin': did you mean 'Re"
    ):
        retitled(MAIN, None, {"Reasonin": "x"}, "here")
    with pytest.raises(TableError, match=r"here, caption: '\*\*' is not closed in '\*\*x'"):
        retitled(MAIN, "**x", {}, "here")
    with pytest.raises(TableError, match=r"here, title 'Reasoning': '~' is not closed"):
        retitled(MAIN, None, {"Reasoning": "~x"}, "here")


def test_a_section_of_values_stays(tmp_path: Path) -> None:
    values = tmp_path / "mine.csv"
    values.write_text("model,passage_count\nintg_1b,3.5\n", encoding="utf-8")
    path = tmp_path / "runs.yaml"
    path.write_text(yaml.safe_dump({"values": str(values)}), encoding="utf-8")
    made = make(TableRequest("app_long_contx", "runs", path, drop_empty=True))
    assert [[plain(label) for label in group.labels] for group in made.columns] == [["Intg"]]


@pytest.mark.parametrize("outcome", ["bits_per_byte", "brier", "margin"])
def test_a_table_of_a_continuous_outcome(finished: Run, tmp_path: Path, outcome: str) -> None:
    """Means over documents with three decimals; the best is the lowest, except of margins."""
    better = Path(altered(finished, tmp_path / "b"))
    scores = pd.read_parquet(better / SCORES)
    scores["ll_continuation"] += np.where(scores["choice"] == scores["gold"], 3.0, 0.0)
    scores.to_parquet(better / SCORES)
    reseal(better)
    path = mapped(tmp_path, rows={"diff_125m": str(finished.folder), "intg_125m": str(better)})
    table = make(TableRequest("main_res", "runs", path, outcome=outcome, spreads=True, drop_empty=True))
    key = f"margin:{finished.manifest['rule']}" if outcome == "margin" else outcome
    expected = {one.task: one.value for one in benchmark_of(finished).metrics(finished, key)}
    places = list(MAIN.measures)
    [first, second] = [line for line in table.lines if line.cells]
    for task, value in expected.items():
        assert value is not None
        assert first.cells[places.index(task)].value == f"{value:.3f}"
    for own, other in zip(first.cells, second.cells, strict=True):
        better_by = float(own.value) - float(other.value)
        assert (better_by >= 0) if outcome != "margin" else (better_by <= 0)
        assert (own.bold, other.bold) == (better_by == 0, True)
    assert any(own.value != other.value for own, other in zip(first.cells, second.cells, strict=True))
    caption = plain(table.caption)
    assert "mean over documents" in caption and "ccuracy" not in caption
    assert f"Bold: {'highest' if outcome == 'margin' else 'lowest'} in each section." in caption
    assert any(f"outcome {key}" in plain(note) for note in table.notes)


def test_outcomes_are_of_runs(finished: Run, tmp_path: Path) -> None:
    path = mapped(tmp_path, rows={"diff_125m": str(finished.folder)})
    with pytest.raises(UsageError, match="--outcome is for numbers of runs"):
        make(TableRequest("main_res", outcome="brier"))
    with pytest.raises(UsageError, match="the published numbers are accuracies"):
        make(TableRequest("main_res", "both", path, outcome="brier"))
    with pytest.raises(UnknownNameError, match="did you mean 'brier'"):
        make(TableRequest("main_res", "runs", path, outcome="briers"))
