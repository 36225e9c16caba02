"""Results of a suite in lm-eval's format: the entries of its `evaluate`, and the lines of its sample files.

In: the score table, its results by rule, the questions and the manifest. Out: an `Evaluated`. `acc` and `acc_norm` are
computed as in lm-eval, from the same log-likelihoods; the other rules are added under their own names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import pandas as pd

from evalkit.benchmarks.lm_eval.log_format import Evaluated
from evalkit.runs.accuracies import Results, TaskResult, available_rules
from evalkit.runs.rules import decide, find_rule
from evalkit.stats.estimates import pooled_error

if TYPE_CHECKING:
    from evalkit.benchmarks.multiple_choice.tasks import LeafTask, Question


def evaluated(
    scores: pd.DataFrame,
    found: Mapping[str, Results],
    questions: Mapping[str, Sequence[Question]],
    manifest: Mapping[str, Any],
    seconds: float,
    samples: bool,
) -> Evaluated:
    """Convert a suite's results to lm-eval's format.

    Args:
        scores: the score table.
        found: rule → its results.
        questions: task → its questions, in the table's order.
        manifest: the run's manifest.
        seconds: total time of all tasks.
        samples: whether to include every document with its choices and scores.
    """
    leaves = {question.subtask: question.leaf for members in questions.values() for question in members}
    loaded = manifest.get("loaded", {})
    return Evaluated(
        entries=_entries(found, leaves, manifest["specification"].get("num_fewshot", 0)),
        settings={"limit": manifest["specification"]["limit"], "device": loaded.get("device")},
        seconds=seconds,
        samples=_by_subtask(scores, questions) if samples else {},
        documents={question.subtask: task for task, members in questions.items() for question in members},
        about={"rule": manifest["rule"], "template": manifest["template"]["name"]},
    )


def _entries(found: Mapping[str, Results], leaves: Mapping[str, LeafTask], shots: int) -> dict[str, Any]:
    rules = list(found)
    results: dict[str, dict[str, Any]] = {}
    groups: dict[str, dict[str, Any]] = {}
    subtasks: dict[str, list[str]] = {}
    for place, task in enumerate(found[rules[0]].tasks):
        parts = {rule: found[rule].subtasks.get(task.task, ()) for rule in rules}
        results[task.task] = _metrics(task.task, {rule: found[rule].tasks[place] for rule in rules})
        for index, part in enumerate(parts[rules[0]]):
            results[part.task] = _metrics(part.task, {rule: parts[rule][index] for rule in rules})
        if members := [part.task for part in parts[rules[0]]]:
            subtasks[task.task] = members
            groups[task.task] = results[task.task] = _pooled(results, task.task, members, rules)
    for name, leaf in leaves.items():
        results[name]["alias"] = leaf.alias
    return {
        "results": results,
        **({"groups": groups} if groups else {}),
        "group_subtasks": subtasks,
        "configs": {name: {"task": name, "output_type": "multiple_choice", "num_fewshot": shots} for name in leaves},
        "versions": {name: leaf.version for name, leaf in leaves.items()},
        "n-shot": dict.fromkeys(results, shots),
        "higher_is_better": {name: {_metric(rule): True for rule in rules} for name in results},
        "n-samples": {
            name: {"original": leaf.documents, "effective": results[name]["sample_len"]}
            for name, leaf in leaves.items()
        },
    }


def _metric(rule: str) -> str:
    """Return a rule's metric name in lm-eval, with a prefix that shows accuracies of perplexity rules as accuracies."""
    return {"pmi": "acc_mutual_info"}.get(rule, rule if rule.startswith("acc") else f"acc_{rule}")


def _metrics(name: str, by_rule: Mapping[str, TaskResult]) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "alias": name, "sample_len": next(iter(by_rule.values())).n}
    for rule, result in by_rule.items():
        found[f"{_metric(rule)},none"] = result.accuracy
        found[f"{_metric(rule)}_stderr,none"] = result.stderr
    return found


def _pooled(results: Mapping[str, Any], group: str, members: Sequence[str], rules: Sequence[str]) -> dict[str, Any]:
    """Return the group's metrics with lm-eval's pooled standard error."""
    sizes = [results[name]["sample_len"] for name in members]
    keys = [f"{_metric(rule)}_stderr,none" for rule in rules]
    own: dict[str, Any] = results[group]
    return own | {key: pooled_error([results[name][key] for name in members], sizes) for key in keys}


def _by_subtask(
    scores: pd.DataFrame, questions: Mapping[str, Sequence[Question]]
) -> dict[str, Iterator[dict[str, Any]]]:
    by_subtask: dict[str, list[Question]] = {}
    for question in chain.from_iterable(questions.values()):
        by_subtask.setdefault(question.subtask, []).append(question)
    tables = dict(iter(scores.groupby("subtask", sort=False)))
    return {subtask: _samples(tables[subtask], members) for subtask, members in by_subtask.items()}


def _samples(table: pd.DataFrame, questions: Sequence[Question]) -> Iterator[dict[str, Any]]:
    rules = available_rules(table)
    correct = {rule: decide(table, find_rule(rule))["correct"].to_list() for rule in rules}
    by_doc = dict(iter(table.groupby("doc_id", sort=False)))
    for place, question in enumerate(questions):
        # lm-eval's target: the gold index, or the continuation if the options are in the contexts
        target = question.continuations[0] if len(set(question.contexts)) > 1 else str(question.gold)
        likelihoods = by_doc[question.doc_id]["ll_continuation"].to_list()
        arguments = {
            f"gen_args_{i}": {"arg_0": context, "arg_1": question.delimiter + continuation}
            for i, (context, continuation) in enumerate(zip(question.contexts, question.continuations, strict=True))
        }
        yield {
            "doc_id": question.doc_id,
            "doc": question.doc,
            "target": target,
            "arguments": arguments,
            # lm-eval writes (log-likelihood, greedy?) pairs as text; evalkit does not compute greediness
            "resps": [[[str(value), "None"]] for value in likelihoods],
            "filtered_resps": [[str(value), "None"] for value in likelihoods],
            "filter": "none",
            "metrics": [_metric(rule) for rule in rules],
            "doc_hash": _hash(json.dumps(question.doc, indent=2, ensure_ascii=False, default=str)),
            "prompt_hash": _hash(question.contexts[0]),
            "target_hash": _hash(target),
            **{_metric(rule): float(correct[rule][place]) for rule in rules},
        }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
