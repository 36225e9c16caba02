"""From names to lm-eval's tasks, and what evalkit cannot serve refused before a model is loaded.

A name is looked for in the user's folder (`--include-path`), among evalkit's own task files, whose documents it has
pinned, and in lm-eval's catalogue, in this order. It may be a task, a group or a tag.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from evalkit.benchmarks.lm_eval.index import Index, catalogue_index, config_of, is_closed, leaves_of
from evalkit.benchmarks.lm_eval.quiet import quiet_lm_eval
from evalkit.benchmarks.lm_eval.task_files import check_task_files
from evalkit.benchmarks.multiple_choice.suites import TASK_DIR
from evalkit.compatibility.lm_eval import Build, replace_index, wrap_building
from evalkit.data import Library
from evalkit.errors import DataError, EvalkitError, UnknownNameError, UsageError, first_line
from evalkit.models.locate import Say
from evalkit.resources import resource

SERVED = ("multiple_choice", "loglikelihood", "loglikelihood_rolling", "generate_until")
"""Output types of tasks that evalkit can serve: all of lm-eval's that are text."""

_LOCAL = ("json", "parquet", "csv", "text", "arrow", "pandas")
"""Builders of the `datasets` library that read files; anything else is a name on the hub or a folder."""


@dataclass
class TaskSet:
    """Tasks as lm-eval runs them."""

    names: tuple[str, ...]
    """What was asked for."""
    tasks: dict[str, Any] = field(default_factory=dict)
    """Leaf tasks by name, in the order they were asked for."""
    groups: dict[str, Any] = field(default_factory=dict)
    """Groups by name, whose metrics lm-eval aggregates."""
    pinned: set[str] = field(default_factory=set)
    """Leaf tasks whose documents evalkit has pinned."""

    def as_lm_eval(self) -> dict[str, Any]:
        """What lm-eval's `evaluate` takes."""
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
        num_fewshot: examples before each question; None for the task's own number.
        library: documents of evalkit's own tasks.
        say: told what takes long.

    Raises:
        UnknownNameError: a name that is none of them.
        UsageError: a task that evalkit cannot serve, or one that is named twice.
        DataError: documents that cannot be loaded, or a task file that lm-eval cannot read.
    """
    with quiet_lm_eval():
        own = _manager(resource(*TASK_DIR), {"library": library, "num_fewshot": num_fewshot or 0})
        users = _manager(include_path, None)
        if include_path is not None and not users.task_index:
            raise UsageError(f"--include-path {include_path}: holds no task file (*.yaml with a 'task' or 'group' key)")
        served_by_own = {
            name for name in names if name not in users.task_index and _is_pinned(name, own.task_index, num_fewshot)
        }
        others = [name for name in names if name not in served_by_own]
        if not is_closed(others, users.task_index):
            catalogue = catalogue_index(say)
            if unknown := [name for name in others if name not in users.task_index and name not in catalogue]:
                raise UnknownNameError("task", unknown[0], {*catalogue, *users.task_index, *own.task_index})
            replace_index(users, catalogue | users.task_index)
        for name in others:
            check_served(name, users.task_index)
        found = TaskSet(tuple(names))
        with _hub_or_cache_only(say) as reach:
            for manager in (own, users):
                wrap_building(manager, partial(_naming, reach=reach))
            for name in names:
                _add(found, name, own if name in served_by_own else users, name in served_by_own)
        for task in found.tasks.values():
            _check_loaded(task)
        return found


def names_in(folder: Path) -> set[str]:
    """Tasks, groups and tags that a user's folder of task files defines."""
    with quiet_lm_eval():
        return set(_manager(folder, None).task_index)


def check_served(name: str, index: Index) -> None:
    """Look into task files, without running what they name, for what evalkit cannot serve.

    Args:
        name: a task, group or tag.
        index: lm-eval's entries by name.

    Raises:
        UsageError: names the task and what it needs.
    """
    for task, config in leaves_of(name, index, {}):
        if any(config.get(key) is not None for key in ("doc_to_image", "doc_to_audio")):
            raise UsageError(f"task {task} shows pictures or plays sound; evalkit evaluates models of text only")
        if config.get("unsafe_code"):
            raise UsageError(
                f"task {task} runs the code that a model writes; evalkit does not: use lm_eval with "
                "--confirm_run_unsafe_code, inside a sandbox"
            )
        output = config.get("output_type", "generate_until")
        if "class" not in config and output not in SERVED:
            raise UsageError(f"task {task} has the output type '{output}'; evalkit serves {', '.join(SERVED)}")


def _manager(folder: Path | None, metadata: dict[str, Any] | None) -> Any:
    from lm_eval.tasks import TaskManager

    if folder is not None and not folder.is_dir():
        raise UsageError(f"--include-path {folder}: there is no such folder")
    if folder is not None and metadata is None:
        check_task_files(folder)
    return TaskManager(include_path=str(folder) if folder else None, include_defaults=False, metadata=metadata)


def _is_pinned(name: str, index: Index, num_fewshot: int | None) -> bool:
    """Whether evalkit's own task file serves. Few-shot examples it has for MMLU alone; others lie on the hub."""
    return name in index and (not num_fewshot or name.startswith("mmlu"))


def _add(found: TaskSet, name: str, manager: Any, pinned: bool) -> None:
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
            # The documents are loaded; lm-eval copies and writes what stays here
            for key in ("library", "num_fewshot"):
                task.config.metadata.pop(key, None)
    found.groups |= loaded.get("groups", {})
    for group in loaded.get("groups", {}).values():
        for key in ("library", "num_fewshot"):
            (group.metadata or {}).pop(key, None)


def _naming(build: Build, reach: Callable[[], str | None]) -> Build:
    """What makes a task, with errors that name it."""

    def named(entry: Any, overrides: dict[str, Any] | None) -> Any:
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
                    "repair that, or name local files in a task file of your own, with --include-path"
                ) from error
            raise DataError(f"task {entry.name}: lm-eval cannot load it: {_reason(error)}") from error

    return named


def _reason(error: BaseException) -> str:
    """A foreign error in one line, with its kind, which often says more than its text."""
    return f"{type(error).__name__}: {first_line(error)[:200]}"


@contextlib.contextmanager
def _hub_or_cache_only(say: Say) -> Iterator[Callable[[], str | None]]:
    """A function that asks once whether the hub can be reached; if not, only caches are looked into, at once."""
    import datasets
    import huggingface_hub.constants

    from evalkit.data.hub import reach

    answers: list[str | None] = []
    with contextlib.ExitStack() as after:

        def ask() -> str | None:
            if not answers:
                answers.append(reach())
                if answers[0] is not None:
                    say(f"the Hugging Face hub cannot be used ({answers[0]}); only its cache is looked into")
                    after.enter_context(patch.object(datasets.config, "HF_HUB_OFFLINE", True))
                    after.enter_context(patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True))
            return answers[0]

        yield ask


def _check_loaded(task: Any) -> None:
    """What only the loaded task tells: Python classes, and what functions in its file set."""
    name = task.task_name
    if getattr(task, "MULTIMODAL", False):
        raise UsageError(f"task {name} shows pictures or plays sound; evalkit evaluates models of text only")
    if getattr(task, "UNSAFE_CODE", False):
        raise UsageError(f"task {name} runs the code that a model writes; evalkit does not")
    if not len(task.eval_docs):
        raise DataError(f"task {name}: there are no documents")
