"""Real weights, real documents, lm-eval's own prompt: the same log-likelihoods and the same decisions as lm-eval.

The documents of tests/fixtures, and fifty of each of the eight tasks where the complete data is at hand;
SmolLM2-135M-Instruct in float32, template `plain`. On random weights: tests/exchange/test_exports.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from evalkit.benchmarks.multiple_choice.suites import TASK_DIR, load_suite
from evalkit.benchmarks.run import evaluate
from evalkit.data import Library
from evalkit.display import Progress
from evalkit.models.loading.load import load
from evalkit.models.loading.locate import locate
from evalkit.paths import resource
from evalkit.runs.folder import Run
from evalkit.runs.rules import decide, find_rule

pytestmark = pytest.mark.slow
TASKS = load_suite("zeroshot8").tasks
KEY = ["subtask", "doc_id"]


@pytest.fixture(scope="module", params=["a few", "complete"])
def documents(request: pytest.FixtureRequest) -> Path:
    if request.param == "a few":
        return Path(request.getfixturevalue("real_documents"))
    return Path(request.getfixturevalue("shared_data")) / "zeroshot8"


@pytest.fixture(scope="module")
def ours(demo: Path, documents: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    options: dict[str, Any] = {"template": "plain", "limit": 50, "dtype": "float32", "device": "cpu"}
    data = {"data_dir": documents, "allow_unofficial_data": True, "output": tmp_path_factory.mktemp("runs")}
    run = evaluate(str(demo), progress=Progress(live=False), **options, **data)
    assert run.manifest["sharing"]["shares"]
    return run


@pytest.fixture(scope="module")
def theirs(demo: Path, documents: Path, ours: Run) -> pd.DataFrame:
    """lm-eval's log-likelihoods, [documents × choices], and metrics of the documents that our run has."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    loaded = load(locate(str(demo)), device="cpu", dtype="float32")
    library = {"library": Library(documents, allow_unofficial=True)}
    manager = TaskManager(include_path=str(resource(*TASK_DIR)), include_defaults=False, metadata=library)
    samples = {str(subtask): sorted(set(rows["doc_id"])) for subtask, rows in ours.scores.groupby("subtask")}
    lm = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=4)
    logged = simple_evaluate(lm, tasks=list(TASKS), task_manager=manager, samples=samples, bootstrap_iters=0)
    lines = [
        {"subtask": leaf, "ll": [float(answer[0]) for answer in line["filtered_resps"]], **line}
        for leaf, of_leaf in logged["samples"].items()
        for line in of_leaf
    ]
    return pd.DataFrame(lines).set_index(KEY)[["ll", "acc", "acc_norm"]]


@pytest.mark.parametrize("task", TASKS)
def test_log_likelihoods_and_decisions_are_lm_evals(ours: Run, theirs: pd.DataFrame, task: str) -> None:
    scores = ours.scores[ours.scores["task"] == task]
    decided = {rule: decide(scores, find_rule(rule)).set_index(KEY) for rule in ("acc", "acc_norm")}
    expected = theirs.loc[decided["acc"].index]
    likelihoods = pd.Series([value for choices in expected["ll"] for value in choices], scores.index)
    assert len(scores) >= 2 * len(expected) >= 8
    difference = ((scores["ll_continuation"] - likelihoods) / likelihoods).abs().max()
    print(f"{task}: {len(scores)} log-likelihoods, largest relative difference {difference:.1e}")
    assert difference <= 1e-4
    for rule, documents in decided.items():
        differ = (documents["correct"] != expected[rule]) & ~documents["tie"] & expected[rule].notna()
        assert not differ.any(), documents[differ]
