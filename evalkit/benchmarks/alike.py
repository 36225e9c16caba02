"""Whether two runs were measured alike: the one definition, for compare, groups of seeds and tables.

In: runs. Out: in what they differ: in their traits (`runs/traits.py`), and in what their benchmark says must agree for
the documents of a task to be the same (`Comparable.must_agree`). No table is read.
"""

from __future__ import annotations

from collections.abc import Mapping

from evalkit.benchmarks.registry import benchmark_of
from evalkit.runs.folder import Run
from evalkit.runs.traits import Trait, traits

_SHOWN = 12
"""Characters of a hash."""
_HASHES = {"documents": "content hash of the documents", "task's definition": "hash of the task's definition"}
"""What must agree → what its value is, where that is a hash."""


def differences(a: Run, b: Run, rule: str | None = None) -> list[tuple[Trait, Trait]]:
    """(A's, B's) of every trait in which two runs differ; documents and examples only of tasks that both have.

    Args:
        a: any run.
        b: another.
        rule: under which their numbers are read; their own if none is named.
    """
    first, second = traits(a, rule), traits(b, rule)
    pairs = [(one, second[name]) for name, one in first.items() if name in second and one.value != second[name].value]
    if any(one.name == "template" for one, _ in pairs):  # of which the text is no news
        pairs = [pair for pair in pairs if pair[0].name != "template's text"]
    contents = _contents(a), _contents(b)
    for what in dict.fromkeys(what for found in contents[0].values() for what in found):
        if what not in first:
            pairs += _differing(what, *contents)
    return pairs


def document_difference(a: Run, b: Run, task: str) -> tuple[str, str, str] | None:
    """(what, A's, B's) of the first thing that makes documents of a task others in two runs of one suite."""
    mine, theirs = (benchmark_of(run).comparable(run).must_agree(task) for run in (a, b))
    pairs = ((_HASHES.get(what, what), one, theirs[what]) for what, one in mine.items())
    return next((found for found in pairs if found[1] != found[2]), None)


def _contents(run: Run) -> dict[str, dict[str, str]]:
    """Task → what its documents and examples are: what → value, a hash, say."""
    comparable, examples = benchmark_of(run).comparable(run), run.manifest["specification"].get("examples") or {}
    found = {task: comparable.must_agree(task) for task in run.manifest["documents"]}
    return {task: one | ({"examples": examples[task]} if task in examples else {}) for task, one in found.items()}


def _differing(
    what: str, a: Mapping[str, Mapping[str, str]], b: Mapping[str, Mapping[str, str]]
) -> list[tuple[Trait, Trait]]:
    """Where the tasks that both runs have are otherwise."""
    both = [task for task in a if what in a[task] and what in b.get(task, {})]
    tasks = [task for task in both if "" != a[task][what] != b[task][what] != ""]
    if not tasks:
        return []
    name = f"{what} of {', '.join(tasks)}"
    values = (" ".join(run[task][what][:_SHOWN] for task in tasks) for run in (a, b))
    mine, theirs = (Trait(name, value, f"{name} {value}", True) for value in values)
    return [(mine, theirs)]
