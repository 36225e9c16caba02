"""Start-up checks of a model on synthetic sequences: how scores by evalkit differ from the model's own forward pass.

Out: why prefixes cannot be shared, why evalkit's output head cannot replace the model's own, or how scores change with
later tokens; empty where nothing is wrong. Sharing is compared by the hidden states of a row as long as the batches
(`probe.py`), in float32 whatever the weights' dtype, with and without a trunk. A check that could not have detected the
smallest error, one masked token, is inconclusive and does not pass.

What is wrong in some layer whatever the row's length (positions, masks, caches, rounding) is found in a short row. What
a greater length changes (windows, selections of tokens, capacities, kernels of another size) is a matter of a layer's
code and attributes, not of its number, so long rows and sequences run through fewer layers: one of each kind, the
first, middle and last ones (`probe.repeated_layers`). Only a pass counts there; after a failure all layers are run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from evalkit.models.called import CalledModel
from evalkit.models.memory import is_out_of_memory
from evalkit.models.quantisation import exact_activations
from evalkit.scoring.forward import Forward
from evalkit.scoring.probe import (
    HALF,
    SHORTEST,
    in_float32,
    make_probe,
    mask_first,
    repeated_layers,
    without_layers,
)
from evalkit.scoring.tree import Ints

TOLERANCE = 1e-3
"""Largest allowed distance of a hidden state from that of the sequence alone, as a share of its norm, in float32.
Rounding alone gives 2e-5 at most (SmolLM2-135M, 30 layers) and 6e-6 in small models of six architectures."""
NOT_NUMBERS = "its states are not numbers (NaN)"
_MARGIN = 10
"""Factor by which an allowed difference must be smaller than the effect of one masked token."""
_LEAST_EFFECT = 1e-5
"""Smallest effect of a masked token that can be distinguished from rounding."""
_RARE = 0.01
"""Share of tokens whose states may differ in one row if they agree in the next, since rounding may select another
expert."""
NOISE = 2.0
"""Largest allowed distance of shared bf16 and fp16 states from float32's, in root mean squares of the model's own
rounding."""
_LOOKAHEAD_TOLERANCE = 0.1
"""Largest allowed change of states with later tokens, as a share of their norm, where only half precision can be run.
Rounding gives 1 to 3 %; a token that attends to later ones has a different state."""
_HEAD_TOLERANCE = 5e-3
"""Largest allowed mean difference of log-probabilities, in nats, between evalkit's head and the model's own on the same
sequence. The arithmetic and its order are the same, so the difference is near zero in any dtype. In float32 logits as
large as `_LARGE` are compared too, so that a cap of up to 10,000 is detected."""
_LARGE = 100.0
_FEW, _LOGITS = 8, 64
"""Tokens that repeat, and columns of the vocabulary that are compared, in the check of lookahead."""
_EXCLUDED = -1e4
"""Log-probability below which a model has masked a token."""
_SMALL = 128
"""Nodes of the row on which the effect of one masked token is measured."""
_EARLY = 9
"""Length of the shortest beginning in the check of lookahead: of tokens that see each other at the start only."""
_CHUNK = 4096
_AT_ONCE = 256
"""Tokens whose log-probabilities exist at a time."""


class BatchLengths(NamedTuple):
    """Tokens of a batch's row, its trunk and its tree, and of its longest sequence."""

    row: int
    longest: int


_SHORT = BatchLengths(256, 96)
"""Lengths at which all layers are compared: all branches of a probe, and repetitions of them."""


class SharingCheck:
    def __init__(self, model: Any) -> None:
        self._model = model
        self._half = model.dtype in HALF
        self._rounds = self._half or hasattr(model, "rounds_activations")
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        self._vocabulary = min(int(end.weight.shape[0]) for end in ends if end is not None)
        self._expected = cache(self._run_alone)

    @cached_property
    def _repeated(self) -> list[torch.nn.Module]:
        return repeated_layers(self._model)

    def lookahead(self, length: int, by_states: bool, at_equal_length: bool, is_first: bool) -> str:
        """Describe how scores change with later tokens, in sequences of a length; empty if they do not.

        Unless `is_first`, a check of shorter sequences has passed.

        Compared is what scores are computed from: the states that evalkit's output head reads (`by_states`), or the
        log-probabilities of the model's own forward pass. The later tokens are left out; or replaced
        (`at_equal_length`), for rotary embeddings that depend on the length.
        """
        check = partial(self._lookahead, length, by_states, at_equal_length)
        return "" if not is_first and self._passes_in_few_layers(check) else check()

    def _lookahead(self, length: int, by_states: bool, at_equal_length: bool) -> str:
        def compared(forward: Forward, tokens: Ints) -> torch.Tensor:
            return forward.hidden_alone(tokens) if by_states else self._log_probabilities(forward.logits_alone(tokens))

        def gaps(seed: int, wide: bool = True) -> torch.Tensor:
            forward, sequence = self._forward(wide), self._repetitive(length, seed)
            later = self._repetitive(length if at_equal_length else 0, seed + 2)
            whole, worst = compared(forward, sequence), torch.zeros(length - 1)
            for cut in _cuts(length):
                part = compared(forward, np.concatenate((sequence[:cut], later[cut:])))
                worst[:cut] = torch.maximum(worst[:cut], state_gaps(part[:cut], whole[:cut]))
            return worst

        try:
            with self._widened():
                worst = systematic(gaps, TOLERANCE)
        except RuntimeError:
            if not self._half:
                raise
            # Some modules read others' weights, and the widened embedding may not fit in memory
            worst = systematic(partial(gaps, wide=False), _LOOKAHEAD_TOLERANCE)
        if worst is None:
            return ""
        what = "states" if by_states else "log-probabilities"
        return NOT_NUMBERS if math.isnan(worst) else f"its {what} change by {worst:.2g} of their norm"

    def head(self, length: int) -> str:
        """Return why evalkit's output head cannot replace the model's own, on a sequence of a length, or ""."""
        tokens = self._tokens(length, seed=0)
        gap = self._head_gap(self._forward(wide=False), tokens)
        if gap <= _HEAD_TOLERANCE:
            try:
                with self._widened():
                    gap = self._head_gap(self._forward(wide=True), tokens, _LARGE)
            except RuntimeError as error:
                if not self._half or is_out_of_memory(error):
                    raise
                return "it cannot be run in float32, which the check needs"
        # NaN fails this comparison too
        return "" if gap <= _HEAD_TOLERANCE else f"its output head differs from evalkit's by {gap:.2g} nats"

    def sharing(self, kernel: str, lengths: BatchLengths, is_first: bool) -> str:
        """Return why prefixes cannot be shared by a kernel in batches of up to these lengths; empty if they can.

        Unless `is_first`, a check of shorter batches has passed.
        """
        if isinstance(self._model, CalledModel) and not self._model.takes_masks:
            return "its forward takes no attention mask"
        if lengths.longest < SHORTEST:
            return f"sequences of {lengths.longest} tokens are too short for the check"
        if self._repeated:
            short = BatchLengths(min(lengths.row, _SHORT.row), min(lengths.longest, _SHORT.longest))
            if is_first and (failure := self._difference(kernel, short)):
                return failure
            if self._passes_in_few_layers(partial(self._difference, kernel, lengths)):
                return ""
        return self._difference(kernel, lengths)

    def _passes_in_few_layers(self, check: Callable[[], str]) -> bool:
        if not self._repeated:
            return False
        try:
            with without_layers(self._model, self._repeated):
                return not check()
        except Exception as error:  # of the model's code, which may need all layers
            if is_out_of_memory(error):
                raise
            return False

    def _difference(self, kernel: str, lengths: BatchLengths) -> str:
        """Return how shared states differ from those of sequences alone, or why that cannot be known, or ""."""
        self._expected = cache(self._run_alone)
        for with_trunk in (False, True):
            with self._widened():
                failure = self._float32_failure(kernel, lengths, with_trunk)
            if not failure and self._rounds:
                failure = self._rounding_failure(kernel, lengths, with_trunk)
            if failure:
                return failure + (" with a cached prefix" if with_trunk else "")
        return ""

    @torch.inference_mode()
    def _head_gap(self, forward: Forward, tokens: Ints, largest: float | None = None) -> float:
        """Return the mean difference, in nats, of evalkit's and the model's log-probabilities over the vocabulary.

        `largest` is the logit to which the head's input is scaled, as large as a trained model's, since a cap changes
        small ones little. NaN where the model does not call its head as a module, so that its input cannot be scaled.
        """
        head, hidden = forward.head, forward.hidden_alone(tokens)
        factor = 1.0 if largest is None else largest / float(head.module(hidden).float().abs().max())
        called = False

        def scaled(_: torch.nn.Module, states: tuple[Any, ...]) -> tuple[Any, ...]:
            nonlocal called
            called = True
            return (states[0] * factor, *states[1:])

        hook = head.module.register_forward_pre_hook(scaled)
        try:
            expected = forward.logits_alone(tokens).log_softmax(-1)
        finally:
            hook.remove()
        whole = head.logits(hidden * factor).float().log_softmax(-1)
        # Also with the columns in chunks, as in scoring
        chunked = forward.score_states(hidden * factor, tokens).logprobs[1:]
        by_chunks = np.abs(chunked - expected.cpu().numpy()[np.arange(len(tokens) - 1), tokens[1:]]).mean()
        return float(np.max([float((whole - expected).abs().mean()), by_chunks])) if called else math.nan

    def _float32_failure(self, kernel: str, lengths: BatchLengths, with_trunk: bool) -> str:
        forward = self._forward(wide=True, kernel=kernel)
        smallest = self._smallest_error(forward, lengths, with_trunk)
        if smallest < _LEAST_EFFECT:
            return f"inconclusive: a masked token changes its states by only {smallest:.1g} of their norm"

        def gaps(seed: int) -> torch.Tensor:
            states, which = self._shared(forward, lengths, with_trunk, seed)
            return state_gaps(states, self._expected(lengths.longest, seed, True), which[-len(states) :])

        worst = systematic(gaps, min(TOLERANCE, smallest / _MARGIN))
        if worst is None:
            return ""
        return f"its states differ by {worst:.2g} of their norm in rows of {lengths.row} tokens"

    def _rounding_failure(self, kernel: str, lengths: BatchLengths, with_trunk: bool) -> str:
        exact, rounded = self._expected(lengths.longest, 0, True), self._expected(lengths.longest, 0, False)
        states, which = self._shared(self._forward(wide=False, kernel=kernel), lengths, with_trunk, seed=0)
        rounding = root_mean_square(state_gaps(rounded, exact)[which.cpu()])
        shared = root_mean_square(state_gaps(states, exact, which[-len(states) :]))
        if shared <= NOISE * rounding:
            return ""
        dtype = str(self._model.dtype).removeprefix("torch.")
        return f"in {dtype} its states differ by {shared:.2g} of their norm; rounding explains {rounding:.2g}"

    def _smallest_error(self, forward: Forward, lengths: BatchLengths, with_trunk: bool) -> float:
        """Return the median change of states when the farthest token is masked; some states may not depend on it."""
        probe = make_probe(self._vocabulary, _SMALL, min(lengths.longest, _SMALL))
        trunk = probe.trunk if with_trunk else 0
        trees, tokens = (probe.after(trunk), mask_first(probe.after(trunk))), probe.sequences[0][:trunk]
        right, wrong = (forward.hidden_shared(tree, tokens)[1:] for tree in trees)
        return float(state_gaps(wrong, right).median())

    def _shared(
        self, forward: Forward, lengths: BatchLengths, with_trunk: bool, seed: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the shared states of a probe, [nodes after the trunk, d_model], and [nodes] `_run_alone`'s of them."""
        probe = make_probe(self._vocabulary, max(lengths.row, lengths.longest), lengths.longest, seed)
        starts = np.cumsum([0, *(len(sequence) for sequence in probe.sequences[:-1])])
        which = torch.from_numpy(starts[probe.owner] + probe.tree.positions).to(self._model.device)
        trunk = probe.trunk if with_trunk else 0
        return forward.hidden_shared(probe.after(trunk), probe.sequences[0][:trunk]), which

    def _run_alone(self, longest: int, seed: int, wide: bool) -> torch.Tensor:
        probe = make_probe(self._vocabulary, longest, longest, seed)
        forward = self._forward(wide)
        with self._widened() if wide else nullcontext():
            return torch.cat([forward.hidden_alone(sequence) for sequence in probe.sequences])

    def _log_probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Return those of a few tokens of the vocabulary, [tokens, `_LOGITS`]; 0 of tokens that the model masks."""
        columns = torch.from_numpy(self._tokens(_LOGITS, seed=0)).long().to(logits.device)
        parts = [part.float().log_softmax(-1)[:, columns] for part in logits.split(_AT_ONCE)]
        logprobs = torch.cat(parts)
        return logprobs.masked_fill(logprobs < _EXCLUDED, 0)

    def _tokens(self, length: int, seed: int) -> Ints:
        return np.random.default_rng(seed).integers(0, self._vocabulary, length, dtype=np.int32)

    def _repetitive(self, length: int, seed: int) -> Ints:
        # Of a few: attention that selects tokens by a score selects among equal tokens by their number
        return np.random.default_rng(seed).choice(self._tokens(_FEW, seed), length)

    def _forward(self, wide: bool, kernel: str = "dense") -> Forward:
        return Forward(self._model, kernel, dtype=torch.float32 if wide and self._half else self._model.dtype)

    @contextmanager
    def _widened(self) -> Iterator[None]:
        if self._half and isinstance(self._model, CalledModel):
            raise RuntimeError("its weights cannot be widened")
        with in_float32(self._model) if self._half else nullcontext(), exact_activations():
            yield


def _cuts(length: int) -> list[int]:
    """Return the lengths of a sequence's beginnings that are compared; no block of tokens divides all of them.

    The shortest one shows a block most surely, most of which it leaves out; the longest one also what acts at the end.
    """
    early = _EARLY if length > 2 * _EARLY else 1
    most = max(1, length * 3 // 4 - 1)
    # As is `_EARLY`
    if most > 1 and most % 3 == 0:
        most -= 1
    return sorted({early, max(1, length // 4 - 1), most, length - 1})


def systematic(gaps: Callable[[int], torch.Tensor], tolerance: float) -> float | None:
    """Return the largest gap if gaps above the tolerance are systematic; None if there are none.

    Where rounding selects another expert, different tokens differ in each row. So a second row is compared where the
    first one differs.
    """
    first = gaps(0)
    wrong = ~(first <= tolerance)
    if not wrong.any():
        return None
    again = ~(gaps(1) <= tolerance)
    rare = max(float(wrong.float().mean()), float(again.float().mean())) <= _RARE
    return None if rare and not (wrong & again).any() else float(first.max())


def state_gaps(states: torch.Tensor, expected: torch.Tensor, which: torch.Tensor | None = None) -> torch.Tensor:
    """Return the norm of each state's difference from the expected state over the norm of the latter."""
    gaps = []
    for start in range(0, len(states), _CHUNK):
        stop = start + _CHUNK
        right = (expected[start:stop] if which is None else expected[which[start:stop]]).float()
        norm = right.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
        gaps.append(((states[start:stop].float() - right).norm(dim=-1) / norm).cpu())
    return torch.cat(gaps)


def root_mean_square(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())
