"""Names and options of the figures of finished analyses; `making.py` makes them.

In: the options of `evalkit figure`. Out: a validated `FigureRequest`. Neither pandas nor matplotlib is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from evalkit.benchmarks.attention.groups import MEASURES, RANK
from evalkit.errors import UnknownNameError, UsageError

Band = Literal["heads", "samples"]
"""What the standard deviation of a band is over."""


@dataclass(frozen=True)
class FigureKind:
    """A figure."""

    words: str
    """Description in one line."""
    band: Band | None = None
    """The default; None: `--band` does not apply."""
    measures: tuple[str, ...] = ()
    """What `--measure` chooses from, the default first; empty: it does not apply."""
    as_in_paper: bool = False
    """Whether `--paper` applies."""


_BY_POSITION = tuple(name for name, info in MEASURES.items() if info.by_position)
_RANKS = tuple(name for name, info in MEASURES.items() if info.group == RANK)

KINDS = {
    "bos": FigureKind("attention to BOS by position of the query, in one layer (the paper's fig:bos_attn_main)",
                      "heads", _BY_POSITION),
    "categories": FigureKind("shares of four kinds of tokens, by layer (fig:attn_cat_anly)", "heads", as_in_paper=True),
    "entropy": FigureKind("entropy of the last token's weights, by layer: shifted as in fig:entropy_anly_main, and of "
                          "|weights|", "samples", as_in_paper=True),
    "negative": FigureKind("share of negative weights on BOS, by layer (fig:diff_cog_neg_app)", "heads",
                           ("bos_negative", "bos_negative_all")),
    "rank": FigureKind("effective rank by layer, and share of documents above the first run (tab:anly_rank_main)",
                       None, _RANKS),
    "position": FigureKind("share on BOS and entropy by position of the query: lines by run, of one run all layers",
                           "heads"),
    "heatmap": FigureKind("a measure of each layer and head", None, tuple(dict.fromkeys(("bos_abs", *MEASURES)))),
    "summary": FigureKind("sink rate, share on BOS, distance and similarity of heads, by layer", "heads"),
}  # fmt: skip
"""Name → figure."""


@dataclass(frozen=True)
class FigureRequest:
    """Options of a figure."""

    layers: tuple[int, ...] = ()
    """From 0, or from -1 for the last one backwards; empty: the figure's default."""
    tasks: tuple[str, ...] = ()
    """Empty: all."""
    band: Band | None = None
    """None: the figure's default."""
    measure: str | None = None
    """None: the figure's default."""
    paper: bool = False
    """Whether to draw what the paper draws, without its alternative."""

    def check(self, name: str) -> None:
        """Validate the options of one figure.

        Raises:
            UnknownNameError: there is no such figure, or no such measure.
            UsageError: an option does not apply to the figure.
        """
        if name not in KINDS:
            raise UnknownNameError("figure", name, KINDS)
        kind = KINDS[name]
        unused = {
            "--band": self.band is not None and kind.band is None,
            "--measure": self.measure is not None and not kind.measures,
            "--paper": self.paper and not kind.as_in_paper,
        }
        if wrong := [option for option, is_wrong in unused.items() if is_wrong]:
            raise UsageError(f"{wrong[0]} does not apply to figure {name}; leave it out")
        if self.measure is not None and self.measure not in kind.measures:
            raise UnknownNameError(f"measure of figure {name}", self.measure, kind.measures)
        if name == "categories" and self.paper and self.band == "samples":
            raise UsageError("--paper takes a softmax of each head's means over samples; leave out --band samples")

    def band_of(self, name: str) -> Band:
        """Return what a figure's band is over; samples where it cannot be chosen."""
        kind = KINDS[name]
        return (self.band if kind.band else None) or kind.band or "samples"

    def measure_of(self, name: str) -> str:
        """Return the measure of a figure that shows one."""
        return self.measure or KINDS[name].measures[0]
