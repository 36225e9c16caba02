"""Plain technical English: words that are avoided, docstrings' first lines, and one class for each name."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "evalkit"
MODULES = sorted(PACKAGE.rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SETTINGS = sorted(path for folder in ("configs", "tasks", "results/published") for path in (ROOT / folder).rglob("*")
                  if path.is_file() and path.suffix != ".csv")  # fmt: skip
SCRIPTS = [
    path
    for folder in ("benchmarks", "examples", "examples/pretrain", "examples/pretrain/recipe", "examples/replication")
    for path in sorted((ROOT / folder).glob("[!.]*.*"))
]

AVOIDED = (
    "mend(s|ed|ing)?", "told", "lets? be", "held (to|against)", "whereabouts", "parted", "wanted", "likeliest",
    "refuses? what cannot be", "goes round", "what nobody asked", "carried off", "taken in",
)  # fmt: skip
_GAP = r"[\s_#*]+"
_AVOIDED = re.compile("(?<![a-z])(" + "|".join(AVOIDED).replace(" ", _GAP) + ")(?![a-z])", re.IGNORECASE)
"""Whole words, in identifiers between underscores too. A phrase may span two lines."""


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def avoided(text: str) -> list[str]:
    return [match.group() for match in _AVOIDED.finditer(text)]


def docstrings(module: Path) -> Iterator[tuple[str, str]]:
    """Yield name and docstring of a module, its classes and its functions."""
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield getattr(node, "name", name(module)), text


@pytest.mark.parametrize(
    "text", ["It is told.", "def test_a_loss_is_told_once():", "a value held\n    to the other", "class Whereabouts:"]
)
def test_words_that_are_found(text: str) -> None:
    assert len(avoided(text)) == 1


@pytest.mark.parametrize("text", ["recommended", "unwanted", "parting", "threshold", "held by the lock", "taken into"])
def test_words_that_may_stay(text: str) -> None:
    assert avoided(text) == []


@pytest.mark.parametrize("path", [*PAGES, *SETTINGS, *SCRIPTS, *MODULES], ids=name)
def test_no_avoided_word(path: Path) -> None:
    assert avoided(f"{name(path)}\n{path.read_text(encoding='utf-8')}") == []


def test_a_class_name_stands_for_one_class() -> None:
    names = Counter(
        node.name
        for module in MODULES
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_no_module_is_called_view() -> None:
    assert [name(module) for module in MODULES if module.name == "view.py"] == []


@pytest.mark.parametrize("module", [*MODULES, *(path for path in SCRIPTS if path.suffix == ".py")], ids=name)
def test_a_docstring_begins_with_a_sentence_of_one_line(module: Path) -> None:
    first = [(of, text.splitlines()[0]) for of, text in docstrings(module)]
    assert [(of, line) for of, line in first if not line.endswith(".") or len(line) > 120] == []
