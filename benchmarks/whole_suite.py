"""Duration of a full zeroshot8 run with a random model of the paper's size on this machine.

    python benchmarks/whole_suite.py --device cuda

Writes a Llama2-shaped checkpoint (1.2 B parameters by default, vocabulary of the given tokenizer) to a temporary
folder and runs it like `evalkit run`, journal and results included. Prints the seconds of the run, those of scoring by
task, those of its stages, which overlap where they run beside each other, tokens, and the estimated time of the same
sequences one by one at the matrix rate measured on the same device.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from startup import LATER_STAGES, STAGES, Times, time_calls
from versus_lm_eval import matrices, matrix_rate, note


def main() -> None:
    """Build the model, run the suite and print the results."""
    arguments = parse()
    with tempfile.TemporaryDirectory() as temporary:
        folder = build(arguments.keep or Path(temporary) / "random", arguments)
        run(folder, Path(temporary) / "runs", arguments)


def parse() -> argparse.Namespace:
    """Parse the command line; the defaults are the paper's 1.2 B model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default="demo", help="checkpoint to take the tokenizer from")
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=5632)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=int, help="documents of each task; all by default")
    parser.add_argument("--tasks", nargs="*", default=(), help="tasks of zeroshot8; default: all")
    parser.add_argument("--template", default="inst")
    parser.add_argument("--keep", type=Path, help="write the checkpoint to this folder, and keep it")
    parser.add_argument("--data-dir", type=Path)
    return parser.parse_args()


def random_model(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Return a Llama of random weights on the device, and the tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from evalkit.models.loading.load import load
    from evalkit.models.loading.locate import locate

    tokenizer = load(locate(arguments.tokenizer, say=note), device="cpu", say=note).tokenizer
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=arguments.hidden, intermediate_size=arguments.inner,
        num_hidden_layers=arguments.layers, num_attention_heads=arguments.heads, max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(arguments.device):
        return LlamaForCausalLM(config).to(getattr(torch, arguments.dtype)), tokenizer


def build(folder: Path, arguments: argparse.Namespace) -> Path:
    """Write a checkpoint folder with random weights."""
    model, tokenizer = random_model(arguments)
    note(f"{sum(p.numel() for p in model.parameters()) / 1e9:.2f} B parameters")
    arguments.rate, arguments.matrices = matrix_rate(model, 8192), sum(matrices(model))
    model.cpu().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run(folder: Path, output: Path, arguments: argparse.Namespace) -> None:
    """Run the suite like `evalkit run`."""
    import evalkit

    stages: dict[str, Times] = {}
    for stage in (*STAGES, *LATER_STAGES):
        time_calls(*stage, stages)
    started = time.perf_counter()
    finished = evalkit.evaluate(
        folder, device=arguments.device, dtype=arguments.dtype, limit=arguments.limit, template=arguments.template,
        data_dir=arguments.data_dir, output=output, **({"tasks": list(arguments.tasks)} if arguments.tasks else {}),
    )  # fmt: skip
    wall = time.perf_counter() - started
    scores = finished.scores
    documents = len(scores.drop_duplicates(["subtask", "doc_id"]))
    tokens = int(sum(scores[column].sum() for column in scores if column.startswith("n_")))
    print(f"{documents} documents, {len(scores)} sequences of {tokens} tokens in all")
    print(f"{wall:.1f} s from start to results, of which {sum(finished.seconds.values()):.1f} s scoring:")
    print(", ".join(f"{task} {seconds:.1f}" for task, seconds in finished.seconds.items()))
    print(", ".join(f"{title} {times.wall:.1f}" for title, times in stages.items()))
    whole = 2.0 * tokens * arguments.matrices / arguments.rate
    print(f"matrix rate {arguments.rate / 1e12:.1f} TFLOP/s, at which the sequences one by one take {whole:.1f} s")
    if arguments.device.startswith("cuda"):
        print(f"highest memory allocated: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
