"""Studies of tiny checkpoints."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from filelock import FileLock

from tests.benchmarks.longbench.made import record, write
from tests.documents import made_up
from tests.studies.made import compute, write_study
from tests.tiny import tiny_checkpoint

CHECKPOINTS = {
    "vanilla": "checkpoints/vanilla",
    "intg": "checkpoints/intg-seed*",
    "diff": {"model": "train/diff-seed*", "steps": "checkpoint-*"},
}
BENCHMARKS = {
    "zs": {"suite": "zeroshot8", "limit": 5, "tasks": ["piqa", "boolq", "arc_easy"]},
    "lm_eval": {"tasks": ["piqa", "boolq"]},
    "longbench": {"data_dir": "rows", "context": "none", "tasks": "qasper", "max_prompt_tokens": 400},
    "needle": {"lengths": [200], "depths": [0, 50], "repeats": 2},
}
FOLDERS = (
    "checkpoints/vanilla", "checkpoints/intg-seed1", "checkpoints/intg-seed2",
    "train/diff-seed1/checkpoint-5", "train/diff-seed1/checkpoint-10", "train/diff-seed1/checkpoint-20",
    "train/diff-seed2/checkpoint-5", "train/diff-seed2/checkpoint-10",
)  # fmt: skip


@pytest.fixture(scope="session")
def computed_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study with all runs on `zs`, and those of vanilla and intg on the others. Do not modify; use `study`.

    The processes of a test session share it; the first one that needs it computes it.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return _computed(tmp_path_factory.mktemp("study"))
    folder = tmp_path_factory.getbasetemp().parent / "study"
    with FileLock(folder.with_suffix(".lock")):
        done = folder / "computed"
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            _computed(folder)
            done.touch()
    return folder / "study.yaml"


def _computed(folder: Path) -> Path:
    for seed, name in enumerate(FOLDERS):
        tiny_checkpoint(folder / name, seed=seed, window=1024)
    made_up(folder / "documents", count=12)
    texts = [" ".join(f"word{n}" for n in range(start, start + 150)) for start in range(0, 900, 100)]
    write(folder / "rows" / "qasper.jsonl", [record("qasper", n, context=text) for n, text in enumerate(texts)])
    path = write_study(folder / "study.yaml", checkpoints=CHECKPOINTS, benchmarks={"zs": BENCHMARKS["zs"]})
    compute(path)
    some = {name: CHECKPOINTS[name] for name in ("vanilla", "intg")}
    compute(write_study(path, checkpoints=some, benchmarks=BENCHMARKS))
    return write_study(path, checkpoints=CHECKPOINTS, benchmarks=BENCHMARKS)


@pytest.fixture
def study(computed_study: Path, tmp_path: Path) -> Path:
    """A copy of the computed study that may be changed."""
    return Path(shutil.copytree(computed_study.parent, tmp_path / "study")) / computed_study.name
