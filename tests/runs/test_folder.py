"""The run folder: its name, its lock, and errors when it is damaged or unavailable."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from evalkit.errors import RunError, UsageError
from evalkit.runs.finding import list_runs
from evalkit.runs.folder import Run, folder_name, load_run, specification_id
from evalkit.runs.writing import open_run
from tests.benchmarks.attention.made_ranks import made_ranks
from tests.comparison.made import make_longbench

SPECIFICATION: dict[str, Any] = {"suite": "zeroshot8", "limit": 5, "dtype": "float32", "checkpoint": {"weights": "0"}}
MANIFEST = {
    "id": specification_id(SPECIFICATION),
    "kind": "multiple_choice",
    "specification": SPECIFICATION,
    "rule": "ppl",
    "groups": {},
    "group_sizes": {},
    "documents": {},
    "template": {"name": "inst"},
    "created": "2026-01-01T00:00:00+00:00",
    "model": "org/name",
    "revision": None,
    "versions": {"evalkit": "0.1.0"},
}


def test_an_id_stands_for_all_of_a_specification() -> None:
    assert specification_id(dict(reversed(SPECIFICATION.items()))) == specification_id(SPECIFICATION)
    changed = [SPECIFICATION | {"limit": 6}, SPECIFICATION | {"dtype": "bfloat16"}, SPECIFICATION | {"new": None}]
    assert len({specification_id(s) for s in (SPECIFICATION, *changed)}) == 4


@pytest.mark.parametrize("model", ["org/name@main", "../../etc", "模型" * 80, "a b\n*?", ""])
def test_folder_names_fit_every_file_system(model: str, tmp_path: Path) -> None:
    name = folder_name(model, "suite", "inst" * 30, "float32", "0123456789ab")
    assert name.endswith("-float32-0123456789ab")
    assert len(name) < 130
    (tmp_path / name).mkdir()
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_folder_once_opened_is_found_again(tmp_path: Path) -> None:
    with open_run(tmp_path, "run", MANIFEST) as writer:
        writer.save_manifest(note="kept")
    with open_run(tmp_path, "run", MANIFEST | {"created": "later"}) as writer:
        assert writer.manifest["note"] == "kept"
        assert writer.manifest["created"] == MANIFEST["created"]
    assert not load_run(tmp_path / "run").complete


def test_another_specification_does_not_get_in(tmp_path: Path) -> None:
    with open_run(tmp_path, "run", MANIFEST):
        pass
    other = SPECIFICATION | {"limit": 6}
    manifest = MANIFEST | {"specification": other, "id": specification_id(other)}
    with pytest.raises(RunError, match="belongs to another specification"), open_run(tmp_path, "run", manifest):
        pass


def test_a_second_process_reports_who_has_it(tmp_path: Path) -> None:
    script = (
        "import json, sys\nfrom pathlib import Path\nfrom evalkit.runs.writing import open_run\n"
        "try:\n"
        "    with open_run(Path(sys.argv[1]), 'run', json.loads(sys.argv[2])): pass\n"
        "except Exception as error:\n"
        "    print(error)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path), json.dumps(MANIFEST)]
    with open_run(tmp_path, "run", MANIFEST):
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert f"is in use by another process (process {os.getpid()} on " in output
        with pytest.raises(RunError, match="is in use by another process"), open_run(tmp_path, "run", MANIFEST):
            pass
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == ""


def test_an_output_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(RunError, match=r"cannot be created .*choose another --output"),
        open_run(tmp_path / "file", "run", MANIFEST),
    ):
        pass


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a file system where nobody may write")
def test_an_output_without_write_permission() -> None:
    with pytest.raises(RunError, match="choose another --output"), open_run(Path("/proc/runs"), "run", MANIFEST):
        pass


def test_a_disk_that_fills_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with open_run(tmp_path, "run", MANIFEST) as writer:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(RunError, match=r"results.json cannot be written \(No space left on device\); fix"):
            writer.save_bytes("results.json", b"{}")
        (tmp_path / "run" / "journal.jsonl").touch()
        with pytest.raises(RunError, match=r"on device\); the scores are safe in the journal; fix"):
            writer.save_bytes("results.json", b"{}")
    assert not (tmp_path / "run" / "results.json").exists()


def test_not_a_run(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(RunError, match=r"is not a run folder: it has no manifest.json"):
            load_run(folder)


def test_a_finished_run_reads_back(own_run: Path, finished: Run) -> None:
    opened = load_run(own_run)
    assert opened.complete
    pd.testing.assert_frame_equal(opened.scores, finished.scores)
    assert opened.results() == finished.results("ppl")
    assert opened.seconds.keys() == {task.task for task in opened.results().tasks}


def _drop_groups(text: str) -> str:
    return json.dumps({key: value for key, value in json.loads(text).items() if key != "groups"})


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace('"limit": null', '"limit": 1'),
        lambda text: text.replace('"rule": "ppl"', '"rule": "acc"'),
        lambda text: text.replace('"official": false', '"official": true'),
        lambda text: text.replace('"sha256"', '"sha265"'),
        lambda text: "[" * 100_000,
        _drop_groups,
    ],
)
def test_a_damaged_manifest(own_run: Path, damage: Any) -> None:
    path = own_run / "manifest.json"
    path.write_text(damage(path.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(RunError, match=r"manifest.json is damaged \(.*\); delete it and run its ") as caught:
        load_run(own_run)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"rule": "ppl"}'])
def test_damaged_results(own_run: Path, content: str) -> None:
    (own_run / "results.json").write_text(content, encoding="utf-8")
    with pytest.raises(RunError, match=r"results.json is damaged \(.*\); delete results.json and run its "):
        _ = load_run(own_run).seconds


def _other_columns(path: Path) -> None:
    pd.DataFrame({"something": [1]}).to_parquet(path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-100]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"PAR1" + b"\0" * 100 + b"PAR1"),
        _other_columns,
    ],
)
def test_a_damaged_score_table(own_run: Path, damage: Any) -> None:
    damage(own_run / "scores.parquet")
    with pytest.raises(RunError, match=r"scores.parquet is damaged \(.*\); delete results.json and run ") as caught:
        _ = load_run(own_run).scores
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("absent", ["scores.parquet", "results.json"])
def test_a_run_without_its_results_is_not_finished(own_run: Path, absent: str) -> None:
    (own_run / absent).unlink()
    run = load_run(own_run)
    assert not run.complete
    with pytest.raises(RunError, match="is not finished; wait for it, or run its command again"):
        run.results()


def test_runs_are_listed_and_other_folders_are_not(own_run: Path) -> None:
    (own_run.parent / "notes").mkdir()
    (own_run.parent / "broken").mkdir()
    (own_run.parent / "broken" / "manifest.json").write_text("{")
    assert [run.folder for run in list_runs(own_run.parent)] == [own_run]
    assert list_runs(own_run.parent / "absent") == []


def test_no_choices_no_scores(tmp_path: Path) -> None:
    """Of attention maps as of generated texts: the message names the benchmark and claims nothing of texts."""
    maps = made_ranks(tmp_path, "llama-125m-vanilla", {19: np.ones((5, 3))})
    texts = load_run(make_longbench(tmp_path, {"trec": [1.0]}))
    for run, kind in ((maps, "attention"), (texts, "longbench")):
        words = (
            f"run {run.folder} has no choices that a rule could decide between: benchmark {kind} has its own metrics"
        )
        with pytest.raises(UsageError, match=re.escape(words)):
            run.results("acc")
        with pytest.raises(UsageError, match="has no choices"):
            _ = run.scores
