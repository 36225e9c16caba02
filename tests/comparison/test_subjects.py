"""Differences by subject, compared with each subject taken by hand."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.multitest import multipletests

from evalkit.comparison.comparison import subject_differences
from evalkit.comparison.pairing import pair
from evalkit.comparison.sides import Side
from evalkit.runs.folder import load_run
from tests.comparison.conftest import SUBJECTS, Make, N, answers


def test_every_subject_is_compared_and_corrected(make: Make) -> None:
    folders = make("org/a", 0.2), make("org/b", 0.9, seed=5)
    sides = [Side(name, (load_run(folder),)) for name, folder in zip("AB", folders, strict=True)]
    pairing = pair(*sides, {})
    [task] = [one for one in pairing.tasks if one.strata is not None]
    found = subject_differences(pairing, task, "acc")
    table = pd.DataFrame({"a": answers(3, 0.2, N["mmlu"]), "b": answers(7, 0.9, N["mmlu"]), "subject": SUBJECTS})
    groups = list(table.groupby("subject", sort=False))
    assert [one.name for one in found] == [name for name, _ in groups]
    ps = []
    for one, (_, rows) in zip(found, groups, strict=True):
        a, b = rows["a"].to_numpy(), rows["b"].to_numpy()
        counts = [[sum((a == x) & (b == y)) for y in (1, 0)] for x in (1, 0)]
        ps.append(mcnemar(counts, exact=True).pvalue)
        assert (one.n, one.score_a, one.score_b) == (3, pytest.approx(a.mean()), pytest.approx(b.mean()))
        assert one.difference == pytest.approx((b - a).mean())
        assert one.p == pytest.approx(ps[-1])
        assert one.low <= one.difference <= one.high
    assert [one.p_holm for one in found] == pytest.approx(multipletests(ps, method="holm")[1])
    assert sum(one.n for one in found) == task.n
    assert np.average([one.difference for one in found], weights=[one.n for one in found]) == pytest.approx(
        table["b"].mean() - table["a"].mean()
    )
