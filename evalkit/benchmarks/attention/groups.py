"""Names, groups and units of the measures of attention maps. No torch; `measures.py` computes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evalkit.errors import UsageError

MASS, RANK = "mass", "rank"
CATEGORIES = ("bos", "special", "punctuation", "content", "function", "other")
"""Names of the categories of tokens, by number; "special" are special tokens but BOS, and the prompt's markers."""
SINK_SHARE = 0.3
"""A head's first token is a sink above this share (Attention-Sink, arXiv 2410.10781)."""
RANKED_LAYERS = 4
"""Layers from the last one whose rank is measured by default; section 5.3 of the paper."""
_SHARE = (0.0, 1.0)


@dataclass(frozen=True)
class MeasureInfo:
    """One measure: a number for each document, layer and head."""

    name: str
    group: str
    """Its name in `--measures`."""
    words: str
    """Description in one line."""
    bounds: tuple[float, float] | None = None
    """Smallest and largest value; None if unbounded, as for anything signed: rows of cog attention are not bounded
    below by 0."""
    by_position: bool = False
    """Whether it is also measured by position of the query."""
    unsigned: str = ""
    """The measure of |weights| that it equals where no weight is negative; empty: none."""
    median: bool = False
    """Whether a layer's heads are summarised by their median, as the paper does for the rank; else by their mean."""

    @property
    def in_percent(self) -> bool:
        """Whether it is a share, printed in percent."""
        return self.bounds == _SHARE


def _infos() -> tuple[MeasureInfo, ...]:
    mass = [
        info
        for name in CATEGORIES
        for info in (
            MeasureInfo(
                f"mass_{name}",
                MASS,
                f"weight of the continuation's tokens on category {name}",
                unsigned=f"mass_abs_{name}",
            ),
            MeasureInfo(f"mass_abs_{name}", MASS, f"share of the continuation's |weights| on category {name}", _SHARE),
        )
    ]
    return (
        MeasureInfo("bos", "bos", "weight on BOS, mean over tokens after the first", None, True, "bos_abs"),
        MeasureInfo("bos_abs", "bos", "share of |weights| on BOS, mean over tokens after the first", _SHARE, True),
        *mass,
        MeasureInfo("entropy", "entropy", "entropy of |weights|, last continuation token, in nats", None, True),
        MeasureInfo("entropy_shifted", "entropy", "entropy of weights - min, as in the paper, in nats"),
        MeasureInfo(
            "bos_negative", "negative", "share of tokens after the first with a negative weight on BOS", _SHARE
        ),
        MeasureInfo("sink", "sink", "mean weight on the first token, first 64 tokens", unsigned="sink_abs"),
        MeasureInfo("sink_abs", "sink", "mean share of |weights| on the first token, first 64 tokens", _SHARE),
        MeasureInfo(
            "sink_rate", "sink", f"share of heads whose sink is above {SINK_SHARE}", _SHARE, unsigned="sink_abs_rate"
        ),
        MeasureInfo("sink_abs_rate", "sink", f"share of heads whose sink_abs is above {SINK_SHARE}", _SHARE),
        MeasureInfo("distance", "distance", "mean distance of |weights|, of tokens after the first, in tokens"),
        MeasureInfo("similarity", "similarity", "mean cosine between a head's map and the layer's others"),
        MeasureInfo(
            RANK, RANK, "effective rank: exp of the entropy of singular values (Roy and Vetterli)", median=True
        ),
        MeasureInfo("rank_squares", RANK, "the same with squared singular values", median=True),
        MeasureInfo(
            "rank_stable", RANK, "stable rank: squared Frobenius norm / squared largest singular value", median=True
        ),
        MeasureInfo("bos_all", "all_tokens", "weight on BOS, mean over all tokens, as in the paper"),
        MeasureInfo(
            "bos_negative_all",
            "all_tokens",
            "share of all tokens with a negative weight on BOS, as in the paper",
            _SHARE,
        ),
    )


MEASURES = {info.name: info for info in _infos()}
"""Name → measure."""
GROUPS = tuple(dict.fromkeys(info.group for info in MEASURES.values()))
"""Groups of measures, the values of `--measures`."""


def measures_of(groups: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the measures of some groups."""
    return tuple(name for name, info in MEASURES.items() if info.group in groups)


def parsed_layers(given: Sequence[str]) -> tuple[int, ...]:
    """Parse the values of `--layers`; repeated ones are left out.

    Raises:
        UsageError: one is not a number.
    """
    try:
        return tuple(dict.fromkeys(int(one) for one in given))
    except ValueError:
        raise UsageError(
            f"--layers {','.join(given)}: expected numbers of layers, from 0, or from -1 for the last one backwards"
        ) from None


def layer_of(number: int, layers: Sequence[int]) -> int | None:
    """Return the layer that a number means; None if there is none.

    Args:
        number: see the module.
        layers: the model's layers with attention, ascending.
    """
    if number >= 0:
        return number if number in layers else None
    return layers[number] if -number <= len(layers) else None


def chosen_layers(given: Sequence[int], layers: Sequence[int]) -> list[int]:
    """Return the layers that numbers mean, ascending; all for no numbers.

    Args:
        given: the numbers.
        layers: the model's layers with attention, ascending.

    Raises:
        UsageError: the model has no such layer.
    """
    found = {one: layer_of(one, layers) for one in given}
    if unknown := [one for one, layer in found.items() if layer is None]:
        raise UsageError(
            f"--layers: the model has no attention layer {unknown[0]}; its layers are {layers[0]} to {layers[-1]}, or "
            f"-1 to {-len(layers)}"
        )
    return sorted({layer for layer in found.values() if layer is not None}) or list(layers)


def described_layers(measured: Sequence[int], layers: Sequence[int]) -> str:
    """Return "all layers", "the last 4 layers" or "layers 0, 5".

    Args:
        measured: some of the layers.
        layers: the model's layers with attention, both ascending.
    """
    if list(measured) == list(layers):
        return "all layers"
    if len(measured) > 1 and list(measured) == list(layers[-len(measured) :]):
        return f"the last {len(measured)} layers"
    return f"layer{'s' * (len(measured) > 1)} {', '.join(map(str, measured))}"
