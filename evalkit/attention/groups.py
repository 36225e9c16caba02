"""Names: measures of attention maps, layers, figures and the journal's row, with the options that choose them.

Neither torch nor pandas is imported; `measures.py` computes the measures, `figures.py` draws the figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from evalkit.errors import UnknownNameError, UsageError, check_known
from evalkit.reporting.figures import Size
from evalkit.runs.scales import FRACTION, Scale

MASS, RANK, BOS_TOKENS = "mass", "rank", "bos_tokens"
CATEGORIES = ("bos", "special", "punctuation", "content", "function", "other")
"""Names of the categories of tokens, by number; "special" are special tokens but BOS, and the prompt's markers."""
SPARSE_SHARE = 0.01
"""A weight is near zero below this share of the largest one of its row."""
SINK_SHARE = 0.3
"""A head's first token is a sink above this share (Attention-Sink, arXiv 2410.10781)."""
RANKED_LAYERS = 4
"""Layers from the last one whose rank is measured by default; section 5.3 of the paper."""
MOST_POSITIONS = 512
"""Positions of queries of which each is measured by itself, in the last layer by default."""
FINISHED = ""
"""Measure of a row that every sequence has, also one that no measure applies to; not in the final tables."""
_DIMENSIONLESS = "dimensionless"


@dataclass(frozen=True)
class MeasureInfo:
    """One measure: a number for each document, layer and head."""

    name: str
    group: str
    title: str
    """Of panels and axes."""
    words: str
    unit: str = _DIMENSIONLESS
    """Nothing signed is a fraction: rows of cog attention are not bounded below by 0."""
    by_position: bool = False
    """Whether it is also measured by position of the query."""
    of_tokens: bool = False
    """Whether it is measured of each position alone, without a mean."""
    unsigned: str = ""
    """The measure of |weights| that it equals where no weight is negative; empty: none."""

    @property
    def scale(self) -> Scale:
        return Scale(self.name, self.unit, higher_is_better=None)

    @property
    def in_percent(self) -> bool:
        return self.scale.is_fraction

    @property
    def printed_unit(self) -> str:
        """Unit of axes; empty if there is none."""
        if self.in_percent:
            return "%"
        return "" if self.unit == _DIMENSIONLESS else self.unit


_INFOS = [
    MeasureInfo("bos", "bos", "Weight on BOS", "weight on BOS, mean over tokens after the first", by_position=True,
                unsigned="bos_abs"),
    MeasureInfo("bos_abs", "bos", "Share of |weights| on BOS",
                "share of |weights| on BOS, mean over tokens after the first", FRACTION, True),
    MeasureInfo("bos_token", BOS_TOKENS, "Weight on BOS",
                f"weight on BOS of each token after the first, to position {MOST_POSITIONS}", of_tokens=True),
    *(info for name in CATEGORIES for info in (
        MeasureInfo(f"mass_{name}", MASS, f"Weight on tokens: {name}",
                    f"weight on category {name}, mean over the continuation's tokens", unsigned=f"mass_abs_{name}"),
        MeasureInfo(f"mass_abs_{name}", MASS, f"Share of |weights| on tokens: {name}",
                    f"share of |weights| on category {name}, mean over the continuation's tokens", FRACTION),
    )),
    MeasureInfo("entropy", "entropy", "Entropy of |weights|", "entropy of |weights|, last continuation token, in nats",
                "nats", True),
    MeasureInfo("entropy_shifted", "entropy", "Entropy of weights − min",
                "entropy of weights − min, as in the paper, in nats", "nats"),
    MeasureInfo("bos_negative", "negative", "Negative weights on BOS",
                "share of tokens after the first with a negative weight on BOS", FRACTION),
    MeasureInfo("sink", "sink", "Weight on the first token", "mean weight on the first token, first 64 tokens",
                unsigned="sink_abs"),
    MeasureInfo("sink_abs", "sink", "Share of |weights| on the first token",
                "mean share of |weights| on the first token, first 64 tokens", FRACTION),
    MeasureInfo("sink_rate", "sink", "Heads with a sink",
                f"share of heads with a mean weight above {SINK_SHARE} on the first token, first 64 tokens", FRACTION,
                unsigned="sink_abs_rate"),
    MeasureInfo("sink_abs_rate", "sink", "Heads with a sink of |weights|",
                f"share of heads with a mean share of |weights| above {SINK_SHARE} on the first token, first 64 tokens",
                FRACTION),
    MeasureInfo("distance", "distance", "Mean distance", "mean distance of |weights|, of tokens after the first, in "
                "tokens", unit="tokens"),
    MeasureInfo("sparsity", "sparsity", "Weights near zero", "mean over tokens after the first of the share of "
                f"their |weights| below {SPARSE_SHARE} of the largest", FRACTION),
    MeasureInfo("similarity", "similarity", "Similarity of heads", "mean cosine between a head's map and the layer's "
                "others", unit="cosine"),
    MeasureInfo("rank", RANK, "Effective rank",
                "effective rank: exp of the entropy of singular values (Roy and Vetterli)"),
    MeasureInfo("rank_squares", RANK, "Effective rank, squared values", "effective rank of squared singular values"),
    MeasureInfo("rank_stable", RANK, "Stable rank",
                "stable rank: squared Frobenius norm / squared largest singular value"),
    MeasureInfo("bos_all", "all_tokens", "Weight on BOS", "weight on BOS, mean over all tokens, as in the paper"),
    MeasureInfo("bos_negative_all", "all_tokens", "Negative weights on BOS",
                "share of all tokens with a negative weight on BOS, as in the paper", FRACTION),
]  # fmt: skip
MEASURES = {info.name: info for info in _INFOS}
SUMMARY = ("bos_abs", *(f"mass_abs_{name}" for name in CATEGORIES), "entropy", "bos_negative", "sink_abs_rate",
           "distance", "similarity", "rank")  # fmt: skip
"""Measures of the first look at a run: where a measure has a form for signed maps, that one."""
GROUPS = tuple(dict.fromkeys(info.group for info in _INFOS))
"""Groups of measures, the values of `--measures`."""


class AttentionRow(NamedTuple):
    """The journal's row: a measure of one head on one sequence."""

    subtask: str
    doc_id: int
    choice: int
    cluster: int
    """`doc_id` of the subtask's first document with the same source."""
    sequence: int
    """CRC-32 of the token ids: runs with another tokenizer have another one."""
    tokens: int
    """Length of the sequence."""
    truncated: int
    """Context tokens truncated to fit the window."""
    layer: int
    head: int
    measure: str
    position: int | None
    """First position of the queries' bin; None for the whole sequence."""
    value: float


def parsed_layers(given: Sequence[str], option: str = "--layers ") -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(map(int, given)))
    except ValueError:
        raise UsageError(f"{option}{','.join(given)}: expected numbers, from 0, or from -1 backwards") from None


def chosen_layers(
    given: Sequence[int], layers: Sequence[int], measured: Sequence[int] = (), option: str = "--layers "
) -> list[int]:
    """Return the layers that numbers mean, ascending; all for no numbers.

    From -1 backwards they are of `layers`, the model's layers with attention. Where some of them are `measured`, only
    these can be chosen.
    """
    known = list(measured or layers)
    meant = {number: layers[number] if -len(layers) <= number < 0 else number for number in given}
    if unknown := [number for number, layer in meant.items() if layer not in known]:
        raise UsageError(f"{option}{unknown[0]}: not among the layers {known[0]} to {known[-1]}, from -1 backwards")
    return sorted(set(meant.values())) or known


def described_layers(measured: Sequence[int], layers: Sequence[int]) -> str:
    """Return "all layers", "the last 4 layers" or "layers 0, 5"; both arguments are ascending."""
    if list(measured) == list(layers):
        return "all layers"
    if len(measured) > 1 and list(measured) == list(layers[-len(measured) :]):
        return f"the last {len(measured)} layers"
    return f"layer{'s' * (len(measured) > 1)} {', '.join(map(str, measured))}"


Band = Literal["heads", "samples"]
"""What the standard deviation of a band is over."""


@dataclass(frozen=True)
class FigureKind:
    words: str
    band: Band | None = None
    """The default; None: `--band` does not apply."""
    measures: tuple[str, ...] = ()
    """What `--measure` chooses from, the default first; empty: it does not apply."""
    paper: str = ""
    """The paper's figure or table that `--paper` draws; empty: none."""
    paper_measure: str = ""
    """The default with `--paper`; empty: the same."""


_WHOLE = tuple(info.name for info in _INFOS if not info.of_tokens)
_RANKS = tuple(info.name for info in _INFOS if info.group == RANK)

KINDS = {
    "bos": FigureKind("attention to BOS by position of the query, in one layer", "heads",
                      ("bos", "bos_abs", "entropy", "bos_token"), "fig:bos_attn_main", "bos_token"),
    "categories": FigureKind("attention to four kinds of tokens, by layer", "heads", paper="fig:attn_cat_anly"),
    "entropy": FigureKind("entropy of the last token's weights, by layer", "samples", paper="fig:entropy_anly_main"),
    "negative": FigureKind("share of negative weights on BOS, by layer", "heads", ("bos_negative", "bos_negative_all"),
                           "fig:diff_cog_neg_app", "bos_negative_all"),
    "rank": FigureKind("effective rank by layer, and share of documents above the first model", None, _RANKS,
                       "tab:anly_rank_main"),
    "position": FigureKind("share on BOS and entropy by position of the query: lines by run, of one run all layers",
                           "heads"),
    "heatmap": FigureKind("a measure of each layer and head", None, tuple(dict.fromkeys(("bos_abs", *_WHOLE)))),
    "summary": FigureKind("sink rate, share on BOS, distance and similarity of heads, by layer", "heads"),
}  # fmt: skip


@dataclass(frozen=True)
class FigureRequest:
    """Options of a figure; None and empty: the figure's default."""

    layers: tuple[int, ...] = ()
    """From 0, or from -1 for the last one backwards."""
    tasks: tuple[str, ...] = ()
    band: Band | None = None
    measure: str | None = None
    paper: bool = False
    """Whether to draw what the paper draws, without its alternative."""
    size: Size | None = None
    notes: bool = False
    """Whether the caption is below the figure too."""

    def check(self, name: str) -> None:
        check_known("figure", [name], KINDS)
        kind = KINDS[name]
        given = ("--band", self.band, kind.band), ("--measure", self.measure, kind.measures)
        for option, value, applies in (*given, ("--paper", self.paper, kind.paper)):
            if value and not applies:
                raise UsageError(f"{option} does not apply to figure {name}; leave it out")
        if self.measure is not None and self.measure not in kind.measures:
            raise UnknownNameError(f"measure of figure {name}", self.measure, kind.measures)
        if name == "categories" and self.paper and self.band == "samples":
            raise UsageError("--paper takes a softmax of each head's means over samples; leave out --band samples")

    def band_of(self, name: str) -> Band:
        """Return what a figure's band is over; samples where it cannot be chosen."""
        kind = KINDS[name]
        return (self.band if kind.band else None) or kind.band or "samples"

    def measure_of(self, name: str) -> str:
        kind = KINDS[name]
        return self.measure or (self.paper and kind.paper_measure) or kind.measures[0]
