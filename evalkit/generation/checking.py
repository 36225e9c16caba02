"""The check of a storage on a few tokens: a model must give the same logits from it as without it.

In: a model, and a form of storage. Out: why the model cannot use it, and the sizes of what it keeps. Where prompts are
run in chunks, all logits behind stored tokens must be those of plain passes. Where they are run whole, those of single
tokens in a batch must be those behind the cache of one text, as `generate` runs them: some models (Zamba 2, Nemotron-H)
bound their time steps in longer passes only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch

from evalkit.errors import CheckpointError, first_line
from evalkit.generation.own_caches import OwnCaches
from evalkit.generation.prompts import Ints, Prompt
from evalkit.generation.rows import NOT_FINITE_ADVICE, Generation
from evalkit.generation.storage import NOTHING, Calls, Storage

_CHUNK, _STEPS = 4, 8
"""Tokens of a chunk, and last tokens of a text, which are run one by one."""
_LENGTHS = (16, 11)
"""Tokens of each text. The tokens before the second text's last ones are fewer than those of usual convolutions."""
_TOLERANCE, _LEAST_EPSILON = 0.6, 2.0**-16
"""Tolerance of the check, in units of rounding: the deviation of the logits that rounding the embeddings once more
causes in this model, times √(2 layers), since each layer adds twice to what is rounded. A cache's own rounding gives 0
to 0.25 in every dtype; positions that are off by one give 1 to 8 in bfloat16, and more in others. Kernels of float32
differ by more than its epsilon."""


class StorageCheck:
    """Two texts of different lengths, and the logits of plain passes over them. Used in inference mode."""

    def __init__(self, model: Any, calls: Calls) -> None:
        self._model, self._calls = model, calls
        vocabulary = model.get_output_embeddings().weight.shape[0]
        ids = torch.arange(max(_LENGTHS)) % vocabulary
        self._texts = [ids, ids.flip(0)[: min(_LENGTHS)]]
        self._plain = [self._logits(text) for text in self._texts]
        if not all(logits.isfinite().all() for logits in self._plain):
            raise CheckpointError(f"the logits of {type(model).__name__} are not numbers; {NOT_FINITE_ADVICE}")
        self.sizes = NOTHING
        """Sizes of what the last storage without a fault keeps of a row."""

    def why_not(self, form: Callable[..., Storage], is_chunked: bool) -> str:
        """Return why the model does not run on a form of storage, or ""."""
        try:
            storage, behind, steps = self._run(partial(form, chunk=_CHUNK if is_chunked else 0), self._texts)
            expected = self._plain if is_chunked else self._alone
            sizes = storage.sizes()
        except Exception as error:  # an architecture of any kind may fail in any way
            return f"does not run in batches ({type(error).__name__}: {first_line(error)[:120]})"
        pairs = [*zip(behind, self._plain, strict=False), *zip(steps, expected, strict=True)]
        # Written so that NaN exceeds the tolerance
        if not all(_deviation(logits, others) <= self._tolerance for logits, others in pairs):
            return "gives different logits in a batch"
        self.sizes = sizes
        return ""

    @cached_property
    def _alone(self) -> list[torch.Tensor]:
        """Logits after the last tokens of each text, behind the model's own cache of this text."""
        storage = partial(OwnCaches, chunk=0)
        return [self._run(storage, [text])[2][0] for text in self._texts]

    def _run(
        self, storage_of: Callable[..., Storage], texts: Sequence[torch.Tensor]
    ) -> tuple[Storage, list[torch.Tensor], list[torch.Tensor]]:
        """Return logits [tokens, vocabulary] after the last tokens of each text: at once if it can, and one by one."""
        rows = [_row(text.numpy()) for text in texts]
        storage = storage_of(self._calls, rows)
        at_once = []
        for index, row in enumerate(rows):
            storage.prefill(index)
            with storage.before_answers(index) as behind:
                if behind is not None:
                    at_once.append(behind(texts[index].numpy()[row.prompt.shared - 1 :])[0])
        storage.without_ended(rows)
        steps = []
        for step in range(-_STEPS, 0):
            for row, text in zip(rows, texts, strict=True):
                row.append(int(text[step]))
            steps.append(storage.step(rows))
        return storage, at_once, list(torch.stack(steps, 1))

    @cached_property
    def _tolerance(self) -> float:
        layers = int(getattr(self._model.config.get_text_config(), "num_hidden_layers", 0))
        return float(_TOLERANCE * (2 * layers) ** 0.5 * self._rounding())

    def _rounding(self) -> float:
        """Return the deviation of the logits if the embeddings are rounded again."""
        epsilon = max(torch.finfo(self._model.dtype).eps, _LEAST_EPSILON)

        def rounded(_: Any, __: Any, embeddings: torch.Tensor) -> torch.Tensor:
            noise = torch.rand(embeddings.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
            return embeddings * (1 + epsilon * noise).to(embeddings)

        hook = self._model.get_input_embeddings().register_forward_hook(rounded)
        try:
            again = self._logits(self._texts[0])[-_STEPS:]
        finally:
            hook.remove()
        return max(_deviation(again, self._plain[0]), epsilon)

    def _logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits [tokens, vocabulary] of a plain pass."""
        logits: torch.Tensor = self._model(input_ids=ids[None].to(self._calls.device), use_cache=False).logits
        return logits[0].float()


def _row(text: Ints) -> Generation:
    """Return a row of a text, whose last tokens also follow the first chunk at once, as an answer does."""
    prompt = text[:-_STEPS]
    shared = min(_CHUNK, len(prompt) - 1) + 1
    return Generation(Prompt(0, prompt, 1 + _STEPS, answers=(text[shared:],), shared=shared), None, None)


def _deviation(logits: torch.Tensor, others: torch.Tensor) -> float:
    """Return the deviation of logits [tokens, vocabulary] from others, as a share of theirs, at half of the tokens.

    The logits are of the last of the others' tokens.
    """
    others = others[-len(logits) :]
    return float(((logits - others).std(-1) / others.std(-1)).median())
