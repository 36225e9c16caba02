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


class _Member(NamedTuple):
    """A run's view of a task, with the names of its documents in the run's order."""

    number: int
    run: Run
    view: TaskView
    names: list[DocumentName]

    def numbers_in(self, names: Sequence[DocumentName]) -> Numbers:
        """Return the number of each document among those of the page, -1 if it is not there."""
        numbers = {name: number for number, name in enumerate(names)}
        return np.fromiter((numbers.get(name, -1) for name in self.names), np.int64, len(self.names))


def _member(number: int, run: Run, view: TaskView) -> _Member:
    if isinstance(view, AnswerView):
        return _Member(number, run, view, [(document.subtask, document.id) for document in view.documents])
    first = view.scores.iloc[np.flatnonzero(view.scores["choice"].to_numpy() == 0)]
    ids = first["doc_id"].to_numpy().tolist()
    return _Member(number, run, view, list(zip(first["subtask"].astype(str), ids, strict=True)))


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
        every = list(dict.fromkeys(name for member in members for name in member.names))
        documents = every
        if sample is not None:
            documents = [every[number] for number in sample.places(first.view.task, [subtask for subtask, _ in every])]
        subtasks = list(dict.fromkeys(subtask for subtask, _ in documents))
        of_kind = _choices if isinstance(first.view, ChoiceView) else _answers
        about, header, arrays = of_kind(members, documents)
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
        header = {"ids": [identity for _, identity in documents], **header}
        numbers = np.array([subtasks.index(subtask) for subtask, _ in documents], np.int64)
        blocks.append(encoded(header, {"subtask": ("u2", numbers)} | arrays))
        for problem in _problems(members):
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


def _problems(members: Sequence[_Member]) -> list[str]:
    return list(dict.fromkeys(member.view.problem for member in members if member.view.problem))


_Parts: TypeAlias = tuple[dict[str, Any], dict[str, Any], Arrays]
"""Entries of the page's index; header and arrays of the block."""


def _choices(members: Sequence[_Member], names: Sequence[DocumentName]) -> _Parts:
    """Return the parts of a task whose choices were scored: texts, log-likelihoods, decisions."""
    views = [member.view for member in members if isinstance(member.view, ChoiceView)]
    texts = [next((view.texts[name] for view in views if name in view.texts), None) for name in names]
    header = {
        # None where each choice's text shows its option
        "options": [[] if text is None or _shows_options(text) else list(text.options) for text in texts],
        "prompts": _prompts(members, names),
        "problem": "; ".join(_problems(members)),
    }
    # Gold answer and number of choices of each document, in which the runs must agree
    gold, choices = (np.full(len(names), -1, np.int64) for _ in range(2))
    for member, view in zip(members, views, strict=True):
        numbers = member.numbers_in(names)
        kept = numbers >= 0
        first = view.scores.iloc[np.flatnonzero(view.scores["choice"].to_numpy() == 0)]
        for known, column in ((gold, "gold"), (choices, "choices")):
            before, of_run = known[numbers[kept]], first[column].to_numpy()[kept]
            if (wrong := (before >= 0) & (before != of_run)).any():
                subtask, identity = names[int(numbers[kept][np.argmax(wrong)])]
                raise RunError(
                    f"run {member.run.folder} has other choices or another gold answer of {subtask} document "
                    f"{identity} than run {members[0].run.folder}; give runs of the same documents"
                )
            known[numbers[kept]] = of_run
    arrays: Arrays = {"gold": ("u2", gold), "choices": ("u2", choices)}
    for member, view in zip(members, views, strict=True):
        numbers = member.numbers_in(names)
        kept = numbers >= 0
        for rule in view.rules:
            made = decisions(view, rule)
            prediction, tie = np.full(len(names), ABSENT), np.zeros(len(names), np.int64)
            margin = np.full(len(names), np.nan)
            for values, source in ((prediction, made.prediction), (tie, made.tie), (margin, made.margin)):
                values[numbers[kept]] = source[kept]
            key = f"{member.number}/{rule}"
            arrays[f"{key}/prediction"] = ("u2", prediction)
            arrays |= {f"{key}/tie": ("u1", tie), f"{key}/margin": ("f4", margin)}
        arrays |= _scores(member.number, view.scores, numbers, choices)
    rules = [rule for rule in views[0].rules if all(rule in view.rules for view in views)]
    return {"kind": "choices", "rules": rules, "metric": "accuracy"}, header, arrays


def _scores(run: int, table: pd.DataFrame, numbers: Numbers, choices: Numbers) -> Arrays:
    """Return log-likelihoods and tokens, [rows, segments], of the page's documents in its order."""
    choice, width, total = table["choice"].to_numpy(), len(SEGMENTS), int(choices.sum())
    of_row = np.repeat(numbers, table["choices"].to_numpy()[choice == 0])
    kept = of_row >= 0
    rows = (np.cumsum(choices) - choices)[of_row[kept]] + choice[kept]
    likelihoods, tokens, truncated = np.full((total, width), np.nan), np.zeros((total, width)), np.zeros(total)
    likelihoods[rows] = table[[f"ll_{segment}" for segment in SEGMENTS]].to_numpy(float)[kept]
    counts = table[[f"n_{segment}" for segment in SEGMENTS]].to_numpy(float)[kept]
    tokens[rows] = np.nan_to_num(counts, nan=UNKNOWN)
    truncated[rows] = np.nan_to_num(table["truncated"].to_numpy()[kept])
    return {f"{run}/ll": ("f4", likelihoods), f"{run}/n": ("i4", tokens), f"{run}/truncated": ("i4", truncated)}


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
        shown = [by_name.get(name) for name in names]
        common = [[] if text is None else _indexed(text.common) for text in shown]
        choices = [[] if text is None else list(map(_indexed, text.choices)) for text in shown]
        prompts.append({"runs": numbers, "common": common, "choices": choices})
    return prompts


def _indexed(pieces: Iterable[Piece]) -> list[list[Any]]:
    """Return [place of the segment in `SEGMENTS`, −1 for another one, text] of each piece."""
    return [[SEGMENTS.index(piece.segment) if piece.segment in SEGMENTS else -1, piece.text] for piece in pieces]


def _answers(members: Sequence[_Member], names: Sequence[DocumentName]) -> _Parts:
    views = [member.view for member in members if isinstance(member.view, AnswerView)]
    by_run = [dict(zip(member.names, view.documents, strict=True)) for member, view in zip(members, views, strict=True)]
    first = [next(documents[name] for documents in by_run if name in documents) for name in names]
    prompts = [document.prompt for document in first]
    header: dict[str, Any] = {
        "references": [list(document.references) for document in first],
        "prompts": list(map(_indexed, prompts)) if any(prompts) else [],
        "problem": "; ".join(_problems(members)),
        "runs": {},
    }
    arrays: Arrays = {}
    for member, documents in zip(members, by_run, strict=True):
        ordered = [documents.get(name) for name in names]
        header["runs"][str(member.number)] = {
            "answers": [document and document.answer for document in ordered],
            "facts": [dict(document.facts) if document else {} for document in ordered],
        }
        scores = [np.nan if document is None or document.score is None else document.score for document in ordered]
        arrays[f"{member.number}/score"] = ("f8", np.array(scores, float))
    return {"kind": "answers", "rules": [], "metric": views[0].metric}, header, arrays
