"""Records of documents for programs. In: a selected document. Out: plain data, with unrounded numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from evalkit.benchmarks.document_views import AnswerView, ChoiceView, Piece
from evalkit.inspection.outcomes import TaskOutcomes, gold_of
from evalkit.inspection.selection import SelectedDocument, choice_text_of
from evalkit.runs.score_table import SEGMENTS


def document_record(found: SelectedDocument) -> dict[str, Any]:
    """Return a document with its texts, and its outcome and scores in each run."""
    subtask, identity = found.key
    first, place = found.outcomes[0], found.places[0]
    record = {"name": found.name, "task": first.view.task, "subtask": subtask, "document": identity}
    runs = [_run_record(one, at) for one, at in zip(found.outcomes, found.places, strict=True)]
    return record | _texts(first, place) | {"runs": runs}


def flat_record(found: SelectedDocument, beginning: str) -> dict[str, Any]:
    """Return a row of a CSV: a document with the beginning of its text, and its outcome in each run."""
    subtask, identity = found.key
    row: dict[str, Any] = {"task": found.outcomes[0].view.task, "subtask": subtask, "document": identity}
    for number, (one, place) in enumerate(zip(found.outcomes, found.places, strict=True)):
        about = _outcome(one, place)
        if number == 0 and "gold" in about:
            row["gold"] = about["gold"]
        suffix = "" if len(found.outcomes) == 1 else f" {'AB'[number]}"
        row |= {f"{name}{suffix}": about[name] for name in about if name not in ("run", "rule", "gold", "references")}
    return row | {"text": beginning}


def scored_choices(found: TaskOutcomes, place: int) -> list[dict[str, dict[str, float | None]]]:
    """Return of each choice: segment → log-likelihood, tokens and perplexity, for segments with tokens.

    "unconditional" is the continuation without the context, "whole" the whole sequence, where several segments are
    scored. A log-likelihood that the run does not have is None.
    """
    decided, view = found.decided, found.view
    if decided is None or not isinstance(view, ChoiceView):
        return []
    start = int(decided.starts[place])
    count = int(view.scores["choices"].iloc[start])
    rows = view.scores.iloc[start : start + count].to_dict("records")
    return [_choice(row) for row in rows]


def _choice(row: Mapping[Any, Any]) -> dict[str, dict[str, float | None]]:
    found = {segment: _segment(row, segment) for segment in _segments(row)}
    scored = [segment for segment in found if segment in SEGMENTS and not np.isnan(row[f"ll_{segment}"])]
    if len(scored) > 1:
        likelihood, tokens = (sum(row[f"{kind}_{segment}"] for segment in scored) for kind in ("ll", "n"))
        found["whole"] = _numbers(float(likelihood), int(tokens))
    return found


def _segments(row: Mapping[Any, Any]) -> list[str]:
    # Token counts of an imported log are not known
    counted = [segment for segment in SEGMENTS if row[f"n_{segment}"] > 0]
    present = counted or [segment for segment in SEGMENTS if not np.isnan(row[f"ll_{segment}"])]
    return [*present, *(["unconditional"] if not np.isnan(row["ll_unconditional"]) else [])]


def _segment(row: Mapping[Any, Any], segment: str) -> dict[str, float | None]:
    tokens = row["n_continuation" if segment == "unconditional" else f"n_{segment}"]
    return _numbers(float(row[f"ll_{segment}"]), None if np.isnan(tokens) else int(tokens))


def _numbers(likelihood: float, tokens: int | None) -> dict[str, float | None]:
    if np.isnan(likelihood) or not tokens:
        return {"log_likelihood": None if np.isnan(likelihood) else likelihood, "tokens": tokens, "perplexity": None}
    with np.errstate(over="ignore"):
        perplexity = float(np.exp(-likelihood / tokens))
    return {"log_likelihood": likelihood, "tokens": tokens, "perplexity": perplexity}


def _run_record(found: TaskOutcomes, place: int) -> dict[str, Any]:
    record = {"run": found.run.manifest["id"], "rule": found.rule} | _outcome(found, place)
    if choices := scored_choices(found, place):
        record["choices"] = choices
    return record


def _outcome(found: TaskOutcomes, place: int) -> dict[str, Any]:
    """Return the outcome of a document: of choices the prediction, of an answer its text and score."""
    verdict = bool(found.right[place]) if found.right[place] or found.wrong[place] else None
    if found.decided is not None:
        return {
            "gold": gold_of(found, place),
            "prediction": int(found.decided.prediction[place]),
            "right": verdict,
            "tie": bool(found.tie[place]),
            "margin": float(found.value[place]),
            "truncated": bool(found.truncated[place]),
        }
    assert isinstance(found.view, AnswerView)
    document = found.view.documents[place]
    return {
        "answer": document.answer,
        "references": list(document.references),
        "metric": found.view.metric,
        "score": document.score,
        "right": verdict,
        "truncated": bool(found.truncated[place]),
        **document.facts,
    }


def _texts(found: TaskOutcomes, place: int) -> dict[str, Any]:
    if isinstance(found.view, AnswerView):
        return {"prompt": _plain(found.view.documents[place].prompt)}
    if (text := choice_text_of(found, place)) is None:
        return {"problem": found.view.problem}
    problem = {"problem": found.view.problem} if found.view.problem else {}
    return {
        "options": list(text.options),
        "prompt": _plain(text.common),
        "continuations": [_plain(pieces) for pieces in text.choices],
        **problem,
    }


def _plain(pieces: Iterable[Piece]) -> list[dict[str, str]]:
    return [piece._asdict() for piece in pieces]
