"""Modules that can be evaluated in memory, and those equal to what their class builds from their config."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForSequenceClassification

import evalkit
from evalkit.compatibility.torch import hooks_of
from evalkit.errors import CheckpointError, UnknownNameError, UsageError
from evalkit.models.live import live_model
from evalkit.models.modules import is_stock, state_digest
from tests.tiny import tiny_checkpoint

LOADING: dict[str, Any] = (
    dict.fromkeys(
        (
            "revision",
            "context",
            "context_method",
            "context_original",
            "context_config",
            "allow_pickle",
            "trust_remote_code",
        )
    )
    | dict.fromkeys(("device", "dtype", "attention"), "auto")
    | {"device_map": "none"}
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("modules") / "tiny")


@pytest.fixture
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def borrowed(model: Any, tokenizer: Any) -> Any:
    return live_model(model, None, tokenizer=tokenizer, **LOADING)


class FullyShardedDataParallel(torch.nn.Module):
    """A module with torch's name."""


class LoraLayer(torch.nn.Module):
    """A module with peft's name."""

    __module__ = "peft.tuners.lora.layer"


def test_a_model_that_was_changed_is_checked_by_itself(model: Any) -> None:
    assert is_stock(model)
    hooked, replaced = copy.deepcopy(model), copy.deepcopy(model)
    hooked.model.layers[0].register_forward_hook(lambda *_: None)
    replaced.model.layers[0].mlp.act_fn = torch.nn.ReLU()
    assert not is_stock(hooked)
    assert not is_stock(replaced)
    assert state_digest(replaced) != state_digest(model)


def test_activation_checkpointing_changes_nothing(model: Any) -> None:
    """transformers adds a hook, which only marks the embeddings; with another hook, the model is changed."""
    training = copy.deepcopy(model).train()
    training.activation_checkpointing_enable({"use_reentrant": True})
    assert hooks_of(training.get_input_embeddings())
    assert is_stock(training)
    training.get_input_embeddings().register_forward_hook(lambda *_: None)
    assert not is_stock(training)


def test_unsupported_models_are_rejected(model: Any, tokenizer: Any, folder: Path) -> None:
    def refused(module: Any, said: str, error: type[Exception] = CheckpointError) -> None:
        with pytest.raises(error, match=said), borrowed(module, tokenizer) as spec:
            spec.load(spec.locate(), print)

    refused(torch.nn.Linear(2, 2), "model is a torch.nn.modules.linear.Linear; expected", UsageError)
    refused(5, "model is a builtins.int; expected", UsageError)
    refused(model.model, "has no output head")
    refused(LlamaForSequenceClassification.from_pretrained(folder), "has no output head")
    with torch.device("meta"):
        refused(type(model)(model.config), "has weights without data")
    refused(copy.deepcopy(model).to(torch.float64), "computes in torch.float64")
    quantised = copy.deepcopy(model)
    quantised.config.quantization_config = {"quant_method": "bitsandbytes"}
    refused(quantised, "is quantised")
    for part, said in ((FullyShardedDataParallel(), "sharded over processes"), (LoraLayer(), "has adapters")):
        with_part = copy.deepcopy(model)
        with_part.model.layers[0].more = part
        refused(with_part, said)
    refused(LoraLayer(), "whose adapter is not merged", UsageError)
    damaged = copy.deepcopy(model)
    with torch.no_grad():
        damaged.lm_head.weight[0, 0] = torch.nan
    refused(damaged, "lm_head.weight holds NaN or infinite values in float32; training has diverged")
    two_ways = copy.deepcopy(model)
    two_ways.config.is_causal = False
    refused(two_ways, "attends in both directions")
    with pytest.raises(UnknownNameError, match="unknown attention implementation 'flash'"):
        evalkit.evaluate(model, tokenizer=tokenizer, attention="flash")
