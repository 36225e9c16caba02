"""Finished analyses of attention without a model: random measures, journalled and tabulated as a run does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from evalkit.benchmarks.attention import ATTENTION
from evalkit.benchmarks.attention.groups import (
    CATEGORIES,
    FINISHED,
    GROUPS,
    MASS,
    MEASURES,
    RANK,
    AttentionRow,
)
from evalkit.benchmarks.attention.results import ALL, results_of, write_tables
from evalkit.runs.columns import schema_of
from evalkit.runs.folder import Run, load_run, specification_id
from evalkit.runs.journal import Entry
from evalkit.runs.traits import BatchDevice
from evalkit.runs.writing import open_run
from tests.sealed import specification

TASKS = {"piqa": ("piqa",), "mmlu": ("anatomy", "virology")}
"""Task → its subtasks."""


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
    **settings: Any,
) -> Run:
    """Write a finished run.

    Args:
        root: folder of runs.
        model: its name, on which the random values depend.
        tasks: see `TASKS`.
        documents: number in each subtask.
        choices: continuations of each document that are read.
        layers: number of layers.
        heads: number of heads.
        tokens: bounds of the sequences' lengths; below 64, there are no measures of sinks.
        groups: of measures.
        ranked: number of layers, from the last one, with ranks.
        seed: of the values.
        sampled: seed of the documents' lengths, the same for runs of the same documents.
        tokenizer: stands for the tokens of the documents.
        settings: other entries of the specification.
    """
    chosen = {
        "suite": ATTENTION, "measures": list(groups), "layers": [], "sample": documents, "seed": 0, "version": 1,
        "questions": "zeroshot8", "continuation": "gold" if choices == 1 else "all", "num_fewshot": 0,
        "documents": dict.fromkeys(tasks, "0123"), "template": "inst",
    }  # fmt: skip
    about = specification(model, **(chosen | settings))
    manifest = {
        "id": specification_id(about),
        "kind": ATTENTION,
        "specification": about,
        "rule": ATTENTION,
        "groups": {},
        "group_sizes": {},
        "attention_layers": list(range(layers)),
        "documents": {task: {"source": "made", "official": True, "count": 9} for task in tasks},
        "template": {"name": "inst"},
        "model": model,
        "path": None,
        "revision": None,
        "created": "2026-01-01T00:00:00+00:00",
        "versions": {},
    }
    lengths, values = np.random.default_rng(sampled), np.random.default_rng([seed, *model.encode()])
    name = f"{model.rpartition('/')[2]}-{manifest['id']}"
    with open_run(root, name, manifest) as writer:
        finished = writer.finished(AttentionRow, ("subtask", "doc_id"))
        for task, subtasks in tasks.items():
            for number, (subtask, doc_id) in enumerate(product(subtasks, range(documents))):
                sequences = [
                    _sequence(values, subtask, doc_id, choice, int(lengths.integers(*tokens)), tokenizer, layers,
                              heads, groups,
                              ranked)
                    for choice in range(choices)
                ]  # fmt: skip
                entry = Entry(task, number, 0.5, BatchDevice("cpu", "x86_64", "blocks", "here", 1))
                table = pd.concat(sequences)[list(AttentionRow._fields)]
                finished.append(entry, pa.Table.from_pandas(table, schema_of(AttentionRow), preserve_index=False))
        writer.save_results(results_of(*write_tables(tasks, finished, writer), finished.seconds))
    return load_run(root / name)


def whole_table(run: Run) -> pd.DataFrame:
    """Return the run's own rows, one for each head, with words as text and values in double precision."""
    return run.table(ALL).astype({"task": str, "subtask": str, "measure": str, "value": "float64"})


def _sequence(
    random: np.random.Generator, subtask: str, doc_id: int, choice: int, tokens: int, tokenizer: int,
    layers: int, heads: int,
    groups: Sequence[str], ranked: int,
) -> pd.DataFrame:  # fmt: skip
    """Return the rows of one sequence; a wave over layers makes lines of different runs distinguishable."""
    rows = [(subtask, doc_id, choice, doc_id, 7 * tokens + tokenizer, tokens, 0, 0, 0, FINISHED, None, 0.0)]
    phase, of_head = random.random(), random.random((layers, heads))
    for layer, head in product(range(layers), range(heads)):
        wave = 0.5 + 0.3 * np.sin(phase + layer / 3) + 0.2 * (of_head[layer, head] - 0.5)
        found = {
            (name, None): _value(random, name, wave, tokens) for name, info in MEASURES.items() if info.group in groups
        }
        if MASS in groups:
            parts = random.dirichlet([1 + wave, 1, 1, 2, 1, 0.5])
            found |= {(f"mass_abs_{name}", None): part for name, part in zip(CATEGORIES, parts, strict=True)}
        starts = 2 ** np.arange(int(np.log2(tokens - 1)) + 1)
        found |= {
            (name, int(start)): _value(random, name, wave / (1 + np.log2(start)), tokens)
            for (name, _), start in product(list(found), starts)
            if MEASURES[name].by_position
        }
        for (name, position), value in found.items():
            if MEASURES[name].group == RANK and layer < layers - ranked:
                continue
            if MEASURES[name].group == "sink" and tokens < 64:
                continue
            rows.append(
                (subtask, doc_id, choice, doc_id, 7 * tokens + tokenizer, tokens, 0, layer, head, name, position, value)
            )
    return pd.DataFrame(rows, columns=AttentionRow._fields).astype({"position": "Int64"})


def _value(random: np.random.Generator, name: str, wave: float, tokens: int) -> float:
    info = MEASURES[name]
    if name.endswith("_rate"):
        return float(random.random() < wave)
    if info.in_percent:
        return float(np.clip(wave + 0.1 * random.standard_normal(), 0, 1))
    if name in ("bos", "sink", "similarity") or info.group == MASS:
        return float(1.4 * wave - 0.4 + 0.1 * random.standard_normal())
    return float(np.log(tokens) * (wave + 0.1 * random.random()))
