"""A fingerprint changes with everything that changes the numbers, and with nothing else."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from evalkit.cache import read_cached
from evalkit.errors import CheckpointError
from evalkit.models.loading import fingerprint as fingerprint_module
from evalkit.models.loading.fingerprint import Fingerprint, fingerprint
from evalkit.models.loading.locate import locate
from tests.tiny import tiny_checkpoint, tiny_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "one", max_shard_size="100KB")


def of(folder: Path, tokenizer: Path | None = None) -> Fingerprint:
    return fingerprint(locate(str(folder), tokenizer=None if tokenizer is None else str(tokenizer)))


def changed(before: Fingerprint, after: Fingerprint) -> set[str]:
    names = ("weights", "config", "tokenizer", "combined")
    return {name for name in names if getattr(before, name) != getattr(after, name)}


def edit_json(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(changes | {k: v for k, v in content.items() if k not in changes}, indent=7))


def test_the_same_files_elsewhere_have_the_same_fingerprint(folder: Path, tmp_path: Path) -> None:
    before = of(folder)
    assert len({before.weights, before.config, before.tokenizer, before.combined}) == 4
    shutil.copytree(folder, tmp_path / "copy")
    assert of(tmp_path / "copy") == before
    folder.rename(tmp_path / "moved")
    assert of(tmp_path / "moved") == before


def test_one_flipped_byte_in_any_shard(folder: Path) -> None:
    before = of(folder)
    for shard in sorted(folder.glob("*.safetensors")):
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
        after = of(folder)
        assert changed(before, after) == {"weights", "combined"}
        before = after


def test_a_flipped_byte_is_seen_though_size_and_modification_time_are_kept(folder: Path) -> None:
    before = of(folder)
    shard = sorted(folder.glob("*.safetensors"))[0]
    status = shard.stat()
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert changed(before, of(folder)) == {"weights", "combined"}


def test_config_counts_by_content(folder: Path) -> None:
    before = of(folder)
    edit_json(folder / "config.json", transformers_version="9.9", _name_or_path="elsewhere")
    assert of(folder) == before
    edit_json(folder / "config.json", rms_norm_eps=0.5)
    assert changed(before, of(folder)) == {"config", "combined"}


def test_generation_settings_do_not_count(folder: Path) -> None:
    before = of(folder)
    (folder / "generation_config.json").write_text('{"temperature": 3}')
    (folder / "README.md").write_text("notes")
    assert of(folder) == before


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_every_tokenizer_file_counts(folder: Path, name: str) -> None:
    before = of(folder)
    if name.endswith(".json"):
        edit_json(folder / name, padding={"side": "left"})
    else:
        (folder / name).write_text("{{ messages }}")
    assert changed(before, of(folder)) == {"tokenizer", "combined"}


@pytest.mark.parametrize(
    "name",
    ["additional_chat_templates/tools.jinja", "other.model", "tokenizer.model.v3", "tokenizer.4.0.0.json"],
)
def test_what_else_transformers_reads_of_a_tokenizer_counts(folder: Path, name: str) -> None:
    before = of(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("{}")
    added = of(folder)
    assert changed(before, added) == {"tokenizer", "combined"}
    (folder / name).write_text("{ }")
    assert changed(added, of(folder)) == {"tokenizer", "combined"}


def test_another_tokenizer_folder_counts(folder: Path, tmp_path: Path) -> None:
    same = tiny_tokenizer(tmp_path / "same")
    other = tiny_tokenizer(tmp_path / "other", eos="<end>")
    assert of(folder, same) == of(folder)
    assert changed(of(folder), of(folder, other)) == {"tokenizer", "combined"}


def test_the_config_beside_another_tokenizer_counts(folder: Path, tmp_path: Path) -> None:
    """transformers chooses the tokenizer's class by it."""
    other = tiny_tokenizer(tmp_path / "other")
    before = of(folder, other)
    (other / "config.json").write_text('{"model_type": "qwen2"}')
    assert changed(before, of(folder, other)) == {"tokenizer", "combined"}


@pytest.mark.parametrize("name", ["own.tiktoken", "words.json", "notes.txt"])
def test_what_trusted_code_may_read_counts(folder: Path, name: str) -> None:
    def trusted() -> Fingerprint:
        return fingerprint(locate(str(folder), trust_remote_code=True))

    before, untrusted = trusted(), of(folder)
    (folder / name).write_text("{}")
    assert changed(before, trusted()) == {"config", "combined"}
    assert of(folder) == untrusted


def test_trusted_code_counts(folder: Path) -> None:
    (folder / "modeling_own.py").write_text("x = 1")
    untrusted = of(folder)
    trusted = fingerprint(locate(str(folder), trust_remote_code=True))
    assert changed(untrusted, trusted) == {"config", "combined"}
    (folder / "modeling_own.py").write_text("x = 2")
    assert of(folder) == untrusted
    assert changed(trusted, fingerprint(locate(str(folder), trust_remote_code=True))) == {
        "config",
        "combined",
    }


def test_gguf_counts_by_content_not_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF one")
    (tmp_path / "b.gguf").write_bytes(b"GGUF one")
    (tmp_path / "c.gguf").write_bytes(b"GGUF two")
    a, b, c = (of(tmp_path / f"{name}.gguf") for name in "abc")
    assert a == b
    assert changed(a, c) == {"weights", "config", "tokenizer", "combined"}


def entries(cache: Path) -> list[Path]:
    """Return the files with cached digests."""
    found = list((cache / "digests").glob("[!.]*"))
    assert found
    return found


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of hashed files; recently changed files are cached too."""
    names: list[str] = []
    original = fingerprint_module._keep

    def counting(path: Path, *rest: Any) -> None:
        names.append(path.name)
        original(path, *rest)

    monkeypatch.setattr(fingerprint_module, "_keep", counting)
    monkeypatch.setattr(fingerprint_module, "_SETTLED", -1e9)
    return names


def test_second_time_reads_only_what_changed(folder: Path, read: list[str]) -> None:
    before = of(folder)
    assert len([name for name in read if name.endswith(".safetensors")]) == len(list(folder.glob("*.safetensors")))
    read.clear()
    assert of(folder) == before
    assert read == []
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes())
    assert of(folder) == before
    assert read == [shard.name]


def test_another_file_of_the_same_size_and_times_is_seen(
    folder: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system whose times are too coarse: only the inode differs."""
    coarse = fingerprint_module._state
    monkeypatch.setattr(fingerprint_module, "_state", lambda status: [coarse(status)[0], 0, 0, *coarse(status)[3:]])
    before = of(folder)
    shard = sorted(folder.glob("*.safetensors"))[0]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.with_name("other").write_bytes(content)
    shard.with_name("other").replace(shard)
    assert changed(before, of(folder)) == {"weights", "combined"}


def test_what_was_written_a_moment_ago_is_not_remembered_by_its_times(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within one step of the file system's clock a second change leaves no trace: the state is the same."""
    shard = sorted(folder.glob("*.safetensors"))[0]
    frozen = fingerprint_module.state_of(shard)
    frozen[1] = frozen[2] = time.time_ns()
    original = fingerprint_module._state
    monkeypatch.setattr(
        fingerprint_module, "_state", lambda status: frozen if status.st_ino == frozen[3] else original(status)
    )
    before = of(folder)
    with shard.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    assert changed(before, of(folder)) == {"weights", "combined"}


def test_what_one_writer_knows_is_kept_by_the_next(folder: Path, tmp_path: Path, read: list[str]) -> None:
    of(folder)
    of(tiny_checkpoint(tmp_path / "two"))
    read.clear()
    of(folder)
    assert read == []


@pytest.mark.parametrize("damage", ["", "{", "{}", "[]", '{"x": 3}', "null", "\x00\x01"])
def test_a_damaged_cache_is_ignored_and_written_again(folder: Path, cache: Path, read: list[str], damage: str) -> None:
    before = of(folder)
    for entry in entries(cache):
        entry.write_text(damage)
    hashed = sorted(read)
    read.clear()
    assert of(folder) == before
    assert sorted(read) == hashed
    read.clear()
    assert of(folder) == before
    assert read == []


def test_unwritable_cache_is_no_error(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = of(folder)
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path / "a file" / "cache"))
    assert of(folder) == before


def test_concurrent_writers_leave_a_whole_file(folder: Path, cache: Path) -> None:
    results: list[Fingerprint] = []
    threads = [threading.Thread(target=lambda: results.append(of(folder))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8 and len(set(results)) == 1
    assert all(read_cached("digests", str(path.resolve())) for path in folder.glob("*.safetensors"))
    assert len(entries(cache)) == len(list((cache / "digests").iterdir()))


def test_missing_shard_is_named(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        of(folder)
