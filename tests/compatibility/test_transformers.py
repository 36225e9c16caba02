"""evalkit's uses of transformers' internals, compared with transformers' public functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    modeling_gguf_pytorch_utils,
)

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
from evalkit.errors import EvalkitError
from evalkit.generation.prompts import Decoding, Prompt
from evalkit.generation.rows import sampler_of
from tests.models.variants.building import DIFFERENTIAL, INTEGRAL, model_of, random_ids


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="sdpa").eval()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_which_attention(checkpoint: Path, implementation: str) -> None:
    config = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation=implementation).config
    assert attention_of(config) == attention_of(config.get_text_config()) == implementation


@pytest.mark.parametrize("attention", [DIFFERENTIAL, INTEGRAL])
def test_a_selected_attention_is_called(attention: dict[str, Any]) -> None:
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    called = []

    def watching(module: Any, *arguments: Any, **settings: Any) -> Any:
        called.append(module.layer_idx)
        return sdpa_attention_forward(module, *arguments, **settings)

    AttentionInterface.register("watching", watching)
    built = model_of("llama", attention)
    ids = random_ids(1, 7)
    with torch.inference_mode():
        before = built(input_ids=ids).logits
        select_attention(built.config, "watching")
        after = built(input_ids=ids).logits
    assert set(called) == {0, 1, 2}
    assert torch.allclose(before, after)


def test_which_models_keep_a_state(model: PreTrainedModel) -> None:
    state = MambaForCausalLM(MambaConfig(vocab_size=32, hidden_size=16, state_size=4, num_hidden_layers=1))
    assert keeps_state(state)
    assert not keeps_state(model)


def test_processors_are_those_of_generate(model: PreTrainedModel) -> None:
    """Greedy tokens after them, one by one without a cache, are `generate`'s."""
    settings = {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "suppress_tokens": [5, 6], "min_new_tokens": 4}
    ids = torch.tensor([[7, 8, 9, 7, 8]])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8, **settings)
    config = generation_config_of(model, settings)
    config.max_length = ids.shape[1] + 8
    processors = logits_processors(model, config, ids)
    found = ids
    with torch.inference_mode():
        while found.shape[1] < expected.shape[1]:
            scores = processors(found, model(input_ids=found).logits[:, -1])
            found = torch.cat((found, scores.argmax(-1, keepdim=True)), 1)
    assert found.tolist() == expected.tolist()
    assert not {5, 6} & set(found[0, 5:].tolist())


def test_registered_frequencies_are_used(checkpoint: Path) -> None:
    register_rotary("thirds", lambda config, *_, **__: (torch.full((8,), 1 / 3), 1.0))
    config = AutoConfig.from_pretrained(checkpoint)
    config.rope_parameters = config.rope_parameters | {"rope_type": "thirds", "factor": 1.0}
    built: Any = AutoModelForCausalLM.from_config(config)
    assert built.base_model.rotary_emb.inv_freq.tolist() == pytest.approx([1 / 3] * 8)


def test_what_transformers_knows() -> None:
    assert {"bitsandbytes_4bit", "gptq", "gguf"} <= set(quantization_methods())
    assert "no_method" not in quantization_methods()
    assert config_class("llama") is type(AutoConfig.for_model("llama"))
    assert config_class("no_model") is None
    assert config_class(None) is None
    assert "bert" in masked_language_models()
    assert "llama" not in masked_language_models()


def test_the_gguf_bar_is_off_inside_only(capsys: pytest.CaptureFixture[str]) -> None:
    with without_gguf_bar():
        list(modeling_gguf_pytorch_utils.tqdm(range(3)))
    assert capsys.readouterr().err == ""
    list(modeling_gguf_pytorch_utils.tqdm(range(3)))
    assert "3/3" in capsys.readouterr().err


def test_the_error_reaches_whoever_generates(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(model), "_get_logits_processor", lambda self, settings: None)
    ids = random_ids(1, 4)[0].numpy()
    with pytest.raises(EvalkitError, match=r"has .* with other parameters \(.*pip install transformers=="):
        sampler_of(model, Prompt(0, ids, 3, decoding=Decoding({"repetition_penalty": 1.2})))
