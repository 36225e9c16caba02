"""Large, deep, ambiguous or binary JSON and YAML: a one-line error of the caller's class, with file and line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from evalkit.data.sources import read as read_documents
from evalkit.errors import DataError, TableError, UsageError, reading_as
from evalkit.inputs import reading
from evalkit.inputs.reading import read_json, read_task_file, read_yaml, read_yaml_as_typed
from evalkit.paths import resource

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
)
"""10⁹ values in half a kilobyte."""


def refusal(path: Path, content: str | bytes, read: Any = read_yaml) -> str:
    """Return the one-line error of a file with that content."""
    path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
    with pytest.raises(TableError) as caught:
        read(path, TableError, "file")
    message = str(caught.value)
    assert message.isprintable()
    assert message.startswith(f"file {path}")
    return message.removeprefix(f"file {path}")


@pytest.mark.parametrize("read", [read_yaml, read_yaml_as_typed, read_task_file])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a: 1\nb: 2\na: 3", ["line 3", "'a'"]),
        ("x: &x {a: 1}\ny: {<<: *x, <<: *x}", ["line 2", "'<<'"]),
        (BOMB, ["aliases expand"]),
        (f"a: &a {'x' * 9999}\nb: [{'*a, ' * 200}]", ["aliases expand"]),
        ("a: &a [*a]", ["contains it"]),
        ("[" * 100_000, ["nested more than 100 levels"]),
        ("a0: &a0 x\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 150)), ["nested more than 100 levels"]),
        ("a: " + "x" * 300_000, ["too large"]),
        (b"a: 1\nb: \xff", ["line 2", "0xff"]),
        ("a: \x1b[2J", ["line 1", "U+001B"]),
        ("a: [1,\n  2", ["line 2"]),
        ("? [a]\n: b", ["a key is"]),
        ("a: !!python/object/apply:os.system [ls]", ["line 1", "constructor"]),
    ],
)
def test_yaml_that_is_rejected(tmp_path: Path, content: str | bytes, words: list[str], read: Any) -> None:
    said = refusal(tmp_path / "own.yaml", content, read)
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
    assert "'!function'" in refusal(path, "a: !function b")


def test_evalkits_own_files_read_as_they_did() -> None:
    files = [*resource("configs").rglob("*.yaml"), *resource("results").rglob("*.yaml")]
    assert len(files) > 20
    for path in files:
        assert read_yaml(path, TableError) == yaml.safe_load(path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[" * 100_000, ["nested more than 100 levels"]),
        ("[" * 101 + "]" * 101, ["nested more than 100 levels"]),
        ('{"a":' * 200 + "1" + "}" * 200, ["nested more than 100 levels"]),
        ('{\n"a": 1,\n"a": 2}', ["'a' occurs twice"]),
        ('{"a": ["\\ud800"]}', ["surrogate"]),
        ('{"a": 1,\n}', ["line 2"]),
        (b'{"a":\n"\xff"}', ["line 2", "0xff"]),
        ('{"a": ' + "9" * 5000 + "}", ["limit"]),
    ],
)
def test_json_that_is_rejected(tmp_path: Path, content: str | bytes, words: list[str]) -> None:
    said = refusal(tmp_path / "own.json", content, read_json)
    assert all(word in said for word in words), said


def test_json_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": [1], "b": "\\ud83c\\udf0a", "a": [1]}', encoding="utf-8")
    assert read_json(path, TableError) == {"a": [1], "b": "🌊"}
    for content in ("[" * 100 + "]" * 100, "[" + "[[1]]," * 1000 + "[]]", "[" * 50 + '"' + "[" * 200 + '"' + "]" * 50):
        assert reading.parse_json(content.encode()) == json.loads(content)
    monkeypatch.setattr(reading, "MOST_BYTES", 10)
    assert "more than 10 bytes" in refusal(path, '{"a": 12345}', read_json)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs a file without end")
def test_what_has_no_end(tmp_path: Path) -> None:
    for read in (read_json, read_yaml):
        with pytest.raises(TableError, match=r"/dev/zero.* is not a regular file"):
            read(Path("/dev/zero"), TableError, "file")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(reading.Unreadable, match="is not a regular file"):
        reading.read_bytes(tmp_path / "pipe", 9)
    (tmp_path / "piqa.jsonl").symlink_to("/dev/zero")
    with pytest.raises(DataError, match=r"piqa.jsonl .*is not a regular file"):
        next(read_documents(tmp_path / "piqa.jsonl", "piqa"))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=30,
)


@given(VALUES)
def test_all_other_json_reads_as_the_standard_library_reads_it(value: object) -> None:
    for ascii_only in (True, False):
        assert reading.parse_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


class _Tasks(BaseModel):
    tasks: list[str]


@pytest.mark.parametrize(
    ("content", "parse", "words"),
    [
        (b"{}", lambda text: json.loads(text)["tasks"], ["KeyError", "'tasks'"]),
        (b'{"tasks": [1]}', _Tasks.model_validate_json, ["ValidationError", "'tasks.0'"]),
        (b"\xff", str, ["UnicodeDecodeError"]),
        (b"a: [", yaml.safe_load, ["ParserError"]),
        (None, str, ["No such file"]),
    ],
)
def test_a_readers_error_becomes_one_line_with_the_file(
    content: bytes | None, parse: Any, words: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "own.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as raised, reading_as(path, "a suite", UsageError):
        parse(path.read_text(encoding="utf-8"))
    assert all(word in str(raised.value) for word in (str(path), *words))
    assert "\n" not in str(raised.value)
    with pytest.raises(DataError), reading_as(path, "a suite", UsageError):
        raise DataError("an error of evalkit passes")
