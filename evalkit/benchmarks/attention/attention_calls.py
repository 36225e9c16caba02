"""Recording the queries and keys of a model's attention layers while it runs.

In: a model and some of its attention modules. Out: an `AttentionCall` for each, from which its map can be computed. The
layers' outputs come from scaled_dot_product_attention, so no map exists, and the hidden states are the model's own.
Soft caps and attention sinks, which that function lacks, are computed in blocks of rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from evalkit.compatibility.transformers import keeps_state
from evalkit.errors import CheckpointError
from evalkit.models.parts import base_of, layers_of
from evalkit.scoring.attention import SPECIAL, Product, attention_named

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
        modules = {module.layer_idx: module for module in model.modules() if isinstance(module, kind)}
    # A state in place of keys (RWKV) is no attention, whatever its module is called
    elif kind is None and keeps_state(model):
        modules = {}
    else:
        modules = {}
        for number, layer in enumerate(layers_of(model)):
            named = (module for module in layer.modules() if _ATTENTION.search(type(module).__name__))
            if (outermost := next(named, None)) is not None:
                modules[number] = outermost
    if not modules:
        raise CheckpointError(f"{type(model).__name__} has no attention modules that transformers names, so no maps")
    return dict(sorted(modules.items()))


def names_attention(model: Any) -> bool:
    """Return whether transformers registers a class of attention modules for a model, which return maps unasked."""
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
    """Run a model on [batch, tokens] ids up to the last of some attention modules; call a function after each of them.

    With `maps`, maps are requested from the modules, for those that return them on request only.
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


NAME = "evalkit_maps"
"""Name of this attention in transformers' registry of attention functions."""
_SUPPORTED = ("softcap", "s_aux")
"""Special arguments of transformers' attention functions that this one supports."""
_SIGNED = "signed_attention"
"""Name of cog attention's product, which may be of another copy of its module."""


class Unrecorded(Exception):
    """A layer's attention cannot be recorded: it does not use the registry, or has a feature that is not supported."""


@dataclass(frozen=True)
class AttentionCall:
    """Arguments of one call of an attention function, for one sequence."""

    query: torch.Tensor
    """[heads, tokens, size]."""
    key: torch.Tensor
    """[key-value heads, tokens, size]."""
    scale: float
    """Factor of the logits."""
    mask: torch.Tensor | None
    """[1 or heads, tokens, tokens], boolean (True: visible) or added to the logits; None: `causal` says."""
    causal: bool
    """Whether queries attend to keys up to their own position where there is no mask."""
    softcap: float | None
    """c of the logits c · tanh(logits / c); None: no cap."""
    sinks: torch.Tensor | None
    """[heads] a further logit of each row, whose weight is dropped; None: no sinks."""
    signed: bool
    """Whether this is cog attention: the logits' signs times the softmax of their absolute values."""


class Recording:
    """Calls of some attention modules, until they are taken.

    `attend` computes [1, heads, tokens, width] from a call with a soft cap or sinks, and values [1, key-value heads,
    tokens, width].
    """

    def __init__(self, modules: Collection[Any], attend: Callable[[AttentionCall, torch.Tensor], torch.Tensor]) -> None:
        self.attend = attend
        self._calls: dict[int, list[AttentionCall]] = {id(module): [] for module in modules}

    def add(self, module: Any, call: AttentionCall) -> None:
        """Keep a call if its module is recorded."""
        if id(module) in self._calls:
            self._calls[id(module)].append(call)

    def take(self, module: Any) -> AttentionCall:
        """Return the first call of a module and forget all of them.

        Differential attention calls twice with the same queries and keys, for the two halves of its values.

        Raises:
            Unrecorded: the module made no call, several calls, or is a variant of an earlier evalkit.
        """
        calls, self._calls[id(module)] = self._calls[id(module)], []
        if not calls:
            raise Unrecorded(f"{type(module).__name__} does not use transformers' registry of attention functions")
        combines = hasattr(module, "effective_map")
        if hasattr(module, "variant") and not combines:
            raise Unrecorded(f"{type(module).__name__} does not combine maps itself")
        if len(calls) > 1 and not combines:
            raise Unrecorded(f"{type(module).__name__} attends {len(calls)} times")
        return calls[0]


_active: Recording | None = None


@contextmanager
def recording(model: Any, active: Recording) -> Iterator[None]:
    """Make a model attend by the recording function inside the context."""
    global _active
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    _active = active
    try:
        with attention_named(model, NAME):
            yield
    finally:
        _active = None


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    product: Product | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Attend and record; transformers' signature, [1, heads, tokens, size] → [1, tokens, heads, size]."""
    if _active is None:
        raise Unrecorded("attention outside of a recording")
    call = _call_of(module, query, key, attention_mask, scaling, product, settings)
    _active.add(module, call)
    if product is not None:
        # A missing mask means causal, for the product too
        return product(query, key, value, attention_mask, call.scale).transpose(1, 2), None  # type: ignore[arg-type]
    if call.softcap is not None or call.sinks is not None:
        return _active.attend(call, value).transpose(1, 2).contiguous(), None
    settings = {name: given for name, given in settings.items() if name not in SPECIAL}
    attended: tuple[torch.Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **settings
    )
    return attended


def _call_of(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    product: Product | None,
    settings: dict[str, Any],
) -> AttentionCall:
    name = type(module).__name__
    for special in SPECIAL:
        if special not in _SUPPORTED and settings.get(special) is not None:
            raise Unrecorded(f"{name} passes {special}")
    if product is not None and getattr(product, "__name__", "") != _SIGNED:
        raise Unrecorded(f"{name} passes a product that is not cog attention's")
    if len(query) != 1 or query.shape[2] != key.shape[2]:
        raise Unrecorded(f"{name} attends to other keys than the sequence's")
    if mask is not None and (mask.dim() != 4 or mask.shape[2:] != (query.shape[2], key.shape[2])):
        raise Unrecorded(f"{name} passes a mask of shape {tuple(mask.shape)}")
    given = settings.get("is_causal")
    return AttentionCall(
        query=query[0],
        key=key[0],
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        mask=None if mask is None else mask[0],
        causal=bool(getattr(module, "is_causal", True) if given is None else given),
        softcap=settings.get("softcap"),
        sinks=settings.get("s_aux"),
        signed=product is not None,
    )


_attention.takes_product = True  # type: ignore[attr-defined]  # read by attention modules without a softmax
