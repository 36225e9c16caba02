"""From a request or a suite to a finished run folder: run ids, resumption, and what is shown of documents."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from transformers import AutoTokenizer

from evalkit.benchmarks.document_views import ChoiceView
from evalkit.benchmarks.registry import results_of
from evalkit.benchmarks.run import planned
from evalkit.data import Library
from evalkit.data.sampling import FirstDocuments
from evalkit.errors import RunError, ScoringError, UsageError
from evalkit.models.loading.locate import silent
from evalkit.runs.accuracies import available_rules
from evalkit.runs.folder import Run, load_run
from evalkit.runs.journal import Journal
from evalkit.runs.rules import RULES
from evalkit.suites.prompts import Prompter
from evalkit.suites.question_loading import load_questions
from evalkit.suites.suites import choose_tasks, load_suite, shipped_suites, with_fewshot
from evalkit.suites.templates import load_template
from tests.benchmarks.kinds import Lines
from tests.benchmarks.lm_eval.made import made_tasks
from tests.benchmarks.multiple_choice.made import ALONE, made_files, run_of, write_suite
from tests.documents import made_up, rewrite
from tests.tiny import tiny_checkpoint

Evaluate = Callable[..., Run]
SMALL: dict[str, Any] = {"tasks": ("piqa", "arc_easy"), "token_budget": 110}
"""A run of a few documents in small batches."""


@pytest.fixture
def small(checkpoint: Path, documents: Path, tmp_path: Path) -> Evaluate:
    def run(model: Path = checkpoint, **changes: Any) -> Run:
        return run_of(model, **({"output": tmp_path / "runs", "data_dir": documents} | SMALL | changes))

    return run


def test_a_run_with_solved_examples_is_opened_and_says_how_many_there_are(small: Evaluate) -> None:
    run = small(tasks=("mmlu",), num_fewshot=1, limit=1)
    examples = load_run(run.folder).manifest["examples"]["mmlu"]
    assert examples["count"] == examples["total"] > 0


def test_every_choice_and_segment_is_scored_once_and_every_rule_is_stored(finished: Run) -> None:
    scores = finished.scores
    documents = scores.groupby(["task", "subtask", "doc_id"], sort=False)
    assert documents.ngroups == 7 * 6 + 57
    assert (documents["choice"].agg(list) == documents["choices"].first().map(lambda n: list(range(n)))).all()
    for segment in ("special", "instruction", "context", "continuation", "end"):
        assert (scores[f"n_{segment}"] > 0).all() or segment == "context"
        assert np.isfinite(scores[f"ll_{segment}"]).all() and (scores[f"ll_{segment}"] <= 0).all()
    assert (scores["n_end"] == 1).all() and scores["ll_unconditional"].isna().all()
    stored = json.loads((finished.folder / "results.json").read_text(encoding="utf-8"))
    assert set(stored["rules"]) == set(RULES) - {"pmi", "olmes", "olmo_core"}
    for rule, content in stored["rules"].items():
        assert content == json.loads(json.dumps(finished.results(rule).to_json()))
    assert sum(task["seconds"] for task in stored["tasks"]) > 0


def test_the_run_id_is_of_what_changes_the_numbers(checkpoint: Path, documents: Path, tmp_path: Path) -> None:
    other_weights = tiny_checkpoint(tmp_path / "weights" / checkpoint.name, window=4096, seed=1)
    moved = Path(shutil.copytree(checkpoint, tmp_path / "elsewhere" / checkpoint.name))
    other_documents = made_up(tmp_path / "documents")
    rewrite(other_documents / "piqa.jsonl", 1, {"goal": "Another goal."})
    common = SMALL | {"data_dir": documents, "allow_unofficial_data": True, "output": tmp_path}

    def manifests(*changes: dict[str, Any]) -> list[dict[str, Any]]:
        options = [common | change for change in changes]
        return [planned(each.pop("model", checkpoint), each, silent).manifest for each in options]

    others = [{"limit": 3}, {"sample": 3}, {"template": "plain"}, {"dtype": "bfloat16"}, {"attention": "eager"}]
    others += [{"rule": "pmi"}, {"tasks": ("piqa",)}, {"model": other_weights}, {"data_dir": other_documents}]
    assert len({manifest["id"] for manifest in manifests({}, *others)}) == len(others) + 1
    written = {"tasks": "piqa, arc_easy", "token_budget": "auto", "data_dir": str(documents)}
    same = manifests({}, {"rule": "acc"}, {"token_budget": 512}, {"model": moved}, {"device": "cpu"}, written)
    assert len({manifest["id"] for manifest in same}) == 1


def test_a_run_killed_after_running_out_of_memory_resumes(
    small: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured memory must not change the plan, or batches would be mistaken for others."""
    import torch

    from evalkit.scoring.forward import Forward

    whole = small(output=tmp_path / "whole", token_budget=200)
    score, append, written = Forward.score, Journal.append, []

    def scarce(own: Forward, tree: Any, trunk: Any) -> Any:
        if len(tree.tokens) > 120:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return score(own, tree, trunk)

    def interrupt(journal: Journal, entry: Any, *rows: Any) -> Any:
        stored = append(journal, entry, *rows)
        written.append((entry.task, entry.batch))
        if len(written) == 2:
            raise KeyboardInterrupt
        return stored

    monkeypatch.setattr(Journal, "append", interrupt)
    with monkeypatch.context() as during, pytest.raises(KeyboardInterrupt):
        during.setattr(Forward, "score", scarce)
        small(token_budget=200)
    run = small(token_budget=200)
    assert len(written) == len(set(written)) > 2
    pd.testing.assert_frame_equal(run.scores, whole.scores, rtol=1e-4, atol=1e-4)


def test_a_run_without_its_manifest_resumes_by_its_documents(small: Evaluate) -> None:
    whole = small()
    expected, journal = whole.scores, whole.folder / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[: len(lines) // 2]) + lines[-1][:40])
    for name in ("results.json", "manifest.json"):
        (whole.folder / name).unlink()
    progress = Lines()
    resumed = small(token_budget=4096, progress=progress)
    assert any("1 damaged line(s) dropped" in line for line in progress.said)
    pd.testing.assert_frame_equal(resumed.scores, expected, rtol=1e-5)


def test_samples_are_all_there_or_made_again(small: Evaluate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of one task, left by a run killed during writing, are not accepted for those of all tasks."""
    plain = small()
    assert not plain.has_samples
    fsync, calls = os.fsync, []

    def full(handle: int) -> None:
        calls.append(handle)
        # scores, lm_eval/results, the first task's samples
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    with monkeypatch.context() as patch, pytest.raises(RunError, match=r"samples_(arc_easy|piqa)"):
        patch.setattr(os, "fsync", full)
        small(log_samples=True)
    assert len(list(plain.folder.glob("lm_eval/samples_*"))) == 1
    run = small(log_samples=True)
    assert run.has_samples and len(list(run.folder.glob("lm_eval/samples_*"))) == 2


def test_a_window_or_budget_that_is_too_small(small: Evaluate, tmp_path: Path) -> None:
    """Cut documents are counted; a document that does not fit the budget is named with a budget that is enough."""
    run = small(tiny_checkpoint(tmp_path / "narrow", window=160), tasks=("boolq",))
    [boolq] = run.results().tasks
    assert boolq.truncated == (run.scores.groupby("doc_id")["truncated"].max() > 0).sum() > 0
    with pytest.raises(ScoringError, match=r"--token-budget 20 .* \w+ document \d+ ") as error:
        small(token_budget=20)
    assert int(str(error.value).split("give at least ")[1].split(",")[0]) > 20


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_files(tmp_path_factory.mktemp("files"))


def id_of(checkpoint: Path, **options: Any) -> str:
    return str(planned(checkpoint, options, silent).manifest["id"])


def edit(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text("utf-8").replace(old, new), "utf-8")


def test_shipped_suites_and_their_examples() -> None:
    """The paper's, Appendix A.3: three reasoning tasks, five of knowledge."""
    suite = load_suite("zeroshot8")
    assert suite.groups == {
        "Reasoning": ("winogrande", "arc_easy", "arc_challenge"),
        "Knowledge": ("hellaswag", "piqa", "openbookqa", "boolq", "mmlu"),
    }
    assert choose_tasks(suite, ("mmlu", "piqa")).groups == {"Knowledge": ("piqa", "mmlu")}
    assert all(load_suite(name).tasks for name in shipped_suites())
    alone = choose_tasks(load_suite("zeroshot8_text"), ("mmlu_continuation",))
    assert with_fewshot(alone, 5).num_fewshot == 5
    with pytest.raises(UsageError, match=r"--num-fewshot is 6.* mmlu_continuation .* 5 "):
        with_fewshot(alone, 6)
    with pytest.raises(UsageError, match="--suite lm_eval --tasks piqa,boolq --num-fewshot 3"):
        with_fewshot(choose_tasks(suite, ("piqa", "boolq", "mmlu")), 3)


def test_a_suite_of_pinned_tasks_and_of_ones_own(checkpoint: Path, files: Path, tmp_path: Path) -> None:
    run = run_of(checkpoint, tmp_path, files / "documents", suite=str(write_suite(files)))
    assert (run.kind, run.manifest["rule"], run.template) == ("multiple_choice", "ppl", "inst")
    results = run.results()
    by_task = {task.task: task.value for task in results.tasks}
    assert list(by_task) == ["made_choice", "piqa", "made_other"]
    assert [average.name for average in results.averages] == ["Language", "Rest", "Average"]
    assert results.averages[0].value == (by_task["made_choice"] + by_task["piqa"]) / 2
    assert set(run.stored["rules"]) == set(RULES) - {"pmi", "olmes", "olmo_core"}
    # The whole sequence is scored: instruction and end token too
    assert run.scores["ll_instruction"].notna().all() and run.scores["ll_end"].notna().all()


def test_settings_documents_and_examples_are_part_of_the_id(checkpoint: Path, tmp_path: Path) -> None:
    made_tasks(tmp_path / "own")
    path = write_suite(
        tmp_path, **ALONE | {"groups": {"A": ["made_shots"]}}, num_fewshot=2, template="plain", rule="acc_norm"
    )
    plan = planned(checkpoint, {"suite": str(path)}, silent)
    assert (plan.manifest["rule"], plan.template.name) == ("acc_norm", "plain")
    other = planned(checkpoint, {"suite": str(path), "template": "inst", "rule": "ppl", "num_fewshot": 0}, silent)
    assert (other.manifest["rule"], other.template.name) == ("ppl", "inst")
    [two], [none] = plan.questions["made_shots"][:1], other.questions["made_shots"][:1]
    assert two.contexts[0].endswith(none.contexts[0]) and two.contexts[0].count("Question:") == 3
    ids = {plan.manifest["id"], id_of(checkpoint, suite=str(path), num_fewshot=0)}
    for name in ("examples", "made_shots"):
        edit(tmp_path / "own" / f"{name}.jsonl", "the", "a")
        ids.add(id_of(checkpoint, suite=str(path)))
    edit(path, "A:", "Mine:")
    assert len({*ids, id_of(checkpoint, suite=str(path))}) == 5


def test_an_invalid_file(tmp_path: Path) -> None:
    for changes, noun in (({"groups": {"A": []}}, "'groups.A'"), ({"labels": {"pica": "x"}}, "did you mean 'piqa'")):
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump({"groups": {"A": ["piqa"]}} | changes), "utf-8")
        with pytest.raises(UsageError, match=f"{path}.*{noun}"):
            load_suite(str(path))


def test_names_that_are_absent_or_taken(checkpoint: Path, files: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="zeroshot8"):
        load_suite(str(write_suite(tmp_path, "zeroshot8")))
    with pytest.raises(UsageError, match=r"made_last_word.*--suite lm_eval"):
        id_of(checkpoint, tasks=("made_last_word",), include_path=files / "own", template="inst")
    made_tasks(tmp_path / "own")
    edit(tmp_path / "own" / "made_choice.yaml", "task: made_choice", "task: piqa")
    data = {"data_dir": files / "documents", "allow_unofficial_data": True}
    with pytest.raises(UsageError, match=r"task piqa is in .*own"):
        id_of(checkpoint, tasks=("piqa",), include_path=tmp_path / "own", template="inst", **data)


def test_a_document_counts_for_one_task(checkpoint: Path, files: Path) -> None:
    groups = {"A": ["made_pair"], "B": ["made_choice"]}
    plan = planned(checkpoint, {"suite": str(write_suite(files, "shared", **ALONE | {"groups": groups}))}, silent)
    with pytest.raises(UsageError, match=r"made_choice is part of task made_\w+ and of task made_\w+"):
        _ = plan.questions


SHUFFLED = """
import random

def shuffled(dataset):
    return dataset.map(lambda doc: doc | {"gold": random.randrange(len(doc["choices"]))}, load_from_cache_file=False)
"""


def test_what_a_task_draws_is_drawn_alike_each_time(checkpoint: Path, tmp_path: Path) -> None:
    made_tasks(tmp_path / "own")
    (tmp_path / "own" / "code.py").write_text(SHUFFLED, "utf-8")
    task = tmp_path / "own" / "made_choice.yaml"
    task.write_text(task.read_text("utf-8") + "process_docs: !function code.shuffled\n", "utf-8")
    path = write_suite(tmp_path, **ALONE)
    runs = [run_of(checkpoint, tmp_path / name, suite=str(path)) for name in ("first", "second")]
    assert runs[0].manifest["id"] == runs[1].manifest["id"]
    assert runs[0].scores["gold"].equals(runs[1].scores["gold"])


TASKS = ("winogrande", "arc_easy")


def views(run: Run, *tasks: str) -> dict[str, ChoiceView]:
    shown = results_of(run).views(tasks, silent)
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
