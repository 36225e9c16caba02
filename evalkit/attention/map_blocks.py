"""Effective attention maps of any length, in blocks of query rows.

In: a model and one sequence. Out: the `MapBlocks` of each requested layer, passed to a callback while the model runs.
The model attends by scaled_dot_product_attention; a block of the map is computed from the layer's queries and keys when
the callback asks for it, so memory grows with the length, not with its square (but for the mask of a sliding window, a
byte for each query and key). Models whose attention does not use transformers' registry of attention functions run
with `eager` attention; their whole maps are passed in the same blocks, a layer at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evalkit.attention.attention_calls import ELEMENTS, MapBlocks, Unrecorded, WholeMap, recording
from evalkit.compatibility.transformers import attention_of, keeps_state
from evalkit.errors import CheckpointError, UsageError
from evalkit.models.parts import base_of, layers_of
from evalkit.scoring.probe import HALF, in_float32

_ATTENTION = re.compile(r"(?<!Cross)(?<!Linear)(?<!Lightning)Attention")
"""Class names of attention modules; linear attention has no map."""
_TOLERANCE = 1e-5
"""Largest allowed difference of a weight from eager attention's in `MapReader.check`, in float32."""
_CHECKED = 64
"""Maximum tokens that `MapReader.check` compares."""
_PROBE = 4
"""Tokens of the first sequence, which shows whether maps can be read."""

UseMap = Callable[[int, torch.Tensor], None]
"""Callback with a layer's number, from 0, and its map, [batch, heads, query, key]."""


def attention_modules(model: Any) -> dict[int, Any]:
    """Return a model's attention modules by layer, without the layers of hybrid models that have no attention.

    They are of the class that transformers registers for the model. Models without such a class (BLOOM, MPT, Falcon,
    GPT-2) are searched for the outermost module of each layer whose class is named as attention.

    Raises:
        CheckpointError: the model has no attention, or hides its maps.
    """
    kind: Any = model.can_record_outputs.get("attentions")
    if getattr(kind, "__name__", "") == "DiffLlamaAttention":
        raise CheckpointError("DiffLlama returns two maps and not their difference; run `evalkit models convert` on it")
    modules: dict[int, Any] = {}
    if returns_maps(model):
        modules = {module.layer_idx: module for module in model.modules() if isinstance(module, kind)}
    # A state in place of keys (RWKV) is no attention, whatever its module is called
    elif kind is not None or not keeps_state(model):
        for number, layer in enumerate(layers_of(model)):
            named = (module for module in layer.modules() if _ATTENTION.search(type(module).__name__))
            if (outermost := next(named, None)) is not None:
                modules[number] = outermost
    if not modules:
        raise CheckpointError(f"{type(model).__name__} has no attention modules that transformers names, so no maps")
    return dict(sorted(modules.items()))


def returns_maps(model: Any) -> bool:
    """Whether transformers registers a class of attention modules for a model, which return maps unasked."""
    return isinstance(model.can_record_outputs.get("attentions"), type)


class _LastLayerDone(Exception):
    """The last requested layer has run."""


def _run_layers(
    model: Any, modules: Mapping[int, Any], after: Callable[[int, Any, Any], None], **inputs: torch.Tensor | bool | None
) -> None:
    """Run a model up to the last of some attention modules; `after` gets each layer, its module and its output."""
    last = max(modules)

    def hook(layer: int, module: Any, _: Any, output: Any) -> None:
        after(layer, module, output)
        if layer == last:
            raise _LastLayerDone

    with ExitStack() as hooks, suppress(_LastLayerDone), torch.no_grad():
        for layer, module in modules.items():
            # Before other hooks, which may restore weights that were widened for the module's run
            hooks.callback(module.register_forward_hook(partial(hook, layer), prepend=True).remove)
        base_of(model)(use_cache=False, **inputs)


def stream_attention_maps(
    model: Any,
    input_ids: torch.Tensor,
    use: UseMap,
    *,
    attention_mask: torch.Tensor | None = None,
    layers: Collection[int] | None = None,
) -> None:
    """Run a model once and pass its attention maps to a callback.

    Layers after the last requested one are not run. The maps are in the model's dtype: analyse in float32. During the
    call the model uses `eager` attention, the only implementation that returns maps.

    Args:
        model: a Hugging Face causal language model.
        input_ids: [batch, tokens].
        use: called with (layer, map) in the layers' order; a map is [batch, heads, query, key], and [batch, pairs of
            heads, query, key] of differential attention.
        attention_mask: [batch, tokens], 0 where padded; maps of padded queries are undefined.
        layers: numbers from 0; None: all.

    Raises:
        UsageError: there is no such layer.
        CheckpointError: the model's attention layers do not return maps, or not the effective ones.
    """
    modules, tokens = _requested(attention_modules(model), layers), input_ids.shape[1]
    if not modules:
        return

    def after(layer: int, module: Any, output: Any) -> None:
        weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        if weights is None or weights.dim() != 4 or weights.shape[2:] != (tokens, tokens):
            raise CheckpointError(f"{type(module).__name__} returns no attention map")
        use(layer, weights)

    requests = {} if returns_maps(model) else {"output_attentions": True}
    before = attention_of(model.config)
    model.set_attn_implementation("eager")
    try:
        _run_layers(model, modules, after, input_ids=input_ids, attention_mask=attention_mask, **requests)
    finally:
        model.set_attn_implementation(before)


def attention_map(
    model: Any, input_ids: torch.Tensor, layer: int, *, attention_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the effective map of one layer, [batch, heads, query, key]; otherwise as `stream_attention_maps`."""
    maps: dict[int, torch.Tensor] = {}
    stream_attention_maps(model, input_ids, maps.__setitem__, attention_mask=attention_mask, layers=[layer])
    return maps[layer]


def _requested(modules: Mapping[int, Any], layers: Collection[int] | None) -> dict[int, Any]:
    requested = set(modules if layers is None else layers)
    if unknown := sorted(requested - set(modules)):
        raise UsageError(f"no attention layer {unknown[0]}; the model's are {min(modules)} to {max(modules)}")
    return {layer: modules[layer] for layer in sorted(requested)}


class MapReader:
    """Reads the attention maps of a model, in blocks of at most `elements` elements.

    Runs the model once over four tokens to find whether its maps can be computed from queries and keys; otherwise `say`
    is called with a line, and maps are read whole with eager attention. A model without maps is a `CheckpointError`.
    """

    def __init__(self, model: Any, say: Callable[[str], None], *, elements: int = ELEMENTS) -> None:
        self._model, self._say, self._elements = model, say, elements
        self._modules = attention_modules(model)
        self.layers = tuple(self._modules)
        """Layers with attention, from 0, ascending."""
        self.kind = "blocks"
        """How maps are read: "blocks", or "eager" for whole maps."""
        probe = np.arange(_PROBE) % model.get_input_embeddings().num_embeddings
        try:
            # Code of such models may fail under an unknown name of attention (MPT)
            if not (model.is_backend_compatible() or returns_maps(model)):
                raise Unrecorded("its attention does not use transformers' registry of attention functions")
            self.read(probe, self.layers, lambda layer, blocks: None)
        except Unrecorded as reason:
            self._read_eagerly(str(reason))
            self.read(probe, self.layers, lambda layer, blocks: None)

    def read(
        self, tokens: NDArray[np.integer[Any]], layers: Collection[int], use: Callable[[int, MapBlocks], None]
    ) -> None:
        """Run the model once over [tokens] ids, up to the last of some layers, numbered from 0, and pass on their maps.

        `use` is called with (layer, map) in the layers' order; the map may be read until it returns. Raises a
        `UsageError` if there is no such layer, and a `CheckpointError` if a layer returns no map.
        """
        modules, ids = _requested(self._modules, layers), self._ids(tokens)
        if self.kind == "eager":
            stream_attention_maps(
                self._model, ids, lambda layer, maps: use(layer, WholeMap(maps[0], self._elements)), layers=modules
            )
        elif modules:
            with recording(self._model, modules.values(), self._elements) as active:
                _run_layers(
                    self._model, modules, lambda layer, module, _: use(layer, active.take(module)), input_ids=ids
                )

    def check(self, tokens: NDArray[np.integer[Any]]) -> None:
        """Compare all maps of the first 64 tokens with eager attention's, and read with the latter if they differ."""
        if self.kind == "eager":
            return
        try:
            layer, gap = self._largest_difference(np.asarray(tokens)[:_CHECKED])
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, KeyError) as error:
            return self._read_eagerly(f"they could not be compared ({type(error).__name__})")
        # NaN differs
        if not gap <= _TOLERANCE:
            self._read_eagerly(f"a weight of layer {layer} differs by {gap:.1g}")

    def _largest_difference(self, tokens: NDArray[np.integer[Any]]) -> tuple[int, float]:
        """Return the layer whose map differs most from eager attention's, and the largest difference of its weights.

        Each layer is given the hidden states that it has under eager attention. Models of half precision run in
        float32, since their own rounding is as large as the effect of an error.
        """
        half = any(parameter.dtype in HALF for parameter in self._model.parameters())
        expected: dict[int, torch.Tensor] = {}
        states: dict[int, torch.Tensor] = {}
        gaps: dict[int, float] = {}

        def keep(layer: int, maps: torch.Tensor) -> None:
            expected[layer] = maps[0].float().cpu()

        def compare(layer: int, blocks: MapBlocks) -> None:
            whole, eager = blocks.whole().float().cpu(), expected.pop(layer)
            gaps[layer] = float((whole - eager).abs().max()) if whole.shape == eager.shape else torch.inf

        with in_float32(self._model) if half else nullcontext():
            with _inputs_through(self._modules, states.setdefault):
                stream_attention_maps(self._model, self._ids(tokens), keep)
            with _inputs_through(self._modules, lambda layer, own: states.get(layer, own)):
                self.read(tokens, self.layers, compare)
        # NaN is the largest difference
        worst = max(gaps, key=lambda layer: (gaps[layer] != gaps[layer], gaps[layer]))
        return worst, gaps[worst]

    def _ids(self, tokens: NDArray[np.integer[Any]]) -> torch.Tensor:
        ids = torch.as_tensor(np.asarray(tokens, dtype=np.int64))[None]
        return ids.to(self._model.get_input_embeddings().weight.device)

    def _read_eagerly(self, reason: str) -> None:
        self.kind = "eager"
        self._say(
            f"attention maps of {type(self._model).__name__} are read whole, with eager attention: {reason}; "
            "long sequences need memory for a layer's map"
        )


@contextmanager
def _inputs_through(modules: Mapping[int, Any], change: Callable[[int, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Pass the hidden states that enter attention modules through a function of layer and states."""

    def hook(layer: int, _: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if args:
            return (change(layer, args[0]), *args[1:]), named
        return args, named | {"hidden_states": change(layer, named["hidden_states"])}

    with ExitStack() as hooks:
        for layer, module in modules.items():
            hooks.callback(module.register_forward_pre_hook(partial(hook, layer), with_kwargs=True).remove)
        yield
