"""Forward passes over token trees and whole rows. Out: log-probabilities of their (node, predicted token) pairs.

The base model runs once over a tree. The output head runs only on the states that predict a scored token, some columns
of the vocabulary at a time, with a float32 log-sum-exp, so no [nodes, vocabulary] tensor ever exists.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from evalkit.compatibility.names import replaced
from evalkit.compatibility.torch import compiled_for
from evalkit.compatibility.transformers import cached_tensors
from evalkit.models.called import WholeLogits
from evalkit.models.parts import base_of, dynamic_modules, forget_lengths
from evalkit.scoring.attention import (
    FlexLayout,
    TileLayout,
    additive_mask,
    attending,
    multiple_of_block,
    pad,
    to_device,
)
from evalkit.scoring.passes import Pass, Rows
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
_MANY_NODES = 2048
"""Nodes from which a GPU's log-sum-exp is compiled."""
_FAR = 100.0
"""Largest difference of logits, in nats, at which a float32 sum keeps its precision."""


def fetch(states: torch.Tensor) -> Any:
    """Return a tensor of a device as an array; waits until it is computed."""
    return states.cpu().numpy()


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of tokens, and whether each is the argmax."""

    logprobs: NDArray[np.float32]
    """[tokens] natural logarithms; NaN if a token is not scored."""
    greedy: NDArray[np.bool_]
    """[tokens] False if not scored or not requested."""

    def along(self, paths: Sequence[Ints], before: Scores) -> list[Scores]:
        """Return the scores of each sequence: `before` for its trunk, then those of its path's pairs."""
        pairs, trunk = len(self.logprobs), len(before.logprobs)
        start = np.arange(pairs, pairs + trunk, dtype=np.int32)
        index = np.concatenate([part for path in paths for part in (start, path)])
        # The last entry is that of -1, a token that is not scored
        logprobs = np.concatenate((self.logprobs, before.logprobs, [np.float32(np.nan)]))[index]
        greedy = np.concatenate((self.greedy, before.greedy, [False]))[index]
        bounds = pairwise(accumulate((trunk + len(path) for path in paths), initial=0))
        return [Scores(logprobs[first:end], greedy[first:end]) for first, end in bounds]

    @classmethod
    def after_first(cls, rest: Scores) -> Scores:
        """Return the scores of a whole sequence: the unscored first token, then `rest`."""
        return rest.along([np.arange(len(rest.logprobs), dtype=np.int32)], cls.of_first())[0]

    @classmethod
    def of_first(cls) -> Scores:
        """Return the scores of the first token of a sequence, which has none."""
        return cls(np.full(1, np.nan, np.float32), np.zeros(1, np.bool_))


class OutputHead:
    """Log-probabilities from final hidden states, and on request (`greedy`) whether tokens are the argmax."""

    def __init__(self, module: Any, config: Any, greedy: bool) -> None:
        self.module = module
        self._config = config
        self._greedy = greedy
        self._device = module.weight.device

    def logits(self, states: torch.Tensor, columns: slice | None = None) -> torch.Tensor:
        """Return logits, [nodes, columns], of states, [nodes, d_model], with some models' scaling and soft cap."""
        if isinstance(self.module, WholeLogits):
            return states
        if columns is None or columns == slice(0, self.module.weight.shape[0]):
            logits: torch.Tensor = self.module(states)
        else:
            # States are wider than the weights in the check of a half-precision head, whose module is not called here
            bias = None if self.module.bias is None else self.module.bias[columns].to(states.dtype)
            logits = torch.nn.functional.linear(states, self.module.weight[columns].to(states.dtype), bias)
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
        # Nodes and columns of the vocabulary of one call of the head; only a plain matrix can be split
        columns: int = self.module.weight.shape[0]
        if type(self.module) is torch.nn.Linear:
            most = max(1, min(len(distinct), _MOST_NODES))
            # A GPU multiplies matrices at odd addresses at half its rate
            logits, step = (_CPU_LOGITS, 1) if self._device.type == "cpu" else (_GPU_LOGITS, _MIN_COLUMNS)
            columns = min(columns, max(_MIN_COLUMNS, logits // most // step * step))
        else:
            most = max(1, _WHOLE_LOGITS // columns)
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
        """Return [2, pairs]: log-probabilities, and 1 for the argmax; pairs are sorted by target, columns in steps."""
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


def _log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    if logits.device.type != "cpu":
        # Compiled, it reads the logits and writes none; for all sizes as is best for the first, so not for a few nodes
        is_large = logits.dtype != torch.float32 and len(logits) >= _MANY_NODES
        total: torch.Tensor = (compiled_for(_wide_sum, logits.device.type) if is_large else _wide_sum)(logits)
        return total
    # log_softmax needs one pass over the logits
    first = logits[:, 0].float()
    total = first - torch.log_softmax(logits, -1, dtype=torch.float32)[:, 0]
    # A masked first token (a huge negative logit, or -inf) would lose the sum's precision
    return total if (total - first).amax() < _FAR else _wide_sum(logits)


def _wide_sum(logits: torch.Tensor) -> torch.Tensor:
    return logits.float().logsumexp(-1)


@dataclass(frozen=True)
class Trunk:
    tokens: Ints
    scores: Scores
    """Of its tokens; of the first token of a sequence for the empty trunk."""
    last_hidden: torch.Tensor
    """[1, d_model] final hidden state that predicts the first token after the trunk."""
    cache: _TrunkCache


class _TrunkCache(DynamicCache):  # type: ignore[misc]
    """Read-only KV cache of the trunk, padded to a length, prepended to the tree's keys and values."""

    def __init__(self, cache: DynamicCache, length: int) -> None:
        super().__init__()
        self.length = length
        for index, layer in enumerate(cache.layers):
            if layer.is_initialized:
                super().update(pad(layer.keys, length), pad(layer.values, length), index)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's new keys and values, [1, heads, nodes, size], with the trunk's prepended."""
        layer = self.layers[layer_idx]
        return _joined(layer.keys, key_states), _joined(layer.values, value_states)


def _joined(trunk: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    if not states.is_cuda:
        return torch.cat((trunk, states), dim=2)
    # As projections lay them out, all heads of a token side by side: of contiguous parts, a GPU copies wide words
    return torch.cat((trunk.transpose(1, 2).contiguous(), states.transpose(1, 2)), dim=1).transpose(1, 2)


class _States(NamedTuple):
    """A model's own cache, and the name of its argument."""

    name: str
    cache: Any

    @classmethod
    def of(cls, output: Any) -> _States:
        for name in ("past_key_values", "cache_params"):
            cache = getattr(output, name, None)
            # Layers are measured; a cache of the model's own may keep its states elsewhere
            if hasattr(cache, "layers"):
                return cls(name, cache)
        raise ValueError("its forward returns no cache of layers")

    @property
    def bytes(self) -> int:
        return sum(kept.tensor.nbytes for layer in self.cache.layers for kept in cached_tensors(layer))

    def copied(self, rows: NDArray[np.int64]) -> _States:
        copied = _States(self.name, copy.deepcopy(self.cache))
        copied.select(rows)
        return copied

    def select(self, rows: NDArray[np.int64]) -> None:
        """Replace the rows of the cache by some of them, each as often as it is given."""
        self.cache.reorder_cache(torch.from_numpy(rows))


class Forward:
    """Forward pass of a causal language model over trees, and over single sequences by its own attention.

    `kernel` is one of `KERNELS`; `greedy`: whether to compute if a token is the argmax; `dtype`: the compute dtype, if
    it is not the dtype of the weights (`probe.in_float32`). The model is in evaluation mode.
    """

    def __init__(
        self, model: Any, kernel: str = "dense", greedy: bool = False, dtype: torch.dtype | None = None
    ) -> None:
        self.kernel = kernel
        self._config = model.config.get_text_config()
        self.head = OutputHead(model.get_output_embeddings(), self._config, greedy)
        self._model = model
        self._base = base_of(model)
        self._has_own_head = False
        weight = self.head.module.weight
        self._device, self._dtype = weight.device, dtype or weight.dtype
        # In the checks in float32 every call of a module has new weights, for which it would be compiled again
        self._is_own_dtype = self._dtype == weight.dtype
        self._dynamic = dynamic_modules(model)
        # Some architectures cannot make a cache for a model without attention layers; others' code has no such option
        parameters = signature(model.forward).parameters
        takes = "use_cache" in parameters or any(item.kind is Parameter.VAR_KEYWORD for item in parameters.values())
        self._options = {"use_cache": False} if takes else {}
        self._trunk: Trunk | None = None
        self._beginning: tuple[Ints, torch.Tensor, _States] | None = None

    def use_own_head(self, vocabulary: int, greedy: bool) -> None:
        """Score rows by the logits of the model's own forward pass, instead of evalkit's output head."""
        self._has_own_head = True
        weight = self.head.module.weight
        self.head = OutputHead(WholeLogits(vocabulary, weight, weight.dtype), self._config, greedy)

    @torch.inference_mode()
    def trunk(self, tokens: Ints) -> Trunk:
        """Run a prefix; the latest prefix is cached."""
        length = multiple_of_block(len(tokens)) if self.kernel == "flex" else len(tokens)
        known = self._trunk
        if known is None or known.cache.length != length or not np.array_equal(known.tokens, tokens):
            cache = DynamicCache()
            if len(tokens):
                hidden = self._states(input_ids=self._ids(tokens), past_key_values=cache, use_cache=True)
                scores = self.score_states(hidden, tokens)
            else:
                hidden = torch.zeros(1, self.head.module.weight.shape[1], device=self._device, dtype=self._dtype)
                scores = Scores.of_first()
            self._trunk = known = Trunk(tokens, scores, hidden[-1:], _TrunkCache(cache, length))
        return known

    @torch.inference_mode()
    def score(self, tree: Tree, trunk: Trunk) -> Scores:
        hidden = self._tree_states(tree, trunk)
        # The trunk's last token predicts too: its state is appended to the nodes
        nodes = np.where(tree.pair_nodes == TRUNK, len(tree.tokens), tree.pair_nodes).astype(np.int64)
        return self.head.scores(torch.cat((hidden, trunk.last_hidden)), nodes, tree.pair_targets.astype(np.int64))

    @torch.inference_mode()
    def score_pass(self, rows: Rows, part: Pass) -> tuple[NDArray[np.int64], Scores]:
        """Score the pairs of a tree whose nodes a pass computes; return their numbers and scores."""
        nodes, places = rows.places(part)
        place_of = np.full(len(rows.tree.tokens), -1)
        place_of[nodes] = places
        pairs = np.flatnonzero(place_of[rows.tree.pair_nodes] >= 0)
        states = self.pass_states(rows, part)
        targets = rows.tree.pair_targets[pairs].astype(np.int64)
        return pairs, self.head.scores(states, place_of[rows.tree.pair_nodes[pairs]], targets)

    @torch.inference_mode()
    def pass_states(self, rows: Rows, part: Pass) -> torch.Tensor:
        """Return the final states of a pass, [tokens, d_model], in the order of `Rows.places`."""
        beginnings, tokens, family = rows.inputs(part)
        parts = []
        cache: _States | None = None
        if rows.trunk:
            states, stored = self._stored_beginning(rows.tokens(0)[: rows.trunk])
            parts.append(states)
            cache = stored.copied(np.zeros(len(beginnings), np.int64))
        if beginnings.shape[1]:
            states, cache = self._run(beginnings, cache, keeps=True)
            parts.append(states)
        if cache is not None:
            cache.select(family)
        states, _ = self._run(tokens, cache)
        parts.append(states)
        return torch.cat(parts) if len(parts) > 1 else states

    @torch.inference_mode()
    def stored_bytes(self, tokens: Ints) -> int:
        """Return the bytes of the model's own cache of a row."""
        _, cache = self._run(tokens[None], None, keeps=True)
        assert cache is not None
        return cache.bytes

    def _stored_beginning(self, tokens: Ints) -> tuple[torch.Tensor, _States]:
        """Return the states of tokens that many passes begin with, and the model's cache after them."""
        known = self._beginning
        if known is None or not np.array_equal(known[0], tokens):
            states, cache = self._run(tokens[None], None, keeps=True)
            assert cache is not None
            self._beginning = known = (tokens, states, cache)
        return known[1:]

    def _run(self, tokens: Ints, cache: _States | None, keeps: bool = False) -> tuple[torch.Tensor, _States | None]:
        """Run rows, [rows, length], behind a cache; return their states, [rows × length, d_model], and the cache."""
        forget_lengths(self._dynamic)
        inputs: dict[str, Any] = {"input_ids": to_device(tokens.astype(np.int64), self._device)}
        if keeps or cache is not None:
            inputs["use_cache"] = True
        elif self._has_own_head:
            inputs |= self._options
        else:
            inputs["use_cache"] = False
        if cache is not None:
            inputs[cache.name] = cache.cache
        output = (self._model if self._has_own_head else self._base)(**inputs)
        states = output.logits if self._has_own_head else output.last_hidden_state
        return states.flatten(0, 1).to(self._device), _States.of(output) if keeps else None

    @torch.inference_mode()
    def score_alone(self, tokens: Ints) -> Scores:
        """Score one sequence by the model's own forward pass and head: the reference for all other ways."""
        logits, targets = self.logits_alone(tokens[:-1]), to_device(tokens[1:].astype(np.int64), self._device)
        logprobs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        return Scores.after_first(Scores(logprobs.cpu().numpy(), (logits.argmax(-1) == targets).cpu().numpy()))

    @torch.inference_mode()
    def hidden_shared(self, tree: Tree, trunk: Ints) -> torch.Tensor:
        """Return the final hidden states of a tree built after `trunk`, [nodes, d_model]."""
        return self._tree_states(tree, self.trunk(trunk))

    @torch.inference_mode()
    def hidden_alone(self, tokens: Ints) -> torch.Tensor:
        """Return the final hidden states of one sequence, [length, d_model], by the model's own attention.

        After `use_own_head` they are its logits, as in rows.
        """
        return self._run(tokens[None], None)[0]

    @torch.inference_mode()
    def logits_alone(self, tokens: Ints) -> torch.Tensor:
        """Return the logits of the model's own forward pass over one sequence, [length, vocabulary], in float32."""
        forget_lengths(self._dynamic)
        logits: torch.Tensor = self._model(input_ids=self._ids(tokens), **self._options).logits[0]
        return logits.float()

    @torch.inference_mode()
    def score_states(self, hidden: torch.Tensor, tokens: Ints) -> Scores:
        """Score each token of a sequence but the first from the states of those before it, [tokens, d_model]."""
        return Scores.after_first(self.head.scores(hidden, np.arange(len(tokens) - 1), tokens[1:].astype(np.int64)))

    def _ids(self, tokens: Ints) -> torch.Tensor:
        return to_device(tokens[None].astype(np.int64), self._device)

    def _states(self, **inputs: Any) -> torch.Tensor:
        """Run the base model on one row; return its final hidden states, [length, d_model], on the head's device."""
        forget_lengths(self._dynamic)
        # Where the last layer is on another device and no module follows it, so are the states
        states: torch.Tensor = self._base(**inputs).last_hidden_state[0].to(self._device)
        return states

    def _tree_states(self, tree: Tree, trunk: Trunk) -> torch.Tensor:
        nodes, length = len(tree.tokens), len(trunk.tokens)
        row = nodes
        with ExitStack() as attention:
            if self.kernel == "flex":
                flex = FlexLayout(tree.ends, length, self._device)
                row = flex.queries
                attention.enter_context(attending(self._model, flex))
                if self._is_own_dtype:
                    attention.enter_context(_fused(self._base, self._device))
            padded = np.zeros((2, 1, row), np.int64)
            padded[:, 0, :nodes] = tree.tokens, tree.positions
            ids, positions = to_device(padded, self._device)
            inputs = {"input_ids": ids, "position_ids": positions, "use_cache": length > 0}
            if length:
                inputs |= {"past_key_values": trunk.cache}
            if self.kernel == "dense":
                inputs |= {"attention_mask": self._tree_mask(to_device(tree.ends, self._device), length)}
                before = torch.arange(length, device=self._device)
                attention.enter_context(_alibi_by_position(self._base, torch.cat((before, positions[0]))))
            elif self.kernel == "tiles":
                heads = self._config.num_attention_heads
                width = (getattr(self._config, "head_dim", None) or self._config.hidden_size // heads) * heads
                tiles = TileLayout(tree.ends, tree.positions - length, length, width, self._dtype, self._device)
                attention.enter_context(attending(self._model, tiles))
            return self._states(**inputs)[:nodes]

    def _tree_mask(self, ends: torch.Tensor, trunk: int) -> torch.Tensor:
        """Return a tree's additive mask, [1, 1, nodes, trunk + nodes]; eager attention takes no boolean one."""
        index = torch.arange(len(ends), device=ends.device)
        hidden = (index[None] > index[:, None]) | (index[:, None] >= ends[None])
        return additive_mask(hidden, trunk, self._dtype)


@contextmanager
def _fused(base: Any, device: torch.device) -> Iterator[None]:
    """Compile a base model's norms and rotary embedding for a GPU inside the context.

    Uncompiled, each is a dozen operations that move the states of all tokens through memory, together about as long as
    the matrix products take.
    """
    module, compiled = sys.modules[type(base).__module__], partial(compiled_for, device=device.type)
    norms = {type(part) for part in base.modules() if type(part).__name__.endswith("RMSNorm")}
    with ExitStack() as stack:
        for norm in norms:
            stack.enter_context(replaced(norm, forward=compiled))
        if hasattr(module, "apply_rotary_pos_emb"):
            stack.enter_context(replaced(module, apply_rotary_pos_emb=compiled))
        yield


@contextmanager
def _alibi_by_position(base: Any, positions: torch.Tensor) -> Iterator[None]:
    """Make a base model compute its ALiBi biases from each token's position in its own sequence.

    `positions` are [keys]. transformers' builders return [heads, 1, keys]; models without them are not changed.
    """
    module = sys.modules[type(base).__module__]
    builders = ("build_alibi_tensor", "build_mpt_alibi_tensor")
    originals = {name: getattr(module, name) for name in builders if hasattr(module, name)}
    length = int(positions.max()) + 1 if originals else 0

    def from_mask(_: Any, heads: int, dtype: torch.dtype) -> torch.Tensor:
        mask = torch.ones(1, length, device=positions.device, dtype=torch.long)
        table: torch.Tensor = originals["build_alibi_tensor"](mask, heads, dtype)
        return table[..., positions]

    def from_length(heads: int, _: int, alibi_bias_max: int = 8, device: Any = None) -> torch.Tensor:
        table: torch.Tensor = originals["build_mpt_alibi_tensor"](heads, length, alibi_bias_max, device)
        return table[..., positions]

    replacements = dict(zip(builders, (from_mask, from_length), strict=True))
    try:
        vars(module).update({name: replacements[name] for name in originals})
        yield
    finally:
        vars(module).update(originals)
