"""evalkit's cache: its values, bound, lock and removal; what runs use of it is in tests/guards."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from threading import Thread

import pytest

from evalkit import cache
from evalkit.compatibility.lm_eval import CatalogueEntry
from evalkit.models.loading import fingerprint
from evalkit.models.loading.locate import silent
from evalkit.suites.lm_eval_tasks import catalogue_index, matching_tasks


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


def test_lm_evals_catalogue_is_of_the_installed_version(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stands in its file, a pipe too, which would never end."""

    def catalogues() -> list[str]:
        names = []
        for version in "12":
            entries = {version: CatalogueEntry("TASK", "a.yaml", [])}
            with monkeypatch.context() as during:
                during.setattr("evalkit.suites.lm_eval_tasks.version", lambda _, version=version: version)
                during.setattr("evalkit.suites.lm_eval_tasks.index_tasks", lambda _, entries=entries: entries)
                names += catalogue_index(silent)
        return names

    assert catalogues() == ["1", "2"]
    with monkeypatch.context() as during:
        during.setattr("evalkit.suites.lm_eval_tasks.version", lambda _: "1")
        assert matching_tasks(("1*", "arc_e*", "gsm8k_*"), None, None, silent) == (
            "1",
            "arc_easy",
            "gsm8k_gold_bpb_5shot",
        )
    first, second = sorted(path for path in folder.rglob("*") if path.is_file())
    shutil.copyfile(first, second)
    assert catalogues() == ["1", "2"]
    first.unlink()
    os.mkfifo(first)
    assert catalogues() == ["1", "2"]
