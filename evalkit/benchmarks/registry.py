"""Registry of benchmarks: evalkit's own, and those of installed packages.

In: a kind, a suite or a run. Out: its `Benchmark`. A package registers a benchmark by an entry point of the group
`evalkit.benchmarks`, whose name is the kind and whose object is a `Benchmark` class. A benchmark is imported on first
use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from pkgutil import resolve_name

from evalkit.benchmarks.base import Benchmark
from evalkit.errors import RunError, UnknownNameError, UsageError
from evalkit.plugins import added, call_added, load_added
from evalkit.runs.folder import Run

GROUP = "evalkit.benchmarks"
_OWN = {
    "multiple_choice": "evalkit.benchmarks.multiple_choice.benchmark:MultipleChoice",
    "prompt_variants": "evalkit.benchmarks.multiple_choice.variants:PromptVariants",
    "lm_eval": "evalkit.benchmarks.lm_eval.benchmark:LMEval",
    "longbench": "evalkit.longcontext.longbench.benchmark:LongBench",
    "ruler": "evalkit.longcontext.ruler.benchmark:Ruler",
    "needle": "evalkit.longcontext.ruler.needle:Needle",
    "attention": "evalkit.attention.benchmark:Attention",
    "perplexity": "evalkit.longcontext.perplexity.benchmark:Perplexity",
}


def kinds() -> Iterator[str]:
    """Yield the names of all benchmarks; those of other packages last, since searching for them is slow."""
    yield from _OWN
    yield from added(GROUP).keys() - _OWN.keys()


@cache
def benchmark(kind: str) -> Benchmark:
    """Return the benchmark of a kind. Raises a `UsageError` if there is none, or if its package cannot be imported."""
    if kind in _OWN:
        own: Benchmark = resolve_name(_OWN[kind])()
        return own
    made: Benchmark = call_added(f"benchmark '{kind}'", load_added(GROUP, kind, "benchmark", tuple(_OWN)))
    call_added(f"benchmark '{kind}'", made.suites)
    return made


def benchmark_of(run: Run) -> Benchmark:
    """Return the benchmark that made a run. Raises a `RunError` if it is not installed, or results.json not its own."""
    try:
        kind = benchmark(run.kind)
    except UnknownNameError as error:
        raise RunError(f"run {run.folder} is of benchmark '{run.kind}', which is not installed") from error
    if run.complete:
        run.require_form(kind.results_form)
    return kind


def has_default_outcome(kind: str) -> bool:
    """Whether runs of a kind can be compared without naming an outcome; a kind that is not installed may have one."""
    try:
        return benchmark(kind).has_default_outcome
    except UsageError:
        return True


def _loadable() -> Iterator[Benchmark]:
    """Yield all benchmarks; skip those that cannot be imported, since another one may have the suite."""
    for kind in kinds():
        with suppress(UsageError):
            yield benchmark(kind)


def kind_of_suite(suite: str | None) -> str:
    """Return the kind of benchmark that runs a suite: a suite's name or a YAML file; None: the default suite."""
    if suite is None or Path(suite).suffix in (".yaml", ".yml"):
        return "multiple_choice"
    for kind in _loadable():
        if suite in kind.suites():
            return kind.kind
    raise UnknownNameError("suite", suite, suite_names())


def suite_names() -> list[str]:
    return [suite for kind in _loadable() for suite in kind.suites()]


def averages_of(kind: Benchmark) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return a benchmark's averages by suite. Raises `UsageError` if it is another package's, and fails."""
    return kind.averages() if kind.kind in _OWN else call_added(f"benchmark '{kind.kind}'", kind.averages)


def suite_averages(suite: str) -> dict[str, tuple[str, ...]]:
    """Return average → its tasks, for a suite of any benchmark."""
    known: list[str] = []
    for kind in _loadable():
        with suppress(UsageError):
            averages = averages_of(kind)
            if suite in averages:
                return averages[suite]
            known += averages
    raise UnknownNameError("suite", suite, known)
