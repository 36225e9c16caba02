"""A page of runs in Chromium, the sample of `browser` that runs by default: it shows what the rules decide."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evalkit.benchmarks.multiple_choice.suites import label_of
from evalkit.models.loading.locate import silent
from evalkit.pages.report import contents_of_runs, write_report
from evalkit.runs.accuracies import available_rules
from evalkit.runs.folder import Run
from evalkit.runs.rules import decide, find_rule


@pytest.fixture
def tab(chromium: Any) -> Iterator[Any]:
    """An empty tab; an error in a script fails the test."""
    context, errors = chromium.new_context(), list[str]()
    context.set_default_timeout(8000)
    found = context.new_page()
    found.on("pageerror", lambda error: errors.append(str(error)))
    yield found
    context.close()
    assert errors == []


def with_ties(runs: list[Run]) -> None:
    """Give every fifth document two choices with equal scores."""
    for run in runs:
        scores = run.scores
        columns = [name for name in scores if str(name).startswith(("ll_", "n_"))] + ["chars", "bytes"]
        first = np.flatnonzero(scores["choice"] == 0)[::5]
        for column in columns:
            scores.iloc[first + 1, scores.columns.get_loc(column)] = scores[column].to_numpy()[first]


@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.browser)])
def test_every_rule_of_a_document(count: int, two_runs: list[Run], tab: Any, tmp_path: Path) -> None:
    """Choice, verdict and tie under every rule and run, of random documents opened by their address."""
    with_ties(two_runs)
    path = tmp_path / "report.html"
    write_report(contents_of_runs(two_runs), path, silent)
    rules = list(available_rules(two_runs[0].scores))
    found = [{rule: decide(run.scores, find_rule(rule)) for rule in rules} for run in two_runs]
    total = len(found[0]["ppl"])
    chosen = np.random.default_rng(0).permutation(total)[:count]
    assert min(count, total) == len(chosen)
    assert found[0]["ppl"]["tie"].to_numpy()[chosen].any()
    tab.goto(path.as_uri())
    for place in chosen:
        document = found[0]["ppl"].iloc[place]
        task, subtask, number = document["task"], document["subtask"], document["doc_id"]
        name = f"{task}/{number}" if task == subtask else f"{task}/{subtask}/{number}"
        tab.evaluate("name => { location.hash = name }", name)
        title = " / ".join([label_of(task).full, *([] if task == subtask else [subtask]), str(number)])
        tab.wait_for_function("title => document.querySelector('#document-title')?.innerText === title", arg=title)
        rows = tab.get_by_role("region", name="Choices of each rule").locator("tbody tr").all_inner_texts()
        assert len(rows) == len(rules)
        for rule, row in zip(rules, rows, strict=True):
            label, *cells = row.split("\t")
            assert label.startswith(rule)
            for run, cell in zip(found, cells[::2], strict=True):
                one = run[rule].iloc[place]
                words = (
                    f"{one['prediction']} {'✓ right' if one['correct'] else '✗ wrong'}{', tie' if one['tie'] else ''}"
                )
                assert cell == words, (name, rule)
