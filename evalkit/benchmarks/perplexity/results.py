"""Results of a run. In: documents and the journal's rows. Out: tables and results.json.

documents.parquet   one row for each document
positions.parquet   one row for each document and bin of positions
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from evalkit.benchmarks.outcomes import GradedAnswers, Measure
from evalkit.benchmarks.perplexity.benchmark import PERPLEXITY
from evalkit.benchmarks.perplexity.windows import WIDTH
from evalkit.errors import RunError
from evalkit.runs.folder import Run
from evalkit.stats.estimates import Estimate, Floats, error_of_mean, mean

if TYPE_CHECKING:
    from evalkit.benchmarks.generated import DocumentPlan
    from evalkit.runs.journal import FinishedRows
    from evalkit.runs.writing import RunWriter


DOCUMENTS, POSITIONS = "documents.parquet", "positions.parquet"
DOCUMENT_COLUMNS = ("task", "document", "place", "bytes", "words", "tokens", "windows", "nats", "bits_per_byte")
POSITION_COLUMNS = ("task", "document", "position", "tokens", "bytes", "nats")
MOST = 16
"""Bins in reports."""
_SPACES = re.compile(r"\s+")
_MOST_NATS = 700
_WORDS = (
    "bits per byte of each document, lower is better; the scores are means over documents, each of which counts the "
    "same, whereas the run's own bits_per_byte is over all bytes"
)


class PositionBin(NamedTuple):
    """All scored tokens in a bin of positions."""

    first: int
    last: int
    """Positions of the bin, both included."""
    documents: int
    tokens: int
    bytes: int
    nats: float
    bits_per_byte: float | None
    """None if the tokens have no bytes."""
    stderr: float | None
    """None of one document."""
    freedom: float | None
    """Degrees of freedom of the standard error."""


def position_bins(tables: Sequence[pd.DataFrame], most: int = MOST) -> list[list[PositionBin]]:
    """Return the bins of all documents of each table of positions.

    All have the same width: `WIDTH` times a power of two, so that the longest window has at most `most` bins.
    """
    width = WIDTH
    while max(table["position"].max() for table in tables) > most * width:
        width *= 2
    found = []
    for table in tables:
        groups = table.assign(bin=(table["position"] - 1) // width)
        sums = groups.groupby(["bin", "task", "document"], sort=True)[["tokens", "bytes", "nats"]].sum().reset_index()
        found.append([_bin(int(members["bin"].iloc[0]), width, members) for _, members in sums.groupby("bin")])
    return found


def ratio(values: Floats, weights: Floats) -> Estimate:
    """Estimate the ratio of two sums over documents, [documents] each; its variance is NaN of one document."""
    total = float(weights.sum())
    value = float(values.sum()) / total
    residuals = mean((values - value * weights) * len(values) / total)
    return Estimate(value, residuals.variance, residuals.freedom)


def _bin(number: int, width: int, members: pd.DataFrame) -> PositionBin:
    size, nats = int(members["bytes"].sum()), float(members["nats"].sum())
    first = number * width + 1
    counts = (first, first + width - 1, len(members), int(members["tokens"].sum()), size, nats)
    if not size:
        return PositionBin(*counts, None, None, None)
    estimate = ratio(members["nats"].to_numpy(np.float64) / math.log(2), members["bytes"].to_numpy(np.float64))
    known = not math.isnan(estimate.variance)
    return PositionBin(*counts, estimate.value, *((estimate.stderr, estimate.freedom) if known else (None, None)))


def write_results(plan: DocumentPlan, finished: FinishedRows, writer: RunWriter) -> None:
    """Write the tables and the results."""
    documents, positions = [], []
    for task, members in plan.tasks.items():
        rows = finished.table(task).to_pandas()
        sums = rows.groupby("document").agg(
            tokens=("tokens", "sum"), scored=("bytes", "sum"), windows=("window", "nunique"), nats=("nats", "sum")
        )
        about = {
            "task": task,
            "document": [document.number for document in members],
            "place": [document.place for document in members],
            "bytes": [len(document.content) for document in members],
            # As lm-eval counts them: the parts between white space, empty ones at the ends too
            "words": [len(_SPACES.split(document.text)) for document in members],
        }
        table = pd.DataFrame(about).join(sums, on="document")
        if (lacking := table["scored"] != table["bytes"]).any():
            # Happens only if lines of the journal were removed while it was read
            raise RunError(
                f"the journal of {writer.folder} lacks a part of {table['place'][lacking.argmax()]}; delete the folder "
                "and run the command again"
            )
        table["bits_per_byte"] = table["nats"] / math.log(2) / table["bytes"]
        documents.append(table[list(DOCUMENT_COLUMNS)])
        binned = rows.groupby(["document", "position"])[["tokens", "bytes", "nats"]].sum().reset_index()
        positions.append(binned.assign(task=task)[list(POSITION_COLUMNS)])
    table, by_bin = pd.concat(documents, ignore_index=True), pd.concat(positions, ignore_index=True)
    writer.save_table(DOCUMENTS, table)
    writer.save_table(POSITIONS, by_bin)
    tasks = [
        {"task": task, **summary(rows), "seconds": round(finished.seconds.get(str(task), 0.0), 3)}
        for task, rows in table.groupby("task", sort=False)
    ]
    [bins] = position_bins([by_bin])
    writer.save_results(
        {"tasks": tasks, "averages": [], "whole": summary(table), "positions": [bin._asdict() for bin in bins]}
    )


def summary(documents: pd.DataFrame) -> dict[str, Any]:
    """Return the sums over some documents, and the perplexities as lm-eval defines them.

    `document_bits_per_byte` is the mean over documents, which `evalkit compare` compares.
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
        "stderr": None if math.isnan(whole.variance) else whole.stderr,
        "byte_perplexity": math.exp(nats / size),
        # None beyond the range of floats, as for the one "word" of a text without spaces
        "word_perplexity": math.exp(nats / words) if nats / words < _MOST_NATS else None,
        "token_perplexity": math.exp(nats / tokens) if nats / tokens < _MOST_NATS else None,
        "document_bits_per_byte": float(documents["bits_per_byte"].mean()),
        "document_stderr": error_of_mean(documents["bits_per_byte"].to_numpy(np.float64)),
    }


def comparable_documents(run: Run) -> GradedAnswers:
    """Return the documents with their bits per byte, under the rule "perplexity"."""

    def load() -> pd.DataFrame:
        table = run.table(DOCUMENTS, DOCUMENT_COLUMNS)
        return table.assign(id=table["document"], source=table["document"], score=table["bits_per_byte"])

    measure = Measure(_WORDS, True, "bits_per_byte", None, False)
    return GradedAnswers(run, load, ("bytes",), {"Average": tuple(run.manifest["documents"])}, {PERPLEXITY: measure})
