"""Whether every layer of a loaded model rotates by its rotary modules.

In: a model and its rotary modules. Out: nothing, or a `CheckpointError` that names the layers. Each layer is run by
itself, on what reaches it undisturbed, while the modules turn faster or scale more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from evalkit.errors import CheckpointError, first_line
from evalkit.models.parts import base_of

_TRIED = 16
"""Tokens of the forward passes that show whether the layers use the rotary modules."""
_LEAST_EFFECT = 0.05
"""What another attention scaling changes, as a share of what doubled frequencies change. Eleven architectures and the
demo checkpoint have 0.3 to 6; where queries and keys are normalised afterwards it is rounding, at most 0.015."""

_LEAST_POSITIONS = 0.1
"""What another order of tokens changes in a layer that knows positions, as a share of what doubled frequencies change
in those that rotate: about 1, and rounding (at most 0.0002) where there are none."""


def check_layers(given: str, model: Any, modules: list[Any], scaled: bool) -> None:
    """Refuse a model a layer of which does not rotate by its rotary modules, as none of Falcon's does under ALiBi.

    So too, where cos and sin are to be `scaled`, one that normalises queries and keys after they are rotated (NanoChat,
    HunYuan): its logits stay as they are. Layers without any positions (SmolLM3's fourth) are as they should be.

    Args:
        given: the checkpoint's name for messages.
        model: loaded, on its device.
        modules: its rotary modules, with `inv_freq` and `attention_scaling`.
        scaled: whether they are to scale cos and sin.

    Raises:
        CheckpointError: a layer does not answer to them, or the model does not run.
    """
    name = type(model).__name__
    rows = model.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(_TRIED, device=model.device) % rows)[None]
    clean = _run_layers(given, model, ids)

    def effects(disturb: Callable[[Any, Any], None]) -> list[float]:
        own = [(module, module.attention_scaling, module.inv_freq.clone()) for module in modules]
        hooks = [module.register_forward_pre_hook(disturb) for module in modules]
        try:
            return _changes(clean, _run_layers(given, model, ids, [before for before, _ in clean]))
        finally:
            for hook, (module, scaling, frequencies) in zip(hooks, own, strict=True):
                hook.remove()
                module.attention_scaling = scaling
                module.inv_freq.copy_(frequencies)

    noise, turned = effects(lambda *_: None), effects(_turn_faster)
    rotating = [number for number, own in enumerate(turned) if own > 2 * noise[number]]
    if not rotating:
        raise CheckpointError(
            f"{given}: the layers of {name} do not use its rotary modules, so a stretching would have no effect; "
            "give --context none"
        )
    if len(rotating) < len(clean):
        # What its tokens attend to in another order is the same to a layer that knows no positions
        mixed = [torch.cat((before[:, :-1].flip(1), before[:, -1:]), dim=1) for before, _ in clean]
        moved = _changes(clean, _run_layers(given, model, ids, mixed), last=True)
        least = _LEAST_POSITIONS * float(np.median([turned[number] for number in rotating]))
        others = [number for number in range(len(clean)) if number not in rotating and moved[number] > least]
        if others:
            raise CheckpointError(
                f"{given}: {name} places tokens otherwise than by its rotary modules in its layers "
                f"{', '.join(map(str, others))} (from 0), which would stay unstretched; give --context none"
            )
    if scaled:
        grown = effects(_scale_up)
        if any(grown[number] < _LEAST_EFFECT * turned[number] for number in rotating):
            raise CheckpointError(
                f"{given}: {name} loses yarn's attention factor, as where queries and keys are "
                "normalised after they are rotated; use --context-method ntk or linear"
            )


_States = list[tuple[torch.Tensor, torch.Tensor]]
"""What went into each layer and what came out, [1, tokens, d_model], float32 the latter."""


def _run_layers(given: str, model: Any, ids: torch.Tensor, inputs: list[torch.Tensor] | None = None) -> _States:
    """Run [1, tokens] through the base model; with `inputs`, each layer is given these in place of what it would get.

    So a layer shows by itself what is disturbed in it, and not what reached it from layers before.
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
    for layer in _layers_of(model):
        hooks += [layer.register_forward_pre_hook(enter, with_kwargs=True), layer.register_forward_hook(leave)]
    try:
        with torch.inference_mode():
            base_of(model)(input_ids=ids, use_cache=False)
    except Exception as error:  # an architecture of any kind may fail in any way
        raise CheckpointError(f"{given}: does not run with a stretched context ({first_line(error)})") from error
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _layers_of(model: Any) -> list[Any]:
    layers = model.config.get_text_config().num_hidden_layers
    lists = (module for module in base_of(model).modules() if isinstance(module, torch.nn.ModuleList))
    return next((list(found) for found in lists if len(found) == layers), [])


def _changes(clean: _States, other: _States, last: bool = False) -> list[float]:
    """How far what each layer gives has moved, on average; of the last token only, or of all."""
    tokens = slice(-1, None) if last else slice(None)
    pairs = zip(clean, other, strict=True)
    return [float((after - before)[:, tokens].abs().mean()) for (_, before), (_, after) in pairs]


def _turn_faster(module: Any, _: Any) -> None:
    module.inv_freq.mul_(2)


def _scale_up(module: Any, _: Any) -> None:
    module.attention_scaling = module.attention_scaling + 1
