"""Computer of an analysis. In: a loaded model and batches of sequences. Out: the journal's rows, as an Arrow table."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from evalkit.benchmarks.attention.attention_calls import MapBlocks
from evalkit.benchmarks.attention.documents import AnalysedSequence
from evalkit.benchmarks.attention.groups import FINISHED, RANK, RANKED_LAYERS, SINK_SHARE, AttentionRow, chosen_layers
from evalkit.benchmarks.attention.map_blocks import MapReader
from evalkit.benchmarks.attention.measures import Floats, Reading, measures_of, position_edges
from evalkit.benchmarks.base import Batch, Budget
from evalkit.display import Say
from evalkit.errors import ScoringError
from evalkit.models.memory import is_out_of_memory, refuse_to_split
from evalkit.runs.columns import schema_of
from evalkit.runs.traits import BatchDevice, place_of

if TYPE_CHECKING:
    from evalkit.benchmarks.attention.plan import AttentionPlan
    from evalkit.models.loading.load import LoadedModel

_CHECKED_TOKENS = 48
_BY_POSITION = "_by_position"

Values = Mapping[tuple[str, int | None], NDArray[np.floating]]
"""(measure, first position of its bin, or None) → [heads] values."""


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


def setup_of(plan: AttentionPlan) -> AttentionSetup:
    """Return the requested measures and layers."""
    specification = plan.manifest["specification"]
    return AttentionSetup(plan.groups, tuple(specification["layers"]), specification.get("window"))


class Analysis:
    """Computer of batches of sequences; a batch has no token budget."""

    def __init__(self, setup: AttentionSetup, loaded: LoadedModel, _: Budget, say: Say) -> None:
        self._reader = reader = MapReader(loaded.model, say)
        chosen = chosen_layers(setup.layers, reader.layers)
        ranked = chosen if setup.layers else chosen[-RANKED_LAYERS:]
        groups = {layer: tuple(g for g in setup.groups if g != RANK or layer in ranked) for layer in chosen}
        self._groups = {layer: members for layer, members in groups.items() if members}
        sample = np.arange(_CHECKED_TOKENS, dtype=np.int64) * 37 % loaded.tokenizer.vocab_size
        sample[0] = loaded.bos_id if loaded.bos_id is not None else 0
        reader.check(sample)
        self.facts = AttentionFacts(min(loaded.window, setup.window or loaded.window))
        self.about: dict[str, Any] = {
            "loaded": loaded.facts(),
            "maps": reader.kind,
            "attention_layers": list(reader.layers),
            "layers": {str(layer): list(members) for layer, members in self._groups.items()},
        }
        self._place = place_of(loaded.device, reader.kind)

    def place(self, batch: Batch | None = None) -> BatchDevice:
        """Return the model's device."""
        return self._place

    def compute(self, batch: Batch) -> pa.Table:
        """Measure the attention of a batch."""
        return rows_of([(sequence, self._measured(sequence)) for sequence in batch.content])

    def _measured(self, sequence: AnalysedSequence) -> dict[int, Values]:
        last = int(sequence.readers[-1])
        reading = Reading(sequence.categories, sequence.readers, last, sequence.has_bos)
        by_layer: dict[int, Values] = {}

        def use(layer: int, blocks: MapBlocks) -> None:
            by_layer[layer] = _values(measures_of(blocks, reading, self._groups[layer]), len(sequence.tokens))

        try:
            self._reader.read(sequence.tokens, tuple(self._groups), use)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            label, tokens = f"{sequence.subtask} document {sequence.doc_id}", f"{len(sequence.tokens):,} tokens"
            refuse_to_split(f"{label}, {tokens}")
            raise ScoringError(
                f"{label}: out of memory on {tokens}; leave rank out of --measures, give fewer --layers, or a smaller "
                "--context"
            ) from error
        return by_layer


def _values(measured: Mapping[str, Floats], tokens: int) -> Values:
    """Return the measures of a layer with the first position of each bin, and the sink rates."""
    values: dict[tuple[str, int | None], Floats] = {}
    for name, of_heads in measured.items():
        if name.endswith(_BY_POSITION):
            columns = zip(position_edges(tokens)[:-1], of_heads.T, strict=True)
            values |= {(name.removesuffix(_BY_POSITION), start): column for start, column in columns}
        else:
            values[name, None] = of_heads
    for sink in ("sink", "sink_abs"):
        if sink in measured:
            values[f"{sink}_rate", None] = (measured[sink] > SINK_SHARE).astype(np.float64)
    return values


def rows_of(measured: Sequence[tuple[AnalysedSequence, Mapping[int, Values]]]) -> pa.Table:
    """Return the rows of some sequences, each with layer → its measures."""
    finished: Values = {(FINISHED, None): np.zeros(1)}
    tables = [_layer_rows(sequence, 0, finished) for sequence, _ in measured]
    tables += [
        _layer_rows(sequence, layer, values)
        for sequence, by_layer in measured
        for layer, values in by_layer.items()
        if values
    ]
    return pa.concat_tables(tables)


def _layer_rows(sequence: AnalysedSequence, layer: int, values: Values) -> pa.Table:
    names, positions = zip(*values, strict=True)
    # Rounded as in the final table: the journal's compression halves
    table = np.stack([np.asarray(row, np.float32) for row in values.values()]).astype(np.float64)
    measures, heads = table.shape
    of_measure = pa.array(np.repeat(np.arange(measures), heads))
    of_sequence = {name: getattr(sequence, name) for name in ("subtask", "doc_id", "choice", "cluster", "truncated")}
    repeated = of_sequence | {
        "sequence": zlib.crc32(sequence.tokens.tobytes()),
        "tokens": len(sequence.tokens),
        "layer": layer,
    }
    columns = {name: pa.repeat(value, table.size) for name, value in repeated.items()}
    columns |= {
        "head": pa.array(np.tile(np.arange(heads), measures)),
        "measure": pa.array(names).take(of_measure),
        "position": pa.array(positions, pa.int64()).take(of_measure),
        "value": pa.array(table.reshape(-1)),
    }
    return pa.table(columns, schema=schema_of(AttentionRow))
