"""Decoding settings: transformers' logits processors, and sampling.

In: a model with its generation config, and a prompt's settings. Out: a `Sampler`, or None for the argmax of the logits.
Each prompt has its own random numbers, so a text does not depend on the other prompts of the batch or of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from evalkit.compatibility.transformers import generation_config_of, logits_processors, quiet
from evalkit.errors import ScoringError, UsageError, first_line
from evalkit.generation.prompts import Decoding, Prompt

_SUPPORTED = frozenset({
    "do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
    "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "min_length", "min_new_tokens", "suppress_tokens",
    "begin_suppress_tokens", "forced_eos_token_id", "exponential_decay_length_penalty", "remove_invalid_values",
    "renormalize_logits", "eos_token_id",
})  # fmt: skip
"""Settings of transformers' generation config that evalkit supports."""
_IGNORED = frozenset({"use_cache", "pad_token_id", "bos_token_id"})
_ONLY_ONE = ("num_beams", "num_beam_groups", "num_return_sequences")
"""Settings whose only supported value is 1."""
_UNSUPPORTED = ("penalty_alpha", "dola_layers", "stop_strings", "token_healing", "max_time", "assistant_early_exit")
"""Settings of a model's generation config with which `generate` does not choose token by token."""


class Sampler:
    """The token sampler of one prompt.

    Args:
        processors: (token ids [1, length], logits [1, vocabulary]) → logits.
        random: random number generator; None: the argmax after the processors.
    """

    def __init__(self, processors: Any, random: torch.Generator | None) -> None:
        self._processors, self._random = processors, random

    def scores(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits [1, vocabulary] after the processors."""
        processed: torch.Tensor = self._processors(ids, logits)
        return processed

    def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> int:
        """Return the next token after `ids` [1, length], given logits [1, vocabulary]."""
        scores = self.scores(ids, logits)
        if not scores.amax().isfinite():
            raise ScoringError("the generation settings leave no token to choose from")
        if self._random is None:
            return int(scores.argmax(-1))
        # On the CPU, where random numbers are the same on every machine
        return int(torch.multinomial(scores.softmax(-1).cpu(), 1, generator=self._random))


def sampler_of(model: Any, prompt: Prompt) -> Sampler | None:
    """Return the sampler of a prompt; None: the argmax.

    Raises:
        UsageError: a setting that evalkit does not support or transformers rejects; the message names it.
    """
    if prompt.decoding is None:
        return None
    validate_settings(prompt.decoding.settings)
    with quiet():
        config = generation_config_of(model, dict(prompt.decoding.settings))
        if (config.num_beams or 1) > 1:
            raise UsageError(f"the model's generation config has num_beams {config.num_beams}: {_NO_BEAMS}")
        if other := next((name for name in _UNSUPPORTED if getattr(config, name, None)), None):
            raise UsageError(f"the model's generation config has {other}, which evalkit does not support")
        config.max_length = prompt.columns
        try:
            processors = logits_processors(model, config, torch.from_numpy(prompt.tokens[None]).to(model.device))
        except (ValueError, TypeError, IndexError) as error:
            raise _rejected(error) from error
    if not config.do_sample:
        return Sampler(processors, None) if processors else None
    return Sampler(processors, torch.Generator().manual_seed(prompt.decoding.seed))


def check_settings(model: Any, settings: Mapping[str, Any]) -> None:
    """Raise a `UsageError` for settings that `sampler_of` rejects, or that fail on a first token."""
    sampler = sampler_of(model, Prompt(0, np.zeros(1, np.int64), 1, decoding=Decoding(settings)))
    if sampler is not None:
        ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        try:
            sampler.scores(ids, torch.zeros(1, model.config.get_text_config().vocab_size, device=model.device))
        except (ValueError, TypeError, IndexError) as error:
            raise _rejected(error) from error


def _rejected(error: Exception) -> UsageError:
    return UsageError(f"transformers rejects its settings ({first_line(error)})")


_NO_BEAMS = "evalkit generates one text at a time, without beams"


def validate_settings(settings: Mapping[str, Any]) -> None:
    """Raise a `UsageError` that names the first setting that evalkit does not support."""
    for name, value in settings.items():
        if name in _ONLY_ONE:
            if value not in (None, 1):
                raise UsageError(f"{name} is {value!r:.40}, and {_NO_BEAMS}")
        elif name not in _SUPPORTED and name not in _IGNORED:
            raise UsageError(f"'{name}' is not a generation setting that evalkit supports")
