"""Values of lm-eval's metrics for single documents.

In: lm-eval's samples, evaluated here or read from a log. Out: `documents.parquet`, one row for each document, filter
and metric, with a hash of the document's content; and the metric by which a task's documents are compared. Runs of
other programs number documents in their own way, so documents are paired by content.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite, nan
from typing import TYPE_CHECKING, Any, NamedTuple

from evalkit.compatibility.lm_eval import json_value

if TYPE_CHECKING:
    from evalkit.runs.writing import RunWriter

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
