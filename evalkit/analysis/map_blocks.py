"""Effective attention maps of any length, in blocks of query rows.

In: a model and one sequence. Out: the `MapBlocks` of each requested layer, passed to a callback while the model runs.
The model attends by scaled_dot_product_attention; a block of the map is computed from the layer's queries and keys when
the callback asks for it. So a pass costs about as much as a forward pass without maps, and memory grows with the
length, not with its square (models with sliding windows need their mask, a byte for each query and key).

Models whose attention does not use transformers' registry of attention functions run with `eager` attention; their
whole maps are passed in the same blocks, a layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evalkit.analysis.attention_calls import AttentionCall, Recording, Unrecorded, recording
from evalkit.analysis.blocks import ELEMENTS, CallMap, Combine, MapBlocks, WholeMap
from evalkit.analysis.layers import attention_modules, names_attention, run_layers
from evalkit.analysis.map_check import largest_difference
from evalkit.analysis.maps import requested_modules, stream_attention_maps

Use = Callable[[int, MapBlocks], None]
"""Callback with a layer's number, from 0, and its map."""

TOLERANCE = 1e-5
"""Largest allowed difference of a weight from eager attention's in `MapReader.check`, in float32."""
LONGEST = 64
"""Maximum tokens that `MapReader.check` compares."""
_PROBE = 4
"""Tokens of the sequence that determines the heads of each layer."""


class MapReader:
    """Reads the attention maps of a model.

    Runs the model once over four tokens to find its layers, their heads, and whether their maps can be computed from
    queries and keys.

    Args:
        model: a Hugging Face causal language model.
        say: called with a line if the model must be read with eager attention.
        elements: maximum elements of a block.

    Raises:
        CheckpointError: the model has no attention maps, or hides them.
    """

    def __init__(self, model: Any, say: Callable[[str], None], *, elements: int = ELEMENTS) -> None:
        self._model, self._say, self._elements = model, say, elements
        self._modules = attention_modules(model)
        self._eager = False
        self.heads: dict[int, int] = {}
        """Heads of each layer; pairs of heads of differential attention."""
        probe = np.arange(_PROBE) % model.get_input_embeddings().num_embeddings
        try:
            # Code of such models may fail under an unknown name of attention (MPT)
            if not (model.is_backend_compatible() or names_attention(model)):
                raise Unrecorded("its attention does not use transformers' registry of attention functions")
            self.read(probe, self.layers, self._count)
        except Unrecorded as reason:
            self._read_eagerly(str(reason))
            self.read(probe, self.layers, self._count)

    @property
    def kind(self) -> str:
        """How maps are read: "blocks", or "eager" for whole maps."""
        return "eager" if self._eager else "blocks"

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers with attention, from 0, ascending."""
        return tuple(self._modules)

    def read(self, tokens: NDArray[np.integer[Any]], layers: Collection[int], use: Use) -> None:
        """Run the model once over a sequence and pass the maps of some layers to a callback.

        Layers after the last requested one are not run.

        Args:
            tokens: [tokens] ids.
            layers: numbers from 0.
            use: called with (layer, map) in the layers' order; the map may be read until it returns.

        Raises:
            UsageError: there is no such layer.
            CheckpointError: a layer returns no map.
        """
        modules = requested_modules(self._modules, layers)
        if not modules:
            return
        ids = self._ids(tokens)
        if self._eager:
            stream_attention_maps(self._model, ids, partial(self._pass_whole, use), layers=modules)
            return
        active = Recording(modules.values(), self._attend)
        with recording(self._model, active):
            run_layers(self._model, modules, ids, lambda layer, module, _: use(layer, self._map(active, module)))

    def check(self, tokens: NDArray[np.integer[Any]]) -> None:
        """Compare all maps of a short sequence with eager attention's, and read with the latter if they differ.

        Models of half precision are compared in float32 (`map_check.py`).

        Args:
            tokens: [tokens] ids; the first 64 are compared.
        """
        if self._eager:
            return
        shown = np.asarray(tokens)[:LONGEST]
        try:
            layer, gap = largest_difference(
                self._model, self._modules, self._ids(shown), partial(self.read, shown, self.layers)
            )
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, KeyError) as error:
            return self._read_eagerly(f"they could not be compared ({type(error).__name__})")
        # NaN differs
        if not gap <= TOLERANCE:
            self._read_eagerly(f"a weight of layer {layer} differs by {gap:.1g}")

    def _ids(self, tokens: NDArray[np.integer[Any]]) -> torch.Tensor:
        """Return [1, tokens] on the device of the model's embedding."""
        ids = torch.as_tensor(np.asarray(tokens, dtype=np.int64))[None]
        return ids.to(self._model.get_input_embeddings().weight.device)

    def _map(self, active: Recording, module: Any) -> MapBlocks:
        call = active.take(module)
        combine: Combine | None = None
        if hasattr(module, "effective_map"):
            combine = partial(module.effective_map, dtype=call.query.dtype)
        return CallMap(call, combine, self._elements)

    def _attend(self, call: AttentionCall, value: torch.Tensor) -> torch.Tensor:
        return CallMap(call, None, self._elements).attend(value)

    def _pass_whole(self, use: Use, layer: int, seen: torch.Tensor) -> None:
        use(layer, WholeMap(seen[0], self._elements))

    def _count(self, layer: int, found: MapBlocks) -> None:
        self.heads[layer] = found.heads

    def _read_eagerly(self, reason: str) -> None:
        self._eager = True
        self._say(
            f"attention maps of {type(self._model).__name__} are read whole, with eager attention: {reason}; "
            "long sequences need memory for a layer's map"
        )
