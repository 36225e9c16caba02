"""A wheel of this checkout, alone in an empty environment: the package needs nothing of the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_a_wheel_runs_without_the_repository(tmp_path: Path, demo: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, ROOT)
    [wheel] = tmp_path.glob("evalkit_checkpoints-*.whl")
    venv.create(tmp_path / "empty", with_pip=True)
    binaries = tmp_path / "empty" / "bin"
    run(binaries / "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel)
    evalkit = binaries / "evalkit"
    assert "48.9" in run(evalkit, "table", "main_res")  # Integral attention at 1.2B parameters, average
    assert "OpenBookQA" in run(evalkit, "run", "--model", "demo", "--tasks", "openbookqa", "--sample", "5")
    [folder] = (tmp_path / "results" / "runs").iterdir()
    run(evalkit, "report", folder)
    assert "demo" in (tmp_path / "report.html").read_text(encoding="utf-8")
