"""Contents of a page of a study's runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from evalkit.errors import UsageError
from evalkit.pages.report import contents_of_study
from evalkit.studies.results import StudyResults, read_results


@pytest.fixture
def results(computed_study: Path) -> StudyResults:
    return read_results(computed_study)


def test_only_chosen_models_have_curves(results: StudyResults) -> None:
    found = contents_of_study(results, ["vanilla"], "zs")
    assert (found.names, found.comparisons) == (("vanilla",), ())
    [comparison] = contents_of_study(results, ["vanilla", "diff"], "zs").comparisons
    assert [one.name for one in comparison.sides] == ["vanilla", "diff"]
    assert [(one.side.name, one.steps) for one in comparison.trainings] == [
        ("diff seed 1", (5, 10, 20)),
        ("diff seed 2", (5, 10)),
    ]


def test_a_model_that_is_named_twice(results: StudyResults) -> None:
    with pytest.raises(UsageError, match=r"is named twice \(in diff and in diff@10\)"):
        contents_of_study(results, ["diff", "diff@10"], "zs")
