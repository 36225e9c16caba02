"""The digest of a model in memory: what it includes and excludes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from evalkit.models.modules import state_digest
from tests.tiny import tiny_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("state") / "tiny")


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def test_a_state_is_its_numbers_under_their_names(folder: Path, tmp_path: Path) -> None:
    model = loaded(folder)
    assert state_digest(model) == state_digest(loaded(folder))
    assert state_digest(model.to(torch.bfloat16)) != state_digest(loaded(folder))
    turned = loaded(folder)
    weight = turned.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.t().contiguous().t()
    assert not weight.is_contiguous()
    assert state_digest(turned) == state_digest(loaded(folder))
    with torch.no_grad():
        turned.model.rotary_emb.inv_freq[-1] *= 2  # a buffer that no checkpoint has
    assert state_digest(turned) != state_digest(loaded(folder))
    tied = loaded(tiny_checkpoint(tmp_path / "tied", tied=True))
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    before = state_digest(tied)
    tied.lm_head.weight = torch.nn.Parameter(tied.lm_head.weight.detach().clone())
    assert state_digest(tied) == before


def test_large_tensors_are_hashed_in_pieces(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    model = loaded(folder)
    whole = state_digest(model)
    monkeypatch.setattr("evalkit.models.modules._CHUNK", 1000)
    assert state_digest(model) == whole
