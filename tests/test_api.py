"""What `import evalkit` promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import evalkit
from evalkit.scores.table import CLUSTER, ScoreRow

HEAVY = ("torch", "transformers", "pandas", "lm_eval", "datasets")


def heavy_after(statement: str) -> set[str]:
    """Which heavy libraries a fresh Python has loaded after a statement."""
    script = f"{statement}\nimport sys\nprint(*(set({HEAVY}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split("\n")[-2].split())


def test_everything_public_can_be_had_and_is_all() -> None:
    assert sorted(evalkit.__all__) == evalkit.__all__
    for name in evalkit.__all__:
        assert getattr(evalkit, name).__name__ == name
    assert set(evalkit.__all__) == set(evalkit._MODULES)


def test_every_error_is_public() -> None:
    from evalkit import errors

    raised = {name for name, thing in vars(errors).items() if isinstance(thing, type) and issubclass(thing, Exception)}
    assert raised <= set(evalkit.__all__)
    assert all(issubclass(getattr(errors, name), evalkit.EvalkitError) for name in raised)


def test_an_unknown_attribute_is_named() -> None:
    with pytest.raises(AttributeError, match="'evalkit' has no attribute 'evaluat'"):
        _ = evalkit.evaluat


def test_importing_loads_nothing_heavy() -> None:
    assert heavy_after("import evalkit") == set()
    assert heavy_after("import evalkit.cli") == set()


def test_results_are_read_without_a_model(finished: evalkit.Run) -> None:
    read = f"import evalkit\nrun = evalkit.load_run({str(finished.folder)!r})\nrun.results('acc_norm'), run.scores"
    assert heavy_after(read) == {"pandas"}


def test_a_finished_run_is_evaluated_without_a_model(finished: evalkit.Run, checkpoint: Path, documents: Path) -> None:
    again = (
        f"import evalkit\nevalkit.evaluate({str(checkpoint)!r}, data_dir={str(documents)!r}, "
        f"allow_unofficial_data=True, output={str(finished.folder.parent)!r})"
    )
    assert heavy_after(again) == set()


def test_scores_are_a_data_frame(finished: evalkit.Run) -> None:
    scores = finished.scores
    assert isinstance(scores, pd.DataFrame)
    assert list(scores.columns) == [*ScoreRow._fields, CLUSTER]
    for column, dtype in scores.dtypes.items():
        if str(column).startswith("ll_"):
            assert dtype == "float64"
        elif column in ("task", "subtask"):
            assert pd.api.types.is_string_dtype(dtype)
        else:
            assert dtype == "int64"
    assert list(dict.fromkeys(scores["task"])) == list(finished.manifest["documents"])


def test_results_know_their_rule(finished: evalkit.Run) -> None:
    assert finished.results().rule == "ppl"
    assert finished.results().average.name == "Average"
    assert finished.results("acc_norm").rule == "acc_norm"
    assert [run.folder for run in evalkit.list_runs(finished.folder.parent)] == [finished.folder]
