"""Files, options and keywords: what fits is what was written; what does not is a line with file, line or key."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AfterValidator, Field

from evalkit.benchmarks.lm_eval.harness import Harness
from evalkit.benchmarks.request import SuiteRequest, request_of
from evalkit.data.sources import read as read_documents
from evalkit.errors import DataError, TableError, UsageError, reading_as
from evalkit.inputs import reading
from evalkit.inputs.reading import read_json, read_task_file, read_yaml, read_yaml_as_typed
from evalkit.inputs.validated import FileSettings, Listed, Named, NonEmpty, Number, Stored, read_settings, validated
from evalkit.longcontext.ruler.needle import NeedleRequest
from evalkit.models.loading.spec import ModelSpec
from evalkit.paths import resource

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
)
"""10⁹ values in half a kilobyte."""
YAML = {
    "x: &x {a: 1}\ny: {<<: *x, <<: *x}": ["line 2", "'<<'"],
    BOMB: ["aliases expand"],
    f"a: &a {'x' * 9999}\nb: [{'*a, ' * 200}]": ["aliases expand"],
    "a0: &a0 x\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 150)): ["nested more than 100 levels"],
    b"a: 1\nb: \xff": ["line 2", "0xff"],
    "a: \x1b[2J": ["line 1", "U+001B"],
    "? [a]\n: b": ["a key is"],
}
"""tests/guards have more."""
JSON = {
    "[" * 101 + "]" * 101: ["nested more than 100 levels"],
    '{\n"a": 1,\n"a": 2}': ["'a' occurs twice"],
    '{"a": ["\\ud800"]}': ["surrogate"],
    b'{"a":\n"\xff"}': ["line 2", "0xff"],
    '{"a": ' + "9" * 5000 + "}": ["limit"],
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=30,
)


def refusal(path: Path, content: str | bytes, read: Any = read_yaml) -> str:
    """Return the one-line error of a file with that content."""
    path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
    with pytest.raises(TableError) as caught:
        read(path, TableError, "file")
    message = str(caught.value)
    assert message.isprintable() and message.startswith(f"file {path}")
    return message.removeprefix(f"file {path}")


@pytest.mark.parametrize(("content", "words"), [*YAML.items(), *JSON.items()], ids=lambda value: repr(value[:9]))
def test_files_that_are_rejected(tmp_path: Path, content: str | bytes, words: list[str]) -> None:
    for read in (read_json,) if content in JSON else (read_yaml, read_yaml_as_typed, read_task_file):
        said = refusal(tmp_path / "own", content, read)
        assert all(word in said for word in words), said


def test_yaml_values(tmp_path: Path) -> None:
    """Aliases and merges work; what YAML 1.1 reads as another number or a date stays text; values as they are typed."""
    path = tmp_path / "a.yaml"
    path.write_text("x: &x {a: 1, b: 2}\ny: {<<: *x, b: 3}\nz: [*x, *x]", encoding="utf-8")
    x = {"a": 1, "b": 2}
    assert read_yaml(path, TableError) == {"x": x, "y": {"a": 1, "b": 3}, "z": [x, x]}
    for text in ("010", "1:30", "2026-11-21", "2026-13-45", "0x_", "0o7"):
        path.write_text(f"a: {text}", encoding="utf-8")
        assert read_yaml(path, TableError) == {"a": text}
    for text in ("0123", "2.70", "true", "1_000", "no", ".inf", "2026-11-21"):
        path.write_text(f"a: {text}\nb: [{text}, ~]\nc:\n", encoding="utf-8")
        assert read_yaml_as_typed(path, TableError) == {"a": text, "b": [text, None], "c": None}
    path.write_text("a: !function code.f\nyes: 1", encoding="utf-8")
    assert read_task_file(path, TableError) == {"a": None, True: 1}
    files = [*resource("configs").rglob("*.yaml"), *resource("results").rglob("*.yaml")]
    assert len(files) > 20
    assert all(read_yaml(file, TableError) == yaml.safe_load(file.read_text(encoding="utf-8")) for file in files)


@given(VALUES)
def test_other_json_reads_as_the_standard_library_reads_it(value: object) -> None:
    for ascii_only in (True, False):
        assert reading.parse_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


def test_what_is_large_or_has_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for content in ("[" * 100 + "]" * 100, "[" + "[[1]]," * 1000 + "[]]", "[" * 50 + '"' + "[" * 200 + '"' + "]" * 50):
        assert reading.parse_json(content.encode()) == json.loads(content)
    for read in (read_json, read_yaml):
        with pytest.raises(TableError, match=r"/dev/zero.* is not a regular file"):
            read(Path("/dev/zero"), TableError, "file")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(reading.Unreadable, match="is not a regular file"):
        reading.read_bytes(tmp_path / "pipe", 9)
    (tmp_path / "piqa.jsonl").symlink_to("/dev/zero")
    with pytest.raises(DataError, match=r"piqa.jsonl .*is not a regular file"):
        next(read_documents(tmp_path / "piqa.jsonl", "piqa"))
    monkeypatch.setattr(reading, "MOST_BYTES", 10)
    assert "more than 10 bytes" in refusal(tmp_path / "a.json", '{"a": 12345}', read_json)


def test_a_readers_error_becomes_one_line_with_the_file() -> None:
    with pytest.raises(UsageError, match=r"own\.yaml.*KeyError"), reading_as(Path("own.yaml"), "a suite", UsageError):
        raise KeyError("task")
    with pytest.raises(DataError), reading_as(Path("own.yaml"), "a suite", UsageError):
        raise DataError("an error of evalkit passes")


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
        ({"listed": [{}, {"sise": 1}]}, "listed[1]", ["'sise'", "'size'"]),
        ({"parts": {"a": {"size": 2.0}}}, "parts.a.size", ["2.0", "integer"]),
        ({"parts": {"a": {"size": True}}}, "parts.a.size", ["True"]),
        ({"parts": {"a": {"texts": ["x", 3]}}}, "parts.a.texts[1]", ["3"]),
        ({"kept": math.inf}, "kept", ["inf"]),
        ({"even": 3}, "even", ["3 is odd"]),
        ({"kind": "lines"}, "kind", ["'lines'", "'rows' or 'columns'"]),
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


@given(VALUES)
def test_anything_is_described_in_a_line(content: object) -> None:
    def said(form: Any, data: object) -> str:
        try:
            validated(data, form, TableError, "file")
        except TableError as error:
            return str(error)
        return ""

    for form in (Whole, Answer, dict[str, Part], list[str | list[int]]):
        for data in (content, {"parts": content, "n": content}):
            assert "\n" not in said(form, data) and len(said(form, data)) < 1000
    assert not said(Answer, {"n": 1, "value": 2, "more": "x"})
    assert "'n' is True" in said(Answer, {"n": True, "value": None})


# Options and keywords


@pytest.mark.parametrize(
    "options",
    [
        {"limit": 2.0}, {"limit": True}, {"limit": 0}, {"num_fewshot": float("nan")}, {"trust_remote_code": "no"},
        {"suite": ["zeroshot8"]}, {"tasks": ["piqa", 5]}, {"tasks": ","}, {"data_dir": "a\0b"},
        {"include_path": "~nobody-of-this-name/tasks"}, {"lengths": "100,x"}, {"depths": [True]}, {"length": 3},
    ],
    ids=str,
)  # fmt: skip
def test_options_that_do_not_fit(options: dict[str, Any]) -> None:
    [name] = options
    request = NeedleRequest if name in ("lengths", "depths", "repeats", "length") else SuiteRequest
    with pytest.raises(UsageError, match=name.replace("_", "-")):
        request_of(request, "demo", options)


def test_options_that_fit() -> None:
    options = {"limit": np.int64(3), "context": "4096", "token_budget": "auto", "tasks": "piqa, boolq,", "suite": None,
               "data_dir": "here", "log_samples": True}  # fmt: skip
    spec = ModelSpec("./demo", context=4096)
    expected = SuiteRequest(spec, limit=3, tasks=("piqa", "boolq"), data_dir=Path("here"), log_samples=True)
    assert request_of(SuiteRequest, "./demo", options) == expected
    request = request_of(NeedleRequest, Path("demo"), {"lengths": "100, 200", "depths": (0, 50)})
    assert (request.lengths, request.depths) == ((100, 200), (0.0, 50.0))


def test_a_harness_takes_what_fits(checkpoint: Path) -> None:
    values = {"add_bos_token": "no", "dtype": 5, "pretrained": 5}
    for name, value in values.items():
        with pytest.raises(UsageError, match=f"(?i)({name.replace('_', '[-_]')}|--model) is {value!r}"):
            Harness(**({"pretrained": str(checkpoint)} | {name: value}))
