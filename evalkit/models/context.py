"""Longer contexts than a checkpoint was trained on, by other rotary frequencies: what is asked, planned and computed.

In: a checkpoint's parsed config.json and a user's `ContextSettings`. Out: an `Extension`, and by it the frequencies
that every rotary module has to have. Neither torch nor transformers is imported here; `stretch.py` applies it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evalkit.errors import CheckpointError, UnknownNameError, UsageError
from evalkit.models.config_check import WINDOW_KEYS

YARN, DYNAMIC_YARN, LINEAR, NTK, NONE = "yarn", "dynamic-yarn", "linear", "ntk", "none"
METHODS = (YARN, DYNAMIC_YARN, LINEAR, NTK, NONE)
BETA_FAST, BETA_SLOW = 32.0, 1.0
"""Rotations within the original window from which a channel stays as it is, and up to which it is interpolated in full;
arXiv 2309.00071, section 3.2 (β and α), for models of Llama's family."""

MOST_TOKENS = 2**24
"""Of a context: positions are computed in float32, which has no more whole numbers than these without a gap."""


@dataclass(frozen=True)
class ContextSettings:
    """What a user says of the context; None where evalkit is to find out."""

    target: int
    """Tokens that the model is to take at once."""
    method: str = YARN
    """One of `METHODS`."""
    original: int | None = None
    """Tokens of the window that the model was trained on. Given, it also replaces what the checkpoint says itself."""
    factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None


@dataclass(frozen=True)
class Extension:
    """A stretched context."""

    method: str
    """One of `METHODS`; "none" takes the longer window with the frequencies as they are."""
    target: int
    """Tokens that the model takes at once."""
    original: int
    """Tokens of the window that it was trained on: L."""
    factor: float
    """s, which "dynamic-yarn" reaches at `target` tokens."""
    beta_fast: float | None = None
    """Of YaRN's ramp; None for the other methods, as are the next two."""
    beta_slow: float | None = None
    attention_factor: float | None = None
    """What cos and sin are multiplied by, √(1/t) of the paper; None under "dynamic-yarn": by its formula, by length."""

    @property
    def by_length(self) -> bool:
        """Whether a sequence's frequencies depend on how long it is."""
        return self.method == DYNAMIC_YARN

    def describe(self) -> str:
        """One line for the terminal."""
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
        """What a run's identity depends on; `Extension(**specification)` is the extension again."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def plan_extension(
    config: Mapping[str, Any], settings: ContextSettings, say: Callable[[str], None] = lambda _: None
) -> Extension | None:
    """How a checkpoint's context is stretched, or None where its window is long enough already and config.json's own.

    Args:
        config: the parsed config.json.
        settings: what the user asks for; the original window is the config's where it is not given.
        say: told the original window, and what is not as the user may think.

    Raises:
        UnknownNameError: a method that does not exist.
        UsageError: a setting that has no meaning for the method, or numbers that cannot be.
        CheckpointError: config.json tells no window, or stretches it itself and no original window is given.
    """
    _check_settings(settings)
    text = _text_part(config)
    key, window = configured_window(config)
    own = _own_stretching(text)
    original = settings.original or window
    if original is None:
        raise CheckpointError(
            f"--context {settings.target}: config.json tells no window ({', '.join(WINDOW_KEYS[:3])}, …), "
            "so there is nothing to stretch from; give it with --context-original"
        )
    if settings.target <= original:
        by_itself = f", which it reaches by its own stretching ({own})" if own and not settings.original else ""
        say(
            f"--context {settings.target}: the window is {original:,} tokens already{by_itself}; nothing is stretched, "
            f"and documents up to {original:,} tokens are taken"
        )
        # Told otherwise than config.json has it, the window is the user's, and its own stretching goes
        replaced = settings.original and (own or window != original)
        return Extension(NONE, original, original, 1.0) if replaced else None
    if own and not settings.original:
        raise CheckpointError(
            f"--context {settings.target}: config.json stretches the context itself ({own}), and frequencies cannot be "
            "stretched twice; give --context none, or the window that it was trained on with --context-original "
            "to replace its own stretching"
        )
    if own:
        say(f"config.json stretches the context itself ({own}); this is replaced")
    source = f"config.json, {key}" if settings.original is None else "--context-original"
    if settings.original and window and window != original:
        source += f"; config.json has {key} {window:,}"
    factor = 1.0 if settings.method == NONE else settings.factor or settings.target / original
    say(f"original context window {original:,} tokens ({source})")
    if settings.method != NONE and factor * original < settings.target:
        say(f"factor {factor:g} makes {original:,} tokens {factor * original:,.0f}, not {settings.target:,}")
    yarn = settings.method in (YARN, DYNAMIC_YARN)
    attention = settings.attention_factor
    if settings.method == YARN and attention is None:
        attention = yarn_attention_factor(factor)
    return Extension(
        method=settings.method,
        target=settings.target,
        original=original,
        factor=factor,
        beta_fast=(settings.beta_fast or BETA_FAST) if yarn else None,
        beta_slow=(settings.beta_slow or BETA_SLOW) if yarn else None,
        attention_factor=attention,
    )


def rotary_frequencies(
    extension: Extension, size: int, theta: float, length: int | None = None
) -> tuple[NDArray[np.float64], float]:
    """The frequencies of one head, and what its cos and sin are multiplied by.

    Sources, with L the original window, s the factor, D = `size` and θ_i = theta^(−2i/D):

    - linear: θ_i / s (arXiv 2306.15595, equation 4).
    - ntk: the base theta · s^(D/(D−2)) in place of theta (arXiv 2309.00071, section 3.1).
    - yarn: (1 − γ_i) θ_i / s + γ_i θ_i (section 3.2), times 0.1 ln s + 1 (section 3.4). γ falls from 1 to 0 over the
      channels i that turn between beta_fast and beta_slow times within L tokens. It is linear in i between the whole
      channels around them, as in the authors' code; section 3.2 writes it linear in the number of turns.
    - dynamic-yarn: the same with s = max(1, l / L) of a sequence of l tokens (section 3.3).

    Args:
        extension: what is stretched, and how.
        size: channels of a head (or of a signal) that rotate; even.
        theta: base of the unstretched frequencies.
        length: of the sequence in tokens, for "dynamic-yarn"; None: the target.

    Returns:
        [size / 2] radians a token, the fastest channel first, and the attention scaling.

    Raises:
        CheckpointError: too few channels rotate for "ntk".
    """
    plain = theta ** (-np.arange(0, size, 2) / size)
    if extension.method == NONE:
        return plain, 1.0
    factor = extension.factor
    if extension.method == LINEAR:
        return plain / factor, 1.0
    if extension.method == NTK:
        if size <= 2:
            raise CheckpointError("--context-method ntk needs heads of which more than two channels rotate; use yarn")
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
    """The first and the last channel of YaRN's ramp; those before stay as they are, those after are interpolated.

    Channel i turns L θ_i / 2π times within the original window; solved for i, rounded outwards, within the head.
    """
    if extension.beta_fast is None or extension.beta_slow is None:
        raise ValueError(f"method {extension.method} has no ramp")

    def channel(turns: float) -> float:
        return size * math.log(extension.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = math.floor(channel(extension.beta_fast)), math.ceil(channel(extension.beta_slow))
    return max(low, 0), min(high, size - 1)


def yarn_attention_factor(factor: float) -> float:
    """√(1/t) = 0.1 ln s + 1, by which queries and keys are both multiplied; arXiv 2309.00071, section 3.4."""
    return 0.1 * math.log(factor) + 1.0


def refuse_generation(extension: Extension, what: str) -> None:
    """Refuse to generate text under frequencies that change with every token.

    Args:
        extension: of the model.
        what: is to be generated, for the message.

    Raises:
        UsageError: the method is "dynamic-yarn".
    """
    if extension.by_length:
        raise UsageError(
            f"{what} generates text, and under --context-method {extension.method} the frequencies of what is in the "
            "cache would change with every token; use yarn, or tasks that are scored"
        )


def configured_window(config: Mapping[str, Any]) -> tuple[str, int | None]:
    """What a parsed config.json calls its window, and the window in tokens; ("", None) where it tells none."""
    text = _text_part(config)
    return next(((key, text[key]) for key in WINDOW_KEYS if (text.get(key) or 0) > 0), ("", None))


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a multi-part model the part that reads text."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def _own_stretching(text: Mapping[str, Any]) -> str:
    """What a config does to its rotary frequencies by itself, in words; empty where they are the plain ones.

    Raises:
        CheckpointError: it has several kinds of them.
    """
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if rope and all(isinstance(value, dict) for value in rope.values()):
        raise CheckpointError(
            f"config.json has rotary embeddings of several kinds ({', '.join(rope)}), some of which see a window only; "
            "evalkit does not know which of them to stretch: give --context none"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in ("default", "mrope"):
        return ""
    parts = [f"rope_type {kind}"]
    trained = rope.get("original_max_position_embeddings") or text.get("original_max_position_embeddings")
    parts += [f"from {trained:,} tokens"] if trained else []
    parts += [f"factor {rope['factor']:g}"] if rope.get("factor") else []
    return ", ".join(parts)


def _check_settings(settings: ContextSettings) -> None:
    method = settings.method
    if method not in METHODS:
        raise UnknownNameError("context method", method, METHODS)
    for flag, tokens in (("--context", settings.target), ("--context-original", settings.original)):
        if tokens is not None and not 1 <= tokens <= MOST_TOKENS:
            raise UsageError(f"{flag} {tokens}: expected 1 to {MOST_TOKENS:,} tokens, all that float32 tells apart")
    allowed = {
        YARN: ("factor", "beta_fast", "beta_slow", "attention_factor"),
        DYNAMIC_YARN: ("beta_fast", "beta_slow"),
        NONE: (),
    }.get(method, ("factor",))
    for name in ("factor", "beta_fast", "beta_slow", "attention_factor"):
        value = getattr(settings, name)
        if value is None:
            continue
        if name not in allowed:
            raise UsageError(f"{name} has no meaning for --context-method {method}; leave it out")
        least = 1.0 if name == "factor" else 0.0
        if not math.isfinite(value) or value < least or not value:
            raise UsageError(f"{name} is {value:g}; it must be a number {'from 1' if least else 'above 0'}")
    if (settings.beta_fast or BETA_FAST) <= (settings.beta_slow or BETA_SLOW):
        raise UsageError(
            f"beta_fast is {settings.beta_fast or BETA_FAST:g} and beta_slow {settings.beta_slow or BETA_SLOW:g}; "
            "the fast one must be the larger"
        )
