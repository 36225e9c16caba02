"""Finished run folders made of right and wrong answers, without a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from evalkit.comparison.comparison import compare
from evalkit.comparison.differences import Comparison
from evalkit.comparison.pairing import pair
from evalkit.comparison.sides import Side
from evalkit.runs.folder import LM_EVAL, SCORES, Run, load_run
from evalkit.runs.score_table import CLUSTER, ScoreRow
from tests import sealed
from tests.sealed import write_run

CHOICES = 4
Runs = Run | Path | Sequence[Run | Path]


def side(name: str, runs: Runs) -> Side:
    listed = [runs] if isinstance(runs, (Run, Path)) else runs
    return Side(name, tuple(run if isinstance(run, Run) else load_run(run) for run in listed))


def compared(a: Runs, b: Runs, rule: str | None = None) -> Comparison:
    """Compare two runs, or groups of runs, called a and b."""
    return compare(pair(side("a", a), side("b", b), {}), rule)


def scores_of(
    task: str,
    right: Sequence[int],
    *,
    clusters: Sequence[int] | None = None,
    subtasks: Sequence[str] | None = None,
    norm_right: Sequence[int] | None = None,
) -> pd.DataFrame:
    """A score table of one task whose rule `acc` gets the documents right that `right` says, and `acc_norm` those of
    `norm_right` (the same ones if that is not given). Gold is choice 0."""
    n = len(right)
    names = np.array(subtasks if subtasks is not None else [task] * n, dtype=object)
    doc_ids = pd.Series(range(n)).groupby(names).cumcount().to_numpy()
    per_row = {"task": task, "subtask": np.repeat(names, CHOICES), "doc_id": np.repeat(doc_ids, CHOICES)}
    table = pd.DataFrame(per_row | dict.fromkeys(set(ScoreRow._fields) - per_row.keys(), 0))
    table["choice"] = np.tile(np.arange(CHOICES), n)
    table["choices"], table["gold"] = CHOICES, 0
    for segment in ("special", "instruction", "context", "end", "unconditional"):
        table[f"ll_{segment}"] = np.nan
    first, second = (table["choice"] == place for place in (0, 1))
    # Right: the gold option has the highest log-likelihood. Wrong: the second one does, in total or per character
    good = np.repeat(np.asarray(right, bool), CHOICES)
    long_good = np.repeat(np.asarray(right if norm_right is None else norm_right, bool), CHOICES)
    table["ll_continuation"] = np.where(first == good, -2.0, -4.0) * np.where(first | second, 1.0, 10.0)
    table["n_continuation"] = 1
    best, other = np.where(good == long_good, 10, 100), 10
    table["chars"] = np.where(table["ll_continuation"] == -2.0, other, best)
    table["bytes"] = table["chars"]
    table[CLUSTER] = np.repeat(doc_ids if clusters is None else np.asarray(clusters), CHOICES)
    table = table[[*ScoreRow._fields, CLUSTER]]
    return table.astype({column: "float64" for column in table if column.startswith("ll_")})


def make_run(
    root: Path,
    tables: Mapping[str, pd.DataFrame],
    *,
    model: str = "org/model",
    groups: Mapping[str, Sequence[str]] | None = None,
    manifest: Mapping[str, Any] | None = None,
    **specification: Any,
) -> Path:
    """Write a finished run.

    Args:
        root: folder of runs.
        tables: score tables by task.
        model: its name; also stands for its weights.
        groups: averages; one over all tasks if not given.
        manifest: other entries of it.
        specification: other entries of the specification.
    """
    own = {
        "suite": "zeroshot8",
        "documents": {task: f"hash of {task}" for task in tables},
        "template": "hash of plain",
        "unconditional": False,
        "num_fewshot": 0,
    }
    about = sealed.specification(model, **own) | specification
    named = dict(groups or {"Average": list(tables)})
    content = {
        "specification": about,
        "rule": "acc",
        "groups": named,
        "group_sizes": {name: len(members) for name, members in named.items()},
        "documents": {task: {"official": True, "source": "made up", "count": 0} for task in tables},
        "template": {"name": "plain"},
        "model": model,
    } | dict(manifest or {})
    scored = {"n": 1, "accuracy": 0.0, "stderr": None, "chance": 0.25, "seconds": 0.0}
    measured = {"n": 1, "num_fewshot": None, "metrics": [], "seconds": 0.0, "compared": None}
    of_lm_eval = about["suite"] == LM_EVAL
    tasks = [{"task": task} | (measured if of_lm_eval else scored) for task in tables]
    results = {"tasks": tasks, "averages": [], "groups": [], "rules": {}, "samples": False}
    return write_run(root, content, results, {SCORES: pd.concat(tables.values())} if tables else {})


def make_longbench(
    root: Path,
    scores: Mapping[str, Sequence[float]],
    *,
    model: str = "org/long",
    sources: Mapping[str, Sequence[str]] | None = None,
    suite: str = "longbench",
    **specification: Any,
) -> Path:
    """Write a finished run of LongBench, as `evalkit.benchmarks.longbench.benchmark` does.

    Args:
        root: folder of runs.
        scores: by task, of each document, from 0 to 1.
        model: its name; also stands for its weights.
        sources: by task, which documents are of one context; each its own if a task is not given.
        suite: longbench or longbench-e.
        specification: other entries of the specification.
    """
    own = {
        "suite": suite,
        "documents": {task: f"hash of {task}" for task in scores},
        "max_prompt_tokens": 7500,
        "chat": False,
        "device": "cpu",
    }
    about = sealed.specification(model, **own) | specification
    content = {
        "specification": about,
        "rule": "longbench",
        "groups": {},
        "group_sizes": {},
        "template": "chat" if about["chat"] else "plain",
        "context": 8192,
        "documents": {task: {"official": True, "source": "made up", "count": len(n)} for task, n in scores.items()},
        "model": model,
    }
    parts = [
        pd.DataFrame(
            {
                "task": task,
                "id": [f"{task}-{place}" for place in range(len(values))],
                "score": np.asarray(values, float),
                "answers": [json.dumps([f"answer {place}"]) for place in range(len(values))],
                "source": (sources or {}).get(task) or [str(place) for place in range(len(values))],
            }
        )
        for task, values in scores.items()
    ]
    tasks = [
        {"task": task, "all": {"n": len(values), "score": round(100 * float(np.mean(values)), 2)}}
        for task, values in scores.items()
    ]
    table = pd.concat(parts, ignore_index=True)
    return write_run(root, content, {"tasks": tasks, "averages": []}, {"generations.parquet": table})
