"""lm-eval's index of task files, without loading any task.

In: names of tasks, groups and tags. Out: the content of their task files, whose functions are not run. Building
lm-eval's own index takes seconds, so it is stored in evalkit's cache folder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from evalkit.compatibility.lm_eval import CatalogueEntry, index_of, index_tasks, read_task_file
from evalkit.display import Say
from evalkit.errors import DataError, EvalkitError, first_line
from evalkit.paths import read_cached, write_cached

_KIND = "lm-eval-tasks"
Index = dict[str, Any]
"""lm-eval's entries by name."""


def catalogue_index(say: Say) -> Index:
    """Return lm-eval's own entries, from evalkit's cache if it has them: reading thousands of files takes seconds."""
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    installed = version("lm-eval")
    with contextlib.suppress(AttributeError, ValueError, KeyError, TypeError):
        return index_of({name: CatalogueEntry(*entry) for name, entry in read_cached(_KIND, installed).items()}, root)
    say("reading lm-eval's task catalogue, which takes some seconds the first time")
    entries = index_tasks(root)
    write_cached(_KIND, installed, entries)
    return index_of(entries, root)


def is_closed(names: Sequence[str], index: Index) -> bool:
    """Return whether an index contains the names and all tasks and groups that they refer to."""
    for name in names:
        if name not in index:
            return False
        for member in _members(index[name]):
            inner = member if isinstance(member, str) else member.get("group", member.get("task"))
            if isinstance(inner, str) and inner not in index and (isinstance(member, str) or len(member) == 1):
                return False
            if isinstance(inner, str) and inner in index and not is_closed([inner], index):
                return False
    return True


def _members(entry: Any) -> list[Any]:
    config = config_of(entry)
    members = config.get("task") if "group" in config else None
    return members if isinstance(members, list) else sorted(entry.tags) if entry.yaml_path is None else []


def config_of(entry: Any) -> dict[str, Any]:
    """Return the content of a task file; functions stay names."""
    if entry.yaml_path is None:
        return dict(entry.cfg or {})
    try:
        return read_task_file(entry.yaml_path)
    except EvalkitError:
        raise
    except Exception as error:
        raise DataError(f"task file {entry.yaml_path} cannot be read ({first_line(error)})") from error


def leaves_of(name: str, index: Index, overrides: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, configuration) of all leaf tasks of a name."""
    entry = index[name]
    config = config_of(entry)
    if entry.yaml_path is not None and "group" not in config:
        yield name, config | overrides
        return
    inherited = {k: v for k, v in config.items() if k.startswith("doc_to_") or k in ("output_type", "unsafe_code")}
    for member in _members(entry):
        yield from _leaves_of_member(member, index, inherited | overrides)


def _leaves_of_member(
    member: str | dict[str, Any], index: Index, overrides: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(member, str):
        if member in index:
            yield from leaves_of(member, index, overrides)
        return
    inner = member.get("group", member.get("task"))
    merged = overrides | {key: value for key, value in member.items() if key not in ("group", "task")}
    if isinstance(inner, str) and inner in index:
        yield from leaves_of(inner, index, merged)
    elif isinstance(member.get("task"), list):
        for deeper in member["task"]:
            yield from _leaves_of_member(deeper, index, merged)
    else:
        yield str(inner), merged
