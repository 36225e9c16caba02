"""JSON and YAML, read in one place for the whole package.

In: a file, or the bytes of a piece of one. Out: plain data: mappings, lists, texts, numbers, booleans, None. What a
file can do to its reader is bounded here (its size, its depth, what YAML's aliases expand to), and what has no single
meaning is refused: a key that stands twice, half of a surrogate pair. Nothing is run. Whatever is wrong becomes one
line of the caller's class of error, which names the file and the line.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from evalkit.errors import EvalkitError

MOST_BYTES = 2**24
"""Of a file that is not listed below: the index of a thousand shards has a few megabytes."""
MOST_TEXT_BYTES = 2**28
"""Of a text, or of what a trainer logs step by step."""
MOST_DOCUMENT_BYTES = 2**30
"""Of a file of documents or predictions."""
MOST_YAML_BYTES = 2**18
"""PyYAML reads a tenth of a megabyte a second, and nobody writes as much by hand."""
DEEPEST = 100
"""Levels of nesting. Python recurses over data elsewhere, so what parses must be shallow as well."""
MOST_EXPANDED = 2**20
"""Nodes and characters of a YAML file once each alias is replaced by what it stands for."""

Reason = Callable[[str], EvalkitError]
"""An error class, or what else makes an error of a line."""

_HALF = re.compile("[\ud800-\udfff]")
_NO_CHARACTER = "half of a surrogate pair (\\ud800 to \\udfff), which is no character"
_LONG = re.compile(rb"\d{309}")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A text of JSON, up to the end where nothing ends it."""
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
"""Of brackets outside of texts: one level down, or up (-1 as a signed byte)."""
_NO_BRACKETS = bytes(set(range(256)) - set(b"[{]}"))
_ESCAPED_HALF = re.compile(rb"\\u[dD][89a-fA-F]")


class Unreadable(ValueError):
    """What is wrong with a text, and in which line of it, where that is known."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason if line is None else f"line {line}: {reason}")
        self.reason = reason
        self.line = line


def read_json(path: Path, error: Reason, what: str = "", most: int | None = None) -> Any:
    """The content of a JSON file.

    Args:
        path: the file.
        error: made of the message where something is wrong.
        what: what messages call the file, before its path.
        most: how many bytes it may have; None: `MOST_BYTES`.
    """
    return _read(path, error, what, MOST_BYTES if most is None else most, parse_json)


def read_yaml(path: Path, error: Reason, what: str = "") -> Any:
    """The content of a YAML file, as YAML 1.1 less what surprises: dates are text, and so are 010 and 1:30."""
    return _read(path, error, what, MOST_YAML_BYTES, lambda data: _parse_yaml(data, _Loader))


def read_yaml_as_typed(path: Path, error: Reason, what: str = "") -> Any:
    """The content of a YAML file with every scalar as it is written there, or None."""
    return _read(path, error, what, MOST_YAML_BYTES, lambda data: _parse_yaml(data, _TypedLoader))


def read_task_file(path: Path, error: Reason, what: str = "") -> Any:
    """The content of one of lm-eval's task files, with None for each Python function that it names."""
    return _read(path, error, what, MOST_YAML_BYTES, lambda data: _parse_yaml(data, _TaskLoader))


def read_bytes(path: Path, most: int) -> bytes:
    """The content of a regular file: a pipe may never end, and a device such as /dev/zero never does.

    Raises:
        OSError: it cannot be read.
        Unreadable: it is no regular file, or has more than `most` bytes.
    """
    if not (path.is_file() or path.is_dir()) and path.exists():
        raise Unreadable("is not a regular file")
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise Unreadable(f"is too large: more than {most:,} bytes")
    return data


def parse_json(data: bytes) -> Any:
    """JSON in UTF-8 as plain data. Raises `Unreadable`."""
    text = _decoded(data)
    _check_depth(data)
    try:
        content = json.loads(text, object_pairs_hook=_object, parse_int=_integer if _LONG.search(data) else None)
    except json.JSONDecodeError as error:
        raise Unreadable(f"not valid JSON: {error.msg}", error.lineno) from error
    except _TooLarge as error:
        raise Unreadable(error.reason, text.count("\n", 0, text.find(error.digits)) + 1) from error
    if _ESCAPED_HALF.search(data):
        _check_characters(content)
    return content


def _read(path: Path, error: Reason, what: str, most: int, parse: Callable[[bytes], Any]) -> Any:
    named = f"{what} {path}".lstrip()
    try:
        data = read_bytes(path, most)
    except Unreadable as trouble:
        raise error(f"{named} {trouble}") from trouble
    except (OSError, ValueError) as trouble:  # the latter: a path that no file can have
        reason = trouble.strerror if isinstance(trouble, OSError) else None
        raise error(f"{named} cannot be read: {reason or trouble}") from trouble
    try:
        return parse(data)
    except Unreadable as trouble:
        line = "" if trouble.line is None else f", line {trouble.line}"
        raise error(f"{named}{line}: {trouble.reason}") from trouble


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise Unreadable(f"expected UTF-8, found the byte 0x{data[error.start]:02x}", line) from error


def _too_deep() -> str:
    return f"nested more than {DEEPEST} levels deep"


class _TooLarge(Unreadable):
    """An integer that no float can hold; arithmetic with it would end in an OverflowError elsewhere."""

    def __init__(self, digits: str) -> None:
        super().__init__(f"an integer of {len(digits):,} digits, beyond the range of floating-point numbers")
        self.digits = digits


def _integer(digits: str) -> int:
    if math.isinf(float(digits)):
        raise _TooLarge(digits)
    return int(digits)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. A key may stand there twice with one value, as some trainers write it, but not with two."""
    found = dict(pairs)
    if len(found) < len(pairs):
        for key, value in pairs:
            if found[key] != value:
                raise Unreadable(f"the key {key!a} stands twice, with two values")
    return found


def _check_depth(data: bytes) -> None:
    """Refuse JSON that is too deep, before anything is built of it."""
    if data.count(b"[") + data.count(b"{") > DEEPEST:
        steps = array("b", _STRING.sub(b"", data).translate(_STEPS, _NO_BRACKETS))
        if max(accumulate(steps), default=0) > DEEPEST:
            raise Unreadable(_too_deep())


def _check_characters(content: Any) -> None:
    """Refuse halves of surrogate pairs, which only escapes can make."""
    for key, value in _walk(content):
        if isinstance(value, str) and _HALF.search(value):
            raise Unreadable(f"{key} holds {_NO_CHARACTER}")


def _walk(content: Any) -> Iterator[tuple[str, Any]]:
    """(what it is under, value) of everything in plain data, keys included."""
    waiting: list[tuple[str, Any]] = [("the list" if isinstance(content, list) else "it", content)]
    while waiting:
        key, value = waiting.pop()
        yield key, value
        if isinstance(value, dict):
            waiting += [(f"'{name}'", inner) for name, item in value.items() for inner in (name, item)]
        elif isinstance(value, list):
            waiting += [(key, inner) for inner in value]


def _parse_yaml(data: bytes, loader: type[_Loader]) -> Any:
    text = _decoded(data)
    try:
        return yaml.load(text, loader)
    except yaml.MarkedYAMLError as error:
        said = " ".join(filter(None, (error.context, error.problem)))
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise Unreadable(f"not valid YAML: {said}", line) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise Unreadable(f"not valid YAML: the character U+{error.character:04X} is not allowed", line) from error
    except RecursionError as error:
        raise Unreadable(_too_deep()) from error


class _Problem(yaml.MarkedYAMLError):
    """What is wrong, and where."""

    def __init__(self, problem: str, place: yaml.Event | yaml.Node) -> None:
        super().__init__(problem=problem)
        self.problem_mark = place.start_mark  # type: ignore[assignment]


class _Loader(yaml.SafeLoader):
    """Plain data, within bounds that are checked before anything is built."""

    key_tags: tuple[str, ...] = ("str", "int", "merge")
    """What a key may be: "yes: 1" would have the key True."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0
        self._extents: dict[int, tuple[int, int]] = {}
        """Node → (values and characters, levels), each alias counted as what it stands for."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """The next node of the file; PyYAML calls this for each."""
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        self._depth += 1
        if self._depth > DEEPEST:
            raise _Problem(_too_deep(), event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is not None:
            self._measure(node, event)
        return node

    def _measure(self, node: yaml.Node, event: yaml.Event) -> None:
        if id(node) not in self._extents:
            if isinstance(event, yaml.AliasEvent):
                raise _Problem(f"the alias *{event.anchor} stands inside what it stands for", event)
            if isinstance(node, yaml.MappingNode):
                self._check_keys(node)
            self._extents[id(node)] = self._extent(node)
        size, levels = self._extents[id(node)]
        if size > MOST_EXPANDED:
            raise _Problem(f"its aliases stand for more than {MOST_EXPANDED:,} values and characters", event)
        if levels > DEEPEST:
            raise _Problem(_too_deep(), event)

    def _extent(self, node: yaml.Node) -> tuple[int, int]:
        if isinstance(node, yaml.ScalarNode):
            return 1 + len(node.value), 1
        parts = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
        inner = [self._extents[id(part)] for part in parts]
        return 1 + sum(size for size, _ in inner), 1 + max((levels for _, levels in inner), default=0)

    def _check_keys(self, node: yaml.MappingNode) -> None:
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _Problem("a key is a list or a mapping; it must be text", key)
            if self.key_tags and key.tag.removeprefix(_CORE) not in self.key_tags:
                raise _Problem(f"the key {key.value} is read as another value than text; put it in quotes", key)
            if (identity := (key.tag, key.value)) in lines:
                raise _Problem(f"the key '{key.value}' is already in line {lines[identity]}; leave one out", key)
            lines[identity] = key.start_mark.line + 1

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """The value of a node."""
        try:
            found = super().construct_object(node, deep)
            if type(found) is int:
                float(found)
        except OverflowError as error:
            raise _Problem(str(_TooLarge(node.value)), node) from error
        except ValueError as error:  # an integer of thousands of digits
            raise _Problem(str(error), node) from error
        if isinstance(found, str) and _HALF.search(found):
            raise _Problem(_NO_CHARACTER, node)
        return found


class _TypedLoader(_Loader):
    """Scalars as they are written, or None."""


class _TaskLoader(_Loader):
    """lm-eval's task files, without the functions that they name."""

    key_tags = ()


_CORE = "tag:yaml.org,2002:"
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)\Z|0x[0-9a-fA-F]+\Z")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+][0-9]+)?\Z|[-+]?\.(?:inf|Inf|INF)\Z|\.(?:nan|NaN|NAN)\Z"
)


def _limit_types(loader: type[_Loader], kept: tuple[str, ...], built: tuple[str, ...]) -> None:
    """Keep some of PyYAML's rules for plain scalars, and of its types."""
    loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in rules if tag.removeprefix(_CORE) in kept]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    constructors = yaml.SafeLoader.yaml_constructors
    loader.yaml_constructors = {tag: constructors[tag] for tag in (None, *(_CORE + name for name in built))}


for _loader in (_Loader, _TaskLoader):
    _limit_types(_loader, ("null", "bool", "merge"), ("null", "bool", "int", "float", "str", "seq", "map"))
    # Without YAML 1.1's octal and base-60 numbers: 010 is not 8, and 1:30 not 90
    _loader.add_implicit_resolver(f"{_CORE}int", _INTEGER, list("-+0123456789"))
    _loader.add_implicit_resolver(f"{_CORE}float", _FLOAT, list("-+0123456789."))
_limit_types(_TypedLoader, ("null", "merge"), ("null", "str", "seq", "map"))
_TaskLoader.add_multi_constructor("!function", lambda _loader, _suffix, _node: None)
