"""Train one model: from text and a settings file to a checkpoint that evalkit and transformers load.

    python examples/pretrain/train.py SETTINGS.yaml --output trained/small
    python examples/pretrain/train.py SETTINGS.yaml --output trained/small --dry-run
    python examples/pretrain/train.py SETTINGS.yaml --output trained/cog --model models.yaml:cog --seed 1
    torchrun --nproc-per-node 8 examples/pretrain/train.py SETTINGS.yaml --output trained/small

Smallest settings (small.yaml and paper.yaml are whole ones; docs/pretraining.md lists the keys):

    model: llama-125m-intg           # evalkit models ls, or FILE.yaml:NAME
    text:
      - files: [corpus.jsonl]        # a document on each line: {"text": "…"}
    length: 2048                     # tokens of a row
    batch: 32                        # rows of an update
    steps: 1000
    learning_rate: 3.0e-4

Writes OUTPUT/model, OUTPUT/checkpoint-N, OUTPUT/training.csv and, of evaluations in the training, OUTPUT/runs; the
packed text is in `data` beside OUTPUT. The same command again resumes from the newest checkpoint, with the weights of
an uninterrupted training, or says that the training is finished. Then:

    evalkit perplexity OUTPUT/model --text held_out.jsonl
    evalkit run --model OUTPUT/model
"""

from __future__ import annotations

import argparse
from pathlib import Path

from recipe.command import reported
from recipe.settings import LARGEST_SEED, read_recipe


def main() -> None:
    """Read the settings, say what the training will take, and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", type=Path, help="YAML file")
    parser.add_argument("--output", "-o", type=Path, required=True, help="folder of this training")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and of the text's order (default 0)")
    parser.add_argument("--model", help="in place of the settings' model: a name, or FILE.yaml:NAME")
    parser.add_argument("--dry-run", action="store_true", help="pack the text and say what the training will take")
    arguments = parser.parse_args()
    if not 0 <= arguments.seed <= LARGEST_SEED:
        parser.error(f"--seed must be from 0 to {LARGEST_SEED}")
    with reported("train.py"):
        recipe = read_recipe(arguments.settings, arguments.model)
        from recipe.folder import Training
        from recipe.running import run  # imports torch

        training = Training(recipe, arguments.seed, arguments.output, arguments.output.parent / "data")
        run([training], dry_run=arguments.dry_run)


if __name__ == "__main__":
    main()
