"""The output head by columns, compared with log_softmax over all columns; the config is restored after a tree."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from evalkit.models.loading.load import LoadedModel
from evalkit.scoring import head as output_head
from evalkit.scoring.attention import NAME, attending
from evalkit.scoring.head import OutputHead

Tiny = Callable[..., LoadedModel]


@pytest.mark.parametrize("ruled_out", [None, -1e9, -torch.inf])
@pytest.mark.parametrize("columns", [7, 100, 512])
@pytest.mark.parametrize("bias", [False, True])
def test_the_head_by_columns_is_the_whole_head(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, columns: int, bias: bool, ruled_out: float | None
) -> None:
    """With a vocabulary that is not a multiple of the columns, several targets per node, and masked tokens."""
    model = tiny().model
    head = model.get_output_embeddings()
    torch.manual_seed(0)
    if bias or ruled_out is not None:
        head.bias = torch.nn.Parameter(torch.randn(head.weight.shape[0]), requires_grad=False)
    if ruled_out is not None:
        head.bias[::7] = ruled_out
    monkeypatch.setattr(output_head, "_CPU_LOGITS", 0)
    monkeypatch.setattr(output_head, "_MIN_COLUMNS", columns)
    hidden = torch.randn(20, head.weight.shape[1])
    rng = np.random.default_rng(0)
    nodes, targets = rng.integers(0, 20, 60), rng.integers(0, head.weight.shape[0], 60)
    logits = head(hidden)
    targets[:20], nodes[:20] = logits.argmax(-1).numpy(), np.arange(20)
    allowed = np.isfinite(logits[nodes, targets].numpy())
    found = OutputHead(model, greedy=True).scores(hidden, nodes, targets)
    expected = logits.log_softmax(-1)[nodes, targets].numpy()
    # float32 sums over 512 tokens; a ruled-out target's own score is as huge as its logit
    assert np.allclose(found.logprobs[allowed], expected[allowed], rtol=1e-6, atol=1e-5)
    assert np.array_equal(found.greedy, logits.argmax(-1)[nodes].numpy() == targets)
    assert found.greedy[:20].all()


def test_of_two_likeliest_tokens_the_first_is_greedy(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny().model
    head = model.get_output_embeddings()
    monkeypatch.setattr(output_head, "_CPU_LOGITS", 0)
    monkeypatch.setattr(output_head, "_MIN_COLUMNS", 100)
    head.weight[350] = head.weight[120] = 5 * head.weight[7]
    hidden = head.weight[7:8].clone()
    found = OutputHead(model, greedy=True).scores(hidden, np.array([0, 0]), np.array([120, 350]))
    assert found.greedy.tolist() == [True, False]


def test_a_model_gets_its_own_attention_back(tiny: Tiny) -> None:
    model = tiny().model
    before = model.config._attn_implementation
    with pytest.raises(KeyError), attending(model, layout=None):  # type: ignore[arg-type]
        assert model.config._attn_implementation == NAME
        raise KeyError
    assert model.config._attn_implementation == before
