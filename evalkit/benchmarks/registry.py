"""Registry of benchmarks: evalkit's own, and those of installed packages.

In: a kind, a suite or a run. Out: its `Benchmark`. A package registers a benchmark by an entry point of the group
`evalkit.benchmarks`, whose name is the kind and whose object is a `Benchmark` class. A benchmark is imported on first
use. `differences` says in which settings two runs differ: the one definition, for compare, groups of seeds and tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path

from evalkit.benchmarks.base import Benchmark
from evalkit.benchmarks.outcomes import CONTENT, SELECTION, Comparable
from evalkit.errors import RunError, UnknownNameError, UsageError
from evalkit.plugins import added, call_added, load_added
from evalkit.runs.folder import Run
from evalkit.runs.traits import Trait, traits

GROUP = "evalkit.benchmarks"
_OWN = {
    "multiple_choice": "multiple_choice.benchmark:MultipleChoice",
    "prompt_variants": "prompt_variants.benchmark:PromptVariants",
    "lm_eval": "lm_eval.benchmark:LMEval",
    "longbench": "longbench.benchmark:LongBench",
    "needle": "needle:Needle",
    "attention": "attention.benchmark:Attention",
    "perplexity": "perplexity.benchmark:Perplexity",
}


def kinds() -> Iterator[str]:
    """Yield the names of all benchmarks; those of other packages last, since searching for them is slow."""
    yield from _OWN
    yield from added(GROUP).keys() - _OWN.keys()


@cache
def benchmark(kind: str) -> Benchmark:
    """Return the benchmark of a kind.

    Raises:
        UnknownNameError: there is no such kind.
        UsageError: the benchmark's package cannot be imported.
    """
    if kind in _OWN:
        module, _, name = _OWN[kind].partition(":")
        own: Benchmark = getattr(import_module(f"evalkit.benchmarks.{module}"), name)()
        return own
    made: Benchmark = call_added(f"benchmark '{kind}'", load_added(GROUP, kind, "benchmark", tuple(_OWN)))
    call_added(f"benchmark '{kind}'", made.suites)
    return made


def averages_of(kind: Benchmark) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return a benchmark's averages by suite.

    Raises:
        UsageError: it is another package's, and fails.
    """
    return kind.averages() if kind.kind in _OWN else call_added(f"benchmark '{kind.kind}'", kind.averages)


def kind_of_suite(suite: str | None) -> str:
    """Return the kind of benchmark that runs a suite: a suite's name or a YAML file; None: the default suite.

    Raises:
        UnknownNameError: no benchmark has such a suite.
    """
    if suite is None or Path(suite).suffix in (".yaml", ".yml"):
        return "multiple_choice"
    for kind in _loadable():
        if suite in kind.suites():
            return kind.kind
    raise UnknownNameError("suite", suite, suite_names())


def suite_names() -> list[str]:
    """Return the names of all benchmarks' suites."""
    return [suite for kind in _loadable() for suite in kind.suites()]


def suite_averages(suite: str) -> dict[str, tuple[str, ...]]:
    """Return average → its tasks, for a suite of any benchmark.

    Raises:
        UnknownNameError: no benchmark has such a suite.
    """
    known: list[str] = []
    for kind in _loadable():
        with suppress(UsageError):
            averages = averages_of(kind)
            if suite in averages:
                return averages[suite]
            known += averages
    raise UnknownNameError("suite", suite, known)


def _loadable() -> Iterator[Benchmark]:
    """Yield all benchmarks; skip those that cannot be imported, since another one may have the suite."""
    for kind in kinds():
        with suppress(UsageError):
            yield benchmark(kind)


def benchmark_of(run: Run) -> Benchmark:
    """Return the benchmark that made a run.

    Raises:
        RunError: its package is not installed, or results.json does not have the benchmark's schema.
    """
    try:
        kind = benchmark(run.kind)
    except UnknownNameError as error:
        raise RunError(f"run {run.folder} is of benchmark '{run.kind}', which is not installed") from error
    if run.complete:
        run.require_form(kind.results_form)
    return kind


_HASH_CHARACTERS = 12
"""Characters of a hash that are printed."""
_HASHES = {
    "documents": "content hash of the documents",
    "examples": "content hash of the solved examples",
    "task's definition": "hash of the task's definition",
}
"""What must agree → description of its value, if the value is a hash."""


def differences(a: Run, b: Run, rule: str | None = None) -> list[tuple[Trait, Trait]]:
    """Return (A's trait, B's trait) for each difference under a rule; None: each run's own.

    Documents and examples are compared for shared tasks only.
    """
    first, second = traits(a, rule), traits(b, rule)
    pairs = [(first[name], second[name]) for name in first if name in second]
    pairs = [(mine, theirs) for mine, theirs in pairs if mine.value != theirs.value]
    if any(mine.name == "template" for mine, _ in pairs):  # its text then differs too
        pairs = [pair for pair in pairs if pair[0].name != "template's text"]
    contents = _contents(a), _contents(b)
    for what in dict.fromkeys(what for content in contents[0].values() for what in content):
        if what not in first:
            pairs += _differing(what, *contents)
    return pairs


def document_difference(a: Run, b: Run, task: str, by_content: bool = False) -> tuple[str, str, str] | None:
    """Return (what, A's value, B's value) of the first known difference between a task's documents; None if none.

    If documents are paired by their content, the runs may be of other selections. Others are paired by number, which
    must then stand for the same content in both runs.
    """
    first, second = (benchmark_of(run).comparable(run) for run in (a, b))
    mine, theirs = first.must_agree(task), second.must_agree(task)
    for what, value in mine.items():
        if not (by_content and what in SELECTION) and "" != value != theirs[what] != "":
            return _HASHES.get(what, what), value, theirs[what]
    unknown = "" in (mine.get("documents"), theirs.get("documents"))
    return _other_content(first, second, task) if unknown and not by_content else None


def _other_content(a: Comparable, b: Comparable, task: str) -> tuple[str, str, str] | None:
    """Return the first document whose number stands for another content in B; None if there is none, or no hashes."""
    if not (a.has_contents and b.has_contents):
        return None
    tables = (run.documents[run.documents["task"] == task].set_index(["subtask", "doc_id"]) for run in (a, b))
    first, second = (table[CONTENT] for table in tables)
    both = first.index.intersection(second.index)
    for key in both[(first[both] != second[both]).to_numpy()]:
        return f"content of document {key[1]}", str(first[key]), str(second[key])
    return None


def _contents(run: Run) -> dict[str, dict[str, str]]:
    """Return task → what identifies its documents and examples → its value, for example a hash."""
    comparable, examples = benchmark_of(run).comparable(run), run.manifest["specification"].get("examples") or {}
    return {
        task: comparable.must_agree(task) | ({"examples": examples[task]} if task in examples else {})
        for task in run.manifest["documents"]
    }


def _differing(
    what: str, a: Mapping[str, Mapping[str, str]], b: Mapping[str, Mapping[str, str]]
) -> list[tuple[Trait, Trait]]:
    """Return the difference in `what` over the tasks of both runs as one pair of traits; empty if there is none."""
    both = [task for task in a if what in a[task] and what in b.get(task, {})]
    tasks = [task for task in both if "" != a[task][what] != b[task][what] != ""]
    if not tasks:
        return []
    name = f"{what} of {', '.join(tasks)}"
    values = (" ".join(run[task][what][:_HASH_CHARACTERS] for task in tasks) for run in (a, b))
    mine, theirs = (Trait(name, value, f"{name} {value}", True) for value in values)
    return [(mine, theirs)]
