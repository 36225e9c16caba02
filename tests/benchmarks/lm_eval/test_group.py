"""The group zeroshot8 under lm-eval: its average is evalkit's, unweighted over eight tasks of which MMLU is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evalkit.benchmarks.run import evaluate
from evalkit.data import Library
from evalkit.data.schema import SUBJECTS
from evalkit.display import Progress
from evalkit.paths import resource
from evalkit.runs.folder import Run
from tests.documents import TASKS

LIMIT = 57
"""Of MMLU a document of each subject."""


def manager(library: Library) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(resource("tasks")), include_defaults=False, metadata={"library": library})


def agrees(found: dict[str, Any], run: Run) -> None:
    """lm-eval's results and a run's under lm-eval's own prompt and rule."""
    results = run.results("acc")
    for task in results.tasks:
        name = "mmlu_pooled" if task.task == "mmlu" else task.task
        assert found[name]["acc,none"] == pytest.approx(task.accuracy, abs=1e-12), name
    assert found["zeroshot8"]["acc,none"] == pytest.approx(results.average.accuracy, abs=1e-12)
    assert found["zeroshot8"]["acc_stderr,none"] == pytest.approx(results.average.stderr, abs=1e-12)


def ours(checkpoint: Path, documents: Path, output: Path) -> Run:
    return evaluate(
        str(checkpoint), data_dir=documents, allow_unofficial_data=True, template="plain", rule="acc", limit=LIMIT,
        dtype="float32", output=output, progress=Progress(live=False),
    )  # fmt: skip


def test_the_average_is_evalkits(checkpoint: Path, real_documents: Path, tmp_path: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=str(checkpoint), device="cpu", batch_size=8)
    tasks = manager(Library(real_documents, allow_unofficial=True))
    theirs = simple_evaluate(model, tasks=["zeroshot8"], limit=LIMIT, task_manager=tasks, bootstrap_iters=2)
    assert theirs["results"]["mmlu_pooled"]["sample_len"] == LIMIT
    agrees(theirs["results"], ours(checkpoint, real_documents, tmp_path / "runs"))


def test_pooled_prompts_are_the_subjects(real_documents: Path) -> None:
    """The same documents with the same prompts, a subject in turn, so that a limit samples each subject."""
    tasks = manager(Library(real_documents, allow_unofficial=True)).load(["mmlu", "mmlu_pooled"])["tasks"]
    pooled = tasks["mmlu_pooled"]
    assert len(pooled.eval_docs) == sum(len(tasks[f"mmlu_{subject}"].eval_docs) for subject in SUBJECTS)
    assert [doc["subject"] for doc in pooled.eval_docs.select(range(LIMIT))] == list(SUBJECTS)
    for doc in pooled.eval_docs.select(range(2 * LIMIT)):
        own = tasks[f"mmlu_{doc['subject']}"]
        assert pooled.fewshot_context(doc, num_fewshot=0) == own.fewshot_context(doc, num_fewshot=0)
        assert pooled.doc_to_target(doc) == own.doc_to_target(doc)
        assert pooled.doc_to_choice(doc) == own.doc_to_choice(doc)


@pytest.mark.slow
def test_lm_evals_own_command(checkpoint: Path, shared_data: Path, tmp_path: Path) -> None:
    """On the official documents, from the same folder."""
    documents = shared_data / "zeroshot8"
    command = [sys.executable, "-m", "lm_eval", "--include_path", str(resource("tasks")), "--tasks", "zeroshot8",
               "--model", "hf", "--model_args", f"pretrained={checkpoint}", "--device", "cpu", "--limit", str(LIMIT),
               "--output_path", str(tmp_path / "theirs")]  # fmt: skip
    environment = os.environ | {"EVALKIT_DATA_DIR": str(documents), "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    [written] = (tmp_path / "theirs").rglob("results_*.json")
    results = json.loads(written.read_text(encoding="utf-8"))["results"]
    assert set(results) == {"zeroshot8", "mmlu_pooled", *TASKS} - {"mmlu"}
    agrees(results, ours(checkpoint, documents, tmp_path / "runs"))
