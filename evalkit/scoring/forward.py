"""The model's side of scoring: batches of rows in, log-probabilities of their pairs out.

The base model runs once over a batch under the tree mask; the output head runs only on the nodes that predict a
scored token, in chunks, with a float32 log-sum-exp, so no [batch, length, vocabulary] tensor ever exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from evalkit.scoring.tree import TRUNK, Ints, Row

_LOGITS_PER_CHUNK = 2**23
"""Logits that exist at a time (32 MiB in float32)."""


class _TrunkCache(DynamicCache):  # type: ignore[misc]
    """Keys and values of the trunk, shown before each row's own and never added to."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[batch, heads, length, size] of a layer's new keys and values → with the trunk's before them."""
        layer, batch = self.layers[layer_idx], key_states.shape[0]
        keys = torch.cat((layer.keys.expand(batch, -1, -1, -1), key_states), dim=2)
        values = torch.cat((layer.values.expand(batch, -1, -1, -1), value_states), dim=2)
        return keys, values


@dataclass(frozen=True)
class Trunk:
    """A prefix that has been through the model."""

    tokens: Ints
    scores: NDArray[np.float32]
    """[length] log-probability of each token; NaN for the first, which nothing precedes."""
    last_hidden: torch.Tensor
    """[1, d_model] what predicts the first token after it."""
    cache: _TrunkCache | None
    """None for the empty trunk."""


class Forward:
    """Runs a causal language model over trees.

    Args:
        model: a Hugging Face causal language model in evaluation mode.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._base = model.base_model
        self._head = model.get_output_embeddings()
        self._config = model.config.get_text_config()
        self._device = self._head.weight.device
        self._dtype = self._head.weight.dtype
        self._trunk: Trunk | None = None

    @torch.inference_mode()
    def trunk(self, tokens: Ints) -> Trunk:
        """Run a prefix once; the latest one is kept."""
        if self._trunk is None or not np.array_equal(self._trunk.tokens, tokens):
            self._trunk = self._run_trunk(tokens)
        return self._trunk

    @torch.inference_mode()
    def score(self, rows: Sequence[Row], trunk: Trunk) -> list[NDArray[np.float32]]:
        """Log-probability of every pair of every row.

        Args:
            rows: laid out after `trunk`.
            trunk: from `self.trunk`.

        Returns:
            For each row, [pairs].
        """
        length = max(len(row.tokens) for row in rows)
        hidden = self._hidden(rows, length, trunk)
        nodes = np.concatenate(
            [
                np.where(row.pair_nodes == TRUNK, len(rows) * length, row.pair_nodes + i * length)
                for i, row in enumerate(rows)
            ]
        ).astype(np.int64)
        targets = np.concatenate([row.pair_targets for row in rows]).astype(np.int64)
        scores = self._head_scores(torch.cat((hidden, trunk.last_hidden)), nodes, targets)
        return np.split(scores, np.cumsum([len(row.pair_nodes) for row in rows])[:-1])

    @torch.inference_mode()
    def score_unshared(self, tokens: Ints) -> NDArray[np.float32]:
        """Log-probability of each token of one sequence, [length]; NaN for the first. No tree, but our own head."""
        ids = torch.from_numpy(tokens[None].astype(np.int64)).to(self._device)
        hidden = self._base(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[0]
        found = self._head_scores(hidden, np.arange(len(tokens) - 1), tokens[1:].astype(np.int64))
        return np.concatenate(([np.nan], found)).astype(np.float32)

    @torch.inference_mode()
    def score_alone(self, tokens: Ints) -> NDArray[np.float32]:
        """The same by the model's own forward pass, with nothing of ours: what all else is held against."""
        ids = torch.from_numpy(tokens[None].astype(np.int64)).to(self._device)
        logits = self._model(input_ids=ids[:, :-1]).logits[0].float()
        found = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        return np.concatenate(([np.nan], found.cpu().numpy())).astype(np.float32)

    def _run_trunk(self, tokens: Ints) -> Trunk:
        if not len(tokens):
            empty = torch.zeros(1, self._head.weight.shape[1], device=self._device, dtype=self._dtype)
            return Trunk(tokens, np.empty(0, np.float32), empty, None)
        ids = torch.from_numpy(tokens[None].astype(np.int64)).to(self._device)
        cache = _TrunkCache()
        filled = DynamicCache()
        hidden = self._base(input_ids=ids, past_key_values=filled, use_cache=True).last_hidden_state[0]
        cache.layers = filled.layers
        nodes = np.arange(len(tokens) - 1)
        scores = self._head_scores(hidden, nodes, tokens[1:].astype(np.int64))
        return Trunk(tokens, np.concatenate(([np.nan], scores)).astype(np.float32), hidden[-1:], cache)

    def _hidden(self, rows: Sequence[Row], length: int, trunk: Trunk) -> torch.Tensor:
        """[rows * length, d_model] final hidden states, padding included."""
        packed = np.zeros((3, len(rows), length), dtype=np.int64)
        for i, row in enumerate(rows):
            packed[:, i, : len(row.tokens)] = row.tokens, row.positions, row.ends
        ids, positions, ends = torch.from_numpy(packed).to(self._device)
        hidden = self._base(
            input_ids=ids,
            attention_mask=self._tree_mask(ends, len(trunk.tokens)),
            position_ids=positions,
            past_key_values=trunk.cache,
            use_cache=trunk.cache is not None,
        ).last_hidden_state
        flat: torch.Tensor = hidden.reshape(len(rows) * length, -1)
        return flat

    def _tree_mask(self, ends: torch.Tensor, trunk: int) -> torch.Tensor:
        """[rows, length] ends of subtrees → [rows, 1, length, trunk + length] additive mask.

        Additive and not boolean, since eager attention adds whatever it is given. Padding has end 0, so only it
        sees itself.
        """
        rows, length = ends.shape
        index = torch.arange(length, device=ends.device)
        seen = (index[None, None] <= index[None, :, None]) & (index[None, :, None] < ends[:, None])
        # A row of the mask that shows nothing makes some kernels give NaN, which padding would pass on
        seen |= torch.eye(length, dtype=torch.bool, device=ends.device)
        mask = torch.zeros(rows, 1, length, trunk + length, device=ends.device, dtype=self._dtype)
        mask[..., trunk:].masked_fill_(~seen[:, None], torch.finfo(self._dtype).min)
        return mask

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        """[nodes, d_model] → [nodes, vocabulary] in float32, with what some models do to them after the head."""
        logits: torch.Tensor = self._head(states).float()
        if scaling := getattr(self._config, "logits_scaling", None):  # Granite
            logits = logits / scaling
        if scale := getattr(self._config, "logit_scale", None):  # Cohere
            logits = logits * scale
        if cap := getattr(self._config, "final_logit_softcapping", None):  # Gemma 2
            logits = torch.tanh(logits / cap) * cap
        return logits

    def _head_scores(
        self, hidden: torch.Tensor, nodes: NDArray[np.int64], targets: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """log p(target | node) of each pair; the head runs once for each distinct node."""
        distinct, which = np.unique(nodes, return_inverse=True)
        order = np.argsort(which, kind="stable")
        states = hidden[torch.from_numpy(distinct).to(self._device)]
        pair_state = torch.from_numpy(which[order]).to(self._device)
        pair_target = torch.from_numpy(targets[order]).to(self._device)
        step = max(1, _LOGITS_PER_CHUNK // self._head.weight.shape[0])
        cuts = np.searchsorted(which[order], np.arange(0, len(distinct) + step, step))
        found = torch.empty(len(nodes), device=self._device)
        for chunk, start in enumerate(range(0, len(distinct), step)):
            logits = self._logits(states[start : start + step])
            pairs = slice(int(cuts[chunk]), int(cuts[chunk + 1]))
            chosen = logits[pair_state[pairs] - start, pair_target[pairs]]
            # log-sum-exp in place: a second tensor of this size costs more than the arithmetic
            peak = logits.amax(-1)
            total = logits.sub_(peak[:, None]).exp_().sum(-1).log_().add_(peak)
            found[pairs] = chosen - total[pair_state[pairs] - start]
        scores = np.empty(len(nodes), dtype=np.float32)
        scores[order] = found.cpu().numpy()
        return scores
