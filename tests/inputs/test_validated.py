"""Data from files, options and keywords of another form than expected: nothing is converted, and the key is named."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from hypothesis import given
from pydantic import AfterValidator, Field

from evalkit.benchmarks.lm_eval.harness import Harness
from evalkit.benchmarks.needle import NeedleRequest
from evalkit.benchmarks.request import SuiteRequest, request_of
from evalkit.errors import TableError, UsageError
from evalkit.inputs.validated import (
    FileSettings,
    Listed,
    Named,
    NonEmpty,
    Number,
    Stored,
    misfit,
    read_settings,
    validated,
)
from evalkit.models.loading.spec import ModelSpec
from tests.inputs.test_reading import VALUES


def _even(number: int) -> int:
    if number % 2:
        raise ValueError(f"{number} is odd; write an even number")
    return number


class Part(FileSettings):
    size: Annotated[int, Field(ge=0, le=9)] = 1
    texts: str | list[NonEmpty] = ""


class Whole(FileSettings):
    parts: Annotated[Named[Part], Field(min_length=1)]
    listed: Listed[Part] = ()
    number: float = 1.0
    even: Annotated[int, AfterValidator(_even)] = 0
    switch: bool = False
    kind: Literal["rows", "columns"] = "rows"
    either: str | Part | None = None
    kept: Number | None = None


class Answer(Stored):
    n: int
    value: float | None


def test_what_fits_is_what_was_written(tmp_path: Path) -> None:
    text = "{parts: {a: {size: 3, texts: [x]}, 7: {texts: y}}, number: 2, either: {size: 2}, kept: 4, listed: [{}]}"
    (tmp_path / "own.yaml").write_text(text, encoding="utf-8")
    whole = read_settings(tmp_path / "own.yaml", Whole, TableError)
    assert whole.parts == {"a": Part(size=3, texts=["x"]), "7": Part(texts="y")}
    assert (whole.number, whole.either, whole.switch, whole.listed) == (2, Part(size=2), False, (Part(),))
    assert (whole.kept, type(whole.kept)) == (4, int)
    (tmp_path / "own.yaml").write_text("parts: {7: {}, '7': {}}\n", encoding="utf-8")
    with pytest.raises(TableError, match=r"own\.yaml: 'parts': .*'7' occurs twice"):
        read_settings(tmp_path / "own.yaml", Whole, TableError)


@pytest.mark.parametrize(
    ("content", "key", "words"),
    [
        ({"part": {}}, "", ["'part'", "'parts'"]),
        ({"parts": {"a": {"sise": 1}}}, "parts.a", ["'sise'", "'size'"]),
        ({"listed": [{}, {"sise": 1}]}, "listed[1]", ["'sise'", "'size'"]),
        ({7: 1}, "", ["'7'"]),
        ({"parts": {}}, "parts", ["{}"]),
        ({"parts": ["a"]}, "parts", ["['a']"]),
        ({"parts": {"a": {"size": 2.0}}}, "parts.a.size", ["2.0", "integer"]),
        ({"parts": {"a": {"size": "2"}}}, "parts.a.size", ["'2'"]),
        ({"parts": {"a": {"size": True}}}, "parts.a.size", ["True"]),
        ({"parts": {"a": {"size": 10}}}, "parts.a.size", ["10"]),
        ({"parts": {"a": {"texts": ["x", 3]}}}, "parts.a.texts[1]", ["3"]),
        ({"number": "2.7"}, "number", ["'2.7'"]),
        ({"number": math.nan}, "number", ["nan"]),
        ({"kept": True}, "kept", ["True"]),
        ({"kept": math.inf}, "kept", ["inf"]),
        ({"even": 3}, "even", ["3 is odd"]),
        ({"switch": 1}, "switch", ["1"]),
        ({"switch": "yes"}, "switch", ["'yes'"]),
        ({"kind": "lines"}, "kind", ["'lines'", "'rows' or 'columns'"]),
        ({"either": {"size": "x"}}, "either.size", ["'x'"]),
        ({"parts": {"x" * 10**5: 3}}, f"parts.{'x' * 59}…", ["3"]),
    ],
)
def test_what_does_not_fit(content: dict[Any, Any], key: str, words: list[str]) -> None:
    with pytest.raises(TableError) as caught:
        validated({"parts": {"a": {}}} | content, Whole, TableError, "file own.yaml")
    message = str(caught.value)
    assert message.startswith(f"file own.yaml: '{key}'" if key else "file own.yaml: ")
    assert all(word in message for word in words), message
    assert message.isprintable() and len(message) < 400


@pytest.mark.parametrize(
    ("content", "key"),
    [({"n": 1, "value": 2, "more": "x"}, None), ({"n": 1}, "'value'"), ({"n": True, "value": None}, "'n' is True"),
     ({"n": 1, "value": "2"}, "'value' is '2'"), (None, "None")],
)  # fmt: skip
def test_what_was_stored(content: object, key: str | None) -> None:
    said = misfit(content, Answer)
    assert said is None if key is None else key in str(said)


@given(VALUES)
def test_anything_is_described_in_a_line(content: object) -> None:
    for form in (Whole, Answer, dict[str, Part], list[str | list[int]]):
        for data in (content, {"parts": content, "n": content}):
            said = str(TableError(misfit(data, form) or "fits"))
            assert "\n" not in said and len(said) < 1000


# Options and keywords


@pytest.mark.parametrize(
    "options",
    [
        {"limit": 2.7}, {"limit": 2.0}, {"limit": True}, {"limit": "2.7"}, {"limit": 0}, {"context": 4096.7},
        {"context_original": "many"}, {"num_fewshot": float("nan")}, {"token_budget": 512.5}, {"log_samples": "maybe"},
        {"trust_remote_code": "no"}, {"allow_pickle": 1}, {"suite": ""}, {"suite": ["zeroshot8"]},
        {"tasks": ["piqa", ""]}, {"tasks": ["piqa", 5]}, {"tasks": []}, {"tasks": ","}, {"data_dir": True},
        {"data_dir": "a\0b"}, {"output": "a\udcff"}, {"include_path": "~nobody-of-this-name/tasks"},
    ],
    ids=str,
)  # fmt: skip
def test_options_that_do_not_fit(options: dict[str, Any]) -> None:
    [name] = options
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')}"):
        request_of(SuiteRequest, "demo", options)


@pytest.mark.parametrize(
    "options", [{"lengths": 300}, {"lengths": "100,x"}, {"depths": [True]}, {"repeats": 0}, {"length": 3}], ids=str
)
def test_settings_of_a_benchmark_that_do_not_fit(options: dict[str, Any]) -> None:
    [name] = options
    with pytest.raises(UsageError, match=name):
        request_of(NeedleRequest, "demo", options)


def test_options_that_fit() -> None:
    options = {"limit": np.int64(3), "context": "4096", "token_budget": "auto", "tasks": "piqa, boolq,", "suite": None,
               "data_dir": "here", "log_samples": True}  # fmt: skip
    spec = ModelSpec("./demo", context=4096)
    expected = SuiteRequest(spec, limit=3, tasks=("piqa", "boolq"), data_dir=Path("here"), log_samples=True)
    assert request_of(SuiteRequest, "./demo", options) == expected
    request = request_of(NeedleRequest, Path("demo"), {"lengths": "100, 200", "depths": (0, 50)})
    assert (request.lengths, request.depths) == ((100, 200), (0.0, 50.0))


@pytest.mark.parametrize(
    "options",
    [{"allow_pickle": "no"}, {"trust_remote_code": "no"}, {"add_bos_token": "no"}, {"revision": ""}, {"dtype": 5},
     {"max_batch_size": 2.5}, {"pretrained": 5}, {"token_budget": 512.5}, {"batch_size": "many"}],
    ids=str,
)  # fmt: skip
def test_a_harness_takes_what_fits(checkpoint: Path, options: dict[str, Any]) -> None:
    [(name, value)] = options.items()
    with pytest.raises(UsageError, match=f"(?i)({name.replace('_', '[-_]')}|--model) is {value!r}|is empty"):
        Harness(**({"pretrained": str(checkpoint)} | options))
