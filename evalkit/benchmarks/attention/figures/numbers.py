"""Numbers of figures that are more than means: sums of categories, and pairs of runs.

In: `AnalysedRun`s. Out: tables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from evalkit.benchmarks.attention.figures.kinds import Band
from evalkit.benchmarks.attention.figures.runs import AnalysedRun
from evalkit.benchmarks.attention.tables import SAMPLE
from evalkit.errors import UsageError


def of_groups(
    run: AnalysedRun, groups: Mapping[str, Sequence[str]], band: Band, layers: Sequence[int], softmax: bool
) -> pd.DataFrame:
    """Return the sums of groups of measures, of each head or of each document: layer, n, and a column for each group.

    Args:
        run: has all of these measures.
        groups: title → names of measures.
        band: whether heads or documents are the rows.
        layers: see `AnalysedRun.layers`.
        softmax: whether the sums of a row are replaced by their softmax.
    """
    key = ["layer", "head"] if band == "heads" else ["layer", *SAMPLE]
    first = next(iter(groups.values()))[0]
    chosen = run.layers(first, layers)
    sums: dict[str, pd.Series] = {}
    for title, measures in groups.items():
        tables = [run.by_head(one) if band == "heads" else run.by_sample(one).assign(n=1) for one in measures]
        rows = pd.concat(tables).groupby(key, observed=True)
        sums[title] = rows["value"].sum()
        count = rows["n"].max()
    wide = pd.DataFrame(sums)
    if softmax:
        powers = wide.sub(wide.max(axis=1), axis=0).map(math.exp)
        wide = powers.div(powers.sum(axis=1), axis=0)
    if band == "samples":
        count = count.groupby(level="layer").transform("size")
    found = wide.assign(n=count).reset_index()
    return found[found["layer"].isin(chosen)]


def share_above(first: AnalysedRun, other: AnalysedRun, measure: str, layers: Sequence[int]) -> pd.DataFrame:
    """Return the share of documents with a larger value than in the first run, and its standard error, by layer.

    Raises:
        UsageError: the runs have other documents, of other lengths, or no layer in common.
    """
    if not first.has_samples_of(other):
        raise UsageError(
            f"runs {first.run.folder.name} and {other.run.folder.name} have other documents, or other "
            "tokens, so their ranks cannot be paired; analyse the same sample with the same tokenizer"
        )
    pairs = first.by_sample(measure).merge(other.by_sample(measure), on=["layer", *SAMPLE], suffixes=("", "_other"))
    chosen = {*first.layers(measure, layers)} & {*other.layers(measure, layers)}
    pairs = pairs[pairs["layer"].isin(chosen)]
    if pairs.empty:
        raise UsageError(
            f"runs {first.run.folder.name} and {other.run.folder.name} have {measure} of no layer in common; analyse "
            "the same layers with evalkit attention … --layers"
        )
    above = pairs.assign(above=pairs["value_other"] > pairs["value"]).groupby("layer")["above"]
    share, n = above.mean(), above.size()
    return pd.DataFrame({"value": share, "spread": np.sqrt(share * (1 - share) / n), "n": n}).reset_index()
