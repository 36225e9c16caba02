"""Block of a task whose documents were answered with texts: references, each run's answer, score and facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from evalkit.benchmarks.document_views import AnsweredDocument, AnswerView
from evalkit.data.sampling import DocumentSample
from evalkit.pages.blocks import encoded
from evalkit.pages.union import DocumentName, Union, ViewOfRun, indexed, problem_of


def answers_block(members: Sequence[ViewOfRun], sample: DocumentSample | None) -> tuple[dict[str, Any], str]:
    """Return the entries of a task in the page's index, and its block."""
    views = [member.view for member in members if isinstance(member.view, AnswerView)]
    by_run = [{(one.subtask, one.id): one for one in view.documents} for view in views]
    union = Union(views[0].task, [list(found) for found in by_run], sample)
    first = [next(found[name] for found in by_run if name in found) for name in union.names]
    header: dict[str, Any] = {
        "ids": [number for _, number in union.names],
        "references": [list(one.references) for one in first],
        "prompts": [indexed(one.prompt) for one in first] if any(one.prompt for one in first) else [],
        "problem": problem_of(views),
        "runs": {str(member.number): _of_run(found, union) for member, found in zip(members, by_run, strict=True)},
    }
    arrays = {"subtask": ("u2", union.subtask_numbers())} | {
        f"{member.number}/score": ("f8", _scores(found, union)) for member, found in zip(members, by_run, strict=True)
    }
    return union.about() | {"kind": "answers", "rules": [], "metric": views[0].metric}, encoded(header, arrays)


def _of_run(found: Mapping[DocumentName, AnsweredDocument], union: Union) -> dict[str, Any]:
    ordered = [found.get(name) for name in union.names]
    return {
        "answers": [None if one is None else one.answer for one in ordered],
        "facts": [{} if one is None else dict(one.facts) for one in ordered],
    }


def _scores(found: Mapping[DocumentName, AnsweredDocument], union: Union) -> np.ndarray:
    ordered = (found.get(name) for name in union.names)
    return np.array([np.nan if one is None or one.score is None else one.score for one in ordered], float)
