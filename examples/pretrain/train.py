"""Train one model: from text and a settings file to a checkpoint that evalkit and transformers load.

    python examples/pretrain/train.py examples/pretrain/small.yaml --output trained/small
    torchrun --nproc-per-node 8 examples/pretrain/train.py SETTINGS --output FOLDER

The same command again resumes from the newest checkpoint, with the weights of an uninterrupted training.
docs/pretraining.md has the settings.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from recipe.settings import read_recipe

from evalkit.errors import EvalkitError


def main() -> None:
    """Read the settings, say how long it will take, and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", type=Path, help="YAML file")
    parser.add_argument("--output", "-o", type=Path, required=True, help="folder of this training")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first weights and of the order of the text (default 0)"
    )
    parser.add_argument("--model", help="in place of the settings' model: a name, or FILE.yaml:NAME")
    parser.add_argument("--dry-run", action="store_true", help="only say how long it will take")
    arguments = parser.parse_args()
    try:
        recipe = read_recipe(arguments.settings)
        if arguments.model:
            recipe = recipe.model_copy(update={"model": arguments.model})
        from recipe.running import run  # imports torch

        data = arguments.output.parent / "data"
        run([(arguments.output, arguments.seed, recipe)], data, dry_run=arguments.dry_run)
    except EvalkitError as error:
        raise SystemExit(f"train.py: {error}") from None


if __name__ == "__main__":
    main()
