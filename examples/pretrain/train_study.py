"""Train several models with several seeds under the same settings; the models of a seed see the same rows in one order.

    python examples/pretrain/train_study.py examples/replication/training.yaml

Writes OUTPUT/NAME-seedN/model. The same command again goes on where it was stopped. Two processes share the work: each
takes a training that nobody has.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from recipe.settings import read_training_study

from evalkit.errors import EvalkitError


def main() -> None:
    """Read the study, say how long it will take, and train each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="YAML file: recipe, models, seeds, output")
    parser.add_argument("--dry-run", action="store_true", help="only say how long it will take")
    arguments = parser.parse_args()
    try:
        study, recipe = read_training_study(arguments.study)
        output = Path(study.output)
        wanted = [
            (output / f"{name}-seed{seed}", seed, recipe.model_copy(update={"model": model}))
            for seed in study.seeds
            for name, model in study.models.items()
        ]
        from recipe.running import run  # imports torch

        run(wanted, output / "data", dry_run=arguments.dry_run)
    except EvalkitError as error:
        raise SystemExit(f"train_study.py: {error}") from None


if __name__ == "__main__":
    main()
