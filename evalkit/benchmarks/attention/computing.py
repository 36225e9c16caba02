"""Computer of an analysis: a loaded model, and the measures of a batch of sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from evalkit.benchmarks.attention.blocks import MapBlocks
from evalkit.benchmarks.attention.documents import AnalysedSequence
from evalkit.benchmarks.attention.groups import RANK, RANKED_LAYERS, SINK_SHARE, chosen_layers
from evalkit.benchmarks.attention.map_blocks import MapReader
from evalkit.benchmarks.attention.map_sums import Floats, Reading
from evalkit.benchmarks.attention.measures import measures_of, position_edges
from evalkit.benchmarks.attention.rows import Values, rows_of
from evalkit.benchmarks.base import Batch
from evalkit.display import Say
from evalkit.errors import ScoringError
from evalkit.models.memory import is_out_of_memory, refuse_to_split
from evalkit.runs.batch_devices import BatchDevice, place_of

if TYPE_CHECKING:
    import pyarrow as pa

    from evalkit.models.load import LoadedModel

_CHECKED_TOKENS = 48
_BY_POSITION = "_by_position"
_SINKS = ("sink", "sink_abs")


@dataclass(frozen=True)
class AttentionFacts:
    """Properties of a model that planning needs."""

    window: int
    """Context window in tokens."""


@dataclass(frozen=True)
class AttentionSetup:
    """What the analysis needs of a plan."""

    groups: tuple[str, ...]
    """Groups of measures."""
    layers: tuple[int, ...]
    """Requested layers, negative ones from the last one backwards; empty: all."""
    window: int | None = None
    """Requested tokens of a window of a text; None: the model's."""


class Analysis:
    """Computer of batches of sequences."""

    def __init__(self, setup: AttentionSetup, loaded: LoadedModel, say: Say) -> None:
        self._reader = reader = MapReader(loaded.model, say)
        self._by_layer = _groups_by_layer(setup, reader.layers)
        bos = loaded.bos_id if loaded.bos_id is not None else 0
        sample = np.arange(_CHECKED_TOKENS, dtype=np.int64) * 37 % loaded.tokenizer.vocab_size
        sample[0] = bos
        reader.check(sample)
        self.facts = AttentionFacts(min(loaded.window, setup.window or loaded.window))
        self.about: dict[str, Any] = {
            "loaded": loaded.facts(),
            "maps": reader.kind,
            "attention_layers": list(reader.layers),
            "layers": {str(layer): list(groups) for layer, groups in self._by_layer.items()},
        }
        self._place = place_of(loaded.device, reader.kind)

    def place(self, batch: Batch | None = None) -> BatchDevice:
        """Return the model's device."""
        return self._place

    def compute(self, batch: Batch) -> pa.Table:
        """Measure the attention of a batch."""
        return rows_of((sequence, self._measured(sequence)) for sequence in batch.content)

    def _measured(self, sequence: AnalysedSequence) -> dict[int, Values]:
        last = int(sequence.readers[-1])
        reading = Reading(sequence.categories, sequence.readers, last, sequence.has_bos)
        found: dict[int, Values] = {}

        def use(layer: int, blocks: MapBlocks) -> None:
            found[layer] = _values(measures_of(blocks, reading, self._by_layer[layer]), len(sequence.tokens))

        try:
            self._reader.read(sequence.tokens, tuple(self._by_layer), use)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            label, tokens = f"{sequence.subtask} document {sequence.doc_id}", f"{len(sequence.tokens):,} tokens"
            refuse_to_split(f"{label}, {tokens}")
            raise ScoringError(
                f"{label}: out of memory on {tokens}; leave rank out of --measures, give fewer --layers, or a smaller "
                "--context"
            ) from error
        return found


def _values(measured: Mapping[str, Floats], tokens: int) -> Values:
    """Return the measures of a layer with the first position of each bin, and the sink rates."""
    found: dict[tuple[str, int | None], Floats] = {}
    for name, values in measured.items():
        if name.endswith(_BY_POSITION):
            starts = position_edges(tokens)[:-1]
            columns = zip(starts, values.T, strict=True)
            found |= {(name.removesuffix(_BY_POSITION), start): column for start, column in columns}
        else:
            found[name, None] = values
    rates = {(f"{name}_rate", None): found[name, None] > SINK_SHARE for name in _SINKS if (name, None) in found}
    return found | {key: over.astype(np.float64) for key, over in rates.items()}


def _groups_by_layer(setup: AttentionSetup, layers: tuple[int, ...]) -> dict[int, tuple[str, ...]]:
    """Return layer → the groups that are measured there.

    Raises:
        UsageError: the model has no such layer.
    """
    chosen = chosen_layers(setup.layers, layers)
    ranked = chosen if setup.layers else chosen[-RANKED_LAYERS:]
    by_layer = {layer: tuple(g for g in setup.groups if g != RANK or layer in ranked) for layer in chosen}
    return {layer: groups for layer, groups in by_layer.items() if groups}
