"""What `evalkit cost` measures of a model's attention maps.

In: a loaded model and the tokens of a text. Out: means over the heads of each layer, with their columns and note.
"""

from __future__ import annotations

import numpy as np
import torch

from evalkit.attention.attention_calls import MapBlocks
from evalkit.attention.documents import Reading
from evalkit.attention.map_blocks import MapReader
from evalkit.attention.measures import measures_of
from evalkit.display import Say
from evalkit.models.loading.load import LoadedModel
from evalkit.studies.cost import LayerMeasures

_COLUMNS = {"sink_abs_rate": ("sinks, %", 100.0, 1), "sparsity": ("near zero, %", 100.0, 1)}
_NOTE = (
    "sinks: heads with a mean share above 0.3 on the first token; near zero: mean over tokens of the share of their "
    "|weights| below 1 % of the largest"
)


def _head_means(loaded: LoadedModel, ids: torch.Tensor, say: Say) -> dict[int, dict[str, float]]:
    """Return layer → measure → mean over its heads; of sinks only in 64 tokens or more."""
    tokens = ids[0].cpu().numpy()
    starts_with_bos = int(tokens[0]) == loaded.bos_id
    reader = MapReader(loaded.model, say)
    reading = Reading(None, np.arange(1, len(tokens)), len(tokens) - 1, starts_with_bos)
    means = dict[int, dict[str, float]]()

    def use(layer: int, blocks: MapBlocks) -> None:
        measured = measures_of(blocks, reading, ("sink", "sparsity"))
        means[layer] = {name: float(heads.mean()) for name, heads in measured.items() if name in _COLUMNS}

    reader.read(tokens, reader.layers, use)
    return means


MAPS = LayerMeasures(_COLUMNS, _NOTE, _head_means)
