"""Finished analyses of attention with given effective ranks, without a model or documents."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evalkit.benchmarks.attention import ATTENTION
from evalkit.benchmarks.attention.benchmark import Attention
from evalkit.benchmarks.attention.documents import AnalysedSequence
from evalkit.benchmarks.attention.groups import AttentionRow
from evalkit.benchmarks.attention.measures import rows_of
from evalkit.benchmarks.attention.results import results_of, write_tables
from evalkit.runs.folder import Run, load_run, specification_id
from evalkit.runs.journal import Entry
from evalkit.runs.traits import BatchDevice
from evalkit.runs.writing import open_run
from tests import sealed
from tests.tables.runs import loaded

TASKS = {"piqa": 3, "boolq": 2}
"""Task → documents of the runs made here, unless others are given."""
_PLACE = BatchDevice("cpu", "x86_64", "eager", "here", 1)


def made_ranks(
    root: Path,
    model: str,
    ranks: Mapping[int, NDArray[np.float64]],
    *,
    tasks: Mapping[str, int] | None = None,
    first: int = 0,
    name: str = "",
    manifest: Mapping[str, Any] | None = None,
    **specification: Any,
) -> Run:
    """Write a finished run of `evalkit attention` that measured the rank.

    Args:
        root: folder of runs.
        model: named model whose sizes and attention the manifest has.
        ranks: layer → [documents, heads] effective ranks, the documents of all tasks one after the other.
        tasks: task → number of its documents; None: `TASKS`.
        first: number of each task's first document.
        name: checkpoint, if it is not called like the model; also stands for its weights.
        manifest: other entries of the manifest.
        specification: other entries of the specification.
    """
    tasks = dict(tasks or TASKS)
    content = _manifest(name or model, model, tasks, specification) | dict(manifest or {})
    with open_run(root, f"{name or model}-{content['id']}", content) as writer:
        finished = writer.finished(AttentionRow, Attention.key)
        start = 0
        for task, count in tasks.items():
            members = [(_sequence(task, first + n), _layers(ranks, start + n)) for n in range(count)]
            finished.append(Entry(task, 0, 1.0, _PLACE), rows_of(members))
            start += count
        writer.save_results(
            results_of(*write_tables({task: [task] for task in tasks}, finished, writer), finished.seconds)
        )
    return load_run(writer.folder)


def _layers(ranks: Mapping[int, NDArray[np.float64]], document: int) -> dict[int, dict[str, Any]]:
    return {layer: {"rank": values[document]} for layer, values in ranks.items()}


def _sequence(task: str, number: int) -> AnalysedSequence:
    tokens = np.arange(10 + number, dtype=np.int32)
    return AnalysedSequence(None, tokens[-2:], len(tokens) - 1, True, task, number, 0, number, 0, tokens)


def _manifest(name: str, model: str, tasks: Mapping[str, int], changes: Mapping[str, Any]) -> dict[str, Any]:
    own = {
        "suite": ATTENTION,
        "documents": {task: f"hash of {task}" for task in tasks},
        "template": "hash of inst",
        "num_fewshot": 0,
        "measures": ["rank"],
        "layers": [],
        "sample": 200,
        "seed": 0,
        "continuation": "gold",
        "questions": "zeroshot8",
        "version": 1,
    }
    specification = sealed.specification(name, **own) | dict(changes)
    return {
        "id": specification_id(specification),
        "kind": ATTENTION,
        "specification": specification,
        "rule": ATTENTION,
        "groups": {},
        "group_sizes": {},
        "attention_layers": list(range(loaded(model)["shape"]["num_hidden_layers"])),
        "documents": {task: {"source": "made up", "official": True, "count": n} for task, n in tasks.items()},
        "template": {"name": "inst"},
        "model": name,
        "revision": None,
        "created": "2026-01-01T00:00:00+00:00",
        "versions": {"evalkit": "0.1.0", "lm-eval": "0.4", "transformers": "5"},
        "loaded": loaded(model) | {"attention": "eager"},
    }
