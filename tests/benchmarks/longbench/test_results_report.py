"""Tables: marks, notes, and characters that LaTeX must not receive."""

from __future__ import annotations

import pandas as pd

from evalkit.benchmarks.longbench.results_report import longbench_report
from evalkit.benchmarks.longbench.scores import score_generations
from tests.benchmarks.longbench.made import generations
from tests.printed import printed


def results() -> pd.DataFrame:
    table = pd.concat([generations("lcc", ("x", "x"), ("y", "z")), generations("hotpotqa", ("a b", "c"))])
    table["truncated"] = [0, 5, 0]
    return table


def test_marks_are_explained() -> None:
    text = printed(
        longbench_report(score_generations(results(), official={"lcc": False, "hotpotqa": True}), ["a note"])
    )
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert rows["LCC*"][-1] == "1"
    assert rows["LCC*"][1:5] == ["edit", "sim.", "2", "50.00"]
    assert rows["HotpotQA"][1:5] == ["F1", "1", "0.00", "–"]
    for note in ("cut: documents truncated", "*: not the official documents", "edit sim.: difflib", "a note"):
        assert note in text


def test_nothing_is_marked_or_explained_without_need() -> None:
    table = results()
    table["truncated"] = 0
    text = printed(longbench_report(score_generations(table)))
    assert "cut" not in text
    assert "*" not in text


def test_forms_escape_what_they_must() -> None:
    found = score_generations(results(), official={"lcc": False})
    assert "LCC\\*" in printed(longbench_report(found), "markdown")
    latex = printed(longbench_report(found), "latex")
    assert "\\begin{tabular}" in latex
    assert "95 \\% interval" in latex
    assert "–" not in "".join(line for line in latex.splitlines() if not line.startswith("%"))
    assert "kind,name,group,metric,variant,n,score,low,high,truncated,official" in printed(
        longbench_report(found), "csv"
    )
