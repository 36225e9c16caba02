"""Loading of lm-eval's tasks by name.

In: names of tasks, groups or tags. Out: a `TaskSet`. Unsupported tasks are rejected before a model is loaded. Names are
looked up in the user's folder (`--include-path`), in evalkit's own task files, whose documents are pinned by hash, and
in lm-eval's catalogue, in this order. lm-eval's index of task files is read without loading a task, and a user's files
are validated before lm-eval reads them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from evalkit.benchmarks.lm_eval.calls import quiet_lm_eval
from evalkit.benchmarks.multiple_choice.suites import TASK_DIR
from evalkit.compatibility.lm_eval import Build, CatalogueEntry, index_of, index_tasks, replace_index, wrap_building
from evalkit.compatibility.lm_eval import read_task_file as task_file_content
from evalkit.compatibility.names import replaced
from evalkit.data import Library
from evalkit.display import Say
from evalkit.errors import DataError, EvalkitError, UnknownNameError, UsageError, first_line
from evalkit.inputs.yaml_reading import read_task_file
from evalkit.paths import read_cached, resource, write_cached

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
        return task_file_content(entry.yaml_path)
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


def check_task_files(folder: Path) -> None:
    """Raise a `DataError` for the first task file of a folder, or included file, that is not valid."""
    seen: set[Path] = set()
    pending = sorted(folder.glob("**/*.yaml"))
    while pending:
        path = pending.pop(0).resolve()
        if path in seen:
            continue
        seen.add(path)
        content = read_task_file(path, DataError, "task file")
        included = content.get("include", []) if isinstance(content, dict) else []
        listed = included if isinstance(included, list) else [included]
        pending += [path.parent / name for name in listed if isinstance(name, str)]


SUPPORTED = ("multiple_choice", "loglikelihood", "loglikelihood_rolling", "generate_until")
"""Supported output types: all of lm-eval's text types."""

_LOCAL = ("json", "parquet", "csv", "text", "arrow", "pandas")
"""Builders of the `datasets` library that read files; any other value is a name on the hub or a folder."""


@dataclass
class TaskSet:
    """The loaded lm-eval tasks and groups of a run."""

    names: tuple[str, ...]
    """The requested names."""
    tasks: dict[str, Any] = field(default_factory=dict)
    """Leaf tasks by name, in the requested order."""
    groups: dict[str, Any] = field(default_factory=dict)
    """Groups by name, whose metrics lm-eval aggregates."""
    pinned: set[str] = field(default_factory=set)
    """Leaf tasks whose documents evalkit pins by hash."""

    def as_lm_eval(self) -> dict[str, Any]:
        """Return the task dictionary for lm-eval's `evaluate`."""
        return {
            "tasks": self.tasks,
            "groups": self.groups,
            "group_map": {name: group.child_names for name, group in self.groups.items()},
        }


def load_tasks(
    names: Sequence[str], include_path: Path | None, num_fewshot: int | None, library: Library, say: Say
) -> TaskSet:
    """Load tasks with their documents.

    Args:
        names: tasks, groups or tags.
        include_path: the user's folder of task files.
        num_fewshot: number of few-shot examples; None: the task's own number.
        library: documents of evalkit's own tasks.
        say: called before steps that take long.

    Raises:
        UnknownNameError: a name is no task, group or tag.
        UsageError: a task is not supported, or is named twice.
        DataError: documents cannot be loaded, or lm-eval cannot read a task file.
    """
    with quiet_lm_eval():
        own = _manager(resource(*TASK_DIR), {"library": library, "num_fewshot": num_fewshot or 0})
        users = _manager(include_path, None)
        if include_path is not None and not users.task_index:
            raise UsageError(f"--include-path {include_path}: found no task file (*.yaml with a 'task' or 'group' key)")
        pinned = {
            name for name in names if name not in users.task_index and _is_pinned(name, own.task_index, num_fewshot)
        }
        others = [name for name in names if name not in pinned]
        if not is_closed(others, users.task_index):
            catalogue = catalogue_index(say)
            if unknown := [name for name in others if name not in users.task_index and name not in catalogue]:
                raise UnknownNameError("task", unknown[0], {*catalogue, *users.task_index, *own.task_index})
            replace_index(users, catalogue | users.task_index)
        for name in others:
            check_supported(name, users.task_index)
        found = TaskSet(tuple(names))
        with _hub_or_cache_only(say) as reach:
            for manager in (own, users):
                wrap_building(manager, partial(_with_task_in_errors, reach=reach))
            for name in names:
                _load_into(found, name, own if name in pinned else users, name in pinned)
        for task in found.tasks.values():
            _check_loaded(task)
        return found


def names_in(folder: Path) -> set[str]:
    """Return the names of the tasks, groups and tags that a folder of task files defines."""
    with quiet_lm_eval():
        return set(_manager(folder, None).task_index)


def check_supported(name: str, index: Index) -> None:
    """Check that evalkit supports a task by its task files, whose functions are not run."""
    for task, config in leaves_of(name, index, {}):
        if any(config.get(key) is not None for key in ("doc_to_image", "doc_to_audio")):
            raise UsageError(f"task {task} has images or audio; evalkit evaluates text only")
        if config.get("unsafe_code"):
            raise UsageError(
                f"task {task} runs generated code, which evalkit does not support; use lm_eval with "
                "--confirm_run_unsafe_code, inside a sandbox"
            )
        output = config.get("output_type", "generate_until")
        if "class" not in config and output not in SUPPORTED:
            raise UsageError(f"task {task} has the output type '{output}'; evalkit supports {', '.join(SUPPORTED)}")


def _manager(folder: Path | None, metadata: dict[str, Any] | None) -> Any:
    from lm_eval.tasks import TaskManager

    if folder is not None and not folder.is_dir():
        raise UsageError(f"--include-path {folder}: no such folder")
    if folder is not None and metadata is None:
        check_task_files(folder)
    return TaskManager(include_path=str(folder) if folder else None, include_defaults=False, metadata=metadata)


def _is_pinned(name: str, index: Index, num_fewshot: int | None) -> bool:
    """Return whether evalkit's own task file is used. Only MMLU's has few-shot examples; others are on the hub."""
    return name in index and (not num_fewshot or name.startswith("mmlu"))


def _load_into(found: TaskSet, name: str, manager: Any, pinned: bool) -> None:
    try:
        loaded = manager.load([name])
    except EvalkitError:
        raise
    except Exception as error:
        raise DataError(f"task {name}: lm-eval cannot load it ({type(error).__name__}: {first_line(error)})") from error
    for leaf, task in loaded["tasks"].items():
        if leaf in found.tasks:
            raise UsageError(f"task {leaf} is named twice, the second time by '{name}'; name it once")
        found.tasks[leaf] = task
        if pinned:
            found.pinned.add(leaf)
            # No longer needed, and lm-eval copies and writes the metadata
            for key in ("library", "num_fewshot"):
                task.config.metadata.pop(key, None)
    found.groups |= loaded.get("groups", {})
    for group in loaded.get("groups", {}).values():
        for key in ("library", "num_fewshot"):
            (group.metadata or {}).pop(key, None)


def _with_task_in_errors(build: Build, reach: Callable[[], str | None]) -> Build:
    """Wrap lm-eval's task builder so that its errors name the task."""

    def build_named(entry: Any, overrides: dict[str, Any] | None) -> Any:
        config = config_of(entry) | (overrides or {})
        place = str(config.get("dataset_path") or "")
        remote = place and place not in _LOCAL and "custom_dataset" not in config and not Path(place).exists()
        trouble = reach() if remote else None
        try:
            return build(entry, overrides)
        except EvalkitError:
            raise
        except ImportError as error:
            raise DataError(
                f"task {entry.name}: it needs a library that is not installed ({first_line(error)})"
            ) from error
        except Exception as error:
            if remote:
                why = f"the hub cannot be reached ({trouble}) and they are not cached" if trouble else _reason(error)
                raise DataError(
                    f"task {entry.name}: its documents ({place}) cannot be loaded: {why}; "
                    "fix this, or use a task file with local files and --include-path"
                ) from error
            raise DataError(f"task {entry.name}: lm-eval cannot load it: {_reason(error)}") from error

    return build_named


def _reason(error: BaseException) -> str:
    """Return another library's error in one line, with its type, which is often more specific than its text."""
    return f"{type(error).__name__}: {first_line(error)[:200]}"


@contextlib.contextmanager
def _hub_or_cache_only(say: Say) -> Iterator[Callable[[], str | None]]:
    """Yield a function that checks once whether the hub is reachable; if it is not, only caches are used."""
    import datasets
    import huggingface_hub.constants

    from evalkit.data.hub import reach

    results: list[str | None] = []
    with contextlib.ExitStack() as after:

        def check() -> str | None:
            if not results:
                results.append(reach())
                if results[0] is not None:
                    say(f"the Hugging Face hub cannot be used ({results[0]}); only its cache is used")
                    for owner in (datasets.config, huggingface_hub.constants):
                        after.enter_context(replaced("datasets", owner, HF_HUB_OFFLINE=lambda _: True))
            return results[0]

        yield check


def _check_loaded(task: Any) -> None:
    """Raise an error for a task that only shows after loading that it is not supported or has no documents."""
    name = task.task_name
    if getattr(task, "MULTIMODAL", False):
        raise UsageError(f"task {name} has images or audio; evalkit evaluates text only")
    if getattr(task, "UNSAFE_CODE", False):
        raise UsageError(f"task {name} runs generated code, which evalkit does not support")
    if not len(task.eval_docs):
        raise DataError(f"task {name}: no documents found")
