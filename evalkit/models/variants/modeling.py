"""The paper's models and their configs: transformers' backbones with another attention in some layers.

A model is a subclass of the backbone's class with the same weight names. The layers that its config lists use
`VariantAttention`; the others are unchanged. The attention keys are not declared here: a config stores and saves all
keys it is given, and missing keys have no default. `settings.read_variant` validates them when a model is built.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.models.gpt_neox import modeling_gpt_neox as gpt_neox
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen2 import modeling_qwen2 as qwen2

from .attention import VariantAttention
from .settings import Shape, Variant, read_variant


class _VariantConfig:
    """Common part of the three configs."""

    def variant(self) -> Variant:
        """Read the attention variant; raises `ValueError` if its keys are invalid."""
        return read_variant(vars(self), self.shape())

    def shape(self) -> Shape:
        """Return the dimensions of the backbone's attention."""
        config: Any = self
        heads = config.num_attention_heads
        return Shape(
            layers=config.num_hidden_layers,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_size=self._head_size(),
            rotary_share=self._rotary_share(),
        )

    def _head_size(self) -> int:
        config: Any = self
        return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)

    def _rotary_share(self) -> float:
        return 1.0


class EvalkitLlamaConfig(_VariantConfig, LlamaConfig):  # type: ignore[misc]
    """Llama with another attention."""

    model_type = "evalkit_llama"


class EvalkitQwen2Config(_VariantConfig, Qwen2Config):  # type: ignore[misc]
    """Qwen2 with another attention."""

    model_type = "evalkit_qwen2"


class EvalkitGPTNeoXConfig(_VariantConfig, GPTNeoXConfig):  # type: ignore[misc]
    """GPT-NeoX (Pythia) with another attention."""

    model_type = "evalkit_gpt_neox"

    def _head_size(self) -> int:
        # GPT-NeoX has no head_dim
        return int(self.hidden_size // self.num_attention_heads)

    def _rotary_share(self) -> float:
        return float(self.rope_parameters["partial_rotary_factor"])


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
