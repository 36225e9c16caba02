"""The fixtures are parts of the complete data, if that is available."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from tests.fixtures import ROOT, collect


def content(folder: Path) -> dict[str, bytes]:
    """What the data files of a folder hold; how well a file is compressed depends on the library's version."""
    paths = [path for path in folder.rglob("*") if path.suffix in (".jsonl", ".json", ".xz")]
    return {
        str(path.relative_to(folder)): lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        for path in paths
    }


@pytest.mark.slow
def test_they_are_made_of_the_complete_data(shared_data: Path, tmp_path: Path) -> None:
    paper = shared_data.parent / "paper" / "integral_transformer.tex"
    if not paper.is_file():
        pytest.skip("the paper's source is not beside the shared data")
    collect.main(shared_data, paper, tmp_path)
    assert content(tmp_path) == content(ROOT)
    assert len(content(ROOT)) == 29
