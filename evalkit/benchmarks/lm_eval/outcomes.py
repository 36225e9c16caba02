"""Documents of a finished run of lm-eval's tasks with their scores, for comparison.

In: a run. Out: a `Comparable`: of a run with multiple-choice tasks, their choices under evalkit's rules; of any other
run, the value of each task's own metric. Documents without a metric have no content hashes; they are paired by number,
under the hash of all documents.
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
from evalkit.benchmarks.outcomes import CONTENT, Comparable, Measure
from evalkit.compatibility.lm_eval import json_value
from evalkit.errors import UsageError
from evalkit.runs.folder import LM_EVAL, Run
from evalkit.runs.score_table import CLUSTER
from evalkit.runs.traits import documents_read, is_imported

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.runs.writing import RunWriter
    from evalkit.stats.estimates import Floats


DOCUMENTS = "documents.parquet"


class DocumentScore(NamedTuple):
    """The value of one metric for one document."""

    task: str
    doc_id: int
    content: str
    """Hash of the document; of documents with the same content the later ones have their count after it."""
    filter: str
    metric: str
    value: float
    """NaN if it is not a number, such as the pair that a perplexity is computed from."""


def document_scores(task: str, samples: Iterable[Mapping[str, Any]]) -> Iterator[DocumentScore]:
    """Yield the values of a task's documents.

    Args:
        task: lm-eval's leaf task.
        samples: lm-eval's samples: doc_id, doc, filter, metrics, and a value under the name of each metric.
    """
    contents: dict[int, str] = {}
    seen: Counter[str] = Counter()
    for sample in samples:
        doc_id = int(sample["doc_id"])
        if doc_id not in contents:
            found = content_hash(sample["doc"])
            seen[found] += 1
            contents[doc_id] = found if seen[found] == 1 else f"{found}/{seen[found]}"
        for metric in sample["metrics"]:
            value = _number(sample[metric])
            yield DocumentScore(task, doc_id, contents[doc_id], str(sample["filter"]), metric, value)


def content_hash(doc: Any) -> str:
    """Return the SHA-256 of a document's content as JSON, whatever the order of its keys."""
    text = json.dumps(doc, sort_keys=True, ensure_ascii=False, default=json_value)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def compared_metric(scores: Sequence[DocumentScore], higher_is_better: Mapping[str, bool | None]) -> str | None:
    """Return the metric by which a task's documents are compared, as "metric,filter".

    It is the first metric of which every document's value is between 0 and 1, and of which lower is not better; None if
    there is none.
    """
    values: dict[tuple[str, str], list[float]] = {}
    for one in scores:
        values.setdefault((one.metric, one.filter), []).append(one.value)
    for (metric, rule), found in values.items():
        if all(0 <= value <= 1 for value in found) and higher_is_better.get(metric) is not False:
            return f"{metric},{rule}"
    return None


def write_document_scores(writer: RunWriter, scores: Sequence[DocumentScore]) -> None:
    """Write the table of a run; nothing if no document has a metric."""
    if scores:
        import pandas as pd

        writer.save_table(DOCUMENTS, pd.DataFrame(scores, columns=list(DocumentScore._fields)))


def _number(value: Any) -> float:
    try:
        number = float(value) if not isinstance(value, (str, list, tuple)) else nan
    except (TypeError, ValueError):
        return nan
    return number if isfinite(number) else nan


def task_outcomes(run: Run) -> Comparable:
    """Return the documents of a finished run of lm-eval's tasks."""
    if not run.manifest["groups"] and any(task.get("compared") for task in run.stored["tasks"]):
        return TaskMetrics(run)
    return TaskChoices(run)


def _must_agree(run: Run, task: str) -> dict[str, str]:
    """See `Comparable`. The documents' hash covers the selected ones; the config says how many examples are drawn.

    Documents of an imported run are paired by content, so that their order and number may differ.
    """
    specification = run.manifest["specification"]
    about = specification["tasks"][task]
    shots = about["num_fewshot"]
    if is_imported(run.manifest):
        known = {"number of examples": "" if shots is None else str(shots)}
        return {"limit": "", **known, "documents": "", "examples": "", "task's definition": ""}
    return {
        "limit": documents_read(specification) or "none",
        "number of examples": str(shots),
        "documents": str(about["documents"]),
        "examples": str(about.get("examples") or "") if shots else "none",
        "task's definition": str(about["config"]),
    }


class TaskChoices(ComparableChoices):
    """The multiple-choice scores of a run of lm-eval's tasks."""

    lacking = "no multiple-choice scores; run it without multiple-choice tasks to compare its own metric"

    @property
    def has_contents(self) -> bool:
        """See `Comparable`."""
        return DOCUMENTS in self.run.files

    def must_agree(self, task: str) -> dict[str, str]:
        """See `Comparable`."""
        return _must_agree(self.run, task)

    @cached_property
    def documents(self) -> pd.DataFrame:
        """One row for each document, with its content hash if the run has it."""
        found = super().documents
        if not self.has_contents:
            return found
        names = ["task", "doc_id"]
        table = self.run.table(DOCUMENTS, DocumentScore._fields).drop_duplicates(names)
        return found.merge(table[[*names, CONTENT]], "left", names)


class TaskMetrics(Comparable):
    """The value of each task's own metric, between 0 and 1, of a run without multiple-choice tasks."""

    checked = ()
    lacking = "no metric that is a share of each document"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._metrics = {task["task"]: task["compared"] for task in run.stored["tasks"] if task.get("compared")}
        self.groups = {"Average": list(self._metrics)}
        self.group_sizes = {"Average": len(self._metrics)}

    @property
    def has_contents(self) -> bool:
        """See `Comparable`."""
        return DOCUMENTS in self.run.files

    def must_agree(self, task: str) -> dict[str, str]:
        """See `Comparable`."""
        return {**_must_agree(self.run, task), "metric": self._metrics.get(task, "")}

    @cached_property
    def _table(self) -> pd.DataFrame:
        table = self.run.table(DOCUMENTS, DocumentScore._fields)
        chosen = table["metric"] + "," + table["filter"] == table["task"].map(self._metrics)
        return table[chosen].reset_index(drop=True)

    @cached_property
    def documents(self) -> pd.DataFrame:
        """One row for each document, see `Comparable`."""
        table = self._table
        return table[["task", "doc_id", CONTENT]].assign(subtask=table["task"], **{CLUSTER: table["doc_id"]})

    @property
    def rules(self) -> Sequence[str]:
        """The tasks' own metrics, under the benchmark's name."""
        return (LM_EVAL,)

    def by_rule(self, rule: str) -> Floats:
        """Return [documents] values of each task's own metric."""
        self.measure(rule)
        values: Floats = self._table["value"].to_numpy(float)
        return values

    def measure(self, rule: str) -> Measure:
        """Return the description of the tasks' own metrics."""
        if rule != LM_EVAL:
            raise UsageError(
                f"run {self.run.folder.name} has no choices that rule {rule} could decide between; leave out --rule"
            )
        shown = "; ".join(f"{metric.replace(',none', '')} of {task}" for task, metric in self._metrics.items())
        # A metric of which lower is better is never compared, but an imported log may not say it
        known = all(self._is_known_higher(task) for task in self.run.stored["tasks"] if task.get("compared"))
        unknown = "" if known else "; whether higher or lower is better is not known, so neither is"
        return Measure(
            f"each task's own metric ({shown}), in %{unknown}", True, higher_is_better=True if known else None
        )

    def _is_known_higher(self, task: Mapping[str, Any]) -> bool:
        better = {f"{one['metric']},{one['filter']}": one["higher_is_better"] for one in task["metrics"]}
        return better.get(task["compared"]) is True
