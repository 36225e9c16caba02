"""Cost of each attention variant relative to vanilla attention on the same shapes.

    python benchmarks/attention_variants.py [--length 2048] [--heads 8] [--size 96] [--threads 2]

Forward passes in one run, without gradients, float32: a vanilla layer's attention by torch's fused kernel and each
variant's, in the paper's 125M shape, between the projections (queries, keys and values in, the heads' output out), with
rotary embeddings. Prints the ratio of medians of interleaved repetitions, the cost of the fallback (`eager`, which
makes whole maps) and the largest tensor of the attention.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from tabulate import tabulate
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from evalkit.models.variants.modeling import EvalkitLlamaConfig, LlamaVariantAttention

INTEGRAL = {
    "attention_variant": "integral",
    "signal_rope": "per_signal",
    "signal_layout": "contiguous",
    "signal_scale": "signal",
}
DIFFERENTIAL = {
    "attention_variant": "differential",
    "diff_pairing": "adjacent",
    "diff_subln": "affine",
    "diff_subln_eps": 1e-5,
    "lambda_index": "absolute",
}
VARIANTS: dict[str, dict[str, Any]] = {
    "integral, S=8": {**INTEGRAL, "num_signals": 8, "signal_domain": "logits"},
    "integral, S=8, full-head rotary": {
        **INTEGRAL,
        "num_signals": 8,
        "signal_domain": "logits",
        "signal_rope": "full_head",
    },
    "integral of probabilities, S=2": {**INTEGRAL, "num_signals": 2, "signal_domain": "probabilities"},
    "differential, heads halved": {**DIFFERENTIAL, "diff_heads": "halve"},
    "differential, heads kept": {**DIFFERENTIAL, "diff_heads": "keep"},
    "cog": {"attention_variant": "cog", "cog_keep_last": False},
}


class Largest(TorchDispatchMode):
    """Record the size of the largest tensor that any operation returned, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return out


def layer_of(settings: dict[str, Any] | None, shape: dict[str, int], implementation: str) -> Callable[[], Any]:
    """Return a layer's attention on random states, with identity projections."""
    config: Any
    if settings is None:
        config = LlamaConfig(**shape)
        attention: Any = LlamaAttention(config, 0)
    else:
        config = EvalkitLlamaConfig(**shape, **settings, variant_layers=[0])
        attention = LlamaVariantAttention(config, 0)
    config._attn_implementation = implementation
    length = config.max_position_embeddings
    torch.manual_seed(0)
    states = torch.randn(1, length, config.hidden_size)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        setattr(attention, name, torch.nn.Identity())
    ids = torch.arange(length)[None]
    positions = LlamaRotaryEmbedding(config)(states, ids)
    mask = None
    if implementation == "eager":
        mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
    return lambda: attention(hidden_states=states, position_embeddings=positions, attention_mask=mask, position_ids=ids)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shape = {
        "hidden_size": options.heads * options.size,
        "num_attention_heads": options.heads,
        "num_hidden_layers": 1,
        "max_position_embeddings": options.length,
    }
    names: dict[str, dict[str, Any] | None] = {"vanilla": None, **VARIANTS}
    layers = {(name, kind): layer_of(s, shape, kind) for name, s in names.items() for kind in ("sdpa", "eager")}
    times: dict[tuple[str, str], list[float]] = {key: [] for key in layers}
    for _ in range(options.repeats + 1):
        for key, layer in layers.items():
            begin = time.perf_counter()
            layer()
            times[key].append(time.perf_counter() - begin)
    middle = {key: statistics.median(found[1:]) for key, found in times.items()}
    base = middle["vanilla", "sdpa"]
    rows = []
    for name in names:
        with Largest() as largest:
            layers[name, "sdpa"]()
        rows.append(
            [
                name,
                f"{1000 * middle[name, 'sdpa']:.0f}",
                f"{middle[name, 'sdpa'] / base:.2f}",
                f"{middle[name, 'eager'] / base:.2f}",
                f"{4 * largest.numbers / 2**20:.1f}",
            ]
        )
    whole = 4 * options.heads * options.length**2 / 2**20
    print(f"length {options.length}, {options.heads} heads × {options.size}, float32, {options.threads} threads")
    print(
        tabulate(
            rows,
            headers=["attention", "ms", "× vanilla", "eager, × vanilla", "largest tensor, MiB"],
            disable_numparse=True,
            colalign=["left", *["right"] * 4],
        )
    )
    print(f"a whole map of all heads would be {whole:.0f} MiB")


if __name__ == "__main__":
    main()
