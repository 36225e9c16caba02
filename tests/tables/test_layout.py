"""Layouts: those that evalkit ships, and invalid files."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from evalkit.errors import EvalkitError, TableError, UnknownNameError
from evalkit.reporting.table import plain
from evalkit.tables.layout import layout_names, load_layout
from evalkit.tables.published import printed_cells, read_numbers

PAPER = {
    "main_res", "abl_top_main", "sig_abl_main", "backbone_abl_main", "anly_rank_main", "app_long_contx", "res_intg_app",
    "sft_abl_app", "abl_top_app", "sig_abl_app", "vanilla_head_app", "backbone_abl_app",
}  # fmt: skip

WHOLE = {
    "suite": "zeroshot8",
    "rows": [{"items": {"mine": "Mine", "yours": None}}],
    "columns": [{"title": "Reasoning", "items": {"arc_easy": "ARCe"}}, {"items": {"Average": "Avg."}}],
}


def written(folder: Path, **changes: object) -> str:
    path = folder / "my_table.yaml"
    path.write_text(yaml.safe_dump(WHOLE | changes, sort_keys=False), encoding="utf-8")
    return str(path)


def test_the_papers_twelve_are_here() -> None:
    assert set(layout_names()) == PAPER


@pytest.mark.parametrize("name", sorted(PAPER))
def test_layouts_and_published_numbers_name_the_same(name: str) -> None:
    """Every row and every task of a layout has numbers, and nothing computed is stored."""
    layout = load_layout(name)
    numbers = read_numbers(layout.data)
    assert layout.models.keys() == numbers.keys()
    assert all(set(layout.tasks) >= row.keys() for row in numbers.values())
    assert not layout.averages.keys() & {column for row in numbers.values() for column in row}
    printed = printed_cells(layout)
    averages = {(model, key) for model in layout.models for key in layout.measures if key in layout.averages}
    assert printed.values.keys() == averages
    assert plain(layout.caption)


def test_a_users_own(tmp_path: Path) -> None:
    layout = load_layout(written(tmp_path))
    assert layout.name == "my_table"
    assert [plain(item.label) for item in layout.models.values()] == ["Mine", "yours"]
    assert layout.averages["Average"] == (*layout.averages["Reasoning"], *layout.averages["Knowledge"])
    assert set(layout.tasks) == set(layout.averages["Average"])
    assert (layout.decimals, layout.models_are_rows, layout.marks) == (1, True, {})


def test_a_suite_of_ones_own_is_seen_from_the_layout(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("groups: {One: [piqa], Two: [sciq, boolq]}", encoding="utf-8")
    columns = [{"items": {"sciq": "SciQ", "Two": "two", "Average": "all"}}]
    layout = load_layout(written(tmp_path, suite="mine.yaml", columns=columns))
    assert layout.suite == "mine"
    assert layout.averages == {"One": ("piqa",), "Two": ("sciq", "boolq"), "Average": ("piqa", "sciq", "boolq")}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"columns": [{"items": {"arc_esy": "ARCe"}}]}, ["unknown task 'arc_esy'", "did you mean 'arc_easy'"]),
        ({"suite": "zeroshot9"}, ["unknown suite 'zeroshot9'"]),
        ({"suite": "lm_eval"}, ["lm_eval"]),
        ({"suite": "nowhere.yaml"}, ["nowhere.yaml cannot be read"]),
        ({"colums": []}, ["unknown key 'colums'", "did you mean 'columns'"]),
        ({"rows": []}, ["'rows' is "]),
        ({"rows": {"mine": "Mine"}}, ["'rows' is "]),
        ({"rows": [{"items": {}}]}, ["'rows[0].items' is "]),
        ({"rows": [{"itmes": {"a": "b"}}]}, ["'rows[0]': unknown key 'itmes': did you mean 'items'"]),
        ({"rows": [{"items": {"a": 1}}, {"items": {"a": 2}}]}, ["'a' occurs twice"]),
        ({"rows": [{"items": {"a": {"labl": "x"}}}]}, ["'rows[0].items.a': unknown key 'labl': did you mean 'label'"]),
        ({"rows": [{"items": {"a": {"facts": {"size": "1B"}}}}]}, ["'a': unknown fact 'size'"]),
        (
            {"rows": [{"style": "rulled", "items": {"a": "b"}}]},
            ["'rows[0].style' is "],
        ),
        ({"rows": [{"items": {"a": {"model": 3}}}]}, ["'rows[0].items.a.model' is "]),
        (
            {"columns": [{"items": {"Average": {"model": "x"}}}]},
            ["'Average' is a measure; 'model' and 'no_model' are keys of models"],
        ),
        ({"marks": {"bold": "best"}}, ["'marks.bold' is 'best'", "highest in section"]),
        ({"marks": {"italic": "highest in table"}}, ["'marks': unknown key 'italic'", "Known: bold, underline"]),
        ({"decimals": "one"}, ["'decimals' is "]),
        ({"decimals": True}, ["'decimals' is "]),
        ({"models": "lines"}, ["'models' is "]),
        ({"caption": "**no end"}, ["'caption': markup: '**' is not closed"]),
        ({"caption": 2.5}, ["'caption': expected a text; put the value 2.5 in quotes"]),
        ({"caption": ["a"]}, ["'caption': expected a text"]),
        ({"decimals": 10}, ["'decimals' is "]),
        ({"rows": [{"items": {"a": {"label": True}}}]}, ["'rows[0].items.a.label': expected a text"]),
        ({"rows": [{"items": {"a": {"indent": 1}}}]}, ["'rows[0].items.a.indent' is "]),
        ({"rows": [{"items": {"a": {"model": ["x", ""]}}}]}, ["'rows[0].items.a.model[1]' is "]),
    ],
)
def test_invalid_layouts(tmp_path: Path, changes: dict[str, object], words: list[str]) -> None:
    with pytest.raises(TableError) as caught:
        load_layout(written(tmp_path, **changes))
    for word in ("my_table.yaml", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("content", "word"), [("a: [", "line 1: not valid YAML"), ("- a", "dictionary"), ("", "dictionary")]
)
def test_files_that_are_no_layouts(tmp_path: Path, content: str, word: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(TableError, match=word):
        load_layout(str(path))


def test_names_of_nothing() -> None:
    with pytest.raises(UnknownNameError, match="unknown table 'main_rse': did you mean 'main_res'"):
        load_layout("main_rse")
    with pytest.raises(EvalkitError, match=r"nowhere\.yaml cannot be read"):
        load_layout("nowhere.yaml")
