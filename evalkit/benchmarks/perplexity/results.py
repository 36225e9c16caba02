"""Results of a run. In: documents and the journal's rows. Out: tables and results.json.

documents.parquet   one row for each document
positions.parquet   one row for each document and bin of positions
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from evalkit.benchmarks.perplexity.positions import BIN, by_position, ratio
from evalkit.benchmarks.perplexity.texts import TextDocument
from evalkit.errors import RunError
from evalkit.stats.estimates import Estimate, error_of_mean

if TYPE_CHECKING:
    from evalkit.benchmarks.perplexity.plan import PerplexityPlan
    from evalkit.runs.finished_rows import FinishedRows
    from evalkit.runs.writing import RunWriter

DOCUMENTS, POSITIONS = "documents.parquet", "positions.parquet"
DOCUMENT_COLUMNS = ("task", "document", "place", "bytes", "words", "tokens", "windows", "nats", "bits_per_byte")
POSITION_COLUMNS = (*BIN, "tokens", "bytes", "nats")
_SPACES = re.compile(r"\s+")
_MOST_NATS = 700


def write_results(plan: PerplexityPlan, finished: FinishedRows, writer: RunWriter) -> None:
    """Write the tables and the results.

    Raises:
        RunError: the journal lacks a part of a document.
    """
    documents, positions = [], []
    for task, members in plan.documents.items():
        rows = finished.table(task).to_pandas()
        sums = rows.groupby("document").agg(
            tokens=("tokens", "sum"), bytes=("bytes", "sum"), windows=("window", "nunique"), nats=("nats", "sum")
        )
        documents.append(pd.DataFrame(list(_documents(members, sums, writer)), columns=DOCUMENT_COLUMNS))
        binned = rows.groupby(["document", "position"])[["tokens", "bytes", "nats"]].sum().reset_index()
        positions.append(binned.assign(task=task)[list(POSITION_COLUMNS)])
    table, by_bin = pd.concat(documents, ignore_index=True), pd.concat(positions, ignore_index=True)
    writer.save_table(DOCUMENTS, table)
    writer.save_table(POSITIONS, by_bin)
    writer.save_results(results_of(table, by_bin, finished.seconds))


def results_of(documents: pd.DataFrame, positions: pd.DataFrame, seconds: dict[str, float]) -> dict[str, Any]:
    """Return the content of results.json.

    Args:
        documents: the table of documents.
        positions: the table of positions.
        seconds: task → seconds spent on it.
    """
    tasks = [
        {"task": task, **summary(documents[documents["task"] == task]), "seconds": round(seconds.get(task, 0.0), 3)}
        for task in documents["task"].unique()
    ]
    return {
        "tasks": tasks,
        "averages": [],
        "whole": summary(documents),
        "positions": [one._asdict() for one in by_position(positions)],
    }


def summary(documents: pd.DataFrame) -> dict[str, Any]:
    """Return the sums over some documents, and the perplexities as lm-eval defines them.

    Those of words and bytes are by lm-eval's counts: the bytes of the document in UTF-8, and its parts between white
    space. `document_bits_per_byte` is the mean over documents, which `evalkit compare` compares.
    """
    size, words, tokens, nats = (documents[name].sum() for name in ("bytes", "words", "tokens", "nats"))
    whole = ratio(documents["nats"].to_numpy(float) / math.log(2), documents["bytes"].to_numpy(float))
    return {
        "n": len(documents),
        "bytes": int(size),
        "words": int(words),
        "tokens": int(tokens),
        "windows": int(documents["windows"].sum()),
        "nats": float(nats),
        "bits_per_byte": whole.value,
        "stderr": _known(whole),
        "byte_perplexity": math.exp(nats / size),
        "word_perplexity": _exp(nats / words),
        "token_perplexity": _exp(nats / tokens),
        "document_bits_per_byte": float(documents["bits_per_byte"].mean()),
        "document_stderr": error_of_mean(documents["bits_per_byte"].to_numpy(np.float64)),
    }


def words_of(text: str) -> int:
    """Return the number of words as lm-eval counts them: the parts between white space, empty ones at the ends too."""
    return len(_SPACES.split(text))


def _documents(members: Sequence[TextDocument], sums: pd.DataFrame, writer: RunWriter) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of the table of documents."""
    by_number = {int(row["document"]): row for row in sums.reset_index().to_dict("records")}
    for one in members:
        found, size = by_number.get(one.number), len(one.content)
        if found is None or found["bytes"] != size:
            # Happens only if lines of the journal were removed while it was read
            raise RunError(
                f"the journal of {writer.folder} lacks a part of {one.place}; delete the folder and run the command "
                "again"
            )
        nats = float(found["nats"])
        about = (one.task, one.number, one.place, size, words_of(one.text))
        yield *about, int(found["tokens"]), int(found["windows"]), nats, nats / math.log(2) / size


def _known(estimate: Estimate) -> float | None:
    return None if math.isnan(estimate.variance) else estimate.stderr


def _exp(nats: float) -> float | None:
    """Return e^nats; None where it is beyond the range of floats, as for the one "word" of a text without spaces."""
    return math.exp(nats) if nats < _MOST_NATS else None
