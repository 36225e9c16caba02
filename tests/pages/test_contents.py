"""Contents of a page of runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from evalkit.errors import UsageError
from evalkit.pages.report import contents_of_runs
from evalkit.runs.folder import load_run
from tests.comparison.made import finished_run, make_longbench


def test_runs_of_one_model_are_named_by_their_suites(tmp_path: Path) -> None:
    choices = finished_run(tmp_path, "org/one")
    answers = load_run(make_longbench(tmp_path / "others", {"qasper": [0.5, 1.0]}, model="org/one"))
    found = contents_of_runs([choices, answers])
    assert list(found.names) == [f"one on {choices.suite}", "one on longbench"]
    assert found.comparisons == ()


def test_a_run_with_the_name_of_a_groups_member(tmp_path: Path) -> None:
    one, two, three = (finished_run(tmp_path, f"org/{name}") for name in ("a", "b", "c"))
    with pytest.raises(UsageError, match="two runs are called 'g 1'"):
        contents_of_runs([one], [("g", [two, three])], given_names=["g 1"])
