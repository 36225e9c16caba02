"""Documents of runs of lm-eval's tasks, paired with those of other selections."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evalkit.benchmarks.lm_eval.outcomes import TaskChoices
from evalkit.benchmarks.run import evaluate
from evalkit.comparison.comparison import compare
from evalkit.comparison.pairing import Pairing, pair
from evalkit.comparison.sides import Side
from evalkit.data.sampling import DocumentSample
from evalkit.display import Progress
from evalkit.errors import UsageError
from evalkit.runs.folder import Run
from tests.benchmarks.lm_eval.made import CHOICE, made_tasks, write_task

pytestmark = [
    # lm-eval's own
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
COUNT = 12
Evaluate = Callable[..., Run]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_tasks(tmp_path_factory.mktemp("tasks"), COUNT)


@pytest.fixture(scope="module")
def evaluated(checkpoint: Path, tasks: Path, tmp_path_factory: pytest.TempPathFactory) -> Evaluate:
    def run(task: str, **options: Any) -> Run:
        return evaluate(
            str(checkpoint), suite="lm_eval", tasks=task, dtype="float32", output=tmp_path_factory.mktemp("runs"),
            progress=Progress(live=False), **({"include_path": tasks} | options),
        )  # fmt: skip

    return run


def paired(a: Run, b: Run) -> Pairing:
    return pair(Side("a", (a,)), Side("b", (b,)), {})


def numbers(pairing: Pairing) -> list[list[int]]:
    """The numbers of the paired documents in each run; one task file numbers all selections alike."""
    [task] = pairing.tasks
    return [
        one.documents["doc_id"].to_numpy()[rows].tolist() for one, rows in zip(pairing.graded, task.rows, strict=True)
    ]


@pytest.mark.parametrize("task", ["made_choice", "made_shots", "made_answers"])
def test_a_sample_is_paired_with_a_larger_one(task: str, evaluated: Evaluate) -> None:
    small, large = (evaluated(task, sample=count, seed=3) for count in (4, 9))
    for a, b in ((small, large), (large, small)):
        pairing = paired(a, b)
        first, second = numbers(pairing)
        assert first == second and len(set(first)) == 4
        assert pairing.tasks[0].dropped == 5
        if task != "made_answers":
            # One checkpoint: every document's difference is zero only if the right ones are paired
            [mine], [theirs] = pairing.scores(pairing.tasks[0], "log_loss")
            np.testing.assert_allclose(mine, theirs, rtol=1e-4)
            assert len(set(np.round(mine, 3))) > 2
        assert compare(pairing).average.difference == 0.0


def test_first_documents_are_paired_with_random_ones(evaluated: Evaluate) -> None:
    first, random = evaluated("made_choice", limit=6), evaluated("made_choice", sample=6)
    drawn = set(random.scores["doc_id"])
    assert drawn != set(range(6))
    pairing = paired(first, random)
    assert numbers(pairing) == [sorted(drawn & set(range(6)))] * 2
    assert pairing.tasks[0].dropped == len(drawn ^ set(range(6)))
    seeds = (
        seed for seed in range(99) if 0 not in DocumentSample(3, seed).places("made_choice", ["made_choice"] * COUNT)
    )
    with pytest.raises(UsageError, match="no document in common"):
        paired(evaluated("made_choice", limit=1), evaluated("made_choice", sample=3, seed=next(seeds)))


def test_runs_without_content_hashes_must_have_one_selection(
    evaluated: Evaluate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of earlier versions."""
    runs = [evaluated("made_choice", sample=count) for count in (4, 9)]
    monkeypatch.setattr(TaskChoices, "has_contents", False)
    with pytest.raises(UsageError, match=r"the limit of run .* \(sample 9\) is not that of run .* \(sample 4\)"):
        paired(*runs)


def test_other_examples_are_another_prompt(evaluated: Evaluate, tmp_path: Path) -> None:
    documents = [{"question": f"Which is {n}?", "choices": ["one", "two"], "gold": n % 2} for n in range(6)]
    examples = tmp_path / "examples.jsonl"
    shots = CHOICE | {"task": "shots", "num_fewshot": 1, "fewshot_split": "examples"}
    write_task(tmp_path / "tasks", shots, documents, examples=examples)
    runs = []
    for words in ("these", "those"):
        lines = [{"question": f"Which of {words}?", "choices": ["one", "two"], "gold": 0}] * 3
        examples.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        runs.append(evaluated("shots", include_path=tmp_path / "tasks", sample=3 + len(runs)))
    with pytest.raises(UsageError, match="the content hash of the solved examples of run"):
        paired(*runs)
    with pytest.raises(UsageError, match="number of examples"):
        paired(runs[0], evaluated("shots", include_path=tmp_path / "tasks", sample=4, num_fewshot=2))
