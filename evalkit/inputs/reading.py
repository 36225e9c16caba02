"""Reading of untrusted files for the whole package: JSON, YAML and text.

In: a file, or bytes of a part of one. Out: plain data: mappings, lists, strings, numbers, booleans, None. Size, nesting
depth and the expansion of aliases are limited, and ambiguous content is rejected: duplicate keys with two values, lone
surrogates. No code is run. Every failure becomes a one-line error of the caller's class, which names the file and the
line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from evalkit.errors import DataError, reading_as

MOST_BYTES = 2**24
"""Size limit of files without a limit of their own below: the index of a thousand shards has a few megabytes."""
MOST_YAML_BYTES = 2**18
"""PyYAML reads a tenth of a megabyte a second, and files written by hand are smaller."""
MOST_TEXT_BYTES = 2**28
"""Size limit of a text file, or of a trainer's log."""
MOST_DOCUMENT_BYTES = 2**30
"""Size limit of a file of documents or predictions."""
MOST_EXPANDED = 2**20
"""Maximum nodes and characters of a YAML file with all aliases expanded."""
DEEPEST = 100
"""Maximum levels of nesting. Other code recurses over the data, so even data that parses must be shallow."""
TOO_DEEP = f"nested more than {DEEPEST} levels deep"
Reason = Callable[[str], Exception]
"""An error class, or another function from a message to an error."""

HALF = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair."""
_ESCAPED_HALF = re.compile(rb"\\u[dD][89a-fA-F]")


class Unreadable(ValueError):
    """A file, or a part of one, that cannot be read; begins with its line, where known."""


def read_bytes(path: Path, most: int) -> bytes:
    """Read a regular file of at most so many bytes; pipes and devices, which may never end, are `Unreadable`."""
    if not (path.is_file() or path.is_dir()) and path.exists():
        raise Unreadable("is not a regular file")
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise Unreadable(f"is too large: more than {most:,} bytes")
    return data


def read_as(path: Path, error: Reason, what: str, most: int, parse: Callable[[bytes], Any]) -> Any:
    """Read a file of at most so many bytes and parse it; `what` describes it in messages, before its path.

    `parse` raises `Unreadable`, or another `ValueError`, for invalid content.
    """
    try:
        return parse(read_bytes(path, most))
    except (OSError, ValueError) as cause:  # ValueError: an invalid path too
        raise error(f"{what} {path}: {getattr(cause, 'strerror', None) or cause}".lstrip()) from cause


def read_given_text(path: Path) -> tuple[bytes, str]:
    """Read the file of `--text`: its bytes, and its text without a byte order mark, which is not empty."""
    with reading_as(f"--text {path}", "a text in UTF-8", DataError):
        content = read_bytes(path.expanduser(), MOST_TEXT_BYTES)
        text = content.decode("utf-8-sig")
    if not text.strip():
        raise DataError(f"--text {path}: the file has no text; give a file with at least one sentence")
    return content, text


def decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise Unreadable(f"line {line}: expected UTF-8, found the byte 0x{data[error.start]:02x}") from error


def read_json(path: Path, error: Reason, what: str = "", most: int | None = None) -> Any:
    """Read a JSON file of at most so many bytes, by default `MOST_BYTES`; arguments as of `read_as`."""
    return read_as(path, error, what, MOST_BYTES if most is None else most, parse_json)


def parse_json(data: bytes) -> Any:
    """Parse JSON in UTF-8 to plain data. Raises `Unreadable`."""
    text = decoded(data)
    try:
        content = json.loads(text, object_pairs_hook=_json_object)
        if _ESCAPED_HALF.search(data):
            json.dumps(content, ensure_ascii=False).encode()
    except RecursionError as error:
        raise Unreadable(TOO_DEEP) from error
    except ValueError as error:  # also half of a surrogate pair, and an integer of thousands of digits
        raise Unreadable(f"not valid JSON: {error}") from error
    level = [content] if data.count(b"[") + data.count(b"{") > DEEPEST else []
    for _ in range(DEEPEST):
        parts = (part.values() if isinstance(part, dict) else part for part in level if isinstance(part, (dict, list)))
        level = list(chain.from_iterable(parts))
    if any(isinstance(part, (dict, list)) for part in level):
        raise Unreadable(TOO_DEEP)
    return content


def _json_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object. A key may occur twice with the same value, as some trainers write it, but not with two."""
    content = dict(pairs)
    if len(content) < len(pairs):
        for key, value in pairs:
            if content[key] != value:
                raise ValueError(f"the key {key!a} occurs twice, with different values")
    return content


def read_yaml(path: Path, error: Reason, what: str = "") -> Any:
    """Read a YAML 1.1 file, except that dates, 010 and 1:30 are strings."""
    return read_as(path, error, what, MOST_YAML_BYTES, lambda data: _parse_yaml(data, _Loader))


def read_yaml_as_typed(path: Path, error: Reason, what: str = "") -> Any:
    """Read a YAML file with every scalar as the string in the file, or None."""
    return read_as(path, error, what, MOST_YAML_BYTES, lambda data: _parse_yaml(data, _TypedLoader))


def read_task_file(path: Path, error: Reason, what: str = "") -> Any:
    """Read one of lm-eval's task files, with None for each Python function that it names."""
    return read_as(path, error, what, MOST_YAML_BYTES, lambda data: _parse_yaml(data, _TaskLoader))


class _Loader(yaml.SafeLoader):
    """Loader of plain data, whose limits are checked before objects are constructed."""

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None:
            _check_node(node, {})
        return node


class _TypedLoader(_Loader):
    pass


class _TaskLoader(_Loader):
    pass


def _parse_yaml(data: bytes, loader: type[_Loader]) -> Any:
    text = decoded(data)
    try:
        return yaml.load(text, loader)
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise Unreadable(f"{where}not valid YAML: {error.problem}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise Unreadable(f"line {line}: not valid YAML: the character U+{error.character:04X}") from error
    except RecursionError as error:
        raise Unreadable(TOO_DEEP) from error


def _check_node(node: yaml.Node, known: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """Return the values and characters of a node with its aliases expanded, and its levels. Raises `Unreadable`.

    `known` has these numbers for the nodes before; None for a node that contains this one.
    """
    where = f"line {node.start_mark.line + 1}"
    if id(node) in known:
        if (extent := known[id(node)]) is None:
            raise Unreadable(f"{where}: an alias refers to a node that contains it")
        return extent
    known[id(node)] = None
    size, levels, parts = 1, 0, node.value
    if isinstance(node, yaml.ScalarNode):
        size, parts = 1 + len(node.value), ()
        if HALF.search(node.value):
            raise Unreadable(f"{where}: half of a surrogate pair, which is no character")
    elif isinstance(node, yaml.MappingNode):
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise Unreadable(f"line {line}: a key is a list or a mapping; it must be a string")
            if (name := (key.tag, key.value)) in lines:
                raise Unreadable(f"line {line}: the key '{key.value}' is already in line {lines[name]}; remove one")
            lines[name] = line
        parts = chain.from_iterable(node.value)
    for part in parts:
        more, below = _check_node(part, known)
        size, levels = size + more, max(levels, below)
    if size > MOST_EXPANDED:
        raise Unreadable(f"{where}: its aliases expand to more than {MOST_EXPANDED:,} values and characters")
    if levels >= DEEPEST:
        raise Unreadable(f"{where}: {TOO_DEEP}")
    known[id(node)] = size, levels + 1
    return size, levels + 1


_CORE = "tag:yaml.org,2002:"
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)\Z|0x[0-9a-fA-F]+\Z")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+][0-9]+)?\Z|[-+]?\.(?:inf|Inf|INF)\Z|\.(?:nan|NaN|NAN)\Z"
)


def _limit_types(loader: type[_Loader], kept: tuple[str, ...], built: tuple[str, ...]) -> None:
    loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in rules if tag.removeprefix(_CORE) in kept]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    constructors = yaml.SafeLoader.yaml_constructors
    loader.yaml_constructors = {tag: constructors[tag] for tag in (None, *(_CORE + name for name in built))}


for _loader in (_Loader, _TaskLoader):
    _limit_types(_loader, ("null", "bool", "merge"), ("null", "bool", "int", "float", "str", "seq", "map"))
    # Without YAML 1.1's octal and base-60 numbers: 010 is not 8, and 1:30 is not 90
    _loader.add_implicit_resolver(f"{_CORE}int", _INTEGER, list("-+0123456789"))
    _loader.add_implicit_resolver(f"{_CORE}float", _FLOAT, list("-+0123456789."))
_limit_types(_TypedLoader, ("null", "merge"), ("null", "str", "seq", "map"))
_TaskLoader.add_multi_constructor("!function", lambda _loader, _suffix, _node: None)
