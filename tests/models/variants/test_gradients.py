"""Gradients of the attention modules, compared with finite differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.func import functional_call

from evalkit.models.variants import signed
from tests.models.variants.building import (
    DIFFERENTIAL,
    FAMILIES,
    INTEGRAL,
    VARIANTS,
    attention_of,
    causal,
    model_of,
    random_ids,
)

CASES: dict[str, dict[str, Any]] = {
    **VARIANTS,
    "integral-tiled-head": INTEGRAL | {"signal_layout": "tiled", "signal_scale": "head", "num_signals": 4},
    "integral-probabilities-full": INTEGRAL | {"signal_domain": "probabilities", "signal_rope": "full_head"},
    "differential-halves": DIFFERENTIAL | {"diff_pairing": "halves", "diff_subln": "none"},
}


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "masked"])
@pytest.mark.parametrize("variant", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_finite_differences(family: str, variant: str, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the hidden states and every weight, norm and λ vector, in float64, by sdpa and, for cog, its own product.

    Numbers near 1 and steps of 1e-6 leave differences good to about 1e-9; gradcheck's own tolerances are 1e-5 and 1e-3.
    """
    monkeypatch.setattr(signed, "_CPU_BLOCK", 1)
    monkeypatch.setattr(signed, "_FEWEST", 3)
    module, call = attention_call(family, CASES[variant], "sdpa", masked)
    names, weights = zip(*module.named_parameters(), strict=True)
    assert ("lambda_q1" in names) == variant.startswith("differential")
    hidden = torch.randn(2, 7, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    given = (hidden.requires_grad_(), *(weight.detach().requires_grad_() for weight in weights))

    def attended(states: torch.Tensor, *changed: torch.Tensor) -> Any:
        return functional_call(module, dict(zip(names, changed, strict=True)), (), call(states))[0]

    torch.autograd.gradcheck(attended, given, fast_mode=True)
    assert all(slope.abs().max() > 1e-6 for slope in torch.autograd.grad(attended(*given).square().sum(), given))


@pytest.mark.parametrize("variant", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_eager_has_the_same_gradients(family: str, variant: str) -> None:
    """float32: 1e-4 of a tensor's largest gradient. λ's, a sum over all tokens and channels of which most cancels, is
    the worst with 3e-5.
    """
    ids = random_ids(2, 11)
    gradients = []
    for implementation in ("sdpa", "eager"):
        model = model_of(family, CASES[variant], implementation=implementation)
        model(ids, labels=ids).loss.backward()
        gradients.append([weight.grad for weight in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert (one - other).abs().max() <= 1e-4 * other.abs().max()


def attention_call(family: str, attention: dict[str, Any], implementation: str, masked: bool) -> tuple[Any, Any]:
    """An attention module in float64, and what it is given beside hidden states: [2, 7, d_model]."""
    model = model_of(family, attention, implementation=implementation, dtype=torch.float64)
    positions = torch.arange(7).expand(2, -1)
    turns = model.base_model.rotary_emb(torch.zeros(1, dtype=torch.float64), positions)
    mask = causal(2, 7).seen.clone()
    mask[1, 3:, 1] = False
    fixed = {
        "position_embeddings": turns,
        "position_ids": positions,
        "attention_mask": mask[:, None] if masked else None,
    }
    return attention_of(model, 2), lambda states: {"hidden_states": states, **fixed}
