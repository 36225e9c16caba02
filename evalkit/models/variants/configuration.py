"""Configs of the paper's models: a backbone's config with the attention keys of `settings.py`.

The attention keys are not declared here: a config stores and saves all keys it is given, and missing keys have no
default. `settings.read_variant` validates them when a model is built.
"""

from __future__ import annotations

from typing import Any

from transformers import GPTNeoXConfig, LlamaConfig, Qwen2Config

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


CONFIGS = (EvalkitLlamaConfig, EvalkitQwen2Config, EvalkitGPTNeoXConfig)
"""All config classes of this module."""
