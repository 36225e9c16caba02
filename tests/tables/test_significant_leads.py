"""Marked leads of a table: compare's own tests, corrected over the whole table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scipy import stats

from evalkit.errors import UsageError
from evalkit.reporting.decimals import of_float
from evalkit.runs.folder import load_run
from evalkit.tables.fill import Lead, fill
from evalkit.tables.layout import load_layout
from evalkit.tables.published import Number
from evalkit.tables.request import TableRequest, make
from evalkit.tables.row_models import significant_leads
from tests.comparison.made import make_run, scores_of

TASKS = ("arc_easy", "piqa", "boolq")
N = 60


def won(wins: int, losses: int) -> tuple[list[int], list[int]]:
    """Answers of two runs: so many documents only the first has right, so many only the second."""
    rest = N - wins - losses
    return [1] * wins + [0] * losses + [1] * rest, [0] * wins + [1] * losses + [1] * rest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    layout = {
        "suite": "zeroshot8",
        "marks": {"bold": "highest in table"},
        "rows": [{"items": {"one": None, "two": None, "three": None}}],
        "columns": [{"items": dict.fromkeys(TASKS)}],
    }
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(layout, sort_keys=False), encoding="utf-8")
    return tmp_path


def made(folder: Path, model: str, clusters: list[int] | None = None, **right: list[int]) -> Path:
    tables = {
        task: scores_of(task, answers, clusters=clusters if task == "boolq" else None)
        for task, answers in right.items()
    }
    return make_run(folder, tables, model=f"org/{model}")


def leading(folder: Path, rule: str | None = "acc", **rows: list[Path]) -> set[str]:
    """The measures of which row one's lead over row two is significant."""
    layout = load_layout(str(folder / "own.yaml"))
    runs = {row: tuple(map(load_run, folders)) for row, folders in rows.items()}
    leads = [Lead("one", "two", task) for task in TASKS]
    return {lead.measure for lead in significant_leads(layout, runs, rule, leads)}


def test_holm_over_the_leads_of_the_table(folder: Path) -> None:
    pairs = {"arc_easy": won(12, 1), "piqa": won(10, 2), "boolq": won(9, 3)}
    ps = [stats.binomtest(losses, wins + losses).pvalue for wins, losses in ((12, 1), (10, 2), (9, 3))]
    assert 3 * ps[0] < 0.05 < 2 * ps[1] and ps[1] < 0.05  # the second is significant alone, and not among three
    one = made(folder, "one", **{task: pair[0] for task, pair in pairs.items()})
    two = made(folder, "two", **{task: pair[1] for task, pair in pairs.items()})
    assert leading(folder, one=[one], two=[two]) == {"arc_easy"}


def test_documents_of_one_source_are_together(folder: Path) -> None:
    """Ten documents won are a lead; ten documents of two passages are not."""
    right = {"arc_easy": won(0, 0), "piqa": won(10, 0), "boolq": won(10, 0)}
    passages = [place // 5 * 5 for place in range(N)]
    one = made(folder, "one", passages, **{task: pair[0] for task, pair in right.items()})
    two = made(folder, "two", passages, **{task: pair[1] for task, pair in right.items()})
    assert leading(folder, one=[one], two=[two]) == {"piqa"}


def test_several_seeds_must_agree(folder: Path) -> None:
    """Three seeds that all lead mark the lead; where one seed alone makes it, nothing is marked."""
    dice = np.random.default_rng(5)
    low = [(dice.random(N) < 0.3).astype(int).tolist() for _ in range(3)]
    high = [np.maximum(row, dice.random(N) < 0.6).astype(int).tolist() for row in low]
    two = [made(folder, f"two{seed}", arc_easy=row, piqa=row, boolq=row) for seed, row in enumerate(low)]
    one = [
        made(folder, f"one{seed}", arc_easy=row, piqa=row if seed == 0 else low[seed], boolq=low[seed])
        for seed, row in enumerate(high)
    ]
    assert leading(folder, one=one, two=two) == {"arc_easy"}


def test_only_what_stands_alone_as_best_leads(folder: Path) -> None:
    """Two numbers that are printed alike are both bold; neither leads, however they differ."""
    seen: list[Lead] = []

    def none(leads: Any) -> frozenset[Lead]:
        seen.extend(leads)
        return frozenset()

    numbers = {
        "one": {"arc_easy": 39.84, "piqa": 50.0, "boolq": 61.0},
        "two": {"arc_easy": 39.79, "piqa": 48.0},
        "three": {"arc_easy": 30.0, "piqa": 49.0},
    }
    rows = {row: {task: Number(of_float(value)) for task, value in found.items()} for row, found in numbers.items()}
    fill(load_layout(str(folder / "own.yaml")), rows, significant=none)
    assert seen == [Lead("one", "three", "piqa")]


def test_leads_that_are_not_tested(folder: Path) -> None:
    right = {task: won(8, 0) for task in TASKS}
    one = made(folder, "one", **{task: pair[0] for task, pair in right.items()})
    fewer = made(folder, "two", **{task: pair[1][:-1] for task, pair in right.items()})
    with pytest.raises(UsageError, match="'one' and 'two' were not measured on the same documents of arc_easy"):
        leading(folder, one=[one], two=[fewer])
    with pytest.raises(UsageError, match="name one with --rule"):
        leading(folder, rule=None, one=[one], two=[fewer])
    assert leading(folder, one=[one]) == set()  # the next best is a number of a CSV
    plain = yaml.safe_load((folder / "own.yaml").read_text(encoding="utf-8")) | {"marks": {}}
    (folder / "plain.yaml").write_text(yaml.safe_dump(plain), encoding="utf-8")
    (folder / "runs.yaml").write_text(yaml.safe_dump({"values": str(folder / "none.csv")}), encoding="utf-8")
    (folder / "none.csv").write_text("model,piqa\none,3\n", encoding="utf-8")
    with pytest.raises(UsageError, match="table plain marks no best numbers"):
        make(TableRequest(str(folder / "plain.yaml"), "runs", folder / "runs.yaml", significance=True))
