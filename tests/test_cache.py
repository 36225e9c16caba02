"""evalkit's cache as a whole: its bound, its lock and its removal."""

from __future__ import annotations

import os
import time
from pathlib import Path
from threading import Thread

import pytest

from evalkit import cache
from evalkit.cli import main
from evalkit.models.loading.locate import silent

DAYS = 24 * 3600.0


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def age(path: Path, days: float) -> None:
    os.utime(path, (time.time() - days * DAYS,) * 2)


def test_beyond_its_bound_the_values_unused_for_longest_are_deleted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all kinds together, folders too; never what was used within a day, never a download."""
    for number, kind in enumerate(("lm-eval-tasks", "questions", "sharing")):
        cache.write_cached_bytes(kind, "key", b"x" * 1000)
        age(next((folder / kind).iterdir()), 5 - number)
    (folder / "gguf" / "model").mkdir(parents=True)
    (folder / "gguf" / "model" / "weights").write_bytes(b"x" * 1000)
    age(folder / "gguf" / "model", 9)
    (folder / "documents").mkdir()
    (folder / "documents" / "boolq.jsonl").write_bytes(b"x" * 9000)
    age(folder / "documents" / "boolq.jsonl", 99)
    monkeypatch.setattr(cache, "MOST_BYTES", 3200)
    cache.write_cached_bytes("digests", "key", b"x")
    assert not (folder / "gguf" / "model").exists()
    assert cache.read_cached_bytes("lm-eval-tasks", "key") is not None  # used now, so it is the newest
    monkeypatch.setattr(cache, "MOST_BYTES", 1)
    cache.write_cached_bytes("digests", "other", b"x")
    assert cache.read_cached_bytes("questions", "key") is None and cache.read_cached_bytes("sharing", "key") is None
    assert cache.read_cached_bytes("lm-eval-tasks", "key") is not None
    assert (folder / "documents" / "boolq.jsonl").is_file()


def test_clearing_deletes_only_what_evalkit_stored(
    folder: Path, documents: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.write_cached("digests", "key", {"a": 1})
    (folder / "documents").mkdir()
    (folder / "documents" / "boolq.jsonl").write_text("{}\n")
    (folder / "thesis.tex").write_text("mine")
    with pytest.raises(SystemExit) as left:
        main(["doctor", "--clear-cache", "--data-dir", str(documents)])
    assert not left.value.code and "deleted" in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == ["thesis.tex"]


def test_a_second_process_waits(folder: Path) -> None:
    said: list[str] = []

    def second() -> None:
        with cache.locked("thing", said.append):
            order.append("second")

    order: list[str] = []
    with cache.locked("thing", silent):
        thread = Thread(target=second)
        thread.start()
        while not said:
            time.sleep(0.01)
        order.append("first")
    thread.join()
    assert order == ["first", "second"] and "waiting" in said[0]
