"""Large, deep, ambiguous or binary JSON and YAML: a one-line error of the caller's class, with file and line."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from evalkit.benchmarks.needle.text import Haystack
from evalkit.data.files import read as read_documents
from evalkit.errors import DataError, TableError
from evalkit.inputs import reading
from evalkit.inputs.reading import read_json
from evalkit.inputs.yaml_reading import read_task_file, read_yaml, read_yaml_as_typed
from evalkit.paths import resource
from evalkit.tables.published import read_numbers

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
)
"""10⁹ values in half a kilobyte."""


def refusal(path: Path, content: str | bytes, read: object = read_yaml) -> str:
    """Return the one-line error of a file with that content."""
    path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
    before = time.process_time()
    with pytest.raises(TableError) as caught:
        read(path, TableError, "file")  # type: ignore[operator]
    assert time.process_time() - before < 10
    message = str(caught.value)
    assert message.isprintable()
    assert message.startswith(f"file {path}")
    return message.removeprefix(f"file {path}")


def test_the_largest_integers_and_digits_in_texts(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(f'{{"a": {10**308}, "b": "{"9" * 5000}"}}')
    for read in (read_json, read_yaml):
        assert read(tmp_path / "a", TableError) == {"a": 10**308, "b": "9" * 5000}


@pytest.mark.parametrize("read", [read_yaml, read_yaml_as_typed, read_task_file])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a: 1\nb: 2\na: 3", ", line 3: not valid YAML: the key 'a' is already in line 1"),
        ("a: {b: 1, b: 1}", ", line 1: not valid YAML: the key 'b' is already in line 1"),
        ("x: &x {a: 1}\ny: {<<: *x, <<: *x}", ", line 2: not valid YAML: the key '<<' is already in line 2"),
        (BOMB, ", line 6: not valid YAML: its aliases expand to more than 1,048,576 values and characters"),
        (f"a: &a {'x' * 9999}\nb: [{'*a, ' * 200}]", ", line 2: not valid YAML: its aliases expand to more than"),
        ("a: &a [*a]", ", line 1: not valid YAML: the alias *a refers to a node that contains it"),
        ("[" * 100_000, ", line 1: not valid YAML: nested more than 100 levels deep"),
        ("".join(f"{' ' * n}a:\n" for n in range(500)), ", line 100: not valid YAML: nested more than 100 levels deep"),
        ("a0: &a0 x\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 150)), "nested more than 100 levels"),
        ("a: " + "x" * 300_000, " is too large: more than 262,144 bytes"),
        (b"a: 1\nb: \xff", ", line 2: expected UTF-8, found the byte 0xff"),
        ("a: \x1b[2J", ", line 1: not valid YAML: the character U+001B is not allowed"),
        ("a: [1,\n  2", ", line 2: not valid YAML: while parsing a flow sequence expected ',' or ']'"),
        ("a: 1\n---\nb: 2", ", line 2: not valid YAML: expected a single document"),
        ("? [a]\n: b", ", line 1: not valid YAML: a key is a list or a mapping"),
        ("a: !!python/object/apply:os.system [ls]", ", line 1: not valid YAML: could not determine a constructor"),
        ("a: !!binary eA==", ", line 1: not valid YAML: could not determine a constructor"),
        ("a: *nowhere", ", line 1: not valid YAML: found undefined alias 'nowhere'"),
    ],
)
def test_yaml_that_is_rejected(tmp_path: Path, content: str | bytes, said: str, read: object) -> None:
    assert said in refusal(tmp_path / "own.yaml", content, read)


def test_what_only_values_can_get_wrong(tmp_path: Path) -> None:
    assert "Exceeds the limit" in refusal(tmp_path / "a.yaml", f"a: {'9' * 5000}")
    assert "could not determine a constructor for the tag '!function'" in refusal(tmp_path / "a.yaml", "a: !function b")


def test_what_aliases_and_merges_are_for_still_works(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("x: &x {a: 1, b: 2}\ny: {<<: *x, b: 3}\nz: [*x, *x]", encoding="utf-8")
    x = {"a": 1, "b": 2}
    assert read_yaml(tmp_path / "a.yaml", TableError) == {"x": x, "y": {"a": 1, "b": 3}, "z": [x, x]}


@pytest.mark.parametrize("text", ["010", "1:30", "2026-11-21", "2026-13-45", "0x_", "0o7"])
def test_text_that_yaml_1_1_reads_as_another_number_or_a_date_stays_text(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.yaml").write_text(f"a: {text}", encoding="utf-8")
    assert read_yaml(tmp_path / "a.yaml", TableError) == {"a": text}


@pytest.mark.parametrize("text", ["0123", "2.70", "true", "1_000", "no", ".inf", "'5'", "2026-11-21"])
def test_values_as_typed(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.yaml").write_text(f"a: {text}\nb: [{text}, ~]\nc:\n", encoding="utf-8")
    bare = text.strip("'")
    assert read_yaml_as_typed(tmp_path / "a.yaml", TableError) == {"a": bare, "b": [bare, None], "c": None}


def test_evalkits_own_files_read_as_they_did() -> None:
    files = [*resource("configs").rglob("*.yaml"), *resource("results").rglob("*.yaml")]
    assert len(files) > 20
    for path in files:
        assert read_yaml(path, TableError) == yaml.safe_load(path.read_text(encoding="utf-8")), path


def test_lm_evals_task_files_can_be_read(tmp_path: Path) -> None:
    for path in resource("tasks").rglob("*.yaml"):
        assert "task" in read_task_file(path, TableError)
    (tmp_path / "a.yaml").write_text("a: !function code.f\nyes: 1", encoding="utf-8")
    assert read_task_file(tmp_path / "a.yaml", TableError) == {"a": None, True: 1}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[" * 100_000, ": nested more than 100 levels deep"),
        ("[" * 200 + "]" * 200, ": nested more than 100 levels deep"),
        ('{"a":' * 200 + "1" + "}" * 200, ": nested more than 100 levels deep"),
        ('{\n"a": 1,\n"a": 2}', ": the key 'a' occurs twice, with different values"),
        ('{"a": ["\\ud800"]}', ": a text holds half of a surrogate pair"),
        ('{"\\uDC00": 1}', ": a text holds half of a surrogate pair"),
        ('{"a": 1,\n}', ", line 2: not valid JSON: "),
        (b'{"a":\n"\xff"}', ", line 2: expected UTF-8, found the byte 0xff"),
        ("", ", line 1: not valid JSON: Expecting value"),
        ('{"a": ' + "9" * 5000 + "}", ": Exceeds the limit"),
    ],
)
def test_json_that_is_rejected(tmp_path: Path, content: str | bytes, said: str) -> None:
    assert refusal(tmp_path / "own.json", content, read_json).startswith(said)


def test_json_that_says_one_thing_twice(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": [1], "b": "\\ud83c\\udf0a", "a": [1]}', encoding="utf-8")
    assert read_json(tmp_path / "a.json", TableError) == {"a": [1], "b": "🌊"}


def test_a_json_file_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MOST_BYTES", 10)
    assert refusal(tmp_path / "own.json", '{"a": 12345}', read_json) == ": is too large: more than 10 bytes"


def test_json_of_millions_of_brackets(tmp_path: Path) -> None:
    """Their depth is checked before parsing; brackets inside strings do not count."""
    assert refusal(tmp_path / "own.json", "[" + "[],[]," * 2**22 + "[]]", read_json).startswith(": is too large")
    deep = "[" * 50 + '"' + "[" * 200 + '\\"[", "' + "\\\\" * 3 + '"' + "]" * 50
    (tmp_path / "own.json").write_text(deep, encoding="utf-8")
    assert json.dumps(read_json(tmp_path / "own.json", TableError)) == deep
    wide = "[" + "[[1]]," * 1000 + "[]]"
    assert reading.parse_json(wide.encode()) == json.loads(wide)
    before = time.process_time()
    with pytest.raises(reading.Unreadable, match="nested more than 100 levels deep"):
        reading.parse_json(b"[[],[]," * 2**18)
    with pytest.raises(reading.Unreadable, match="not valid JSON: Unterminated string"):
        reading.parse_json(b"[[]" + b",[]" * 101 + rb',"' + rb"\"" * 2**20)
    assert time.process_time() - before < 1


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs a file without end")
def test_what_has_no_end(tmp_path: Path) -> None:
    for read in (read_json, read_yaml):
        with pytest.raises(TableError, match=r"^file /dev/zero: is not a regular file$"):
            read(Path("/dev/zero"), TableError, "file")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(reading.Unreadable, match="is not a regular file"):
        reading.read_bytes(tmp_path / "pipe", 9)
    with pytest.raises(TableError, match=r"/dev/zero.*not a regular file"):
        read_numbers(Path("/dev/zero"))
    with pytest.raises(DataError, match=r"--text /dev/zero: .*is not a regular file"):
        Haystack(Path("/dev/zero"))
    for name in ("piqa.json", "piqa.jsonl"):
        (tmp_path / name).symlink_to("/dev/zero")
        with pytest.raises(DataError, match=rf"{name} \(piqa\): is not a regular file"):
            next(read_documents(tmp_path / name, "piqa"))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for place, reason in (("none", "No such file"), ("", "Is a directory"), ("a\0b", "embedded null byte")):
        with pytest.raises(DataError, match=reason):
            read_json(tmp_path / place, DataError)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=30,
)


@given(VALUES)
def test_all_other_json_reads_as_the_standard_library_reads_it(value: object) -> None:
    for ascii_only in (True, False):
        assert reading.parse_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value
