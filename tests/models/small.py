"""Named models small enough to build inside a test, of every attention and backbone, in a user's file."""

from __future__ import annotations

from pathlib import Path

import yaml

from evalkit.models.zoo.named import NamedModel, named_model

BASES = {"llama": "llama_125m", "qwen2": "qwen2_125m", "gpt_neox": "pythia_125m"}
ATTENTIONS: dict[str, dict[str, object]] = {
    "vanilla": {"variant_layers": "none"},
    "cog": {"variant_layers": "top 50%"},
    "differential": {"variant_layers": "all"},
    "integral": {"variant_layers": "top 50%", "num_signals": 2},
}
VOCABULARY = 512
TEXT = (
    "The river rose in the night, and in the morning the bridge was gone.\nA whale is no fish; it breathes air.\n" * 4
)
"""For a tokenizer; enough for less than the vocabulary."""


def small(folder: Path, attention: str, backbone: str = "llama", window: int = 256) -> NamedModel:
    """A model of two layers and 512 tokens, named by a file in `folder`."""
    sizes: dict[str, object] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": window,
        "initializer_range": 0.2,
    }
    if backbone == "gpt_neox":  # a quarter of each signal's channels rotates: an even number
        sizes["num_attention_heads"] = 2
        sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    else:
        sizes["num_key_value_heads"] = 2
    own = {"attention_variant": attention, **ATTENTIONS[attention], **sizes}
    path = folder / f"{backbone}-{attention}.yaml"
    path.write_text(yaml.safe_dump({"base": BASES[backbone], "models": {attention: own}}), encoding="utf-8")
    return named_model(str(path))
