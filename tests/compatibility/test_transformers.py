"""evalkit's uses of other libraries' internals, compared with transformers' public functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    modeling_gguf_pytorch_utils,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from evalkit.compatibility.torch import uncompiled
from evalkit.compatibility.transformers import (
    attention_of,
    config_class,
    generation_config_of,
    keeps_state,
    logits_processors,
    masked_language_models,
    quantization_methods,
    register_rotary,
    select_attention,
    without_gguf_bar,
)
from tests.models.variants.building import DIFFERENTIAL, logits_of, model_of


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="sdpa").eval()


def test_a_selected_attention_is_called() -> None:
    called = []

    def watching(module: Any, *arguments: Any, **settings: Any) -> Any:
        called.append(module.layer_idx)
        return sdpa_attention_forward(module, *arguments, **settings)

    AttentionInterface.register("watching", watching)
    built = model_of("llama", DIFFERENTIAL)
    before = logits_of(built)
    assert attention_of(built.config) == attention_of(built.config.get_text_config()) == "sdpa"
    select_attention(built.config, "watching")
    assert torch.allclose(before, logits_of(built)) and set(called) == {0, 1, 2}


def test_processors_are_those_of_generate(model: PreTrainedModel) -> None:
    """Greedy tokens after them, one by one without a cache, are `generate`'s."""
    settings = {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "suppress_tokens": [5, 6], "min_new_tokens": 4}
    ids = torch.tensor([[7, 8, 9, 7, 8]])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8, **settings)
    config = generation_config_of(model, settings)
    config.max_length = ids.shape[1] + 8
    processors = logits_processors(model, config, ids)
    with torch.inference_mode():
        while ids.shape[1] < expected.shape[1]:
            scores = processors(ids, model(input_ids=ids).logits[:, -1])
            ids = torch.cat((ids, scores.argmax(-1, keepdim=True)), 1)
    assert ids.tolist() == expected.tolist() and not {5, 6} & set(ids[0, 5:].tolist())


def test_registered_frequencies_are_used(checkpoint: Path) -> None:
    register_rotary("thirds", lambda config, *_, **__: (torch.full((8,), 1 / 3), 1.0))
    config = AutoConfig.from_pretrained(checkpoint)
    config.rope_parameters = config.rope_parameters | {"rope_type": "thirds", "factor": 1.0}
    built: Any = AutoModelForCausalLM.from_config(config)
    assert built.base_model.rotary_emb.inv_freq.tolist() == pytest.approx([1 / 3] * 8)


def test_what_transformers_knows(model: PreTrainedModel) -> None:
    assert {"bitsandbytes_4bit", "gptq", "gguf"} <= set(quantization_methods())
    assert config_class("llama") is type(AutoConfig.for_model("llama"))
    assert config_class("no_model") is config_class(None) is None
    assert "bert" in masked_language_models() and "llama" not in masked_language_models()
    state = MambaForCausalLM(MambaConfig(vocab_size=32, hidden_size=16, state_size=4, num_hidden_layers=1))
    assert keeps_state(state) and not keeps_state(model)


def test_the_gguf_bar_is_off_inside_only(capsys: pytest.CaptureFixture[str]) -> None:
    with without_gguf_bar():
        list(modeling_gguf_pytorch_utils.tqdm(range(3)))
    assert capsys.readouterr().err == ""
    list(modeling_gguf_pytorch_utils.tqdm(range(3)))
    assert "3/3" in capsys.readouterr().err


@pytest.mark.slow  # compiling takes seconds
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_what_is_inside_of_a_compiled_module() -> None:
    module = torch.nn.Linear(2, 2)
    assert uncompiled(torch.compile(module)) is module
    assert uncompiled(module) is module
    assert type(uncompiled(torch.nn.Sequential(module))) is torch.nn.Sequential
