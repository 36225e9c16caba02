"""Steps of checkpoints, and the bands of curves compared with statsmodels."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import statsmodels.api as sm
from statsmodels.stats.proportion import proportion_confint

from evalkit.comparison.curves import curve
from evalkit.comparison.sides import Side, names, step_in, step_of
from evalkit.runs.folder import load_run
from tests.comparison.conftest import PASSAGES, Make, answers


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step1000", 1000),
        ("stage1-step10000-tokens42B", 10_000),
        ("model-step5k", 5000),
        ("ckpt_2M", 2_000_000),
        ("pythia-160m", None),
        ("step12abc", None),
    ],
)
def test_steps_in_names(name: str, step: int | None) -> None:
    assert step_in(name) == step


def test_sources_of_a_runs_step(make: Make, tmp_path: Path) -> None:
    assert step_of(load_run(make("org/a/step10"))) == 10
    assert step_of(load_run(make("org/b/step10", manifest={"revision": "step20"}))) == 20
    checkpoint = tmp_path / "trained"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": 30}), encoding="utf-8")
    assert step_of(load_run(make(str(checkpoint)))) == 30
    assert step_of(load_run(make("org/c"))) is None


def test_bands_are_clustered_and_points_are_on_shared_documents(make: Make) -> None:
    runs = [make("org/t/step1", 0.4), make("org/t/step2", 0.6, seed=5, first=30, limit=30)]
    found = curve(Side("t", tuple(load_run(run) for run in reversed(runs))))
    assert found.documents == {"arc_easy": 30, "boolq": 30, "mmlu": 30}
    for place, (share, seed) in enumerate(((0.4, 1), (0.6, 5))):
        point = found.tasks["boolq"][place]
        right = np.array(answers(seed + 1, share, 40)[:30], float)
        theirs = sm.OLS(right, np.ones(30)).fit(cov_type="cluster", cov_kwds={"groups": PASSAGES[:30]}, use_t=True)
        assert point.step == place + 1
        assert point.accuracy == pytest.approx(right.mean())
        assert point.stderr == pytest.approx(theirs.bse[0], rel=1e-10)
        # Two right and two wrong pseudo-passages, around one half, with the deviation of the differing passages
        assert (point.low, point.high) == pytest.approx(tuple(theirs.conf_int()[0]), abs=0.05)
        assert abs(point.low + point.high - 1) < abs(2 * point.accuracy - 1)
    averages = [np.mean([found.tasks[task][place].accuracy for task in found.tasks]) for place in (0, 1)]
    assert [point.accuracy for point in found.average] == pytest.approx(averages)
    assert found.chance == {"arc_easy": 0.25, "boolq": 0.25, "mmlu": 0.25, "Average": 0.25}


def test_bands_of_checkpoints_that_get_all_or_nothing_right(make: Make) -> None:
    """Agresti and Coull's interval but for the t and its n - 1; 60 documents."""
    found = curve(Side("t", tuple(load_run(make(f"org/t/step{step}", share)) for step, share in ((1, 0.0), (2, 1.0)))))
    none, every = found.tasks["arc_easy"]
    theirs = proportion_confint(60, 60, method="agresti_coull")
    assert (every.accuracy, every.stderr, every.high) == (1, 0, 1)
    assert every.low == pytest.approx(theirs[0], abs=0.01)
    assert (none.low, none.high) == pytest.approx((0, 1 - every.low))
    assert 0.9 < found.average[1].low < 1


def test_names_tell_runs_apart(make: Make) -> None:
    runs = [
        make("org/a"),
        make("org/b"),
        make("org/b", dtype="bfloat16"),
        make("org/t/step1"),
        make("trained/t-seed2/model"),
        make("x/c"),
        make("y/c"),
    ]
    first, second = (run.name.rpartition("-")[2] for run in runs[5:])
    found = names([load_run(run) for run in runs])
    assert found == ["a", "b float32", "b bfloat16", "t/step1", "t-seed2/model", f"c {first}", f"c {second}"]
