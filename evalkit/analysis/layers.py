"""Attention modules of a model, and a forward pass that ends with the last one that is read.

In: a model. Out: its attention modules by layer; calls of a function after each of them has run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from evalkit.compatibility.transformers import keeps_state
from evalkit.errors import CheckpointError
from evalkit.models.parts import base_of, layers_of

After = Callable[[int, Any, Any], None]
"""Callback with a layer's number, from 0, its attention module and the module's output."""

_ATTENTION = re.compile(r"(?<!Cross)(?<!Linear)(?<!Lightning)Attention")
"""Class names of attention modules; linear attention has no map."""


def attention_modules(model: Any) -> dict[int, Any]:
    """Return a model's attention modules by layer.

    They are of the class that transformers registers for the model. Models without such a class (BLOOM, MPT, Falcon,
    GPT-2) are searched for the outermost module of each layer whose class is named as attention. Layers without
    attention, which hybrid models have, are left out.

    Raises:
        CheckpointError: the model has no attention, or hides its maps.
    """
    kind: Any = model.can_record_outputs.get("attentions")
    if getattr(kind, "__name__", "") == "DiffLlamaAttention":
        raise CheckpointError(
            "DiffLlama returns the two softmax maps of each pair and not their difference; "
            "convert it to an evalkit checkpoint with `evalkit models convert`"
        )
    if names_attention(model):
        found = {module.layer_idx: module for module in model.modules() if isinstance(module, kind)}
    # A state in place of keys (RWKV) is no attention, whatever its module is called
    elif kind is None and keeps_state(model):
        found = {}
    else:
        outermost = {layer: _outermost(module) for layer, module in enumerate(layers_of(model))}
        found = {layer: module for layer, module in outermost.items() if module is not None}
    if not found:
        raise CheckpointError(f"{type(model).__name__} has no attention modules that transformers names, so no maps")
    return dict(sorted(found.items()))


def names_attention(model: Any) -> bool:
    """Return whether transformers registers a class of attention modules for a model.

    These modules return their maps unasked, if their attention function does; others on request.
    """
    return isinstance(model.can_record_outputs.get("attentions"), type)


def run_layers(
    model: Any,
    modules: Mapping[int, Any],
    input_ids: torch.Tensor,
    after: After,
    *,
    attention_mask: torch.Tensor | None = None,
    maps: bool = False,
) -> None:
    """Run a model up to the last of some attention modules, and call a function after each of them.

    Args:
        model: a Hugging Face causal language model.
        modules: by layer, at least one.
        input_ids: [batch, tokens].
        after: called in the layers' order.
        attention_mask: [batch, tokens], 0 where padded.
        maps: request maps from the modules, for those that return them on request only.
    """
    last = max(modules)

    def hook_of(layer: int) -> Callable[[Any, Any, Any], None]:
        def hook(module: Any, _: Any, output: Any) -> None:
            after(layer, module, output)
            if layer == last:
                raise _LastLayerDone

        return hook

    # Before other hooks, which may restore weights that were widened for the module's run
    hooks = [module.register_forward_hook(hook_of(layer), prepend=True) for layer, module in modules.items()]
    requests = {"output_attentions": True} if maps else {}
    try:
        with torch.no_grad():
            base_of(model)(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **requests)
    except _LastLayerDone:
        pass
    finally:
        for hook in hooks:
            hook.remove()


class _LastLayerDone(Exception):
    """The last requested layer has run."""


def _outermost(layer: Any) -> Any:
    """Return the first module of a layer, outermost first, that is named as attention; None if there is none."""
    return next((module for module in layer.modules() if _ATTENTION.search(type(module).__name__)), None)
