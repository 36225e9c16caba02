"""A study whose runs are computed once a session, by the command."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from evalkit.studies.running import run_here, run_study
from evalkit.studies.study_file import read_study
from tests.studies.made import CHECKPOINTS, NEEDLE, ZS, Told, made_files, write_study


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that the first process of the test session that needs it makes."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        folder = factory.mktemp(name)
        make(folder)
        return folder
    folder = factory.getbasetemp().parent / name
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / ".made").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            (folder / ".made").touch()
    return folder


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints and documents. Do not modify."""
    return once(tmp_path_factory, "study-files", made_files)


@pytest.fixture
def folder(files: Path, tmp_path: Path) -> Path:
    """A copy of the files that may be changed."""
    return Path(shutil.copytree(files, tmp_path / "files"))


@pytest.fixture(scope="session")
def computed_study(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study with all runs on `zs`, and those of vanilla and intg on `needle`. Do not modify; use `study`."""

    def compute(folder: Path) -> None:
        shutil.copytree(files, folder, dirs_exist_ok=True)
        path = folder / "study.yaml"
        some = {name: CHECKPOINTS[name] for name in ("vanilla", "intg")}
        for checkpoints, benchmarks in ((CHECKPOINTS, {"zs": ZS}), (some, {"zs": ZS, "needle": NEEDLE})):
            study = read_study(write_study(path, checkpoints, benchmarks))
            outcomes = run_study(study, Told(), run_here, wait=False)
            assert {outcome.state for outcome in outcomes} == {"finished"}
        write_study(path, CHECKPOINTS, {"zs": ZS, "needle": NEEDLE})

    return once(tmp_path_factory, "study", compute) / "study.yaml"


@pytest.fixture
def study(computed_study: Path, tmp_path: Path) -> Path:
    """A copy of the computed study that may be changed."""
    return Path(shutil.copytree(computed_study.parent, tmp_path / "study")) / computed_study.name
