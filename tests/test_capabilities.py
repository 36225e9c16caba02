"""The core without its capabilities: their folders and the lines that name them are removed from a copy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lint import CAPABILITIES, REGISTERED

ROOT = Path(__file__).parents[1]
LAYOUTS = ("app_long_contx.yaml",)
"""Tables of suites of capabilities."""


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("core")
    shutil.copytree(ROOT / "evalkit", folder / "evalkit", ignore=shutil.ignore_patterns("__pycache__", *CAPABILITIES))
    shutil.copytree(ROOT / "configs", folder / "configs", ignore=shutil.ignore_patterns(*LAYOUTS))
    for name in ("tasks", "results"):
        (folder / name).symlink_to(ROOT / name)
    removed = 0
    for module in (folder / "evalkit").rglob("*.py"):
        lines = module.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if not REGISTERED.match(line)]
        removed += len(lines) - len(kept)
        module.write_text("\n".join([*kept, ""]), encoding="utf-8")
    assert removed
    return folder


@pytest.mark.slow
def test_the_core_evaluates_without_capabilities(core: Path, checkpoint: Path, documents: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(core), "EVALKIT_CACHE": str(tmp_path / "cache")}

    def run(*command: str | Path) -> str:
        done = subprocess.run([sys.executable, "-m", "evalkit", *map(str, command)], cwd=tmp_path, env=environment,
                              capture_output=True, text=True, check=False)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    commands = {line.split()[0] for line in run("--help").partition("Commands:")[2].splitlines() if line.strip()}
    assert {"run", "compare", "cost", "study"} <= commands
    assert not {"attention", "figure", "longbench", "ruler", "needle", "perplexity"} & commands
    assert "PIQA" in run("run", checkpoint, "--tasks", "piqa", "--data-dir", documents, "--allow-unofficial-data")
    [folder] = (tmp_path / "results" / "runs").iterdir()
    listed = run("ls")
    assert folder.name[-12:-5] in listed
    assert "longbench" not in listed
