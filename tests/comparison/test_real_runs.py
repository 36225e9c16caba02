"""Comparisons of runs made by `evalkit run`: of a suite, and of one of lm-eval's tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evalkit.benchmarks.run import evaluate
from evalkit.comparison.comparison_report import comparison_report
from evalkit.display import Progress
from evalkit.errors import UsageError
from evalkit.runs.folder import Run
from tests.benchmarks.lm_eval.made import CHOICE, write_task
from tests.comparison.made import compared


def evaluated(checkpoint: Path, output: Path, **options: Any) -> Run:
    return evaluate(str(checkpoint), output=output, progress=Progress(live=False), **options)


def test_a_suite_under_two_templates(checkpoint: Path, documents: Path, finished: Run, tmp_path: Path) -> None:
    plain = evaluated(checkpoint, tmp_path, data_dir=documents, allow_unofficial_data=True, template="plain")
    with pytest.raises(UsageError, match=r"different rules \(ppl, acc\); name one with --rule: all runs support ppl_c"):
        compared(finished, plain)
    found = compared(finished, plain, "acc")
    assert [task.name for task in found.tasks] == list(finished.manifest["documents"])
    for task, one, other in zip(found.tasks, finished.results("acc").tasks, plain.results("acc").tasks, strict=True):
        assert (task.n, task.score_a, task.score_b) == (one.n, one.accuracy, other.accuracy)
        assert not task.official
    assert found.average.score_a == pytest.approx(finished.results("acc").average.accuracy)
    assert (found.claim.kind, found.claim.settings) == ("setting", {"template": ("inst", "plain")})
    assert {task.name: task.strata for task in found.tasks}["mmlu"] == 57
    assert "*: not the official documents of the task" in comparison_report([found]).parts[0].notes


def test_a_task_of_lm_evals_says_itself_what_its_documents_share(checkpoint: Path, tmp_path: Path) -> None:
    documents = [
        {"question": f"which {place}", "story": f"story {place // 3}", "choices": ["one", "other"], "gold": place % 2}
        for place in range(9)
    ]
    task = CHOICE | {"task": "made_stories", "metadata": {"version": 1.0, "source": "story"}}
    write_task(tmp_path / "tasks", task, documents)
    options = {"include_path": tmp_path / "tasks", "tasks": "made_stories"}
    runs = [evaluated(checkpoint, tmp_path / "runs", dtype=dtype, **options) for dtype in ("float32", "bfloat16")]
    [found] = compared(*runs).tasks
    assert (found.n, found.sources, found.test) == (9, 3, "sign flip and t")
    with pytest.raises(UsageError, match=r"of suite lm_eval and run .* of zeroshot8"):
        other = evaluated(checkpoint, tmp_path, tasks="piqa", data_dir=_one(tmp_path), allow_unofficial_data=True)
        compared(runs[0], other)


def _one(folder: Path) -> Path:
    from tests.documents import made_up

    return made_up(folder / "documents", 2)
