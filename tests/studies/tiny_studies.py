"""Studies of tiny checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from evalkit.display import Progress
from evalkit.runs.folder import load_run
from evalkit.studies.study import Study, record_of
from evalkit.studies.study_file import read_study
from tests.documents import made_up
from tests.tiny import tiny_checkpoint

CHOICES: dict[str, Any] = {
    "data_dir": "documents",
    "allow_unofficial_data": True,
    "tasks": ["piqa", "boolq"],
    "token_budget": 128,
}
"""Options of a suite with a few small batches."""
NEEDLE: dict[str, Any] = {"lengths": [200], "depths": [0, 50], "repeats": 1}


def made_files(folder: Path, count: int = 6) -> Path:
    """Write checkpoints, two seeds of a training with two steps each, and documents."""
    tiny_checkpoint(folder / "vanilla", seed=0, window=1024)
    for seed in (1, 2):
        tiny_checkpoint(folder / f"intg-seed{seed}", seed=seed, window=1024)
        for step in (20, 100):
            tiny_checkpoint(folder / f"train-seed{seed}" / f"checkpoint-{step}", seed=10 * seed + step, window=1024)
    made_up(folder / "documents", count=count)
    return folder


def made_study(
    folder: Path,
    checkpoints: Mapping[str, Any],
    benchmarks: Any = None,
    name: str = "study.yaml",
    **more: Any,
) -> Path:
    """Write a study file."""
    content = {
        "output": "runs",
        "settings": {"device": "cpu", "dtype": "float32"},
        "checkpoints": dict(checkpoints),
        "benchmarks": {"zeroshot8": CHOICES} if benchmarks is None else benchmarks,
        **more,
    }
    path = folder / name
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return path


def tables_of(study: Study | Path) -> dict[str, dict[str, pd.DataFrame]]:
    """Return label → every table of each run of a study, without times; all runs are finished."""
    study = read_study(study) if isinstance(study, Path) else study
    found = {}
    for one in study.runs:
        record = record_of(study.output, one)
        assert record is not None, one.label
        run = load_run(study.output / record.folder)
        assert run.complete, one.label
        names = [name for name in run.files if name.endswith(".parquet")]
        found[one.label] = {name: run.table(name, ()).drop(columns="seconds", errors="ignore") for name in names}
    return found


def same_tables(one: Mapping[str, Mapping[str, Any]], other: Mapping[str, Mapping[str, Any]]) -> None:
    """Assert equality to the last bit."""
    assert one.keys() == other.keys()
    for label in one:
        assert one[label].keys() == other[label].keys()
        for name in one[label]:
            pd.testing.assert_frame_equal(one[label][name], other[label][name], check_exact=True)


class Told(Progress):
    """Keeps its messages."""

    def __init__(self) -> None:
        super().__init__(live=False)
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        """Keep a message."""
        self.lines.append(line)
