"""Results of an analysis: its tables and results.json, its printed report, and its documents for comparison.

In: the journal's rows; for report and comparison a finished run. Out, beside results.json:

attention.parquet             task, subtask, doc_id, choice, layer, head, measure, position, value
attention_documents.parquet   the same over heads, with the sequence's length: mean and median
attention_heads.parquet       the same over documents: n and mean
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from math import isnan
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from evalkit.benchmarks.attention import ATTENTION
from evalkit.benchmarks.attention.groups import FINISHED, MASS, MEASURES, described_layers, layer_of
from evalkit.benchmarks.outcomes import Comparable, Measure, run_content
from evalkit.errors import RunError, ScoringError, UnknownNameError, UsageError
from evalkit.escape import counted
from evalkit.reporting.decimals import fixed, percent
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.runs.folder import Run
from evalkit.runs.score_table import CLUSTER
from evalkit.runs.traits import mixture
from evalkit.stats.estimates import Floats, mean

if TYPE_CHECKING:
    from evalkit.benchmarks.attention.documents import AttentionPlan
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
_EVERY = "all"
_NUMBER = re.compile(r"-?\d{1,6}")


def finish(plan: AttentionPlan, finished: FinishedRows, writer: RunWriter) -> None:
    if any(key not in finished for key in plan.work):
        # Happens only if lines of the journal were removed while it was read
        raise RunError(
            f"the journal of {writer.folder} lacks some documents; delete the folder and run the command again"
        )
    subtasks = {task: [question.subtask for question in members] for task, members in plan.questions.items()}
    documents, sequences = write_tables(
        subtasks or {task: [task] for task in plan.manifest["documents"]}, finished, writer
    )
    writer.save_results(results_of(documents, sequences, finished.seconds))


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
            for every in finished.batches(task):
                marks = pc.equal(every["measure"], FINISHED)
                sequences.append(every.filter(marks).select(_SEQUENCE).to_pandas().assign(task=task))
                batch = every.filter(pc.invert(marks))
                if not batch.num_rows:
                    continue
                rows = batch.to_pandas().assign(task=task)
                over_heads = rows.groupby(DOCUMENT, sort=False, dropna=False)["value"].agg(["mean", "median"])
                documents.append(over_heads.reset_index().astype({name: kinds[name] for name in DOCUMENT}))
                sums.append(_sums(rows))
                arrays = []
                for name, kind in zip(_SCHEMA.names, _SCHEMA.types, strict=True):
                    column = pa.repeat(task, len(batch)) if name == "task" else batch[name]
                    arrays.append((column.dictionary_encode() if kind == _WORD else column).cast(kind))
                yield pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)
            if sums:
                grouped = pd.concat(sums, ignore_index=True).groupby(HEAD, sort=False, dropna=False)
                whole = grouped[["count", "sum"]].sum()
                means = pd.DataFrame({"n": whole["count"], "mean": whole["sum"] / whole["count"]}).reset_index()
                means = means.sort_values(["task", "measure", "position", "layer", "head"], ignore_index=True)
                heads.append(means.astype({name: kinds[name] for name in HEAD}))

    writer.save_batches(ALL, _SCHEMA, batches())
    if not documents:
        raise ScoringError(
            f"{writer.folder}: no requested measure applies to any document: bos and negative need sequences that "
            "begin with BOS, sink needs 64 tokens, similarity several heads; name others with --measures"
        )
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


def documents_of(over_heads: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each document: its key, its cluster, and the sums of tokens and checksums of its sequences."""
    sequences = over_heads.drop_duplicates([*SAMPLE, "choice"])
    keys = [*SAMPLE, "cluster"]
    return sequences.groupby(keys, observed=True, sort=False)[["tokens", "sequence"]].sum().reset_index()


def with_values(documents: pd.DataFrame) -> pd.DataFrame:
    """Add a column `value`: the mean over heads, or the median of measures that are summarised by it."""
    medians = [name for name, info in MEASURES.items() if info.median]
    return documents.assign(value=documents["mean"].where(~documents["measure"].isin(medians), documents["median"]))


def results_of(documents: pd.DataFrame, sequences: pd.DataFrame, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Return the content of results.json, from the tables of `write_tables` and the seconds spent on each task.

    A value is a mean over documents of each document's mean over heads (of a rank: median), of all measured layers or
    of one; the standard error is that over documents, clustered by their sources, with the tasks as strata.
    """
    whole = with_values(documents[documents["position"].isna()])
    tasks = []
    for task in sequences["task"].unique():
        members = sequences[sequences["task"] == task]
        about = {
            "task": task,
            "n": len(members.drop_duplicates(["subtask", "doc_id"])),
            "truncated": int((members["truncated"] > 0).sum()),
            "tokens": int(members["tokens"].sum()),
            "seconds": round(seconds.get(task, 0.0), 3),
            "measures": _values(whole[whole["task"] == task]),
        }
        tasks.append(about)
    numbers = sorted(whole["layer"].unique())
    layers = [{"layer": int(layer), "measures": _values(whole[whole["layer"] == layer])} for layer in numbers]
    return {"tasks": tasks, "averages": [], "layers": layers, "measures": _values(whole)}


def _values(rows: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Return measure → number of documents, mean and its standard error, in evalkit's order."""
    keys = ["measure", "task", "subtask", "doc_id", "cluster"]
    by_document = rows.groupby(keys, observed=True, sort=False)["value"].mean().reset_index()
    values = {}
    for name in by_document["measure"].unique():
        measured = by_document[by_document["measure"] == name]
        clusters = measured.groupby(["task", "subtask", "cluster"], observed=True, sort=False).ngroup().to_numpy()
        tasks = measured.groupby("task", observed=True, sort=False).ngroup().to_numpy()
        estimate = mean(measured["value"].to_numpy(np.float64), clusters, tasks)
        error = None if isnan(estimate.variance) else estimate.stderr
        values[str(name)] = {"n": len(measured), "value": estimate.value, "stderr": error}
    return {name: values[name] for name in MEASURES if name in values}


def attention_report(run: Run, rule: str | None = None, detail: bool = False) -> Report:
    """Return the measures of each layer, and of all layers in the last line."""
    lines: list[tuple[str, Any]] = [(str(layer["layer"]), layer["measures"]) for layer in run.stored["layers"]]
    lines.append(("all", run.stored["measures"]))

    def repeats(name: str) -> bool:
        """Whether a measure equals that of |weights| in every line: no weight is negative."""
        other = MEASURES[name].unsigned
        pairs = [(measures.get(name), measures.get(other)) for _, measures in lines]
        return bool(other) and all(a == b or (a and b and abs(a["value"] - b["value"]) < _EQUAL) for a, b in pairs)

    def cell(name: str, measured: dict[str, Any] | None) -> str:
        if measured is None:
            return "–"
        return percent(measured["value"]) if MEASURES[name].in_percent else fixed(measured["value"], 2)

    names = [name for name in run.stored["measures"] if not repeats(name)]
    tables = []
    for title, is_mass in ((ATTENTION, False), (MASS, True)):
        if members := [name for name in names if (MEASURES[name].group == MASS) is is_mass]:
            rows = [[layer, *(cell(name, measures.get(name)) for name in members)] for layer, measures in lines]
            tables.append(simple_table(title, ["layer", *members], rows, ruled={len(lines) - 1}))
    records = [
        {"layer": layer, "measure": name, **value} for layer, measures in lines for name, value in measures.items()
    ]
    return Report(tuple(tables), notes=tuple(_notes(run, names)), content=run_content(run), records=records)


def _notes(run: Run, names: list[str]) -> list[str]:
    specification, tasks, measures = run.manifest["specification"], run.stored["tasks"], run.stored["measures"]
    hidden = [name for name in measures if name not in names]
    total = sum(task["n"] for task in tasks)
    documents = f"{total:,} document{'s' * (total != 1)} of {counted(len(tasks), 'task')}, seed {specification['seed']}"
    read = f"{specification['continuation']} continuation" if "continuation" in specification else "whole text"
    notes = [
        f"{run.manifest['model']}, {specification['dtype']}, {run.template} prompts, {documents}, {read}",
        "means over documents of the mean over heads (rank: median); shares in %",
        *([f"left out, equal without negative weights: {', '.join(hidden)}"] if hidden else []),
        *(f"{name}: {MEASURES[name].words}" for name in names),
    ]
    few: dict[int, list[str]] = {}
    for name, measured in measures.items():
        if measured["n"] < total:
            few.setdefault(measured["n"], []).append(name)
    notes += [f"{', '.join(few[n])}: of {counted(n, 'document')}, to which they apply" for n in few]
    present = {MEASURES[name].group for name in measures}
    if absent := [group for group in specification["measures"] if group not in present]:
        notes.append(f"apply to no document: {', '.join(absent)}")
    if "tagger" in specification:
        notes.append(f"categories are of English words, by {specification['tagger']}")
    if cut := sum(task["truncated"] for task in tasks):
        notes.append(f"{counted(cut, 'document')} truncated to the context window")
    return [*notes, *mixture(run.manifest)]


class AttentionDocuments(Comparable):
    checked = ("sequence",)

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.groups = {"Average": tuple(run.manifest["documents"])}
        self.group_sizes = {"Average": len(run.manifest["documents"])}
        self._by_layer = lru_cache(maxsize=None)(self._read_by_layer)

    @cached_property
    def documents(self) -> pd.DataFrame:
        """One row for each document; of several continuations, `sequence` is the sum of theirs."""
        documents = documents_of(self._table).astype({"task": str, "subtask": str})
        return documents.rename(columns={"cluster": CLUSTER})

    @cached_property
    def rules(self) -> Sequence[str]:
        known = set(self._table["measure"].unique())
        return tuple(name for name in MEASURES if name in known)

    def by_rule(self, rule: str) -> Floats:
        """Return [documents] values of a measure, or [documents, layers] of "MEASURE@all"."""
        name, given, layers = self._parsed(rule)
        by_layer = self._by_layer(name)
        if absent := by_layer.index[by_layer.isna().any(axis=1)].tolist():
            _, subtask, doc_id = absent[0]
            raise UsageError(
                f"run {self.run.folder.name} has no {name} of {len(absent)} documents, such as {subtask} document "
                f"{doc_id}, which is too short; compare by another measure"
            )
        values: Floats = (by_layer if given == _EVERY else by_layer[layers].mean(axis=1)).to_numpy(float)
        return values

    def measure(self, rule: str) -> Measure:
        name, given, layers = self._parsed(rule)
        info = MEASURES[name]
        averaged = "" if given else described_layers(layers, self.run.manifest["attention_layers"])
        where = f"mean over {averaged}" if averaged else "by layer" if given == _EVERY else f"layer {layers[0]}"
        words = f"{info.words}; {where}{'; in %' if info.in_percent else ''}"
        every = tuple(layers) if given == _EVERY else ()
        return Measure(words, True, rule, info.bounds, None, every, averaged=averaged)

    @cached_property
    def _table(self) -> pd.DataFrame:
        table = self.run.table(DOCUMENTS, [*DOCUMENT, "mean", "median"])
        return with_values(table[table["position"].isna()])

    def _read_by_layer(self, name: str) -> pd.DataFrame:
        """Values of a measure: a row for each document, as in `documents`, a column for each layer."""
        rows = self._table[self._table["measure"] == name].astype({"task": str, "subtask": str})
        wide = rows.pivot_table(index=SAMPLE, columns="layer", values="value", aggfunc="mean", sort=False)
        by_layer = wide.reindex(pd.MultiIndex.from_frame(self.documents[SAMPLE]))
        by_layer.columns = [int(layer) for layer in by_layer.columns]
        return by_layer

    def _parsed(self, rule: str) -> tuple[str, str, list[int]]:
        """Measure of a rule, its layer as given ("all", or "" for the mean), and the layers read."""
        name, _, given = rule.partition("@")
        run = f"run {self.run.folder.name}"
        if name == ATTENTION:
            raise UsageError(
                f"{run} is an analysis of attention, which has several measures: name one with --rule: "
                f"{', '.join(self.rules)}; with @LAYER, such as rank@-1, for one layer, with @all for each"
            )
        if name not in self.rules:
            raise UnknownNameError(f"measure of {run}", name, self.rules)
        measured = [int(layer) for layer in self._by_layer(name).columns]
        if rule == name or given == _EVERY:
            return name, given, measured
        layer = layer_of(int(given), self.run.manifest["attention_layers"]) if _NUMBER.fullmatch(given) else None
        if layer is None or layer not in measured:
            raise UsageError(f"--rule {rule}: {run} has {name} of layers {min(measured)} to {max(measured)}")
        return name, given, [layer]
