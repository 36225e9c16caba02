"""lm-eval's tasks, loaded by name; and calls of lm-eval without its output.

In: names of tasks, groups or tags. Out: a `TaskSet`. Names are looked up in the user's folder (`--include-path`), in
evalkit's own task files, whose documents are pinned by hash, and in lm-eval's catalogue, in this order. A user's files
are validated before lm-eval reads them. lm-eval first describes the tasks; unsupported ones are rejected then, before
any code of a task runs and before a model is loaded.
"""

from __future__ import annotations

import contextlib
import io
import logging
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import Any

from evalkit.cache import read_cached, write_cached
from evalkit.compatibility.lm_eval import (
    CatalogueEntry,
    compiled_once,
    index_of,
    index_tasks,
    replace_index,
    task_configs,
    without_bars,
)
from evalkit.compatibility.names import replaced
from evalkit.data import Library
from evalkit.data.requests import request_tasks
from evalkit.display import Say, doing, imports
from evalkit.errors import DataError, UnknownNameError, UsageError, reading_as
from evalkit.inputs.reading import read_task_file
from evalkit.inputs.values import is_pattern, with_matches
from evalkit.models.loading.locate import silent
from evalkit.paths import resource
from evalkit.runs.folder import LM_EVAL
from evalkit.suites.suites import DEFAULT_SUITE, TASK_DIR, load_suite
from evalkit.suites.task_checks import exclude_evaluated_document, fix_documents

SUPPORTED = ("multiple_choice", "loglikelihood", "loglikelihood_rolling", "generate_until")
"""Supported output types: all of lm-eval's text types."""
_CACHE = "lm-eval-tasks"
_SOURCES = {"dataset_path", "custom_dataset"}
_LOCAL = ("", "json", "parquet", "csv", "text", "arrow", "pandas")
"""Builders of the `datasets` library that read files; any other `dataset_path` is a name on the hub or a folder."""
_UNSUPPORTED = "has images or audio, or runs generated code, which evalkit does not support"


@contextlib.contextmanager
def quiet_lm_eval(say: Say = silent, warnings: list[logging.LogRecord] | None = None) -> Iterator[None]:
    """Suppress lm-eval's output, compile each template once, and call `say` when lm-eval starts a bootstrap.

    lm-eval's warnings are added to a list, if one is given.
    """
    with doing("loading lm-eval", slow=imports("lm_eval")):
        import datasets
        import lm_eval.tasks  # noqa: F401

    def bootstrapping(statistic: str, samples: int) -> None:
        say(f"standard error of {statistic}: {samples:,} bootstrap samples, as lm-eval takes them")

    with contextlib.ExitStack() as after:
        after.enter_context(_warnings_in(warnings))
        if not datasets.are_progress_bars_disabled():
            datasets.disable_progress_bars()
            after.callback(datasets.enable_progress_bars)
        after.enter_context(compiled_once())
        after.enter_context(without_bars(bootstrapping))
        after.enter_context(contextlib.redirect_stdout(io.StringIO()))
        yield


class _Collecting(logging.Handler):
    """Handler that keeps records in a list."""

    def __init__(self, records: list[logging.LogRecord]) -> None:
        super().__init__()
        self._records = records

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(record)


@contextlib.contextmanager
def _warnings_in(records: list[logging.LogRecord] | None) -> Iterator[None]:
    """Collect lm-eval's warnings in place of printing them; drop them without a list."""
    handlers = [] if records is None else [_Collecting(records)]
    logger = logging.getLogger("lm_eval")
    with (
        log_from(logging.CRITICAL if records is None else logging.WARNING),
        replaced(logger, handlers=lambda _: handlers, propagate=lambda _: False),
    ):
        yield


@contextlib.contextmanager
def log_from(level: int) -> Iterator[None]:
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


@dataclass(frozen=True)
class RandomState:
    """State of Python's and NumPy's global random number generators."""

    python: Any
    numpy: Any

    def restore(self) -> None:
        import numpy as np

        random.setstate(self.python)
        np.random.set_state(self.numpy)


def random_state() -> RandomState:
    import numpy as np

    return RandomState(random.getstate(), np.random.get_state())


@dataclass
class TaskSet:
    """The loaded lm-eval tasks and groups of a run."""

    names: tuple[str, ...]
    tasks: dict[str, Any] = field(default_factory=dict)
    """Leaf tasks by name, in the requested order."""
    groups: dict[str, Any] = field(default_factory=dict)
    """Groups by name, whose metrics lm-eval aggregates."""
    pinned: set[str] = field(default_factory=set)
    """Leaf tasks whose documents evalkit pins by hash."""


def load_tasks(
    names: Sequence[str], include_path: Path | None, num_fewshot: int | None, library: Library, say: Say
) -> TaskSet:
    """Load tasks, groups and tags by name, with their documents; unknown, unsupported and repeated names are errors."""
    with quiet_lm_eval(), contextlib.ExitStack() as after:
        own = _manager(resource(*TASK_DIR), {"library": library, "num_fewshot": num_fewshot or 0})
        users = _users_manager(include_path)
        if include_path is not None and not users.task_index:
            raise UsageError(f"--include-path {include_path}: found no task file (*.yaml with a 'task' or 'group' key)")
        # Of evalkit's own task files only MMLU's have few-shot examples; those of the others are on the hub
        pinned = {
            name
            for name in names
            if name in own.task_index and name not in users.task_index and (not num_fewshot or name.startswith("mmlu"))
        }
        configs = _configs([name for name in names if name not in pinned], users, own, say)
        for task, config in configs.items():
            _check_supported(task, config)
        loaded = TaskSet(tuple(names))
        after.enter_context(_only_cached(configs.values(), say))
        for name in names:
            with reading_as(f"task {name}", "one of lm-eval's tasks", DataError):
                content = (own if name in pinned else users).load([name])
                for task in content["tasks"].values():
                    fix_documents(task)
            if twice := content["tasks"].keys() & loaded.tasks.keys():
                raise UsageError(f"task {min(twice)} is named twice, the second time by '{name}'; name it once")
            if name in pinned:
                # What only loading needs of the metadata, which lm-eval copies and writes
                configs_of_tasks = [task.config for task in content["tasks"].values()]
                for holder in (*configs_of_tasks, *content.get("groups", {}).values()):
                    for key in ("library", "num_fewshot"):
                        (holder.metadata or {}).pop(key, None)
                loaded.pinned |= content["tasks"].keys()
            else:
                for task in content["tasks"].values():
                    exclude_evaluated_document(task)
            loaded.tasks |= content["tasks"]
            loaded.groups |= content.get("groups", {})
        # Only a task's Python class may show that it is not supported
        for name, task in loaded.tasks.items():
            if getattr(task, "MULTIMODAL", False) or getattr(task, "UNSAFE_CODE", False):
                raise UsageError(f"task {name} {_UNSUPPORTED}")
        return loaded


def names_in(folder: Path) -> set[str]:
    """Return the names of the tasks, groups and tags that a folder of task files defines."""
    with quiet_lm_eval():
        return set(_users_manager(folder).task_index)


def matching_tasks(tasks: Sequence[str], suite: str | None, include_path: Path | None, say: Say) -> tuple[str, ...]:
    """Return tasks with patterns, such as arc_*, replaced by the tasks that match.

    These are of the suite; without one of the default suite, else of evalkit's requests, else of lm-eval's
    catalogue. Raises a `UsageError` for a pattern without a match.
    """
    patterns = [name for name in tasks if is_pattern(name)]
    if not patterns:
        return tuple(tasks)
    known: list[Collection[str]] = [load_suite(DEFAULT_SUITE).tasks, request_tasks()]
    if suite is not None:
        known = [] if suite == LM_EVAL else [load_suite(suite).tasks]
    matching = tuple(tasks)
    for names in known:
        matching = with_matches(matching, names)
    if suite in (None, LM_EVAL) and any(map(is_pattern, matching)):
        known.append(_task_names(include_path, say))
        matching = with_matches(matching, known[-1])
    if unmatched := next(filter(is_pattern, matching), None):
        near = get_close_matches(unmatched, {name for names in known for name in names}, n=5, cutoff=0.4)
        advice = f"did you mean {', '.join(near)}?" if near else "see evalkit ls tasks"
        raise UsageError(f"unknown task '{unmatched}': no name of a task matches this pattern; {advice}")
    say(f"{', '.join(patterns)}: {', '.join(matching)}")
    return matching


def _task_names(folder: Path | None, say: Say) -> list[str]:
    """Return the names of the tasks in a folder of task files and in lm-eval's catalogue, without groups and tags."""
    with quiet_lm_eval():
        entries = catalogue_index(say) | _users_manager(folder).task_index
    return sorted(name for name, entry in entries.items() if entry.kind.name in ("TASK", "PY_TASK"))


def catalogue_index(say: Say) -> dict[str, Any]:
    """Return lm-eval's own entries, from evalkit's cache if it has them: reading thousands of files takes seconds."""
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    installed = version("lm-eval")
    with contextlib.suppress(AttributeError, ValueError, KeyError, TypeError):
        return index_of({name: CatalogueEntry(*entry) for name, entry in read_cached(_CACHE, installed).items()}, root)
    say("reading lm-eval's task catalogue, which takes some seconds the first time")
    entries = index_tasks(root)
    write_cached(_CACHE, installed, entries)
    return index_of(entries, root)


def _manager(folder: Path | None, metadata: dict[str, Any] | None = None) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(folder) if folder else None, include_defaults=False, metadata=metadata)


def _users_manager(folder: Path | None) -> Any:
    """Return the manager of a user's folder after reading its task files, and what they include, as untrusted YAML."""
    if folder is not None and not folder.is_dir():
        raise UsageError(f"--include-path {folder}: no such folder")
    pending = [] if folder is None else sorted(folder.glob("**/*.yaml"))
    seen: set[Path] = set()
    while pending:
        path = pending.pop(0).resolve()
        if path not in seen:
            seen.add(path)
            content = read_task_file(path, DataError, "task file")
            included = content.get("include", []) if isinstance(content, dict) else []
            listed = included if isinstance(included, list) else [included]
            pending += [path.parent / name for name in listed if isinstance(name, str)]
    return _manager(folder)


def _configs(names: Sequence[str], users: Any, own: Any, say: Say) -> dict[str, dict[str, Any]]:
    def described(name: str) -> dict[str, dict[str, Any]]:
        with reading_as(f"task {name}", "one of lm-eval's tasks", DataError):
            return task_configs(users, name)

    known = [name for name in names if name in users.task_index]
    configs = {task: config for name in known for task, config in described(name).items()}
    # lm-eval takes a member of a group that is not in the index for the group's own task, and names it so
    unknown_members = [task for task, config in configs.items() if "::" in task and not _SOURCES & config.keys()]
    if len(known) == len(names) and not unknown_members:
        return configs
    catalogue = catalogue_index(say)
    if unknown := [name for name in names if name not in users.task_index and name not in catalogue]:
        raise UnknownNameError("task", unknown[0], {*catalogue, *users.task_index, *own.task_index})
    replace_index(users, catalogue | users.task_index)
    return {task: config for name in names for task, config in described(name).items()}


def _check_supported(task: str, config: Mapping[str, Any]) -> None:
    if any(config.get(key) not in (None, False) for key in ("doc_to_image", "doc_to_audio", "unsafe_code")):
        raise UsageError(f"task {task} {_UNSUPPORTED}")
    output = config.get("output_type", "generate_until")
    if "class" not in config and output not in SUPPORTED:
        raise UsageError(f"task {task} has the output type '{output}'; evalkit supports {', '.join(SUPPORTED)}")


@contextlib.contextmanager
def _only_cached(configs: Iterable[Mapping[str, Any]], say: Say) -> Iterator[None]:
    """If documents are on the hub, and it cannot be reached within seconds, let only its cache be read in the block."""
    import datasets
    import huggingface_hub.constants

    from evalkit.data.sources import reach

    paths = [str(config.get("dataset_path") or "") for config in configs if "custom_dataset" not in config]
    is_remote = any(path not in _LOCAL and not Path(path).exists() for path in paths)
    with contextlib.ExitStack() as after:
        if is_remote and (problem := reach()) is not None:
            say(f"the Hugging Face hub cannot be used ({problem}); only its cache is used")
            for owner in (datasets.config, huggingface_hub.constants):
                after.enter_context(replaced(owner, HF_HUB_OFFLINE=lambda _: True))
        yield
