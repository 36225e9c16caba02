"""Errors that readers of files raise become one line of evalkit's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from evalkit.errors import DataError, UsageError, reading_as


class _Suite(BaseModel):
    tasks: list[str]


def _read(content: bytes, parse: Any, path: Path) -> Any:
    path.write_bytes(content)
    with reading_as(path, "a suite", UsageError):
        return parse(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("content", "parse", "said"),
    [
        (b"{}", lambda text: json.loads(text)["tasks"], r"cannot be read as a suite \(KeyError: 'tasks'\)$"),
        (
            b'{"tasks": [1]}',
            _Suite.model_validate_json,
            r"a suite \(ValidationError: 'tasks.0': Input should be a valid",
        ),
        (b"\xff", str, r"a suite \(UnicodeDecodeError: 'utf-8' codec"),
        (b"a: [", yaml.safe_load, r"a suite \(ParserError: "),
        (b"{", json.loads, r"a suite \(JSONDecodeError: "),
        (b"[]", lambda text: json.loads(text).keys(), r"a suite \(AttributeError: "),
    ],
)
def test_a_reader_fails(content: bytes, parse: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said) as raised:
        _read(content, parse, tmp_path / "own.yaml")
    assert str(raised.value).startswith(f"{tmp_path / 'own.yaml'}: cannot be read as ")
    assert raised.value.__cause__ is not None
    assert "\n" not in str(raised.value)


def test_a_missing_file_and_an_error_of_evalkit(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match=r"none\.yaml: cannot be read: No such file or directory$"),
        reading_as(tmp_path / "none.yaml", "a suite", UsageError),
    ):
        (tmp_path / "none.yaml").read_text(encoding="utf-8")
    with pytest.raises(DataError, match=r"^line 3$"), reading_as(tmp_path, "a suite", UsageError):
        raise DataError("line 3")
