"""In which settings and documents two runs differ: the one definition, for compare, groups of seeds and tables.

In: two finished runs of any benchmark. Out: the traits that differ, or the first difference of a task's documents.
"""

from __future__ import annotations

from evalkit.benchmarks.outcomes import CONTENT
from evalkit.benchmarks.registry import results_of
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
_OF_SELECTION = ("limit", "documents")
"""Of what must agree for documents to be paired by number, what need not if they are paired by content."""


def differences(a: Run, b: Run, rule: str | None = None) -> list[tuple[Trait, Trait]]:
    """Return (A's trait, B's trait) for each difference under a rule; None: each run's own.

    Documents and examples are compared for shared tasks only.
    """
    first, second = traits(a, rule), traits(b, rule)
    pairs = [(first[name], second[name]) for name in first if name in second]
    pairs = [(mine, theirs) for mine, theirs in pairs if mine.value != theirs.value]
    if any(mine.name == "template" for mine, _ in pairs):  # its text then differs too
        pairs = [pair for pair in pairs if pair[0].name != "template's text"]
    of_a, of_b = _contents(a), _contents(b)
    for what in dict.fromkeys(what for content in of_a.values() for what in content):
        both = [task for task in of_a if what in of_a[task] and what in of_b.get(task, {})]
        tasks = [task for task in both if "" != of_a[task][what] != of_b[task][what] != ""]
        if tasks and what not in first:
            name = f"{what} of {', '.join(tasks)}"
            hashes = (" ".join(run[task][what][:_HASH_CHARACTERS] for task in tasks) for run in (of_a, of_b))
            mine, theirs = (Trait(name, value, f"{name} {value}", True) for value in hashes)
            pairs.append((mine, theirs))
    return pairs


def _contents(run: Run) -> dict[str, dict[str, str]]:
    """Return task → what identifies its documents and examples → its value, for example a hash."""
    comparable, examples = results_of(run).comparable(), run.manifest["specification"].get("examples") or {}
    return {
        task: comparable.must_agree(task) | ({"examples": examples[task]} if task in examples else {})
        for task in run.manifest["documents"]
    }


def document_difference(a: Run, b: Run, task: str, by_content: bool = False) -> tuple[str, str, str] | None:
    """Return (what, A's value, B's value) of the first known difference between a task's documents; None if none.

    If documents are paired by their content, the runs may be of other selections. Others are paired by number, which
    must then stand for the same content in both runs.
    """
    first, second = (results_of(run).comparable() for run in (a, b))
    mine, theirs = first.must_agree(task), second.must_agree(task)
    for what, value in mine.items():
        if not (by_content and what in _OF_SELECTION) and "" != value != theirs[what] != "":
            return _HASHES.get(what, what), value, theirs[what]
    is_known = "" not in (mine.get("documents"), theirs.get("documents"))
    if is_known or by_content or not (first.has_contents and second.has_contents):
        return None
    tables = (run.documents[run.documents["task"] == task].set_index(["subtask", "doc_id"]) for run in (first, second))
    of_a, of_b = (table[CONTENT] for table in tables)
    both = of_a.index.intersection(of_b.index)
    for key in both[(of_a[both] != of_b[both]).to_numpy()]:
        return f"content of document {key[1]}", str(of_a[key]), str(of_b[key])
    return None
