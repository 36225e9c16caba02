"""Documents of finished suites: their text is the text that was scored, or they have none and say why."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from evalkit.benchmarks.document_views import ChoiceView
from evalkit.benchmarks.multiple_choice.prompts import Prompter
from evalkit.benchmarks.multiple_choice.suites import choose_tasks, load_suite
from evalkit.benchmarks.multiple_choice.tasks import load_questions
from evalkit.benchmarks.multiple_choice.templates import load_template
from evalkit.benchmarks.registry import benchmark_of
from evalkit.data import Library
from evalkit.data.sampling import FirstDocuments
from evalkit.models.loading.locate import silent
from evalkit.runs.accuracies import available_rules
from evalkit.runs.folder import Run, load_run
from tests.benchmarks.multiple_choice.made import made_files, run_of, write_suite
from tests.documents import rewrite

TASKS = ("winogrande", "arc_easy")


def views(run: Run, *tasks: str) -> dict[str, ChoiceView]:
    shown = benchmark_of(run).views(run, tasks, silent)
    return {view.task: view for view in shown if isinstance(view, ChoiceView)}


@pytest.mark.parametrize("template", ["inst", "plain"])
def test_text_is_what_is_tokenised(checkpoint: Path, real_documents: Path, tmp_path: Path, template: str) -> None:
    run = run_of(checkpoint, tmp_path, real_documents, tasks=TASKS, limit=3, template=template)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    prompter = Prompter(load_template(template), tokenizer, 4096)
    suite = choose_tasks(load_suite("zeroshot8"), TASKS)
    by_task = load_questions(suite, Library(real_documents, allow_unofficial=True), FirstDocuments(3))
    shown = views(run)
    assert list(shown) == list(by_task)
    for task, questions in by_task.items():
        view, marks = shown[task], ("[BOS]", "[EOS]") if template == "inst" else ()
        assert list(view.texts) == [(question.subtask, question.doc_id) for question in questions]
        assert view.problem == "" and list(view.rules) == available_rules(run.scores)
        for encoded, text in zip(prompter.encode(questions), view.texts.values(), strict=True):
            for sequence, choice in zip(encoded.sequences, text.choices, strict=True):
                pieces = [piece.text for piece in (*text.common, *choice)]
                assert (pieces[0], pieces[-1]) == marks or not marks
                tokens = sequence.tokens.tolist()
                assert "".join(pieces[1:-1] if marks else pieces) == tokenizer.decode(
                    tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
                )
        assert view.scores.equals(run.scores[run.scores["task"] == task].reset_index(drop=True))


def test_a_chat_template_is_shown_without_its_markers(documents: Path, tmp_path: Path, checkpoint: Path) -> None:
    model = Path(shutil.copytree(checkpoint, tmp_path / "chat"))
    chat = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    (model / "chat_template.jinja").write_text(chat, encoding="utf-8")
    [view] = views(run_of(model, tmp_path, documents, template="chat", tasks=("piqa",), limit=2)).values()
    text = next(iter(view.texts.values()))
    assert "markers" in view.problem
    assert [piece.segment for piece in (*text.common, *text.choices[0])] == ["instruction", "context", "continuation"]


def test_changed_documents_are_not_shown(
    checkpoint: Path, documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("EVALKIT_CACHE", "HF_HUB_CACHE", "HF_DATASETS_CACHE"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    own = Path(shutil.copytree(documents, tmp_path / "documents"))
    run = run_of(checkpoint, tmp_path, own, tasks=("piqa", "boolq"))
    assert all(view.texts and not view.problem for view in views(run).values())
    rewrite(own / "piqa.jsonl", 1, {"goal": "another goal"})
    shown = views(load_run(run.folder))
    assert shown["piqa"].texts == {} and "the documents of piqa" in shown["piqa"].problem
    assert len(shown["piqa"].scores) == 12 and shown["boolq"].texts


def test_tasks_of_ones_own_are_read_from_the_sample_files(checkpoint: Path, tmp_path: Path) -> None:
    files = made_files(tmp_path / "files")
    options = {"suite": str(write_suite(files)), "data_dir": files / "documents", "output": tmp_path / "runs"}
    without = views(run_of(checkpoint, **options))
    assert without["made_choice"].texts == {} and "--log-samples" in without["made_choice"].problem
    assert without["piqa"].texts and without["piqa"].problem == ""
    [view] = views(run_of(checkpoint, **options, log_samples=True), "made_choice").values()
    assert "sample files" in view.problem
    for number, line in enumerate((files / "own" / "made_choice.jsonl").read_text("utf-8").splitlines()):
        text, document = view.texts["made_choice", number], json.loads(line)
        assert [piece.text for piece in text.common] == [f"Question: {document['question']}\nAnswer:"]
        assert [choice[0].text for choice in text.choices] == [f" {choice}" for choice in document["choices"]]
