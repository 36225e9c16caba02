"""Results of an analysis: its tables and results.json, its printed report, and its documents for comparison.

In: the journal's rows; for report and comparison a finished run. Out, beside results.json:

attention.parquet             task, subtask, doc_id, choice, layer, head, measure, position, value
attention_documents.parquet   the same over heads, with the sequence's length: mean and median
attention_heads.parquet       the same over documents: n and mean
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa

from evalkit.attention import ATTENTION
from evalkit.attention.groups import BOS_TOKENS, FINISHED, MASS, MEASURES, RANK, SUMMARY
from evalkit.benchmarks.outcomes import run_content
from evalkit.errors import RunError, ScoringError
from evalkit.escape import counted
from evalkit.reporting.decimals import fixed, percent
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.runs.folder import Run
from evalkit.runs.notes import model_line, notes_below
from evalkit.stats.estimates import known_error, mean

if TYPE_CHECKING:
    from evalkit.attention.documents import AttentionPlan
    from evalkit.runs.journal import FinishedRows
    from evalkit.runs.writing import RunWriter

ALL, DOCUMENTS, HEADS = "attention.parquet", "attention_documents.parquet", "attention_heads.parquet"
SAMPLE = ["task", "subtask", "doc_id"]
"""Key columns of a document."""
DOCUMENT = [*SAMPLE, "choice", "cluster", "sequence", "tokens", "truncated", "layer", "measure", "position"]
"""Key columns of the table over heads."""
HEAD = ["task", "layer", "head", "measure", "position"]
"""Key columns of the table over documents."""
_SEQUENCE = ["subtask", "doc_id", "choice", "tokens", "truncated"]
_NUMBERS = {
    **dict.fromkeys(("layer", "head", "choice"), "int16"),
    **dict.fromkeys(("doc_id", "cluster", "tokens", "truncated"), "int32"),
    "sequence": "int64",
    "position": "Int32",
}
_WORD = pa.dictionary(pa.int32(), pa.string())
_SCHEMA = pa.schema([
    ("task", _WORD), ("subtask", _WORD), ("doc_id", pa.int32()), ("choice", pa.int16()), ("layer", pa.int16()),
    ("head", pa.int16()), ("measure", _WORD), ("position", pa.int32()), ("value", pa.float32()),
])  # fmt: skip
_EQUAL = 1e-4
"""Largest difference of two measures that are shown once."""


def finish(plan: AttentionPlan, finished: FinishedRows, writer: RunWriter) -> None:
    if any(key not in finished for key in plan.work):
        # Happens only if lines of the journal were removed while it was read
        raise RunError(f"the journal of {writer.folder} lacks some documents; delete the folder")
    subtasks = {task: [question.subtask for question in members] or [task] for task, members in plan.tasks.items()}
    writer.save_results(results_of(*write_tables(subtasks, finished, writer), finished.seconds))


def write_tables(
    subtasks: Mapping[str, Sequence[str]], finished: FinishedRows, writer: RunWriter
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Write the three tables of task → its subtasks; return the one over heads, and one row for each sequence."""
    words = {"task": list(subtasks), "subtask": [*dict.fromkeys(chain(*subtasks.values()))], "measure": [*MEASURES]}
    # Small types, so that millions of rows fit into memory
    kinds = _NUMBERS | {name: pd.CategoricalDtype(known) for name, known in words.items()}
    documents: list[pd.DataFrame] = []
    heads: list[pd.DataFrame] = []
    sequences: list[pd.DataFrame] = []

    def batches() -> Iterator[pa.RecordBatch]:
        for task in subtasks:
            sums: list[pd.DataFrame] = []
            for batch in finished.batches(task):
                rows = batch.to_pandas().assign(task=task)
                marks = rows["measure"] == FINISHED
                sequences.append(rows.loc[marks, ["task", *_SEQUENCE]])
                rows = rows[~marks]
                if rows.empty:
                    continue
                over_heads = rows.groupby(DOCUMENT, sort=False, dropna=False)["value"].agg(["mean", "median"])
                documents.append(over_heads.reset_index().astype({name: kinds[name] for name in DOCUMENT}))
                sums.append(_sums(rows))
                yield pa.RecordBatch.from_pandas(rows, _SCHEMA, preserve_index=False)
            if sums:
                grouped = pd.concat(sums, ignore_index=True).groupby(HEAD, sort=False, dropna=False)
                whole = grouped[["count", "sum"]].sum()
                means = pd.DataFrame({"n": whole["count"], "mean": whole["sum"] / whole["count"]}).reset_index()
                means = means.sort_values(["task", "measure", "position", "layer", "head"], ignore_index=True)
                heads.append(means.astype({name: kinds[name] for name in HEAD}))

    writer.save_batches(ALL, _SCHEMA, batches())
    if not documents:
        raise ScoringError(f"{writer.folder}: no measure applies to any document; bos needs BOS, sink 64 tokens")
    over_heads = pd.concat(documents, ignore_index=True)
    writer.save_table(DOCUMENTS, over_heads)
    writer.save_table(HEADS, pd.concat(heads, ignore_index=True))
    return over_heads, pd.concat(sequences, ignore_index=True)


def _sums(rows: pd.DataFrame) -> pd.DataFrame:
    """Return sums over documents; a document with several continuations counts once, with their mean."""
    if rows["choice"].nunique() > 1:
        keys = [*HEAD, "subtask", "doc_id"]
        rows = rows.groupby(keys, sort=False, dropna=False)["value"].mean().reset_index()
    return rows.groupby(HEAD, sort=False, dropna=False)["value"].agg(["count", "sum"]).reset_index()


def with_values(documents: pd.DataFrame) -> pd.DataFrame:
    """Add a column `value`: the mean over heads, or the median of measures that are summarised by it."""
    medians = [name for name, info in MEASURES.items() if info.group == RANK]
    return documents.assign(value=documents["mean"].where(~documents["measure"].isin(medians), documents["median"]))


def results_of(documents: pd.DataFrame, sequences: pd.DataFrame, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Return the content of results.json, from the tables of `write_tables` and the seconds spent on each task.

    A value is a mean over documents of each document's mean over heads (of a rank: median), of all measured layers or
    of one; the standard error is that over documents, clustered by their sources, with the tasks as strata.
    """
    whole = with_values(documents[documents["position"].isna()])
    tasks = [
        {
            "task": task,
            "n": len(members.drop_duplicates(["subtask", "doc_id"])),
            "truncated": int((members["truncated"] > 0).sum()),
            "tokens": int(members["tokens"].sum()),
            "seconds": round(seconds.get(str(task), 0.0), 3),
            "measures": _values(whole[whole["task"] == task]),
        }
        for task, members in sequences.groupby("task", sort=False)
    ]
    layers: Any = whole.groupby("layer")
    by_layer = [{"layer": int(layer), "measures": _values(rows)} for layer, rows in layers]
    return {"tasks": tasks, "averages": [], "layers": by_layer, "measures": _values(whole)}


def _values(rows: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Return measure → number of documents, mean and its standard error, in evalkit's order."""
    keys = ["measure", "task", "subtask", "doc_id", "cluster"]
    by_document = rows.groupby(keys, observed=True, sort=False)["value"].mean().reset_index()
    for name, of in (("source", ["task", "subtask", "cluster"]), ("stratum", ["task"])):
        by_document[name] = by_document.groupby(of, observed=True, sort=False).ngroup()
    values = {}
    for measure, measured in by_document.groupby("measure", observed=True, sort=False):
        estimate = mean(*(measured[name].to_numpy() for name in ("value", "source", "stratum")))
        error = known_error(estimate.stderr)
        scale = MEASURES[str(measure)].scale
        stored = scale.stored(estimate.value, error)
        name = stored.pop("metric")
        values[name] = {"n": len(measured)} | stored
    return {name: values[name] for name in MEASURES if name in values}


def attention_report(run: Run, rule: str | None = None, detail: bool = False) -> Report:
    """Return the most telling measures in the first, middle and last layer and in all; with `detail` all of each."""
    lines: list[tuple[str, Any]] = [(str(layer["layer"]), layer["measures"]) for layer in run.stored["layers"]]
    lines.append(("all", run.stored["measures"]))

    def repeats(name: str) -> bool:
        """Whether a measure equals that of |weights| in every line: no weight is negative."""
        pairs = [(measures.get(name), measures.get(MEASURES[name].unsigned)) for _, measures in lines]
        return bool(MEASURES[name].unsigned) and all(
            own == other or (own and other and abs(own["value"] - other["value"]) < _EQUAL) for own, other in pairs
        )

    def cell(name: str, measured: dict[str, Any] | None) -> str:
        if measured is None:
            return "–"
        return percent(measured["value"]) if MEASURES[name].in_percent else fixed(measured["value"], 2)

    names, tables = [name for name in run.stored["measures"] if not repeats(name)], []
    if not detail:
        grouped = {MEASURES[name].group for name in SUMMARY}
        names = [name for name in names if name in SUMMARY or MEASURES[name].group not in grouped]
        shown = [lines[index] for index in sorted({0, (len(lines) - 2) // 2, len(lines) - 2, len(lines) - 1})]
        rows = [[name, *(cell(name, measures.get(name)) for _, measures in shown)] for name in names]
        headers = ["measure", *(layer if layer == "all" else f"layer {layer}" for layer, _ in shown)]
        tables.append(simple_table(ATTENTION, headers, rows))
    for title, is_mass in ((ATTENTION, False), (MASS, True)) if detail else ():
        if members := [name for name in names if (MEASURES[name].group == MASS) is is_mass]:
            rows = [[layer, *(cell(name, measures.get(name)) for name in members)] for layer, measures in lines]
            tables.append(simple_table(title, ["layer", *members], rows, ruled={len(lines) - 1}))
    records = [
        {"layer": layer, "measure": name, **value} for layer, measures in lines for name, value in measures.items()
    ]
    return Report(
        tables,
        notes=notes_below(run.manifest, _lines(run, names, detail)),
        content=run_content(run),
        records=records,
    )


def _lines(run: Run, names: list[str], detail: bool) -> list[str]:
    specification, tasks, measures = run.manifest["specification"], run.stored["tasks"], run.stored["measures"]
    hidden = [name for name in measures if name not in names]
    total = sum(task["n"] for task in tasks)
    documents = f"{counted(total, 'document')} of {counted(len(tasks), 'task')}, seed {specification['seed']}"
    read = f"{specification['continuation']} continuation" if "continuation" in specification else "whole text"
    notes = [
        model_line(run, f"{run.template} prompts", documents, read),
        "means over documents of the mean over heads (rank: median); shares in %",
    ]
    if not detail:
        return [*notes, "--detail prints all layers and measures, and what they are"]
    notes += [f"left out, equal without negative weights: {', '.join(hidden)}"] if hidden else []
    notes += [f"{name}: {MEASURES[name].words}" for name in names]
    few: dict[int, list[str]] = {}
    for name, measured in measures.items():
        if measured["n"] < total:
            few.setdefault(measured["n"], []).append(name)
    notes += [f"{', '.join(few[n])}: of {counted(n, 'document')}, to which they apply" for n in few]
    present = {BOS_TOKENS, *(MEASURES[name].group for name in measures)}  # the former by position alone
    if absent := [group for group in specification["measures"] if group not in present]:
        notes.append(f"apply to no document: {', '.join(absent)}")
    if "tagger" in specification:
        notes.append(f"categories are of English words, by {specification['tagger']}")
    if cut := sum(task["truncated"] for task in tasks):
        notes.append(f"{counted(cut, 'document')} truncated to the context window")
    return notes
