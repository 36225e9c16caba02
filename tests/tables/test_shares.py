"""The table of ranks: shares of documents on which a model exceeds its baseline, counted by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evalkit.errors import UsageError
from evalkit.reporting.table import Table, plain
from evalkit.runs.folder import Run
from evalkit.tables.fill import Number
from evalkit.tables.layout import load_layout
from evalkit.tables.measured import measure
from evalkit.tables.request import TableRequest, make
from evalkit.tables.rows import RunMapping
from tests.attention.made_ranks import made_ranks
from tests.printed import printed
from tests.tables.runs import lines

TABLE = "anly_rank_main"
BASE = np.array([[2.0, 3.0, 90.0]] * 5)
"""[documents, heads]: ranks whose median over heads is 3."""


def heads(*medians: float) -> Any:
    """[documents, 3]: ranks whose median over heads is given, and whose mean is far from it."""
    return np.array([[0.5, median, median + (50 if n % 2 else 0.25)] for n, median in enumerate(medians)])


def ranks(last: Any, before: Any, third: Any, *, layers: int = 20) -> dict[int, Any]:
    """The last four layers; the fourth from the end is not shown."""
    return {layers - 1: last, layers - 2: before, layers - 3: third, layers - 4: BASE * 7}


@pytest.fixture
def small(tmp_path: Path) -> dict[str, Run]:
    """Vanilla and two models of 125M."""
    drawn = {
        "vanilla": (BASE, BASE, BASE),
        # Above 3 on 2, 4 and 5 of 5 documents; a tie is not above
        "diff": (heads(4, 4, 3, 2, 1), heads(4, 4, 4, 4, 3), heads(4, 4, 4, 4, 4)),
        "intg": (heads(1, 1, 1, 1, 1), heads(1, 1, 1, 1, 9), BASE),
    }
    return {name: made_ranks(tmp_path / "runs", f"llama-125m-{name}", ranks(*of)) for name, of in drawn.items()}


def of_runs(*runs: Run, **options: Any) -> Table:
    return make(TableRequest(TABLE, "runs", runs=tuple(str(run.folder) for run in runs), **options))


def numbers(base: list[Run], row: str, runs: list[Run]) -> dict[str, Number]:
    """The numbers of a row of 125M, of its runs and those of its baseline."""
    mapping = RunMapping(None, {"baseline/125m": base, f"{row}/125m": runs})
    return measure(load_layout(TABLE), mapping).numbers[row]


def error(by_task: list[list[float]]) -> float:
    """The error of a mean of shares: squares about the tasks' means, and about the whole mean of two documents that
    are added, one won and one lost; each task's squares are scaled by n / (n - 1)."""
    shares, n = [np.array(task, float) for task in by_task], sum(map(len, by_task))
    mean = (np.concatenate(shares).sum() + 1) / (n + 2)
    squares = sum(float(((task - task.mean()) ** 2).sum()) * len(task) / (len(task) - 1) for task in shares)
    value = np.concatenate(shares).mean()
    return math.sqrt(squares + (1 - mean) ** 2 + mean**2 + n * (value - mean) ** 2) / (n + 2)


def test_shares_and_their_errors_by_hand(small: dict[str, Run]) -> None:
    table = of_runs(*small.values(), spreads=True)
    shown = lines(table)
    assert shown["diff"] == ["40%", "80%", "100%", "-", "-", "-"]
    assert shown["intg"] == ["0%", "20%", "0%", "-", "-", "-"]
    assert shown["cog"] == ["-"] * 6
    notes = "\n".join(map(plain, table.notes))
    assert "±: standard error over documents, one won and one lost added." in notes
    assert "200 random documents of each task (seed 0), gold continuations" in notes
    row = next(line for line in printed(table, "latex").splitlines() if "Diff" in line)
    assert row.replace(r"\phantom{0}", "").replace(r"\scriptsize", "") == (
        r"\textsc{Diff} & 40\%\,{$\pm$17.6} & 80\%\,{$\pm$18.2} & 100\%\,{$\pm$13.2} & - & - & - \\"
    )
    shares = numbers([small["vanilla"]], "diff", [small["diff"]])
    for name, won in (("125m_last1", [[1, 1, 0], [0, 0]]), ("125m_last3", [[1, 1, 1], [1, 1]])):
        assert float(shares[name].spread or 0) == pytest.approx(100 * error(won))
    assert error([[1, 1, 1, 1, 1]]) == pytest.approx(math.sqrt(6 / 7**3))  # √(p (1 - p) / 7) of p = 6/7
    assert [line.key for line in of_runs(small["vanilla"], small["diff"], drop_empty=True).lines] == ["diff"]


def test_layers_count_from_the_models_last(tmp_path: Path) -> None:
    """Each size has its own baseline, and -1 is the model's last layer, not the last that was measured."""
    base = made_ranks(tmp_path, "llama-1.2b-vanilla", ranks(BASE, BASE, BASE, layers=22))
    diff = made_ranks(tmp_path, "llama-1.2b-diff", ranks(heads(4, 3, 3, 3, 3), BASE, heads(*[4] * 5), layers=22))
    assert lines(of_runs(base, diff))["diff"] == ["-", "-", "-", "20%", "0%", "100%"]
    few = dict.fromkeys((15, 16, 17), BASE)
    low = [made_ranks(tmp_path, f"llama-125m-{name}", few, layers=[15, 16, 17]) for name in ("vanilla", "cog")]
    with pytest.raises(UsageError, match=r"'125m_last1' of row 'cog/125m': .* layers 15 to 17"):
        of_runs(*low)


@pytest.mark.slow
def test_seeds_are_compared_with_every_baseline(tmp_path: Path, small: dict[str, Run]) -> None:
    """Shares of one seed: 40 % and 0 % of documents above two baselines; of the other: 100 % and 20 %."""

    def seed(name: str, model: str, last: Any) -> Run:
        return made_ranks(tmp_path / "seeds", model, ranks(last, BASE, BASE), name=name)

    bases = [small["vanilla"], seed("v2", "llama-125m-vanilla", heads(5, 5, 5, 5, 5))]
    seeds = [small["diff"], seed("d2", "llama-125m-diff", heads(4, 4, 4, 4, 9))]
    number = numbers(bases, "diff", seeds)["125m_last1"]
    assert number.value == 40  # (40 + 0 + 100 + 20) / 4
    assert float(number.spread or 0) == pytest.approx(40 / 2**0.5)  # of 20 and 60
    # One run against two baselines: the error over documents of the mean of both
    number = numbers(bases, "diff", seeds[1:])["125m_last1"]
    each = [[0.5, 0.5, 0.5], [0.5, 1.0]]
    assert (number.value, float(number.spread or 0)) == (60, pytest.approx(100 * error(each)))
    notes = list(map(plain, of_runs(*bases, *seeds, spreads=True).notes))
    assert "Means over several runs: 'baseline/125m' (2 runs), 'diff/125m' (2 runs)." in notes


def test_runs_of_other_documents_are_rejected(tmp_path: Path, small: dict[str, Run], finished: Run) -> None:
    def diff(name: str, **changes: Any) -> Run:
        return made_ranks(tmp_path / "more", "llama-125m-diff", ranks(BASE, BASE, BASE), name=name, **changes)

    seed = diff("b", seed=1)
    for run, words in (
        (seed, r"200 random documents of each task \(seed 1\), row 'baseline/125m'"),
        (diff("f", first=1), "row 'diff/125m': .* same documents of piqa, boolq"),
        (finished, "suite zeroshot8.* suite attention"),
    ):
        with pytest.raises(UsageError, match=words):
            of_runs(small["vanilla"], run)
    assert of_runs(small["vanilla"], seed, mixed=True).sections[0].lines[1].label[-1].text == "a"
    with pytest.raises(UsageError, match=r"'diff/125m'.* llama-125m-vanilla; .*'baseline/125m'"):
        of_runs(small["diff"])
