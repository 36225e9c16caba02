"""A suite of pinned tasks and of lm-eval task files, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from evalkit.benchmarks.run import evaluate
from evalkit.runs.folder import Run
from tests.benchmarks.kinds import Lines
from tests.benchmarks.lm_eval.made import made_tasks
from tests.documents import made_up

ALONE = {"groups": {"A": ["made_choice"]}, "labels": None, "short": None}
"""Changes of `write_suite` for a suite of one task."""


def made_files(folder: Path) -> Path:
    """Write task files into `own`, and documents of evalkit's own tasks into `documents`."""
    made_tasks(folder / "own")
    made_up(folder / "documents", count=8)
    return folder


def write_suite(files: Path, name: str = "mine", **changes: Any) -> Path:
    content = {
        "description": "mine",
        "groups": {"Language": ["made_choice", "piqa"], "Rest": ["made_other"]},
        "labels": {"made_choice": "My choice"},
        "short": {"made_choice": "Mine"},
        "task_files": "own",
    } | changes
    path = files / f"{name}.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}), "utf-8")
    return path


def run_of(checkpoint: Path, output: Path, data_dir: Path | None = None, **options: Any) -> Run:
    data = {} if data_dir is None else {"data_dir": data_dir, "allow_unofficial_data": True}
    return evaluate(str(checkpoint), **({"output": output, "dtype": "float32", "progress": Lines()} | data | options))
