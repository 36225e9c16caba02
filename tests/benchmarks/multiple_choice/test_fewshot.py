"""Few-shot examples, compared with lm-eval's own run of its own task files on the same documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evalkit.benchmarks.multiple_choice.suites import Suite, choose_tasks, load_suite, with_fewshot
from evalkit.benchmarks.multiple_choice.tasks import Question, load_questions
from evalkit.benchmarks.run import evaluate
from evalkit.data import Documents, Library
from evalkit.data.sampling import DocumentSample
from evalkit.display import Progress
from evalkit.errors import DataError
from tests.benchmarks.multiple_choice.test_tasks import lm_eval_folder
from tests.data.samples import sample, write
from tests.documents import SUBJECTS
from tests.marks import fast

SUITES = {"mmlu": "zeroshot8", "mmlu_continuation": "zeroshot8_text"}
FILES = {"mmlu": "mmlu/default/mmlu_{}.yaml", "mmlu_continuation": "mmlu/continuation/mmlu_{}.yaml"}


def suite_of(task: str, shots: int) -> Suite:
    return with_fewshot(choose_tasks(load_suite(SUITES[task]), (task,)), shots)


def own_documents(folder: Path, examples: int) -> Library:
    """A question of every subject, with so many examples of each."""
    write(folder, "mmlu", *(sample("mmlu", subject=name) for name in SUBJECTS))
    places = [(name, place) for name in SUBJECTS for place in range(examples)]
    shown = (sample("mmlu_dev", subject=name, question=f" Is it {place}? ", answer=place) for name, place in places)
    write(folder, "mmlu_dev", *shown)
    return Library(folder, allow_unofficial=True)


def lm_evals_own(folder: Path, task: str, shots: int, limit: int) -> dict[str, list[dict[str, Any]]]:
    """Return lm-eval's logs of each leaf of its own task files, with the path of their documents changed."""
    from datasets import Dataset
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    def by_subject(name: str) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = {}
        for line in filter(None, (folder / f"{name}.jsonl").read_text(encoding="utf-8").split("\n")):
            found.setdefault((document := json.loads(line))["subject"], []).append(document)
        return found

    class Indifferent(LM):  # type: ignore[misc]
        """A model with constant log-likelihoods; lm-eval's own dummy requests a tokenizer from the hub."""

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            return [(0.0, False) for _ in requests]

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            raise NotImplementedError

        def generate_until(self, requests: list[Any]) -> list[str]:
            raise NotImplementedError

    tests, examples = by_subject("mmlu"), by_subject("mmlu_dev")
    leaves = []
    for subject in SUBJECTS:
        leaf = load_yaml(lm_eval_folder() / FILES[task].format(subject), resolve_func=True)
        documents = {"test": Dataset.from_list(tests[subject]), "dev": Dataset.from_list(examples[subject])}
        del leaf["dataset_path"], leaf["dataset_name"]
        leaf.pop("tag", None)
        leaves.append(leaf | {"custom_dataset": lambda documents=documents, **_: documents})
    found = simple_evaluate(
        Indifferent(),
        tasks=leaves,
        num_fewshot=shots,
        limit=limit,
        bootstrap_iters=0,
        task_manager=TaskManager(include_defaults=False),
    )
    samples: dict[str, list[dict[str, Any]]] = found["samples"]
    return samples


def agree(questions: list[Question], logged: dict[str, list[dict[str, Any]]], limit: int) -> None:
    assert [(q.subtask, q.doc_id) for q in questions] == [(leaf, i) for leaf in logged for i in range(limit)]
    for question in questions:
        sample = next(s for s in logged[question.subtask] if s["doc_id"] == question.doc_id)
        pairs = zip(question.contexts, question.continuations, strict=True)
        assert [(c, question.delimiter + d) for c, d in pairs] == [tuple(pair) for pair in sample["arguments"]]
        assert str(question.gold) == str(sample["target"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize(
    ("task", "shots"),
    [("mmlu", 5), *(pytest.param(*one, marks=pytest.mark.slow) for one in [("mmlu", 2), ("mmlu_continuation", 5)])],
)
def test_questions_are_those_of_lm_evals_own_run(real_documents: Path, task: str, shots: int) -> None:
    """Two documents of each of the 57 subjects."""
    questions = load_questions(suite_of(task, shots), Library(real_documents, allow_unofficial=True))[task]
    agree(questions, lm_evals_own(real_documents, task, shots, limit=2), limit=2)


def test_text_before_a_question(tmp_path: Path) -> None:
    """Written out by hand: the subject's line, its first examples with their answers, the question."""
    library = own_documents(tmp_path, 4)
    letter = load_questions(suite_of("mmlu", 2), library)["mmlu"][-2]
    options = "A. none\nB. one\nC. two\nD. three\nAnswer:"
    assert (
        letter.contexts
        == (
            "The following are multiple choice questions (with answers) about virology.\n\n"
            f"Is it 0?\n{options} A\n\nIs it 1?\n{options} B\n\nHow many?\nA. one\nB. two\nC. three\nD. four\nAnswer:",
        )
        * 4
    )
    text = load_questions(suite_of("mmlu_continuation", 2), library)["mmlu_continuation"][-2]
    assert (
        text.contexts
        == (
            "The following are questions (with answers) about virology.\n\n"
            "Question: Is it 0?\nAnswer: none\n\nQuestion: Is it 1?\nAnswer: one\n\nQuestion: How many?\nAnswer:",
        )
        * 4
    )
    assert text.continuations == ("one", "two", "three", "four")


def test_a_document_of_a_sample_has_the_examples_of_the_whole_run(tmp_path: Path) -> None:
    """lm-eval draws examples one document after the other, so those of a later one depend on the draws before it."""
    suite = suite_of("mmlu", 2)
    write(tmp_path, "mmlu", *(sample("mmlu", subject=name, question=f"{n}?") for name in SUBJECTS for n in range(4)))
    places = [(name, place) for name in SUBJECTS for place in range(5)]
    shown = (sample("mmlu_dev", subject=name, question=f" Is it {place}? ", answer=place % 4) for name, place in places)
    write(tmp_path, "mmlu_dev", *shown)
    documents = Library(tmp_path, allow_unofficial=True)
    whole = {(one.subtask, one.doc_id): one for one in load_questions(suite, documents)["mmlu"]}
    chosen = load_questions(suite, documents, DocumentSample(70, 3))["mmlu"]
    assert len(chosen) == 70
    assert [whole[one.subtask, one.doc_id] for one in chosen] == chosen


class Watched(Library):
    """A library that records what was loaded from it."""

    asked: tuple[str, ...] = ()

    def load(self, task: str) -> Documents:
        self.asked = (*self.asked, task)
        return super().load(task)


@pytest.mark.parametrize(("shots", "loaded"), [(0, {"mmlu"}), (1, {"mmlu", "mmlu_dev"})])
def test_examples_are_loaded_only_for_few_shot_runs(tmp_path: Path, shots: int, loaded: set[str]) -> None:
    own_documents(tmp_path, 1)
    library = Watched(tmp_path, allow_unofficial=True)
    assert load_questions(suite_of("mmlu", shots), library)["mmlu"]
    assert set(library.asked) == loaded


def test_too_few_examples_of_a_subject_are_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="mmlu_abstract_algebra: expected at least 5 few-shot examples, found 4"):
        load_questions(suite_of("mmlu", 5), own_documents(tmp_path, 4))


@pytest.mark.parametrize("here", [True, False])
def test_lm_evals_command_line_has_the_examples_that_are_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: bool
) -> None:
    """lm-eval does not pass --num_fewshot to a data set, so nothing is fetched on a guess."""
    from evalkit.data.lm_eval_dataset import dataset

    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    library = own_documents(tmp_path, 3)
    if not here:
        (tmp_path / "mmlu_dev.jsonl").unlink()
    splits = dataset("mmlu", "test", "virology", library, examples="mmlu_dev")
    assert (len(splits["test"]), len(splits["dev"])) == (1, 3 if here else 0)


@pytest.fixture
def asked(checkpoint: Path, tmp_path: Path) -> dict[str, Any]:
    """Options of a run on made-up documents with four examples of each subject."""
    (tmp_path / "data").mkdir()
    own_documents(tmp_path / "data", 4)
    return {
        "tasks": "mmlu",
        "data_dir": tmp_path / "data",
        "allow_unofficial_data": True,
        "limit": 3,
        "output": tmp_path / "runs",
        "model": str(checkpoint),
        "progress": Progress(live=False),
    }


@pytest.mark.parametrize("template", fast(["inst"], ["plain", "inst"]))
def test_examples_are_part_of_what_a_run_is(asked: dict[str, Any], tmp_path: Path, template: str) -> None:
    none, two = (evaluate(template=template, num_fewshot=shots, **asked) for shots in (0, 2))
    assert evaluate(template=template, **asked).folder == none.folder != two.folder
    assert "examples" not in none.manifest["specification"]
    assert none.manifest["specification"]["num_fewshot"] == 0
    assert two.manifest["specification"]["num_fewshot"] == 2
    [example] = two.manifest["examples"].values()
    assert (example["count"], example["official"]) == (4 * len(SUBJECTS), False)
    assert not two.scores["ll_continuation"].equals(none.scores["ll_continuation"])
    own_documents(tmp_path / "data", 3)
    assert evaluate(template=template, num_fewshot=2, **asked).folder != two.folder
    assert evaluate(template=template, **asked).folder == none.folder
