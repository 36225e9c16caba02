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
    "needle": "needle.benchmark:Needle",
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
    found = load_added(GROUP, kind, "benchmark", tuple(_OWN))
    made: Benchmark = call_added(f"benchmark '{kind}'", found)
    call_added(f"benchmark '{kind}'", made.suites)
    return made


def averages_of(found: Benchmark) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return a benchmark's averages by suite.

    Raises:
        UsageError: it is another package's, and fails.
    """
    return found.averages() if found.kind in _OWN else call_added(f"benchmark '{found.kind}'", found.averages)


def kind_of_suite(suite: str | None) -> str:
    """Return the kind of benchmark that runs a suite: a suite's name or a YAML file; None: the default suite.

    Raises:
        UnknownNameError: no benchmark has such a suite.
    """
    if suite is None or Path(suite).suffix in (".yaml", ".yml"):
        return "multiple_choice"
    known: list[str] = []
    for found in _loadable():
        if suite in (names := found.suites()):
            return found.kind
        known += names
    raise UnknownNameError("suite", suite, known)


def suite_averages(suite: str) -> dict[str, tuple[str, ...]]:
    """Return average → its tasks, for a suite of any benchmark.

    Raises:
        UnknownNameError: no benchmark has such a suite.
    """
    known: list[str] = []
    for found in _loadable():
        averages: dict[str, dict[str, tuple[str, ...]]] = {}
        with suppress(UsageError):
            averages = averages_of(found)
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
        found = benchmark(run.kind)
    except UnknownNameError as error:
        raise RunError(f"run {run.folder} is of benchmark '{run.kind}', which is not installed") from error
    if run.complete:
        run.require_form(found.results_form)
    return found


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
    pairs = [(one, second[name]) for name, one in first.items() if name in second and one.value != second[name].value]
    if any(one.name == "template" for one, _ in pairs):  # its text then differs too
        pairs = [pair for pair in pairs if pair[0].name != "template's text"]
    contents = _contents(a), _contents(b)
    for what in dict.fromkeys(what for found in contents[0].values() for what in found):
        if what not in first:
            pairs += _differing(what, *contents)
    return pairs


def document_difference(a: Run, b: Run, task: str, by_content: bool = False) -> tuple[str, str, str] | None:
    """Return (what, A's value, B's value) of the first known difference between a task's documents; None if none.

    If documents are paired by their content, the runs may be of other selections. Others are paired by number, which
    must then stand for the same content in both runs.
    """
    first, second = (benchmark_of(run).comparable(run) for run in (a, b))
    mine, theirs = (one.must_agree(task) for one in (first, second))
    free = SELECTION if by_content else ()
    pairs = ((_HASHES.get(what, what), one, theirs[what]) for what, one in mine.items() if what not in free)
    if found := next((found for found in pairs if "" != found[1] != found[2] != ""), None):
        return found
    unknown = "" in (mine.get("documents"), theirs.get("documents"))
    return _other_content(first, second, task) if unknown and not by_content else None


def _other_content(a: Comparable, b: Comparable, task: str) -> tuple[str, str, str] | None:
    """Return the first document whose number stands for another content in B; None if there is none, or no hashes."""
    if not (a.has_contents and b.has_contents):
        return None
    tables = (one.documents[one.documents["task"] == task].set_index(["subtask", "doc_id"]) for one in (a, b))
    first, second = (table[CONTENT] for table in tables)
    both = first.index.intersection(second.index)
    for key in both[(first[both] != second[both]).to_numpy()]:
        return f"content of document {key[1]}", str(first[key]), str(second[key])
    return None


def _contents(run: Run) -> dict[str, dict[str, str]]:
    """Return task → what identifies its documents and examples → its value, for example a hash."""
    comparable, examples = benchmark_of(run).comparable(run), run.manifest["specification"].get("examples") or {}
    found = {task: comparable.must_agree(task) for task in run.manifest["documents"]}
    return {task: one | ({"examples": examples[task]} if task in examples else {}) for task, one in found.items()}


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
