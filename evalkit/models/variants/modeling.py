"""The paper's models: transformers' backbones with another attention in some layers.

A model is a subclass of the backbone's class with the same weight names. The layers that its config lists use
`VariantAttention`; the others are unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GPTNeoXForCausalLM, LlamaForCausalLM, Qwen2ForCausalLM
from transformers.models.gpt_neox import modeling_gpt_neox as gpt_neox
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen2 import modeling_qwen2 as qwen2

from .attention import VariantAttention
from .configuration import EvalkitGPTNeoXConfig, EvalkitLlamaConfig, EvalkitQwen2Config


class _SeparateProjections(VariantAttention):
    """Attention with separate projections of queries, keys and values: Llama and Qwen2."""

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
        """Map [batch, tokens, d_model] to the same shape, and return the effective map or None."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        states = [projection(hidden_states).unflatten(-1, (-1, self.head_dim)) for projection in projections]
        positions = (position_embeddings, settings["position_ids"])
        out, seen = self.attend(states, positions, attention_mask, past_key_values, **settings)
        return self.o_proj(out), seen


class LlamaVariantAttention(_SeparateProjections, llama.LlamaAttention):  # type: ignore[misc]
    """Variant attention with Llama's projections."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self._set_variant(config, layer_idx, llama.LlamaRotaryEmbedding, llama.apply_rotary_pos_emb)


class Qwen2VariantAttention(_SeparateProjections, qwen2.Qwen2Attention):  # type: ignore[misc]
    """Variant attention with Qwen2's projections."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        if self.sliding_window:
            raise ValueError(
                f"{config.variant().name} attention has no sliding window; set use_sliding_window to false"
            )
        self._set_variant(config, layer_idx, qwen2.Qwen2RotaryEmbedding, qwen2.apply_rotary_pos_emb)


class GPTNeoXVariantAttention(VariantAttention, gpt_neox.GPTNeoXAttention):  # type: ignore[misc]
    """Variant attention with GPT-NeoX's fused projection, which interleaves queries, keys and values by head."""

    query_key_value: nn.Linear
    dense: nn.Linear

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self._set_variant(config, layer_idx, gpt_neox.GPTNeoXRotaryEmbedding, gpt_neox.apply_rotary_pos_emb)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        layer_past: Any = None,
        position_embeddings: Any = None,
        **settings: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map [batch, tokens, d_model] to the same shape, and return the effective map or None."""
        states = self.query_key_value(hidden_states).unflatten(-1, (-1, 3 * self.head_size)).chunk(3, dim=-1)
        positions = (position_embeddings, settings["position_ids"])
        out, seen = self.attend(states, positions, attention_mask, layer_past, **settings)
        return self.dense(out), seen


class _Variants:
    """Mixin for a backbone's causal language model."""

    _supports_flex_attn = False  # cog layers would need its block masks; evalkit's tree attention supports them

    def _build(self, config: Any, attention: type[nn.Module], name: str) -> None:
        """Replace the attention of the layers that the config lists."""
        model: Any = self
        for index in config.variant().layers:
            setattr(model.base_model.layers[index], name, attention(model.config, index))
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

    def __init__(self, config: EvalkitLlamaConfig) -> None:
        config.variant()
        super().__init__(config)
        self._build(config, LlamaVariantAttention, "self_attn")


class EvalkitQwen2ForCausalLM(_Variants, Qwen2ForCausalLM):  # type: ignore[misc]
    """Qwen2 with the attention that its config names."""

    config_class = EvalkitQwen2Config

    def __init__(self, config: EvalkitQwen2Config) -> None:
        config.variant()
        super().__init__(config)
        self._build(config, Qwen2VariantAttention, "self_attn")


class EvalkitGPTNeoXForCausalLM(_Variants, GPTNeoXForCausalLM):  # type: ignore[misc]
    """GPT-NeoX (Pythia) with the attention that its config names."""

    config_class = EvalkitGPTNeoXConfig

    def __init__(self, config: EvalkitGPTNeoXConfig) -> None:
        config.variant()
        super().__init__(config)
        self._build(config, GPTNeoXVariantAttention, "attention")


CLASSES = (EvalkitLlamaForCausalLM, EvalkitQwen2ForCausalLM, EvalkitGPTNeoXForCausalLM)
"""All model classes of this module."""
