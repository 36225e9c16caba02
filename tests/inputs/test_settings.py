"""FileSettings from YAML files: names, lists and numbers as users write them."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from evalkit.errors import TableError
from evalkit.inputs.validated import FileSettings, Listed, Named, Number, read_settings


class Part(FileSettings):
    size: int = 1


class Numbers(FileSettings):
    named: Named[Number]
    listed: Listed[Number] = ()


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("a: {size: 3}\n", encoding="utf-8")
    assert read_settings(tmp_path / "own.yaml", dict[str, Part], TableError) == {"a": Part(size=3)}
    (tmp_path / "own.yaml").write_text("a: {size: x}\n", encoding="utf-8")
    with pytest.raises(TableError, match=r"^parts .*own\.yaml: 'a\.size' is 'x': .*integer$"):
        read_settings(tmp_path / "own.yaml", dict[str, Part], TableError, "parts")
    with pytest.raises(TableError, match=r"^parts .*none\.yaml cannot be read: No such file or directory$"):
        read_settings(tmp_path / "none.yaml", Named[Part], TableError, "parts")


def test_names_lists_and_numbers(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("named: {a: 4, 7: 4.0}\nlisted: [1, 2.5]\n", encoding="utf-8")
    numbers = read_settings(tmp_path / "own.yaml", Numbers, TableError)
    assert repr(numbers.named) == "{'a': 4, '7': 4.0}"
    assert repr(numbers.listed) == "(1, 2.5)"
    with pytest.raises(ValidationError, match="frozen"):
        numbers.listed = ()  # type: ignore[misc]


def test_a_yaml_key_that_two_settings_have(tmp_path: Path) -> None:
    """7 and "7" are two keys of YAML, and one name."""
    (tmp_path / "own.yaml").write_text("named: {7: 1, '7': 2}\n", encoding="utf-8")
    with pytest.raises(TableError, match=r"own\.yaml: 'named': the name '7' occurs twice"):
        read_settings(tmp_path / "own.yaml", Numbers, TableError)
