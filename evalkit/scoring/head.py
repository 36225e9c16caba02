"""Output head of a causal language model. In: final hidden states. Out: log-probabilities of tokens.

The head runs only on the states that predict a scored token, some columns of the vocabulary at a time, with a float32
log-sum-exp, so no [nodes, vocabulary] tensor ever exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evalkit.scoring.tree import Ints

_CPU_LOGITS = 2**20
"""Logits in memory at a time on a CPU: 4 MiB in float32, so that they stay in the processor's cache."""
_GPU_LOGITS = 2**28
_MIN_COLUMNS = 512
"""Minimum columns of the vocabulary at a time; a narrower product is slow."""
_MOST_NODES = 2**16
"""Maximum nodes of one call of the head; limited by `_WHOLE_LOGITS` where its columns cannot be split."""
_WHOLE_LOGITS = 2**23
_FAR = 100.0
"""Largest difference of logits, in nats, at which a float32 sum keeps its precision."""


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return an array as a tensor on a device, without waiting for a GPU."""
    states = torch.from_numpy(array)
    if device.type == "cuda" and torch.cuda.is_available():
        return states.pin_memory().to(device, non_blocking=True)
    return states.to(device)


def fetch(states: torch.Tensor) -> Any:
    """Return a tensor of a device as an array; waits until it is computed."""
    return states.cpu().numpy()


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of tokens, and whether each is the argmax."""

    logprobs: NDArray[np.float32]
    """[tokens] natural logarithms; NaN where a token is not scored."""
    greedy: NDArray[np.bool_]
    """[tokens] whether it is the argmax; False where not scored or not requested."""

    def along(self, path: Ints, before: Scores) -> Scores:
        """Return the scores of one sequence: `before` for its trunk, then those of its path's pairs."""
        logprobs = np.append(self.logprobs, np.float32(np.nan))[path]
        greedy = np.append(self.greedy, False)[path]
        return Scores(np.concatenate((before.logprobs, logprobs)), np.concatenate((before.greedy, greedy)))

    @classmethod
    def after_first(cls, rest: Scores) -> Scores:
        """Return the scores of a whole sequence: the unscored first token, then `rest`."""
        first = cls(np.full(1, np.nan, np.float32), np.zeros(1, np.bool_))
        return rest.along(np.arange(len(rest.logprobs), dtype=np.int32), first)


NOTHING = Scores(np.empty(0, np.float32), np.empty(0, np.bool_))


class OutputHead:
    """Log-probabilities from final hidden states, and on request (`greedy`) whether tokens are the argmax."""

    def __init__(self, model: Any, greedy: bool) -> None:
        self.module = model.get_output_embeddings()
        """The model's own output head."""
        self._config = model.config.get_text_config()
        self._greedy = greedy
        self._device = self.module.weight.device

    def logits(self, states: torch.Tensor, columns: slice | None = None) -> torch.Tensor:
        """Return logits, [nodes, columns], of states, [nodes, d_model], with some models' scaling and soft cap."""
        if columns is None or columns == slice(0, self.module.weight.shape[0]):
            logits: torch.Tensor = self.module(states)
        else:
            bias = None if self.module.bias is None else self.module.bias[columns]
            logits = torch.nn.functional.linear(states, self.module.weight[columns], bias)
        if scaling := getattr(self._config, "logits_scaling", None):  # Granite
            logits = logits / scaling
        if scale := getattr(self._config, "logit_scale", None):  # Cohere
            logits = logits * scale
        if cap := getattr(self._config, "final_logit_softcapping", None):  # Gemma 2
            logits = torch.tanh(logits / cap) * cap
        return logits

    def scores(self, hidden: torch.Tensor, nodes: NDArray[np.int64], targets: NDArray[np.int64]) -> Scores:
        """Score each pair: log p(target | node). The head runs once for each distinct node."""
        distinct, which = np.unique(nodes, return_inverse=True)
        most, columns = self._chunk_shape(len(distinct))
        # Pairs in the order in which they are scored: by chunk of nodes, then by target
        order = np.lexsort((targets, which // most))
        cuts = np.searchsorted(which[order] // most, np.arange(-(-len(distinct) // most) + 1))
        chunks = []
        for chunk, (start, stop) in enumerate(pairwise(cuts.tolist())):
            states = hidden[to_device(distinct[chunk * most : (chunk + 1) * most], self._device)]
            pairs = order[start:stop]
            chunks.append(self._chunk_scores(states, which[pairs] - chunk * most, targets[pairs], columns))
        logprobs, greedy = np.empty(len(nodes), np.float32), np.zeros(len(nodes), np.bool_)
        if chunks:
            # One transfer for all
            logprobs[order], is_greedy = fetch(torch.cat(chunks, dim=1))
            greedy[order] = is_greedy > 0
        return Scores(logprobs, greedy)

    def _chunk_scores(
        self, states: torch.Tensor, nodes: NDArray[np.int64], targets: NDArray[np.int64], step: int
    ) -> torch.Tensor:
        """Score pairs, sorted by target, with `step` columns of the vocabulary at a time; sums are float32.

        Returns [2, pairs]: log-probabilities, and 1 where the target is the argmax.
        """
        pair_node, pair_target = to_device(np.stack((nodes, targets)), self._device)
        chosen = torch.empty(len(targets), device=self._device)
        peak = torch.full((len(states),), -torch.inf, device=self._device)
        argmax = torch.zeros(len(states), dtype=torch.long, device=self._device)
        vocabulary = self.module.weight.shape[0]
        cuts = np.searchsorted(targets, np.arange(0, vocabulary + step, step)).tolist()
        totals = []
        for start, (first, last) in zip(range(0, vocabulary, step), pairwise(cuts), strict=True):
            logits = self.logits(states, slice(start, min(start + step, vocabulary)))
            chosen[first:last] = logits[pair_node[first:last], pair_target[first:last] - start].float()
            totals.append(_log_sum_exp(logits))
            if self._greedy:
                highest, where = logits.max(-1)
                argmax = torch.where(highest > peak, where + start, argmax)
                peak = torch.maximum(peak, highest.float())
        logprobs = chosen - torch.stack(totals).logsumexp(0)[pair_node]
        is_greedy = (argmax[pair_node] == pair_target).float() if self._greedy else torch.zeros_like(logprobs)
        return torch.stack((logprobs, is_greedy))

    def _chunk_shape(self, nodes: int) -> tuple[int, int]:
        """Return how many nodes and how many columns of the vocabulary one call of the head has."""
        vocabulary: int = self.module.weight.shape[0]
        # Only a plain matrix can be split
        if type(self.module) is not torch.nn.Linear:
            return max(1, _WHOLE_LOGITS // vocabulary), vocabulary
        nodes = max(1, min(nodes, _MOST_NODES))
        logits = _CPU_LOGITS if self._device.type == "cpu" else _GPU_LOGITS
        return nodes, min(vocabulary, max(_MIN_COLUMNS, logits // nodes))


def _log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    """Return the log-sum-exp of [nodes, columns] in any dtype as [nodes] in float32."""
    if logits.device.type != "cpu":
        return logits.float().logsumexp(-1)
    # log_softmax needs one pass over the logits
    first = logits[:, 0].float()
    total = first - torch.log_softmax(logits, -1, dtype=torch.float32)[:, 0]
    # A masked first token (a huge negative logit, or -inf) would lose the sum's precision
    return total if (total - first).amax() < _FAR else logits.float().logsumexp(-1)
