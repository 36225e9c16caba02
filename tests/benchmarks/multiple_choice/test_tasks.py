"""Questions on real documents, compared with lm-eval's own task files given the raw documents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from evalkit.benchmarks.multiple_choice.suites import TASK_DIR, Suite, choose_tasks, load_suite
from evalkit.benchmarks.multiple_choice.tasks import Question, load_questions
from evalkit.data import Library
from evalkit.data.sampling import FirstDocuments
from evalkit.data.schema import SUBJECTS
from evalkit.errors import DataError
from evalkit.paths import resource
from tests.documents import COUNTS

BUILT_IN = {
    "winogrande": "winogrande/default.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "piqa": "piqa/piqa.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "boolq": "super_glue/boolq/default.yaml",
}
LIMIT = 200


def lm_eval_folder() -> Path:
    import lm_eval

    return Path(lm_eval.__file__).parent / "tasks"


def built_in(file: str, documents: list[dict[str, Any]]) -> Any:
    """lm-eval's own task, only the place of its documents changed."""
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    config = load_yaml(lm_eval_folder() / file, resolve_func=True)
    split = config.get("test_split") or config["validation_split"]
    for key in ("tag", "training_split", "fewshot_split", "fewshot_config", "dataset_name"):
        config.pop(key, None)
    kept = {key: split for key in ("validation_split", "test_split") if key in config}
    config |= kept | {"custom_dataset": lambda **_: {split: Dataset.from_list(documents)}, "dataset_kwargs": {}}
    return ConfigurableTask(config=config)


def raw(folder: Path, task: str) -> Iterator[dict[str, Any]]:
    with (folder / f"{task}.jsonl").open(encoding="utf-8") as lines:
        for document in map(json.loads, lines):
            yield _in_superglue(document) if task == "boolq" else document


def _in_superglue(document: dict[str, Any]) -> dict[str, Any]:
    """lm-eval reads BoolQ from SuperGLUE, which writes the title into the passage; the file has the original's form."""
    passage = f"{document['title']} -- {document['passage']}"
    return {"question": document["question"], "passage": passage, "label": int(document["answer"])}


def agree(question: Question, leaf: Any, doc_id: int, doc: dict[str, Any]) -> None:
    context = leaf.fewshot_context(doc, num_fewshot=0)
    requests = leaf.construct_requests(doc=doc, ctx=context, metadata=(leaf.config.task, doc_id, 1))
    pairs = zip(question.contexts, question.continuations, strict=True)
    assert [(c, question.delimiter + d) for c, d in pairs] == [request.args for request in requests]
    if leaf.multiple_input:
        assert question.gold == leaf.doc_to_text(doc)
    else:
        assert question.gold == leaf.doc_to_target(doc)
        assert list(question.choices) == leaf.doc_to_choice(doc)
    assert question.doc_id == doc_id


@cache
def suite_of(*tasks: str) -> Suite:
    return choose_tasks(load_suite("zeroshot8"), tasks)


@pytest.fixture(scope="module")
def complete(shared_data: Path) -> Path:
    """All official documents."""
    return shared_data / "zeroshot8"


@pytest.mark.parametrize("task", BUILT_IN)
def test_questions_are_lm_evals(real_documents: Path, task: str) -> None:
    compare_questions(real_documents, task)


@pytest.mark.slow
@pytest.mark.parametrize("task", BUILT_IN)
def test_questions_on_the_complete_data_are_lm_evals(complete: Path, task: str) -> None:
    assert compare_questions(complete, task) == LIMIT


def compare_questions(folder: Path, task: str) -> int:
    """Compare the first questions with lm-eval's; return their number."""
    questions = load_questions(suite_of(task), Library(folder, allow_unofficial=True), FirstDocuments(LIMIT))[task]
    leaf = built_in(BUILT_IN[task], list(raw(folder, task))[:LIMIT])
    # `eval_docs` prepares all documents again on each access
    for doc_id, (question, doc) in enumerate(zip(questions, leaf.eval_docs, strict=True)):
        agree(question, leaf, doc_id, doc)
        assert (question.task, question.subtask) == (task, task)
    return len(questions)


def test_mmlu_questions_are_lm_evals(real_documents: Path) -> None:
    """Two documents of each of the 57 subjects, in lm-eval's order of subjects."""
    questions = load_questions(suite_of("mmlu"), Library(real_documents, allow_unofficial=True))["mmlu"]
    documents: dict[str, list[dict[str, Any]]] = {}
    for document in raw(real_documents, "mmlu"):
        documents.setdefault(document["subject"], []).append(document)
    remaining = iter(questions)
    for subject in SUBJECTS:
        leaf = built_in(f"mmlu/default/mmlu_{subject}.yaml", documents[subject])
        for doc_id, doc in enumerate(leaf.eval_docs):
            question = next(remaining)
            assert question.subtask == f"mmlu_{subject}"
            agree(question, leaf, doc_id, doc)
    assert next(remaining, None) is None


def test_the_57_subjects_are_lm_evals() -> None:
    theirs = sorted((lm_eval_folder() / "mmlu" / "default").glob("mmlu_*.yaml"))
    ours = resource(*TASK_DIR) / "mmlu"
    assert [path.stem for path in theirs] == sorted(f"mmlu_{subject}" for subject in SUBJECTS)
    assert len(theirs) == 57
    for path in theirs:
        own, their = (_plain(file) for file in (ours / path.name, path))
        assert own["description"] == their["description"]
        assert own["task"] == their["task"]
        assert own["dataset_kwargs"]["subject"] == their["dataset_name"]
    assert yaml.safe_load((ours / "mmlu.yaml").read_text())["task"] == [f"mmlu_{subject}" for subject in SUBJECTS]


def _plain(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content


def test_winogrande_keeps_the_sentences_own_spacing(real_documents: Path) -> None:
    assert compare_spacing(real_documents) == 10


def test_all_of_winogrande_keeps_the_sentences_own_spacing(complete: Path) -> None:
    assert compare_spacing(complete) == COUNTS["winogrande"]


def compare_spacing(folder: Path) -> int:
    """Compare context, gap and continuation with the sentence with its option; return the number of questions."""
    questions = load_questions(suite_of("winogrande"), Library(folder, allow_unofficial=True))["winogrande"]
    for question in questions:
        for choice, option in enumerate((question.doc["option1"], question.doc["option2"])):
            whole = question.contexts[choice] + question.gaps[choice] + question.continuations[choice]
            assert whole == question.doc["sentence"].replace("_", option, 1).rstrip()
    return len(questions)


@pytest.mark.parametrize(("rest", "gap"), [("'s coat.", ""), (" coat.", " "), ("  coat. ", "  "), (".", "")])
def test_winogrande_where_the_sentence_runs_on(tmp_path: Path, rest: str, gap: str) -> None:
    """lm-eval's own request has a space there in any case."""
    document = {"sentence": f"Ann gave Eve _{rest}", "option1": "Ann", "option2": "Eve", "answer": "2"}
    (question,) = load_questions(suite_of("winogrande"), own_library(tmp_path, "winogrande", [document]))["winogrande"]
    assert question.contexts == ("Ann gave Eve Ann", "Ann gave Eve Eve")
    assert question.continuations == (rest.strip(),) * 2
    assert question.gaps == (gap, gap)
    assert (question.delimiter, question.gold) == (" ", 1)


def test_arc_has_three_and_five_choices(real_documents: Path) -> None:
    library = Library(real_documents, allow_unofficial=True)
    counts = {len(q.choices) for q in load_questions(suite_of("arc_easy"), library)["arc_easy"]}
    assert counts == {3, 4, 5}


def own_library(folder: Path, task: str, documents: list[dict[str, Any]]) -> Library:
    lines = "".join(json.dumps(document) + "\n" for document in documents)
    (folder / f"{task}.jsonl").write_text(lines, encoding="utf-8")
    return Library(folder, allow_unofficial=True)


def test_a_users_own_documents(tmp_path: Path) -> None:
    documents = [{"goal": "Cool soup", "sol1": "Blow on it.", "sol2": "Boil it.", "label": 0}]
    (question,) = load_questions(suite_of("piqa"), own_library(tmp_path, "piqa", documents))["piqa"]
    assert question.contexts == ("Question: Cool soup\nAnswer:",) * 2
    assert question.continuations == question.choices == ("Blow on it.", "Boil it.")
    assert (question.gold, question.gaps, question.label) == (0, (" ", " "), "piqa document 0")


@pytest.mark.parametrize("label", [2, -1, "first"])
def test_a_wrong_gold_answer_names_task_and_document(tmp_path: Path, label: object) -> None:
    documents = [{"goal": "Cool soup", "sol1": "Blow on it.", "sol2": "Boil it.", "label": label}]
    with pytest.raises(DataError, match="piqa"):
        load_questions(suite_of("piqa"), own_library(tmp_path, "piqa", documents))


def test_lm_eval_is_left_as_it_was(tmp_path: Path) -> None:
    import logging

    import lm_eval.utils

    before = logging.getLogger("lm_eval").level, lm_eval.utils.env.from_string
    test_a_users_own_documents(tmp_path)
    assert before == (logging.getLogger("lm_eval").level, lm_eval.utils.env.from_string)
