"""Whether a model may be scored through shared prefixes: compared with its own forward pass, on made-up sequences.

In: a loaded model, a way to attend, and how long batches and sequences are. Out: the reason why not, or nothing. What
is compared are the hidden states of every token of a row that is as long as the batches will be (`probe.py`), in
float32 whatever the weights are in (`precision.py`), with and without a trunk. A comparison that could not have found
the smallest mistake, one token that is hidden, does not pass: it says that it cannot tell.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from evalkit.scoring.forward import Forward
from evalkit.scoring.memory import is_out_of_memory
from evalkit.scoring.precision import HALF, in_float32
from evalkit.scoring.probe import SHORTEST, Probe, hide_first, make_probe
from evalkit.scoring.tree import Ints

TOLERANCE = 1e-3
"""How far a hidden state may lie from that of the sequence alone, as a share of its norm, in float32. Rounding alone
gives 2e-5 at most (SmolLM2-135M, 30 layers) and 6e-6 in small models of six architectures."""
NOT_NUMBERS = "its states are not numbers (NaN)"
_MARGIN = 10
"""How many times less than the smallest mistake a difference must be, to be no mistake."""
_LEAST_EFFECT = 1e-5
"""Least effect of a hidden token that can be told from rounding. A model whose attention does less is hardly one."""
_RARE = 0.01
"""Share of the tokens whose states may differ in one row if others do in the next: where rounding decides between two
experts."""
_NOISE = 2.0
"""In bf16 and fp16, how far shared states may lie from float32's, in root mean squares of the model's own rounding."""
_LOOKAHEAD_TOLERANCE = 0.1
"""How far states may change with the tokens that follow where only the model's own half precision can be run: rounding
gives 1 to 3 % of their norm, a token that sees its successors another state."""
HEAD_TOLERANCE = 5e-3
"""Mean difference of a log-probability, in nats, between our head and the model's own on the same sequence: the same
arithmetic in the same order, so next to nothing in any dtype; in float32 also where logits are as large as 100, so that
a cap of up to 10,000 shows."""
_SMALL = 128
"""Nodes of the row on which the smallest mistake is measured."""
_CHUNK = 4096
"""States that are compared at a time."""


class Lengths(NamedTuple):
    """What a comparison is about, in tokens."""

    row: int
    """Keys of a batch: of its trunk and of its tree."""
    longest: int
    """Of the longest sequence."""


class SharingCheck:
    """Compares one model's shared hidden states with those of each sequence by itself.

    Args:
        model: a Hugging Face causal language model in evaluation mode.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._half = model.dtype in HALF
        self._wide = torch.float32 if self._half else model.dtype
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        self._vocabulary = min(int(end.weight.shape[0]) for end in ends if end is not None)
        self._expected = cache(self._run_alone)

    def lookahead(self, length: int) -> str:
        """Say how the model's states change with the tokens that follow, if they do, in sequences of a length."""
        half = (length + 1) // 2

        def gaps(seed: int, wide: bool = True) -> torch.Tensor:
            sequence, forward = self._tokens(length, seed), self._forward(wide)
            return _gaps(forward.hidden_alone(sequence[:half]), forward.hidden_alone(sequence)[:half])

        try:
            with self._widened():
                worst = _systematic(gaps, TOLERANCE)
        except RuntimeError:
            if not self._half:
                raise
            # Some modules read others' weights, and memory may not hold the widened embedding
            worst = _systematic(partial(gaps, wide=False), _LOOKAHEAD_TOLERANCE)
        if worst is None:
            return ""
        return f"its states change by {worst:.2g} of their norm" if worst == worst else NOT_NUMBERS

    def head(self, length: int) -> str:
        """Say why our output head cannot stand for the model's own, if it cannot, on a sequence of a length."""
        tokens = self._tokens(length, seed=0)
        gap = self._forward(wide=False).head_gap(tokens)
        if gap <= HEAD_TOLERANCE:
            try:
                with self._widened():
                    gap = self._forward(wide=True).large_head_gap(tokens)
            except RuntimeError as error:
                if not self._half or is_out_of_memory(error):
                    raise
                return "it cannot be run in float32, in which it would be compared"
        # Written so that NaN is trouble too
        return "" if gap <= HEAD_TOLERANCE else f"its output head does more than evalkit knows, by {gap:.2g} nats"

    def sharing(self, kernel: str, lengths: Lengths) -> str:
        """Say why prefixes cannot be shared in batches of up to these lengths, if they cannot.

        Args:
            kernel: one of `forward.KERNELS`.
            lengths: of the batches.
        """
        if lengths.longest < SHORTEST:
            return f"sequences of {lengths.longest} tokens are too short to tell whether it can"
        for with_trunk in (False, True):
            with self._widened():
                trouble = self._float32_trouble(kernel, lengths, with_trunk)
            if not trouble and self._half:
                trouble = self._half_trouble(kernel, lengths, with_trunk)
            if trouble:
                return trouble + (" where a prefix is kept" if with_trunk else "")
        return ""

    def _float32_trouble(self, kernel: str, lengths: Lengths, with_trunk: bool) -> str:
        forward = self._forward(wide=True, kernel=kernel)
        smallest = self._smallest_mistake(forward, lengths, with_trunk)
        if smallest < _LEAST_EFFECT:
            return f"a hidden token changes its states by {smallest:.1g} of their norm, too little to tell"
        worst = _systematic(
            lambda seed: self._shared_gaps(forward, lengths, with_trunk, seed), min(TOLERANCE, smallest / _MARGIN)
        )
        if worst is None:
            return ""
        return f"its states differ by {worst:.2g} of their norm in rows of {lengths.row} tokens"

    def _half_trouble(self, kernel: str, lengths: Lengths, with_trunk: bool) -> str:
        probe, which = self._probe(lengths, seed=0)
        exact, own = self._expected(lengths.longest, 0, True), self._expected(lengths.longest, 0, False)
        rounding = _rms(_gaps(own, exact)[which])
        trunk = probe.trunk if with_trunk else 0
        states = _states(self._forward(wide=False, kernel=kernel), probe, trunk)
        shared = _rms(_gaps(states, exact, which[trunk:]))
        if shared <= _NOISE * rounding:
            return ""
        dtype = str(self._model.dtype).removeprefix("torch.")
        return f"in {dtype} its states differ by {shared:.2g} of their norm, of which rounding is {rounding:.2g}"

    def _shared_gaps(self, forward: Forward, lengths: Lengths, with_trunk: bool, seed: int) -> torch.Tensor:
        """[nodes] how far each shared state is from its sequence's own."""
        probe, which = self._probe(lengths, seed)
        trunk = probe.trunk if with_trunk else 0
        return _gaps(_states(forward, probe, trunk), self._expected(lengths.longest, seed, True), which[trunk:])

    def _smallest_mistake(self, forward: Forward, lengths: Lengths, with_trunk: bool) -> float:
        """How far states move when the farthest token is hidden; the median, since some may not depend on it."""
        longest = min(lengths.longest, _SMALL)
        probe = make_probe(self._vocabulary, _SMALL, longest)
        trunk = probe.trunk if with_trunk else 0
        tree, tokens = probe.after(trunk), probe.sequences[0][:trunk]
        right, wrong = (forward.hidden_shared(laid_out, tokens)[1:] for laid_out in (tree, hide_first(tree)))
        return float(_gaps(wrong, right).median())

    def _probe(self, lengths: Lengths, seed: int) -> tuple[Probe, torch.Tensor]:
        """The probe, and for each node its place among the states of `_run_alone`."""
        probe = make_probe(self._vocabulary, max(lengths.row, lengths.longest), lengths.longest, seed)
        starts = np.cumsum([0, *(len(sequence) for sequence in probe.sequences[:-1])])
        return probe, torch.from_numpy(starts[probe.owner] + probe.tree.positions).to(self._model.device)

    def _run_alone(self, longest: int, seed: int, wide: bool) -> torch.Tensor:
        """[tokens of all distinct sequences, d_model] states by the model's own forward pass."""
        probe = make_probe(self._vocabulary, longest, longest, seed)
        forward = self._forward(wide)
        with self._widened() if wide else nullcontext():
            return torch.cat([forward.hidden_alone(sequence) for sequence in probe.sequences])

    def _tokens(self, length: int, seed: int) -> Ints:
        """[length] random token ids."""
        return np.random.default_rng(seed).integers(0, self._vocabulary, length, dtype=np.int32)

    def _forward(self, wide: bool, kernel: str = "dense") -> Forward:
        return Forward(self._model, kernel, dtype=self._wide if wide else self._model.dtype)

    def _widened(self) -> AbstractContextManager[None]:
        return in_float32(self._model) if self._half else nullcontext()


def _systematic(gaps: Callable[[int], torch.Tensor], tolerance: float) -> float | None:
    """The largest gap, where there are gaps that are no accident; None where there are none.

    Where rounding decides between two experts, a state of other tokens is not the one that differs; so two rows are
    compared, the second only if it must be.

    Args:
        gaps: of a seed, [tokens].
        tolerance: what no gap may exceed; NaN exceeds all.
    """
    first = gaps(0)
    wrong = ~(first <= tolerance)
    if not wrong.any():
        return None
    again = ~(gaps(1) <= tolerance)
    rare = max(float(wrong.float().mean()), float(again.float().mean())) <= _RARE
    return None if rare and not (wrong & again).any() else float(first.max())


def _states(forward: Forward, probe: Probe, trunk: int) -> torch.Tensor:
    """[nodes after the trunk, d_model]"""
    return forward.hidden_shared(probe.after(trunk), probe.sequences[0][:trunk])


def _gaps(found: torch.Tensor, expected: torch.Tensor, which: torch.Tensor | None = None) -> torch.Tensor:
    """How far states are from what they should be: norm of the difference, as a share of the expected norm.

    Args:
        found: [tokens, d_model].
        expected: [states, d_model].
        which: [tokens] the place of each token's expected state; None: its own.

    Returns:
        [tokens], on the processor.
    """
    gaps = []
    for start in range(0, len(found), _CHUNK):
        stop = start + _CHUNK
        right = (expected[start:stop] if which is None else expected[which[start:stop]]).float()
        norm = right.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
        gaps.append(((found[start:stop].float() - right).norm(dim=-1) / norm).cpu())
    return torch.cat(gaps)


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())
