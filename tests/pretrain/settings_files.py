"""Settings files of small trainings: 20 updates of 4 rows of 32 tokens, of models with two layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

EXAMPLE = Path(__file__).parents[2] / "examples" / "pretrain"
ATTENTIONS = {"vanilla": "none", "cog": "top 50%", "differential": "top 50%", "integral": "top 50%"}


def write_models(folder: Path) -> None:
    """Write models.yaml: the replication's four models, smaller."""
    content = yaml.safe_load((EXAMPLE.parent / "replication" / "models.yaml").read_text(encoding="utf-8"))
    content["base"] |= {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    content["models"] = {
        name: {"attention_variant": name, "variant_layers": layers} for name, layers in ATTENTIONS.items()
    }
    content["models"]["long"] = content["models"]["vanilla"] | {"max_position_embeddings": 1024}
    (folder / "models.yaml").write_text(yaml.safe_dump(content))


def recipe_of(shared: Path, **changes: Any) -> dict[str, Any]:
    """The keys of a settings file."""
    keys = {
        "model": f"{shared}/models.yaml:vanilla",
        "tokenizer": str(shared / "tokenizer"),
        "text": [{"files": [str(shared / "text.jsonl")]}],
        "held_out": [{"files": [str(shared / "held_out.txt")]}],
        "length": 32,
        "batch": 4,
        "steps": 20,
        "learning_rate": 5e-3,
        "warmup_steps": 3,
        "log_every": 3,
        "held_out_every": 8,
        "held_out_rows": 8,
        "save_every": 10,
        "report_to": "none",
    }
    return {key: value for key, value in (keys | changes).items() if value is not None}


def write_recipe(folder: Path, shared: Path, **changes: Any) -> Path:
    """Write a settings file; a key of None is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe_of(shared, **changes)))
    return path
