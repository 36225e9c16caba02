"""What a figure says of its measures and its runs, and in what the runs differ.

In: names of measures, and `AnalysedRun`s. Out: labels and sentences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from evalkit.benchmarks.alike import differences
from evalkit.benchmarks.attention.figures.kinds import Band
from evalkit.benchmarks.attention.figures.runs import AnalysedRun
from evalkit.benchmarks.attention.groups import MASS, MEASURES
from evalkit.escape import printable
from evalkit.reporting.figures import short_name

OVER = {"heads": "mean over heads of the mean over documents", "samples": "mean over documents of the mean over heads"}
_UNITS = {"entropy": "nats", "entropy_shifted": "nats", "distance": "tokens", "similarity": "cosine"}
_COMPARED = {
    "questions": "suite of the documents",
    "num_fewshot": "solved examples",
    "tagger": "tagger",
}
"""Key of the specification → its name. Traits of every run are compared besides."""
_MOST_NAMED = 3
"""Most tasks that notes name."""


def unit_of(measure: str) -> str:
    """Return the unit of a measure's values, or what they are."""
    info = MEASURES[measure]
    return "%" if info.in_percent else _UNITS.get(measure, "weight" if info.group in ("bos", MASS, "sink") else measure)


def label_of(measure: str) -> str:
    """Return a measure's name with its unit."""
    unit = unit_of(measure)
    return measure if unit == measure else f"{measure}, {unit}"


def line_words(band: Band) -> str:
    """Return what a line and its band are."""
    over = "heads" if band == "heads" else "documents"
    return f"Line: {OVER[band]}; band: ± 1 standard deviation over {over}"


def described(measures: Sequence[str]) -> str:
    """Return the descriptions of measures."""
    return "; ".join(f"{measure}: {MEASURES[measure].words}" for measure in measures)


def described_bins(measures: Sequence[str], tables: Sequence[pd.DataFrame]) -> str:
    """Return the descriptions of measures by position, and how many documents the bins have."""
    # The rest of a description is about whole sequences
    about = "; ".join(f"{measure}: {MEASURES[measure].words.partition(',')[0]}" for measure in measures)
    bins = pd.concat(tables).groupby("position")["n"].min()
    few = f"; bins have {bins.iloc[0]:,} to {bins.iloc[-1]:,} documents" if bins.iloc[0] != bins.iloc[-1] else ""
    return f"{about}; mean over the positions 1, 2–3, 4–7, … of a document{few}"


def figure_notes(runs: Sequence[AnalysedRun], tables: Sequence[pd.DataFrame], words: str) -> str:
    """Return the notes below a figure: how its numbers are made, of what, and the differences between its runs.

    Args:
        runs: of the figure.
        tables: of its panels.
        words: what the values and the bands are.
    """
    layers = sorted({int(layer) for table in tables for layer in table["layer"].unique()})
    facts = [
        _layers(layers),
        *(_shared([fact[place] for fact in map(_facts, runs)]) for place in range(len(_facts(runs[0])))),
    ]
    few = _smaller_counts(runs, tables)
    return "\n".join(
        [f"{words}. Weights are those of the effective maps.", f"{', '.join(facts)}.", *few, *run_differences(runs)]
    )


def _smaller_counts(runs: Sequence[AnalysedRun], tables: Sequence[pd.DataFrame]) -> list[str]:
    """Return a sentence for measures that apply to some documents only, such as those of sinks to 64 tokens or more."""
    found: dict[str, int] = {}
    least = min(len(one.samples) for one in runs)
    for table in tables:
        if "n" in table and "position" not in table and (most := int(table.groupby("id")["n"].max().min())) < least:
            found |= dict.fromkeys(table["measure"].unique(), most)
    return [
        f"{'; '.join(f'{name}: {count:,} documents, to which it applies' for name, count in found.items())}."
    ] * bool(found)


def run_differences(runs: Sequence[AnalysedRun]) -> list[str]:
    """Return a sentence if runs differ in what changes their numbers besides the model; compared with the first run."""
    found: dict[str, list[str]] = {}
    for other in runs[1:]:
        for name, mine, theirs in _differing(runs[0], other):
            found.setdefault(name, [mine]).append(f"{theirs} ({short_name(other.name)})")
    if not found:
        return []
    listed = "; ".join(
        f"{name}: {values[0]} ({short_name(runs[0].name)}), {', '.join(values[1:])}" for name, values in found.items()
    )
    return [printable(f"The runs differ in more than their models: {listed}.")]


def _layers(layers: Sequence[int]) -> str:
    if len(layers) > 2 and layers[-1] - layers[0] == len(layers) - 1:
        return f"Layers {layers[0]} to {layers[-1]} (from 0)"
    return f"Layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))} (from 0)"


def _differing(one: AnalysedRun, other: AnalysedRun) -> list[tuple[str, str, str]]:
    """Return (what, the first run's value, the other's) of each difference."""
    found = [(a.name, a.value, b.value) for a, b in differences(one.run, other.run) if a.refused]
    mine, theirs = (run.run.manifest["specification"] for run in (one, other))
    found += [
        (words, _shown(mine.get(key)), _shown(theirs.get(key)))
        for key, words in _COMPARED.items()
        if mine.get(key) != theirs.get(key)
    ]
    if one.tasks != other.tasks:
        found.append(("tasks", _shown(one.tasks), _shown(other.tasks)))
    if not found and not one.has_samples_of(other):
        counts = [f"{int(run.samples['tokens'].sum()):,} tokens" for run in (one, other)]
        found.append(("documents", counts[0], counts[1]))
    return found


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return "none" if value is None else str(value)


def _facts(analysed: AnalysedRun) -> tuple[str, ...]:
    """Return what notes say of one run, in a fixed order."""
    specification, tasks = analysed.run.manifest["specification"], analysed.tasks
    count = len(analysed.samples)
    listed = ", ".join(tasks) if len(tasks) <= _MOST_NAMED else f"{len(tasks)} tasks"
    read = "whole text"
    if "continuation" in specification:
        read = "gold continuation" if specification["continuation"] == "gold" else "every continuation"
    return (
        f"{count:,} document{'s' * (count > 1)} of {listed}",
        read,
        f"seed {specification['seed']}",
        f"{analysed.run.template} prompts",
        str(specification["dtype"]),
    )


def _shared(values: Sequence[str]) -> str:
    """Return a value that all runs have, or each run's in their order."""
    return values[0] if len({*values}) == 1 else " | ".join(values)
