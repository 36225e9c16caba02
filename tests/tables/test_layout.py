"""Layouts: a user's own, invalid files, and layouts with other titles or fewer rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalkit.errors import TableError, UnknownNameError
from evalkit.reporting.table import plain
from evalkit.tables.layout import load_layout
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


def test_a_users_own(tmp_path: Path) -> None:
    layout = load_layout(written(tmp_path / "my_table.yaml", **OWN))
    assert [plain(item.label) for item in layout.model_items.values()] == ["Mine", "yours"]
    assert set(layout.tasks) == set(layout.averages["Average"])
    written(tmp_path / "mine.yaml", groups={"One": ["piqa"], "Two": ["sciq", "boolq"]})
    columns = [{"items": {"sciq": "SciQ", "Two": "two", "Average": "all"}}]
    layout = load_layout(written(tmp_path / "own.yaml", **OWN | {"suite": "mine.yaml", "columns": columns}))
    assert layout.suite == "mine"
    assert layout.averages == {"One": ("piqa",), "Two": ("sciq", "boolq"), "Average": ("piqa", "sciq", "boolq")}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (OWN | {"columns": [{"items": {"arc_esy": "ARCe"}}]}, ["'arc_esy'", "'arc_easy'"]),
        (OWN | {"rows": [{"items": {"a": 1}}, {"items": {"a": 2}}]}, ["'a'"]),
        (OWN | {"marks": {"bold": "best"}}, ["'marks.bold'", "highest in section"]),
        (OWN | {"caption": "**no end"}, ["'caption'", "'**'"]),
        (PAIRED | {"suite": None}, ["'suite'"]),
        (PAIRED | {"suite": "zeroshot8", "pairs": {}}, ["'a'", "'s'", "'pairs'"]),
        (PAIRED | {"columns": [{"items": {"x": "X", "y": "Y"}}]}, ["'y'", "'pairs'"]),
        (PAIRED | {"rows": [{"items": {"baseline": {"model": {"s": "v"}}}}]}, ["'baseline'"]),
    ],
)
def test_invalid_layouts(tmp_path: Path, content: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(TableError) as caught:
        load_layout(written(tmp_path / "my_table.yaml", **content))
    assert all(word in str(caught.value) for word in ("my_table.yaml", *words)), caught.value


@given(filled=st.sets(st.sampled_from(list(MAIN.model_items)), min_size=1))
def test_what_is_left_is_what_has_numbers_in_the_same_order(filled: set[str]) -> None:
    """An indented row keeps the row that it belongs to, which names the model."""
    left = MAIN.without_empty(filled)
    needed = filled | {PARENTS[key] for key in filled if key in PARENTS}
    assert list(left.model_items) == [key for key in MAIN.model_items if key in needed]
    assert all(group.items for group in left.rows)
    assert left.columns == MAIN.columns
    columns = load_layout("backbone_abl_main").without_empty({"qwen2_intg"}).columns
    assert [(plain(group.title), list(group.items)) for group in columns] == [("Qwen2", ["qwen2_intg"])]


def test_other_titles() -> None:
    titles = {"125M parameters and 28B tokens": "~Small~ & *new*"}
    layout = MAIN.retitled("50 % of **all**\n  & more_", titles, "here")
    assert (plain(layout.caption), plain(layout.rows[0].title)) == ("50 % of all & more_", "Small & new")
    assert layout.rows[1:] == MAIN.retitled(None, {}, "here").rows[1:]
    assert [MAIN.retitled(caption, {}, "here").caption for caption in (None, "")] == [MAIN.caption, ()]
    with pytest.raises(UnknownNameError, match=r"main_res \(here\) 'Reasonin'"):
        MAIN.retitled(None, {"Reasonin": "x"}, "here")
    for caption, titles in (("**x", {}), (None, {"Reasoning": "~x"})):
        with pytest.raises(TableError, match="here"):
            MAIN.retitled(caption, titles, "here")
