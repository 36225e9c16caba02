"""Documents of runs for a page: the union of each task's documents, with the decisions of every run under every rule.

In: finished runs. Out: `DocumentData`: an index for the page's script, and a block for each task: a JSON header and
number arrays, compressed, as base64. Decisions are computed here, by the rules themselves; the page only shows them.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evalkit.benchmarks.differences import document_difference
from evalkit.benchmarks.document_views import AnswerView, ChoiceText, ChoiceView, Piece, TaskView
from evalkit.benchmarks.registry import benchmark_of
from evalkit.data.sampling import DocumentSample
from evalkit.display import Say
from evalkit.errors import RunError
from evalkit.escape import in_json
from evalkit.inspection.outcomes import decisions
from evalkit.runs.folder import Run
from evalkit.runs.score_table import SEGMENTS

DocumentName: TypeAlias = tuple[str, Any]
"""Subtask, and the document's id in it."""
Arrays: TypeAlias = dict[str, tuple[str, NDArray[Any]]]
"""Name → (u1, u2, i4, f4 or f8; values of any shape)."""
Places: TypeAlias = NDArray[np.int64]

ABSENT = 65535
"""Prediction of a run that does not have the document."""
UNKNOWN = -1
"""Number of tokens in a run that does not know it, as one imported from a log."""
_ALIGNED = 8


@dataclass(frozen=True)
class DocumentData:
    """Documents of a page."""

    index: Mapping[str, Any]
    """Runs and tasks, JSON-compatible; "block" of a task is a place in `blocks`."""
    blocks: Sequence[str]


def encoded(header: Mapping[str, Any], arrays: Arrays) -> str:
    """Return a block as base64, of JSON-compatible content and arrays.

    Raises:
        OverflowError: an integer does not fit its type.
    """
    table: dict[str, list[Any]] = {}
    parts: list[bytes] = []
    offset = 0
    for name, (kind, values) in arrays.items():
        flat = np.asarray(values).ravel()
        if kind.startswith(("u", "i")) and flat.size:
            limits = np.iinfo(np.dtype(kind))
            if flat.min() < limits.min or flat.max() > limits.max:
                raise OverflowError(f"array {name}: values from {flat.min()} to {flat.max()} do not fit {kind}")
        data = flat.astype(f"<{kind}").tobytes()
        table[name] = [kind, offset, flat.size]
        parts.append(data + bytes(-len(data) % _ALIGNED))
        offset += len(parts[-1])
    text = in_json(json.dumps({**header, "arrays": table}, ensure_ascii=False, separators=(",", ":")))
    start = text.encode("utf-8", "replace")  # a lone surrogate is shown as a question mark
    start += b" " * (-(4 + len(start)) % _ALIGNED)
    content = b"".join((len(start).to_bytes(4, "little"), start, *parts))
    return base64.b64encode(gzip.compress(content, mtime=0)).decode("ascii")


class _TaskOfRun:
    """A run's view of a task."""

    def __init__(self, number: int, run: Run, view: TaskView) -> None:
        self.number, self.run, self.view = number, run, view

    @cached_property
    def names(self) -> list[DocumentName]:
        """The documents, in the run's order."""
        if isinstance(self.view, AnswerView):
            return [(document.subtask, document.id) for document in self.view.documents]
        ids = self.first["doc_id"].to_numpy().tolist()
        return list(zip(self.first["subtask"].astype(str), ids, strict=True))

    @cached_property
    def first(self) -> Any:
        """The rows of the documents' first choices in the score table."""
        scores = self.choices.scores
        return scores.iloc[np.flatnonzero(scores["choice"].to_numpy() == 0)]

    @property
    def choices(self) -> ChoiceView:
        assert isinstance(self.view, ChoiceView)
        return self.view


class _Union:
    """The documents of several runs of one task, given in order, or a sample of them."""

    def __init__(self, members: Sequence[_TaskOfRun], sample: DocumentSample | None) -> None:
        every, task = list(dict.fromkeys(name for member in members for name in member.names)), members[0].view.task
        taken = range(len(every)) if sample is None else sample.places(task, [subtask for subtask, _ in every])
        self.total = len(every)
        self.names = [every[number] for number in taken]
        self._places = {name: place for place, name in enumerate(self.names)}

    def places(self, names: Sequence[DocumentName]) -> Places:
        """Return the place of each document, -1 of those that are not taken."""
        return np.fromiter((self._places.get(name, -1) for name in names), np.int64, len(names))


def document_data(
    runs: Sequence[Run], names: Sequence[str], say: Say, sample: DocumentSample | None = None
) -> DocumentData:
    """Collect all documents of finished runs, which have `names` in the page, or a sample of them.

    Documents that runs share are read once within `remembering`.

    Raises:
        EvalkitError: a run is damaged.
    """
    tasks: list[dict[str, Any]] = []
    blocks: list[str] = []
    problems: dict[str, list[str]] = {}
    for members in _by_documents(runs, say):
        first, task = members[0], members[0].view.task
        label = benchmark_of(first.run).label(first.run, task).full
        if task in [other["task"] for other in tasks]:  # other documents under the same name
            of = ", ".join(names[member.number] for member in members)
            task, label = f"{task} ({of})", f"{label} ({of})"
        union = _Union(members, sample)
        subtasks = list(dict.fromkeys(subtask for subtask, _ in union.names))
        of_kind = _choices if isinstance(first.view, ChoiceView) else _answers
        about, header, arrays = of_kind(members, union)
        numbers = np.array([subtasks.index(subtask) for subtask, _ in union.names], np.int64)
        tasks.append({
            "task": task,
            "label": label,
            "official": first.run.manifest["documents"].get(first.view.task, {}).get("official"),
            "documents": len(union.names),
            "of": union.total,
            "subtasks": subtasks,
            **about,
            "block": len(blocks),
            "runs": [member.number for member in members],
        })  # fmt: skip
        header = {"ids": [number for _, number in union.names]} | header
        blocks.append(encoded(header, {"subtask": ("u2", numbers)} | arrays))
        for problem in _problems(members):
            problems.setdefault(problem, []).append(task)
    for problem, listed in problems.items():
        say(f"{', '.join(listed)}: {problem}")
    about_runs = [
        {"name": name, "id": run.manifest["id"], "rule": run.rule} for name, run in zip(names, runs, strict=True)
    ]
    return DocumentData({"runs": about_runs, "segments": list(SEGMENTS), "tasks": tasks}, blocks)


def _by_documents(runs: Sequence[Run], say: Say) -> Iterator[list[_TaskOfRun]]:
    """Yield the runs' views of each task; runs that have other documents of a task are apart."""
    order: dict[tuple[str, str], list[list[tuple[int, Run]]]] = {}
    for number, run in enumerate(runs):
        for task in run.manifest["documents"]:
            parts = order.setdefault((run.kind, task), [])
            same = (part for part in parts if document_difference(part[0][1], run, task) is None)
            if (part := next(same, None)) is None:
                parts.append(part := [])
            part.append((number, run))
    for (_, task), parts in order.items():
        for part in parts:
            views = ((number, run, benchmark_of(run).views(run, (task,), say)) for number, run in part)
            if members := [_TaskOfRun(number, run, view) for number, run, of_task in views for view in of_task]:
                yield members


_Parts: TypeAlias = tuple[dict[str, Any], dict[str, Any], Arrays]
"""Entries of the page's index; header and arrays of the block."""


def _choices(members: Sequence[_TaskOfRun], union: _Union) -> _Parts:
    """Return the parts of a task whose choices were scored: texts, log-likelihoods, decisions.

    Raises:
        RunError: two runs have different choices or gold answers of a document.
    """
    views = [member.choices for member in members]
    gold, choices = _agreed(members, union)
    texts = [next((view.texts[name] for view in views if name in view.texts), None) for name in union.names]
    header = {
        # None where each choice's text shows its option
        "options": [[] if text is None or _shows_options(text) else list(text.options) for text in texts],
        "prompts": _prompts(members, union),
        "problem": "; ".join(_problems(members)),
    }
    arrays: Arrays = {"gold": ("u2", gold), "choices": ("u2", choices)}
    for member, view in zip(members, views, strict=True):
        places = union.places(member.names)
        for rule in view.rules:
            made, kept = decisions(view, rule), places >= 0
            prediction, tie = np.full(len(gold), ABSENT), np.zeros(len(gold), np.int64)
            margin = np.full(len(gold), np.nan)
            for values, source in ((prediction, made.prediction), (tie, made.tie), (margin, made.margin)):
                values[places[kept]] = source[kept]
            name = f"{member.number}/{rule}"
            arrays[f"{name}/prediction"] = ("u2", prediction)
            arrays |= {f"{name}/tie": ("u1", tie), f"{name}/margin": ("f4", margin)}
        arrays |= _scores(member, places, choices)
    rules = [rule for rule in views[0].rules if all(rule in view.rules for view in views)]
    return {"kind": "choices", "rules": rules, "metric": "accuracy"}, header, arrays


def _problems(members: Sequence[_TaskOfRun]) -> list[str]:
    return list(dict.fromkeys(member.view.problem for member in members if member.view.problem))


def _agreed(members: Sequence[_TaskOfRun], union: _Union) -> tuple[Places, Places]:
    """Return gold answer and number of choices of each document; raise `RunError` where two runs disagree."""
    gold, choices = (np.full(len(union.names), -1, np.int64) for _ in range(2))
    for member in members:
        places = union.places(member.names)
        kept = places >= 0
        for known, column in ((gold, "gold"), (choices, "choices")):
            before, of_run = known[places[kept]], member.first[column].to_numpy()[kept]
            if (wrong := (before >= 0) & (before != of_run)).any():
                subtask, number = union.names[int(places[kept][np.argmax(wrong)])]
                raise RunError(
                    f"run {member.run.folder} has other choices or another gold answer of {subtask} document {number} "
                    f"than run {members[0].run.folder}; give runs of the same documents"
                )
            known[places[kept]] = of_run
    return gold, choices


def _scores(member: _TaskOfRun, places: Places, choices: Places) -> Arrays:
    """Return log-likelihoods and tokens, [rows, segments], of the union's choices in its order."""
    table, first = member.choices.scores, np.cumsum(choices) - choices
    place = np.repeat(places, member.first["choices"].to_numpy())
    kept = place >= 0
    rows = first[place[kept]] + table["choice"].to_numpy()[kept]
    total, width = int(choices.sum()), len(SEGMENTS)
    likelihoods, tokens, truncated = np.full((total, width), np.nan), np.zeros((total, width)), np.zeros(total)
    likelihoods[rows] = table[[f"ll_{segment}" for segment in SEGMENTS]].to_numpy(float)[kept]
    counts = table[[f"n_{segment}" for segment in SEGMENTS]].to_numpy(float)[kept]
    tokens[rows] = np.nan_to_num(counts, nan=UNKNOWN)
    truncated[rows] = np.nan_to_num(table["truncated"].to_numpy()[kept])
    name = str(member.number)
    return {f"{name}/ll": ("f4", likelihoods), f"{name}/n": ("i4", tokens), f"{name}/truncated": ("i4", truncated)}


def _shows_options(text: ChoiceText) -> bool:
    return all(
        any(piece.segment == "continuation" and piece.text.strip() == option.strip() for piece in pieces)
        for pieces, option in zip(text.choices, text.options, strict=True)
    )


def _prompts(members: Sequence[_TaskOfRun], union: _Union) -> list[dict[str, Any]]:
    """Return the distinct prompts, each with its runs: those whose texts of common documents are the same."""
    distinct: list[tuple[list[int], dict[DocumentName, ChoiceText]]] = []
    for member in members:
        if not (texts := member.choices.texts):
            continue
        same = (prompt for prompt in distinct if all(prompt[1].get(name, text) == text for name, text in texts.items()))
        if (prompt := next(same, None)) is None:
            distinct.append(prompt := ([], {}))
        prompt[0].append(member.number)
        prompt[1].update(texts)  # runs may have other limits
    prompts = []
    for numbers, by_name in distinct:
        shown = [by_name.get(name) for name in union.names]
        common = [[] if text is None else _indexed(text.common) for text in shown]
        choices = [[] if text is None else list(map(_indexed, text.choices)) for text in shown]
        prompts.append({"runs": numbers, "common": common, "choices": choices})
    return prompts


def _indexed(pieces: Iterable[Piece]) -> list[list[Any]]:
    """Return [place of the segment in `SEGMENTS`, −1 for another one, text] of each piece."""
    return [[SEGMENTS.index(piece.segment) if piece.segment in SEGMENTS else -1, piece.text] for piece in pieces]


def _answers(members: Sequence[_TaskOfRun], union: _Union) -> _Parts:
    """Return the parts of a task whose documents were answered."""
    views = [member.view for member in members if isinstance(member.view, AnswerView)]
    by_run = [dict(zip(member.names, view.documents, strict=True)) for member, view in zip(members, views, strict=True)]
    first = [next(documents[name] for documents in by_run if name in documents) for name in union.names]
    prompts = [document.prompt for document in first]
    header: dict[str, Any] = {
        "references": [list(document.references) for document in first],
        "prompts": list(map(_indexed, prompts)) if any(prompts) else [],
        "problem": "; ".join(_problems(members)),
        "runs": {},
    }
    arrays: Arrays = {}
    for member, documents in zip(members, by_run, strict=True):
        ordered = [documents.get(name) for name in union.names]
        header["runs"][str(member.number)] = {
            "answers": [document and document.answer for document in ordered],
            "facts": [dict(document.facts) if document else {} for document in ordered],
        }
        scores = [np.nan if document is None or document.score is None else document.score for document in ordered]
        arrays[f"{member.number}/score"] = ("f8", np.array(scores, float))
    return {"kind": "answers", "rules": [], "metric": views[0].metric}, header, arrays
