"""Training curves: steps and names of checkpoints, and bands against statsmodels."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import statsmodels.api as sm
from statsmodels.stats.proportion import proportion_confint

from evalkit.comparison.curves import curve, curve_report
from evalkit.comparison.sides import Side, names, step_in, step_of
from evalkit.runs.folder import load_run
from tests.comparison.made import PASSAGES, answers, three_tasks

STEPS = {"step1000": 1000, "stage1-step10000-tokens42B": 10_000, "model-step5k": 5000, "ckpt_2M": 2_000_000,
         "pythia-160m": None, "step12abc": None}  # fmt: skip


def test_steps_and_names(tmp_path: Path) -> None:
    assert {name: step_in(name) for name in STEPS} == STEPS
    make = partial(three_tasks, tmp_path / "runs")
    checkpoint = tmp_path / "trained"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": 30}), encoding="utf-8")
    by_revision = make("org/b/step10", manifest={"revision": "step20"})
    folders = [make("org/a/step10"), by_revision, make(str(checkpoint)), make("org/c")]
    assert [step_of(load_run(folder)) for folder in folders] == [10, 20, 30, None]
    runs = [make("org/a"), make("org/b"), make("org/b", dtype="bfloat16"), make("org/t/step1"),
            make("trained/t-seed2/model"), make("x/c"), make("y/c")]  # fmt: skip
    assert names([load_run(run) for run in runs]) == [
        "a", "b float32", "b bfloat16", "t/step1", "t-seed2/model", "x/c", "y/c",
    ]  # fmt: skip


def test_bands_are_clustered_and_points_are_on_shared_documents(tmp_path: Path) -> None:
    runs = [three_tasks(tmp_path, "t/step1", 0.4), three_tasks(tmp_path, "t/step2", 0.6, 5, first=30, limit=30)]
    made = curve(Side("t", tuple(load_run(run) for run in reversed(runs))))
    assert made.documents == {"arc_easy": 30, "boolq": 30, "mmlu": 30}
    for number, (share, seed) in enumerate(((0.4, 1), (0.6, 5))):
        point = made.tasks["boolq"][number]
        right = np.array(answers(seed + 1, share, 40)[:30], float)
        theirs = sm.OLS(right, np.ones(30)).fit(cov_type="cluster", cov_kwds={"groups": PASSAGES[:30]}, use_t=True)
        assert (point.step, point.value) == (number + 1, pytest.approx(right.mean()))
        assert point.stderr == pytest.approx(theirs.bse[0], rel=1e-10)
        # Two right and two wrong pseudo-passages, around one half, with the deviation of the differing passages
        assert (point.low, point.high) == pytest.approx(tuple(theirs.conf_int()[0]), abs=0.05)
        assert abs(point.low + point.high - 1) < abs(2 * point.value - 1)
    averages = [np.mean([made.tasks[task][number].value for task in made.tasks]) for number in (0, 1)]
    assert [point.value for point in made.average] == pytest.approx(averages)
    assert made.chance == dict.fromkeys([*made.tasks, "Average"], 0.25)
    [documents] = [note for note in curve_report([made]).notes if "n: " in note]
    assert "all documents and the first 30 documents of each task" in documents and "BoolQ 30" in documents


def test_bands_of_checkpoints_that_get_all_or_nothing_right(tmp_path: Path) -> None:
    """Agresti and Coull's interval but for the t and its n - 1; 60 documents."""
    runs = [three_tasks(tmp_path, f"t/step{step}", share) for step, share in ((1, 0.0), (2, 1.0))]
    made = curve(Side("t", tuple(map(load_run, runs))))
    none, every = made.tasks["arc_easy"]
    low, _ = proportion_confint(60, 60, method="agresti_coull")
    assert (every.value, every.stderr, every.high) == (1, 0, 1)
    assert every.low == pytest.approx(low, abs=0.01)
    assert (none.low, none.high) == pytest.approx((0, 1 - every.low))
    assert 0.9 < made.average[1].low < 1
