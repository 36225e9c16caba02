"""Differences between the settings of two runs: the one definition, for compare, groups of seeds and tables.

In: two runs. Out: the traits (`runs/traits.py`) that differ, and the differences in what must agree for the documents
of a task to be the same (`Comparable.must_agree`). A table is read only where nothing else tells documents apart.
"""

from __future__ import annotations

from collections.abc import Mapping

from evalkit.benchmarks.outcomes import CONTENT, SELECTION, Comparable
from evalkit.benchmarks.registry import benchmark_of
from evalkit.runs.folder import Run
from evalkit.runs.traits import Trait, traits

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
