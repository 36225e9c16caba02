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
from tests.comparison.conftest import Make, make
from tests.printed import printed
from tests.sealed import read, reseal

__all__ = ["_no_settings", "evalkit", "make"]


def changed(folder: Path, results: dict[str, Any] | None = None, **manifest: Any) -> Path:
    """Change entries of a run's manifest and results, and seal it again."""
    for name, more in ((MANIFEST, manifest), (RESULTS, results or {})):
        (folder / name).write_text(json.dumps(read(folder, name) | more), encoding="utf-8")
    reseal(folder)
    return folder


def average(accuracy: float) -> dict[str, Any]:
    return {"averages": [{"name": "Average", "accuracy": accuracy, "stderr": 0.0123}]}


@pytest.fixture
def runs(make: Make, tmp_path: Path) -> Path:
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
        folder = make(model, **specification)
        changed(folder, average(accuracy), path=model, created=f"2026-11-{day}T00:00:00+00:00")
    return tmp_path / "runs"


def test_what_is_shown_fits_a_terminal(runs: Path) -> None:
    header, _, *lines = printed(runs_report(list_found(runs), runs)).splitlines()
    end = lines.index("")
    assert header.split() == ["id", "date", "suite", "dtype", "settings", "result", "checkpoint"]
    # A path is broken into several lines
    first = [line for line in lines[:end] if line[0] != " "]
    assert [line.split()[1] for line in first] == [f"2026-11-0{day}" for day in (1, 2, 3, 4)]
    assert max(map(len, [header, *lines[:end]])) <= 100
    assert lines[end + 1].startswith("stored without a journal, so their tables cannot be recomputed: ")
    assert "8,192 by yarn" in first[0]
    assert "41.0 ± 1.2" in first[1]
    assert "zeroshot8 plain" in first[2]
    assert "limit 150" in first[2]
    assert "bfloat16" in first[3]
    paths = ["".join(block.split()) for block in _column(header, lines[:end], "checkpoint")]
    assert [path.rpartition("of/")[2] for path in paths] == [
        "a/checkpoint-500", "a/checkpoint-1000", "b/checkpoint-2000", "b/checkpoint-1000"
    ]  # fmt: skip
    for line, run in zip(first, list_found(runs), strict=True):
        assert load_run(run.folder).manifest["id"].startswith(line.split()[0])
    wide = printed(runs_report(list_found(runs), runs), "markdown")
    assert "/long/way/to/the/checkpoints/of/a/checkpoint-500" in wide.replace("\\", "")


def _column(header: str, lines: list[str], name: str) -> list[str]:
    """Each row's text in a column, its lines one after the other."""
    start, found = header.index(name), list[str]()
    for line in lines:
        if line[0] != " ":
            found.append("")
        found[-1] += line[start:]
    return found


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        ("date", ["a/500", "a/1000", "b/2000", "b/1000"]),
        ("model", ["a/500", "a/1000", "b/1000", "b/2000"]),
        ("score", ["b/1000", "b/2000", "a/1000", "a/500"]),
    ],
)
def test_sorts(runs: Path, sort: str, order: list[str]) -> None:
    found = [run.model.rpartition("of/")[2].replace("checkpoint-", "") for run in list_found(runs, sort)]
    assert found == order


def test_sorted_by_name(runs: Path) -> None:
    names = [run.folder for run in list_found(runs, "name")]
    assert names == sorted(names)


@pytest.mark.parametrize(
    ("text", "count"),
    [("", 4), ("checkpoint-1000", 2), ("CHECKPOINT-1000 bfloat16", 1), ("bfloat16 a/", 0), ("yarn", 1), ("finished", 4),
     ("2026-11-03", 1), ("limit 150", 1), ("(acc)", 0), ("acc plain", 4)],
)  # fmt: skip
def test_filters(runs: Path, text: str, count: int) -> None:
    assert len(list_found(runs, text=text)) == count


def test_unfinished_runs_come_last_by_score(runs: Path) -> None:
    first = Path(list_found(runs, "score")[0].folder)
    (first / RESULTS).unlink()
    assert list_found(runs, "score")[-1].folder == str(first)
    assert list_found(runs, "score")[-1].state == "begun"


BAD = {
    "no JSON": "{",
    "a list": "[]",
    "deep": "[" * 100_000,
    "deep keys": '{"a":' * 50_000,
    "less deep": '{"sha256": "", "a": ' + "[" * 700 + "]" * 700 + "}",
    "of bytes": "\udcff",
    "empty": "",
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("name", [MANIFEST, RESULTS])
def test_one_bad_run_is_listed_as_damaged_beside_the_others(
    evalkit: Command, own_run: Path, content: str, name: str
) -> None:
    bad = Path(shutil.copytree(own_run, own_run.parent / "bad"))
    (bad / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    outcome = evalkit("ls", "runs", "-o", own_run.parent)
    assert outcome.code == 0
    assert outcome.err == ""
    assert "(ppl)" in outcome.out
    [note] = [line for line in outcome.out.splitlines() if f"bad/{name} is damaged (" in line]
    found = {Path(run["folder"]).name: run for run in json.loads(evalkit("ls", "runs", "-o", own_run.parent, "--format",
                                                                         "json").out)}  # fmt: skip
    assert (found["bad"]["state"], found[own_run.name]["state"]) == ("damaged", "finished")
    assert note.endswith(found["bad"]["notes"][0])


def test_a_folder_that_lost_its_manifest_is_damaged(evalkit: Command, own_run: Path) -> None:
    (own_run / MANIFEST).unlink()
    out = evalkit("ls", "runs", "-o", own_run.parent).out
    assert "damaged" in out
    assert f"{own_run} is not a run folder: it has no manifest.json" in out


def test_a_manifest_that_is_a_folder(evalkit: Command, own_run: Path) -> None:
    (own_run.parent / "odd" / MANIFEST).mkdir(parents=True)
    assert "(ppl)" in evalkit("ls", "runs", "-o", own_run.parent).out


def test_json_has_everything(evalkit: Command, own_run: Path, checkpoint: Path) -> None:
    run = load_run(own_run)
    [listed] = json.loads(evalkit("ls", "runs", "-o", own_run.parent, "--format", "json").out)
    expected = {"folder": str(own_run), "id": run.manifest["id"], "state": "finished", "suite": "zeroshot8",
                "template": "inst", "dtype": "float32", "documents": "", "context": "", "model": str(checkpoint),
                "path": str(checkpoint.resolve()), "created": run.manifest["created"], "journal": True,
                "score": run.results().average.accuracy, "rule": "ppl"}  # fmt: skip
    assert listed.items() >= expected.items()
    assert listed["devices"][0].startswith("cpu ")
    note = f"not the official documents of {', '.join(run.manifest['documents'])}"
    assert listed["notes"] == [note]
    assert evalkit("ls", "runs", "-o", own_run.parent).out.splitlines()[-1].endswith(f": {note}")


def test_options_that_cannot_be(evalkit: Command, own_run: Path) -> None:
    complains(evalkit("ls", "--sort", "name"), 2, "--sort is an option for runs", "evalkit ls runs --sort")
    complains(evalkit("ls", "runs", "--sort", "size"), 2, "--sort", "'size'", "'date', 'name', 'model', 'score'")
    shown = evalkit("ls", "runs", "-o", own_run.parent, "--filter", "nothing").out
    assert shown.strip() == f"none in {own_run.parent} with nothing"
    assert json.loads(evalkit("ls", "runs", "-o", "nowhere", "--format", "json").out) == []
