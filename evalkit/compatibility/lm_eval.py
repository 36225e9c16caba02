"""Uses of lm-eval's private API; works with lm-eval 0.4.13, which pyproject.toml pins.

`TaskManager`, `evaluate`, the base classes of models, and the methods of `Task` that its guide to new tasks describes
are public. lm-eval is imported when a function is called, so that its callers can be imported without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from evalkit.compatibility import names

_PACKAGE = "lm-eval"


class CatalogueEntry(NamedTuple):
    """An entry of lm-eval's index of task files, serialisable as JSON."""

    kind: str
    """Name of lm-eval's `Kind`: "TASK", "GROUP", "TAG", …"""
    path: str | None
    """Path of the task file, relative to the indexed folder; None for a tag."""
    tags: list[str]
    """Tasks of a tag."""


def task_configs(manager: Any, name: str) -> dict[str, dict[str, Any]]:
    """Return task → its configuration, with what its groups add, for the tasks that a name leads to.

    The public API reads them only by loading the tasks, which imports their code and downloads their documents. Here
    functions remain names. A task that a group defines itself is named "group::task", as in lm-eval.
    """
    factory, load = _of("lm_eval.tasks._factory", "TaskFactory"), _of("lm_eval.tasks._yaml_loader", "load_yaml")
    for method in ("_load_full_config", "_build_task", "_build_group_members"):
        names.attribute(_PACKAGE, factory, method)
    configs: dict[str, dict[str, Any]] = {}

    class Describing(factory):  # type: ignore[misc, valid-type]
        """Collects configurations in place of building tasks."""

        def _load_full_config(self, entry: Any, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
            content = names.call(_PACKAGE, load, entry.yaml_path, resolve_func=False) if entry.yaml_path else entry.cfg
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

    with names.replaced(_PACKAGE, manager, _factory=lambda _: Describing()):
        manager.load([name])
    return configs


def index_tasks(root: Path) -> dict[str, CatalogueEntry]:
    """Return the entries of all task files in a folder, by name.

    `TaskManager` builds the same index each time it is made, in seconds; this one can be stored.
    """
    index = _of("lm_eval.tasks._index", "TaskIndex")
    entries = names.call(_PACKAGE, names.attribute(_PACKAGE, index, "build"), [root])
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
    entry, kinds = _of("lm_eval.tasks._index", "Entry"), _of("lm_eval.tasks._index", "Kind")
    names.check_parameters(_PACKAGE, entry, "name", None, None, None, set())
    return {
        name: entry(name, kinds[kind], root / path if path else None, None, set(tags))
        for name, (kind, path, tags) in entries.items()
    }


def replace_index(manager: Any, index: dict[str, Any]) -> None:
    """Replace the index in which a `TaskManager` looks up names.

    Its constructor accepts folders only, and scans all of lm-eval's thousands of task files if these are among them.
    """
    names.attribute(_PACKAGE, manager, "_index")
    manager._index = index


@contextmanager
def compiled_once() -> Iterator[None]:
    """Compile each Jinja template of a task once within the block; lm-eval compiles it for every document."""
    environment = _of("lm_eval.utils", "env")
    with names.replaced(_PACKAGE, environment, from_string=lru_cache(maxsize=256)):
        yield


@contextmanager
def processed_once() -> Iterator[None]:
    """Call the `process_docs` of a task file once for each task within the block; lm-eval calls it at each access.

    Only for functions that return the same documents at each call. The documents of one task are kept at a time.
    """
    task = _of("lm_eval.api.task", "ConfigurableTask")
    once = lru_cache(maxsize=1)
    with names.replaced(_PACKAGE, task, validation_docs=once, test_docs=once):
        yield


@contextmanager
def without_bars(bootstrapping: Callable[[str, int], None]) -> Iterator[None]:
    """Hide the progress bars of building requests and of bootstrapping within the block; they have no public switch.

    `bootstrapping` is called with (name of the statistic, samples) when a bootstrap begins, which can take minutes.
    """
    import tqdm  # type: ignore[import-untyped]

    metrics = names.module(_PACKAGE, "lm_eval.api.metrics")
    task = names.module(_PACKAGE, "lm_eval.api.task")

    def silent(bar: Any) -> Any:
        return partial(bar, disable=True)

    def quiet(bootstrap: Callable[..., float]) -> Callable[..., float]:
        def quiet_bootstrap(f: Callable[..., float], xs: Sequence[Any], iters: int) -> float:
            bootstrapping(f.__name__, iters)
            # It imports tqdm when it is called
            with names.replaced(_PACKAGE, tqdm, tqdm=silent):
                return float(names.call(_PACKAGE, bootstrap, f, xs, iters=iters))

        return quiet_bootstrap

    with names.replaced(_PACKAGE, task, tqdm=silent), names.replaced(_PACKAGE, metrics, bootstrap_stderr=quiet):
        yield


def fewshot_seed() -> int:
    """Return the default seed of few-shot examples in `simple_evaluate`."""
    return int(_of("lm_eval.defaults", "DEFAULT_OTHER_SEED"))


def generation_arguments(given: Mapping[str, Any], new_tokens: int) -> dict[str, Any]:
    """Return a task's generation_kwargs, normalised: `until`, `max_gen_toks` (by default `new_tokens`) and others."""
    return dict(names.call(_PACKAGE, _of("lm_eval.models.utils", "normalize_gen_kwargs"), dict(given), new_tokens))


def rolling_windows(ids: Sequence[int], prefix: int, most: int) -> list[tuple[list[int], list[int]]]:
    """Return the disjoint windows, (context, continuation), that `loglikelihood_rolling` scores a text in.

    `prefix` is the token before the first one; a window has at most `most` tokens.
    """
    cut, disjoint = _of("lm_eval.utils", "get_rolling_token_windows"), _of("lm_eval.utils", "make_disjoint_window")
    windows: Iterable[Any] = names.call(_PACKAGE, cut, ids, prefix, max_seq_len=most, context_len=1)
    return [disjoint(window) for window in windows]


def json_value(value: Any) -> Any:
    """Return the form in which lm-eval's files store a value that JSON cannot represent."""
    return _of("lm_eval.utils", "handle_non_serializable")(value)


def as_texts(answers: Any) -> Any:
    """Return nested lists of answers with every element as text, as in lm-eval's sample files."""
    return _of("lm_eval.utils", "sanitize_list")(answers)


def hash_of(text: str) -> str:
    """Return lm-eval's hash of a text, for the `task_hashes` of its files."""
    return str(_of("lm_eval.utils", "hash_string")(text))


def _of(module: str, name: str) -> Any:
    return names.attribute(_PACKAGE, names.module(_PACKAGE, module), name)
