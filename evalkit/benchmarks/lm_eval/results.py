"""lm-eval's evaluation of a run: the answers in the journal, its metrics, and the files of the results.

In: the plan's tasks and the finished rows. Out: results.json, lm-eval's own files, the documents' scores, and the score
table of the multiple-choice tasks with one gold answer, so that evalkit's rules and statistics apply to them as to a
suite's.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lm_eval.evaluator
from lm_eval.api.model import LM

from evalkit.benchmarks.lm_eval.log_format import Evaluated, write_lm_eval
from evalkit.benchmarks.lm_eval.outcomes import choice_rows, compared_metric, document_scores, write_tables
from evalkit.benchmarks.lm_eval.plan import TaskPlan
from evalkit.benchmarks.lm_eval.requests import KEY, RequestRow, requests_of
from evalkit.benchmarks.lm_eval.tasks import quiet_lm_eval, task_errors
from evalkit.compatibility.lm_eval import as_texts, hash_of, json_value
from evalkit.data.sampling import SHARED, clusters_of
from evalkit.errors import EvalkitError, RunError, first_line
from evalkit.runs.journal import FinishedRows
from evalkit.runs.score_table import ScoreRow
from evalkit.runs.writing import RunWriter


class StoredAnswers(LM):  # type: ignore[misc]
    """An lm-eval model that returns the answers in the journal, for lm-eval's `evaluate`."""

    def __init__(self, finished: FinishedRows) -> None:
        super().__init__()
        self._finished = finished
        self._journal = ""
        self._rows: dict[tuple[Any, ...], RequestRow] = {}
        """Rows of the current task; lm-eval requests one task after the other."""

    def rows(self, instances: Sequence[Any]) -> Iterator[list[RequestRow]]:
        """Yield the rows of each request: one, or one for each window of its text."""
        for request in requests_of(instances):
            if request.journal != self._journal:
                self._journal, self._rows = request.journal, {}
                for row in self._finished.rows(request.journal):
                    self._rows.setdefault(row[: len(KEY)], row)
            first = self._rows[request.key()[1:]]
            yield [first, *(self._rows[request.key(window)[1:]] for window in range(1, first.parts))]

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        return [(_likelihood(row), bool(row.greedy)) for [row] in self.rows(requests)]

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        return [sum(map(_likelihood, rows)) for rows in self.rows(requests)]

    def generate_until(self, requests: list[Any]) -> list[str]:
        return [str(row.text) for [row] in self.rows(requests)]


def _likelihood(row: RequestRow) -> float:
    return float(row.likelihood or 0.0)


def finish(plan: TaskPlan, finished: FinishedRows, writer: RunWriter) -> None:
    """Let lm-eval evaluate the answers, and write every result file of a run, results.json last."""
    tasks, with_samples = plan.tasks.tasks, plan.request.log_samples
    answers = StoredAnswers(finished)
    results = _evaluated(plan, answers, writer)
    samples = results.pop("samples")
    scores = {name: list(document_scores(name, members)) for name, members in samples.items()}
    all_scores = [score for members in scores.values() for score in members]
    rows = [row for name, task in tasks.items() for row in _task_rows(name, task, answers)]
    # pmi needs an unconditional pass for every row; lm-eval makes it only for tasks that measure mutual information
    if any(row.ll_unconditional is None for row in rows):
        rows = [row._replace(ll_unconditional=None) for row in rows]
    write_tables(writer, rows, _clusters(tasks), all_scores)
    seconds: Counter[str] = Counter()
    for journal, spent in finished.seconds.items():
        seconds[journal.partition(" ")[2]] += spent  # type: ignore[assignment]
    # lm-eval's hash of a task's documents, prompts and targets
    parts = ("doc_hash", "prompt_hash", "target_hash")
    hashes = {
        name: hash_of("".join(sample[part] for sample in members for part in parts))
        for name, members in samples.items()
    }
    lines = {name: map(_sample, members) for name, members in samples.items()} if with_samples else {}
    seeds = writer.manifest["specification"]["seeds"]
    settings = {
        "batch_size": "auto",
        "device": writer.manifest.get("loaded", {}).get("device"),
        "limit": writer.manifest["specification"]["limit"],
        "bootstrap_iters": 100000,
        "random_seed": seeds["random"],
        "numpy_seed": seeds["numpy"],
        "torch_seed": seeds["torch"],
        "fewshot_seed": seeds["fewshot"],
    }
    write_lm_eval(writer, Evaluated(results, settings, sum(seconds.values(), 0.0), lines, hashes=hashes))
    entries = {name: _entry(name, results) for name in results["results"]}
    for name, task in tasks.items():
        entries[name] |= {
            "output_type": task.OUTPUT_TYPE,
            "documents": results["n-samples"][name]["original"],
            "seconds": round(seconds.get(name, 0.0), 3),
            "compared": compared_metric(scores.get(name, []), results["higher_is_better"].get(name, {})),
        }
    groups = [entries[name] | {"tasks": results["group_subtasks"].get(name, [])} for name in results.get("groups", {})]
    # Only suites have "averages"; lm-eval's groups define their own aggregation
    content: dict[str, Any] = {"tasks": [entries[name] for name in tasks], "groups": groups, "averages": []}
    content |= {"samples": with_samples, "task_hashes": hashes}
    writer.save_results(json.loads(json.dumps(content, default=json_value)))


def _evaluated(plan: TaskPlan, answers: StoredAnswers, writer: RunWriter) -> dict[str, Any]:
    tasks = plan.tasks
    _ = plan.requests
    for name, task in tasks.tasks.items():
        # `evaluate` would build the requests again
        task.build_all_requests = lambda **_: None
        task.process_results = task_errors(name, "measure a document")(task.process_results)
    with quiet_lm_eval(writer.say):
        try:
            loaded = {"tasks": tasks.tasks, "groups": tasks.groups}
            return dict(lm_eval.evaluator.evaluate(answers, loaded, limit=plan.request.limit, log_samples=True))
        except EvalkitError:
            raise
        except Exception as error:
            raise RunError(
                f"lm-eval cannot evaluate {', '.join(tasks.names)} ({type(error).__name__}: {first_line(error)}); "
                f"the finished answers are kept in {writer.folder}"
            ) from error


def _task_rows(name: str, task: Any, answers: StoredAnswers) -> list[ScoreRow]:
    """Return the score rows of a multiple-choice task with one gold answer each; of others, and own metrics, none."""
    custom = getattr(task.config, "process_results", None)
    if task.OUTPUT_TYPE != "multiple_choice" or callable(custom) or getattr(task, "multiple_target", 0):
        return []
    by_document: dict[int, list[Any]] = {}
    for instance in task.instances:
        by_document.setdefault(instance.doc_id, []).append(instance)
    rows: list[ScoreRow] = []
    for instances in by_document.values():
        instances.sort(key=lambda instance: instance.idx)
        doc = instances[0].doc
        choices = task.doc_to_choice(doc)
        gold = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
        if isinstance(gold, str):
            gold = choices.index(gold) if gold in choices else -1
        if task.multiple_input:
            # The options are in the contexts and one continuation repeats, whose length counts, as in a suite
            delimiter = task.config.target_delimiter
            choices = [instance.args[1].removeprefix(delimiter) for instance in instances[: len(choices)]]
        is_index = isinstance(gold, int) and 0 <= gold < len(choices)
        if not is_index or len(instances) not in (len(choices), 2 * len(choices)):
            return []
        rows += _document_rows(name, int(gold), choices, [row for [row] in answers.rows(instances)])
    return rows


def _document_rows(name: str, gold: int, choices: Sequence[str], answers: Sequence[RequestRow]) -> Iterator[ScoreRow]:
    # For mutual information, lm-eval appends the choices without context
    conditional, unconditional = answers[: len(choices)], answers[len(choices) :]
    likelihoods = [answer.likelihood for answer in conditional]
    rows = choice_rows(name, name, answers[0].doc_id, gold, choices, likelihoods)
    for row, answer in zip(rows, conditional, strict=True):
        yield row._replace(
            # The first token has no context, so it has no log-likelihood
            n_context=answer.context_tokens - 1,
            n_continuation=answer.continuation_tokens,
            ll_unconditional=unconditional[row.choice].likelihood if unconditional else None,
            truncated=answer.cut,
        )


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


def _entry(name: str, results: Mapping[str, Any]) -> dict[str, Any]:
    values, better = results["results"][name], results["higher_is_better"].get(name, {})
    metrics = []
    for key, value in values.items():
        metric, comma, rule = key.rpartition(",")
        if comma and not metric.endswith("_stderr"):
            error = values.get(f"{metric}_stderr,{rule}")
            known = isinstance(error, (int, float)) and math.isfinite(error)
            about = {"filter": rule, "metric": metric, "value": value, "stderr": float(error) if known else None}
            metrics.append(about | {"higher_is_better": better.get(metric)})
    return {
        "task": name,
        "alias": values["alias"],
        "n": values["sample_len"],
        "num_fewshot": results["n-shot"].get(name),
        "version": results["versions"].get(name),
        "metrics": metrics,
    }


def _sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    arguments = {
        f"gen_args_{number}": {f"arg_{index}": part for index, part in enumerate(request)}
        for number, request in enumerate(sample["arguments"])
    }
    return {
        **sample,
        "arguments": arguments,
        "resps": as_texts(sample["resps"]),
        "filtered_resps": as_texts(sample["filtered_resps"]),
        "target": str(sample["target"]),
    }
