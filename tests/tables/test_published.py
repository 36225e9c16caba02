"""CSV files of numbers, and errors in them."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from evalkit.errors import TableError
from evalkit.tables.published import Number, read_numbers, read_printed


def csv(folder: Path, content: str | bytes) -> Path:
    path = folder / "numbers.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_numbers_and_gaps(tmp_path: Path) -> None:
    found = read_numbers(csv(tmp_path, "\ufeffmodel, piqa ,boolq\nmine,51.30,\n\nyours,-,0\n"))
    assert found == {"mine": {"piqa": Number(Fraction(513, 10))}, "yours": {"boolq": Number(Fraction(0))}}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("model,piqa\nmine,6O.1\n", ["row 'mine'", "column 'piqa'", "'6O.1' is not a number", "decimal point"]),
        ("model,piqa\nmine,nan\n", ["'nan' is not a number"]),
        ("model,piqa\nmine,1\nmine,2\n", ["line 3", "row 'mine' occurs twice"]),
        ("model,piqa,piqa\nmine,1,2\n", ["line 1", "name of its own"]),
        ("model,piqa\nmine,1,2\n", ["line 2", "2 cells for 1 columns"]),
        (b"model,piqa\nm\xff,1\n", ["line 2", "UTF-8"]),
        ("model,piqa\n" + "m" * 200_000 + ",1\n", ["line 2", "field larger than field limit"]),
    ],
)
def test_invalid_numbers(tmp_path: Path, content: str | bytes, words: list[str]) -> None:
    with pytest.raises(TableError) as caught:
        read_numbers(csv(tmp_path, content))
    for word in ("numbers.csv", *words):
        assert word in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"nothing\.csv cannot be read: No such file"):
        read_numbers(tmp_path / "nothing.csv")


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("model,measure\n", "expected the columns"),
        ("model,measure,printed,marks\nmine,piqa,,bald\n", "mark 'bald' is neither"),
        ("model,measure,printed,marks\nmine,piqa\n", "expected 4 cells"),
        ("model,measure,printed,marks\nmine,Average,4O,\n", "row 'mine', column 'Average': '4O' is not a number"),
    ],
)
def test_invalid_printed_files(tmp_path: Path, content: str, word: str) -> None:
    with pytest.raises(TableError, match=word):
        read_printed(csv(tmp_path, content))
