"""Comparisons of tasks of lm-eval that name their sources; and the speed of `evalkit compare`."""

from __future__ import annotations

from pathlib import Path

import evalkit
from evalkit.comparison.comparison_report import comparison_report
from tests.benchmarks.lm_eval.made import CHOICE, write_task
from tests.comparison.made import compared


def test_a_task_of_lm_eval_says_what_its_documents_share(checkpoint: Path, tmp_path: Path) -> None:
    documents = [
        {"question": f"which {number}", "story": f"story {number // 3}", "choices": ["a", "b"], "gold": number % 2}
        for number in range(9)
    ]
    task = CHOICE | {"task": "made_stories", "metadata": {"version": 1.0, "source": "story"}}
    write_task(tmp_path / "tasks", task, documents)
    options = {"include_path": tmp_path / "tasks", "tasks": "made_stories", "progress": evalkit.Progress(live=False)}
    runs = [evalkit.evaluate(str(checkpoint), output=tmp_path, dtype=dtype, **options)  # type: ignore[arg-type]
            for dtype in ("float32", "bfloat16")]  # fmt: skip
    [stories] = compared(*runs).tasks
    assert (stories.n, stories.sources, stories.test) == (9, 3, "sign flip and t")


def test_an_own_task_is_one_kind_of_run_under_any_template(checkpoint: Path, tmp_path: Path) -> None:
    """Runs under `plain` and `inst` have different rules; they are compared under the first one that both support."""
    documents = [{"question": f"which {number}", "choices": ["a", "b"], "gold": number % 2} for number in range(9)]
    write_task(tmp_path / "tasks", CHOICE | {"task": "made_own", "metadata": {"version": 1.0}}, documents)
    options = {"include_path": tmp_path / "tasks", "tasks": "made_own", "progress": evalkit.Progress(live=False)}
    plain, inst = (evalkit.evaluate(str(checkpoint), output=tmp_path, template=template, **options)  # type: ignore[arg-type]
                   for template in ("plain", "inst"))  # fmt: skip
    assert (plain.kind, inst.kind, plain.rule, inst.rule) == ("multiple_choice", "multiple_choice", "acc", "ppl")
    for first, second in ((plain, inst), (inst, plain)):
        comparison = compared(first, second)
        assert (comparison.rule, comparison.own_rules) == ("acc", (first.rule, second.rule))
        assert comparison.tasks == compared(first, second, rule="acc").tasks
        [note] = [note for note in comparison_report([comparison]).parts[0].notes if "own rules" in note]
        assert "acc" in note and "ppl" in note
