"""The run in lm-eval's form: `results_<time>.json` and, on request, `samples_<task>_<time>.jsonl`.

Same keys as lm-eval 0.4.13 writes, so that tools made for its output read ours. `acc` and `acc_norm` are computed as
lm-eval does from the same log-likelihoods; the other rules stand beside them under their own names. Documents that are
not the official ones are said in a task's alias, which is the name that lm-eval's tables print.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pandas as pd

from evalkit.runs.traits import caveats, unofficial
from evalkit.scores.results import Results, TaskResult, available_rules
from evalkit.scores.rules import RULES, decide

if TYPE_CHECKING:
    from evalkit.benchmarks.multiple_choice.tasks import LeafTask, Question
    from evalkit.runs.writing import RunWriter


def write_lm_eval(
    writer: RunWriter,
    scores: pd.DataFrame,
    found: Mapping[str, Results],
    questions: Mapping[str, Sequence[Question]],
    seconds: Mapping[str, float],
    samples: bool,
) -> None:
    """Write the export into the run folder's `lm_eval/`, named after the time the run was created.

    Args:
        writer: the run folder.
        scores: the score table.
        found: its results by rule.
        questions: by task, in the table's order.
        seconds: wall time by task.
        samples: also write every document with its choices and scores.

    Raises:
        RunError: a file could not be written.
    """
    created = datetime.fromisoformat(writer.manifest["created"])
    stamp = created.strftime("%Y-%m-%dT%H-%M-%S.%f")
    leaves = {question.subtask: question.leaf for members in questions.values() for question in members}
    content = lm_eval_results(found, writer.manifest, leaves, seconds)
    writer.save_json(f"lm_eval/results_{stamp}.json", content)
    if samples:
        for task, members in questions.items():
            table = scores[scores["task"] == task]
            for subtask in dict.fromkeys(question.subtask for question in members):
                lines = _samples(table[table["subtask"] == subtask], [q for q in members if q.subtask == subtask])
                text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
                writer.save_bytes(f"lm_eval/samples_{subtask}_{stamp}.jsonl", text.encode())


def lm_eval_results(
    found: Mapping[str, Results],
    manifest: Mapping[str, Any],
    leaves: Mapping[str, LeafTask],
    seconds: Mapping[str, float],
) -> dict[str, Any]:
    """lm-eval's results dictionary of a run; results by rule, `leaves` by subtask."""
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
    for task in found[rules[0]].tasks:
        for name in (task.task, *subtasks.get(task.task, ())):
            results[name]["alias"] = marked_alias(results[name]["alias"], manifest, [task.task])
    loaded = manifest.get("loaded", {})
    shots = manifest["specification"].get("num_fewshot", 0)
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
        "config": {
            "model": "evalkit",
            "model_args": {"pretrained": manifest["model"], "dtype": loaded.get("dtype")},
            "model_num_parameters": loaded.get("parameters"),
            "model_dtype": loaded.get("dtype"),
            "limit": manifest["specification"]["limit"],
            "device": loaded.get("device"),
        },
        "max_length": loaded.get("window"),
        "date": datetime.fromisoformat(manifest["created"]).timestamp(),
        "transformers_version": manifest["versions"]["transformers"],
        "lm_eval_version": manifest["versions"]["lm-eval"],
        "model_name": manifest["model"],
        "total_evaluation_time_seconds": f"{sum(seconds.values()):.3f}",
        "evalkit": about_run(manifest) | {"rule": manifest["rule"], "template": manifest["template"]["name"]},
    }


def marked_alias(alias: str, manifest: Mapping[str, Any], tasks: Sequence[str]) -> str:
    """The name under which lm-eval's tables print a task or a group, with what of its tasks is not as published."""
    said = dict.fromkeys(caveat for task in tasks for caveat in caveats(manifest, task))
    return f"{alias} ({'; '.join(said)})" if said else alias


def about_run(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What lm-eval's form has no place for, in an entry of its own."""
    return {
        "run": manifest["id"],
        "unofficial": unofficial(manifest),
        "context_extension": manifest["specification"]["context_extension"],
    }


def _metric(rule: str) -> str:
    """A rule's name among lm-eval's metrics; the perplexity rules' accuracy must not pass for a perplexity."""
    return {"pmi": "acc_mutual_info"}.get(rule, rule if rule.startswith("acc") else f"acc_{rule}")


def _metrics(name: str, by_rule: Mapping[str, TaskResult]) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "alias": name, "sample_len": next(iter(by_rule.values())).n}
    for rule, result in by_rule.items():
        found[f"{_metric(rule)},none"] = result.accuracy
        found[f"{_metric(rule)}_stderr,none"] = result.stderr
    return found


def _pooled(results: Mapping[str, Any], group: str, members: Sequence[str], rules: Sequence[str]) -> dict[str, Any]:
    """The group's own line with lm-eval's standard error: the pooled sample variance of its subtasks."""
    pooled = dict(results[group])
    for rule in rules:
        key = f"{_metric(rule)}_stderr,none"
        sizes = [results[name]["sample_len"] for name in members]
        errors = [results[name][key] for name in members]
        freedom = sum(sizes) - len(sizes)
        if None in errors or not freedom:
            pooled[key] = None
            continue
        spread = sum((n - 1) * n * error**2 for n, error in zip(sizes, errors, strict=True))
        pooled[key] = math.sqrt(spread / freedom / sum(sizes))
    return pooled


def _samples(table: pd.DataFrame, questions: Sequence[Question]) -> Iterator[dict[str, Any]]:
    rules = available_rules(table)
    correct = {rule: decide(table, RULES[rule])["correct"].to_list() for rule in rules}
    by_doc = dict(iter(table.groupby("doc_id", sort=False)))
    for place, question in enumerate(questions):
        target = _target(question)
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
            # lm-eval writes (log-likelihood, greedy?) pairs as text; greediness is not known here
            "resps": [[[str(value), "None"]] for value in likelihoods],
            "filtered_resps": [[str(value), "None"] for value in likelihoods],
            "filter": "none",
            "metrics": [_metric(rule) for rule in rules],
            "doc_hash": _hash(json.dumps(question.doc, indent=2, ensure_ascii=False, default=str)),
            "prompt_hash": _hash(question.contexts[0]),
            "target_hash": _hash(target),
            **{_metric(rule): float(correct[rule][place]) for rule in rules},
        }


def _target(question: Question) -> str:
    """lm-eval's target: the gold index, or, where the options stand in the contexts, what follows them."""
    shared = len(set(question.contexts)) > 1
    return question.continuations[0] if shared else str(question.gold)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
