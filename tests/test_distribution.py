"""The name evalkit on the package index belongs to another project: nothing may install it, or query its version."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import evalkit
from evalkit.benchmarks.request import provenance
from evalkit.models.loading.spec import ModelSpec

ROOT = Path(__file__).parents[1]
_PLACES = ("evalkit", "docs", "tasks", "configs", "benchmarks", "results/published", "README.md", "CHANGELOG.md",
           "pyproject.toml", "Makefile", "constraints.txt", ".ci")  # fmt: skip

FOREIGN = re.compile(
    r"install [^\n`#]*(?<![-\w/.])evalkit(?![-\w/.])"  # pip install evalkit, "reinstall evalkit"
    r"|(?<![-\w])evalkit\[\w"  # an extra of it
    r"|\bversion\([\"']evalkit[\"']\)|package_name="  # its version, from the installed metadata
)


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder in which the other project is installed."""
    metadata = tmp_path / "evalkit-0.2.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: evalkit\nVersion: 0.2.1\n", encoding="utf-8")
    return tmp_path


def test_nothing_installs_the_other_project() -> None:
    files = [path for place in _PLACES for path in ((ROOT / place).rglob("*") if (ROOT / place).is_dir()
             else [ROOT / place]) if path.is_file() and path.suffix not in (".png", ".svg", ".pyc")]  # fmt: skip
    assert len(files) > 200
    found = [f"{path.relative_to(ROOT)}: {match.group()}" for path in files
             for match in FOREIGN.finditer(path.read_text(encoding="utf-8"))]  # fmt: skip
    assert found == []


@pytest.mark.parametrize(
    ("text", "foreign"),
    [
        ("pip install 'evalkit[rapidfuzz]'", True),
        ("reinstall evalkit", True),
        ("pip install -U evalkit", True),
        ('"evalkit[rapidfuzz]",', True),
        ('version("evalkit")', True),
        ("pip install 'evalkit-checkpoints[rapidfuzz]'", False),
        ('pip install -e ".[rapidfuzz]"', False),
        ("pip install -c constraints.txt -e .          # or: make demo, then .venv/bin/evalkit", False),
    ],
)
def test_what_the_search_finds(text: str, foreign: bool) -> None:
    assert bool(FOREIGN.search(text)) == foreign


def test_the_distribution_has_a_name_of_its_own() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == "evalkit-checkpoints"
    assert project["scripts"] == {"evalkit": "evalkit.cli:main"}


def test_versions_are_this_projects(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the command line and in manifests, whatever distribution named evalkit is installed."""
    environment = os.environ | {"PYTHONPATH": f"{foreign}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "evalkit", "--version"]
    said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    assert said == f"evalkit, version {evalkit.__version__}\n"
    monkeypatch.syspath_prepend(str(foreign))
    checkpoint: Any = SimpleNamespace(revision=None, kind="hub", folder=foreign, gguf=None)
    assert provenance(ModelSpec("model"), checkpoint)["versions"]["evalkit"] == evalkit.__version__
