"""YAML, read in one place for the whole package, within bounds: of size, of depth, of what aliases expand to.

In: a file. Out: plain data, see `reading.py`. Nothing is run.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from evalkit.inputs.reading import DEEPEST, HALF, NO_CHARACTER, Reason, TooLarge, Unreadable, decoded, read_as, too_deep

MOST_YAML_BYTES = 2**18
"""PyYAML reads a tenth of a megabyte a second, and nobody writes as much by hand."""
MOST_EXPANDED = 2**20
"""Nodes and characters of a YAML file once each alias is replaced by what it stands for."""


def read_yaml(path: Path, error: Reason, what: str = "") -> Any:
    """The content of a YAML file, as YAML 1.1 less what surprises: dates are text, and so are 010 and 1:30."""
    return read_as(path, error, what, MOST_YAML_BYTES, lambda data: _parse_yaml(data, _Loader))


def read_yaml_as_typed(path: Path, error: Reason, what: str = "") -> Any:
    """The content of a YAML file with every scalar as it is written there, or None."""
    return read_as(path, error, what, MOST_YAML_BYTES, lambda data: _parse_yaml(data, _TypedLoader))


def read_task_file(path: Path, error: Reason, what: str = "") -> Any:
    """The content of one of lm-eval's task files, with None for each Python function that it names."""
    return read_as(path, error, what, MOST_YAML_BYTES, lambda data: _parse_yaml(data, _TaskLoader))


def _parse_yaml(data: bytes, loader: type[_Loader]) -> Any:
    text = decoded(data)
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
        raise Unreadable(too_deep()) from error


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
            raise _Problem(too_deep(), event)
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
            raise _Problem(too_deep(), event)

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
            raise _Problem(str(TooLarge(node.value)), node) from error
        except ValueError as error:  # an integer of thousands of digits
            raise _Problem(str(error), node) from error
        if isinstance(found, str) and HALF.search(found):
            raise _Problem(NO_CHARACTER, node)
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
