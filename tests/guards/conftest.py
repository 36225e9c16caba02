"""What the guards share: a tiny checkpoint and a finished run."""

from __future__ import annotations

import os

import pytest

from tests.guards import bench as made


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> made.Shared:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVALKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        return made.shared(tmp_path_factory.mktemp("guarded"))


@pytest.fixture
def bench(
    guarded: made.Shared,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> made.Bench:
    """A working folder and a cache of one's own, without settings from the environment."""
    for name in [name for name in os.environ if name.startswith("EVALKIT_")]:
        monkeypatch.delenv(name)
    place = tmp_path_factory.mktemp("place")  # `tmp_path` has the test's name, in which a noun may occur
    monkeypatch.setenv("EVALKIT_CACHE", str(place / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(place)
    return made.Bench(guarded, place, capsys, monkeypatch)
