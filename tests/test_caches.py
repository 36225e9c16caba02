"""evalkit's cache: its bound, its lock and its removal; files in the wrong place are never used, nor waited for."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

from evalkit import cache
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
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprint, "_SETTLED", -1e9)  # digests of new files are stored too
    return tmp_path / "cache"


def test_a_value_is_read_as_written_under_its_kind_and_key(folder: Path) -> None:
    assert cache.read_cached_bytes("questions", "key") is None
    cache.write_cached_bytes("questions", "key", b"value")
    assert cache.read_cached_bytes("questions", "key") == b"value"
    assert cache.read_cached_bytes("questions", "other") is None and cache.read_cached_bytes("other", "key") is None
    [file] = (folder / "questions").iterdir()
    whole = file.read_bytes()
    changed = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in (0, 31, 32, 36)]
    for content in (*changed, b"", whole[:10], whole[:32], whole[:-1]):
        file.write_bytes(content)
        assert cache.read_cached_bytes("questions", "key") is None
    # A folder that cannot be written costs only time
    (folder / "other").write_text("a file")
    cache.write_cached_bytes("other", "key", b"value")
    assert cache.read_cached_bytes("other", "key") is None


def test_beyond_its_bound_the_values_unused_for_longest_are_deleted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all kinds together, folders too; never what was used within a day, never a download."""

    def age(path: Path, days: float) -> None:
        os.utime(path, (time.time() - days * 24 * 3600,) * 2)

    for number, kind in enumerate(("lm-eval-tasks", "questions", "sharing")):
        cache.write_cached_bytes(kind, "key", b"x" * 1000)
        age(next((folder / kind).iterdir()), 5 - number)
    for file, size, days in (("gguf/model/weights", 1000, 9), ("documents/boolq.jsonl", 9000, 99)):
        (folder / file).parent.mkdir(parents=True)
        (folder / file).write_bytes(b"x" * size)
        age(folder / "gguf" / "model" if "gguf" in file else folder / file, days)
    monkeypatch.setattr(cache, "MOST_BYTES", 3200)
    cache.write_cached_bytes("digests", "key", b"x")
    assert not (folder / "gguf" / "model").exists()
    assert cache.read_cached_bytes("lm-eval-tasks", "key") is not None  # used now, so it is the newest
    monkeypatch.setattr(cache, "MOST_BYTES", 1)
    cache.write_cached_bytes("digests", "other", b"x")
    kept = {kind for kind in cache.COMPUTED if cache.read_cached_bytes(kind, "key") is not None}
    assert kept == {"lm-eval-tasks", "digests"}
    assert (folder / "documents" / "boolq.jsonl").is_file()
    # Clearing deletes only what evalkit stored
    (folder / "thesis.tex").write_text("mine")
    cache.clear_cache()
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]


def test_a_second_process_waits() -> None:
    said: list[str] = []
    order: list[str] = []

    def second() -> None:
        with cache.locked("thing", said.append):
            order.append("second")

    with cache.locked("thing", silent):
        thread = Thread(target=second)
        thread.start()
        while not said:
            time.sleep(0.01)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


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


def test_files_of_another_key_are_not_used_and_pipes_are_not_read(
    checkpoint: Path, documents: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipes: Pipes
) -> None:
    """Every file of the cache is replaced by one of other documents and of another model, then by a pipe."""

    def run(output: str, model: Path = checkpoint, **options: Any) -> Run:
        settings = {"tasks": ["boolq"], "data_dir": documents, "allow_unofficial_data": True}
        progress = Progress(live=False)
        return evaluate(str(model), **settings, **options, output=tmp_path / output, progress=progress)

    def again(output: str) -> bool:
        run_again = run(output, limit=3)
        values = [found.scores.select_dtypes("number") for found in (run_again, expected)]
        same_id = run_again.manifest["id"] == expected.manifest["id"]
        return same_id and bool(np.array_equal(*values, equal_nan=True))

    expected = run("runs", limit=3)
    with monkeypatch.context() as during:
        during.setenv("EVALKIT_CACHE", str(tmp_path / "others"))
        run("others", tiny_checkpoint(tmp_path / "qwen", "qwen2", window=4096), sample=3, seed=7)
    for kind in KINDS:
        ours, theirs = (sorted((parent / kind).iterdir()) for parent in (folder, tmp_path / "others"))
        assert ours, kind
        for file, other in zip(ours, cycle(theirs), strict=False):
            assert file.read_bytes() != other.read_bytes()
            shutil.copyfile(other, file)
    assert again("again")
    for kind in KINDS:
        for file in (folder / kind).iterdir():
            pipes.put(file)
    assert again("beside pipes") and not pipes.readers


def test_lm_evals_catalogue_is_of_the_installed_version(
    folder: Path, monkeypatch: pytest.MonkeyPatch, pipes: Pipes
) -> None:
    def catalogues() -> list[str]:
        names = []
        for version in "12":
            entries = {version: CatalogueEntry("TASK", "a.yaml", [])}
            with monkeypatch.context() as during:
                during.setattr("evalkit.benchmarks.lm_eval.tasks.version", lambda _, version=version: version)
                during.setattr("evalkit.benchmarks.lm_eval.tasks.index_tasks", lambda _, entries=entries: entries)
                names += catalogue_index(silent)
        return names

    assert catalogues() == ["1", "2"]
    first, second = sorted(path for path in folder.rglob("*") if path.is_file())
    shutil.copyfile(first, second)
    assert catalogues() == ["1", "2"]
    for path in (first, second):
        pipes.put(path)
    assert catalogues() == ["1", "2"] and not pipes.readers
