"""Result files of lm-eval's tasks, and the report of a finished run.

In: lm-eval's results and the answers. Out: results.json, lm-eval's own files, and the score table. The score table
contains the multiple-choice tasks with one gold answer, so that evalkit's rules and statistics apply to them as to a
suite's. The metrics of other tasks are in results.json only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.lm_eval.log_format import Evaluated, write_lm_eval
from evalkit.benchmarks.lm_eval.outcomes import compared_metric, document_scores, write_document_scores
from evalkit.benchmarks.outcomes import LOWER_IS_BETTER, LOWER_NOTE, run_content
from evalkit.compatibility.lm_eval import as_texts, hash_of, json_value
from evalkit.data.sampling import SHARED, clusters_of
from evalkit.models.context import Extension
from evalkit.reporting.decimals import fixed
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.runs.batch_devices import mixture
from evalkit.runs.folder import LM_EVAL, SCORES
from evalkit.runs.traits import origin_notes
from evalkit.runs.writing import RunWriter

if TYPE_CHECKING:
    from evalkit.benchmarks.lm_eval.answers import StoredAnswers
    from evalkit.benchmarks.lm_eval.catalogue import TaskSet
    from evalkit.runs.folder import Run
    from evalkit.runs.score_table import ScoreRow


def write_results(
    writer: RunWriter, tasks: TaskSet, answers: StoredAnswers, results: Mapping[str, Any], samples: bool
) -> None:
    """Write every result file of a run, results.json last.

    Args:
        writer: the run folder.
        tasks: the evaluated tasks, with their requests.
        answers: the model's answers.
        results: the return value of lm-eval's `evaluate`, with samples.
        samples: also write lm-eval's per-document files.

    Raises:
        RunError: a file could not be written.
    """
    write_scores(writer, list(score_rows(tasks.tasks, answers)), _clusters(tasks.tasks))
    hashes = _task_hashes(results["samples"])
    content = _content(results, tasks, answers.seconds) | {"samples": samples, "task_hashes": hashes}
    by_task = {name: list(document_scores(name, members)) for name, members in results["samples"].items()}
    write_document_scores(writer, [score for members in by_task.values() for score in members])
    for entry in content["tasks"]:
        better = results["higher_is_better"].get(entry["task"], {})
        entry["compared"] = compared_metric(by_task.get(entry["task"], []), better)
    seconds = sum(answers.seconds.values())
    lines = {name: map(_sample, members) for name, members in results["samples"].items()} if samples else {}
    entries = {key: value for key, value in results.items() if key != "samples"}
    write_lm_eval(writer, Evaluated(entries, _settings(writer.manifest), seconds, lines, hashes=hashes))
    writer.save_results(json.loads(json.dumps(content, default=json_value)))


def score_rows(tasks: Mapping[str, Any], answers: StoredAnswers) -> Iterator[ScoreRow]:
    """Yield the score rows of all multiple-choice tasks whose documents have one gold answer each."""
    by_task = {name: rows for name, task in tasks.items() if (rows := _task_rows(name, task, answers))}
    # pmi needs an unconditional pass for every row; lm-eval makes it only for tasks that measure mutual information
    everywhere = all(row.ll_unconditional is not None for rows in by_task.values() for row in rows)
    for rows in by_task.values():
        for row in rows:
            yield row if everywhere else row._replace(ll_unconditional=None)


def _task_rows(name: str, task: Any, answers: StoredAnswers) -> list[ScoreRow]:
    """Return no rows if a gold answer is not a single index, or the task has its own process_results function."""
    custom = getattr(task.config, "process_results", None)
    if task.OUTPUT_TYPE != "multiple_choice" or callable(custom) or getattr(task, "multiple_target", 0):
        return []
    by_document: dict[int, list[Any]] = {}
    for request in task.instances:
        by_document.setdefault(request.doc_id, []).append(request)
    rows: list[ScoreRow] = []
    for doc_id, requests in by_document.items():
        requests.sort(key=lambda request: request.idx)
        doc = requests[0].doc
        choices = task.doc_to_choice(doc)
        gold = _gold(task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc), choices)
        if task.multiple_input:
            # The options are in the contexts and one continuation repeats, whose length counts, as in a suite
            choices = [r.args[1].removeprefix(task.config.target_delimiter) for r in requests[: len(choices)]]
        if gold is None or len(requests) not in (len(choices), 2 * len(choices)):
            return []
        rows += _document_rows(name, doc_id, gold, choices, [answers.of(request) for request in requests])
    return rows


def _document_rows(
    name: str, doc_id: int, gold: int, choices: Sequence[str], answers: Sequence[Any]
) -> Iterator[ScoreRow]:
    from evalkit.runs.score_table import ScoreRow

    # For mutual information, lm-eval appends the choices without context
    unconditional = answers[len(choices) :]
    for number, choice in enumerate(choices):
        answer = answers[number]
        yield ScoreRow(
            task=name,
            subtask=name,
            doc_id=doc_id,
            choice=number,
            choices=len(choices),
            gold=gold,
            ll_special=None,
            ll_instruction=None,
            ll_context=None,
            ll_continuation=answer.likelihood,
            ll_end=None,
            n_special=0,
            n_instruction=0,
            # The first token has no context, so it has no log-likelihood
            n_context=answer.context_tokens - 1,
            n_continuation=answer.continuation_tokens,
            n_end=0,
            ll_unconditional=unconditional[number].likelihood if unconditional else None,
            chars=len(choice),
            bytes=len(choice.encode("utf-8")),
            truncated=answer.cut,
            straddles=0,
        )


def _gold(target: Any, choices: Sequence[str]) -> int | None:
    """Return the index of the gold answer, as lm-eval determines it; None if it is not a single index."""
    if isinstance(target, str):
        target = choices.index(target) if target in choices else -1
    return int(target) if isinstance(target, int) and 0 <= target < len(choices) else None


def _clusters(tasks: Mapping[str, Any]) -> dict[tuple[str, int], int]:
    """Return (task, document) → cluster, for tasks whose metadata says which documents share a source."""
    by_document: dict[tuple[str, int], int] = {}
    for name, task in tasks.items():
        metadata = task.config.metadata or {}
        if SHARED & metadata.keys():
            documents = {request.doc_id: request.doc for request in task.instances}
            clusters = clusters_of(list(documents.values()), metadata)
            ids = list(documents)
            by_document |= {(name, doc_id): ids[first] for doc_id, first in zip(documents, clusters, strict=True)}
    return by_document


def write_scores(
    writer: RunWriter,
    rows: Sequence[ScoreRow],
    clusters: Mapping[tuple[str, int], int],
    *,
    counted: bool = True,
    without_sizes: Collection[str] = (),
) -> None:
    """Write the score table, and its tasks to the manifest; without rows no rule applies to the run.

    Args:
        writer: the run folder.
        rows: in the table's order.
        clusters: see `score_table`.
        counted: whether the numbers of tokens are known.
        without_sizes: tasks whose answer options' lengths are not known.
    """
    from evalkit.runs.score_table import score_table, uncounted, unsized

    tasks = list(dict.fromkeys(row.task for row in rows))
    if not rows:
        writer.save_manifest(rule=LM_EVAL)
    else:
        writer.save_manifest(groups={"Average": tasks}, group_sizes={"Average": len(tasks)})
        table = unsized(score_table(rows, clusters), without_sizes)
        writer.save_table(SCORES, table if counted else uncounted(table))


def _content(results: Mapping[str, Any], tasks: TaskSet, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Return the content of results.json: every metric of every task and group, as lm-eval computed it."""
    entries = {name: _entry(name, results) for name in results["results"]}
    for name, task in tasks.tasks.items():
        entries[name] |= {
            "output_type": task.OUTPUT_TYPE,
            "documents": results["n-samples"][name]["original"],
            "seconds": round(seconds.get(name, 0.0), 3),
        }
    groups = [entries[name] | {"tasks": results["group_subtasks"].get(name, [])} for name in results.get("groups", {})]
    # Only suites have "averages"; lm-eval's groups define their own aggregation
    return {"tasks": [entries[name] for name in tasks.tasks], "groups": groups, "averages": []}


def _entry(name: str, results: Mapping[str, Any]) -> dict[str, Any]:
    found = results["results"][name]
    return {
        "task": name,
        "alias": found["alias"],
        "n": found["sample_len"],
        "num_fewshot": results["n-shot"].get(name),
        "version": results["versions"].get(name),
        "metrics": list(_metrics(found, results["higher_is_better"].get(name, {}))),
    }


def _metrics(found: Mapping[str, Any], higher_is_better: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for key, value in found.items():
        metric, comma, rule = key.rpartition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        error = found.get(f"{metric}_stderr,{rule}")
        yield {
            "filter": rule,
            "metric": metric,
            "value": value,
            "stderr": float(error) if isinstance(error, (int, float)) and math.isfinite(error) else None,
            "higher_is_better": higher_is_better.get(metric),
        }


def _settings(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of lm-eval's entry "config", without those of the model."""
    seeds = manifest["specification"]["seeds"]
    return {
        "batch_size": "auto",
        "device": manifest.get("loaded", {}).get("device"),
        "limit": manifest["specification"]["limit"],
        "bootstrap_iters": 100000,
        "random_seed": seeds["random"],
        "numpy_seed": seeds["numpy"],
        "torch_seed": seeds["torch"],
        "fewshot_seed": seeds["fewshot"],
    }


def _task_hashes(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, str]:
    """Return lm-eval's hash of each task's documents, prompts and targets."""
    parts = ("doc_hash", "prompt_hash", "target_hash")
    return {
        name: hash_of("".join(sample[part] for sample in members for part in parts))
        for name, members in samples.items()
    }


def _sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document in the form of lm-eval's sample files: answers and targets as text."""
    arguments = {
        f"gen_args_{i}": {f"arg_{j}": part for j, part in enumerate(one)} for i, one in enumerate(sample["arguments"])
    }
    return {
        **sample,
        "arguments": arguments,
        "resps": as_texts(sample["resps"]),
        "filtered_resps": as_texts(sample["filtered_resps"]),
        "target": str(sample["target"]),
    }


Entry = Mapping[str, Any]
"""The entry of a task or a group in results.json."""


def metrics_report(run: Run) -> Report:
    """Return a report of every metric of every task and group, as lm-eval computed it."""
    stored, manifest = run.stored, run.manifest
    entries = [*stored["tasks"], *stored["groups"]]
    filters = {metric["filter"] for entry in entries for metric in entry["metrics"]}
    unofficial = {name for name, source in manifest["documents"].items() if not source["official"]}
    rows = [row for entry in entries for row in _rows(entry, len(filters) > 1, entry["task"] in unofficial)]
    texts = ["task", *(["filter"] if len(filters) > 1 else []), "metric"]
    headers = [*texts, "n", "n-shot", "value", "± SE", "seconds"]
    notes = ["metrics as lm-eval " + str(manifest["versions"]["lm-eval"]) + " computes them"]
    if extension := manifest["specification"].get("context_extension"):
        notes.append(Extension(**extension).describe())
    notes += [*origin_notes(manifest), *mixture(manifest)]
    if any(metric["higher_is_better"] is False for entry in entries for metric in entry["metrics"]):
        notes.append(LOWER_NOTE)
    sources = sorted({source["source"] for source in manifest["documents"].values()})
    notes.append("documents: " + "; ".join(sources[:5]) + ("; …" if len(sources) > 5 else ""))
    if unofficial:
        notes.append("*: not the official documents of the task")
    return Report(
        (simple_table("lm_eval", headers, rows, texts=len(texts)),),
        notes=tuple(notes),
        content=run_content(run, documents=manifest["documents"]),
        records=[
            {"task": entry["task"], "n": entry["n"], "num_fewshot": entry["num_fewshot"]}
            | metric
            | {"official": entry["task"] not in unofficial}
            for entry in entries
            for metric in entry["metrics"]
        ],
    )


def summary_of(stored: Mapping[str, Any]) -> str:
    """Return a short summary of a finished run, for a list of runs."""
    if not (entries := stored["groups"] or stored["tasks"]):
        return ""
    first, *others = entries
    shown = [f"{metric['metric']} {number(metric['value'])}" for metric in first["metrics"][:1]]
    return " ".join([first["task"], *shown, *([f"and {len(others)} more"] if others else [])])


def number(value: Any) -> str:
    """Return a metric's value with four decimals, as in lm-eval; a value that is not a number as text."""
    return fixed(value, 4) if isinstance(value, (int, float)) else str(value)


def _rows(entry: Entry, with_filter: bool, unofficial: bool) -> Iterator[list[str]]:
    shots = "" if entry["num_fewshot"] is None else str(entry["num_fewshot"])
    for index, metric in enumerate(entry["metrics"]):
        first = index == 0
        yield [
            entry["task"] + "*" * unofficial if first else "",
            *([metric["filter"]] if with_filter else []),
            metric["metric"] + (LOWER_IS_BETTER if metric["higher_is_better"] is False else ""),
            str(entry["n"]) if first else "",
            shots if first else "",
            number(metric["value"]),
            "–" if metric["stderr"] is None else f"± {fixed(metric['stderr'], 4)}",
            fixed(entry["seconds"], 1) if first and entry.get("seconds") is not None else "",
        ]
