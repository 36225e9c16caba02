"""Licences of the datasets, compared with those under which the tests' own documents are redistributed."""

from __future__ import annotations

from pathlib import Path

from evalkit.data import TASKS
from evalkit.pages.overview import LICENCES

README = Path(__file__).parents[1] / "fixtures" / "README.md"
NONE_STATED = {"openbookqa"}


def test_licences_are_those_of_the_fixtures() -> None:
    text = README.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| ") and ".jsonl" in line]
    for name, task in TASKS.items():
        if name in NONE_STATED:
            assert task.hub.path not in LICENCES
            continue
        [line] = [line for line in lines if f"{name}.jsonl" in line]
        licence = LICENCES[task.hub.path]
        assert licence.name in line, name
        assert licence.authors in line, name
    licence = LICENCES["THUDM/LongBench"]
    assert f"({licence.authors}, {licence.name}, " in text
