"""Real weights, real documents, lm-eval's own prompt: the same log-likelihoods and the same decisions as lm-eval.

The documents of tests/fixtures, SmolLM2-135M-Instruct in float32. On random weights: tests/exchange/test_exports.py.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from evalkit.data import Library
from evalkit.models.loading.load import load
from evalkit.models.loading.locate import locate
from evalkit.paths import resource
from evalkit.runs.folder import Run
from evalkit.runs.rules import decide, find_rule
from evalkit.suites.suites import TASK_DIR, load_suite
from tests.benchmarks.multiple_choice.made import run_of

KEY = ["subtask", "doc_id"]


def lm_evals(demo: Path, documents: Path, ours: Run) -> pd.DataFrame:
    """lm-eval's log-likelihoods, [documents × choices], and metrics of the documents that our run has."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    loaded = load(locate(str(demo)), device="cpu", dtype="float32")
    library = {"library": Library(documents, allow_unofficial=True)}
    manager = TaskManager(include_path=str(resource(*TASK_DIR)), include_defaults=False, metadata=library)
    samples = {str(subtask): sorted(set(rows["doc_id"])) for subtask, rows in ours.scores.groupby("subtask")}
    tasks = list(load_suite("zeroshot8").tasks)
    lm = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=4)
    logged = simple_evaluate(lm, tasks=tasks, task_manager=manager, samples=samples, bootstrap_iters=0)
    lines = [
        {"subtask": leaf, "ll": [float(answer[0]) for answer in line["filtered_resps"]], **line}
        for leaf, of_leaf in logged["samples"].items()
        for line in of_leaf
    ]
    return pd.DataFrame(lines).set_index(KEY)[["ll", "acc", "acc_norm"]]


@pytest.mark.slow
def test_log_likelihoods_and_decisions_are_lm_evals(demo: Path, tmp_path: Path, real_documents: Path) -> None:
    run = run_of(demo, tmp_path, real_documents, template="plain", limit=50, device="cpu")
    assert run.manifest["sharing"]["way"] == "tree"
    theirs = lm_evals(demo, real_documents, run)
    for task, scores in run.scores.groupby("task"):
        decided = {rule: decide(scores, find_rule(rule)).set_index(KEY) for rule in ("acc", "acc_norm")}
        expected = theirs.loc[decided["acc"].index]
        likelihoods = pd.Series([value for choices in expected["ll"] for value in choices], scores.index)
        assert len(scores) >= 2 * len(expected) >= 8
        assert ((scores["ll_continuation"] - likelihoods) / likelihoods).abs().max() <= 1e-4, task
        for rule, decisions in decided.items():
            differ = (decisions["correct"] != expected[rule]) & ~decisions["tie"] & expected[rule].notna()
            assert not differ.any(), decisions[differ]
