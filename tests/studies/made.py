"""Studies of tiny checkpoints: their files, their runs as `evalkit study run` computes them, or only as recorded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from evalkit.display import Progress
from evalkit.runs.folder import Run, load_run
from evalkit.studies.study import record_of, save_record
from evalkit.studies.study_file import read_study
from tests.documents import made_up
from tests.tables.runs import altered, loaded
from tests.tiny import tiny_checkpoint

CHECKPOINTS = {
    "vanilla": "vanilla",
    "intg": "intg-seed*",
    "diff": {"model": "train/diff-seed*", "steps": "checkpoint-*"},
}
FOLDERS = ("vanilla", "intg-seed1", "intg-seed2", *(f"train/diff-seed1/checkpoint-{step}" for step in (5, 10, 20)),
           *(f"train/diff-seed2/checkpoint-{step}" for step in (5, 10)))  # fmt: skip
ZS: dict[str, Any] = {"suite": "zeroshot8", "tasks": ["piqa", "boolq"], "limit": 5, "token_budget": 256}
NEEDLE: dict[str, Any] = {"lengths": [300], "depths": [0, 50], "repeats": 1}
SETTINGS = {"device": "cpu", "dtype": "float32", "data_dir": "documents", "allow_unofficial_data": True}


class Told(Progress):
    """Keeps its messages."""

    def __init__(self) -> None:
        super().__init__(live=False)
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        """Keep a message."""
        self.lines.append(line)


def made_files(folder: Path, count: int = 6) -> Path:
    """Write checkpoints and documents; those of some names are seeds, and steps of a training."""
    for seed, name in enumerate(FOLDERS):
        tiny_checkpoint(folder / name, seed=seed, window=1024)
    made_up(folder / "documents", count=count)
    return folder


def write_study(path: Path, checkpoints: Mapping[str, Any], benchmarks: Any = None, **more: Any) -> Path:
    """Write a study file; by default with one benchmark, and runs in `runs` beside it."""
    content = {"output": "runs", "settings": SETTINGS, "checkpoints": dict(checkpoints)}
    content["benchmarks"] = {"zs": ZS} if benchmarks is None else benchmarks
    path.write_text(yaml.safe_dump(content | more, sort_keys=False), encoding="utf-8")
    return path


def changed(path: Path, **content: Any) -> Path:
    """Replace entries of a study file."""
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text("utf-8")) | content, sort_keys=False), "utf-8")
    return path


def tables_of(path: Path) -> dict[str, pd.DataFrame]:
    """Return label and table → the table of each run of a study, without times; all runs are finished."""
    study, tables = read_study(path), {}
    for run in study.runs:
        record = record_of(study.output, run)
        assert record is not None, run.label
        finished = load_run(study.output / record.folder)
        assert finished.complete, run.label
        for name in finished.files:
            if name.endswith(".parquet"):
                tables[f"{run.label} {name}"] = finished.table(name, ()).drop(columns="seconds", errors="ignore")
    return tables


def recorded(path: Path, finished: Run, runs: Mapping[str, str | None], **specification: Any) -> None:
    """Give a study runs without computing them: copies of a finished one, each with other accuracies.

    `runs`: label → named model whose sizes and attention its manifest has; None: the finished run's own.
    """
    study = read_study(path)
    by_label = {run.label: run for run in study.runs}
    for place, (label, model) in enumerate(runs.items()):
        folder = study.output / f"run{place}-{by_label[label].key}"
        manifest = {} if model is None else {"loaded": finished.manifest["loaded"] | loaded(model)}
        altered(finished, folder, 0.03 * place, manifest, **specification)
        save_record(study.output, by_label[label], folder, load_run(folder).manifest["id"])
