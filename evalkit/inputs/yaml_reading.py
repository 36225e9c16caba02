"""Reading of untrusted YAML for the whole package, with limits on size, depth and expansion of aliases.

In: a file. Out: plain data, see `reading.py`. No code is run.
"""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from evalkit.inputs.reading import DEEPEST, HALF, NO_CHARACTER, TOO_DEEP, Reason, Unreadable, decoded, read_as

MOST_YAML_BYTES = 2**18
"""Size limit; PyYAML reads a tenth of a megabyte a second, and files written by hand are smaller."""
MOST_EXPANDED = 2**20
"""Maximum nodes and characters of a YAML file with all aliases expanded."""


def read_yaml(path: Path, error: Reason, what: str = "") -> Any:
    """Read a YAML 1.1 file, except that dates, 010 and 1:30 are strings."""
    return read_as(path, error, what, MOST_YAML_BYTES, lambda data: _parse_yaml(data, _Loader))


def read_yaml_as_typed(path: Path, error: Reason, what: str = "") -> Any:
    """Read a YAML file with every scalar as the string in the file, or None."""
    return read_as(path, error, what, MOST_YAML_BYTES, lambda data: _parse_yaml(data, _TypedLoader))


def read_task_file(path: Path, error: Reason, what: str = "") -> Any:
    """Read one of lm-eval's task files, with None for each Python function that it names."""
    return read_as(path, error, what, MOST_YAML_BYTES, lambda data: _parse_yaml(data, _TaskLoader))


def _parse_yaml(data: bytes, loader: type[_Loader]) -> Any:
    text = decoded(data)
    try:
        return yaml.load(text, loader)
    except yaml.MarkedYAMLError as error:
        message = " ".join(filter(None, (error.context, error.problem)))
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise Unreadable(f"not valid YAML: {message}", line) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise Unreadable(f"not valid YAML: the character U+{error.character:04X} is not allowed", line) from error


def _problem(text: str, node: yaml.Node | yaml.Event) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=text, problem_mark=node.start_mark)  # type: ignore[arg-type]


class _Loader(yaml.SafeLoader):
    """Loader of plain data, whose limits are checked before objects are constructed."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next node of the file; PyYAML calls this for each."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise _problem(TOO_DEEP, self.peek_event())  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def get_single_node(self) -> yaml.Node | None:
        """Return the file's node; PyYAML constructs its value next."""
        node: yaml.Node | None = super().get_single_node()
        if node is not None:
            _check(node, {})
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Construct the value of a node."""
        value = super().construct_object(node, deep)
        if isinstance(value, str) and HALF.search(value):
            raise _problem(NO_CHARACTER, node)
        return value


def _check(node: yaml.Node, known: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """Return the values and characters of a node with its aliases expanded, and its levels, or raise a YAML error.

    `known` has these numbers for the nodes before; None for a node that contains this one.
    """
    if id(node) in known:
        if (extent := known[id(node)]) is None:
            raise _problem("an alias refers to a node that contains it", node)
        return extent
    known[id(node)] = None
    size, levels = 1, 0
    if isinstance(node, yaml.ScalarNode):
        size += len(node.value)
    else:
        if isinstance(node, yaml.MappingNode):
            _check_keys(node)
        for part in node.value if isinstance(node, yaml.SequenceNode) else chain.from_iterable(node.value):
            more, below = _check(part, known)
            size, levels = size + more, max(levels, below)
    if size > MOST_EXPANDED:
        raise _problem(f"its aliases expand to more than {MOST_EXPANDED:,} values and characters", node)
    if levels >= DEEPEST:
        raise _problem(TOO_DEEP, node)
    known[id(node)] = size, levels + 1
    return size, levels + 1


def _check_keys(node: yaml.MappingNode) -> None:
    lines: dict[tuple[str, str], int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _problem("a key is a list or a mapping; it must be a string", key)
        if (identity := (key.tag, key.value)) in lines:
            raise _problem(f"the key '{key.value}' is already in line {lines[identity]}; remove one", key)
        lines[identity] = key.start_mark.line + 1


class _TypedLoader(_Loader):
    """Loader of scalars as strings, or None."""


class _TaskLoader(_Loader):
    """Loader of lm-eval's task files, without the functions that they name."""


_CORE = "tag:yaml.org,2002:"
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)\Z|0x[0-9a-fA-F]+\Z")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+][0-9]+)?\Z|[-+]?\.(?:inf|Inf|INF)\Z|\.(?:nan|NaN|NAN)\Z"
)


def _limit_types(loader: type[_Loader], kept: tuple[str, ...], built: tuple[str, ...]) -> None:
    """Restrict a loader to some of PyYAML's implicit types and constructors."""
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
