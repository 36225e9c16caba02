"""Figures as files."""

from __future__ import annotations

from pathlib import Path

import pytest

from evalkit.errors import RunError, UsageError
from evalkit.reporting.figures import check_figure_path, new_figure, save_figure

MAGIC = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}


def drawn(path: Path) -> bytes:
    figure = new_figure(3, 2)
    figure.subplots().plot([1, 2], [3, 4], label="模型 $x")
    save_figure(figure, path)
    return path.read_bytes()


@pytest.mark.parametrize("name", ["a.png", "a.PNG", "deep/er/a.pdf", "a.Pdf", "a.svg", "a.SVG"])
def test_any_case_of_suffix_and_folders_that_are_made(tmp_path: Path, name: str) -> None:
    content = drawn(tmp_path / name)
    assert content.startswith(MAGIC[Path(name).suffix.lower()])
    assert [one.name for one in (tmp_path / name).parent.iterdir()] == [Path(name).name]


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = drawn(tmp_path / "a.png")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("evalkit.paths.os.fsync", full)
    with pytest.raises(RunError, match=r"a\.png cannot be written: No space left on device"):
        drawn(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes() == old
    assert [one.name for one in tmp_path.iterdir()] == ["a.png"]


@pytest.mark.parametrize("name", ["a.jpg", "a", ".png", "x" * 300 + ".png"])
def test_names_that_no_figure_can_have(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"figures are written as \.png, \.pdf or \.svg|cannot be written"):
        check_figure_path(tmp_path / name)
