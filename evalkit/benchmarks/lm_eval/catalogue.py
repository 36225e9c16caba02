"""Loading of lm-eval's tasks by name.

In: names of tasks, groups or tags. Out: a `TaskSet`. Unsupported tasks are rejected before a model is loaded and before
any code of a task runs. Names are looked up in the user's folder (`--include-path`), in evalkit's own task files, whose
documents are pinned by hash, and in lm-eval's catalogue, in this order. A user's files are validated before lm-eval
reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from evalkit.benchmarks.lm_eval.calls import quiet_lm_eval, task_errors
from evalkit.benchmarks.multiple_choice.suites import TASK_DIR
from evalkit.cache import read_cached, write_cached
from evalkit.compatibility.lm_eval import Build, CatalogueEntry, index_of, index_tasks, replace_index, wrap_building
from evalkit.compatibility.lm_eval import read_task_file as task_file_content
from evalkit.compatibility.names import replaced
from evalkit.data import Library
from evalkit.display import Say
from evalkit.errors import DataError, EvalkitError, UnknownNameError, UsageError, first_line
from evalkit.inputs.yaml_reading import read_task_file
from evalkit.paths import resource

SUPPORTED = ("multiple_choice", "loglikelihood", "loglikelihood_rolling", "generate_until")
"""Supported output types: all of lm-eval's text types."""
_KIND = "lm-eval-tasks"
_LOCAL = ("json", "parquet", "csv", "text", "arrow", "pandas")
"""Builders of the `datasets` library that read files; any other value is a name on the hub or a folder."""

Index = dict[str, Any]
"""lm-eval's entries by name."""
Config = dict[str, Any]
"""Content of a task file."""


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
        # Of evalkit's own task files only MMLU's have few-shot examples; those of the others are on the hub
        pinned = {
            name
            for name in names
            if name in own.task_index and name not in users.task_index and (not num_fewshot or name.startswith("mmlu"))
        }
        others = [name for name in names if name not in pinned]
        if any(config is None for name in others for _, config in _leaves(name, users.task_index)):
            catalogue = catalogue_index(say)
            if unknown := [name for name in others if name not in users.task_index and name not in catalogue]:
                raise UnknownNameError("task", unknown[0], {*catalogue, *users.task_index, *own.task_index})
            replace_index(users, catalogue | users.task_index)
        for name in others:
            for task, config in _leaves(name, users.task_index):
                _check_supported(task, config or {})
        loaded = TaskSet(tuple(names))
        with _hub_or_cache_only(say) as trouble:
            for manager in (own, users):
                wrap_building(manager, partial(_with_task_in_errors, trouble=trouble))
            for name in names:
                _load_into(loaded, name, own if name in pinned else users, name in pinned)
        for name, task in loaded.tasks.items():
            _check_loaded(name, task)
        return loaded


def names_in(folder: Path) -> set[str]:
    """Return the names of the tasks, groups and tags that a folder of task files defines."""
    with quiet_lm_eval():
        return set(_manager(folder, None).task_index)


def catalogue_index(say: Say) -> Index:
    """Return lm-eval's own entries, from evalkit's cache if it has them: reading thousands of files takes seconds."""
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    installed = version("lm-eval")
    with suppress(AttributeError, ValueError, KeyError, TypeError):
        return index_of({name: CatalogueEntry(*entry) for name, entry in read_cached(_KIND, installed).items()}, root)
    say("reading lm-eval's task catalogue, which takes some seconds the first time")
    entries = index_tasks(root)
    write_cached(_KIND, installed, entries)
    return index_of(entries, root)


def _manager(folder: Path | None, metadata: Config | None) -> Any:
    from lm_eval.tasks import TaskManager

    if folder is not None and not folder.is_dir():
        raise UsageError(f"--include-path {folder}: no such folder")
    if folder is not None and metadata is None:
        _check_task_files(folder)
    return TaskManager(include_path=str(folder) if folder else None, include_defaults=False, metadata=metadata)


def _check_task_files(folder: Path) -> None:
    """Raise a `DataError` for the first task file of a folder, or included file, that is not valid."""
    seen: set[Path] = set()
    pending = sorted(folder.glob("**/*.yaml"))
    while pending:
        path = pending.pop(0).resolve()
        if path not in seen:
            seen.add(path)
            content = read_task_file(path, DataError, "task file")
            included = content.get("include", []) if isinstance(content, dict) else []
            listed = included if isinstance(included, list) else [included]
            pending += [path.parent / name for name in listed if isinstance(name, str)]


def _leaves(
    member: str | Config, index: Index, overrides: Mapping[str, Any] | None = None
) -> Iterator[tuple[str, Config | None]]:
    """Yield (name, configuration) of the tasks that a name or a group's member leads to, without running code.

    The configuration is None if the index does not have the name.
    """
    given = {"task": member} if isinstance(member, str) else member
    name = given.get("group", given.get("task"))
    merged = {**(overrides or {}), **{key: value for key, value in given.items() if key not in ("group", "task")}}
    if isinstance(name, str) and name in index:
        entry = index[name]
        content = _config_of(entry)
        if entry.yaml_path is not None and "group" not in content:
            yield name, content | merged
            return
        members = content.get("task") if "group" in content else sorted(entry.tags)
        merged = {key: value for key, value in content.items() if key not in ("group", "task")} | merged
    elif len(given) == 1 and isinstance(name, str):
        yield name, None
        return
    else:
        members = given.get("task")
    if isinstance(members, list):
        for inner in members:
            yield from _leaves(inner, index, merged)
    elif isinstance(member, dict):
        yield str(name), merged


def _config_of(entry: Any) -> Config:
    """Return the content of a task file; functions stay names."""
    if entry.yaml_path is None:
        return dict(entry.cfg or {})
    try:
        return task_file_content(entry.yaml_path)
    except EvalkitError:
        raise
    except Exception as error:
        raise DataError(f"task file {entry.yaml_path} cannot be read ({first_line(error)})") from error


def _check_supported(task: str, config: Config) -> None:
    """Raise a `UsageError` for a task whose file shows that evalkit does not support it."""
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


def _check_loaded(name: str, task: Any) -> None:
    """Raise an error for a task that only shows after loading that it is not supported or has no documents."""
    if getattr(task, "MULTIMODAL", False):
        raise UsageError(f"task {name} has images or audio; evalkit evaluates text only")
    if getattr(task, "UNSAFE_CODE", False):
        raise UsageError(f"task {name} runs generated code, which evalkit does not support")
    if not len(task.eval_docs):
        raise DataError(f"task {name}: no documents found")


def _load_into(loaded: TaskSet, name: str, manager: Any, pinned: bool) -> None:
    with task_errors(name, "load it"):
        content = manager.load([name])
    groups = content.get("groups", {})
    for leaf, task in content["tasks"].items():
        if leaf in loaded.tasks:
            raise UsageError(f"task {leaf} is named twice, the second time by '{name}'; name it once")
        loaded.tasks[leaf] = task
    if pinned:
        loaded.pinned |= content["tasks"].keys()
        # No longer needed, and lm-eval copies and writes the metadata
        for holder in (*(task.config for task in content["tasks"].values()), *groups.values()):
            for key in ("library", "num_fewshot"):
                (holder.metadata or {}).pop(key, None)
    loaded.groups |= groups


def _with_task_in_errors(build: Build, trouble: Callable[[], str | None]) -> Build:
    """Wrap lm-eval's task builder so that its errors name the task, and why its documents cannot be downloaded."""

    def build_named(entry: Any, overrides: Config | None) -> Any:
        config = _config_of(entry) | (overrides or {})
        place = str(config.get("dataset_path") or "")
        remote = place and place not in _LOCAL and "custom_dataset" not in config and not Path(place).exists()
        problem = trouble() if remote else None
        with task_errors(entry.name, "load it"):
            try:
                return build(entry, overrides)
            except Exception as error:
                if problem is None or isinstance(error, EvalkitError):
                    raise
                raise DataError(
                    f"task {entry.name}: its documents ({place}) cannot be loaded: the hub cannot be reached "
                    f"({problem}) and they are not cached; fix this, or use a task file with local files and "
                    "--include-path"
                ) from error

    return build_named


@contextmanager
def _hub_or_cache_only(say: Say) -> Iterator[Callable[[], str | None]]:
    """Yield a function that returns, asking once, why the hub cannot be used; then only its cache is."""
    import datasets
    import huggingface_hub.constants

    from evalkit.data.hub import reach

    with ExitStack() as after:

        @cache
        def trouble() -> str | None:
            if (problem := reach()) is not None:
                say(f"the Hugging Face hub cannot be used ({problem}); only its cache is used")
                for owner in (datasets.config, huggingface_hub.constants):
                    after.enter_context(replaced("datasets", owner, HF_HUB_OFFLINE=lambda _: True))
            return problem

        yield trouble
