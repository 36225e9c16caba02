"""The model's side of scoring: trees in, log-probabilities of their pairs out.

The base model runs once over a tree; the output head runs only on the nodes that predict a scored token, some columns
of the vocabulary at a time, with a float32 log-sum-exp, so no [nodes, vocabulary] tensor ever exists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from evalkit.models.dynamic import dynamic_modules, forget_lengths
from evalkit.models.parts import base_of
from evalkit.scoring.alibi import alibi_by_position
from evalkit.scoring.attention import FlexLayout, TileLayout, TreeAttention, attending
from evalkit.scoring.tree import TRUNK, Ints, Tree

KERNELS = ("tiles", "flex", "dense")
"""Ways to attend inside a tree: the two of `attention.py`, and a mask over all of it for the model's own attention."""

_CPU_LOGITS = 2**20
"""Logits that exist at a time on a CPU: 4 MiB in float32, so that they stay in the cache."""
_GPU_LOGITS = 2**28
_MIN_COLUMNS = 512
"""Fewest tokens of the vocabulary at a time; a narrower product is slow."""
_MOST_NODES = 2**16
"""Most nodes that the head takes at a time; as many as `_WHOLE_LOGITS` allow where its columns can't be parted."""
_WHOLE_LOGITS = 2**23

_LARGE = 100.0
"""The largest logit on which the head is checked."""
_FAR = 100.0
"""Nats up to which a difference of logits keeps a sum's float32 digits."""


@dataclass(frozen=True)
class Scores:
    """What a model says of some tokens."""

    logprobs: NDArray[np.float32]
    """[tokens] natural logarithms; NaN where a token is not scored."""
    greedy: NDArray[np.bool_]
    """[tokens] whether it is the likeliest; False where not scored, or where nobody asked."""

    def along(self, path: Ints, before: Scores) -> Scores:
        """Scores of one sequence: `before` of its trunk, then its path's pairs."""
        logprobs = np.append(self.logprobs, np.float32(np.nan))[path]
        greedy = np.append(self.greedy, False)[path]
        return Scores(np.concatenate((before.logprobs, logprobs)), np.concatenate((before.greedy, greedy)))

    @classmethod
    def after_first(cls, found: Scores) -> Scores:
        """Of a whole sequence: `found`, and before it the first token, which nothing precedes."""
        return cls(
            np.concatenate((np.full(1, np.nan, np.float32), found.logprobs)),
            np.concatenate((np.zeros(1, np.bool_), found.greedy)),
        )


NOTHING = Scores(np.empty(0, np.float32), np.empty(0, np.bool_))


@dataclass(frozen=True)
class Trunk:
    """A prefix that has been through the model."""

    tokens: Ints
    scores: Scores
    """Of its tokens; of the first token of a sequence for the empty trunk."""
    last_hidden: torch.Tensor
    """[1, d_model] what predicts the first token after it."""
    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """Keys and values of each layer, [1, heads, length, size]; none for the empty trunk."""


class _TrunkCache(DynamicCache):  # type: ignore[misc]
    """Keys and values of the trunk, shown before the tree's own and never added to."""

    def __init__(self, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        for index, (keys, values) in enumerate(layers):
            super().update(keys, values, index)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, heads, nodes, size] of a layer's new keys and values → with the trunk's before them."""
        layer = self.layers[layer_idx]
        return torch.cat((layer.keys, key_states), dim=2), torch.cat((layer.values, value_states), dim=2)


class Forward:
    """Runs a causal language model over trees.

    Args:
        model: a Hugging Face causal language model in evaluation mode.
        kernel: one of `KERNELS`.
        greedy: whether to find out if a token is the argmax.
        dtype: what the model computes in, where that is not the dtype of its weights (`precision.in_float32`).
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
        """Run a prefix once; the latest one is kept."""
        if self._trunk is None or not np.array_equal(self._trunk.tokens, tokens):
            self._trunk = self._run_trunk(tokens)
        return self._trunk

    @torch.inference_mode()
    def score(self, tree: Tree, trunk: Trunk) -> Scores:
        """Scores of every pair of a tree.

        Args:
            tree: laid out after `trunk`.
            trunk: from `self.trunk`.
        """
        forget_lengths(self._dynamic)
        hidden = self._hidden(tree, trunk)
        # The trunk's last token predicts too: it stands behind the nodes
        nodes = np.where(tree.pair_nodes == TRUNK, len(tree.tokens), tree.pair_nodes).astype(np.int64)
        return self._head_scores(torch.cat((hidden, trunk.last_hidden)), nodes, tree.pair_targets.astype(np.int64))

    @torch.inference_mode()
    def score_unshared(self, tokens: Ints) -> Scores:
        """Scores of one sequence, [length]. No tree, but our own head."""
        ids = torch.from_numpy(tokens[None].astype(np.int64)).to(self._device)
        forget_lengths(self._dynamic)
        hidden = self._base(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[0]
        return Scores.after_first(self._head_scores(hidden, np.arange(len(tokens) - 1), tokens[1:].astype(np.int64)))

    @torch.inference_mode()
    def score_alone(self, tokens: Ints) -> Scores:
        """The same by the model's own forward pass, with nothing of ours: what all else is held against."""
        ids = torch.from_numpy(tokens[None].astype(np.int64)).to(self._device)
        forget_lengths(self._dynamic)
        logits = self._model(input_ids=ids[:, :-1]).logits[0].float()
        found = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        greedy = logits.argmax(-1) == ids[0, 1:]
        return Scores.after_first(Scores(found.cpu().numpy(), greedy.cpu().numpy()))

    @torch.inference_mode()
    def hidden_alone(self, tokens: Ints) -> torch.Tensor:
        """[length, d_model] final hidden states of every token of one sequence, by the model's own attention."""
        ids = torch.from_numpy(tokens[None].astype(np.int64)).to(self._device)
        forget_lengths(self._dynamic)
        states: torch.Tensor = self._base(input_ids=ids, use_cache=False).last_hidden_state[0]
        return states

    @torch.inference_mode()
    def hidden_shared(self, tree: Tree, trunk: Ints) -> torch.Tensor:
        """[nodes, d_model] final hidden states of every node of a tree, which is laid out after `trunk`."""
        before = self.trunk(trunk)
        forget_lengths(self._dynamic)
        return self._hidden(tree, before)

    @torch.inference_mode()
    def head_gap(self, tokens: Ints) -> float:
        """Mean difference, in nats, of our output head's log-probabilities of the whole vocabulary from the model's."""
        ids = torch.from_numpy(tokens[None].astype(np.int64)).to(self._device)
        forget_lengths(self._dynamic)
        own = self._model(input_ids=ids).logits[0].float().log_softmax(-1)
        hidden = self.hidden_alone(tokens)
        ours = self._logits(hidden, slice(0, self._head.weight.shape[0])).float().log_softmax(-1)
        # The columns are also taken in parts, as scores are
        parts = self._head_scores(hidden[:-1], np.arange(len(tokens) - 1), tokens[1:].astype(np.int64)).logprobs
        expected = own[:-1].gather(1, ids[0, 1:, None])[:, 0].cpu().numpy()
        return float(max((ours - own).abs().mean(), np.abs(parts - expected).mean()))

    @torch.inference_mode()
    def large_head_gap(self, tokens: Ints) -> float:
        """The same where the head's logits are as large as a trained model's: what caps them changes small ones little.

        Not a number where the model does not call its head, so that nothing can be put before it.
        """
        hidden = self.hidden_alone(tokens)
        logits = self._head(hidden)
        factor = _LARGE / float(logits.float().abs().max())
        called = False

        def scaled(_: torch.nn.Module, states: tuple[Any, ...]) -> tuple[Any, ...]:
            nonlocal called
            called = True
            return (states[0] * factor, *states[1:])

        ids = torch.from_numpy(tokens[None].astype(np.int64)).to(self._device)
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
        ids = torch.from_numpy(tokens[None].astype(np.int64)).to(self._device)
        forget_lengths(self._dynamic)
        cache = DynamicCache()
        hidden = self._base(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state[0]
        scores = self._head_scores(hidden, np.arange(len(tokens) - 1), tokens[1:].astype(np.int64))
        layers = tuple((layer.keys, layer.values) for layer in cache.layers)
        return Trunk(tokens, Scores.after_first(scores), hidden[-1:], layers)

    def _hidden(self, tree: Tree, trunk: Trunk) -> torch.Tensor:
        """[nodes, d_model] final hidden states."""
        packed = np.stack((tree.tokens, tree.positions)).astype(np.int64)
        ids, positions = torch.from_numpy(packed).to(self._device)[:, None]
        inputs = {"input_ids": ids, "position_ids": positions}
        if trunk.layers:
            inputs |= {"past_key_values": _TrunkCache(trunk.layers)}
        if self.kernel == "dense":
            ends = torch.from_numpy(tree.ends).to(self._device)
            inputs |= {"attention_mask": self._tree_mask(ends, len(trunk.tokens))}
            before = torch.arange(len(trunk.tokens), device=self._device)
            with alibi_by_position(self._base, torch.cat((before, positions[0]))):
                hidden = self._base(**inputs, use_cache=bool(trunk.layers)).last_hidden_state
        else:
            with attending(self._model, self._layout(tree, len(trunk.tokens))):
                hidden = self._base(**inputs, use_cache=bool(trunk.layers)).last_hidden_state
        states: torch.Tensor = hidden[0]
        return states

    def _layout(self, tree: Tree, trunk: int) -> TreeAttention:
        if self.kernel == "flex":
            return FlexLayout(torch.from_numpy(tree.ends).to(self._device), trunk)
        heads = self._config.num_attention_heads
        width = (getattr(self._config, "head_dim", None) or self._config.hidden_size // heads) * heads
        return TileLayout(tree.ends, tree.positions - trunk, trunk, width, self._dtype, self._device)

    def _tree_mask(self, ends: torch.Tensor, trunk: int) -> torch.Tensor:
        """[nodes] ends of subtrees → [1, 1, nodes, trunk + nodes] additive mask.

        Additive and not boolean, since eager attention adds whatever it is given.
        """
        nodes = len(ends)
        index = torch.arange(nodes, device=ends.device)
        hidden = (index[None] > index[:, None]) | (index[:, None] >= ends[None])
        mask = torch.zeros(1, 1, nodes, trunk + nodes, device=ends.device, dtype=self._dtype)
        mask[0, 0, :, trunk:].masked_fill_(hidden, torch.finfo(self._dtype).min)
        return mask

    def _logits(self, states: torch.Tensor, columns: slice) -> torch.Tensor:
        """[nodes, d_model] → [nodes, columns], with what some models do to them after the head."""
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
        """log p(target | node) of each pair; the head runs once for each distinct node."""
        distinct, which = np.unique(nodes, return_inverse=True)
        logprobs, greedy = np.empty(len(nodes), np.float32), np.zeros(len(nodes), np.bool_)
        most, columns = self._chunk_shape(len(distinct))
        for start in range(0, len(distinct), most):
            stop = start + most
            mine = np.flatnonzero((which >= start) & (which < stop))
            states = hidden[torch.from_numpy(distinct[start:stop]).to(self._device)]
            logprobs[mine], greedy[mine] = self._chunk_scores(states, which[mine] - start, targets[mine], columns)
        return Scores(logprobs, greedy)

    def _chunk_scores(
        self, states: torch.Tensor, nodes: NDArray[np.int64], targets: NDArray[np.int64], step: int
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """The vocabulary goes by `step` columns at a time; sums are float32."""
        order = np.argsort(targets, kind="stable")
        pair_node = torch.from_numpy(nodes[order]).to(self._device)
        pair_target = torch.from_numpy(targets[order]).to(self._device)
        chosen = torch.empty(len(order), device=self._device)
        peak = torch.full((len(states),), -torch.inf, device=self._device)
        likeliest = torch.zeros(len(states), dtype=torch.long, device=self._device)
        vocabulary = self._head.weight.shape[0]
        cuts = np.searchsorted(targets[order], np.arange(0, vocabulary + step, step)).tolist()
        totals = []
        for number, start in enumerate(range(0, vocabulary, step)):
            logits = self._logits(states, slice(start, min(start + step, vocabulary)))
            pairs = slice(cuts[number], cuts[number + 1])
            chosen[pairs] = logits[pair_node[pairs], pair_target[pairs] - start].float()
            totals.append(_log_sum_exp(logits))
            if self._greedy:
                highest, where = logits.max(-1)
                likeliest = torch.where(highest > peak, where + start, likeliest)
                peak = torch.maximum(peak, highest.float())
        found = chosen - torch.stack(totals).logsumexp(0)[pair_node]
        # One transfer for both
        both = torch.stack((found, (likeliest[pair_node] == pair_target).float())).cpu().numpy()
        logprobs, greedy = np.empty(len(order), np.float32), np.zeros(len(order), np.bool_)
        logprobs[order], greedy[order] = both[0], both[1] > 0 if self._greedy else False
        return logprobs, greedy

    def _chunk_shape(self, nodes: int) -> tuple[int, int]:
        """How many nodes and how many columns of the vocabulary the head takes at a time."""
        vocabulary: int = self._head.weight.shape[0]
        # Only a plain matrix can be taken in parts
        if type(self._head) is not torch.nn.Linear:
            return max(1, _WHOLE_LOGITS // vocabulary), vocabulary
        nodes = max(1, min(nodes, _MOST_NODES))
        logits = _CPU_LOGITS if self._device.type == "cpu" else _GPU_LOGITS
        return nodes, min(vocabulary, max(_MIN_COLUMNS, logits // nodes))


def _log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    """[nodes, columns] of any dtype → [nodes] in float32."""
    if logits.device.type != "cpu":
        return logits.float().logsumexp(-1)
    # By way of log_softmax, which goes over them once
    first = logits[:, 0].float()
    found = first - torch.log_softmax(logits, -1, dtype=torch.float32)[:, 0]
    # A first token that is ruled out (a huge negative logit, or -inf) would swallow the sum's digits
    return found if (found - first).amax() < _FAR else logits.float().logsumexp(-1)
