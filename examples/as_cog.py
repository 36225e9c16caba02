"""Write a Llama checkpoint's weights as one with cog attention in all layers, to see signed maps of large weights.

    python examples/as_cog.py demo demo-as-cog

The model was not trained with this attention and is of no other use.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from evalkit.models.loading.spec import model_spec
from evalkit.models.variants.modeling import EvalkitLlamaConfig, EvalkitLlamaForCausalLM


def main() -> None:
    """Load a checkpoint, and save its weights with another config."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="Llama checkpoint, as for evalkit run --model")
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    spec = model_spec(arguments.checkpoint, device="cpu", dtype="float32")
    loaded = spec.load(spec.locate(print), print)
    before = loaded.model.config.to_dict()
    kept = {name: value for name, value in before.items() if name not in ("model_type", "architectures")}
    layers = list(range(before["num_hidden_layers"]))
    config = EvalkitLlamaConfig(**kept, attention_variant="cog", variant_layers=layers, cog_keep_last=False)
    model = EvalkitLlamaForCausalLM(config)
    model.load_state_dict(loaded.model.state_dict())
    model.save_pretrained(arguments.output)
    loaded.tokenizer.save_pretrained(arguments.output)


if __name__ == "__main__":
    main()
