"""Context extension: plan a longer context window and compute its rotary frequencies.

In: a checkpoint's parsed config.json and a user's `ContextSettings`. Out: an `Extension`, and the frequencies that
every rotary module must have under it. Neither torch nor transformers is imported here; `stretch.py` applies it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from evalkit.errors import CheckpointError, UsageError, check_known
from evalkit.inputs.validated import FileSettings, Number
from evalkit.models.loading.files import LAYER_KEYS, MOST_TOKENS, WINDOW_KEYS

YARN, DYNAMIC_YARN, LINEAR, NTK, NONE = "yarn", "dynamic-yarn", "linear", "ntk", "none"
METHODS = (YARN, DYNAMIC_YARN, LINEAR, NTK, NONE)
BETA_FAST, BETA_SLOW = 32.0, 1.0
"""Channels with at least BETA_FAST rotations within the original window stay unchanged; channels with at most BETA_SLOW
are fully interpolated; arXiv 2309.00071, section 3.2 (β and α), for models of Llama's family."""

_MEANING = {
    "factor": (YARN, LINEAR, NTK),
    "beta_fast": (YARN, DYNAMIC_YARN),
    "beta_slow": (YARN, DYNAMIC_YARN),
    "attention_factor": (YARN,),
}
"""Settings → the methods that they apply to."""
_FALLBACK_WINDOW = 2048
_LONGEST_TOKENIZER_WINDOW = 1_000_000
"""A tokenizer without a limit reports 10³⁰; larger values are not windows."""


class ContextSettings(FileSettings):
    """A user's settings of context extension, in the form of a file in configs/context; None: derived by evalkit."""

    context: Annotated[int, Field(ge=1)] | None = None
    """The window to extend to, in tokens; None: the model is not extended."""
    original: Annotated[int, Field(ge=1)] | None = None
    """Context window of training, in tokens. If given, it also replaces the checkpoint's own setting."""
    method: str | None = None
    """One of `METHODS`; yarn by default."""
    factor: Number | None = None
    beta_fast: Number | None = None
    beta_slow: Number | None = None
    attention_factor: Number | None = None


@dataclass(frozen=True)
class Extension:
    """A planned context extension."""

    method: str
    """One of `METHODS`; "none" uses the longer window with unchanged frequencies."""
    target: int
    original: int
    """Context window of training, in tokens: L."""
    factor: float
    """Scale factor s; "dynamic-yarn" reaches it at `target` tokens."""
    beta_fast: float | None = None
    """Start of YaRN's ramp, in rotations; None for other methods, as are the next two."""
    beta_slow: float | None = None
    attention_factor: float | None = None
    """Factor of cos and sin, √(1/t) in the paper; None under "dynamic-yarn", where it depends on the length."""

    @property
    def by_length(self) -> bool:
        return self.method == DYNAMIC_YARN

    def describe(self) -> str:
        if self.target == self.original:
            return f"context window {self.target:,} tokens, as given"
        if self.method == NONE:
            return f"context window {self.original:,} taken for {self.target:,} tokens with the frequencies as they are"
        at_most = "up to " if self.by_length else ""
        parts = [f"factor {at_most}{self.factor:g}"]
        if self.beta_fast is not None:
            parts.append(f"beta {self.beta_fast:g}/{self.beta_slow:g}")
        if self.attention_factor is not None:
            parts.append(f"attention factor {self.attention_factor:.6g}")
        return (
            f"context stretched from {self.original:,} to {self.target:,} tokens by {self.method}: {', '.join(parts)}"
        )

    def specification(self) -> dict[str, Any]:
        """Return the fields that determine a run's id; `Extension(**specification)` is the inverse."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def plan_extension(
    config: Mapping[str, Any], settings: ContextSettings, say: Callable[[str], None] = lambda _: None
) -> Extension | None:
    """Plan a checkpoint's context extension; return None if config.json's own window is long enough.

    `say` is called with the original window, and with warnings about settings without effect. Raises `UsageError` for a
    setting that does not apply or is out of range, and `CheckpointError` if config.json has no context window, or
    extends it itself and no original window is given.
    """
    target, method = settings.context, YARN if settings.method is None else settings.method
    if target is None:
        return None
    _check_settings(settings, method)
    text = _text_part(config)
    key, window = configured_window(config)
    own = _configured_extension(text)
    original = settings.original or window
    if original is None:
        raise CheckpointError(f"--context {target}: config.json has no context window; give --context-original")
    if target <= original:
        say(f"--context {target}: the window is {original:,} tokens already; nothing is stretched")
        # A window other than config.json's comes from the user and replaces config.json's own stretching
        replaced = settings.original and (own or window != original)
        return Extension(NONE, original, original, 1.0) if replaced else None
    if own and not settings.original:
        raise CheckpointError(
            f"--context {target}: config.json stretches the context itself ({own}), and frequencies cannot be "
            "stretched twice; give --context none, or replace its stretching by giving the window of training with "
            "--context-original"
        )
    if own:
        say(f"config.json stretches the context itself ({own}); this is replaced")
    source = f"config.json, {key}" if settings.original is None else "--context-original"
    say(f"original context window {original:,} tokens ({source})")
    factor = 1.0 if method == NONE else settings.factor or target / original
    if factor > target:
        raise UsageError(
            f"factor is {factor:g}, which maps {target:,} tokens to less than one position of training; expected "
            f"about {target / original:g}"
        )
    if method != NONE and factor * original < target:
        say(f"factor {factor:g} extends {original:,} tokens to {factor * original:,.0f}, not to {target:,}")
    yarn = method in (YARN, DYNAMIC_YARN)
    attention = settings.attention_factor
    if method == YARN and attention is None:
        attention = yarn_attention_factor(factor)
    return Extension(
        method=method,
        target=target,
        original=original,
        factor=factor,
        beta_fast=(settings.beta_fast or BETA_FAST) if yarn else None,
        beta_slow=(settings.beta_slow or BETA_SLOW) if yarn else None,
        attention_factor=attention,
    )


def rotary_frequencies(
    extension: Extension, size: int, theta: float, length: int | None = None
) -> tuple[NDArray[np.float64], float]:
    """Rotary frequencies of one head, and the scaling of its cos and sin.

    Sources, with L the original window, s the factor, D = `size` and θ_i = theta^(−2i/D):

    - linear: θ_i / s (arXiv 2306.15595, equation 4).
    - ntk: the base theta · s^(D/(D−2)) instead of theta (arXiv 2309.00071, section 3.1).
    - yarn: (1 − γ_i) θ_i / s + γ_i θ_i (section 3.2), times 0.1 ln s + 1 (section 3.4). γ falls from 1 to 0 over the
      channels i with beta_fast to beta_slow rotations within L tokens. It is linear in i between the integer
      channels around them, as in the authors' code; section 3.2 defines it linear in the number of rotations.
    - dynamic-yarn: the same with s = max(1, l / L) of a sequence of l tokens (section 3.3).

    `size` is the even number of rotating channels of a head or signal, `theta` the base of the unstretched frequencies,
    `length` that of the sequence in tokens, for "dynamic-yarn" (None: the target). Returns [size / 2] radians per
    token, fastest channel first, and the attention scaling. Raises `CheckpointError` for too few channels for "ntk".
    """
    plain = theta ** (-np.arange(0, size, 2) / size)
    if extension.method == NONE:
        return plain, 1.0
    factor = extension.factor
    if extension.method == LINEAR:
        return plain / factor, 1.0
    if extension.method == NTK:
        if size <= 2:
            raise CheckpointError("--context-method ntk needs heads with more than two rotating channels; use yarn")
        return (theta * factor ** (size / (size - 2))) ** (-np.arange(0, size, 2) / size), 1.0
    if extension.by_length:
        factor = max(1.0, (length or extension.target) / extension.original)
        if factor == 1:
            return plain, 1.0
    low, high = yarn_ramp(extension, size, theta)
    interpolated = np.clip((np.arange(size // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    scaling = yarn_attention_factor(factor) if extension.attention_factor is None else extension.attention_factor
    return plain / factor * interpolated + plain * (1 - interpolated), scaling


def yarn_ramp(extension: Extension, size: int, theta: float) -> tuple[int, int]:
    """First and last channel of YaRN's ramp; channels before it stay unchanged, channels after it are interpolated.

    Channel i makes L θ_i / 2π rotations within the original window; solved for i, rounded outwards, clipped to the
    head.
    """
    if extension.beta_fast is None or extension.beta_slow is None:
        raise ValueError(f"method {extension.method} has no ramp")

    def channel(rotations: float) -> float:
        return size * math.log(extension.original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = math.floor(channel(extension.beta_fast)), math.ceil(channel(extension.beta_slow))
    return max(low, 0), min(high, size - 1)


def yarn_attention_factor(factor: float) -> float:
    """Attention factor √(1/t) = 0.1 ln s + 1, which multiplies queries and keys; arXiv 2309.00071, section 3.4."""
    return 0.1 * math.log(factor) + 1.0


def refuse_generation(extension: Extension, what: str) -> None:
    """Raise `UsageError` if `what` generates text under frequencies that change with every token ("dynamic-yarn")."""
    if extension.by_length:
        raise UsageError(f"{what} generates text, which --context-method {extension.method} does not support; use yarn")


def configured_window(config: Mapping[str, Any]) -> tuple[str, int | None]:
    """Return the key of the context window in a parsed config.json and its value in tokens; ("", None) if absent."""
    text = _text_part(config)
    windows = ((key, text.get(key)) for key in WINDOW_KEYS)
    return next(((key, window) for key, window in windows if isinstance(window, int) and window > 0), ("", None))


def configured_layers(config: Mapping[str, Any]) -> int:
    """Return the number of layers of a parsed config.json; 0 if it is absent."""
    text = _text_part(config)
    return next((number for key in LAYER_KEYS if isinstance(number := text.get(key), int) and number > 0), 0)


def context_window(given: str, config: Mapping[str, Any], tokenizer: Any, say: Callable[[str], None]) -> int:
    """Return the context window in tokens: from a config, else the tokenizer, else 2048."""
    key, window = configured_window(config)
    if window and window > MOST_TOKENS:
        raise CheckpointError(
            f"{given}: its config has {key} {window:,}, not exact in float32; give --context and --context-original"
        )
    if window is None and 0 < tokenizer.model_max_length < _LONGEST_TOKENIZER_WINDOW:
        window = int(tokenizer.model_max_length)
    if window is None:
        say(f"neither config.json nor the tokenizer has a context window; {_FALLBACK_WINDOW} is assumed")
    return window or _FALLBACK_WINDOW


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def _configured_extension(text: Mapping[str, Any]) -> str:
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if rope and all(isinstance(value, dict) for value in rope.values()):
        raise CheckpointError(
            f"config.json has rotary embeddings of several kinds ({', '.join(rope)}); give --context none"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    return "" if kind in ("default", "mrope") else f"rope_type {kind}"


def _check_settings(settings: ContextSettings, method: str) -> None:
    check_known("context method", [method], METHODS)
    for flag, tokens in (("--context", settings.context), ("--context-original", settings.original)):
        if tokens is not None and not 1 <= tokens <= MOST_TOKENS:
            raise UsageError(f"{flag} {tokens}: expected 1 to {MOST_TOKENS:,} tokens (exact in float32)")
    for name, methods in _MEANING.items():
        value = getattr(settings, name)
        if value is not None and method not in methods:
            raise UsageError(f"{name} has no meaning for --context-method {method}; leave it out")
        if value is not None and (value <= 0 or (name == "factor" and value < 1)):
            raise UsageError(f"{name} is {value:g}; expected a number {'from 1' if name == 'factor' else 'above 0'}")
    fast, slow = settings.beta_fast or BETA_FAST, settings.beta_slow or BETA_SLOW
    if fast <= slow:
        raise UsageError(f"beta_fast is {fast:g} and beta_slow {slow:g}; the fast one must be the larger")
