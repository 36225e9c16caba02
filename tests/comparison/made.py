"""Finished run folders made of right and wrong answers, without a model, and their comparison by `evalkit.compare`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import evalkit
from evalkit import Comparison
from evalkit.runs.accuracies import summarise_all
from evalkit.runs.folder import LM_EVAL, RESULTS, SCORES, Run, load_run
from evalkit.runs.score_table import CLUSTER, COLUMNS, ScoreRow
from tests import sealed

CHOICES = 4
N = {"arc_easy": 60, "boolq": 40, "mmlu": 57}
PASSAGES = [number - number % 2 for number in range(N["boolq"])]
SUBJECTS = [f"mmlu_{number % 19}" for number in range(N["mmlu"])]
Runs = Run | Path | Sequence[Run | Path]


def compared(a: Runs, b: Runs, rule: str | None = None, outcome: str | None = None, **options: Any) -> Comparison:
    """Compare two runs, or groups of runs, called a and b; further options of `evalkit.compare`."""
    sides = {name: [runs] if isinstance(runs, (Run, Path)) else runs for name, runs in (("a", a), ("b", b))}
    comparison = evalkit.compare(groups=sides, rule=rule, outcome=outcome, **options)
    assert isinstance(comparison, Comparison)
    return comparison


def answers(seed: int, share: float, n: int) -> list[int]:
    """Random right answers (1); a higher share includes those of a lower one with the same seed."""
    return (np.random.default_rng(seed).random(n) < share).astype(int).tolist()


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
    first, second = (table["choice"] == choice for choice in (0, 1))
    # Right: the gold option has the highest log-likelihood. Wrong: the second one does, in total or per character
    good = np.repeat(np.asarray(right, bool), CHOICES)
    long_good = np.repeat(np.asarray(right if norm_right is None else norm_right, bool), CHOICES)
    table["ll_continuation"] = np.where(first == good, -2.0, -4.0) * np.where(first | second, 1.0, 10.0)
    table["n_continuation"] = 1
    best, other = np.where(good == long_good, 10, 100), 10
    table["chars"] = np.where(table["ll_continuation"] == -2.0, other, best)
    table["bytes"] = table["chars"]
    table[CLUSTER] = np.repeat(doc_ids if clusters is None else np.asarray(clusters), CHOICES)
    table = table[list(COLUMNS)]
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
    """Write a finished run of score tables by task, without results of its own.

    The model's name also stands for its weights; `groups` are averages (one over all tasks if not given), `manifest`
    and `specification` further entries of both.
    """
    common = {
        "suite": "zeroshot8",
        "documents": {task: f"hash of {task}" for task in tables},
        "template": "hash of plain",
        "unconditional": False,
        "num_fewshot": 0,
    }
    about = sealed.specification(model, **common) | specification
    named = dict(groups or {"Average": list(tables)})
    content = {
        "specification": about,
        "rule": "acc",
        "groups": named,
        "group_sizes": {name: len(members) for name, members in named.items()},
        "documents": {task: {"official": True, "source": "made up", "count": 0, "total": 0} for task in tables},
        "template": {"name": "plain"},
        "model": model,
    } | dict(manifest or {})
    scored = {"n": 1, "metric": "accuracy", "unit": "fraction", "higher_is_better": True, "value": 0.0}
    scored |= {"stderr": None, "chance": 0.25, "seconds": 0.0}
    measured = {"n": 1, "num_fewshot": None, "metrics": [], "seconds": 0.0, "compared": None}
    tasks = [{"task": task} | (measured if about["suite"] == LM_EVAL else scored) for task in tables]
    results = {"tasks": tasks, "averages": [], "groups": [], "rules": {}, "samples": False}
    return sealed.write_run(root, content, results, {SCORES: pd.concat(tables.values())} if tables else {})


def three_tasks(
    root: Path, model: str, share: float = 0.5, seed: int = 1, first: int | None = None, **more: Any
) -> Path:
    """Write a run of a plain task, one with shared passages, and one with subjects.

    `share` is about the share of right answers, `seed` theirs; `first` the number of documents of each task that are
    kept; `more` further arguments of `make_run`.
    """
    right = {task: answers(seed + number, share, n)[:first] for number, (task, n) in enumerate(N.items())}
    tables = {
        "arc_easy": scores_of("arc_easy", right["arc_easy"], norm_right=answers(seed + 3, share, 60)[:first]),
        "boolq": scores_of("boolq", right["boolq"], clusters=PASSAGES[:first]),
        "mmlu": scores_of("mmlu", right["mmlu"], subtasks=SUBJECTS[:first]),
    }
    groups = {"Reasoning": ["arc_easy"], "Knowledge": ["boolq", "mmlu"]}
    return make_run(root, tables, model=model, **({"groups": groups} | more))


def finished_run(root: Path, model: str, share: float = 0.5, seed: int = 1, **more: Any) -> Run:
    """The run of `three_tasks` with the results of its score tables, and 1.5 seconds for each task."""
    folder = three_tasks(root, model, share, seed, **more)
    run = load_run(folder)
    by_rule = {rule: results.to_json() for rule, results in summarise_all(run.scores, run.manifest).items()}
    results = by_rule[run.manifest["rule"]] | {"rules": by_rule, "samples": False}
    for task in results["tasks"]:
        task["seconds"] = 1.5
    sealed.write(folder, RESULTS, sealed.read(folder, RESULTS) | results)
    sealed.reseal(folder)
    return load_run(folder)


def make_longbench(
    root: Path,
    scores: Mapping[str, Sequence[float]],
    *,
    model: str = "org/long",
    sources: Mapping[str, Sequence[str]] | None = None,
    suite: str = "longbench",
    **specification: Any,
) -> Path:
    """Write a finished run of LongBench of scores, from 0 to 1, by task.

    `sources` say by task which documents are of one context; each has its own if a task is not given.
    """
    common = {
        "suite": suite,
        "documents": {task: f"hash of {task}" for task in scores},
        "max_prompt_tokens": 7500,
        "chat": False,
        "device": "cpu",
    }
    about = sealed.specification(model, **common) | specification
    content = {
        "specification": about,
        "rule": "longbench",
        "groups": {},
        "group_sizes": {},
        "template": "chat" if about["chat"] else "plain",
        "context": 8192,
        "documents": {
            task: {"official": True, "source": "made up", "count": len(n), "total": len(n)}
            for task, n in scores.items()
        },
        "model": model,
    }
    parts = [
        pd.DataFrame(
            {
                "task": task,
                "id": [f"{task}-{number}" for number in range(len(values))],
                "score": np.asarray(values, float),
                "answers": [json.dumps([f"answer {number}"]) for number in range(len(values))],
                "source": (sources or {}).get(task) or [str(number) for number in range(len(values))],
            }
        )
        for task, values in scores.items()
    ]
    tasks = [
        {"task": task, "metric": "f1", "truncated": 0, "official": True}
        | {"all": {"n": len(values), "value": round(100 * float(np.mean(values)), 2), "stderr": 1.5}}
        for task, values in scores.items()
    ]
    table = pd.concat(parts, ignore_index=True)
    return sealed.write_run(root, content, {"tasks": tasks, "averages": []}, {"generations.parquet": table})
