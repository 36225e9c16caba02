"""Comparisons that borrow strength from earlier runs on more documents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import statsmodels.api as sm
from click.testing import CliRunner

import evalkit
from evalkit.cli.root import cli
from evalkit.comparison.borrowing import Borrowed
from evalkit.comparison.line import ScoredLine, average_difference, by_task
from evalkit.comparison.pairing import PairedTask, pair
from evalkit.comparison.sides import Side
from evalkit.errors import UsageError
from evalkit.runs.folder import load_run
from evalkit.stats.estimates import Floats, mean
from tests.comparison.made import compared, make_run, scores_of
from tests.stats.test_looks import SAMPLES, TASKS
from tests.stats.test_simulation import RIGHT
from tests.stats.test_verdicts import LIKELIHOODS, TIMES, most

ALL, SOME = 400, 80


def answers(seed: int, like: Sequence[int], share: float) -> list[int]:
    """Answers of a related checkpoint: a share of documents is answered anew."""
    dice = np.random.default_rng(seed)
    return np.where(dice.random(len(like)) < share, dice.integers(0, 2, len(like)), like).tolist()


def runs(root: Path) -> tuple[Path, Path, Path]:
    """A and an earlier run on all documents, and B on the first ones."""
    earlier = np.random.default_rng(0).integers(0, 2, ALL).tolist()
    a, b = answers(1, earlier, 0.3), answers(2, earlier, 0.3)
    names = (("a", a, ALL), ("earlier", earlier, ALL), ("b", b, SOME))
    first, second, third = (
        make_run(root, {"piqa": scores_of("piqa", right[:n])}, model=name) for name, right, n in names
    )
    return first, second, third


def test_the_difference_is_the_regressions_prediction_at_the_mean_of_all(tmp_path: Path) -> None:
    a, earlier, b = runs(tmp_path)
    of = compared(a, b, given=[a, earlier])
    scores = [load_run(run) for run in (a, earlier, b)]
    right = [run.scores.groupby("doc_id")["ll_continuation"].first().to_numpy() == -2.0 for run in scores]
    known = np.stack(right[:2]).astype(float)
    fitted = sm.OLS(right[2].astype(float) - known[0, :SOME], sm.add_constant(known[:, :SOME].T)).fit()
    expected = fitted.predict(np.array([[1.0, *known.mean(axis=1)]]))[0]
    assert of.average.difference == pytest.approx(expected, abs=1e-12)
    alone_each = fitted.get_influence().resid_press  # HC3's: of a fit without the document
    residual = alone_each.var(ddof=1) / SOME * (SOME - 1) / (SOME - 3)
    explained = mean(fitted.params[1:] @ known).variance
    assert of.average.stderr == pytest.approx((residual + explained) ** 0.5, rel=1e-9)
    assert of.tasks[0].test.startswith("t of") and of.worth > 1.2
    alone = compared(a, b)
    assert of.average.stderr < alone.average.stderr  # type: ignore[operator]
    assert (of.tasks[0].won, of.tasks[0].lost) == (alone.tasks[0].won, alone.tasks[0].lost)


def test_earlier_runs_on_the_same_documents_change_nothing(tmp_path: Path) -> None:
    a, earlier, _ = runs(tmp_path)
    of, alone = compared(a, earlier, given=[a, earlier]), compared(a, earlier)
    assert of.average.difference == pytest.approx(alone.average.difference, abs=1e-12)
    assert of.average.stderr == pytest.approx(alone.average.stderr, rel=0.01)


def test_a_run_that_cannot_be_borrowed_from(tmp_path: Path) -> None:
    a, earlier, b = runs(tmp_path)
    with pytest.raises(UsageError, match="lacks documents"):
        compared(a, earlier, given=[b])
    with pytest.raises(UsageError, match="single runs"):
        compared([a, earlier], [b], given=[a])
    other = make_run(tmp_path, {"boolq": scores_of("boolq", [1, 0] * 20)}, model="other")
    with pytest.raises(evalkit.EvalkitError, match="no task in common"):
        compared(a, b, given=[other])


def test_the_command(tmp_path: Path) -> None:
    a, earlier, b = map(str, runs(tmp_path))
    result = CliRunner().invoke(cli, ["compare", a, b, "--given", a, "--given", earlier])
    assert result.exit_code == 0 and "borrow strength" in result.stdout and "regression" in result.stdout


def real(outcome: str) -> list[tuple[Floats, Floats]]:
    """Of real tasks the scores of one run, and the differences of another one."""
    inst, plain = (load_run(next(SAMPLES.glob(f"demo-zeroshot8-{name}-*"))) for name in ("inst", "plain"))
    lines = by_task(pair(Side("inst", (inst,)), Side("plain", (plain,)), {}), outcome)
    return [(line.a[0], line.differences) for line in lines if line.paired.task in TASKS]


def missed(outcome: str, n: int, times: int) -> float:
    """How often the interval of the average misses the mean of the documents that samples are drawn from."""
    tasks, dice, errors = real(outcome), np.random.default_rng(n), 0
    truth = float(np.mean([differences.mean() for _, differences in tasks]))
    measure = RIGHT if outcome == "acc" else LIKELIHOODS
    for _ in range(times):
        lines = []
        for scores, differences in tasks:
            drawn = dice.integers(0, len(scores), len(scores))
            known, some = scores[drawn][None], differences[drawn][:n]
            paired = PairedTask("t", None, None, (np.arange(n),) * 2, 0, True)
            given = Borrowed(known[:, :n], known, None, None)
            lines.append(ScoredLine(paired, np.zeros((1, n)), some[None], measure, given=given))
        average = average_difference("Average", lines)
        errors += not average.low <= truth <= average.high
    return errors / times


def test_a_few_replications() -> None:
    """A sample of the simulation below runs by default."""
    assert missed("acc", 100, 100) <= most(0.05, 100)


@pytest.mark.simulation
@pytest.mark.parametrize(("accuracy", "n"), [(0.9, 50), (0.97, 50), (0.99, 100), (0.99, 200)])
def test_borrowing_near_the_ceiling(accuracy: float, n: int) -> None:
    """Of one task: where B is all right on the sample, its difference from A is explained without a residual."""
    dice, errors = np.random.default_rng(n), 0
    for _ in range(TIMES):
        a, b = dice.random((2, 2000)) < accuracy
        paired = PairedTask("t", None, None, (np.arange(n),) * 2, 0, True)
        given = Borrowed(a[None, :n].astype(float), a[None].astype(float), None, None)
        line = ScoredLine(paired, a[None, :n].astype(float), b[None, :n].astype(float), RIGHT, given=given)
        average = average_difference("Average", [line])
        errors += not average.low <= 0 <= average.high
    assert errors / TIMES <= most(0.05, TIMES)


@pytest.mark.simulation
@pytest.mark.parametrize("n", [50, 100, 200, 500])
@pytest.mark.parametrize("outcome", ["acc", "bits_per_byte"])
def test_borrowing_holds_its_level(outcome: str, n: int) -> None:
    assert missed(outcome, n, TIMES) <= most(0.05, TIMES)
