"""Notes below the tables of runs: each is worded here once, and all kinds, tables and pages have them in one order.

In: manifests, and the lines that a kind or a table says of its own numbers. Out: sentences: these lines, then unknown
errors, prompts and context, direction, sources of the documents, and at last what a reader must know about the run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from evalkit.data.requests import is_macro
from evalkit.escape import counted
from evalkit.runs.folder import Run
from evalkit.runs.rules import find_rule
from evalkit.runs.traits import caveats, extension_words, is_imported, kinds, origin

LOWER_NOTE = "↓: lower is better"
TRUNCATED = "truncated on the left to fit the context window"
_CONTROL = "control: each document has another document's context, so these are not results of the tasks"
_UNKNOWN_ERROR = "–: no error can be given where all documents of a task scored alike"


def notes_below(
    manifest: Mapping[str, Any],
    lines: Iterable[str],
    directions: Iterable[bool | None] = (),
    *,
    lacks_error: bool = False,
    examples: str | None = None,
    sources: bool = False,
) -> tuple[str, ...]:
    """Return the notes below the tables of one run.

    Args:
        manifest: of the run.
        lines: what its kind says of the numbers.
        directions: whether higher values of the printed numbers are better.
        lacks_error: whether an error is unknown since all documents scored alike.
        examples: description of the solved examples, after their number; None if the table has the number.
        sources: whether to name the sources of documents and solved examples.
    """
    specification = manifest["specification"]
    notes = list(lines)
    if lacks_error:
        notes.append(_UNKNOWN_ERROR)
    if specification.get("control"):
        notes.append(_CONTROL)
    if examples is not None and (shots := specification.get("num_fewshot")):
        notes.append(f"{shots}-shot: {counted(shots, 'solved example')} before each question{examples}")
    if specification.get("context_extension"):
        notes.append(extension_words(specification))
    notes += direction_note(directions)
    for kind in ("documents", "examples") if sources else ():
        if documents := manifest.get(kind):
            notes.append(f"{kind}: {sources_text(documents)}")
    return (*notes, *run_notes(manifest))


def run_notes(manifest: Mapping[str, Any]) -> list[str]:
    """Return notes on a run's numbers: its origin, its model as loaded, several kinds of devices, caveats of tasks.

    Caveats follow the names of their tasks, which have the asterisk of the tables: "piqa*: not the official documents".
    """
    notes = []
    if is_imported(manifest):
        files = counted(len(manifest["imported"]["files"]), "file")
        parts = "".join(f"; {part}" for part in manifest["imported"].get("parts", []))
        notes.append(f"imported from {origin(manifest)} ({files}{parts}); evalkit did not compute its scores")
    notes += (manifest.get("loaded") or {}).get("remarks", ())
    several = kinds(manifest)
    if len(several) > 1:
        parts = " and in part on ".join(several)
        notes.append(f"computed in part on {parts}, which round differently; manifest.json lists the batches")
    names: dict[str, list[str]] = {}
    for task, texts in caveats(manifest).items():
        for text in texts:
            names.setdefault(text, []).append(f"{task}*")
    return [*notes, *(f"{', '.join(marked)}: {text}" for text, marked in names.items())]


def notes_of_runs(runs: Iterable[tuple[str, Mapping[str, Any]]], directions: Iterable[bool | None] = ()) -> list[str]:
    """Return the notes of several runs, (name, manifest), with the names unless a note is of all of them.

    `directions` as of `notes_below`.
    """
    names: dict[str, dict[str, None]] = {}
    every: dict[str, None] = {}
    for name, manifest in runs:
        every[name] = None
        for note in run_notes(manifest):
            names.setdefault(note, {})[name] = None
    shared = [note if of == every else f"{', '.join(of)}: {note}" for note, of in names.items()]
    return [*direction_note(directions), *shared]


def model_line(run: Run, *settings: str) -> str:
    """Return a run's checkpoint and precision with further settings."""
    return ", ".join([run.model, run.manifest["specification"]["dtype"], *settings])


def rule_note(rule: str) -> str:
    return f"rule {rule}: {find_rule(rule).description}"


def macro_note(labels: Mapping[str, str]) -> list[str]:
    """Return a note on the tasks whose mean is over subjects, if there are any; `labels` are those of all tasks."""
    macro = [label for task, label in labels.items() if is_macro(task)]
    return [f"{', '.join(macro)}: mean over subjects, each of which counts the same, as OLMES defines it"] * bool(macro)


def direction_mark(higher_is_better: bool | None) -> str:
    """Return the mark after a metric's name, which `direction_note` explains."""
    return " ↓" if higher_is_better is False else ""


def direction_note(directions: Iterable[bool | None]) -> list[str]:
    return [LOWER_NOTE] if False in directions else []


def error_note(several: Collection[bool], of_one: str = "standard error over documents") -> str:
    """Return what ± is; `several` has whether numbers are of several runs, whose deviation it is."""
    meanings = {False: of_one, True: "standard deviation over seeds" + " (of several runs)" * (len(set(several)) > 1)}
    return f"±: {', '.join(meanings[kind] for kind in sorted(set(several)))}"


def sources_text(documents: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the sources of the documents, with the tasks of each if there are several."""
    by_source: dict[str, list[str]] = {}
    for task, about in documents.items():
        kind, _, path = about["source"].partition(" ")
        source = f"{kind} {Path(path).parent}" if kind == "data-dir" else about["source"]
        by_source.setdefault(source, []).append(task)
    if len(by_source) == 1:
        return next(iter(by_source))
    return "; ".join(f"{', '.join(tasks)} from {source}" for source, tasks in by_source.items())
