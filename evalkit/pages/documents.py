"""Documents of runs for a page: the union of each task's documents, with the decisions of every run under every rule.

In: finished runs. Out: `DocumentData`: an index for the page's script, and a block for each task (`page.py`).
Decisions are computed here, by the rules themselves; the page only shows them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from evalkit.benchmarks.document_views import AnswerView, ChoiceText, ChoiceView
from evalkit.benchmarks.registry import benchmark_of, document_difference
from evalkit.data.sampling import DocumentSample
from evalkit.display import Say
from evalkit.errors import RunError
from evalkit.inspection.outcomes import decisions
from evalkit.pages.page import DocumentData, DocumentName, Union, ViewOfRun, encoded, indexed, problem_of
from evalkit.runs.folder import Run
from evalkit.runs.score_table import SEGMENTS


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
    used: set[str] = set()
    problems: dict[str, list[str]] = {}
    for members in _by_documents(runs, say):
        first, numbers = members[0], [member.number for member in members]
        make = choices_block if isinstance(first.view, ChoiceView) else answers_block
        task, (of_kind, block) = first.view.task, make(members, sample)
        about = {
            "task": task,
            "label": benchmark_of(first.run).label(first.run, task).full,
            "official": first.run.manifest["documents"].get(task, {}).get("official"),
        } | of_kind
        if about["task"] in used:  # other documents under the same name
            of = ", ".join(names[number] for number in numbers)
            about |= {"task": f"{about['task']} ({of})", "label": f"{about['label']} ({of})"}
        used.add(about["task"])
        for problem in dict.fromkeys(member.view.problem for member in members if member.view.problem):
            problems.setdefault(problem, []).append(about["task"])
        tasks.append(about | {"block": len(blocks), "runs": numbers})
        blocks.append(block)
    for problem, listed in problems.items():
        say(f"{', '.join(listed)}: {problem}")
    listed_runs = [
        {"name": name, "id": run.manifest["id"], "rule": run.rule} for name, run in zip(names, runs, strict=True)
    ]
    return DocumentData({"runs": listed_runs, "segments": list(SEGMENTS), "tasks": tasks}, blocks)


def _by_documents(runs: Sequence[Run], say: Say) -> Iterator[list[ViewOfRun]]:
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
            if members := [ViewOfRun(number, run, view) for number, run, of_task in views for view in of_task]:
                yield members


ABSENT = 65535
"""Prediction of a run that does not have the document."""
UNKNOWN = -1
"""Number of tokens in a run that does not know it, as one imported from a log."""
_Arrays = dict[str, tuple[str, NDArray[Any]]]


def choices_block(members: Sequence[ViewOfRun], sample: DocumentSample | None) -> tuple[dict[str, Any], str]:
    """Return the index entries and the block of a task whose choices were scored: texts, log-likelihoods, decisions.

    Raises:
        RunError: two runs have different choices or gold answers of a document.
    """
    views = [member.view for member in members if isinstance(member.view, ChoiceView)]
    tables = [_Documents(view) for view in views]
    union = Union(views[0].task, [table.names for table in tables], sample)
    rules = [rule for rule in views[0].rules if all(rule in view.rules for view in views)]
    gold, choices = _agreed(members, tables, union)
    texts = (next((view.texts[name] for view in views if name in view.texts), None) for name in union.names)
    header: dict[str, Any] = {
        "ids": [number for _, number in union.names],
        # None where each choice's text shows its option
        "options": [[] if text is None or _shows_options(text) else list(text.options) for text in texts],
        "prompts": _prompts(members, views, union),
        "problem": problem_of(views),
    }
    arrays: _Arrays = {
        "subtask": ("u2", union.subtask_numbers()),
        "gold": ("u2", gold),
        "choices": ("u2", choices),
    }
    for member, table in zip(members, tables, strict=True):
        places = union.places(table.names)
        for rule in table.view.rules:
            arrays |= _decided(f"{member.number}/{rule}", table, rule, places, len(gold))
        arrays |= _scores(str(member.number), table, places, choices)
    return union.about() | {"kind": "choices", "rules": rules, "metric": "accuracy"}, encoded(header, arrays)


class _Documents:
    """The score table of a task by document."""

    def __init__(self, view: ChoiceView) -> None:
        self.view, self.scores = view, view.scores
        self.starts = np.flatnonzero(view.scores["choice"].to_numpy() == 0)
        first = view.scores.iloc[self.starts]
        ids = first["doc_id"].to_numpy().tolist()
        self.names: list[DocumentName] = list(zip(first["subtask"].astype(str), ids, strict=True))
        self.gold, self.choices = (first[name].to_numpy() for name in ("gold", "choices"))


def _agreed(
    members: Sequence[ViewOfRun], tables: Sequence[_Documents], union: Union
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return gold answer and number of choices of each document; raise `RunError` where two runs disagree."""
    gold, choices = (np.full(len(union.names), -1, np.int64) for _ in range(2))
    for member, table in zip(members, tables, strict=True):
        places = union.places(table.names)
        kept = places >= 0
        for known, of_run in ((gold, table.gold), (choices, table.choices)):
            before = known[places[kept]]
            if (wrong := (before >= 0) & (before != of_run[kept])).any():
                subtask, number = union.names[int(places[kept][np.argmax(wrong)])]
                raise RunError(
                    f"run {member.run.folder} has other choices or another gold answer of {subtask} document {number} "
                    f"than run {members[0].run.folder}; give runs of the same documents"
                )
            known[places[kept]] = of_run[kept]
    return gold, choices


def _decided(name: str, table: _Documents, rule: str, places: NDArray[np.int64], documents: int) -> _Arrays:
    made, kept = decisions(table.view, rule), places >= 0
    prediction = np.full(documents, ABSENT, np.int64)
    tie, margin = np.zeros(documents, np.int64), np.full(documents, np.nan)
    for values, source in ((prediction, made.prediction), (tie, made.tie), (margin, made.margin)):
        values[places[kept]] = source[kept]
    return {
        f"{name}/prediction": ("u2", prediction),
        f"{name}/tie": ("u1", tie),
        f"{name}/margin": ("f4", margin),
    }


def _scores(name: str, table: _Documents, places: NDArray[np.int64], choices: NDArray[np.int64]) -> _Arrays:
    """Return log-likelihoods and tokens, [rows, segments], of the union's choices in its order."""
    first = np.cumsum(choices) - choices
    place = np.repeat(places, table.choices)
    kept = place >= 0
    rows = first[place[kept]] + table.scores["choice"].to_numpy()[kept]
    total, width = int(choices.sum()), len(SEGMENTS)
    likelihoods, tokens = np.full((total, width), np.nan), np.zeros((total, width), np.int64)
    likelihoods[rows] = _columns(table.scores, "ll", kept)
    tokens[rows] = np.nan_to_num(_columns(table.scores, "n", kept), nan=UNKNOWN)
    truncated = np.zeros(total, np.int64)
    truncated[rows] = np.nan_to_num(table.scores["truncated"].to_numpy()[kept])
    return {
        f"{name}/ll": ("f4", likelihoods),
        f"{name}/n": ("i4", tokens),
        f"{name}/truncated": ("i4", truncated),
    }


def _columns(scores: pd.DataFrame, kind: str, kept: NDArray[np.bool_]) -> NDArray[Any]:
    return scores[[f"{kind}_{segment}" for segment in SEGMENTS]].to_numpy(float)[kept]


def _shows_options(text: ChoiceText) -> bool:
    return all(
        any(piece.segment == "continuation" and piece.text.strip() == option.strip() for piece in pieces)
        for pieces, option in zip(text.choices, text.options, strict=True)
    )


def _prompts(members: Sequence[ViewOfRun], views: Sequence[ChoiceView], union: Union) -> list[dict[str, Any]]:
    """Return the distinct prompts, each with its runs: those whose texts of common documents are the same."""
    distinct: list[tuple[list[int], dict[DocumentName, ChoiceText]]] = []
    for member, view in zip(members, views, strict=True):
        if not view.texts:
            continue
        texts = view.texts.items()
        same = (prompt for prompt in distinct if all(prompt[1].get(name, text) == text for name, text in texts))
        if (prompt := next(same, None)) is None:
            distinct.append(prompt := ([], {}))
        prompt[0].append(member.number)
        prompt[1].update(view.texts)  # runs may have other limits
    prompts = []
    for numbers, by_name in distinct:
        shown = [by_name.get(name) for name in union.names]
        common = [[] if text is None else indexed(text.common) for text in shown]
        choices = [[] if text is None else list(map(indexed, text.choices)) for text in shown]
        prompts.append({"runs": numbers, "common": common, "choices": choices})
    return prompts


def answers_block(members: Sequence[ViewOfRun], sample: DocumentSample | None) -> tuple[dict[str, Any], str]:
    """Return the index entries and the block of a task whose documents were answered."""
    views = [member.view for member in members if isinstance(member.view, AnswerView)]
    by_run = [{(document.subtask, document.id): document for document in view.documents} for view in views]
    union = Union(views[0].task, [list(documents) for documents in by_run], sample)
    first = [next(documents[name] for documents in by_run if name in documents) for name in union.names]
    prompts = [document.prompt for document in first]
    header: dict[str, Any] = {
        "ids": [number for _, number in union.names],
        "references": [list(document.references) for document in first],
        "prompts": list(map(indexed, prompts)) if any(prompts) else [],
        "problem": problem_of(views),
        "runs": {},
    }
    arrays: _Arrays = {"subtask": ("u2", union.subtask_numbers())}
    for member, documents in zip(members, by_run, strict=True):
        ordered = [documents.get(name) for name in union.names]
        header["runs"][str(member.number)] = {
            "answers": [document and document.answer for document in ordered],
            "facts": [dict(document.facts) if document else {} for document in ordered],
        }
        scores = [np.nan if document is None or document.score is None else document.score for document in ordered]
        arrays[f"{member.number}/score"] = ("f8", np.array(scores, float))
    return union.about() | {"kind": "answers", "rules": [], "metric": views[0].metric}, encoded(header, arrays)
