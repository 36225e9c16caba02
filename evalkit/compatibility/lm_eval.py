"""Uses of lm-eval's private API; works with lm-eval 0.4.13, which pyproject.toml pins.

`TaskManager`, `evaluate`, the base classes of models, and the methods of `Task` that its guide to new tasks describes
are public. lm-eval is imported when a function is called, so that its callers can be imported without it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from numbers import Integral
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from evalkit.compatibility.names import replaced


class CatalogueEntry(NamedTuple):
    """An entry of lm-eval's index of task files, serialisable as JSON."""

    kind: str
    """Name of lm-eval's `Kind`: "TASK", "GROUP", "TAG", …"""
    path: str | None
    """Path of the task file, relative to the indexed folder; None for a tag."""
    tags: list[str]
    """Tasks of a tag."""


def model_names() -> Collection[str]:
    """Return the values of lm-eval's `--model`."""
    from lm_eval.models import MODEL_MAPPING

    return tuple(MODEL_MAPPING)


def task_configs(manager: Any, name: str) -> dict[str, dict[str, Any]]:
    """Return task → its configuration, with what its groups add, for the tasks that a name leads to.

    The public API reads them only by loading the tasks, which imports their code and downloads their documents. Here
    functions remain names. A task that a group defines itself is named "group::task", as in lm-eval.
    """
    from lm_eval.tasks._factory import TaskFactory
    from lm_eval.tasks._yaml_loader import load_yaml

    configs: dict[str, dict[str, Any]] = {}

    class Describing(TaskFactory):  # type: ignore[misc]
        """Collects configurations in place of building tasks."""

        def _load_full_config(self, entry: Any, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
            content = load_yaml(entry.yaml_path, resolve_func=False) if entry.yaml_path else entry.cfg
            return {**(content or {}), **(overrides or {})}

        def _build_task(self, entry: Any, overrides: dict[str, Any] | None) -> Any:
            config = self._load_full_config(entry, overrides)
            configs[config["task"]] = config
            return SimpleNamespace(task_name=config["task"])

        def _build_group_members(
            self, member_list: list[Any], group_name: str, overrides: dict[str, Any] | None, registry: dict[str, Any]
        ) -> Any:
            indexed = []
            for member in member_list:
                content = {"task": member} if isinstance(member, str) else member
                if "group" in content or content["task"] in registry:
                    indexed.append(member)
                else:
                    configs[f"{group_name}::{content['task']}"] = {**(overrides or {}), **content}
            return super()._build_group_members(indexed, group_name, overrides, registry)

    with replaced(manager, _factory=lambda _: Describing()):
        manager.load([name])
    return configs


def index_tasks(root: Path) -> dict[str, CatalogueEntry]:
    """Return the entries of all task files in a folder, by name.

    `TaskManager` builds the same index each time it is made, in seconds; this one can be stored.
    """
    from lm_eval.tasks._index import TaskIndex

    entries = TaskIndex.build([root])
    return {
        name: CatalogueEntry(
            entry.kind.name,
            entry.yaml_path.relative_to(root).as_posix() if entry.yaml_path else None,
            sorted(entry.tags),
        )
        for name, entry in entries.items()
    }


def index_of(entries: Mapping[str, CatalogueEntry], root: Path) -> dict[str, Any]:
    """Return entries in lm-eval's own form, the inverse of `index_tasks`; a `KeyError` for an unknown kind."""
    from lm_eval.tasks._index import Entry, Kind

    return {
        name: Entry(name, Kind[kind], root / path if path else None, None, set(tags))
        for name, (kind, path, tags) in entries.items()
    }


def replace_index(manager: Any, index: dict[str, Any]) -> None:
    """Replace the index in which a `TaskManager` looks up names.

    Its constructor accepts folders only, and scans all of lm-eval's thousands of task files if these are among them.
    """
    manager._index = index


@contextmanager
def compiled_once() -> Iterator[None]:
    """Compile each Jinja template of a task once within the block; lm-eval compiles it for every document."""
    from lm_eval.utils import env

    with replaced(env, from_string=lru_cache(maxsize=256)):
        yield


@contextmanager
def processed_once() -> Iterator[None]:
    """Call the `process_docs` of a task file once for each task within the block; lm-eval calls it at each access.

    Only for functions that return the same documents at each call. The documents of one task are kept at a time.
    """
    from lm_eval.api.task import ConfigurableTask

    once = lru_cache(maxsize=1)
    with replaced(ConfigurableTask, validation_docs=once, test_docs=once):
        yield


def is_index(gold: Any) -> bool:
    """Whether a gold answer is a number; a function of a task may return one of NumPy."""
    return isinstance(gold, Integral)


def gold_index(gold: Any, choices: Sequence[str]) -> int | None:
    """Return the index of the choice that a gold answer names by number or text, as in lm-eval; None if none is."""
    if isinstance(gold, str):
        return choices.index(gold) if gold in choices else None
    return int(gold) if is_index(gold) and 0 <= gold < len(choices) else None


def reads_references(task: Any) -> bool:
    """Whether lm-eval's own metrics compare the answers of a task with its references.

    Not if the task has its own function of the results, or if a metric is a function or "bypass".
    """
    from lm_eval.api.task import ConfigurableTask

    if type(task).process_results is not ConfigurableTask.process_results:
        return False
    names = [entry["metric"] for entry in task.config.metric_list or ()]
    has_own = callable(task.config.process_results) or any(callable(name) for name in names)
    return not has_own and "bypass" not in names


@contextmanager
def without_bars(bootstrapping: Callable[[str, int], None]) -> Iterator[None]:
    """Hide the progress bars of building requests and of bootstrapping within the block; they have no public switch.

    `bootstrapping` is called with (name of the statistic, samples) when a bootstrap begins, which can take minutes.
    """
    import tqdm  # type: ignore[import-untyped]
    from lm_eval.api import metrics, task

    def silent(bar: Any) -> Any:
        return partial(bar, disable=True)

    def announced(bootstrap: Callable[..., float]) -> Callable[..., float]:
        def announced_bootstrap(f: Callable[..., float], xs: Sequence[Any], iters: int) -> float:
            bootstrapping(f.__name__, iters)
            with replaced(tqdm, tqdm=silent):  # which it imports when it is called
                return float(bootstrap(f, xs, iters=iters))

        return announced_bootstrap

    with replaced(task, tqdm=silent), replaced(metrics, bootstrap_stderr=announced):
        yield


def fewshot_seed() -> int:
    """Return the default seed of few-shot examples in `simple_evaluate`."""
    from lm_eval.defaults import DEFAULT_OTHER_SEED

    return int(DEFAULT_OTHER_SEED)


def generation_arguments(given: Mapping[str, Any], new_tokens: int) -> dict[str, Any]:
    """Return a task's generation_kwargs, normalised: `until`, `max_gen_toks` (by default `new_tokens`) and others."""
    from lm_eval.models.utils import normalize_gen_kwargs

    return dict(normalize_gen_kwargs(dict(given), new_tokens))


def rolling_windows(ids: Sequence[int], prefix: int, most: int) -> list[tuple[list[int], list[int]]]:
    """Return the disjoint windows, (context, continuation), that `loglikelihood_rolling` scores a text in.

    `prefix` is the token before the first one; a window has at most `most` tokens.
    """
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    return [make_disjoint_window(window) for window in get_rolling_token_windows(ids, prefix, most, context_len=1)]


def json_value(value: Any) -> Any:
    """Return the form in which lm-eval's files store a value that JSON cannot represent."""
    from lm_eval.utils import handle_non_serializable

    return handle_non_serializable(value)


def as_texts(answers: Any) -> Any:
    """Return nested lists of answers with every element as text, as in lm-eval's sample files."""
    from lm_eval.utils import sanitize_list

    return sanitize_list(answers)


def hash_of(text: str) -> str:
    """Return lm-eval's hash of a text, for the `task_hashes` of its files."""
    from lm_eval.utils import hash_string

    return str(hash_string(text))
