"""Forward pass over a token tree. In: trees. Out: log-probabilities of their (node, predicted token) pairs.

The base model runs once over a tree; the output head runs only on the nodes that predict a scored token, some columns
of the vocabulary at a time, with a float32 log-sum-exp, so no [nodes, vocabulary] tensor ever exists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from evalkit.models.dynamic import dynamic_modules, forget_lengths
from evalkit.models.parts import base_of
from evalkit.scoring.alibi import alibi_by_position
from evalkit.scoring.attention import TileLayout, TreeAttention, attending
from evalkit.scoring.flex import FlexLayout
from evalkit.scoring.transfer import fetch, to_device
from evalkit.scoring.tree import TRUNK, Ints, Tree

KERNELS = ("tiles", "flex", "dense")
"""Tree attention kernels: the two of `attention.py`, and a dense mask for the model's own attention."""

_CPU_LOGITS = 2**20
"""Logits in memory at a time on a CPU: 4 MiB in float32, so that they stay in the processor's cache."""
_GPU_LOGITS = 2**28
_MIN_COLUMNS = 512
"""Minimum columns of the vocabulary at a time; a narrower product is slow."""
_MOST_NODES = 2**16
"""Maximum nodes of one call of the head; limited by `_WHOLE_LOGITS` where its columns cannot be split."""
_WHOLE_LOGITS = 2**23

_LARGE = 100.0
"""Largest logit on which the head is checked."""
_FAR = 100.0
"""Largest difference of logits, in nats, at which a float32 sum keeps its precision."""


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
    def after_first(cls, found: Scores) -> Scores:
        """Return the scores of a whole sequence: the unscored first token, then `found`."""
        return cls(
            np.concatenate((np.full(1, np.nan, np.float32), found.logprobs)),
            np.concatenate((np.zeros(1, np.bool_), found.greedy)),
        )


NOTHING = Scores(np.empty(0, np.float32), np.empty(0, np.bool_))


@dataclass(frozen=True)
class Trunk:
    """A prefix after its forward pass: scores, and keys and values of each layer."""

    tokens: Ints
    scores: Scores
    """Of its tokens; of the first token of a sequence for the empty trunk."""
    last_hidden: torch.Tensor
    """[1, d_model] final hidden state that predicts the first token after the trunk."""
    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """Keys and values of each layer, [1, heads, length, size]; none for the empty trunk."""


class _TrunkCache(DynamicCache):  # type: ignore[misc]
    """Read-only KV cache of the trunk, prepended to the tree's keys and values."""

    def __init__(self, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        for index, (keys, values) in enumerate(layers):
            super().update(keys, values, index)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's new keys and values, [1, heads, nodes, size], with the trunk's prepended."""
        layer = self.layers[layer_idx]
        return torch.cat((layer.keys, key_states), dim=2), torch.cat((layer.values, value_states), dim=2)


class Forward:
    """Forward pass of a causal language model over trees.

    Args:
        model: a Hugging Face causal language model in evaluation mode.
        kernel: one of `KERNELS`.
        greedy: whether to compute if a token is the argmax.
        dtype: the compute dtype, where it is not the dtype of the weights (`precision.in_float32`).
    """

    def __init__(
        self, model: Any, kernel: str = "dense", greedy: bool = False, dtype: torch.dtype | None = None
    ) -> None:
        self.kernel = kernel
        self._greedy = greedy
        self._model = model
        self._base = base_of(model)
        self._head = model.get_output_embeddings()
        self._config = model.config.get_text_config()
        self._device = self._head.weight.device
        self._dtype = dtype or self._head.weight.dtype
        self._dynamic = dynamic_modules(model)
        self._trunk: Trunk | None = None

    @torch.inference_mode()
    def trunk(self, tokens: Ints) -> Trunk:
        """Run a prefix; the latest one is cached."""
        if self._trunk is None or not np.array_equal(self._trunk.tokens, tokens):
            self._trunk = self._run_trunk(tokens)
        return self._trunk

    @torch.inference_mode()
    def score(self, tree: Tree, trunk: Trunk) -> Scores:
        """Score every pair of a tree.

        Args:
            tree: built for the trunk's length.
            trunk: from `self.trunk`.
        """
        forget_lengths(self._dynamic)
        hidden = self._hidden(tree, trunk)
        # The trunk's last token predicts too: its state is appended to the nodes
        nodes = np.where(tree.pair_nodes == TRUNK, len(tree.tokens), tree.pair_nodes).astype(np.int64)
        return self._head_scores(torch.cat((hidden, trunk.last_hidden)), nodes, tree.pair_targets.astype(np.int64))

    @torch.inference_mode()
    def score_unshared(self, tokens: Ints) -> Scores:
        """Score one sequence, [length], without a tree but with evalkit's output head."""
        ids = to_device(tokens[None].astype(np.int64), self._device)
        forget_lengths(self._dynamic)
        hidden = self._states(input_ids=ids[:, :-1], use_cache=False)
        return Scores.after_first(self._head_scores(hidden, np.arange(len(tokens) - 1), tokens[1:].astype(np.int64)))

    @torch.inference_mode()
    def score_alone(self, tokens: Ints) -> Scores:
        """Score one sequence by the model's own forward pass and head: the reference for all other ways."""
        ids = to_device(tokens[None].astype(np.int64), self._device)
        forget_lengths(self._dynamic)
        logits = self._model(input_ids=ids[:, :-1]).logits[0].float()
        found = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        greedy = logits.argmax(-1) == ids[0, 1:]
        return Scores.after_first(Scores(found.cpu().numpy(), greedy.cpu().numpy()))

    @torch.inference_mode()
    def hidden_alone(self, tokens: Ints) -> torch.Tensor:
        """Return the final hidden states of one sequence, [length, d_model], by the model's own attention."""
        ids = to_device(tokens[None].astype(np.int64), self._device)
        forget_lengths(self._dynamic)
        return self._states(input_ids=ids, use_cache=False)

    @torch.inference_mode()
    def hidden_shared(self, tree: Tree, trunk: Ints) -> torch.Tensor:
        """Return the final hidden states of a tree built after `trunk`, [nodes, d_model]."""
        before = self.trunk(trunk)
        forget_lengths(self._dynamic)
        return self._hidden(tree, before)

    @torch.inference_mode()
    def head_gap(self, tokens: Ints) -> float:
        """Return the mean difference, in nats, of evalkit's and the model's log-probabilities over the vocabulary."""
        ids = to_device(tokens[None].astype(np.int64), self._device)
        forget_lengths(self._dynamic)
        own = self._model(input_ids=ids).logits[0].float().log_softmax(-1)
        hidden = self.hidden_alone(tokens)
        ours = self._logits(hidden, slice(0, self._head.weight.shape[0])).float().log_softmax(-1)
        # Also with the columns in chunks, as in scoring
        parts = self._head_scores(hidden[:-1], np.arange(len(tokens) - 1), tokens[1:].astype(np.int64)).logprobs
        expected = own[:-1].gather(1, ids[0, 1:, None])[:, 0].cpu().numpy()
        return float(max((ours - own).abs().mean(), np.abs(parts - expected).mean()))

    @torch.inference_mode()
    def large_head_gap(self, tokens: Ints) -> float:
        """Return the same difference with logits as large as a trained model's, since a cap changes small ones little.

        NaN where the model does not call its head as a module, so that its input cannot be scaled.
        """
        hidden = self.hidden_alone(tokens)
        logits = self._head(hidden)
        factor = _LARGE / float(logits.float().abs().max())
        called = False

        def scaled(_: torch.nn.Module, states: tuple[Any, ...]) -> tuple[Any, ...]:
            nonlocal called
            called = True
            return (states[0] * factor, *states[1:])

        ids = to_device(tokens[None].astype(np.int64), self._device)
        forget_lengths(self._dynamic)
        hook = self._head.register_forward_pre_hook(scaled)
        try:
            own = self._model(input_ids=ids).logits[0].float().log_softmax(-1)
        finally:
            hook.remove()
        ours = self._logits(hidden * factor, slice(0, self._head.weight.shape[0])).float().log_softmax(-1)
        return float((ours - own).abs().mean()) if called else math.nan

    def _run_trunk(self, tokens: Ints) -> Trunk:
        if not len(tokens):
            empty = torch.zeros(1, self._head.weight.shape[1], device=self._device, dtype=self._dtype)
            return Trunk(tokens, Scores.after_first(NOTHING), empty, ())
        ids = to_device(tokens[None].astype(np.int64), self._device)
        forget_lengths(self._dynamic)
        cache = DynamicCache()
        hidden = self._states(input_ids=ids, past_key_values=cache, use_cache=True)
        scores = self._head_scores(hidden, np.arange(len(tokens) - 1), tokens[1:].astype(np.int64))
        layers = tuple((layer.keys, layer.values) for layer in cache.layers)
        return Trunk(tokens, Scores.after_first(scores), hidden[-1:], layers)

    def _hidden(self, tree: Tree, trunk: Trunk) -> torch.Tensor:
        """Return the final hidden states of a tree, [nodes, d_model]."""
        packed = np.stack((tree.tokens, tree.positions)).astype(np.int64)
        ids, positions = to_device(packed, self._device)[:, None]
        inputs = {"input_ids": ids, "position_ids": positions}
        if trunk.layers:
            inputs |= {"past_key_values": _TrunkCache(trunk.layers)}
        if self.kernel == "dense":
            ends = to_device(tree.ends, self._device)
            inputs |= {"attention_mask": self._tree_mask(ends, len(trunk.tokens))}
            before = torch.arange(len(trunk.tokens), device=self._device)
            with alibi_by_position(self._base, torch.cat((before, positions[0]))):
                return self._states(**inputs, use_cache=bool(trunk.layers))
        with attending(self._model, self._layout(tree, len(trunk.tokens))):
            return self._states(**inputs, use_cache=bool(trunk.layers))

    def _states(self, **inputs: Any) -> torch.Tensor:
        """Run the base model on one row; return its final hidden states, [length, d_model], on the head's device."""
        # Where the last layer is on another device and no module follows it, so are the states
        states: torch.Tensor = self._base(**inputs).last_hidden_state[0].to(self._device)
        return states

    def _layout(self, tree: Tree, trunk: int) -> TreeAttention:
        if self.kernel == "flex":
            return FlexLayout(tree.ends, trunk, self._device)
        heads = self._config.num_attention_heads
        width = (getattr(self._config, "head_dim", None) or self._config.hidden_size // heads) * heads
        return TileLayout(tree.ends, tree.positions - trunk, trunk, width, self._dtype, self._device)

    def _tree_mask(self, ends: torch.Tensor, trunk: int) -> torch.Tensor:
        """Return the additive mask of a tree, [1, 1, nodes, trunk + nodes], from the ends of subtrees, [nodes].

        Not boolean, since eager attention adds the mask without a check of its dtype.
        """
        nodes = len(ends)
        index = torch.arange(nodes, device=ends.device)
        hidden = (index[None] > index[:, None]) | (index[:, None] >= ends[None])
        mask = torch.zeros(1, 1, nodes, trunk + nodes, device=ends.device, dtype=self._dtype)
        mask[0, 0, :, trunk:].masked_fill_(hidden, torch.finfo(self._dtype).min)
        return mask

    def _logits(self, states: torch.Tensor, columns: slice) -> torch.Tensor:
        """Return logits, [nodes, columns], of states, [nodes, d_model], with some models' scaling and soft cap."""
        if columns == slice(0, self._head.weight.shape[0]):
            logits: torch.Tensor = self._head(states)
        else:
            bias = None if self._head.bias is None else self._head.bias[columns]
            logits = torch.nn.functional.linear(states, self._head.weight[columns], bias)
        if scaling := getattr(self._config, "logits_scaling", None):  # Granite
            logits = logits / scaling
        if scale := getattr(self._config, "logit_scale", None):  # Cohere
            logits = logits * scale
        if cap := getattr(self._config, "final_logit_softcapping", None):  # Gemma 2
            logits = torch.tanh(logits / cap) * cap
        return logits

    def _head_scores(self, hidden: torch.Tensor, nodes: NDArray[np.int64], targets: NDArray[np.int64]) -> Scores:
        """Score each pair: log p(target | node). The head runs once for each distinct node."""
        distinct, which = np.unique(nodes, return_inverse=True)
        most, columns = self._chunk_shape(len(distinct))
        # Pairs in the order in which they are scored: by chunk of nodes, then by target
        order = np.lexsort((targets, which // most))
        cuts = np.searchsorted(which[order] // most, np.arange(-(-len(distinct) // most) + 1))
        found = []
        for chunk, (start, stop) in enumerate(pairwise(cuts.tolist())):
            states = hidden[to_device(distinct[chunk * most : (chunk + 1) * most], self._device)]
            pairs = order[start:stop]
            found.append(self._chunk_scores(states, which[pairs] - chunk * most, targets[pairs], columns))
        logprobs, greedy = np.empty(len(nodes), np.float32), np.zeros(len(nodes), np.bool_)
        if found:
            # One transfer for all
            logprobs[order], is_greedy = fetch(torch.cat(found, dim=1))
            greedy[order] = is_greedy > 0
        return Scores(logprobs, greedy)

    def _chunk_scores(
        self, states: torch.Tensor, nodes: NDArray[np.int64], targets: NDArray[np.int64], step: int
    ) -> torch.Tensor:
        """Score pairs with `step` columns of the vocabulary at a time; sums are float32.

        Args:
            states: [nodes, d_model].
            nodes, targets: [pairs] of ascending targets.
            step: columns.

        Returns:
            [2, pairs] on the device: log-probabilities, and 1 where the target is the argmax.
        """
        pair_node, pair_target = to_device(np.stack((nodes, targets)), self._device)
        chosen = torch.empty(len(targets), device=self._device)
        peak = torch.full((len(states),), -torch.inf, device=self._device)
        argmax = torch.zeros(len(states), dtype=torch.long, device=self._device)
        vocabulary = self._head.weight.shape[0]
        cuts = np.searchsorted(targets, np.arange(0, vocabulary + step, step)).tolist()
        totals = []
        for number, start in enumerate(range(0, vocabulary, step)):
            logits = self._logits(states, slice(start, min(start + step, vocabulary)))
            pairs = slice(cuts[number], cuts[number + 1])
            chosen[pairs] = logits[pair_node[pairs], pair_target[pairs] - start].float()
            totals.append(_log_sum_exp(logits))
            if self._greedy:
                highest, where = logits.max(-1)
                argmax = torch.where(highest > peak, where + start, argmax)
                peak = torch.maximum(peak, highest.float())
        found = chosen - torch.stack(totals).logsumexp(0)[pair_node]
        is_greedy = (argmax[pair_node] == pair_target).float() if self._greedy else torch.zeros_like(found)
        return torch.stack((found, is_greedy))

    def _chunk_shape(self, nodes: int) -> tuple[int, int]:
        """Return how many nodes and how many columns of the vocabulary one call of the head has."""
        vocabulary: int = self._head.weight.shape[0]
        # Only a plain matrix can be split
        if type(self._head) is not torch.nn.Linear:
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
    found = first - torch.log_softmax(logits, -1, dtype=torch.float32)[:, 0]
    # A masked first token (a huge negative logit, or -inf) would lose the sum's precision
    return found if (found - first).amax() < _FAR else logits.float().logsumexp(-1)
