"""Copies of a batch, counted on the meta device: it has shapes only, so what waits for a number (`.item()`) fails."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from evalkit.scoring import flex, forward, head
from evalkit.scoring.forward import Forward
from evalkit.scoring.head import fetch, to_device
from evalkit.scoring.pack import TreeBatch, batches_of
from evalkit.scoring.sequences import Sequences, SequenceSet

META = torch.device("meta")


class Copies(TorchDispatchMode):
    """Counts copies from the CPU to the meta device."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        found = function(*arguments, **(options or {}))
        if isinstance(found, torch.Tensor) and found.device == META:
            given = tree_leaves((arguments, options))
            self.count += any(isinstance(one, torch.Tensor) and one.device != META for one in given)
        return found


def meta_model() -> Any:
    config = LlamaConfig(vocab_size=600, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    with META:
        return LlamaForCausalLM(config).eval()


def batches(prefix: int) -> list[TreeBatch]:
    dice = np.random.default_rng(0)
    shared = dice.integers(1, 500, prefix)
    items = []
    for index in range(12):
        stem = np.concatenate((shared, dice.integers(1, 500, 20)))
        choices = tuple(np.concatenate((stem, dice.integers(1, 500, 8))).astype(np.int32) for _ in range(3))
        items.append(SequenceSet(str(index), "", choices, tuple(np.arange(len(one)) >= 20 for one in choices)))
    return batches_of(Sequences.of(items), 300)


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("kernel", ["tiles", "flex", "dense"])
@pytest.mark.parametrize("prefix", [0, 60])
def test_a_batch_waits_once(monkeypatch: pytest.MonkeyPatch, prefix: int, kernel: str, greedy: bool) -> None:
    """Apart from the batch whose trunk is run, and except for the tiles' masks, which are for a CPU."""
    fetched = []

    def fetch_nothing(states: torch.Tensor) -> Any:
        assert states.device == META
        fetched.append(states.shape)
        return np.zeros(states.shape, np.float32)

    sent = []

    def send(array: Any, device: torch.device) -> torch.Tensor:
        sent.append(array.shape)
        return to_device(array, device)

    monkeypatch.setattr(head, "fetch", fetch_nothing)
    for module in (forward, head, flex):
        monkeypatch.setattr(module, "to_device", send)
    # Compiled code cannot run without numbers
    monkeypatch.setattr(flex, "_compiled", lambda *_: lambda query, *_, **__: torch.empty_like(query))
    scorer = Forward(meta_model(), kernel, greedy)
    first, second = batches(prefix)[:2]
    assert (len(first.trunk) > 0) == (prefix > 0)
    scorer.score(first.tree, scorer.trunk(first.trunk))
    fetched.clear()
    sent.clear()
    with Copies() as copies:
        scorer.score(second.tree, scorer.trunk(second.trunk))
    assert len(fetched) == 1
    assert len(sent) == (4 if kernel in ("flex", "dense") else 3)
    if kernel != "tiles":
        assert copies.count == len(sent)


def test_a_head_in_many_pieces_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []
    monkeypatch.setattr(head, "fetch", lambda states: fetched.append(states.shape) or np.zeros(states.shape))
    monkeypatch.setattr(head, "_MOST_NODES", 7)
    scorer = Forward(meta_model(), "dense")
    [batch] = batches(0)[:1]
    scorer.score(batch.tree, scorer.trunk(batch.trunk))
    assert fetched == [(2, len(batch.tree.pair_nodes))]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32])
def test_there_and_back(dtype: Any) -> None:
    array = np.arange(6, dtype=dtype).reshape(2, 3)
    found = fetch(to_device(array, torch.device("cpu")))
    assert found.dtype == dtype
    assert np.array_equal(found, array)
