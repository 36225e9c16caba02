"""evalkit's cache with files in the wrong place: they are never used, and never waited for."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

from evalkit.benchmarks.lm_eval.tasks import catalogue_index
from evalkit.benchmarks.run import evaluate
from evalkit.compatibility.lm_eval import CatalogueEntry
from evalkit.display import Progress
from evalkit.models.loading import fingerprint
from evalkit.models.loading.locate import silent
from evalkit.runs.folder import Run
from tests.tiny import tiny_checkpoint

KINDS = ("digests", "questions", "sharing")


@pytest.fixture(autouse=True)
def _all_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also digests of new files."""
    monkeypatch.setattr(fingerprint, "_SETTLED", -1e9)


class Pipes:
    """Named pipes that end every reader at once, and count them."""

    def __init__(self) -> None:
        self.readers = 0
        self._paths: list[Path] = []
        self._over = Event()
        self._thread = Thread(target=self._watch)
        self._thread.start()

    def put(self, path: Path) -> None:
        path.unlink()
        os.mkfifo(path)
        self._paths.append(path)

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            for path in list(self._paths):
                with suppress(OSError):  # ENXIO: nobody reads it
                    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                    self.readers += stat.S_ISFIFO(path.stat().st_mode)


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    made = Pipes()
    yield made
    made.close()


@pytest.fixture
def first(checkpoint: Path, documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the first documents of a task with a cache of its own; more arguments are `evaluate`'s."""

    def run(cache: str, output: str, model: Path = checkpoint, **options: Any) -> Run:
        monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path / cache))
        selection = options or {"limit": 3}
        return evaluate(
            str(model),
            tasks=["boolq"],
            data_dir=documents,
            allow_unofficial_data=True,
            output=tmp_path / output,
            progress=Progress(live=False),
            **selection,
        )

    return run


def same(run: Run, other: Run) -> bool:
    ours, theirs = run.scores.select_dtypes("number"), other.scores.select_dtypes("number")
    return run.manifest["id"] == other.manifest["id"] and bool(np.array_equal(ours, theirs, equal_nan=True))


def test_a_file_of_another_key_is_not_used(first: Any, tmp_path: Path) -> None:
    """Of another selection of documents and of another model; every file of the cache is replaced by a sibling."""
    expected = first("cache", "runs")
    first("others", "others", tiny_checkpoint(tmp_path / "qwen", "qwen2", window=4096), sample=3, seed=7)
    for kind in KINDS:
        ours, theirs = (sorted((tmp_path / cache / kind).iterdir()) for cache in ("cache", "others"))
        assert ours, kind
        for file, other in zip(ours, cycle(theirs), strict=False):
            assert file.read_bytes() != other.read_bytes()
            shutil.copyfile(other, file)
    assert same(first("cache", "again"), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pipe_is_not_read(first: Any, tmp_path: Path, kind: str, pipes: Pipes) -> None:
    expected = first("cache", "runs")
    for file in (tmp_path / "cache" / kind).iterdir():
        pipes.put(file)
    assert same(first("cache", "again"), expected)
    assert not pipes.readers


def test_lm_evals_catalogue_is_of_the_installed_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipes: Pipes
) -> None:
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path))
    module = "evalkit.benchmarks.lm_eval.tasks"

    def catalogue(version: str) -> set[str]:
        with monkeypatch.context() as during:
            during.setattr(f"{module}.version", lambda name: version)
            during.setattr(f"{module}.index_tasks", lambda root: {version: CatalogueEntry("TASK", "a.yaml", [])})
            return set(catalogue_index(silent))

    assert catalogue("1") == {"1"} and catalogue("2") == {"2"}
    first, second = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    shutil.copyfile(first, second)
    assert catalogue("1") == {"1"} and catalogue("2") == {"2"}
    for path in (first, second):
        pipes.put(path)
    assert catalogue("1") == {"1"} and catalogue("2") == {"2"}
    assert not pipes.readers
