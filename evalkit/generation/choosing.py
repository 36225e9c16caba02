"""Which token comes next where it is not simply the argmax: transformers' own processors of logits, and sampling.

In: a model, whose generation config counts, and a prompt's settings. Out: a `Chooser`, or None where the argmax of the
logits is meant. Random numbers are each prompt's own, so a text does not depend on what is generated beside it
or before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from evalkit.compatibility.transformers import generation_config_of, logits_processors
from evalkit.errors import ScoringError, UsageError, first_line
from evalkit.generation.prompts import Decoding, Prompt
from evalkit.models.quiet import quiet

_CHOICES = frozenset({
    "do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
    "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "min_length", "min_new_tokens", "suppress_tokens",
    "begin_suppress_tokens", "forced_eos_token_id", "exponential_decay_length_penalty", "remove_invalid_values",
    "renormalize_logits", "eos_token_id",
})  # fmt: skip
"""Settings of transformers that say which token comes next."""
_WITHOUT_EFFECT = frozenset({"use_cache", "pad_token_id", "bos_token_id"})
_ONE = ("num_beams", "num_beam_groups", "num_return_sequences")
"""Settings that may be 1 only."""
_OTHER_WAYS = ("penalty_alpha", "dola_layers", "stop_strings", "token_healing", "max_time", "assistant_early_exit")
"""Settings of a model's generation config by which `generate` would do something else than choose token by token."""


class Chooser:
    """Chooses the tokens of one prompt.

    Args:
        processors: (token ids [1, length], logits [1, vocabulary]) → logits.
        dice: random numbers; None: the argmax after the processors.
    """

    def __init__(self, processors: Any, dice: torch.Generator | None) -> None:
        self._processors, self._dice = processors, dice

    def scores(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Logits [1, vocabulary] after the processors."""
        found: torch.Tensor = self._processors(ids, logits)
        return found

    def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> int:
        """The token that follows `ids` [1, length], of logits [1, vocabulary]. Raises `ScoringError` if none may."""
        scores = self.scores(ids, logits)
        if not scores.amax().isfinite():
            raise ScoringError("the generation settings leave no token to choose from")
        if self._dice is None:
            return int(scores.argmax(-1))
        # On the CPU, whose random numbers are the same on every machine
        return int(torch.multinomial(scores.softmax(-1).cpu(), 1, generator=self._dice))


def chooser_of(model: Any, prompt: Prompt) -> Chooser | None:
    """Make what chooses a prompt's tokens; None: the argmax.

    Raises:
        UsageError: a setting that is not served, or that transformers refuses; names it.
    """
    if prompt.decoding is None:
        return None
    refuse_settings(prompt.decoding.settings)
    with quiet():
        config = generation_config_of(model, dict(prompt.decoding.settings))
        if (config.num_beams or 1) > 1:
            raise UsageError(f"the model's generation config has num_beams {config.num_beams}: {_NO_BEAMS}")
        if other := next((name for name in _OTHER_WAYS if getattr(config, name, None)), None):
            raise UsageError(f"the model's generation config has {other}, which evalkit does not generate with")
        config.max_length = prompt.columns
        try:
            processors = logits_processors(model, config, torch.from_numpy(prompt.tokens[None]).to(model.device))
        except (ValueError, TypeError, IndexError) as error:
            raise _refused(error) from error
    if not config.do_sample:
        return Chooser(processors, None) if processors else None
    return Chooser(processors, torch.Generator().manual_seed(prompt.decoding.seed))


def check_settings(model: Any, settings: Mapping[str, Any]) -> None:
    """Raise a `UsageError` where tokens cannot be chosen by settings: as `chooser_of`, and by a first choice."""
    chooser = chooser_of(model, Prompt(0, np.zeros(1, np.int64), 1, decoding=Decoding(settings)))
    if chooser is not None:
        ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        try:
            chooser.scores(ids, torch.zeros(1, model.config.get_text_config().vocab_size, device=model.device))
        except (ValueError, TypeError, IndexError) as error:
            raise _refused(error) from error


def _refused(error: Exception) -> UsageError:
    return UsageError(f"transformers refuses its settings ({first_line(error)})")


_NO_BEAMS = "evalkit generates one text at a time, without beams"


def refuse_settings(settings: Mapping[str, Any]) -> None:
    """Raise a `UsageError` for a setting that would not have its effect; names it."""
    for name, value in settings.items():
        if name in _ONE:
            if value not in (None, 1):
                raise UsageError(f"{name} is {value!r:.40}, and {_NO_BEAMS}")
        elif name not in _CHOICES and name not in _WITHOUT_EFFECT:
            raise UsageError(f"'{name}' is not a setting that evalkit generates with")
