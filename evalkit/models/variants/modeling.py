"""The paper's models and their configs: transformers' backbones with another attention in some layers.

A model is a subclass of the backbone's class with the same weight names. The layers that its config lists use
`VariantAttention`; the others are unchanged. The attention keys are not declared here: a config stores and saves all
keys it is given, and missing keys have no default. `settings.read_variant` validates them when a model is built.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.models.gpt_neox import modeling_gpt_neox as gpt_neox
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen2 import modeling_qwen2 as qwen2

from .attention import VariantAttention
from .settings import PREFIX, Shape, Variant, read_attention, read_variant


class _VariantConfig:
    def variant(self) -> Variant:
        return read_variant(vars(self), self.shape())

    def shape(self) -> Shape:
        config: Any = self
        return read_attention(vars(self), config.model_type.removeprefix(PREFIX))


class EvalkitLlamaConfig(_VariantConfig, LlamaConfig):  # type: ignore[misc]
    """Llama with another attention."""

    model_type = "evalkit_llama"


class EvalkitQwen2Config(_VariantConfig, Qwen2Config):  # type: ignore[misc]
    """Qwen2 with another attention."""

    model_type = "evalkit_qwen2"


class EvalkitGPTNeoXConfig(_VariantConfig, GPTNeoXConfig):  # type: ignore[misc]
    """GPT-NeoX (Pythia) with another attention."""

    model_type = "evalkit_gpt_neox"


class _SeparateProjections(VariantAttention):
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    head_dim: int

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **settings: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        states = [projection(hidden_states).unflatten(-1, (-1, self.head_dim)) for projection in projections]
        positions = (position_embeddings, settings["position_ids"])
        out, seen = self.attend(states, positions, attention_mask, past_key_values, **settings)
        return self.o_proj(out), seen


class LlamaVariantAttention(_SeparateProjections, llama.LlamaAttention):  # type: ignore[misc]
    """Variant attention with Llama's projections."""

    rotary_class = llama.LlamaRotaryEmbedding
    rotate = staticmethod(llama.apply_rotary_pos_emb)


class Qwen2VariantAttention(_SeparateProjections, qwen2.Qwen2Attention):  # type: ignore[misc]
    """Variant attention with Qwen2's projections."""

    rotary_class = qwen2.Qwen2RotaryEmbedding
    rotate = staticmethod(qwen2.apply_rotary_pos_emb)

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        if self.sliding_window:
            raise ValueError(f"{self.variant.name} attention has no sliding window; set use_sliding_window to false")


class GPTNeoXVariantAttention(VariantAttention, gpt_neox.GPTNeoXAttention):  # type: ignore[misc]
    """Variant attention with GPT-NeoX's fused projection, which interleaves queries, keys and values by head."""

    query_key_value: nn.Linear
    dense: nn.Linear
    rotary_class = gpt_neox.GPTNeoXRotaryEmbedding
    rotate = staticmethod(gpt_neox.apply_rotary_pos_emb)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        layer_past: Any = None,
        position_embeddings: Any = None,
        **settings: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        states = self.query_key_value(hidden_states).unflatten(-1, (-1, 3 * self.head_size)).chunk(3, dim=-1)
        positions = (position_embeddings, settings["position_ids"])
        out, seen = self.attend(states, positions, attention_mask, layer_past, **settings)
        return self.dense(out), seen


class _Variants:
    """Mixin for a backbone's causal language model: replaces the attention of the layers that the config lists."""

    _supports_flex_attn = False  # cog layers would need its block masks; evalkit's tree attention supports them
    attention_class: type[VariantAttention]
    attention_name = "self_attn"

    def __init__(self, config: Any) -> None:
        variant = config.variant()
        super().__init__(config)  # type: ignore[call-arg]
        model: Any = self
        for index in variant.layers:
            setattr(model.base_model.layers[index], self.attention_name, self.attention_class(model.config, index))
        # Weights are initialised by the innermost model that contains them, which is the backbone's
        model.base_model._init_weights = self._init_weights
        model.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[misc]
        if isinstance(module, VariantAttention):
            module.init_lambda()


class EvalkitLlamaForCausalLM(_Variants, LlamaForCausalLM):  # type: ignore[misc]
    """Llama with the attention that its config names."""

    config_class = EvalkitLlamaConfig
    attention_class = LlamaVariantAttention


class EvalkitQwen2ForCausalLM(_Variants, Qwen2ForCausalLM):  # type: ignore[misc]
    """Qwen2 with the attention that its config names."""

    config_class = EvalkitQwen2Config
    attention_class = Qwen2VariantAttention


class EvalkitGPTNeoXForCausalLM(_Variants, GPTNeoXForCausalLM):  # type: ignore[misc]
    """GPT-NeoX (Pythia) with the attention that its config names."""

    config_class = EvalkitGPTNeoXConfig
    attention_class = GPTNeoXVariantAttention
    attention_name = "attention"


CLASSES = (EvalkitLlamaForCausalLM, EvalkitQwen2ForCausalLM, EvalkitGPTNeoXForCausalLM)
"""All model classes of this module."""
