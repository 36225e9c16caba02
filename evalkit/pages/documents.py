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
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evalkit.benchmarks.differences import document_difference
from evalkit.benchmarks.document_views import AnswerView, ChoiceText, ChoiceView
from evalkit.benchmarks.registry import results_of
from evalkit.data.sampling import DocumentSample
from evalkit.display import Say
from evalkit.errors import RunError
from evalkit.escape import in_json
from evalkit.inspection.outcomes import DocumentName, TaskOutcomes, decisions, own_rule, run_outcomes
from evalkit.runs.folder import Run
from evalkit.runs.scales import CORRECT
from evalkit.runs.score_table import SEGMENTS
from evalkit.suites.templates import Piece

Arrays: TypeAlias = dict[str, tuple[str, NDArray[Any]]]
"""Name → (u1, u2, i4, f4 or f8; values of any shape)."""

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


_Member: TypeAlias = tuple[int, TaskOutcomes]
"""Number of a run, and a task in it."""


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
        first = members[0][1]
        task, numbers = first.view.task, [number for number, _ in members]
        label = results_of(first.run).label(task).full
        if task in [other["task"] for other in tasks]:  # other documents under the same name
            of = ", ".join(names[number] for number in numbers)
            task, label = f"{task} ({of})", f"{label} ({of})"
        documents = every = list(dict.fromkeys(name for _, outcomes in members for name in outcomes.documents))
        if sample is not None:
            documents = [every[index] for index in sample.places(first.view.task, [subtask for subtask, _ in every])]
        problems = list(dict.fromkeys(outcomes.view.problem for _, outcomes in members if outcomes.view.problem))
        of_kind = _choices if first.decided is not None else _answers
        about, header, arrays = of_kind(members, documents, "; ".join(problems))
        subtasks = list(dict.fromkeys(subtask for subtask, _ in documents))
        official = first.run.manifest["documents"].get(first.view.task, {}).get("official")
        entry = {"task": task, "label": label, "official": official, "documents": len(documents), "of": len(every)}
        tasks.append({**entry, "subtasks": subtasks, **about, "block": len(blocks), "runs": numbers})
        in_subtasks = np.array([subtasks.index(subtask) for subtask, _ in documents], np.int64)
        blocks.append(encoded(header, {"subtask": ("u2", in_subtasks)} | arrays))
        for problem in problems:
            said.setdefault(problem, []).append(task)
    for problem, listed in said.items():
        say(f"{', '.join(listed)}: {problem}")
    named = zip(names, runs, strict=True)
    about_runs = [{"name": name, "id": run.manifest["id"], "rule": own_rule(run)} for name, run in named]
    return DocumentData({"runs": about_runs, "segments": list(SEGMENTS), "tasks": tasks}, blocks)


def _by_documents(runs: Sequence[Run], say: Say) -> Iterator[list[_Member]]:
    """Yield the runs' outcomes of each task; runs that have other documents of a task are apart."""
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
            if members := [(number, made) for number, run in part for made in run_outcomes(run, (task,), None, say)]:
                yield members


_Parts: TypeAlias = tuple[dict[str, Any], dict[str, Any], Arrays]
"""Entries of the page's index; header and arrays of the block."""


def _choices(members: Sequence[_Member], names: Sequence[DocumentName], problem: str) -> _Parts:
    """Return the parts of a task whose choices were scored: texts, log-likelihoods, decisions."""
    texts = [next(filter(None, (_text(made, name) for _, made in members)), None) for name in names]
    # None where each choice's text shows its option
    options = [[] if text is None or _shows_options(text) else list(text.options) for text in texts]
    ids = [int(identity) for _, identity in names]
    header = {"ids": ids, "options": options, "prompts": _prompts(members, names), "problem": problem}
    # Gold answer and number of choices of each document, in which the runs must agree
    known = dict.fromkeys(("gold", "choices"), np.full(len(names), -1, np.int64))
    placed = []
    for run, outcomes in members:
        view, decided, documents = outcomes.view, outcomes.decided, outcomes.documents
        assert isinstance(view, ChoiceView) and decided is not None
        # Place of each document of the page in the run, -1 if the run does not have it
        places = np.array([documents[name].number if name in documents else -1 for name in names])
        placed.append((run, view, decided.starts[places], places))
        for column, before in known.items():
            of_run = np.where(places >= 0, view.scores[column].to_numpy()[decided.starts[places]], before)
            if (wrong := (before >= 0) & (before != of_run)).any():
                subtask, identity = names[int(np.argmax(wrong))]
                document = f"{subtask} document {identity} than run {members[0][1].run.folder}"
                raise RunError(f"run {outcomes.run.folder} has other choices or another gold answer of {document}")
            known[column] = of_run
    arrays: Arrays = {column: ("u2", values) for column, values in known.items()}
    choices, columns = known["choices"], [f"{kind}_{segment}" for kind in ("ll", "n") for segment in SEGMENTS]
    within = np.arange(choices.sum()) - np.repeat(np.cumsum(choices) - choices, choices)
    for run, view, starts, places in placed:
        has = places >= 0
        for rule in view.rules:
            made, key = decisions(view, rule), f"{run}/{rule}"
            arrays[f"{key}/prediction"] = ("u2", np.where(has, made.prediction[places], ABSENT))
            arrays[f"{key}/tie"] = ("u1", has & made.tie[places])
            arrays[f"{key}/margin"] = ("f4", np.where(has, made.margin[places], np.nan))
        # Rows of the score table in the order of the page
        scored = np.repeat(has, choices)
        rows = np.where(scored, np.repeat(starts, choices) + within, 0)
        numbers = view.scores[[*columns, "truncated"]].to_numpy(float)[rows]
        numbers[~scored] = [np.nan] * len(SEGMENTS) + [0] * (len(SEGMENTS) + 1)
        likelihoods, tokens, truncated = np.split(numbers, (len(SEGMENTS), 2 * len(SEGMENTS)), axis=1)
        arrays[f"{run}/ll"] = ("f4", likelihoods)
        arrays[f"{run}/n"] = ("i4", np.nan_to_num(tokens, nan=UNKNOWN))
        arrays[f"{run}/truncated"] = ("i4", np.nan_to_num(truncated))
    rules = [rule for rule in placed[0][1].rules if all(rule in view.rules for _, view, *_ in placed)]
    return {"kind": "choices", "rules": rules} | CORRECT.entries, header, arrays


def _text(outcomes: TaskOutcomes, name: DocumentName) -> ChoiceText | None:
    return outcomes.documents[name].text if name in outcomes.documents else None


def _shows_options(text: ChoiceText) -> bool:
    for pieces, option in zip(text.choices, text.options, strict=True):
        if ("continuation", option.strip()) not in [(piece.segment, piece.text.strip()) for piece in pieces]:
            return False
    return True


def _prompts(members: Sequence[_Member], names: Sequence[DocumentName]) -> list[dict[str, Any]]:
    """Return the distinct prompts, each with its runs: those whose texts of common documents are the same."""
    distinct: list[tuple[list[int], dict[DocumentName, ChoiceText]]] = []
    for number, outcomes in members:
        texts = {name: text for name in outcomes.documents if (text := _text(outcomes, name))}
        if not texts:
            continue
        same = (prompt for prompt in distinct if all(prompt[1].get(name, text) == text for name, text in texts.items()))
        if (prompt := next(same, None)) is None:
            distinct.append(prompt := ([], {}))
        prompt[0].append(number)
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
    by_run = {run: {name: made.answer for name, made in outcomes.documents.items()} for run, outcomes in members}
    first = [next(filter(None, (answers.get(name) for answers in by_run.values()))) for name in names]
    prompts = [_indexed(document.prompt) for document in first]
    header = {"ids": [identity for _, identity in names], "references": [list(each.references) for each in first]}
    header |= {"prompts": prompts if any(prompts) else []}
    runs: dict[str, Any] = {}
    arrays: Arrays = {}
    for run, answers in by_run.items():
        ordered = [answers.get(name) for name in names]
        facts = [dict(answer.facts) if answer else {} for answer in ordered]
        runs[str(run)] = {"answers": [answer and answer.answer for answer in ordered], "facts": facts}
        scores = [answer and answer.score for answer in ordered]
        arrays[f"{run}/score"] = ("f8", np.array(scores, float))  # None becomes NaN
    view = members[0][1].view
    assert isinstance(view, AnswerView)
    about = {"kind": "answers", "rules": []} | view.scale.entries
    return about, {**header, "problem": problem, "runs": runs}, arrays
