"""Numbers of figures: means and deviations of finished analyses, and how their runs differ.

Documents of all tasks are pooled: each counts once, whatever the sizes of the tasks, and with several continuations by
their mean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
import pandas as pd

from evalkit.attention import ATTENTION
from evalkit.attention.groups import MEASURES, Band, chosen_layers, described_layers, parsed_layers
from evalkit.attention.results import DOCUMENTS, HEADS, SAMPLE, with_values
from evalkit.benchmarks.differences import differences
from evalkit.benchmarks.outcomes import Comparable, Measure
from evalkit.errors import UsageError, check_known
from evalkit.escape import printable
from evalkit.reporting.figures import short_name
from evalkit.runs.folder import Run
from evalkit.runs.score_table import CLUSTER
from evalkit.stats.estimates import Floats

_COMPARED = {"questions": "suite of the documents", "num_fewshot": "solved examples", "tagger": "tagger"}
"""Key of the specification → its name. Traits of every run are compared besides."""
_EVERY = "all"


class AnalysedRun:
    """A finished analysis as a line or a panel of a figure, with all documents or those of some tasks.

    Runs with the same `model`, by default the name, are its seeds and share a line. Tables are read on first use.
    Raises a `UsageError` for a run of another benchmark, or for a task that it lacks.
    """

    def __init__(self, name: str, run: Run, tasks: Sequence[str] = (), model: str = "") -> None:
        self._label = f"run {run.folder.name}"
        if run.kind != ATTENTION:
            raise UsageError(f"{self._label} is of benchmark {run.kind}; figures are of runs of evalkit attention")
        known = tuple(run.manifest["documents"])
        check_known(f"task of {self._label}", tasks, known)
        self.name, self.run, self.model = name, run, model or name
        self.tasks = tuple(task for task in known if not tasks or task in tasks)

    @cached_property
    def documents(self) -> pd.DataFrame:
        """Measures over heads: `DOCUMENT` and value, the mean over heads, of a rank the median."""
        return with_values(self._table(DOCUMENTS))

    @cached_property
    def samples(self) -> pd.DataFrame:
        """One row for each document: its key, its cluster, and the sums of tokens and checksums of its sequences."""
        sequences = self.documents.drop_duplicates([*SAMPLE, "choice"]).astype({"task": str, "subtask": str})
        grouped = sequences.groupby([*SAMPLE, "cluster"], sort=False)
        return grouped[["tokens", "sequence"]].sum().reset_index()

    @cached_property
    def measures(self) -> tuple[str, ...]:
        """Measures of whole sequences."""
        known = {*self.documents.loc[self.documents["position"].isna(), "measure"].unique()}
        return tuple(name for name in MEASURES if name in known)

    @cached_property
    def _heads(self) -> pd.DataFrame:
        return self._table(HEADS)

    def _table(self, name: str) -> pd.DataFrame:
        table = self.run.table(name)
        return table[table["task"].isin(self.tasks)]

    def has_documents_of(self, other: AnalysedRun) -> bool:
        """Whether both have the same documents and tokens."""
        mine, theirs = (run.samples.sort_values(SAMPLE, ignore_index=True) for run in (self, other))
        return mine.equals(theirs)

    def layers(self, measure: str, chosen: Sequence[int] = (), option: str = "--layers ") -> list[int]:
        """Layers that have a measure: all, or the chosen ones, from -1 for the last one backwards."""
        known = sorted(map(int, self._rows(self.documents, measure, MEASURES[measure].of_tokens)["layer"].unique()))
        return chosen_layers(chosen, self.run.manifest["attention_layers"], known, option)

    def values(
        self, measure: str, band: Band, layers: Sequence[int] = (), keys: Sequence[str] = ("layer",)
    ) -> pd.DataFrame:
        """Return the values of a measure in the chosen layers, by layer or by layer and position of the query.

        With the band "heads" of each head: head, value (mean over documents) and n (documents). With "samples" of each
        document: `SAMPLE` and value (mean over continuations of `documents`).
        """
        rows = self._rows(self.documents if band == "samples" else self._heads, measure, "position" in keys)
        rows = rows[rows["layer"].isin(self.layers(measure, layers))]
        if band == "samples":
            return rows.groupby([*keys, *SAMPLE], observed=True)["value"].mean().reset_index()
        rows = rows.assign(value=rows["mean"] * rows["n"])
        sums = rows.groupby([*keys, "head"], observed=True)[["value", "n"]].sum()
        return sums.assign(value=sums["value"] / sums["n"]).reset_index()

    def line(
        self, measure: str, band: Band, layers: Sequence[int] = (), keys: Sequence[str] = ("layer",)
    ) -> pd.DataFrame:
        return self.labelled(spread_of(self.values(measure, band, layers, keys), keys), measure)

    def labelled(self, values: pd.DataFrame, measure: str) -> pd.DataFrame:
        """Return a table with the model's name, the run's id and the measure in its first columns."""
        about = {"run": self.model, "id": self.run.manifest["id"], "measure": measure}
        return pd.DataFrame(about, values.index).join(values)

    def _rows(self, table: pd.DataFrame, measure: str, by_position: bool = False) -> pd.DataFrame:
        rows = table[(table["measure"] == measure) & (table["position"].notna() == by_position)]
        rows = rows.astype({"position": "int64"} if by_position else {})
        if rows.empty:
            raise UsageError(f"{self._label} has no {measure}; compute it with --measures {MEASURES[measure].group}")
        return rows


def spread_of(values: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Mean of each group of `AnalysedRun.values`, standard deviation (`spread`), and documents behind it (`n`)."""
    grouped = values.groupby(list(keys), observed=True)
    count = grouped["n"].max() if "n" in values else grouped.size()
    return pd.DataFrame({"value": grouped["value"].mean(), "spread": grouped["value"].std(), "n": count}).reset_index()


def over_seeds(runs: Sequence[AnalysedRun], tables: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Join `AnalysedRun.labelled` tables; if a model has several seeds, as mean and standard deviation over seeds.

    A number that a seed lacks is left out. A model with a single run has no `spread` then.
    """
    table, seeds = pd.concat(tables, ignore_index=True), Counter(run.model for run in runs)
    if len(seeds) == len(runs):
        return table
    keys = [column for column in table if column not in ("id", "value", "spread", "n")]
    grouped = table.groupby(keys, sort=False)
    ids = grouped["id"].agg(lambda members: " ".join(dict.fromkeys(members)))
    columns = {"id": ids, "value": grouped["value"].mean(), "spread": grouped["value"].std(), "n": grouped["n"].min()}
    joined = pd.DataFrame(columns | {"seeds": grouped["id"].nunique()}).reset_index()
    return joined.loc[joined["seeds"] == joined["run"].map(seeds), list(table)].reset_index(drop=True)


def share_above(first: AnalysedRun, other: AnalysedRun, measure: str, layers: Sequence[int]) -> pd.DataFrame:
    """Return the share of documents with a larger value than in the first run, and its standard error, by layer."""
    both = f"runs {first.run.folder.name} and {other.run.folder.name} have"
    if not first.has_documents_of(other):
        raise UsageError(f"{both} other documents, or tokens, so their ranks cannot be paired; analyse the same sample")
    mine, theirs = (run.values(measure, "samples", layers) for run in (first, other))
    pairs = mine.merge(theirs, on=["layer", *SAMPLE], suffixes=("", "_other"))
    if pairs.empty:
        raise UsageError(f"{both} {measure} of no layer in common; analyse the same --layers")
    above = pairs.assign(above=pairs["value_other"] > pairs["value"]).groupby("layer")["above"]
    share, n = above.mean(), above.size()
    return pd.DataFrame({"value": share, "spread": np.sqrt(share * (1 - share) / n), "n": n}).reset_index()


def run_differences(runs: Sequence[AnalysedRun]) -> list[str]:
    """Return a sentence if runs differ from the first one in what changes numbers, besides the model."""
    first, *others = runs
    values_of: dict[str, list[str]] = {}
    for other in others:
        pairs = differences(first.run, other.run)
        differing = [(mine.name, mine.value, theirs.value) for mine, theirs in pairs if mine.refused]
        mine, theirs = _settings(first), _settings(other)
        differing += [(name, mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]]
        if not differing and not first.has_documents_of(other):
            own, another = (f"{int(run.samples['tokens'].sum()):,} tokens" for run in (first, other))
            differing.append(("documents", own, another))
        for name, own, another in differing:
            values_of.setdefault(name, [f"{own} ({short_name(first.name)})"])
            values_of[name].append(f"{another} ({short_name(other.name)})")
    listed = "; ".join(f"{name}: {', '.join(values)}" for name, values in values_of.items())
    return [printable(f"The runs differ in more than their models: {listed}.")] if listed else []


def _settings(analysed: AnalysedRun) -> dict[str, str]:
    """Return what changes numbers, beside the traits of every run."""
    about = analysed.run.manifest["specification"]
    values = {name: "none" if about.get(key) is None else str(about[key]) for key, name in _COMPARED.items()}
    return values | {"tasks": " ".join(analysed.tasks)}


class AttentionDocuments(Comparable):
    checked = ("sequence",)

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._analysed = AnalysedRun(run.folder.name, run)
        self.groups = {"Average": self._analysed.tasks}
        self.group_sizes = {"Average": len(self._analysed.tasks)}

    @property
    def documents(self) -> pd.DataFrame:
        """One row for each document; of several continuations, `sequence` is the sum of theirs."""
        return self._analysed.samples.rename(columns={"cluster": CLUSTER})

    @property
    def rules(self) -> Sequence[str]:
        return self._analysed.measures

    def by_rule(self, rule: str) -> Floats:
        """Return [documents] values of a measure, or [documents, layers] of "MEASURE@all"."""
        name, given, layers = self._parsed(rule)
        values = self._analysed.values(name, "samples", layers).astype({"task": str, "subtask": str})
        wide = values.pivot(index=SAMPLE, columns="layer", values="value")
        by_layer = wide.reindex(pd.MultiIndex.from_frame(self.documents[SAMPLE]))
        if absent := by_layer.index[by_layer.isna().any(axis=1)].tolist():
            _, subtask, doc_id = absent[0]
            run, document = f"run {self.run.folder.name}", f"{subtask} document {doc_id}, which is too short"
            raise UsageError(f"{run} has no {name} of {len(absent)} documents, such as {document}")
        scores: Floats = (by_layer if given == _EVERY else by_layer.mean(axis=1)).to_numpy(float)
        return scores

    def measure(self, rule: str) -> Measure:
        name, given, layers = self._parsed(rule)
        info = MEASURES[name]
        averaged = "" if given else described_layers(layers, self.run.manifest["attention_layers"])
        where = f"mean over {averaged}" if averaged else "by layer" if given == _EVERY else f"layer {layers[0]}"
        words = f"{info.words}; {where}{'; in %' if info.in_percent else ''}"
        every = tuple(layers) if given == _EVERY else ()
        return Measure(info.scale.named(rule), words, True, every, averaged=averaged)

    def _parsed(self, rule: str) -> tuple[str, str, list[int]]:
        """Measure of a rule, its layer as given ("all", or "" for the mean), and the layers read."""
        name, at, given = rule.partition("@")
        if name == ATTENTION:
            known = ", ".join(self.rules)
            raise UsageError(f"name a measure of attention with --rule: {known}; with @LAYER or @all by layer")
        check_known(f"measure of run {self.run.folder.name}", [name], self.rules)
        option = f"--rule {name}@"
        numbers = parsed_layers([given], option) if at and given != _EVERY else ()
        return name, given, self._analysed.layers(name, numbers, option)
