"""Data from files of another form than expected: a one-line error with key, value and expected form."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import time
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from pydantic import AfterValidator, Field

from evalkit.errors import TableError
from evalkit.inputs.validated import FileSettings, Listed, Named, NonEmpty, Number, Stored, misfit, validated
from tests.inputs.test_reading import VALUES


def _even(number: int) -> int:
    if number % 2:
        raise ValueError(f"{number} is odd; write an even number")
    return number


class Part(FileSettings):
    size: Annotated[int, Field(ge=0, le=9)] = 1
    texts: str | list[NonEmpty] = ""
    several: NonEmpty | Annotated[Listed[NonEmpty], Field(min_length=1)] | Literal["none"] | Number = "none"
    any_keys: dict[str, int] = Field(default_factory=dict)


class Whole(FileSettings):
    parts: Annotated[Named[Part], Field(min_length=1)]
    listed: Listed[Part] = ()
    number: float = 1.0
    even: Annotated[int, AfterValidator(_even)] = 0
    switch: bool = False
    kind: Literal["rows", "columns"] = "rows"
    marks: dict[Literal["bold", "underline"], str] = Field(default_factory=dict)
    either: str | Part | None = None
    only: Literal["this"] = "this"
    above: Annotated[float, Field(gt=0)] = 1
    least: Annotated[float, Field(ge=0)] = 1
    shaped: Annotated[str, Field(pattern="^a{2}$")] = "aa"
    kept: Number | None = None


class Answer(Stored):
    n: int
    value: float | None


def test_what_fits_is_what_was_written() -> None:
    content = {
        "parts": {"a": {"size": 3, "texts": ["x"]}, 7: {"texts": "y"}},
        "number": 2,
        "either": {"size": 2},
        "kept": 4,
        "listed": [{}],
    }
    whole = validated(content, Whole, TableError, "file")
    assert whole.parts == {"a": Part(size=3, texts=["x"]), "7": Part(texts="y")}
    assert (whole.number, whole.either, whole.switch, whole.listed) == (2, Part(size=2), False, (Part(),))
    assert (whole.kept, type(whole.kept)) == (4, int)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"part": {}}, "unknown key 'part': did you mean 'parts'? Known: above, either, even"),
        (
            {"parts": {"a": {"sise": 1}}},
            "'parts.a': unknown key 'sise': did you mean 'size'? Known: any_keys, several, size, texts",
        ),
        ({"listed": [{}, {"sise": 1}]}, "'listed[1]': unknown key 'sise': did you mean 'size'?"),
        ({"either": {"sise": 1}}, "'either': unknown key 'sise': did you mean 'size'?"),
        ({"marks": {"bald": "x"}}, "'marks': unknown key 'bald': did you mean 'bold'?"),
        ({7: 1}, "unknown key '7'"),
        ({"parts": {}}, "'parts' is {}: "),
        ({"parts": ["a"]}, "'parts' is ['a']: "),
        ({"parts": {"a": 1}}, "'parts.a' is 1: "),
        ({"listed": {}}, "'listed' is {}: "),
        ({"parts": {"a": {"size": 2.0}}}, "'parts.a.size' is 2.0: Input should be a valid integer"),
        ({"parts": {"a": {"size": "2"}}}, "'parts.a.size' is '2': "),
        ({"parts": {"a": {"size": True}}}, "'parts.a.size' is True: "),
        ({"parts": {"a": {"size": None}}}, "'parts.a.size' is None: "),
        ({"parts": {"a": {"size": -1}}}, "'parts.a.size' is -1: "),
        ({"parts": {"a": {"size": 10}}}, "'parts.a.size' is 10: "),
        (
            {"parts": {"a": {"texts": 3}}},
            "'parts.a.texts' is 3: Input should be a valid string or Input should be a valid list",
        ),
        ({"parts": {"a": {"texts": ["x", 3]}}}, "'parts.a.texts[1]' is 3: "),
        ({"parts": {"a": {"texts": ["x", ""]}}}, "'parts.a.texts[1]' is '': "),
        ({"parts": {"a": {"several": ["x", 3]}}}, "'parts.a.several[1]' is 3: "),
        ({"parts": {"a": {"several": None}}}, "'parts.a.several' is None: "),
        ({"parts": {"a": {"several": []}}}, "'parts.a.several' is []: "),
        ({"parts": {"a": {"any_keys": {7: 1}}}}, "'parts.a.any_keys[7]' is 7: Input should be a valid string"),
        ({"number": "2.7"}, "'number' is '2.7': "),
        ({"number": False}, "'number' is False: "),
        ({"kept": True}, "'kept' is True: "),
        ({"kept": "4"}, "'kept' is '4': "),
        ({"least": -0.5}, "'least' is -0.5: "),
        ({"number": math.nan}, "'number' is nan: "),
        ({"kept": math.inf}, "'kept' is inf: "),
        ({"kept": -math.inf}, "'kept' is -inf: "),
        ({"shaped": "a"}, "'shaped' is 'a': "),
        ({"above": 0}, "'above' is 0: "),
        ({"even": 3}, "'even': 3 is odd; write an even number"),
        ({"switch": 1}, "'switch' is 1: "),
        ({"switch": "yes"}, "'switch' is 'yes': "),
        ({"kind": "lines"}, "'kind' is 'lines': Input should be 'rows' or 'columns'"),
        ({"only": "that"}, "'only' is 'that': "),
        ({"either": 3}, "'either' is 3: "),
        ({"either": {"size": "x"}}, "'either.size' is 'x': "),
        ({"kind": "x" * 10**5}, "'kind' is 'xxx"),
        ({"parts": {"x" * 10**5: 3}}, f"'parts.{'x' * 59}…' is 3: "),
        ({"x" * 10**5: 3}, f"unknown key '{'x' * 59}…'"),
    ],
)
def test_what_does_not_fit(content: dict[Any, Any], said: str) -> None:
    with pytest.raises(TableError) as caught:
        validated({"parts": {"a": {}}} | content, Whole, TableError, "file own.yaml")
    message = str(caught.value)
    assert message.startswith(f"file own.yaml: {said}")
    assert message.isprintable() and len(message) < 400


def test_what_lacks_and_what_is_something_else() -> None:
    for content, said in (
        ({}, "it lacks 'parts'"),
        ({"listed": [{"size": "x"}]}, "'listed[0].size' is 'x': "),
        ({"listed": [{"sise": 1}]}, "'listed[0]': unknown key 'sise'"),
        ([], "it is []: "),
        (None, "it is None: "),
    ):
        with pytest.raises(TableError, match=re.escape(f"file: {said}")):
            validated(content, Whole, TableError, "file")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"n": 1, "value": 2, "more": "x"}, None),
        ({"n": 1, "value": None}, None),
        ({"n": 1}, "it lacks 'value'"),
        ({"n": True, "value": None}, "'n' is True: Input should be a valid integer"),
        ({"n": 1, "value": "2"}, "'value' is '2': Input should be a valid number"),
        (None, "it is None: Input should be a valid dictionary or instance of Answer"),
    ],
)
def test_what_was_stored(content: object, said: str | None) -> None:
    assert misfit(content, Answer) == said


class Bar(FileSettings):
    kind: Literal["bar"]
    size: int


class Dot(FileSettings):
    kind: Literal["dot"]


class Figure(FileSettings):
    marks: dict[str, Annotated[Bar | Dot, Field(discriminator="kind")]]


def test_a_location_with_a_step_that_is_no_key() -> None:
    """pydantic puts the tag of a union's member into it."""
    assert misfit({"marks": {"a": {"kind": "bar", "size": "x"}}}, Figure) == (
        "'marks.a.size' is 'x': Input should be a valid integer"
    )


def test_millions_of_errors_take_no_time() -> None:
    before = time.process_time()
    assert misfit([1] * 10**6, list[Answer]) == "1,000,000 of its values are of another form"
    assert time.process_time() - before < 10


@pytest.mark.parametrize("arguments", [["--help"], ["table", "--help"]])
def test_help_needs_no_validation(arguments: list[str]) -> None:
    statement = f"import sys\nfrom evalkit.cli.root import cli\ncli.main({arguments!r}, standalone_mode=False)\n"
    check = "assert not {'pydantic', 'yaml'} & set(sys.modules), 'imported'"
    subprocess.run([sys.executable, "-c", statement + check], check=True, capture_output=True)


@given(VALUES)
def test_anything_is_described_in_a_line(content: object) -> None:
    for form in (Whole, Answer, dict[str, Part], list[str | list[int]]):
        for data in (content, {"parts": content, "n": content}):
            said = str(TableError(misfit(data, form) or "fits"))
            assert "\n" not in said and len(said) < 1000
