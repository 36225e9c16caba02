"""Finished analyses of attention without a model: given or random measures, written as a run writes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from evalkit.attention import ATTENTION
from evalkit.attention.benchmark import Attention
from evalkit.attention.documents import AnalysedSequence
from evalkit.attention.groups import CATEGORIES, GROUPS, MASS, MEASURES, RANK, AttentionRow
from evalkit.attention.measures import rows_of
from evalkit.attention.results import ALL, results_of, write_tables
from evalkit.runs.folder import Run, load_run, specification_id
from evalkit.runs.journal import Entry
from evalkit.runs.traits import BatchDevice
from evalkit.runs.writing import open_run
from tests.sealed import specification

TASKS = {"piqa": ("piqa",), "mmlu": ("anatomy", "virology")}
"""Task → its subtasks."""
Analysed = tuple[AnalysedSequence, dict[int, dict[str, Any]]]
"""A sequence, and layer → measure → [heads] or [heads, bins]."""


def write_analysis(
    root: Path, model: str, tasks: Mapping[str, Sequence[str]], analysed: Mapping[str, Iterable[list[Analysed]]],
    depth: int, manifest: Mapping[str, Any], **settings: Any,
) -> Run:  # fmt: skip
    """Write a finished run from the batches of each task."""
    about = {
        "suite": ATTENTION, "documents": {task: f"hash of {task}" for task in tasks}, "template": "inst",
        "num_fewshot": 0, "layers": [], "sample": 200, "seed": 0, "continuation": "gold", "questions": "zeroshot8",
        "version": 1,
    }  # fmt: skip
    about = specification(model, **(about | settings))
    content = {
        "id": specification_id(about), "kind": ATTENTION, "specification": about, "rule": ATTENTION, "groups": {},
        "group_sizes": {}, "attention_layers": list(range(depth)),
        "documents": {task: {"source": "made up", "official": True, "count": 9, "total": 9} for task in tasks},
        "template": {"name": "inst"}, "model": model, "path": None, "revision": None,
        "created": "2026-01-01T00:00:00+00:00",
        "versions": {"evalkit": "0.1.0", "lm-eval": "0.4", "transformers": "5"},
    } | dict(manifest)  # fmt: skip
    with open_run(root, f"{model.rpartition('/')[2]}-{content['id']}", content) as writer:
        finished = writer.finished((AttentionRow,), Attention.computation.key)
        for task, batches in analysed.items():
            for number, batch in enumerate(batches):
                entry = Entry(task, number, 0.5, BatchDevice("cpu", "x86_64", "blocks", "here", 1))
                finished.append(entry, rows_of(batch), AttentionRow)
        writer.save_results(results_of(*write_tables(tasks, finished, writer), finished.seconds))
    return load_run(writer.folder)


def sequence(subtask: str, doc_id: int, tokens: Any, choice: int = 0) -> AnalysedSequence:
    """A sequence of a document that is a source of its own."""
    ids = np.asarray(tokens, np.int32)
    return AnalysedSequence(None, ids[-2:], len(ids) - 1, True, subtask, doc_id, choice, doc_id, 0, ids)


def made_run(
    root: Path,
    model: str = "models/vanilla",
    *,
    tasks: Mapping[str, Sequence[str]] = TASKS,
    documents: int = 3,
    choices: int = 1,
    layers: int = 3,
    heads: int = 2,
    tokens: tuple[int, int] = (5, 40),
    groups: Sequence[str] = GROUPS,
    ranked: int = 2,
    seed: int = 0,
    sampled: int = 0,
    tokenizer: int = 0,
    unsigned: bool = False,
    **settings: Any,
) -> Run:
    """Write a finished run of random measures, which depend on the model's name and on `seed`.

    It has `choices` continuations of `documents` documents in each subtask, with lengths between the bounds `tokens`,
    drawn with the seed `sampled` (sinks need 64); `tokenizer` stands for the tokens. The rank is of the last `ranked`
    layers; no weight is negative if `unsigned`; `settings` are other entries of the specification.
    """
    lengths, random = np.random.default_rng(sampled), np.random.default_rng([seed, *model.encode()])

    def batch(subtask: str, doc_id: int) -> list[Analysed]:
        analysed = []
        for choice in range(choices):
            length = int(lengths.integers(*tokens))
            by_layer = {n: _layer(random, heads, length, groups, n >= layers - ranked) for n in range(layers)}
            for measured in by_layer.values() if unsigned else ():
                measured |= {name: 0 * values for name, values in measured.items() if "negative" in name}
            analysed.append((sequence(subtask, doc_id, np.full(length, tokenizer), choice), by_layer))
        return analysed

    analysed = {task: [batch(name, n) for name in names for n in range(documents)] for task, names in tasks.items()}
    continuation = "gold" if choices == 1 else "all"
    settings = {"measures": list(groups), "sample": documents, "continuation": continuation} | settings
    return write_analysis(root, model, tasks, analysed, layers, {}, **settings)


def _layer(random: Any, heads: int, tokens: int, groups: Sequence[str], ranked: bool) -> dict[str, Any]:
    measured: dict[str, Any] = {}
    for name, info in MEASURES.items():
        if info.group in groups and (info.group != RANK or ranked) and (info.group != "sink" or tokens >= 64):
            least = 0.0 if info.scale.bounds else -0.3
            if info.of_tokens:
                measured[f"{name}_by_position"] = least + random.spawn(1)[0].random((heads, tokens - 1))
                continue
            measured[name] = least + random.random(heads)
            if info.by_position:
                measured[f"{name}_by_position"] = least + random.random((heads, (tokens - 1).bit_length()))
    if MASS in groups:
        shares = random.dirichlet([2, 1, 1, 2, 1, 0.5], heads)
        measured |= {f"mass_abs_{name}": shares[:, number] for number, name in enumerate(CATEGORIES)}
    return measured


def whole_table(run: Run) -> pd.DataFrame:
    """Return the run's own rows, one for each head, with words as text and values in double precision."""
    return _whole_table(run.folder).copy()


@lru_cache(maxsize=4)
def _whole_table(folder: Path) -> pd.DataFrame:
    return load_run(folder).table(ALL).astype({"task": str, "subtask": str, "measure": str, "value": "float64"})
