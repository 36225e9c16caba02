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
from evalkit.benchmarks.multiple_choice.suites import load_suite, requests_suite
from evalkit.errors import RunError, UnknownNameError, UsageError
from evalkit.plugins import added, call_added, load_added
from evalkit.runs.folder import Run

GROUP = "evalkit.benchmarks"
_OWN = {
    "multiple_choice": "multiple_choice.benchmark:MultipleChoice",
    "prompt_variants": "prompt_variants.benchmark:PromptVariants",
    "lm_eval": "lm_eval.benchmark:LMEval",
    "longbench": "longbench.benchmark:LongBench",
    "ruler": "ruler.benchmark:Ruler",
    "needle": "ruler.needle:Needle",
    "attention": "attention.benchmark:Attention",
    "perplexity": "perplexity.benchmark:Perplexity",
    "answers": "answer_suites:AnswerSuites",
}


def kinds() -> Iterator[str]:
    """Yield the names of all benchmarks; those of other packages last, since searching for them is slow."""
    yield from _OWN
    yield from added(GROUP).keys() - _OWN.keys()


@cache
def benchmark(kind: str) -> Benchmark:
    """Return the benchmark of a kind. Raises a `UsageError` if there is none, or if its package cannot be imported."""
    if kind in _OWN:
        own: Benchmark = resolve_name(f"evalkit.benchmarks.{_OWN[kind]}")()
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


def _loadable() -> Iterator[Benchmark]:
    """Yield all benchmarks; skip those that cannot be imported, since another one may have the suite."""
    for kind in kinds():
        with suppress(UsageError):
            yield benchmark(kind)


def kind_of_suite(suite: str | None, requests: Path | None = None) -> str:
    """Return the kind of benchmark that runs a suite, a name or a YAML file; or a user's file of requests.

    Without any, it is that of the default suite; so it is of files that cannot be read, which its plan reports.
    """
    if suite is None or Path(suite).suffix in (".yaml", ".yml"):
        with suppress(UsageError):
            if requests is not None and requests_suite(requests).answers:
                return "answers"
            if suite is not None and load_suite(suite).answers:
                return "answers"
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
