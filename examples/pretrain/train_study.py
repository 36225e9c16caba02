"""Train several models with several seeds under the same settings; the models of a seed see the same rows in one order.

    python examples/pretrain/train_study.py examples/replication/training.yaml
    python examples/pretrain/train_study.py examples/replication/training.yaml --dry-run

The study is a file with `recipe` (a settings file of train.py), `models` (by name; a model may have another recipe),
`seeds` and `output`. Writes OUTPUT/NAME-seedN/model. The same command again goes on where it was stopped. Two processes
share the work: each takes a training that nobody has.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from recipe.command import reported
from recipe.settings import read_training_study


def main() -> None:
    """Read the study, say what it will take, and train each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="YAML file: recipe, models, seeds, output")
    parser.add_argument("--dry-run", action="store_true", help="pack the text and say what the trainings will take")
    arguments = parser.parse_args()
    with reported("train_study.py"):
        study, recipes = read_training_study(arguments.study)
        from recipe.folder import Training
        from recipe.running import run  # imports torch

        output = Path(study.output)
        trainings = [
            Training(recipe, seed, output / f"{name}-seed{seed}", output / "data")
            for seed in study.seeds
            for name, recipe in recipes.items()
        ]
        run(trainings, dry_run=arguments.dry_run)


if __name__ == "__main__":
    main()
