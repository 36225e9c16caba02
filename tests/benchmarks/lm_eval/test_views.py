"""Documents of runs of lm-eval's tasks, compared with the task files' documents and the score table."""

from __future__ import annotations

import json
from pathlib import Path

from evalkit.benchmarks.document_views import AnswerView, ChoiceView
from evalkit.benchmarks.registry import benchmark_of
from evalkit.benchmarks.run import evaluate
from evalkit.models.loading.locate import silent
from evalkit.runs.folder import Run
from tests.benchmarks.lm_eval.test_runs import Silent, _one_process, finished, model, tasks

__all__ = ["_one_process", "finished", "model", "tasks"]  # fixtures


def test_choices_and_answers(finished: Run, tasks: Path) -> None:
    found = {view.task: view for view in benchmark_of(finished).views(finished, (), silent)}
    assert list(found) == [task["task"] for task in finished.stored["tasks"]]
    choices = found["made_choice"]
    assert isinstance(choices, ChoiceView) and choices.problem == ""
    documents = [json.loads(line) for line in (tasks / "made_choice.jsonl").read_text("utf-8").splitlines()]
    for number, document in enumerate(documents):
        text = choices.texts["made_choice", number]
        assert text.common == (("context", f"Question: {document['question']}\nAnswer:"),)
        assert text.choices == tuple(((("continuation", f" {choice}")),) for choice in document["choices"])
        assert text.options == tuple(document["choices"])
    assert choices.scores.equals(finished.scores.query("task == 'made_choice'").reset_index(drop=True))
    answers = found["made_answers"]
    assert isinstance(answers, AnswerView) and answers.metric == "exact_match"
    documents = [json.loads(line) for line in (tasks / "made_answers.jsonl").read_text("utf-8").splitlines()]
    assert [one.references for one in answers.documents] == [(document["answer"],) for document in documents]
    assert [one.prompt[0].text for one in answers.documents] == [document["text"] for document in documents]
    # The first filter keeps the whole answer
    assert {one.score for one in answers.documents} <= {0.0, 1.0}
    last = found["made_last_word"]
    assert isinstance(last, AnswerView)
    assert all("".join(piece.text for piece in one.prompt) for one in last.documents)
    [texts] = benchmark_of(finished).views(finished, ("made_texts",), silent)
    assert isinstance(texts, AnswerView) and len(texts.documents) == len(documents)


def test_without_sample_files(model: Path, tasks: Path, tmp_path: Path) -> None:
    names = ("made_choice", "made_answers")
    run = evaluate(
        str(model), include_path=tasks, tasks=names, limit=2, output=tmp_path, progress=Silent(live=False)
    )  # fmt: skip
    choices, answers = benchmark_of(run).views(run, (), silent)
    assert isinstance(choices, ChoiceView) and len(choices.scores) and not choices.texts
    assert isinstance(answers, AnswerView) and not answers.documents
    assert "--log-samples" in choices.problem and "--log-samples" in answers.problem
