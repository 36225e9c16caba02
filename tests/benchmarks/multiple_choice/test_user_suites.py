"""User-defined suites: any multiple-choice tasks, under any template and every rule, in tables and comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from evalkit.benchmarks.multiple_choice.results_report import accuracy_table, rules_table
from evalkit.benchmarks.multiple_choice.suites import load_suite
from evalkit.benchmarks.run import evaluate
from evalkit.errors import UnknownNameError, UsageError
from evalkit.runs.folder import Run
from evalkit.runs.rules import RULES
from tests.benchmarks.lm_eval.made import made_tasks
from tests.benchmarks.multiple_choice.test_evaluation import Lines
from tests.documents import made_up
from tests.printed import printed

TASKS = ("made_choice", "made_other")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    made_tasks(folder / "own")
    made_up(folder / "documents", count=8)
    return folder


def write_suite(files: Path, name: str = "mine", **changes: Any) -> Path:
    content = {
        "description": "mine",
        "groups": {"Language": ["made_choice", "piqa"], "Rest": ["made_other"]},
        "labels": {"made_choice": "My choice"},
        "short": {"made_choice": "Mine"},
        "task_files": "own",
    } | changes
    path = files / f"{name}.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}), "utf-8")
    return path


def run_of(checkpoint: Path, files: Path, output: Path, **options: Any) -> Run:
    common = {"output": output, "dtype": "float32", "progress": Lines()}
    return evaluate(str(checkpoint), **(common | options))


def test_a_suite_of_pinned_tasks_and_of_ones_own(checkpoint: Path, files: Path, tmp_path: Path) -> None:
    data = {"data_dir": files / "documents", "allow_unofficial_data": True}
    run = run_of(checkpoint, files, tmp_path, suite=str(write_suite(files)), **data)
    assert run.kind == "multiple_choice"
    assert (run.manifest["rule"], run.template) == ("ppl", "inst")
    results = run.results()
    by_task = {task.task: task for task in results.tasks}
    assert [task.task for task in results.tasks] == ["made_choice", "piqa", "made_other"]
    assert [average.name for average in results.averages] == ["Language", "Rest", "Average"]
    assert results.averages[0].accuracy == (by_task["made_choice"].accuracy + by_task["piqa"].accuracy) / 2
    assert set(run.stored["rules"]) == set(RULES) - {"pmi"}
    table = printed(accuracy_table(results, run.manifest, run.seconds))
    assert "My choice" in table and "PIQA*" in table and "made_other" in table
    assert "Mine" in printed(rules_table(run.scores, run.manifest, "ppl"))
    # The whole sequence is scored: instruction and end token too
    assert run.scores["ll_instruction"].notna().all() and run.scores["ll_end"].notna().all()


@pytest.mark.parametrize("task", TASKS)
def test_under_plain_the_numbers_are_those_of_lm_evals_run(
    checkpoint: Path, files: Path, tmp_path: Path, task: str
) -> None:
    """lm-eval's own prompts and metrics, and evalkit's template that writes the same prompts."""
    asked: dict[str, Any] = {"tasks": (task,), "include_path": files / "own"}
    theirs = run_of(checkpoint, files, tmp_path / "theirs", **asked)
    ours = run_of(checkpoint, files, tmp_path / "ours", **asked, template="plain", rule="acc")
    assert (theirs.kind, ours.kind) == ("lm_eval", "multiple_choice")
    columns = ["doc_id", "choice", "gold", "choices", "n_continuation", "chars"]
    assert ours.scores[columns].equals(theirs.scores[columns])
    difference = ours.scores["ll_continuation"] - theirs.scores["ll_continuation"]
    assert np.abs(difference / theirs.scores["ll_continuation"]).max() < 1e-5
    for rule, metric in (("acc", "acc"), ("acc_norm", "acc_norm")):
        [found] = ours.results(rule).tasks
        [entry] = theirs.stored["tasks"]
        [value] = [one["value"] for one in entry["metrics"] if one["metric"] == metric]
        assert found.accuracy == pytest.approx(value)


def test_a_group_of_lm_evals_is_one_task(checkpoint: Path, files: Path, tmp_path: Path) -> None:
    run = run_of(
        checkpoint, files, tmp_path, tasks=("made_pair",), include_path=files / "own", template="inst", rule="ppl"
    )
    results = run.results()
    assert [task.task for task in results.tasks] == ["made_pair"]
    assert {part.task for part in results.subtasks["made_pair"]} == set(TASKS)
    assert run.manifest["documents"]["made_pair"]["count"] == results.tasks[0].n == 15


def test_what_a_suite_says_and_what_wins(checkpoint: Path, files: Path, tmp_path: Path) -> None:
    groups = {"Average": ["made_choice"]}
    path = write_suite(files, "settings", groups=groups, labels=None, short=None, template="plain", rule="acc_norm")
    run = run_of(checkpoint, files, tmp_path, suite=str(path))
    assert (run.manifest["rule"], run.template) == ("acc_norm", "plain")
    other = run_of(checkpoint, files, tmp_path, suite=str(path), template="inst", rule="ppl")
    assert (other.manifest["rule"], other.template) == ("ppl", "inst")
    # Its groups are part of the run's id
    write_suite(files, "settings", groups={"Mine": ["made_choice"]}, labels=None, short=None, template="plain")
    again = run_of(checkpoint, files, tmp_path, suite=str(path), rule="acc_norm")
    assert again.manifest["id"] != run.manifest["id"]
    assert again.results().averages[0].name == "Mine"


def test_changed_documents_are_another_run(checkpoint: Path, tmp_path: Path) -> None:
    made_tasks(tmp_path / "own")
    path = write_suite(tmp_path, groups={"Average": ["made_choice"]}, labels=None, short=None)
    first = run_of(checkpoint, tmp_path, tmp_path / "runs", suite=str(path))
    data = tmp_path / "own" / "made_choice.jsonl"
    data.write_text(data.read_text("utf-8").replace("the", "a"), "utf-8")
    second = run_of(checkpoint, tmp_path, tmp_path / "runs", suite=str(path))
    assert first.manifest["id"] != second.manifest["id"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"groups": {}}, "'groups' is "),
        ({"groups": {"A": []}}, "'groups.A' is "),
        ({"groups": {"A": ["piqa"], "B": ["piqa"]}}, "task piqa is in the groups twice"),
        ({"groups": {}, "group": {"A": ["piqa"]}}, "unknown key 'group': did you mean 'groups'"),
        ({"groups": {"A": "piqa"}}, "'groups.A' is "),
        ({"fewshot": {"piqa": {"documents": "x", "least": 3}}}, "'fewshot.piqa': unknown key 'least'"),
        ({"task_files": 3}, "'task_files' is "),
        ({"groups": ["piqa"]}, "'groups' is "),
        ({"groups": {"A": ["piqa", 3]}}, "'groups.A\\[1\\]' is "),
        ({"group": {"A": ["piqa"]}}, "unknown key 'group': did you mean 'groups'"),
        ({"labels": {"pica": "x"}}, "unknown task 'pica': did you mean 'piqa'"),
        ({"num_fewshot": -3}, "'num_fewshot' is "),
        ({"num_fewshot": "2"}, "'num_fewshot' is "),
        ({"fewshot": {"piqa": {"documents": "x", "most": 3}}}, "are for evalkit's own suites"),
    ],
)
def test_an_invalid_file(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"groups": {"A": ["piqa"]}} | changes), "utf-8")
    with pytest.raises((UsageError, UnknownNameError), match=words) as caught:
        load_suite(str(path))
    assert str(path) in str(caught.value)


def test_a_suite_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"suite .*nowhere.yaml cannot be read: No such file"):
        load_suite(str(tmp_path / "nowhere.yaml"))


def test_what_has_no_choices_is_refused(checkpoint: Path, files: Path, tmp_path: Path) -> None:
    asked = {"include_path": files / "own", "template": "inst"}
    with pytest.raises(UsageError, match=r"task made_last_word: its output type is loglikelihood, .*--suite lm_eval"):
        run_of(checkpoint, files, tmp_path, tasks=("made_last_word",), **asked)
    with pytest.raises(UnknownNameError, match="unknown task 'made_choise': did you mean 'made_choice'"):
        run_of(checkpoint, files, tmp_path, tasks=("made_choise",), **asked)


def test_a_document_counts_for_one_task(checkpoint: Path, files: Path, tmp_path: Path) -> None:
    for groups in ({"A": ["made_pair"], "B": ["made_choice"]}, {"A": ["made_choice", "made_pair"]}):
        path = write_suite(files, "shared", groups=groups, labels=None, short=None)
        with pytest.raises(UsageError, match=r"made_choice is part of task made_\w+ and of task made_\w+"):
            run_of(checkpoint, files, tmp_path, suite=str(path))
    assert not list(tmp_path.glob("*/journal.jsonl"))


def test_examples_are_part_of_what_a_run_is(checkpoint: Path, tmp_path: Path) -> None:
    made_tasks(tmp_path / "own")
    path = write_suite(tmp_path, groups={"A": ["made_shots"]}, labels=None, short=None, num_fewshot=2)
    first = run_of(checkpoint, tmp_path, tmp_path / "runs", suite=str(path))
    zero = run_of(checkpoint, tmp_path, tmp_path / "runs", suite=str(path), num_fewshot=0)
    assert first.scores["n_context"].sum() > zero.scores["n_context"].sum()
    examples = tmp_path / "own" / "examples.jsonl"
    examples.write_text(examples.read_text("utf-8").replace("the", "a"), "utf-8")
    second = run_of(checkpoint, tmp_path, tmp_path / "runs", suite=str(path))
    assert len({first.manifest["id"], second.manifest["id"], zero.manifest["id"]}) == 3


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
    path = write_suite(tmp_path, groups={"A": ["made_choice"]}, labels=None, short=None)
    runs = [run_of(checkpoint, tmp_path, tmp_path / name, suite=str(path)) for name in ("one", "two")]
    assert runs[0].manifest["id"] == runs[1].manifest["id"]
    assert runs[0].scores["gold"].equals(runs[1].scores["gold"])


def test_names_that_are_taken(checkpoint: Path, files: Path, tmp_path: Path) -> None:
    write_suite(tmp_path, "zeroshot8")
    with pytest.raises(UsageError, match="'zeroshot8' is the name of another suite"):
        load_suite(str(tmp_path / "zeroshot8.yaml"))
    made_tasks(tmp_path / "own")
    task = tmp_path / "own" / "made_choice.yaml"
    task.write_text(task.read_text("utf-8").replace("task: made_choice", "task: piqa"), "utf-8")
    asked = {"tasks": ("piqa",), "include_path": tmp_path / "own", "template": "inst"}
    data = {"data_dir": files / "documents", "allow_unofficial_data": True}
    with pytest.raises(UsageError, match=r"task piqa is in .*own and among evalkit's own tasks"):
        run_of(checkpoint, files, tmp_path / "runs", **asked, **data)


def test_mutual_information_adds_no_choices(checkpoint: Path, tmp_path: Path) -> None:
    """lm-eval appends the choices without their context to a document's requests."""
    made_tasks(tmp_path / "own")
    for name in ("made_choice", "made_other"):
        task = tmp_path / "own" / f"{name}.yaml"
        task.write_text(task.read_text("utf-8").replace("metric: acc_norm", "metric: acc_mutual_info"), "utf-8")
    asked = {"tasks": ("made_other",), "include_path": tmp_path / "own"}
    ours = run_of(checkpoint, tmp_path, tmp_path / "ours", **asked, template="plain", rule="acc")
    theirs = run_of(checkpoint, tmp_path, tmp_path / "theirs", **asked)
    assert ours.scores["choices"].equals(theirs.scores["choices"])
    assert len(ours.scores) == len(theirs.scores)
