"""Apply a context extension to a transformers model: set it in the config, check every rotary module after loading.

In: a transformers config and an `Extension`. Out: the same config, changed, and a loaded model whose layers are
verified to use the frequencies of `extension.rotary_frequencies`; or a `CheckpointError` with the reason. Without these
checks an extension is silently lost if it is set after loading, ignored by the architecture, or computed in bfloat16.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from evalkit.compatibility.transformers import quiet, register_rotary
from evalkit.errors import CheckpointError, ScoringError, reading_as
from evalkit.models.context.extension import DYNAMIC_YARN, LINEAR, NONE, NTK, YARN, Extension, rotary_frequencies
from evalkit.models.parts import base_of, layers_of

_NTK_TYPE, BY_LENGTH_TYPE = "ntk_aware", "yarn_by_length"
"""Rope types that evalkit adds to transformers. With "dynamic" in a name, transformers' modules would change the
frequencies themselves, to those of the longest sequence so far."""
_ROPE_TYPES = {YARN: "yarn", LINEAR: "linear", NTK: _NTK_TYPE, DYNAMIC_YARN: BY_LENGTH_TYPE, NONE: "default"}

_SCALING_KEYS = (
    "type", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
    "mscale_all_dim", "truncate", "low_freq_factor", "high_freq_factor", "short_factor", "long_factor",
)  # fmt: skip
"""Keys of `rope_parameters` of a checkpoint's own extension; the others (theta, the rotating share) are kept."""
_TOLERANCE = 1e-6
"""Relative to the unstretched frequency. float32, in which transformers computes, has 6e-8; bfloat16 has 4e-3."""
_TRIED = 16
_LEAST_EFFECT = 0.05
"""Least effect of a changed attention scaling, relative to that of doubled frequencies. Eleven architectures and the
demo checkpoint have 0.3 to 6; where queries and keys are normalised after rotation it is rounding, at most 0.015."""
_LEAST_POSITIONS = 0.1
"""Least effect of reordered tokens on a layer with positions, relative to that of doubled frequencies on rotating
layers. It is about 1, and rounding (at most 0.0002) in layers without positions."""


@dataclass(frozen=True)
class Stretched:
    """A context extension that a config has, and the config's unstretched rotary settings."""

    extension: Extension
    theta: float
    share: float
    """Share of a head's channels that rotate."""


def stretch(given: str, config: Any, extension: Extension) -> Stretched:
    """Set an extension in a checkpoint's transformers config, before the model is built from it.

    Raises a `CheckpointError` for an architecture whose positions do not follow its config, or not by this method.
    """
    for name in (_NTK_TYPE, BY_LENGTH_TYPE):
        register_rotary(name, _initial_frequencies)
    text, method = config.get_text_config(), extension.method
    own = getattr(text, "rope_parameters", None)
    if not isinstance(own, dict) or not own.get("rope_theta"):
        raise CheckpointError(
            f"{given}: the context cannot be stretched: model type '{text.model_type}' has no rope_parameters, so "
            "its positions are fixed in code, learned, or none (as in GPT-J, GPT-2, ALiBi); give --context none"
        )
    text.max_position_embeddings = extension.target
    # Merged, not replaced: theta and the rotating share must stay those of training
    rope = {key: copy.deepcopy(value) for key, value in own.items() if key not in _SCALING_KEYS}
    rope["rope_type"] = _ROPE_TYPES[method]
    if method != NONE:
        rope["factor"] = extension.factor
    if method not in (NONE, LINEAR):
        rope["original_max_position_embeddings"] = extension.original
    if method == YARN:
        names = ("beta_fast", "beta_slow", "attention_factor")
        rope |= {name: getattr(extension, name) for name in names} | {"truncate": True}
    text.rope_parameters = rope
    # Phi-3 also has the key here, with precedence
    if hasattr(text, "original_max_position_embeddings"):
        text.original_max_position_embeddings = extension.original
    # transformers does not apply its default to a null value everywhere
    if getattr(text, "head_dim", 0) is None:
        text.head_dim = text.hidden_size // text.num_attention_heads
    with reading_as(given, f"a model of type '{text.model_type}' that takes {method}", CheckpointError), quiet():
        text.validate_rope()
    return Stretched(extension, float(own["rope_theta"]), float(own.get("partial_rotary_factor") or 1.0))


def _initial_frequencies(config: Any, device: Any = None, *_: Any, **__: Any) -> tuple[torch.Tensor, float]:
    rope = config.rope_parameters
    method = NTK if rope["rope_type"] == _NTK_TYPE else NONE
    extension = Extension(method, 0, rope["original_max_position_embeddings"], rope["factor"])
    size = _rotating_channels(config, rope.get("partial_rotary_factor", 1.0))
    frequencies, scaling = rotary_frequencies(extension, size, rope["rope_theta"])
    return torch.from_numpy(frequencies).to(device, torch.float32), scaling


def _rotating_channels(config: Any, share: float) -> int:
    return int((getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads) * share)


def finish(given: str, model: Any, stretched: Stretched) -> None:
    """Install length-dependent frequencies if the method needs them, and check all rotary modules.

    The model is built from the config that was stretched, and on its device. Raises a `CheckpointError` if the
    frequencies or the scaling of a rotary module differ from the formula, if the layers do not use their rotary
    modules, or without any.
    """
    extension, modules = stretched.extension, []
    for path, module in model.named_modules():
        if not isinstance(getattr(module, "inv_freq", None), torch.Tensor):
            continue
        modules.append(module)
        where = f"{given}: {path}"
        # Of a head, or of a signal in a layer with its own rotary embeddings
        size = _rotating_channels(getattr(module, "config", model.config).get_text_config(), stretched.share)
        # Length-dependent frequencies are initialised to those of the original window
        _check_module(where, module, stretched, size, length=extension.original)
        if extension.by_length:
            module.register_forward_pre_hook(_LengthHook(extension, size, stretched.theta), with_kwargs=True)
            positions = torch.tensor([[0, extension.target - 1]], device=module.inv_freq.device)
            with torch.no_grad():
                module(torch.zeros(1, 1, 1, size, device=positions.device), positions)
            _check_module(where, module, stretched, size, length=extension.target)
    _check_layers(given, model, modules, is_scaled=extension.method in (YARN, DYNAMIC_YARN))


class _LengthHook:
    """Forward pre-hook that sets a rotary module's frequencies by the sequence's length.

    Correct for one complete sequence. In generation, cached keys would have been rotated with other frequencies than
    new ones: arXiv 2309.00071 caches keys before rotation, transformers after.
    """

    def __init__(self, extension: Extension, size: int, theta: float) -> None:
        self._extension, self._size, self._theta = extension, size, theta

    def __call__(self, module: Any, args: tuple[Any, ...], settings: dict[str, Any]) -> None:
        states = args[0] if args else settings["x"]
        positions = settings["position_ids"] if "position_ids" in settings else args[1]
        length = int(positions.max()) + 1
        # One row of positions may apply to many sequences, some of them padded
        if length > self._extension.original and (len(states) > 1 or int(positions.min()) > 0):
            raise ScoringError(
                f"--context-method {self._extension.method} is for scoring, one complete sequence at a time: past "
                f"{self._extension.original:,} tokens, frequencies change with each token that is generated; use yarn"
            )
        frequencies, scaling = rotary_frequencies(self._extension, self._size, self._theta, length)
        module.inv_freq.copy_(torch.from_numpy(frequencies))
        module.attention_scaling = scaling


def _check_module(where: str, module: Any, stretched: Stretched, size: int, length: int) -> None:
    """Raise if a rotary module's float32 frequencies or its scaling are not the formula's, for `size` channels."""
    method, theta = stretched.extension.method, stretched.theta
    expected, scaling = rotary_frequencies(stretched.extension, size, theta, length)
    actual = module.inv_freq.detach().cpu().double().numpy()
    plain = theta ** (-np.arange(0, size, 2) / size)
    if size < 2 or actual.shape != plain.shape or np.abs((actual - expected) / plain).max() > _TOLERANCE:
        raise CheckpointError(f"{where}: its rotary frequencies are not {method}'s; give --context none")
    own = getattr(module, "attention_scaling", None)
    if own is None or abs(float(own) - scaling) > _TOLERANCE:
        raise CheckpointError(f"{where}: its attention scaling is {own}, not {scaling:g}; give --context none")


def _check_layers(given: str, model: Any, modules: list[Any], *, is_scaled: bool) -> None:
    """Raise if a layer encodes positions without the model's rotary modules, such as all of Falcon's under ALiBi.

    Also raise, if cos and sin are scaled, for a model that normalises queries and keys after rotation (NanoChat,
    HunYuan): scaling does not change its logits. Layers without positions (SmolLM3's fourth) are accepted. Each layer
    is run in isolation on its undisturbed input while the frequencies or the scaling are perturbed.
    """
    name = type(model).__name__
    rows = model.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(_TRIED, device=model.device) % rows)[None]
    clean = _run_layers(model, ids)

    def effects(factor: float = 1.0, increase: float = 0.0) -> list[float]:
        """Return each layer's mean change under other frequencies and another scaling."""

        def perturb(module: Any, _: Any) -> None:
            module.inv_freq.mul_(factor)
            module.attention_scaling = module.attention_scaling + increase

        own = [(module, module.attention_scaling, module.inv_freq.clone()) for module in modules]
        hooks = [module.register_forward_pre_hook(perturb) for module in modules]
        try:
            return _changes(clean, _run_layers(model, ids, [before for before, _ in clean]))
        finally:
            for hook, (module, scaling, frequencies) in zip(hooks, own, strict=True):
                hook.remove()
                module.attention_scaling = scaling
                module.inv_freq.copy_(frequencies)

    noise, rotated = effects(), effects(factor=2.0)
    rotating = [number for number, effect in enumerate(rotated) if effect > 2 * noise[number]]
    others = [number for number in range(len(clean)) if number not in rotating]
    if rotating and others:
        # The last token of a layer without positions does not depend on the order of the tokens before it
        reordered = [torch.cat((before[:, :-1].flip(1), before[:, -1:]), dim=1) for before, _ in clean]
        moved = _changes(clean, _run_layers(model, ids, reordered), last=True)
        least = _LEAST_POSITIONS * float(np.median([rotated[number] for number in rotating]))
        others = [number for number in others if moved[number] > least]
    if others or not rotating:
        raise CheckpointError(
            f"{given}: the context cannot be stretched: layers {', '.join(map(str, others))} of {name} do not use its "
            f"{len(modules)} rotary modules (inv_freq); give --context none"
        )
    if is_scaled:
        scaled = effects(increase=1.0)
        if any(scaled[number] < _LEAST_EFFECT * rotated[number] for number in rotating):
            raise CheckpointError(
                f"{given}: {name} cancels yarn's attention factor; use --context-method ntk or linear"
            )


_States = list[tuple[torch.Tensor, torch.Tensor]]
"""Input and output of each layer, [1, tokens, d_model]; the output in float32."""


def _run_layers(model: Any, ids: torch.Tensor, inputs: list[torch.Tensor] | None = None) -> _States:
    """Run [1, tokens] through the base model and record each layer; with `inputs`, these replace the layers' inputs.

    With `inputs`, the output of a layer shows only perturbations within it, not those of earlier layers.
    """
    recorded: _States = []

    def enter(_: Any, args: tuple[Any, ...], settings: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        states = args[0] if args else settings["hidden_states"]
        if inputs is not None:
            states = inputs[len(recorded)]
        recorded.append((states, states))
        return ((states, *args[1:]), settings) if args else (args, settings | {"hidden_states": states})

    def leave(_: Any, __: Any, out: Any) -> None:
        recorded[-1] = (recorded[-1][0], (out[0] if isinstance(out, tuple) else out).float())

    hooks = []
    for layer in layers_of(model):
        hooks += [layer.register_forward_pre_hook(enter, with_kwargs=True), layer.register_forward_hook(leave)]
    try:
        with torch.inference_mode():
            base_of(model)(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return recorded


def _changes(clean: _States, other: _States, last: bool = False) -> list[float]:
    tokens = slice(-1, None) if last else slice(None)
    pairs = zip(clean, other, strict=True)
    return [float((after - before)[:, tokens].abs().mean()) for (_, before), (_, after) in pairs]
