"""Run folders: their names, how they are found, and that every file is bound to its run."""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from evalkit.benchmarks.registry import results_of
from evalkit.comparison.naming import find_run
from evalkit.errors import EvalkitError, RunError, UnknownNameError, UsageError
from evalkit.models.loading.locate import Checkpoint
from evalkit.runs.finding import folder_name, list_runs, model_name, scan
from evalkit.runs.folder import JOURNAL, MANIFEST, RESULTS, SCORES, load_run, specification_id
from evalkit.runs.writing import open_run
from tests.runs.conftest import MANIFEST as CONTENT
from tests.runs.conftest import SPECIFICATION, Small
from tests.sealed import read, reseal, write, write_run

LONG = "x" * 300


@pytest.mark.parametrize("model", ["../../etc", "模型" * 80, ""])
def test_folder_names_fit_every_file_system(model: str, tmp_path: Path) -> None:
    name = folder_name(model, "suite", "inst" * 30, "float32", "0123456789ab")
    assert name.endswith("-float32-0123456789ab") and len(name) < 130
    (tmp_path / name).mkdir()
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_ids_and_names_of_models(tmp_path: Path) -> None:
    """An id stands for all of a specification; a name that only counts has the folder before it."""
    assert specification_id(dict(reversed(SPECIFICATION.items()))) == specification_id(SPECIFICATION)
    others = [SPECIFICATION | {"limit": 6}, SPECIFICATION | {"dtype": "bfloat16"}, SPECIFICATION | {"new": None}]
    assert len({specification_id(s) for s in (SPECIFICATION, *others)}) == 4
    names = {"a/checkpoints/checkpoint-1/hf": "a-checkpoints-checkpoint-1-hf", "a/epoch=3-step=1": "a-epoch=3-step=1",
             "a/llama-125m": "llama-125m"}  # fmt: skip
    for path, name in names.items():
        assert model_name(Checkpoint(path, "folder", tmp_path / path)) == name
    file = tmp_path / "a" / "b" / "model.gguf"
    assert model_name(Checkpoint("a/b/model.gguf", "gguf", file.parent, file)) == "b-model"
    assert model_name(Checkpoint("org/model@step1000", "hub", tmp_path / "latest")) == "model@step1000"


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """Write a finished run of LongBench; its specification has the model's name."""

    def run(model: str, path: Path | None = None, revision: str | None = None) -> Path:
        about = {"model": model, "path": None if path is None else str(path), "revision": revision}
        content = {"specification": SPECIFICATION | {"checkpoint": {"weights": model}}}
        usual = {key: value for key, value in CONTENT.items() if key != "id"}
        return write_run(tmp_path / "runs", usual | about | content, {"tasks": [], "averages": []}, {})

    return run


def test_a_run_is_found_by_whatever_names_it_alone(
    make: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run, other = (make(f"{parent}/checkpoint-1000", tmp_path / parent / "checkpoint-1000") for parent in "ab")
    (tmp_path / "a" / "checkpoint-1000").mkdir(parents=True)
    steps = [make(f"org/name@step{step}", revision=f"{step}a1b") for step in (1, 2)]
    root, identity = run.parent, load_run(run).manifest["id"]
    for name in (
        str(run), run.name, run.name[:-3], identity, identity[:5], "a/checkpoint-1000", "a/checkpoint-1000/",
        "./a/checkpoint-1000", str(tmp_path / "a" / ".." / "a" / "checkpoint-1000"),
    ):  # fmt: skip
        assert find_run(name, root).folder == run, name
    assert find_run("b/checkpoint-1000", root).folder == other
    for step, folder in enumerate(steps, start=1):
        assert find_run(f"org/name@step{step}", root).folder == find_run(f"org/name@{step}a1b", root).folder == folder
    for name in ("org/name", "name"):
        with pytest.raises(UsageError, match=rf"'{name}' .*name@step1.*name@step2"):
            find_run(name, root)
    (tmp_path / "checkpoint").mkdir()
    cases: list[tuple[str, Path, type[EvalkitError]]] = [
        ("nmae", root, UnknownNameError),
        ("model", tmp_path / "elsewhere", UsageError),
        (" ", root, UsageError),
        (str(tmp_path / "checkpoint"), root, RunError),
        (LONG, root, UnknownNameError),
        ("x", tmp_path / LONG, RunError),
    ]
    for name, folder, kind in cases:
        with pytest.raises(kind):
            find_run(name, folder)


def test_folders_that_hold_no_finished_run(make: Callable[..., Path]) -> None:
    begun, damaged = make("org/begun"), make("org/damaged")
    root = begun.parent
    (begun / RESULTS).unlink()
    (damaged / MANIFEST).write_text("{", encoding="utf-8")
    (root / "notes").mkdir()
    (root / "file").touch()
    (root / "torn").mkdir()
    (root / "torn" / JOURNAL).touch()
    (root / "weights").mkdir()
    for name in ("config.json", MANIFEST, RESULTS):  # a checkpoint, with files of another program
        (root / "weights" / name).write_text("{}", encoding="utf-8")
    assert [entry.folder for entry in scan(root)] == [begun, damaged, root / "torn"]
    with pytest.raises(RunError, match="weights is not a run folder"):
        load_run(root / "weights")
    assert [run.folder for run in list_runs(root)] == [begun]
    for name, noun in (("begun", "not finished"), ("dama", MANIFEST), ("torn", MANIFEST)):
        with pytest.raises(RunError, match=noun):
            find_run(name, root)


@pytest.mark.parametrize(("name", "key"), [(MANIFEST, "group_sizes"), (RESULTS, "averages")])
def test_a_run_of_an_earlier_version_is_not_called_damaged(make: Callable[..., Path], name: str, key: str) -> None:
    """Its digests are right, and a key of today's form is absent."""
    folder = make("org/earlier")
    write(folder, name, {other: value for other, value in read(folder, name).items() if other != key})
    reseal(folder)
    with pytest.raises(RunError, match=rf"{name} was written by an earlier version .*{key}.*--output") as raised:
        everything(folder)
    assert "damaged" not in str(raised.value)


def test_a_table_of_an_earlier_version_is_not_called_damaged(make: Callable[..., Path]) -> None:
    folder = make("org/earlier")
    pd.DataFrame({"other": [1]}).to_parquet(folder / "generations.parquet")
    reseal(folder)
    with pytest.raises(RunError, match=r"generations\.parquet was written by an earlier version .*answer"):
        load_run(folder).table("generations.parquet", ["answer"])


def test_a_folder_is_opened_again_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with open_run(tmp_path, "run", dict(CONTENT)) as writer:
        writer.save_manifest(note="kept")
    other = CONTENT | {"specification": SPECIFICATION | {"limit": 6}}
    other["id"] = specification_id(other["specification"])
    with pytest.raises(RunError, match="another specification"), open_run(tmp_path, "run", other):
        pass
    with pytest.raises(RunError, match="--output"), open_run(tmp_path / LONG, "run", dict(CONTENT)):
        pass
    with open_run(tmp_path, "run", CONTENT | {"created": "later"}) as writer:
        assert (writer.manifest["note"], writer.manifest["created"]) == ("kept", CONTENT["created"])
        monkeypatch.setattr(os, "fsync", full)
        (tmp_path / "run" / JOURNAL).touch()
        with pytest.raises(RunError, match=rf"{RESULTS} .*No space .*journal"):
            writer.save_bytes(RESULTS, b"{}")
    assert not load_run(tmp_path / "run").complete and not (tmp_path / "run" / RESULTS).exists()


def everything(folder: Path) -> str:
    """All that is read of the numbers of a run."""
    run = load_run(folder)
    results_of(run)
    samples = [run.read(name).decode() for name in sorted(run.files) if name.startswith("lm_eval/")]
    return "\n".join([run.scores.to_csv(), str(run.results()), json.dumps(run.stored), str(run.manifest), *samples])


def flipped(content: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << dice.randrange(8)]) + content[at + 1 :]


def test_no_flipped_bit_changes_a_number(small: Small) -> None:
    """Of the journal, from which results are made anew, it costs a batch and changes nothing."""
    run, dice = small(log_samples=True), random.Random(8)
    expected = everything(run.folder)
    assert {MANIFEST, SCORES} < run.files.keys() and len(run.files) > 3
    for name in (*run.files, RESULTS):
        path = run.folder / name
        whole = path.read_bytes()
        for _ in range(15):
            path.write_bytes(flipped(whole, dice))
            try:
                assert everything(run.folder) == expected
            except EvalkitError as error:
                assert "\n" not in str(error) and path.name in str(error)
        path.write_bytes(whole)
    (run.folder / JOURNAL).write_bytes(flipped((run.folder / JOURNAL).read_bytes(), dice))
    (run.folder / RESULTS).unlink()
    assert small(log_samples=True).scores.equals(run.scores)
