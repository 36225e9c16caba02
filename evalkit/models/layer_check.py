"""Check that every layer of a loaded model uses its rotary modules.

In: a model and its rotary modules. Out: nothing, or a `CheckpointError` that names the layers. Each layer is run in
isolation on its undisturbed input while the frequencies or the attention scaling of the modules are perturbed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from evalkit.errors import CheckpointError, first_line
from evalkit.models.parts import base_of, layers_of

_TRIED = 16
"""Tokens of the forward passes of this check."""
_LEAST_EFFECT = 0.05
"""Least effect of a changed attention scaling, relative to that of doubled frequencies. Eleven architectures and the
demo checkpoint have 0.3 to 6; where queries and keys are normalised after rotation it is rounding, at most 0.015."""

_LEAST_POSITIONS = 0.1
"""Least effect of reordered tokens on a layer with positions, relative to that of doubled frequencies on rotating
layers. It is about 1, and rounding (at most 0.0002) in layers without positions."""


def check_layers(given: str, model: Any, modules: list[Any], scaled: bool) -> None:
    """Raise if a layer encodes positions without the model's rotary modules, such as all of Falcon's under ALiBi.

    Also raise, if cos and sin are to be `scaled`, for a model that normalises queries and keys after rotation
    (NanoChat, HunYuan): scaling does not change its logits. Layers without positions (SmolLM3's fourth) are accepted.

    Args:
        given: the checkpoint's name for messages.
        model: loaded, on its device.
        modules: its rotary modules, with `inv_freq` and `attention_scaling`.
        scaled: whether the extension scales cos and sin.

    Raises:
        CheckpointError: a layer does not depend on the modules, or the model does not run.
    """
    name = type(model).__name__
    rows = model.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(_TRIED, device=model.device) % rows)[None]
    clean = _run_layers(given, model, ids)

    def effects(perturb: Callable[[Any, Any], None]) -> list[float]:
        own = [(module, module.attention_scaling, module.inv_freq.clone()) for module in modules]
        hooks = [module.register_forward_pre_hook(perturb) for module in modules]
        try:
            return _changes(clean, _run_layers(given, model, ids, [before for before, _ in clean]))
        finally:
            for hook, (module, scaling, frequencies) in zip(hooks, own, strict=True):
                hook.remove()
                module.attention_scaling = scaling
                module.inv_freq.copy_(frequencies)

    noise, rotated = effects(lambda *_: None), effects(_double_frequencies)
    rotating = [number for number, own in enumerate(rotated) if own > 2 * noise[number]]
    if not rotating:
        raise CheckpointError(
            f"{given}: the layers of {name} do not use its rotary modules, so stretching would have no effect; "
            "give --context none"
        )
    if len(rotating) < len(clean):
        # The last token of a layer without positions does not depend on the order of the tokens before it
        reordered = [torch.cat((before[:, :-1].flip(1), before[:, -1:]), dim=1) for before, _ in clean]
        moved = _changes(clean, _run_layers(given, model, ids, reordered), last=True)
        least = _LEAST_POSITIONS * float(np.median([rotated[number] for number in rotating]))
        others = [number for number in range(len(clean)) if number not in rotating and moved[number] > least]
        if others:
            raise CheckpointError(
                f"{given}: {name} encodes positions without its rotary modules in layers "
                f"{', '.join(map(str, others))} (from 0), which would stay unstretched; give --context none"
            )
    if scaled:
        scaling_effects = effects(_increase_scaling)
        if any(scaling_effects[number] < _LEAST_EFFECT * rotated[number] for number in rotating):
            raise CheckpointError(
                f"{given}: {name} cancels yarn's attention factor, probably because queries and keys are "
                "normalised after rotation; use --context-method ntk or linear"
            )


_States = list[tuple[torch.Tensor, torch.Tensor]]
"""Input and output of each layer, [1, tokens, d_model]; the output in float32."""


def _run_layers(given: str, model: Any, ids: torch.Tensor, inputs: list[torch.Tensor] | None = None) -> _States:
    """Run [1, tokens] through the base model and record each layer; with `inputs`, these replace the layers' inputs.

    With `inputs`, the output of a layer shows only perturbations within it, not those of earlier layers.
    """
    found: _States = []

    def enter(_: Any, args: tuple[Any, ...], settings: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        states = args[0] if args else settings["hidden_states"]
        if inputs is not None:
            states = inputs[len(found)]
        found.append((states, states))
        return ((states, *args[1:]), settings) if args else (args, settings | {"hidden_states": states})

    def leave(_: Any, __: Any, out: Any) -> None:
        found[-1] = (found[-1][0], (out[0] if isinstance(out, tuple) else out).float())

    hooks = []
    for layer in layers_of(model):
        hooks += [layer.register_forward_pre_hook(enter, with_kwargs=True), layer.register_forward_hook(leave)]
    try:
        with torch.inference_mode():
            base_of(model)(input_ids=ids, use_cache=False)
    except Exception as error:  # an architecture may fail in any way
        raise CheckpointError(f"{given}: does not run with a stretched context ({first_line(error)})") from error
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _changes(clean: _States, other: _States, last: bool = False) -> list[float]:
    """Mean absolute change of each layer's output, over all tokens or the last one only."""
    tokens = slice(-1, None) if last else slice(None)
    pairs = zip(clean, other, strict=True)
    return [float((after - before)[:, tokens].abs().mean()) for (_, before), (_, after) in pairs]


def _double_frequencies(module: Any, _: Any) -> None:
    module.inv_freq.mul_(2)


def _increase_scaling(module: Any, _: Any) -> None:
    module.attention_scaling = module.attention_scaling + 1
