"""Guards against loss, folders: nobody's files are overwritten, and no failure is swallowed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.guards.bench import (
    JOURNAL,
    MANIFEST,
    RESULTS,
    SCORES,
    SMALL_BATCHES,
    Bench,
    Guard,
    Guards,
    Outcome,
    once,
    run_is_opened,
    write,
)

GUARDS = Guards()


@pytest.mark.parametrize("guard", GUARDS)
def test_folders(guard: Guard, bench: Bench) -> None:
    guard.check(bench)


# What stands in a run's place


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _left(change: Callable[[Path], Any]) -> Callable[[Bench], Outcome]:
    """Change a finished run's folder and give its command again; what is there stays."""

    def act(bench: Bench) -> Outcome:
        folder = bench.batched()
        change(folder)
        before = {name: data for name, data in _files(folder).items() if not name.startswith(".")}
        outcome = bench.score(None, *SMALL_BATCHES)
        if outcome.code:
            assert before.items() <= _files(folder).items()
        return outcome

    return act


def _unlink(*names: str) -> Callable[[Path], Any]:
    return lambda folder: [(folder / name).unlink() for name in names]


def _damage_manifest(folder: Path) -> None:
    (folder / RESULTS).unlink()
    write(folder / MANIFEST, "{")


for _name in (SCORES, RESULTS, MANIFEST):
    GUARDS.add(f"without-journal-{_name}",
        f"A run that lacks its {_name} and its journal is not scored again unasked.", _left(_unlink(_name, JOURNAL)),
        f"no {JOURNAL}")  # fmt: skip
GUARDS.add("manifest-damaged", "A damaged manifest is not overwritten.", _left(_damage_manifest), MANIFEST, "damaged")


@GUARDS("rebuilt", "What is lost of a run is rebuilt from its journal, and nothing is scored.")
def _(bench: Bench) -> None:
    folder = bench.batched()
    before = _files(folder)
    for name in (SCORES, RESULTS):
        (folder / name).unlink()
        bench.patch.setattr("torch.nn.Module.__call__", lambda *_, **__: pytest.fail("the model ran"))
        assert bench.batched() == folder
        assert (folder / name).read_bytes() == before[name] and (folder / JOURNAL).read_bytes() == before[JOURNAL]


@GUARDS("finished", "A finished run is opened: nothing is scored, and no file changes.")
def _(bench: Bench) -> None:
    folder = bench.batched()
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir() if not path.name.startswith(".")}
    bench.patch.setattr("torch.nn.Module.__call__", lambda *_, **__: pytest.fail("the model ran"))
    assert bench.batched() == folder
    assert before == {path: path.stat().st_mtime_ns for path in before}


@GUARDS("foreign-folder", "A folder that a run has found, and not made, is not removed when the run fails.",
        "holds NaN")  # fmt: skip
def _(bench: Bench) -> Outcome:
    def diverged(tensors: Any) -> None:
        tensors["model.norm.weight"].fill_(float("nan"))

    model = bench.weights(diverged)
    made: list[Path] = []

    def claim(event: str, given: tuple[Any, ...]) -> bool:
        if run_is_opened(event, given):
            made.append(Path(str(given[0])))
        return bool(made)

    with once(claim, lambda: None):
        first = bench.score(model)
    assert first.code == 1 and not made[0].exists()  # its own is removed
    write(made[0] / "notes.txt", "mine")
    outcome = bench.score(model)
    assert (made[0] / "notes.txt").read_text(encoding="utf-8") == "mine"
    return outcome


@GUARDS("output-file", "An output that is a file is not replaced.", "runs", "choose another --output")
def _(bench: Bench) -> Outcome:
    write("runs", "mine")
    return bench.score()


GUARDS.add("export-itself", "A run is not replaced by its export.",
    lambda bench: bench("export", folder := bench.run(), "--to", "run", "--output", folder.parent),
    "holds the run itself", code=2)  # fmt: skip


def _initialised(bench: Bench, output: str) -> Outcome:
    """Write a new checkpoint."""
    Path("made").mkdir()
    write("made/notes.txt", "mine")
    model = bench.shared.model
    outcome = bench("models", "init", "llama-125m-vanilla", "--tokenizer", model, "--output", output)
    assert Path("made/notes.txt").exists()
    return outcome


GUARDS.add("checkpoint-exists", "A checkpoint is not written over another folder.",
    lambda bench: _initialised(bench, "made"), "--output made", "already exists", code=2)  # fmt: skip
GUARDS.add("checkpoint-here", "Nor over the working directory.", lambda bench: _initialised(bench, "."),
    "working directory", code=2)  # fmt: skip


@GUARDS("temporary", "Of temporary folders only abandoned ones of evalkit are removed.")
def _(bench: Bench) -> None:
    import tempfile

    bench.patch.setattr(tempfile, "tempdir", str(bench.place))
    for name in (".evalkit-mine/notes", ".evalkit-young/lock", ".evalkit-old/lock"):
        write(name, "")
    os.utime(".evalkit-old/lock", (0, 0))
    Path(".evalkit-link").symlink_to(bench.copy(name="precious"))
    assert bench.score().code == 0
    assert (
        Path(".evalkit-mine/notes").exists()
        and Path(".evalkit-young/lock").exists()
        and Path("precious/config.json").exists()
    )
    assert not Path(".evalkit-old").exists()


# Failures that are not swallowed


def _study(bench: Bench, **checkpoints: Path) -> Path:
    content = {
        "output": "runs",
        "settings": {
            "data_dir": str(bench.shared.documents),
            "allow_unofficial_data": True,
            "token_budget": 64,
            "device": "cpu",
        },
        "checkpoints": {name: str(path) for name, path in checkpoints.items()},
        "benchmarks": {"zeroshot8": {"tasks": ["piqa", "boolq"]}},
    }
    return write("study.yaml", content)


@GUARDS("study-failure", "A study of which a run fails ends with an error, and its other runs are kept.")
def _(bench: Bench) -> None:
    def diverged(tensors: Any) -> None:
        tensors["model.norm.weight"].fill_(float("nan"))

    outcome = bench("study", "run", _study(bench, A=bench.weights(diverged), B=bench.shared.model))
    assert outcome.code == 1 and "1 finished, 1 failed" in outcome.out
    assert len(list(Path("runs").glob(f"*/{RESULTS}"))) == 1


@GUARDS("watch-failure", "So does a watch of which a checkpoint fails.", "not evaluated", "checkpoint-1")
def _(bench: Bench) -> Outcome:
    for step in (1, 2):
        bench.copy(name=f"training/checkpoint-{step}")
    write("training/checkpoint-1/tokenizer.json", "{}")
    options = bench.options(None, "--watch", "training", "--until", 2)
    outcome = bench("run", *options[2:])
    assert len(list(Path("runs").glob(f"*/{RESULTS}"))) == 1
    return outcome


@GUARDS("cluster-killed", "A study on workers that is killed resumes, on workers or without.",
        marks=[pytest.mark.cluster, pytest.mark.slow])  # fmt: skip
def _(bench: Bench) -> None:
    bench.patch.setenv("HOME", str(bench.place))
    study = _study(bench, A=bench.shared.model, B=bench.shared.other)
    process = bench.process("study", "run", study, "--workers", 1)
    deadline = time.monotonic() + 200
    while not any(path.read_bytes().count(b"\n") for path in Path("runs").glob(f"*/{JOURNAL}")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    process.kill()
    process.communicate()
    kept = {path: path.read_bytes() for path in Path("runs").glob(f"*/{JOURNAL}")}
    assert bench("study", "run", study).code == 0
    assert all(path.read_bytes().startswith(data[: data.rfind(b"\n") + 1]) for path, data in kept.items())
    assert len(list(Path("runs").glob(f"*/{RESULTS}"))) == 2
