"""`evalkit ls runs`: columns, order and filters; a damaged run does not break it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from evalkit.benchmarks.run_listing import list_found
from evalkit.runs.folder import MANIFEST, RESULTS
from tests.comparison.made import three_tasks
from tests.sealed import read, reseal


def changed(folder: Path, results: dict[str, Any] | None = None, **manifest: Any) -> Path:
    """Change entries of a run's manifest and results, and seal it again."""
    for name, more in ((MANIFEST, manifest), (RESULTS, results or {})):
        (folder / name).write_text(json.dumps(read(folder, name) | more), encoding="utf-8")
    reseal(folder)
    return folder


def average(accuracy: float) -> dict[str, Any]:
    return {"averages": [{"name": "Average", "accuracy": accuracy, "stderr": 0.0123}]}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Four runs of checkpoints of two trainings, in float32 and bfloat16, on another context, and of few documents."""
    extension = {"method": "yarn", "original": 2048, "target": 8192, "factor": 4.0}
    made = [
        ("a", 1000, 0.41, "02", {}),
        ("b", 1000, 0.52, "04", {"dtype": "bfloat16"}),
        ("a", 500, 0.31, "01", {"context_extension": extension}),
        ("b", 2000, 0.45, "03", {"limit": 150}),
    ]
    for training, step, accuracy, day, specification in made:
        model = f"/long/way/to/the/checkpoints/of/{training}/checkpoint-{step}"
        folder = three_tasks(tmp_path / "runs", model, **specification)
        changed(folder, average(accuracy), path=model, created=f"2026-11-{day}T00:00:00+00:00")
    return tmp_path / "runs"


def test_order_and_filters(runs: Path) -> None:
    for sort, order in {
        "date": ["a/500", "a/1000", "b/2000", "b/1000"],
        "model": ["a/500", "a/1000", "b/1000", "b/2000"],
        "score": ["b/1000", "b/2000", "a/1000", "a/500"],
    }.items():
        listed = list_found(runs, sort)
        assert [run.model.rpartition("of/")[2].replace("checkpoint-", "") for run in listed] == order
    for text, count in {"": 4, "CHECKPOINT-1000 bfloat16": 1, "bfloat16 a/": 0, "yarn": 1, "2026-11-03": 1}.items():
        assert len(list_found(runs, text=text)) == count
    (Path(listed[0].folder) / RESULTS).unlink()
    assert list_found(runs, "score")[-1].state == "begun"


@pytest.mark.parametrize("name", [MANIFEST, RESULTS])
def test_a_damaged_run_is_listed_beside_the_others(own_run: Path, name: str) -> None:
    bad = Path(shutil.copytree(own_run, own_run.parent / "bad"))
    (bad / name).write_text("[]")
    states = {Path(run.folder).name: run.state for run in list_found(own_run.parent)}
    assert states == {"bad": "damaged", own_run.name: "finished"}
    (bad / RESULTS).unlink()
    states = {Path(run.folder).name: run.state for run in list_found(own_run.parent)}
    assert states["bad"] == ("damaged" if name == MANIFEST else "interrupted")
