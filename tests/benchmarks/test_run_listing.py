"""`evalkit ls runs`: columns, order and filters; a damaged run does not break it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from evalkit.benchmarks.run_listing import list_found, runs_report
from evalkit.runs.folder import MANIFEST, RESULTS, load_run
from tests.cli.test_root import Command, _no_settings, complains, evalkit
from tests.comparison.made import three_tasks
from tests.printed import printed
from tests.sealed import read, reseal

__all__ = ["_no_settings", "evalkit"]


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


def test_what_is_shown_fits_a_terminal(runs: Path) -> None:
    listed = list_found(runs)
    header, _, *lines = printed(runs_report(listed, runs)).splitlines()
    assert header.split() == ["id", "date", "suite", "dtype", "settings", "result", "checkpoint"]
    assert max(map(len, [header, *lines[: lines.index("")]])) <= 100
    first = [line for line in lines[: lines.index("")] if line[0] != " "]  # a path is broken into several lines
    assert [line.split()[1] for line in first] == [f"2026-11-0{day}" for day in (1, 2, 3, 4)]
    for line, text in zip(first, ("8,192 by yarn", "41.0 ± 1.2", "limit 150", "bfloat16"), strict=True):
        assert text in line
    for line, run in zip(first, listed, strict=True):
        assert load_run(run.folder).manifest["id"].startswith(line.split()[0])


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
@pytest.mark.parametrize("content", ["[]", None])
def test_a_damaged_run_is_listed_beside_the_others(
    evalkit: Command, own_run: Path, content: str | None, name: str
) -> None:
    bad = Path(shutil.copytree(own_run, own_run.parent / "bad"))
    (bad / name).unlink()
    if content is not None:
        (bad / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    listed = json.loads(evalkit("ls", "runs", "-o", own_run.parent, "--format", "json").out)
    states = {Path(run["folder"]).name: run["state"] for run in listed}
    expected = "interrupted" if content is None and name == RESULTS else "damaged"
    assert states == {"bad": expected, own_run.name: "finished"}


def test_json_has_everything(evalkit: Command, own_run: Path, checkpoint: Path) -> None:
    run = load_run(own_run)
    [listed] = json.loads(evalkit("ls", "runs", "-o", own_run.parent, "--format", "json").out)
    expected = {"folder": str(own_run), "id": run.manifest["id"], "state": "finished", "suite": "zeroshot8",
                "template": "inst", "dtype": "float32", "documents": "", "context": "", "model": str(checkpoint),
                "path": str(checkpoint.resolve()), "created": run.manifest["created"], "journal": True,
                "score": run.results().average.accuracy, "rule": "ppl"}  # fmt: skip
    assert listed.items() >= expected.items()
    assert listed["notes"] == [f"not the official documents of {', '.join(run.manifest['documents'])}"]
    assert json.loads(evalkit("ls", "runs", "-o", "nowhere", "--format", "json").out) == []
    complains(evalkit("ls", "--sort", "name"), 2, "--sort", "evalkit ls runs")
