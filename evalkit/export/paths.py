"""Paths in the texts of a run to publish, of which only the last part remains.

In: plain data. Out: the same without the folders of paths that begin at a root (/, a drive, a share, file://), in a
home folder (~) or with "..". Relative paths, URLs and single names after a slash stay.

Values of some keys are paths, which may contain spaces. Any other text may contain paths, which end at a space.
"""

from __future__ import annotations

import re
from typing import Any

_PATHS = frozenset(
    ("command", "config_source", "data_dir", "data_files", "include_path", "model", "model_args", "model_name", "path",
     "pretrained")
)  # fmt: skip
"""Keys of paths, and of words of a command."""
_SOURCE = "source"
"""Key of where documents are from: a path, or one after a word."""

_NAME = r"[^\s/\\,;:=|'\"`()\[\]{}]+"
_IN_TEXT = re.compile(
    rf"""
    (?:^|(?<=[\s,;:=|'"`(\[{{]))
    (?: file:/+(?:{_NAME}/+)*
      | ~[\w.-]*/+(?:{_NAME}/+)*
      | (?:{_NAME}/+)*?\.\./+(?:{_NAME}/+)*
      | [A-Za-z]:[\\/]+(?:{_NAME}[\\/]+)+
      | (?<!:)(?:\\\\|//)(?:{_NAME}[\\/]+)+
      | /(?:{_NAME}/+)+
    )
    ({_NAME})[\\/]*
    """,
    re.VERBOSE,
)
"""A path of at least two parts, of which the last is the group. `//` after a colon begins a URL's host."""
_ROOT = r"""(?x:
    file:/ | ~[\w.-]*[\\/] | (?:[^\\/,;=]+[\\/]+)*\.\.[\\/] | [A-Za-z]:[\\/]
  | \\\\[\w.$-]+\\[\w.$-] | //[^/\s] | /[^/\s,;][^/,;]*/
)"""
"""The beginning of a path whose parts may contain spaces."""


def _values(word: str) -> re.Pattern[str]:
    """Return a pattern of paths at the beginning, after an equals sign or in a list, each after `word`."""
    return re.compile(rf"((?:^|[=,;]\s*){word})({_ROOT}.*?)(?=[,;]\s*{word}{_ROOT}|$)", re.DOTALL)


_VALUES, _SOURCES = _values(""), _values(r"(?:[\w.-]+\s)?")


def without_folders(value: Any) -> Any:
    """Return plain data in which each path from a root, a home folder or ".." has only its last part."""
    return _shortened(value, None)


def _shortened(value: Any, paths: re.Pattern[str] | None) -> Any:
    """Shorten the paths of texts and keys; `paths`: pattern of those that may contain spaces."""
    if isinstance(value, list):
        return [_shortened(item, paths) for item in value]
    if isinstance(value, str):
        known = value if paths is None else paths.sub(lambda found: found[1] + _last_part(found[2]), value)
        return _IN_TEXT.sub(r"\1", known)
    if not isinstance(value, dict):
        return value
    found: dict[str, Any] = {}
    for key, item in value.items():
        short = _IN_TEXT.sub(r"\1", key)
        own = _SOURCES if key == _SOURCE else _VALUES if key in _PATHS else paths
        found[f"{short} ({len(found) + 1})" if short in found else short] = _shortened(item, own)
    return found


def _last_part(path: str) -> str:
    return re.split(r"[\\/]", path.rstrip("\\/"))[-1] or path
