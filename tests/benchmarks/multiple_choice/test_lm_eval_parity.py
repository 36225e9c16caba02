"""Real weights, real documents, lm-eval's own prompt: the same log-likelihoods and the same decisions as lm-eval.

The documents of tests/fixtures, and fifty of each of the eight tasks where the complete data is at hand;
SmolLM2-135M-Instruct in float32, template `plain`. On random weights: tests/export/test_exports.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from evalkit.benchmarks.multiple_choice.encoded import question_rows, question_sequences
from evalkit.benchmarks.multiple_choice.prompts import Prompter
from evalkit.benchmarks.multiple_choice.suites import TASK_DIR, load_suite
from evalkit.benchmarks.multiple_choice.tasks import Question, load_questions
from evalkit.benchmarks.multiple_choice.templates import SEGMENTS, load_template
from evalkit.data import Library
from evalkit.data.sampling import FirstDocuments
from evalkit.data.wheels import demo_checkpoint
from evalkit.errors import EvalkitError
from evalkit.models.loading.load import LoadedModel, load
from evalkit.models.loading.locate import locate
from evalkit.paths import resource
from evalkit.runs.rules import decide, find_rule
from evalkit.runs.score_table import ScoreRow
from evalkit.scoring.architecture import auto_budget
from evalkit.scoring.engine import Engine
from evalkit.scoring.pack import batches_of

pytestmark = pytest.mark.slow
DOCUMENTS = 50
"""Of each task, at most."""
RELATIVE = 1e-4
SUITE = load_suite("zeroshot8")


@dataclass(frozen=True)
class Scored:
    """One task, scored both ways."""

    ours: pd.DataFrame
    """The score table."""
    theirs: list[float]
    """lm-eval's log-likelihoods, in the table's order."""
    decisions: list[dict[str, float]]
    """lm-eval's metrics, one entry a document."""


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    try:
        file = demo_checkpoint()
    except EvalkitError as error:
        pytest.skip(f"no demo checkpoint: {error}")
    return load(locate(str(file)), device="cpu", dtype="float32")


@pytest.fixture(scope="module", params=["a few", "complete"])
def library(request: pytest.FixtureRequest) -> Library:
    if request.param == "a few":
        return Library(request.getfixturevalue("real_documents"), allow_unofficial=True)
    return Library(request.getfixturevalue("shared_data") / "zeroshot8")


@pytest.fixture(scope="module")
def leaves(library: Library) -> dict[str, Any]:
    """lm-eval's tasks on the same documents (their identity is checked in test_tasks.py)."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(resource(*TASK_DIR)), include_defaults=False, metadata={"library": library})
    leaves: dict[str, Any] = manager.load(list(SUITE.tasks))["tasks"]
    return leaves


@pytest.fixture(scope="module")
def scored(library: Library, demo: LoadedModel, leaves: dict[str, Any]) -> dict[str, Scored]:
    questions = load_questions(SUITE, library, FirstDocuments(DOCUMENTS))
    return {
        task: Scored(our_scores(demo, asked), *lm_eval_scores(demo, leaves, asked)) for task, asked in questions.items()
    }


def our_scores(demo: LoadedModel, questions: list[Question]) -> pd.DataFrame:
    template = load_template("plain")
    encoded = list(Prompter(template, demo.tokenizer, demo.window).encode(questions))
    said: list[str] = []
    engine = Engine(demo.model, auto_budget(demo.model), said.append)
    scored = frozenset(SEGMENTS.index(segment) for segment in template.score)
    if questions[0].task == SUITE.tasks[0]:  # as a run does, on the first task only
        engine.check(question_sequences(encoded[:2], scored))
    rows = [
        row
        for batch in batches_of(question_sequences(encoded, scored), engine.budget)
        for item, scores in engine.score(batch)
        for row in question_rows(encoded[item], scores, scored)
    ]
    assert engine.shares
    assert said == []
    order = {(q.subtask, q.doc_id): place for place, q in enumerate(questions)}
    rows.sort(key=lambda row: (order[row.subtask, row.doc_id], row.choice))
    table = pd.DataFrame(rows, columns=list(ScoreRow._fields))
    return table.astype({column: "float64" for column in table if column.startswith("ll_")})


def lm_eval_scores(
    demo: LoadedModel, leaves: dict[str, Any], questions: list[Question]
) -> tuple[list[float], list[dict[str, float]]]:
    from lm_eval.models.huggingface import HFLM

    requests = []
    # `eval_docs` prepares all documents again on each access
    prepared = {subtask: leaves[subtask].eval_docs for subtask in {question.subtask for question in questions}}
    for question in questions:
        leaf = leaves[question.subtask]
        doc = prepared[question.subtask][question.doc_id]
        context = leaf.fewshot_context(doc, num_fewshot=0)
        requests.append(leaf.construct_requests(doc=doc, ctx=context, metadata=(question.subtask, question.doc_id, 1)))
    lm = HFLM(pretrained=demo.model, tokenizer=demo.tokenizer, batch_size=4)
    with torch.inference_mode():
        answers = lm.loglikelihood([r for document in requests for r in document], disable_tqdm=True)
    remaining = iter(answers)
    decisions = []
    for question, document in zip(questions, requests, strict=True):
        results = [next(remaining) for _ in document]
        doc = prepared[question.subtask][question.doc_id]
        decisions.append(leaves[question.subtask].process_results(doc, results))
    return [float(ll) for ll, _ in answers], decisions


@pytest.mark.parametrize("task", SUITE.tasks)
def test_log_likelihoods_are_lm_evals(scored: dict[str, Scored], task: str) -> None:
    ours = scored[task].ours["ll_continuation"].to_numpy()
    theirs = np.array(scored[task].theirs)
    assert len(ours) >= 2 * len(scored[task].decisions) >= 8
    difference = np.abs(ours - theirs) / np.abs(theirs)
    print(f"{task}: {len(ours)} log-likelihoods, largest relative difference {difference.max():.1e}")
    assert difference.max() <= RELATIVE


@pytest.mark.parametrize("rule", ["acc", "acc_norm"])
@pytest.mark.parametrize("task", SUITE.tasks)
def test_decisions_are_lm_evals_but_for_exact_ties(scored: dict[str, Scored], task: str, rule: str) -> None:
    if rule not in scored[task].decisions[0]:
        pytest.skip(f"lm-eval's {task} has no {rule}")
    decided = decide(scored[task].ours, find_rule(rule))
    assert len(decided) == len(scored[task].decisions)
    theirs = np.array([document[rule] for document in scored[task].decisions])
    differ = (decided["correct"].to_numpy() != theirs) & ~decided["tie"].to_numpy()
    assert not differ.any(), decided[differ]
