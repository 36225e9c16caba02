"""Results of a suite in lm-eval's format: the entries of its `evaluate`, and the lines of its sample files.

In: the score table, its results by rule, the questions and the manifest. Out: an `Evaluated`. `acc` and `acc_norm` are
computed as in lm-eval, from the same log-likelihoods; the other rules are added under their own names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import pandas as pd

from evalkit.benchmarks.lm_eval_files import Evaluated
from evalkit.data.requests import is_macro
from evalkit.inputs.values import text_digest
from evalkit.runs.accuracies import Results, available_rules
from evalkit.runs.rules import decide, find_rule, lm_eval_metric
from evalkit.stats.estimates import error_of_average, error_of_share, pooled_error
from evalkit.suites.questions import by_subtask

if TYPE_CHECKING:
    from evalkit.suites.questions import LeafTask, Question


def evaluated(
    scores: pd.DataFrame,
    by_rule: Mapping[str, Results],
    questions: Mapping[str, Sequence[Question]],
    manifest: Mapping[str, Any],
    seconds: float,
    samples: bool,
) -> Evaluated:
    """Convert a suite's results, rule → `Results`, to lm-eval's format.

    `questions` are in the order of the score table; with `samples`, every document has its choices and scores.
    """
    subtasks = by_subtask(chain.from_iterable(questions.values()))
    leaves = {subtask: members[0].leaf for subtask, members in subtasks.items()}
    tables = scores.groupby("subtask", sort=False) if samples else ()
    specification = manifest["specification"]
    return Evaluated(
        entries=_entries(
            by_rule, leaves, specification.get("num_fewshot") or 0, {name: len(m) for name, m in subtasks.items()}
        ),
        settings={"limit": specification["limit"], "device": manifest.get("loaded", {}).get("device")},
        seconds=seconds,
        samples={str(subtask): _samples(table, subtasks[str(subtask)]) for subtask, table in tables},
        documents={subtask: members[0].task for subtask, members in subtasks.items()},
        about={"rule": manifest["rule"], "template": manifest["template"]["name"]},
    )


def _entries(
    by_rule: Mapping[str, Results], leaves: Mapping[str, LeafTask], shots: int, sizes: Mapping[str, int]
) -> dict[str, Any]:
    results: dict[str, dict[str, Any]] = {}
    subtasks: dict[str, list[str]] = {}
    for rule, of_rule in by_rule.items():
        for task in of_rule.tasks:
            parts = of_rule.subtasks.get(task.task, ())
            if parts:
                subtasks[task.task] = [part.task for part in parts]
            for result in (task, *parts):
                name = result.task
                alias = leaves[name].alias if name in leaves else name
                entry = results.setdefault(name, {"name": name, "alias": alias, "sample_len": result.n})
                # lm-eval's standard error, of documents that share no source
                error = error_of_share(result.value, result.n)
                entry |= {f"{lm_eval_metric(rule)},none": result.value, f"{lm_eval_metric(rule)}_stderr,none": error}
    for name, leaf in leaves.items():  # documents with one gold answer have no accuracy
        results.setdefault(name, {"name": name, "alias": leaf.alias, "sample_len": sizes.get(name, leaf.documents)})
    for group, parts_of_group in subtasks.items():
        of_parts = [results[part] for part in parts_of_group]
        for key in (f"{lm_eval_metric(rule)}_stderr,none" for rule in by_rule):
            errors = [part[key] for part in of_parts]
            counts = [part["sample_len"] for part in of_parts]
            # lm-eval's, whose members are weighted by their sizes; in a macro average each counts the same
            results[group][key] = error_of_average(errors) if is_macro(group) else pooled_error(errors, counts)
    return {
        "results": results,
        **({"groups": {group: results[group] for group in subtasks}} if subtasks else {}),
        "group_subtasks": subtasks,
        "configs": {name: {"task": name, "output_type": "multiple_choice", "num_fewshot": shots} for name in leaves},
        "versions": {name: leaf.version for name, leaf in leaves.items()},
        "n-shot": dict.fromkeys(results, shots),
        "higher_is_better": {name: {lm_eval_metric(rule): True for rule in by_rule} for name in results},
        "n-samples": {
            name: {"original": leaf.documents, "effective": results[name]["sample_len"]}
            for name, leaf in leaves.items()
        },
    }


def _samples(table: pd.DataFrame, questions: Sequence[Question]) -> Iterator[dict[str, Any]]:
    correct = {}
    for rule in available_rules(table):
        correct[lm_eval_metric(rule)] = decide(table, find_rule(rule))["correct"].to_list()
    by_doc = dict(iter(table.groupby("doc_id", sort=False)))
    for row, question in enumerate(questions):
        # lm-eval's target: the gold index, or the continuation if the options are in the contexts
        target = question.continuations[0] if len(set(question.contexts)) > 1 else str(question.gold)
        # lm-eval writes (log-likelihood, greedy?) pairs as text; evalkit does not compute greediness
        answers = [[str(value), "None"] for value in by_doc[question.doc_id]["ll_continuation"].to_list()]
        pairs = enumerate(zip(question.contexts, question.continuations, strict=True))
        yield {
            "doc_id": question.doc_id,
            "doc": question.doc,
            "target": target,
            "arguments": {
                f"gen_args_{number}": {"arg_0": context, "arg_1": question.delimiter + continuation}
                for number, (context, continuation) in pairs
            },
            "resps": [[answer] for answer in answers],
            "filtered_resps": answers,
            "filter": "none",
            "metrics": list(correct),
            "doc_hash": text_digest(json.dumps(question.doc, indent=2, ensure_ascii=False, default=str)),
            "prompt_hash": text_digest(question.contexts[0]),
            "target_hash": text_digest(target),
            **{metric: float(values[row]) for metric, values in correct.items()},
        }
