"""Layouts: those that evalkit ships, a user's own, invalid files, and layouts with other titles or fewer rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalkit.errors import EvalkitError, TableError, UnknownNameError
from evalkit.reporting.table import plain
from evalkit.tables.fill import printed_cells, read_numbers
from evalkit.tables.layout import layout_names, load_layout
from tests.tables.runs import written

OWN: dict[str, Any] = {
    "suite": "zeroshot8",
    "rows": [{"items": {"mine": "Mine", "yours": None}}],
    "columns": [{"title": "Reasoning", "items": {"arc_easy": "ARCe"}}, {"items": {"Average": "Avg."}}],
}
PAIRED: dict[str, Any] = {
    "suite": "attention",
    "pairs": {"s": {"baseline": "llama-125m-vanilla", "measures": {"x": "rank@-1"}}},
    "rows": [{"items": {"a": {"model": {"s": "llama-125m-diff"}}}}],
    "columns": [{"items": {"x": "X"}}],
}
MAIN = load_layout("main_res")
PARENTS = {"cog_all_125m": "cog_125m", "diff_all_125m": "diff_125m", "intg_all_125m": "intg_125m",
           "intg_all_1b": "intg_1b"}  # fmt: skip


@pytest.mark.parametrize("name", layout_names())
def test_layouts_and_published_numbers_name_the_same(name: str) -> None:
    """Every row and every task of a layout has numbers, and nothing computed is stored."""
    layout = load_layout(name)
    numbers = read_numbers(layout.data_file)
    assert layout.model_items.keys() == numbers.keys()
    assert all(set(layout.tasks) >= row.keys() for row in numbers.values())
    assert not layout.averages.keys() & {column for row in numbers.values() for column in row}
    averages = {(model, key) for model in layout.model_items for key in layout.measures if key in layout.averages}
    assert printed_cells(layout).values.keys() == averages


def test_a_users_own(tmp_path: Path) -> None:
    layout = load_layout(written(tmp_path / "my_table.yaml", **OWN))
    assert layout.name == "my_table"
    assert [plain(item.label) for item in layout.model_items.values()] == ["Mine", "yours"]
    assert set(layout.tasks) == set(layout.averages["Average"])
    assert (layout.decimals, layout.models_are_rows, layout.marks) == (1, True, {})
    written(tmp_path / "mine.yaml", groups={"One": ["piqa"], "Two": ["sciq", "boolq"]})
    columns = [{"items": {"sciq": "SciQ", "Two": "two", "Average": "all"}}]
    layout = load_layout(written(tmp_path / "own.yaml", **OWN | {"suite": "mine.yaml", "columns": columns}))
    assert layout.suite == "mine"
    assert layout.averages == {"One": ("piqa",), "Two": ("sciq", "boolq"), "Average": ("piqa", "sciq", "boolq")}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (OWN | {"columns": [{"items": {"arc_esy": "ARCe"}}]}, ["'arc_esy'", "'arc_easy'"]),
        (OWN | {"suite": "zeroshot9"}, ["suite 'zeroshot9'"]),
        (OWN | {"suite": "nowhere.yaml"}, ["nowhere.yaml"]),
        (OWN | {"rows": [{"items": {}}]}, ["'rows[0].items'"]),
        (OWN | {"rows": [{"items": {"a": 1}}, {"items": {"a": 2}}]}, ["'a' occurs twice"]),
        (OWN | {"rows": [{"items": {"a": {"labl": "x"}}}]}, ["'rows[0].items.a'", "'labl'", "'label'"]),
        (OWN | {"rows": [{"items": {"a": {"facts": {"size": "1B"}}}}]}, ["'a'", "fact 'size'"]),
        (OWN | {"rows": [{"style": "rulled", "items": {"a": "b"}}]}, ["'rows[0].style'"]),
        (OWN | {"rows": [{"items": {"a": {"model": ["x", ""]}}}]}, ["'rows[0].items.a.model[1]'"]),
        (OWN | {"columns": [{"items": {"Average": {"model": "x"}}}]}, ["'Average' is a measure"]),
        (OWN | {"marks": {"bold": "best"}}, ["'marks.bold'", "highest in section"]),
        (OWN | {"decimals": 10}, ["'decimals'"]),
        (OWN | {"caption": "**no end"}, ["'caption'", "'**' is not closed"]),
        (OWN | {"caption": 2.5}, ["'caption'", "2.5 in quotes"]),
        (PAIRED | {"suite": None}, ["add 'suite'"]),
        (PAIRED | {"suite": "zeroshot8", "pairs": {}}, ["'a'", "size 's'", "'pairs'"]),
        (PAIRED | {"pairs": {"s": {"baseline": "v", "measures": {"y": "rank"}}}}, ["'pairs'", "measure 'y'"]),
        (PAIRED | {"columns": [{"items": {"x": "X", "y": "Y"}}]}, ["'y' is in 0 sizes of 'pairs'"]),
        (PAIRED | {"rows": [{"items": {"a": {"model": "llama-125m-diff"}}}]}, ["'a' needs its model of each size"]),
        (PAIRED | {"rows": [{"items": {"baseline": {"model": {"s": "v"}}}}]}, ["'baseline' stands for"]),
        (PAIRED | {"pairs": {"s": {"measures": {"x": "rank"}}}}, ["baseline"]),
    ],
)
def test_invalid_layouts(tmp_path: Path, content: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(TableError) as caught:
        load_layout(written(tmp_path / "my_table.yaml", **content))
    for word in ("my_table.yaml", *words):
        assert word in str(caught.value)


def test_names_of_nothing() -> None:
    with pytest.raises(UnknownNameError, match="main_res"):
        load_layout("main_rse")
    with pytest.raises(EvalkitError, match=r"nowhere\.yaml"):
        load_layout("nowhere.yaml")


@given(filled=st.sets(st.sampled_from(list(MAIN.model_items)), min_size=1))
def test_what_is_left_is_what_has_numbers_in_the_same_order(filled: set[str]) -> None:
    """An indented row keeps the row that it belongs to, which names the model."""
    left = MAIN.without_empty(filled)
    needed = filled | {PARENTS[key] for key in filled if key in PARENTS}
    assert list(left.model_items) == [key for key in MAIN.model_items if key in needed]
    assert all(group.items for group in left.rows)
    assert left.columns == MAIN.columns


def test_without_models_in_columns() -> None:
    whole = load_layout("backbone_abl_main")
    left = whole.without_empty({"qwen2_intg"})
    assert (list(left.model_items), [plain(group.title) for group in left.columns]) == (["qwen2_intg"], ["Qwen2"])
    assert left.rows == whole.rows


def test_other_titles() -> None:
    titles = {"125M parameters and 28B tokens": "~Small~ & *new*"}
    layout = MAIN.retitled("50 % of **all**\n  & more_", titles, "here")
    assert plain(layout.caption) == "50 % of all & more_"
    assert plain(layout.rows[0].title) == "Small & new"
    assert layout.rows[1:] == MAIN.retitled(None, {}, "here").rows[1:]
    assert MAIN.retitled(None, {}, "here").caption == MAIN.caption
    assert MAIN.retitled("", {}, "here").caption == ()
    with pytest.raises(UnknownNameError, match=r"main_res \(here\) 'Reasonin'"):
        MAIN.retitled(None, {"Reasonin": "x"}, "here")
    with pytest.raises(TableError, match="here, caption"):
        MAIN.retitled("**x", {}, "here")
    with pytest.raises(TableError, match="here, title 'Reasoning'"):
        MAIN.retitled(None, {"Reasoning": "~x"}, "here")
