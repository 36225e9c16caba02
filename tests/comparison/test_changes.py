"""Changes of two runs, each from another run: does B lose less than A under quantisation?"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from evalkit.benchmarks.outcomes import Measure
from evalkit.cli.root import cli
from evalkit.comparison.line import ScoredLine, average_difference
from evalkit.comparison.pairing import PairedTask
from evalkit.errors import UsageError
from tests.comparison.made import compared, make_run, scores_of
from tests.stats.test_verdicts import TIMES, most

N = 120
CHANGE = Measure("change", True, bounds=(-1.0, 1.0), unit="points")


def runs(root: Path) -> tuple[dict[str, np.ndarray], dict[str, Path]]:  # type: ignore[type-arg]
    """Right answers of A and B, and of both after a loss, with their runs."""
    dice = np.random.default_rng(0)
    right = {name: (dice.random(N) < 0.7).astype(int) for name in "ab"}
    right |= {f"{name}4": np.where(dice.random(N) < lost, 0, right[name]) for name, lost in (("a", 0.5), ("b", 0.05))}
    tables = {name: {"piqa": scores_of("piqa", answers.tolist())} for name, answers in right.items()}
    return right, {name: make_run(root, table, model=name) for name, table in tables.items()}


def test_changes_are_compared_as_scores(tmp_path: Path) -> None:
    right, folders = runs(tmp_path)
    of = compared(folders["a4"], folders["b4"], changes_from=[folders["a"], folders["b"]])
    changes = [right[f"{name}4"] - right[name] for name in "ab"]
    difference = changes[1] - changes[0]
    assert (of.average.score_a, of.average.score_b) == (changes[0].mean(), changes[1].mean())
    assert of.average.difference == pytest.approx(difference.mean())
    assert of.tasks[0].stderr == pytest.approx(difference.std(ddof=1) / N**0.5)
    assert of.average.verdict == "better" and "changes" in of.claim.sentence
    assert (of.tasks[0].won, of.tasks[0].lost) == ((difference > 0).sum(), (difference < 0).sum())


def test_changes_need_a_run_for_each_side(tmp_path: Path) -> None:
    _, folders = runs(tmp_path)
    with pytest.raises(UsageError, match="two single runs"):
        compared(folders["a4"], folders["b4"], changes_from=[folders["a"]])
    with pytest.raises(UsageError, match="two single runs"):
        compared([folders["a4"], folders["a"]], [folders["b4"]], changes_from=[folders["a"], folders["b"]])


def test_the_command(tmp_path: Path) -> None:
    _, folders = runs(tmp_path)
    a, b, a4, b4 = (str(folders[name]) for name in ("a", "b", "a4", "b4"))
    result = CliRunner().invoke(cli, ["compare", a4, b4, "--from", a, "--from", b])
    assert result.exit_code == 0 and "change of accuracy" in result.stdout


@pytest.mark.simulation
@pytest.mark.parametrize("n", [50, 200])
@pytest.mark.parametrize("changed", [0.03, 0.2])
def test_changes_hold_their_level(n: int, changed: float) -> None:
    """Both models lose a right answer, or gain one, in the same share of documents; three tasks."""
    dice, errors = np.random.default_rng(n), 0
    for _ in range(TIMES):
        lines = []
        for _ in range(3):
            a, b = (dice.choice([-1.0, 0.0, 1.0], (1, n), p=[2 * changed / 3, 1 - changed, changed / 3]) for _ in "ab")
            lines.append(ScoredLine(PairedTask("t", None, None, (np.arange(n),) * 2, 0, True), a, b, CHANGE))
        average = average_difference("Average", lines)
        errors += not average.low <= 0 <= average.high
    assert errors / TIMES <= most(0.05, TIMES)
