"""Comparisons of tasks of lm-eval that name their sources; and the speed of `evalkit compare`."""

from __future__ import annotations

from pathlib import Path

import evalkit
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
