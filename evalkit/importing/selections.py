"""Which documents of each task a log has, as the specification of a run says it.

In: the places of the logged documents in their tasks. Out: the entries that evalkit's own run of them has: all, the
first ones, a random sample; else a hash of the selection.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evalkit.data.sampling import ALL_DOCUMENTS, DocumentSample, DocumentSelection, FirstDocuments
from evalkit.importing.log_files import LoggedTask
from evalkit.importing.manifests import shared_result

PARTLY_UNKNOWN = {"complete": "unknown"}
"""Further entry if the log does not say how many documents its tasks have."""


@dataclass(frozen=True)
class LoggedPlaces:
    """The documents of a task that are in a log."""

    task: str
    """Name that a random sample of the task depends on."""
    places: Sequence[int]
    """Their places in the task, sorted."""
    strata: Sequence[str]
    """[documents of the task] stratum of each."""


def selection_specification(tasks: Sequence[LoggedPlaces], sample: DocumentSample | None) -> dict[str, Any]:
    """Return the specification's entries.

    Args:
        tasks: the tasks of a run.
        sample: the random sample that the log claims to be; it is verified.
    """
    limit = FirstDocuments(max(len(one.places) for one in tasks))
    candidates: list[DocumentSelection] = [*([sample] if sample else []), ALL_DOCUMENTS, limit]
    for selection in candidates:
        if all(_is_selected(one, selection) for one in tasks):
            return selection.specification
    return selection_hash([(one.task, list(one.places)) for one in tasks])


def selection_hash(documents: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the entries of any other documents, (task, what identifies its documents)."""
    return {"limit": None, "selection": hashlib.sha256(repr(documents).encode()).hexdigest()}


def logged_sample(logs: Sequence[LoggedTask]) -> DocumentSample | None:
    """Return the random sample that evalkit's results files name; None if they name none.

    Raises:
        UsageError: two files have different ones.
    """
    found = shared_result(logs, "random sample", lambda one: None if one.evalkit is None else one.evalkit.selection)
    return found if isinstance(found, DocumentSample) else None


def _is_selected(one: LoggedPlaces, selection: DocumentSelection) -> bool:
    size = len(one.strata) if selection.count is None else min(selection.count, len(one.strata))
    if len(one.places) != size:
        return False
    return size == len(one.strata) or list(one.places) == selection.places(one.task, one.strata)
