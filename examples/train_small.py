"""Train four small models, one for each attention, on the passages of BoolQ: checkpoints to try `evalkit attention` on.

    python examples/train_small.py small --steps 300

Writes small/vanilla, small/cog, small/diff and small/intg (examples/small_models.yaml). All see the same batches in the
same order. Ten minutes on two cores; the models learn common words and little grammar.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from evalkit.data import Library
from evalkit.models.init import write_random
from evalkit.models.registration import register_models
from evalkit.models.zoo import named_model

MODELS = ("vanilla", "cog", "diff", "intg")
LENGTH, BATCH = 128, 16
"""Tokens of a sequence, and sequences of a batch."""


def main() -> None:
    """Write the corpus, make the models and train them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="folder for the four checkpoints")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--data-dir", type=Path, help="folder with boolq.jsonl, as for evalkit run")
    arguments = parser.parse_args()
    corpus = arguments.output / "corpus.txt"
    arguments.output.mkdir(parents=True, exist_ok=True)
    library = Library(arguments.data_dir, allow_unofficial=arguments.data_dir is not None)
    passages = dict.fromkeys(record["passage"] for record in library.load("boolq").records)
    corpus.write_text("\n".join(passages), encoding="utf-8")
    register_models()
    for name in MODELS:
        folder = arguments.output / name
        source: dict[str, Any] = {"tokenizer": str(arguments.output / MODELS[0])} if name != MODELS[0] else {}
        model = named_model(f"{Path(__file__).parent / 'small_models.yaml'}:{name}")
        write_random(model, folder, seed=0, texts=() if source else (corpus,), **source)
        train(folder, corpus, arguments.steps)


def train(folder: Path, corpus: Path, steps: int) -> None:
    """Train a checkpoint in its folder.

    Args:
        folder: of the checkpoint.
        corpus: text file.
        steps: number of updates.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor(tokenizer(corpus.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"])
    rows = ids[: len(ids) // (LENGTH - 1) * (LENGTH - 1)].view(-1, LENGTH - 1)
    rows = torch.cat((torch.full((len(rows), 1), tokenizer.bos_token_id), rows), dim=1)
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    order = torch.Generator().manual_seed(0)
    for step in range(steps):
        batch = rows[torch.randint(len(rows), (BATCH,), generator=order)]
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 49:
            print(f"{folder.name}: step {step + 1} of {steps}, loss {loss.item():.2f}", flush=True)
    model.eval().save_pretrained(folder)


if __name__ == "__main__":
    main()
