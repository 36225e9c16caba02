"""Comparison of maps in blocks with those that a model returns under eager attention.

In: a model, a short sequence, and a function that reads its maps in blocks. Out: the largest difference of a weight.
Both implementations round differently, and over many layers that moves weights by more than 1e-5 (2e-5 in layer 29 of
SmolLM2-135M). So in the second pass each attention module gets the hidden states that it had in the first, and only the
layer's own map is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from evalkit.analysis.blocks import MapBlocks
from evalkit.analysis.maps import stream_attention_maps
from evalkit.scoring.precision import HALF, in_float32

Read = Callable[[Callable[[int, MapBlocks], None]], None]
"""Reads all layers' maps of the sequence, and passes each to its argument with its layer."""


def largest_difference(model: Any, modules: Mapping[int, Any], ids: torch.Tensor, read: Read) -> tuple[int, float]:
    """Return the layer whose map differs most from eager attention's, and the largest difference of its weights.

    Models of half precision run in float32, since their own rounding is as large as the effect of an error.

    Args:
        model: a Hugging Face causal language model.
        modules: its attention modules by layer.
        ids: [1, tokens].
        read: see `Read`; for the sequence `ids`.
    """
    half = any(parameter.dtype in HALF for parameter in model.parameters())
    with in_float32(model) if half else nullcontext():
        expected: dict[int, torch.Tensor] = {}
        states: dict[int, torch.Tensor] = {}
        with _inputs_through(modules, states.setdefault):
            stream_attention_maps(model, ids, lambda layer, seen: expected.update({layer: _kept(seen[0])}))
        gaps: dict[int, float] = {}

        def compare(layer: int, found: MapBlocks) -> None:
            whole = _kept(found.whole())
            same = whole.shape == expected[layer].shape
            gaps[layer] = float((whole - expected.pop(layer)).abs().max()) if same else torch.inf

        with _inputs_through(modules, lambda layer, given: states.get(layer, given)):
            read(compare)
    # NaN is the largest difference
    worst = max(gaps, key=lambda layer: (gaps[layer] != gaps[layer], gaps[layer]))
    return worst, gaps[worst]


@contextmanager
def _inputs_through(modules: Mapping[int, Any], change: Callable[[int, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Pass the hidden states that enter attention modules through a function of layer and states."""

    def hook_of(layer: int) -> Callable[..., Any]:
        def hook(_: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
            if args:
                return (change(layer, args[0]), *args[1:]), given
            return args, given | {"hidden_states": change(layer, given["hidden_states"])}

        return hook

    hooks = [module.register_forward_pre_hook(hook_of(layer), with_kwargs=True) for layer, module in modules.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _kept(seen: torch.Tensor) -> torch.Tensor:
    return seen.float().cpu()
