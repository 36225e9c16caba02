"""An `Extension` on a transformers model: into its config before it is loaded, checked on every rotary module after.

In: a checkpoint's folder and an `Extension`. Out: the config to load it with, and a loaded model of which it is known
that its layers rotate by the frequencies of `context.rotary_frequencies`; or a `CheckpointError` that says why not. Set
after loading, on an architecture that ignores it, or in bfloat16, a stretching is lost without a word.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evalkit.compatibility.transformers import register_rotary
from evalkit.errors import CheckpointError, ScoringError, first_line
from evalkit.models.context import DYNAMIC_YARN, LINEAR, NONE, NTK, YARN, Extension, rotary_frequencies
from evalkit.models.layer_check import check_layers
from evalkit.models.quiet import quiet

NTK_TYPE, BY_LENGTH_TYPE = "ntk_aware", "yarn_by_length"
"""Of evalkit's own in transformers' table, which has neither. "dynamic" in a name would have its modules change the
frequencies themselves, to those of the longest sequence they ever saw."""
_ROPE_TYPES = {YARN: "yarn", LINEAR: "linear", NTK: NTK_TYPE, DYNAMIC_YARN: BY_LENGTH_TYPE, NONE: "default"}

_SCALING_KEYS = (
    "type",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "low_freq_factor",
    "high_freq_factor",
    "short_factor",
    "long_factor",
)
"""What a checkpoint's own stretching has in `rope_parameters`; all else (theta, the share that rotates) stays."""
_TOLERANCE = 1e-6
"""Of the unstretched frequency: float32 has 6e-8, and transformers computes in it. In bfloat16 it would be 4e-3."""


@dataclass(frozen=True)
class Stretched:
    """A checkpoint's config with an extension, and what it said before."""

    extension: Extension
    config: Any
    """The transformers config to load with."""
    theta: float
    """Base of the unstretched frequencies."""
    share: float
    """Of a head's channels, those that rotate."""


def stretched_config(given: str, folder: Path, extension: Extension, *, trust_remote_code: bool = False) -> Stretched:
    """Put an extension into the config of a checkpoint's folder.

    Args:
        given: the checkpoint's name for messages.
        folder: with its config.json.
        extension: from `plan_extension`.
        trust_remote_code: see `Checkpoint`.

    Raises:
        CheckpointError: the config cannot be read, or its model type takes no rotary parameters.
    """
    _register()
    with quiet():
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust_remote_code)
        except Exception as error:  # transformers raises what its parts raise; the config is the cause
            raise CheckpointError(f"{given}: its config cannot be read ({first_line(error)})") from error
        text = config.get_text_config()
        own = getattr(text, "rope_parameters", None)
        if not isinstance(own, dict) or not own.get("rope_theta"):
            raise CheckpointError(
                f"{given}: the context cannot be stretched: model type '{text.model_type}' has no rope_parameters, so "
                "its positions are fixed in code, learned, or none (as in GPT-J, GPT-2, ALiBi); give --context none"
            )
        text.max_position_embeddings = extension.target
        # Merged and not replaced: without its own theta and share, a model rotates otherwise than it was trained to
        kept = {key: copy.deepcopy(value) for key, value in own.items() if key not in _SCALING_KEYS}
        text.rope_parameters = kept | _rope_parameters(extension)
        # Phi-3 has it here too, and prefers it
        if hasattr(text, "original_max_position_embeddings"):
            text.original_max_position_embeddings = extension.original
        # A key that is there and empty is not replaced by transformers' default everywhere
        if getattr(text, "head_dim", 0) is None:
            text.head_dim = text.hidden_size // text.num_attention_heads
        try:
            text.validate_rope()
        except (KeyError, ValueError) as error:
            raise CheckpointError(
                f"{given}: model type '{text.model_type}' does not take {extension.method} ({first_line(error)})"
            ) from error
    return Stretched(extension, config, float(own["rope_theta"]), float(own.get("partial_rotary_factor") or 1.0))


def finish(given: str, model: Any, stretched: Stretched) -> None:
    """Make a loaded model's frequencies follow the sequence's length where they should, and check all of them.

    Args:
        given: the checkpoint's name for messages.
        model: loaded with `stretched.config`, on its device.
        stretched: from `stretched_config`.

    Raises:
        CheckpointError: a rotary module has other frequencies or another scaling than the formula's, the layers do not
            use them, or there is none. Names the module.
    """
    extension = stretched.extension
    modules = [(path, module) for path, module in model.named_modules() if _rotates(module)]
    if not modules:
        raise CheckpointError(
            f"{given}: the context cannot be stretched: {type(model).__name__} has no rotary module (inv_freq), so "
            "its positions are fixed in code, learned, or none; give --context none"
        )
    for path, module in modules:
        where = f"{given}: {path}"
        size = _rotating_channels(model, module, stretched.share)
        # A model that varies with the length is at rest in its original window
        _check_module(where, module, stretched, size, length=extension.original)
        if extension.by_length:
            module.register_forward_pre_hook(_Lengths(extension, size, stretched.theta), with_kwargs=True)
            _run_to(where, module, extension.target - 1, size)
            _check_module(where, module, stretched, size, length=extension.target)
    scaled = extension.method in (YARN, DYNAMIC_YARN)
    check_layers(given, model, [module for _, module in modules], scaled)


def _run_to(where: str, module: Any, last: int, size: int) -> None:
    """Run a rotary module by itself over a sequence that ends at a position."""
    places = torch.tensor([[0, last]], device=module.inv_freq.device)
    try:
        with torch.no_grad():
            module(torch.zeros(1, 1, 1, size, device=places.device), places)
    except Exception as error:  # an architecture of any kind may fail in any way
        raise CheckpointError(f"{where}: does not take positions as expected ({first_line(error)})") from error


class _Lengths:
    """Before a rotary module runs, gives it the frequencies of the sequence's length.

    Right for a whole sequence by itself. Where tokens follow others whose keys were rotated before (generation), the
    frequencies would differ between them; arXiv 2309.00071 caches keys before they are rotated, transformers after.
    """

    def __init__(self, extension: Extension, size: int, theta: float) -> None:
        self._extension, self._size, self._theta = extension, size, theta

    def __call__(self, module: Any, args: tuple[Any, ...], settings: dict[str, Any]) -> None:
        """Raises `ScoringError` past the original window unless one sequence runs whole."""
        states = args[0] if args else settings["x"]
        positions = settings["position_ids"] if "position_ids" in settings else args[1]
        length = int(positions.max()) + 1
        # One row of positions may stand for many sequences, some of which are padded
        if length > self._extension.original and (len(states) > 1 or int(positions.min()) > 0):
            raise ScoringError(
                f"--context-method {self._extension.method} is for scoring, one whole sequence at a time: past "
                f"{self._extension.original:,} tokens, frequencies change with each token that is generated; use yarn"
            )
        frequencies, scaling = rotary_frequencies(self._extension, self._size, self._theta, length)
        module.inv_freq.copy_(torch.from_numpy(frequencies))
        module.attention_scaling = scaling


def _rotates(module: Any) -> bool:
    return isinstance(getattr(module, "inv_freq", None), torch.Tensor)


def _rotating_channels(model: Any, module: Any, share: float) -> int:
    """Of a head, or of a signal where a layer has rotary embeddings of its own."""
    config = getattr(module, "config", model.config).get_text_config()
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(head * share)


def _check_module(where: str, module: Any, stretched: Stretched, size: int, length: int) -> None:
    frequencies = module.inv_freq
    if frequencies.dtype not in (torch.float32, torch.float64):
        raise CheckpointError(
            f"{where}: its rotary frequencies are {str(frequencies.dtype).removeprefix('torch.')}, which rounds them "
            "by more than distant positions bear; they must be float32 whatever the weights are in"
        )
    found = frequencies.detach().cpu().double().numpy()
    if size < 2 or found.shape != (size // 2,):
        raise CheckpointError(
            f"{where}: rotates {2 * len(found)} channels of a head, where config.json gives {size}; the context of "
            "such a model cannot be stretched safely: give --context none"
        )
    expected, scaling = rotary_frequencies(stretched.extension, size, stretched.theta, length)
    plain = stretched.theta ** (-np.arange(0, size, 2) / size)
    gap = float(np.abs((found - expected) / plain).max())
    if gap > _TOLERANCE:
        ignored = float(np.abs(found / plain - 1).max()) <= _TOLERANCE
        why = "are those of the unstretched model: it ignores rope_parameters" if ignored else f"are off by {gap:.1g}"
        raise CheckpointError(
            f"{where}: its rotary frequencies {why}, so {stretched.extension.method} would not do what it says; "
            "give --context none"
        )
    own = getattr(module, "attention_scaling", None)
    if own is None or abs(float(own) - scaling) > _TOLERANCE:
        shown = "none" if own is None else f"{float(own):g}"
        raise CheckpointError(f"{where}: its attention scaling is {shown}, not {scaling:g}; give --context none")


def _rope_parameters(extension: Extension) -> dict[str, Any]:
    """What transformers is told of an extension."""
    told: dict[str, Any] = {"rope_type": _ROPE_TYPES[extension.method]}
    if extension.method == NONE:
        return told
    told["factor"] = extension.factor
    if extension.method == LINEAR:
        return told
    told["original_max_position_embeddings"] = extension.original
    if extension.method == YARN:
        named = ("beta_fast", "beta_slow", "attention_factor")
        told |= {name: getattr(extension, name) for name in named} | {"truncate": True}
    return told


def _register() -> None:
    """Enter evalkit's own methods into transformers' table, which its rotary modules look into."""
    for name in (NTK_TYPE, BY_LENGTH_TYPE):
        register_rotary(name, _initial_frequencies)


def _initial_frequencies(config: Any, device: Any = None, *_: Any, **__: Any) -> tuple[torch.Tensor, float]:
    """[channels / 2] frequencies of a module that is being built, as transformers' own functions give them."""
    rope = config.rope_parameters
    method = NTK if rope["rope_type"] == NTK_TYPE else NONE
    extension = Extension(method, 0, rope["original_max_position_embeddings"], rope["factor"])
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = int(head * rope.get("partial_rotary_factor", 1.0))
    frequencies, scaling = rotary_frequencies(extension, size, rope["rope_theta"])
    return torch.from_numpy(frequencies).to(device, torch.float32), scaling
