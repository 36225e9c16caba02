"""Registry of benchmarks: evalkit's own, and those of installed packages.

In: a kind, a suite or a run. Out: its `Benchmark`, or the results of the run. A package registers a benchmark by an
entry point of the group `evalkit.benchmarks`, whose name is the kind and whose object is a `Benchmark` class. A
benchmark is imported on first use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from pkgutil import resolve_name

from evalkit.benchmarks.base import Benchmark, ListedSuite
from evalkit.benchmarks.results import FinishedResults
from evalkit.errors import RunError, UnknownNameError, UsageError
from evalkit.plugins import added, call_added, load_added
from evalkit.runs.folder import Run
from evalkit.suites.suites import load_suite, requests_suite

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
    "answers": "evalkit.benchmarks.answer_suites:AnswerSuites",
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


def results_of(run: Run) -> FinishedResults:
    """Return the results of a run, as its benchmark reads them.

    Raises a `RunError` if the benchmark is not installed, or results.json is not its own.
    """
    try:
        kind = benchmark(run.kind)
    except UnknownNameError as error:
        raise RunError(f"run {run.folder} is of benchmark '{run.kind}', which is not installed") from error
    if run.complete:
        run.require_form(kind.results_form)
    return kind.read(run)


def has_default_measure(kind: str) -> bool:
    """Return whether runs of a kind are compared by a measure if none is named."""
    try:
        return benchmark(kind).read.has_default_measure
    except UsageError:  # whoever reads its runs reports that it is not installed
        return True


def _suites() -> Iterator[tuple[Benchmark, str, ListedSuite]]:
    """Yield the suites of all benchmarks but those that cannot be imported, since another one may have the suite."""
    for name in kinds():
        with suppress(UsageError):
            kind = benchmark(name)
            for suite, listed in kind.suites().items():
                yield kind, suite, listed


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
    for kind, name, _ in _suites():
        if name == suite:
            return kind.kind
    raise UnknownNameError("suite", suite, suite_names())


def suite_names() -> list[str]:
    return [name for _, name, _ in _suites()]


def averages_of(kind: Benchmark, suite: ListedSuite) -> dict[str, tuple[str, ...]]:
    """Return average → its tasks. Raises `UsageError` if the benchmark is another package's, and fails."""
    return call_added(f"benchmark '{kind.kind}'", suite.averages) if suite.averages else {}


def suite_averages(suite: str) -> dict[str, tuple[str, ...]]:
    """Return average → its tasks, for a suite of any benchmark."""
    known: list[str] = []
    for kind, name, listed in _suites():
        if name == suite and listed.averages is not None:
            with suppress(UsageError):
                return averages_of(kind, listed)
        elif listed.averages is not None:
            known.append(name)
    raise UnknownNameError("suite", suite, known)
