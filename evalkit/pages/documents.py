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
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

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

if TYPE_CHECKING:
    import pandas as pd

DocumentName: TypeAlias = tuple[str, Any]
"""Subtask, and the document's id in it."""
Arrays: TypeAlias = dict[str, tuple[str, NDArray[Any]]]
"""Name → (u1, u2, i4, f4 or f8; values of any shape)."""
Numbers: TypeAlias = NDArray[np.int64]

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
    """Return a block as base64, of JSON-compatible content and arrays; an integer that does not fit raises."""
    table: dict[str, list[Any]] = {}
    body = bytearray()
    for name, (kind, values) in arrays.items():
        given = np.asarray(values).ravel()
        stored = given.astype(f"<{kind}")
        if stored.dtype.kind in "ui" and (stored != given).any():
            raise OverflowError(f"array {name}: values from {given.min()} to {given.max()} do not fit {kind}")
        table[name] = [kind, len(body), stored.size]
        body += stored.tobytes()
        body += bytes(-len(body) % _ALIGNED)
    text = in_json(json.dumps({**header, "arrays": table}, ensure_ascii=False, separators=(",", ":")))
    start = text.encode("utf-8", "replace")  # a lone surrogate is shown as a question mark
    start += b" " * (-(4 + len(start)) % _ALIGNED)
    content = len(start).to_bytes(4, "little") + start + bytes(body)
    return base64.b64encode(gzip.compress(content, mtime=0)).decode("ascii")


class _Member(NamedTuple):
    """A run's view of a task, with the names of its documents in the run's order."""

    number: int
    run: Run
    view: TaskView
    names: list[DocumentName]

    def places_of(self, names: Sequence[DocumentName]) -> Numbers:
        """Return the place of each document of the page in the run's order, -1 if the run does not have it."""
        places = {name: place for place, name in enumerate(self.names)}
        return np.array([places.get(name, -1) for name in names], np.int64)


def _member(number: int, run: Run, view: TaskView) -> _Member:
    if isinstance(view, AnswerView):
        return _Member(number, run, view, [(document.subtask, document.id) for document in view.documents])
    first = _first_rows(view)
    names = zip(first["subtask"].astype(str), first["doc_id"].to_numpy().tolist(), strict=True)
    return _Member(number, run, view, list(names))


def _first_rows(view: ChoiceView) -> pd.DataFrame:
    """Return the row of each document's first choice, numbered by its place in the score table."""
    return view.scores.reset_index(drop=True).query("choice == 0")


def document_data(
    runs: Sequence[Run], names: Sequence[str], say: Say, sample: DocumentSample | None = None
) -> DocumentData:
    """Collect all documents of finished runs, which have `names` in the page, or a sample of them.

    Documents that runs share are read once within `remembering`.
    """
    tasks: list[dict[str, Any]] = []
    blocks: list[str] = []
    said: dict[str, list[str]] = {}
    for members in _by_documents(runs, say):
        first, task = members[0], members[0].view.task
        label = benchmark_of(first.run).label(first.run, task).full
        if task in [other["task"] for other in tasks]:  # other documents under the same name
            of = ", ".join(names[member.number] for member in members)
            task, label = f"{task} ({of})", f"{label} ({of})"
        documents = every = list(dict.fromkeys(name for member in members for name in member.names))
        if sample is not None:
            documents = [every[place] for place in sample.places(first.view.task, [subtask for subtask, _ in every])]
        problems = list(dict.fromkeys(member.view.problem for member in members if member.view.problem))
        of_kind = _choices if isinstance(first.view, ChoiceView) else _answers
        about, header, arrays = of_kind(members, documents, "; ".join(problems))
        subtasks = list(dict.fromkeys(subtask for subtask, _ in documents))
        tasks.append({
            "task": task,
            "label": label,
            "official": first.run.manifest["documents"].get(first.view.task, {}).get("official"),
            "documents": len(documents),
            "of": len(every),
            "subtasks": subtasks,
            **about,
            "block": len(blocks),
            "runs": [member.number for member in members],
        })  # fmt: skip
        numbers = np.array([subtasks.index(subtask) for subtask, _ in documents], np.int64)
        ids = [identity for _, identity in documents]
        blocks.append(encoded({"ids": ids, **header}, {"subtask": ("u2", numbers)} | arrays))
        for problem in problems:
            said.setdefault(problem, []).append(task)
    for problem, listed in said.items():
        say(f"{', '.join(listed)}: {problem}")
    about_runs = [
        {"name": name, "id": run.manifest["id"], "rule": run.rule} for name, run in zip(names, runs, strict=True)
    ]
    return DocumentData({"runs": about_runs, "segments": list(SEGMENTS), "tasks": tasks}, blocks)


def _by_documents(runs: Sequence[Run], say: Say) -> Iterator[list[_Member]]:
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
            if members := [_member(number, run, view) for number, run, of_task in views for view in of_task]:
                yield members


_Parts: TypeAlias = tuple[dict[str, Any], dict[str, Any], Arrays]
"""Entries of the page's index; header and arrays of the block."""


def _choices(members: Sequence[_Member], names: Sequence[DocumentName], problem: str) -> _Parts:
    """Return the parts of a task whose choices were scored: texts, log-likelihoods, decisions."""
    views = [member.view for member in members if isinstance(member.view, ChoiceView)]
    texts = [next((view.texts[name] for view in views if name in view.texts), None) for name in names]
    header = {
        # None where each choice's text shows its option
        "options": [[] if text is None or _shows_options(text) else list(text.options) for text in texts],
        "prompts": _prompts(members, names),
        "problem": problem,
    }
    # Gold answer and number of choices of each document, in which the runs must agree
    known = dict.fromkeys(("gold", "choices"), np.full(len(names), -1, np.int64))
    for member, view in zip(members, views, strict=True):
        places, first = member.places_of(names), _first_rows(view)
        for column, before in known.items():
            of_run = np.where(places >= 0, first[column].to_numpy()[places], before)
            if (wrong := (before >= 0) & (before != of_run)).any():
                subtask, identity = names[int(np.argmax(wrong))]
                raise RunError(
                    f"run {member.run.folder} has other choices or another gold answer of {subtask} document "
                    f"{identity} than run {members[0].run.folder}; give runs of the same documents"
                )
            known[column] = of_run
    arrays: Arrays = {column: ("u2", values) for column, values in known.items()}
    for member, view in zip(members, views, strict=True):
        places = member.places_of(names)
        has = places >= 0
        for rule in view.rules:
            made, key = decisions(view, rule), f"{member.number}/{rule}"
            arrays[f"{key}/prediction"] = ("u2", np.where(has, made.prediction[places], ABSENT))
            arrays[f"{key}/tie"] = ("u1", has & made.tie[places])
            arrays[f"{key}/margin"] = ("f4", np.where(has, made.margin[places], np.nan))
        # Rows of the score table in the order of the page
        choices = known["choices"]
        within = np.arange(choices.sum()) - np.repeat(np.cumsum(choices) - choices, choices)
        scored = np.repeat(has, choices)
        rows = np.where(scored, np.repeat(_first_rows(view).index.to_numpy()[places], choices) + within, 0)
        numbers = view.scores.iloc[rows]
        for name, kind, columns, absent, unknown in (
            ("ll", "f4", [f"ll_{segment}" for segment in SEGMENTS], np.nan, np.nan),
            ("n", "i4", [f"n_{segment}" for segment in SEGMENTS], 0, UNKNOWN),
            ("truncated", "i4", ["truncated"], 0, 0),
        ):
            values = np.nan_to_num(numbers[columns].to_numpy(float), nan=unknown, neginf=-np.inf, posinf=np.inf)
            arrays[f"{member.number}/{name}"] = (kind, np.where(scored[:, None], values, absent))
    rules = [rule for rule in views[0].rules if all(rule in view.rules for view in views)]
    return {"kind": "choices", "rules": rules, "metric": "accuracy"}, header, arrays


def _shows_options(text: ChoiceText) -> bool:
    return all(
        any(piece.segment == "continuation" and piece.text.strip() == option.strip() for piece in pieces)
        for pieces, option in zip(text.choices, text.options, strict=True)
    )


def _prompts(members: Sequence[_Member], names: Sequence[DocumentName]) -> list[dict[str, Any]]:
    """Return the distinct prompts, each with its runs: those whose texts of common documents are the same."""
    distinct: list[tuple[list[int], dict[DocumentName, ChoiceText]]] = []
    for member in members:
        if not (isinstance(member.view, ChoiceView) and (texts := member.view.texts)):
            continue
        same = (prompt for prompt in distinct if all(prompt[1].get(name, text) == text for name, text in texts.items()))
        if (prompt := next(same, None)) is None:
            distinct.append(prompt := ([], {}))
        prompt[0].append(member.number)
        prompt[1].update(texts)  # runs may have other limits
    prompts = []
    for numbers, by_name in distinct:
        shown = [by_name.get(name, ChoiceText((), (), ())) for name in names]
        common = [_indexed(text.common) for text in shown]
        choices = [list(map(_indexed, text.choices)) for text in shown]
        prompts.append({"runs": numbers, "common": common, "choices": choices})
    return prompts


def _indexed(pieces: Iterable[Piece]) -> list[list[Any]]:
    """Return [place of the segment in `SEGMENTS`, −1 for another one, text] of each piece."""
    return [[SEGMENTS.index(piece.segment) if piece.segment in SEGMENTS else -1, piece.text] for piece in pieces]


def _answers(members: Sequence[_Member], names: Sequence[DocumentName], problem: str) -> _Parts:
    views = [member.view for member in members if isinstance(member.view, AnswerView)]
    by_run = [dict(zip(member.names, view.documents, strict=True)) for member, view in zip(members, views, strict=True)]
    first = [next(documents[name] for documents in by_run if name in documents) for name in names]
    prompts = [_indexed(document.prompt) for document in first]
    header: dict[str, Any] = {
        "references": [list(document.references) for document in first],
        "prompts": prompts if any(prompts) else [],
        "problem": problem,
        "runs": {},
    }
    arrays: Arrays = {}
    for member, documents in zip(members, by_run, strict=True):
        ordered = [documents.get(name) for name in names]
        header["runs"][str(member.number)] = {
            "answers": [document and document.answer for document in ordered],
            "facts": [dict(document.facts) if document else {} for document in ordered],
        }
        scores = [document and document.score for document in ordered]
        arrays[f"{member.number}/score"] = ("f8", np.array(scores, float))  # None becomes NaN
    return {"kind": "answers", "rules": [], "metric": views[0].metric}, header, arrays
