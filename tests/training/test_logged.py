"""Logged metrics: under the rule that was asked for, whatever rule the run was started under."""

from __future__ import annotations

import pytest

from evalkit.errors import UnknownNameError
from evalkit.runs.folder import Run
from evalkit.studies.training import logged_metrics


def test_metrics_are_those_of_the_rule(finished: Run) -> None:
    own = str(finished.manifest["rule"])
    found = {rule: logged_metrics(finished, rule) for rule in (own, "acc_norm")}
    assert own != "acc_norm"
    for rule, metrics in found.items():
        results = finished.results(rule)
        for task in results.tasks:
            assert metrics[f"evalkit/{finished.suite}/{task.task}"] == pytest.approx(task.accuracy)
        assert metrics[f"evalkit/{finished.suite}/Average"] == pytest.approx(results.average.accuracy)
        assert metrics[f"evalkit/{finished.suite}/Average_stderr"] == pytest.approx(results.average.stderr)
    assert found[own] != found["acc_norm"]
    with pytest.raises(UnknownNameError, match="'nix'"):
        logged_metrics(finished, "nix")
