"""Tables and metrics of lm-eval's evaluations, of runs and of imported logs.

In: lm-eval's results and samples. Out: the metrics of results.json, every metric of every document
(documents.parquet), and rows of the score table.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite, nan
from typing import TYPE_CHECKING, Any, NamedTuple

from evalkit.benchmarks.outcomes import Metric
from evalkit.compatibility.lm_eval import json_value
from evalkit.inputs.values import text_digest, utf8_length
from evalkit.runs.folder import LM_EVAL, SCORES
from evalkit.runs.rules import RULES, lm_eval_metric
from evalkit.runs.scales import FRACTION, Scale, stored_scale
from evalkit.runs.score_table import ScoreRow
from evalkit.stats.estimates import known_error

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.runs.writing import RunWriter

DOCUMENTS = "documents.parquet"
_UNITS = {
    **{lm_eval_metric(rule): FRACTION for rule in RULES},
    "acc_all": FRACTION,
    "acc_ambig": FRACTION,
    "acc_disambig": FRACTION,
    "accuracy": FRACTION,
    "accuracy_amb": FRACTION,
    "accuracy_disamb": FRACTION,
    "bits_per_byte": "bits per byte",
    "perplexity": "perplexity",
    "word_perplexity": "perplexity",
    "byte_perplexity": "perplexity",
}
"""Metric → its unit, of lm-eval's tasks and of evalkit's rules (acc, acc_norm, …); None is known of other metrics."""


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
            digest = text_digest(text)
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
            *(len(choice), utf8_length(choice), 0, 0),
        )
        for number, (choice, likelihood) in enumerate(zip(choices, likelihoods, strict=True))
    ]


def metric_entries(values: Mapping[str, Any], better: Mapping[str, bool | None]) -> list[dict[str, Any]]:
    """Return the metrics of a task in results.json from lm-eval's values, named "metric,filter" and "…_stderr,…".

    A value that is not a finite number is None.
    """
    metrics = []
    for key, value in values.items():
        metric, comma, rule = key.rpartition(",")
        if comma and not metric.endswith("_stderr"):
            error = values.get(f"{metric}_stderr,{rule}")
            stderr = known_error(float(error)) if isinstance(error, (int, float)) and isfinite(error) else None
            is_undefined = isinstance(value, float) and not isfinite(value)
            scale = Scale(metric, _UNITS.get(metric), better.get(metric))
            metrics.append({"filter": rule} | scale.stored(None if is_undefined else value, stderr))
    return metrics


def logged_metrics(entry: Mapping[str, Any], official: bool | None = None) -> list[Metric]:
    """Return the numeric metrics of a task or group of results.json, as lm-eval computed them."""
    metrics = []
    for metric in entry["metrics"]:
        if isinstance(metric["value"], (int, float)):
            numbers = (entry["n"], float(metric["value"]), metric["stderr"])
            metrics.append(Metric(stored_scale(metric), entry["task"], *numbers, official=official))
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
