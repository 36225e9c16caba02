"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from evalkit import plugins
from evalkit.benchmarks.run import evaluate
from evalkit.data.wheels import demo_checkpoint
from evalkit.display import Progress
from evalkit.errors import EvalkitError
from evalkit.runs.folder import Run
from tests.documents import made_up, official
from tests.tiny import tiny_checkpoint

# On a tiny model threads only wait for each other: four times slower when other processes use the cores.
# Set before the first tensor is made, and for the commands that tests run.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# `make test` draws the same examples every time; `make test-all` draws new ones (--hypothesis-profile random), and an
# example that fails there is added to its test with @example. Neither depends on the speed of the machine.
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fixed", settings.get_profile("random"), derandomize=True)
settings.load_profile("fixed")

# The user's own packages that add rules, metrics and so on are left out; those that tests install are not
_GROUPS = ("evalkit.rules", "evalkit.outcomes", "evalkit.exports", "evalkit.benchmarks", "evalkit.answer_metrics")
_INSTALLED = {entry for group in _GROUPS for entry in entry_points(group=group)}


def _installed_by_tests(*, group: str) -> list[EntryPoint]:
    return [entry for entry in entry_points(group=group) if entry not in _INSTALLED]


plugins.entry_points = _installed_by_tests  # type: ignore[attr-defined, assignment]


@pytest.fixture(autouse=True)
def _no_activity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable status lines of slow steps, whose timing depends on the machine's load."""
    monkeypatch.setattr("evalkit.cli.root.shown_activity", nullcontext)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The complete data of which tests/fixtures has parts: a folder beside the checkout, outside the project."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the shared folder with the complete data is not beside this checkout")
    return folder


@pytest.fixture(scope="session")
def demo() -> Path:
    """The demo checkpoint's file, in the user's own cache: SmolLM2-135M-Instruct. For slow tests."""
    try:
        return demo_checkpoint()
    except EvalkitError as error:
        pytest.skip(f"the demo checkpoint cannot be had: {error}")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with a long window. Do not modify; copy it to damage it."""
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", window=4096)


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `--data-dir` with a few synthetic documents of each task. Do not modify."""
    return made_up(tmp_path_factory.mktemp("documents"))


@pytest.fixture(scope="session")
def real_documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `--data-dir` with official documents of all tasks except OpenBookQA. Do not modify."""
    return official(tmp_path_factory.mktemp("real"))


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, documents: Path) -> Run:
    """A finished run of all eight tasks under the paper's template. Do not modify; copy its folder."""
    return evaluate(
        str(checkpoint),
        data_dir=documents,
        allow_unofficial_data=True,
        output=tmp_path_factory.mktemp("runs"),
        progress=Progress(live=False),
    )


@pytest.fixture
def own_run(finished: Run, tmp_path: Path) -> Path:
    """A copy of the finished run's folder that may be damaged."""
    return Path(shutil.copytree(finished.folder, tmp_path / "runs" / finished.folder.name))
