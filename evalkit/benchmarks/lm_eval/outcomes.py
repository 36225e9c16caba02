"""Scores of the documents of lm-eval's tasks: the tables of a run, and their comparison.

In: score rows and lm-eval's samples, or a finished run. Out: its tables; or a `Comparable`: of a run with
multiple-choice tasks, their choices under evalkit's rules; of any other run, the value of each task's own metric.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from math import isfinite, nan
from typing import TYPE_CHECKING, Any, NamedTuple

from evalkit.benchmarks.multiple_choice.outcomes import ComparableChoices
from evalkit.benchmarks.outcomes import CONTENT, Comparable, GradedAnswers, Measure
from evalkit.compatibility.lm_eval import json_value
from evalkit.runs.folder import LM_EVAL, SCORES, Run
from evalkit.runs.score_table import ScoreRow
from evalkit.runs.traits import documents_read, is_imported

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.runs.writing import RunWriter


DOCUMENTS = "documents.parquet"


class DocumentScore(NamedTuple):
    task: str
    doc_id: int
    content: str
    """Hash of the document; of documents with the same content the later ones have their count after it."""
    filter: str
    metric: str
    value: float
    """NaN if it is not a number, such as the pair that a perplexity is computed from."""


def document_scores(task: str, samples: Iterable[Mapping[str, Any]]) -> Iterator[DocumentScore]:
    """Yield the values of a leaf task's documents from lm-eval's samples, in which each metric's name is a key."""
    contents: dict[int, str] = {}
    seen: Counter[str] = Counter()
    for sample in samples:
        doc_id = int(sample["doc_id"])
        if doc_id not in contents:
            text = json.dumps(sample["doc"], sort_keys=True, ensure_ascii=False, default=json_value)
            digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
            seen[digest] += 1
            contents[doc_id] = digest if seen[digest] == 1 else f"{digest}/{seen[digest]}"
        for metric in sample["metrics"]:
            value = _number(sample[metric])
            yield DocumentScore(task, doc_id, contents[doc_id], str(sample["filter"]), metric, value)


def _number(value: Any) -> float:
    try:
        number = float(value) if not isinstance(value, (str, list, tuple)) else nan
    except (TypeError, ValueError):
        return nan
    return number if isfinite(number) else nan


def compared_metric(scores: Sequence[DocumentScore], higher_is_better: Mapping[str, bool | None]) -> str | None:
    """Return the first "metric,filter" with values from 0 to 1 of which lower is not better; None if there is none."""
    excluded = {(score.metric, score.filter) for score in scores if not 0 <= score.value <= 1}
    names = dict.fromkeys((score.metric, score.filter) for score in scores)
    shares = [name for name in names if name not in excluded and higher_is_better.get(name[0]) is not False]
    return ",".join(shares[0]) if shares else None


def choice_rows(
    task: str, subtask: str, doc_id: int, gold: int, choices: Sequence[str], likelihoods: Sequence[float | None]
) -> list[ScoreRow]:
    """Return a document's score rows with the choices' log-likelihoods, [choices], alone; all token counts are 0."""
    return [
        ScoreRow(
            *(task, subtask, doc_id, number, len(choices), gold),
            *(None, None, None, likelihood, None),
            *(0, 0, 0, 0, 0),
            None,
            *(len(choice), len(choice.encode("utf-8", "surrogatepass")), 0, 0),
        )
        for number, (choice, likelihood) in enumerate(zip(choices, likelihoods, strict=True))
    ]


def metric_entries(values: Mapping[str, Any], better: Mapping[str, bool | None]) -> list[dict[str, Any]]:
    """Return the metrics of a task in results.json from lm-eval's values, named "metric,filter" and "…_stderr,…"."""
    metrics = []
    for key, value in values.items():
        metric, comma, rule = key.rpartition(",")
        if comma and not metric.endswith("_stderr"):
            error = values.get(f"{metric}_stderr,{rule}")
            stderr = float(error) if isinstance(error, (int, float)) and isfinite(error) else None
            about = {"filter": rule, "metric": metric, "value": value, "stderr": stderr}
            metrics.append(about | {"higher_is_better": better.get(metric)})
    return metrics


def write_tables(writer: RunWriter, scores: pd.DataFrame | None, documents: Sequence[DocumentScore]) -> None:
    """Write the score table, with its tasks in the manifest, and the documents' table; an empty one is not written.

    Without a score table, no rule applies to the run.
    """
    if scores is None:
        writer.save_manifest(rule=LM_EVAL)
    else:
        tasks = scores["task"].unique().tolist()
        writer.save_manifest(groups={"Average": tasks}, group_sizes={"Average": len(tasks)})
        writer.save_table(SCORES, scores)
    if documents:
        import pandas as pd

        writer.save_table(DOCUMENTS, pd.DataFrame(documents, columns=list(DocumentScore._fields)))


def task_outcomes(run: Run) -> Comparable:
    if not run.manifest["groups"] and any(task.get("compared") for task in run.stored["tasks"]):
        return TaskMetrics(run)
    return TaskChoices(run)


class _TaskDocuments(Comparable):
    """Documents of lm-eval's tasks; those without a metric have no content hashes and are paired by number."""

    @property
    def has_contents(self) -> bool:
        return DOCUMENTS in self.run.files

    def must_agree(self, task: str) -> dict[str, str]:
        """See `Comparable`; an imported run's documents are paired by content, whatever their order and number."""
        specification = self.run.manifest["specification"]
        about = specification["tasks"][task]
        shots = about["num_fewshot"]
        if is_imported(self.run.manifest):
            known = {"number of examples": "" if shots is None else str(shots)}
            return {"limit": "", **known, "documents": "", "examples": "", "task's definition": ""}
        return {
            "limit": documents_read(specification) or "none",
            "number of examples": str(shots),
            "documents": str(about["documents"]),
            "examples": str(about.get("examples") or "") if shots else "none",
            "task's definition": str(about["config"]),
        }


class TaskChoices(_TaskDocuments, ComparableChoices):
    """The multiple-choice scores of a run of lm-eval's tasks."""

    lacking = "no multiple-choice scores; run it without multiple-choice tasks to compare its own metric"

    @cached_property
    def documents(self) -> pd.DataFrame:
        """One row for each document, with its content hash if the run has it."""
        documents = super().documents
        if not self.has_contents:
            return documents
        names = ["task", "doc_id"]
        table = self.run.table(DOCUMENTS, DocumentScore._fields).drop_duplicates(names)
        return documents.merge(table[[*names, CONTENT]], "left", names)


class TaskMetrics(_TaskDocuments, GradedAnswers):
    """The value of each task's own metric, between 0 and 1, of a run without multiple-choice tasks."""

    lacking = "no metric that is a share of each document"

    def __init__(self, run: Run) -> None:
        compared = {task["task"]: task for task in run.stored["tasks"] if task.get("compared")}
        self._metrics = {name: task["compared"] for name, task in compared.items()}
        shown = "; ".join(f"{metric.replace(',none', '')} of {task}" for task, metric in self._metrics.items())
        # A metric of which lower is better is never compared, but an imported log may not say it
        directions = {
            (name, f"{metric['metric']},{metric['filter']}"): metric["higher_is_better"]
            for name, task in compared.items()
            for metric in task["metrics"]
        }
        known = all(directions.get(task) is True for task in self._metrics.items())
        unknown = "" if known else "; whether higher or lower is better is not known, so neither is"
        words = f"each task's own metric ({shown}), in %{unknown}"
        measure = Measure(words, True, higher_is_better=True if known else None)
        super().__init__(run, self._scores, (CONTENT,), {"Average": list(compared)}, {LM_EVAL: measure})

    def must_agree(self, task: str) -> dict[str, str]:
        return {**super().must_agree(task), "metric": self._metrics.get(task, "")}

    def _scores(self) -> pd.DataFrame:
        table = self.run.table(DOCUMENTS, DocumentScore._fields)
        chosen = table["metric"] + "," + table["filter"] == table["task"].map(self._metrics)
        names = {"doc_id": "id", "value": "score"}
        return table[chosen].rename(columns=names).assign(source=lambda scores: scores["id"]).reset_index(drop=True)
