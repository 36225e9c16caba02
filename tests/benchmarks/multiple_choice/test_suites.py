"""Suites: the paper's, and a user's of any multiple-choice tasks under any template and rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from evalkit.benchmarks.multiple_choice.suites import choose_tasks, load_suite, shipped_suites, with_fewshot
from evalkit.benchmarks.run import planned
from evalkit.errors import UsageError
from evalkit.models.loading.locate import silent
from evalkit.runs.rules import RULES
from tests.benchmarks.lm_eval.made import made_tasks
from tests.benchmarks.multiple_choice.made import ALONE, made_files, run_of, write_suite


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See `made_files`. Do not modify."""
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
    by_task = {task.task: task.accuracy for task in results.tasks}
    assert list(by_task) == ["made_choice", "piqa", "made_other"]
    assert [average.name for average in results.averages] == ["Language", "Rest", "Average"]
    assert results.averages[0].accuracy == (by_task["made_choice"] + by_task["piqa"]) / 2
    assert set(run.stored["rules"]) == set(RULES) - {"pmi"}
    # The whole sequence is scored: instruction and end token too
    assert run.scores["ll_instruction"].notna().all() and run.scores["ll_end"].notna().all()


def test_under_plain_the_numbers_are_those_of_lm_evals_run(checkpoint: Path, tmp_path: Path) -> None:
    """lm-eval's own prompts and metrics, and evalkit's template that writes the same prompts.

    For mutual information lm-eval appends the choices without their context to a document's requests.
    """
    made_tasks(tmp_path / "own")
    edit(tmp_path / "own" / "made_choice.yaml", "metric: acc_norm", "metric: acc_mutual_info")
    options: dict[str, Any] = {"tasks": ("made_choice", "made_other"), "include_path": tmp_path / "own"}
    theirs = run_of(checkpoint, tmp_path / "theirs", **options)
    ours = run_of(checkpoint, tmp_path / "ours", **options, template="plain", rule="acc")
    assert (theirs.kind, ours.kind) == ("lm_eval", "multiple_choice")
    columns = ["task", "doc_id", "choice", "gold", "choices", "n_continuation", "chars"]
    assert ours.scores[columns].equals(theirs.scores[columns])
    difference = ours.scores["ll_continuation"] - theirs.scores["ll_continuation"]
    assert np.abs(difference / theirs.scores["ll_continuation"]).max() < 1e-5
    for number, entry in enumerate(theirs.stored["tasks"]):
        for metric in entry["metrics"]:
            if metric["metric"] in ("acc", "acc_norm"):
                assert ours.results(metric["metric"]).tasks[number].accuracy == pytest.approx(metric["value"])


def test_a_group_of_lm_evals_is_one_task(checkpoint: Path, files: Path, tmp_path: Path) -> None:
    options = {"include_path": files / "own", "template": "inst", "rule": "ppl"}
    run = run_of(checkpoint, tmp_path, tasks=("made_pair",), **options)
    [result] = run.results().tasks
    assert {part.task for part in run.results().subtasks["made_pair"]} == {"made_choice", "made_other"}
    assert run.manifest["documents"]["made_pair"]["count"] == result.n == 15


def test_settings_documents_and_examples_are_part_of_the_id(checkpoint: Path, tmp_path: Path) -> None:
    """Options override a suite's settings."""
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
    for tasks, noun in ((("made_last_word",), "made_last_word.*--suite lm_eval"), (("made_choise",), "made_choice")):
        with pytest.raises(UsageError, match=noun):
            id_of(checkpoint, tasks=tasks, include_path=files / "own", template="inst")
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
