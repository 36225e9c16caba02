"""Questions, compared with lm-eval's own task files on the same raw documents; and in evalkit's cache."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lm_eval
import lm_eval.utils
import pytest
import yaml

from evalkit.benchmarks.multiple_choice import tasks
from evalkit.benchmarks.multiple_choice.suites import TASK_DIR, Suite, choose_tasks, load_suite, with_fewshot
from evalkit.benchmarks.multiple_choice.tasks import Question, load_questions, pinned_questions
from evalkit.benchmarks.run import planned
from evalkit.data import Library
from evalkit.data.sampling import ALL_DOCUMENTS, DocumentSample, FirstDocuments
from evalkit.data.schema import SUBJECTS
from evalkit.errors import DataError
from evalkit.models.loading.locate import silent
from evalkit.paths import resource
from tests.data.samples import sample, write
from tests.documents import COUNTS
from tests.marks import fast

FOLDER = Path(lm_eval.__file__).parent / "tasks"
BUILT_IN = {
    "winogrande": "winogrande/default.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "piqa": "piqa/piqa.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "boolq": "super_glue/boolq/default.yaml",
}
"""lm-eval's task files."""
OF_SUBJECTS = {"mmlu": "mmlu/default/mmlu_{}.yaml", "mmlu_continuation": "mmlu/continuation/mmlu_{}.yaml"}
LIMIT = 200


def suite_of(*names: str, shots: int = 0) -> Suite:
    suite = "zeroshot8_text" if "mmlu_continuation" in names else "zeroshot8"
    return with_fewshot(choose_tasks(load_suite(suite), names), shots)


def questions_of(folder: Path, task: str, *selection: Any, shots: int = 0) -> list[Question]:
    return load_questions(suite_of(task, shots=shots), library(folder), *selection)[task]


def library(folder: Path) -> Library:
    return Library(folder, allow_unofficial=True)


def raw(folder: Path, task: str) -> Iterator[dict[str, Any]]:
    with (folder / f"{task}.jsonl").open(encoding="utf-8") as lines:
        for document in map(json.loads, lines):
            if task == "boolq":  # lm-eval reads it from SuperGLUE, which writes the title into the passage
                passage = f"{document['title']} -- {document['passage']}"
                document = {"question": document["question"], "passage": passage, "label": int(document["answer"])}
            yield document


def by_subject(folder: Path, task: str) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for document in raw(folder, task):
        found.setdefault(document["subject"], []).append(document)
    return found


def lm_evals_config(file: str, **splits: list[dict[str, Any]]) -> dict[str, Any]:
    """lm-eval's own task file, only the place of its documents changed."""
    from datasets import Dataset
    from lm_eval.tasks._yaml_loader import load_yaml

    config: dict[str, Any] = load_yaml(FOLDER / file, resolve_func=True)
    split = config.get("test_split") or config["validation_split"]
    removed = ["tag", "dataset_name", "dataset_path"]
    if "dev" not in splits:
        removed += ["training_split", "fewshot_split", "fewshot_config"]
        config |= {key: split for key in ("validation_split", "test_split") if key in config}
    documents = {split if name == "test" else name: Dataset.from_list(rows) for name, rows in splits.items()}
    kept = {key: value for key, value in config.items() if key not in removed}
    return kept | {"custom_dataset": lambda **_: documents, "dataset_kwargs": {}}


def compare(questions: list[Question], file: str, documents: list[dict[str, Any]]) -> None:
    """Compare requests, gold answers and choices with lm-eval's."""
    from lm_eval.api.task import ConfigurableTask

    leaf = ConfigurableTask(config=lm_evals_config(file, test=documents))
    # `eval_docs` prepares all documents again on each access
    for doc_id, (question, doc) in enumerate(zip(questions, leaf.eval_docs, strict=True)):
        context = leaf.fewshot_context(doc, num_fewshot=0)
        requests = leaf.construct_requests(doc=doc, ctx=context, metadata=(leaf.config.task, doc_id, 1))
        assert requests_of(question) == [request.args for request in requests]
        if leaf.multiple_input:
            assert question.gold == leaf.doc_to_text(doc)
        else:
            assert question.gold == leaf.doc_to_target(doc)
            assert list(question.choices) == leaf.doc_to_choice(doc)
        assert question.doc_id == doc_id


def requests_of(question: Question) -> list[tuple[str, str]]:
    pairs = zip(question.contexts, question.continuations, strict=True)
    return [(context, question.delimiter + continuation) for context, continuation in pairs]


@pytest.fixture(params=fast(["a few"], ["a few", "complete"]), scope="module")
def folder(request: pytest.FixtureRequest) -> Path:
    """A few official documents, or all."""
    if request.param == "a few":
        return Path(request.getfixturevalue("real_documents"))
    return Path(request.getfixturevalue("shared_data")) / "zeroshot8"


@pytest.mark.parametrize("task", BUILT_IN)
def test_questions_are_lm_evals(folder: Path, task: str) -> None:
    questions = questions_of(folder, task, FirstDocuments(LIMIT))
    compare(questions, BUILT_IN[task], list(raw(folder, task))[:LIMIT])
    assert {(question.task, question.subtask) for question in questions} == {(task, task)}
    if task == "arc_easy":
        assert {len(question.choices) for question in questions} == {3, 4, 5}


def test_mmlu_questions_are_lm_evals(real_documents: Path) -> None:
    """Two documents of each of the 57 subjects, in lm-eval's order of subjects."""
    questions, documents = questions_of(real_documents, "mmlu"), by_subject(real_documents, "mmlu")
    assert list(dict.fromkeys(question.subtask for question in questions)) == [f"mmlu_{name}" for name in SUBJECTS]
    for subject in SUBJECTS:
        members = [question for question in questions if question.subtask == f"mmlu_{subject}"]
        compare(members, OF_SUBJECTS["mmlu"].format(subject), documents[subject])


def test_the_57_subjects_are_lm_evals() -> None:
    theirs = sorted((FOLDER / "mmlu" / "default").glob("mmlu_*.yaml"))
    assert [path.stem for path in theirs] == sorted(f"mmlu_{subject}" for subject in SUBJECTS)
    assert len(theirs) == 57
    for path in theirs:
        own, their = (yaml.safe_load(file.read_text()) for file in (resource(*TASK_DIR) / "mmlu" / path.name, path))
        assert [own["description"], own["task"]] == [their["description"], their["task"]]
        assert own["dataset_kwargs"]["subject"] == their["dataset_name"]


def test_winogrande_keeps_the_sentences_own_spacing(folder: Path) -> None:
    """Context, gap and continuation are the sentence with its option."""
    questions = questions_of(folder, "winogrande")
    assert len(questions) in (10, COUNTS["winogrande"])
    for question in questions:
        for choice, option in enumerate((question.doc["option1"], question.doc["option2"])):
            whole = question.contexts[choice] + question.gaps[choice] + question.continuations[choice]
            assert whole == question.doc["sentence"].replace("_", option, 1).rstrip()


@pytest.mark.parametrize(("rest", "gap"), [("'s coat.", ""), (" coat.", " "), ("  coat. ", "  "), (".", "")])
def test_winogrande_where_the_sentence_runs_on(tmp_path: Path, rest: str, gap: str) -> None:
    """lm-eval's own request has a space there in any case."""
    write(
        tmp_path, "winogrande", {"sentence": f"Ann gave Eve _{rest}", "option1": "Ann", "option2": "Eve", "answer": "2"}
    )
    [question] = questions_of(tmp_path, "winogrande")
    assert question.contexts == ("Ann gave Eve Ann", "Ann gave Eve Eve")
    assert question.continuations == (rest.strip(),) * 2
    assert (question.gaps, question.delimiter, question.gold) == ((gap, gap), " ", 1)


def test_a_users_own_documents(tmp_path: Path) -> None:
    before = logging.getLogger("lm_eval").level, lm_eval.utils.env.from_string
    document = {"goal": "Cool soup", "sol1": "Blow on it.", "sol2": "Boil it.", "label": 0}
    write(tmp_path, "piqa", document)
    [question] = questions_of(tmp_path, "piqa")
    assert question.contexts == ("Question: Cool soup\nAnswer:",) * 2
    assert question.continuations == question.choices == ("Blow on it.", "Boil it.")
    assert (question.gold, question.gaps, question.label) == (0, (" ", " "), "piqa document 0")
    # lm-eval is left as it was
    assert before == (logging.getLogger("lm_eval").level, lm_eval.utils.env.from_string)
    write(tmp_path, "piqa", document | {"label": 2})
    with pytest.raises(DataError, match="piqa"):
        questions_of(tmp_path, "piqa")


def own_documents(folder: Path, examples: int, each: int = 1) -> Path:
    """So many questions of every subject of MMLU, with so many examples of each."""
    write(folder, "mmlu", *(sample("mmlu", subject=name, question=f"{n}?") for name in SUBJECTS for n in range(each)))
    places = [(name, place) for name in SUBJECTS for place in range(examples)]
    shown = (sample("mmlu_dev", subject=name, question=f" Is it {place}? ", answer=place % 4) for name, place in places)
    write(folder, "mmlu_dev", *shown)
    return folder


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("asked", fast([("mmlu", 5)], [("mmlu", 5), ("mmlu", 2), ("mmlu_continuation", 5)]))
def test_examples_are_those_of_lm_evals_own_run(real_documents: Path, asked: tuple[str, int]) -> None:
    """Two documents of each of the 57 subjects."""
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    class Indifferent(LM):  # type: ignore[misc]
        """A model with constant log-likelihoods; lm-eval's own dummy requests a tokenizer from the hub."""

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            return [(0.0, False) for _ in requests]

        loglikelihood_rolling = generate_until = None

    task, shots = asked
    documents, examples = (by_subject(real_documents, name) for name in ("mmlu", "mmlu_dev"))
    leaves = [
        lm_evals_config(OF_SUBJECTS[task].format(name), test=documents[name], dev=examples[name]) for name in SUBJECTS
    ]
    settings = {"num_fewshot": shots, "limit": 2, "bootstrap_iters": 0}
    logged = simple_evaluate(Indifferent(), tasks=leaves, task_manager=TaskManager(include_defaults=False), **settings)
    by_document = {(leaf, line["doc_id"]): line for leaf, lines in logged["samples"].items() for line in lines}
    questions = questions_of(real_documents, task, shots=shots)
    assert [(question.subtask, question.doc_id) for question in questions] == list(by_document)
    for question, line in zip(questions, by_document.values(), strict=True):
        assert requests_of(question) == [tuple(pair) for pair in line["arguments"]]
        assert str(question.gold) == str(line["target"])


def test_text_before_a_question(tmp_path: Path) -> None:
    """Written out by hand: the subject's line, its first examples with their answers, the question."""
    own_documents(tmp_path, 4)
    letter = questions_of(tmp_path, "mmlu", shots=2)[-2]
    options, asked = "A. none\nB. one\nC. two\nD. three\nAnswer:", "0?\nA. one\nB. two\nC. three\nD. four\nAnswer:"
    line = "The following are multiple choice questions (with answers) about virology.\n\n"
    assert set(letter.contexts) == {f"{line}Is it 0?\n{options} A\n\nIs it 1?\n{options} B\n\n{asked}"}
    text = questions_of(tmp_path, "mmlu_continuation", shots=2)[-2]
    assert set(text.contexts) == {
        "The following are questions (with answers) about virology.\n\n"
        "Question: Is it 0?\nAnswer: none\n\nQuestion: Is it 1?\nAnswer: one\n\nQuestion: 0?\nAnswer:"
    }
    assert text.continuations == ("one", "two", "three", "four")
    with pytest.raises(DataError, match="mmlu_abstract_algebra: expected at least 5 few-shot examples, found 4"):
        questions_of(tmp_path, "mmlu", shots=5)


def test_a_document_of_a_sample_has_the_examples_of_the_whole_run(tmp_path: Path) -> None:
    """lm-eval draws examples one document after the other, so those of a later one depend on the draws before it."""
    own_documents(tmp_path, 5, each=4)
    whole = {(one.subtask, one.doc_id): one for one in questions_of(tmp_path, "mmlu", shots=2)}
    chosen = questions_of(tmp_path, "mmlu", DocumentSample(70, 3), shots=2)
    assert len(chosen) == 70
    assert [whole[one.subtask, one.doc_id] for one in chosen] == chosen


@pytest.mark.parametrize("here", [True, False])
def test_lm_evals_command_line_has_the_examples_that_are_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: bool
) -> None:
    """lm-eval does not pass --num_fewshot to a data set, so nothing is fetched on a guess."""
    from evalkit.data.lm_eval_dataset import dataset

    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    own_documents(tmp_path, 3)
    if not here:
        (tmp_path / "mmlu_dev.jsonl").unlink()
    splits = dataset("mmlu", "test", "virology", library(tmp_path), examples="mmlu_dev")
    assert (len(splits["test"]), len(splits["dev"])) == (1, 3 if here else 0)


def test_examples_are_part_of_what_a_run_is(checkpoint: Path, tmp_path: Path) -> None:
    def specification(shots: int, examples: int = 4) -> dict[str, Any]:
        options = {"tasks": "mmlu", "data_dir": own_documents(tmp_path, examples), "num_fewshot": shots, "limit": 3}
        plan = planned(checkpoint, options | {"allow_unofficial_data": True}, silent)
        return dict(plan.manifest["specification"])

    none, two = specification(0), specification(2)
    assert "examples" not in none and none["num_fewshot"] == 0
    assert two == none | {"num_fewshot": 2, "examples": two["examples"]}
    assert specification(2, examples=3)["examples"] != two["examples"]
    assert specification(0, examples=3) == none


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The tasks of each call of `load_questions`, with a cache of its own."""
    calls = []

    def load(suite: Suite, *others: Any) -> Any:
        calls.append(suite.tasks)
        return load_questions(suite, *others)

    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tasks, "load_questions", load)
    return calls


@pytest.mark.parametrize("selection", [ALL_DOCUMENTS, DocumentSample(3, 1)])
def test_the_cache_has_what_lm_eval_built(documents: Path, built: list[Any], selection: Any) -> None:
    """Types too: 1 is not 1.0 or True. Only what is missing is built."""
    suite = load_suite("zeroshot8")
    expected = load_questions(suite, library(documents), selection)
    pinned_questions(choose_tasks(suite, ("piqa", "boolq")), library(documents), selection)
    for _ in range(2):
        assert repr(pinned_questions(suite, library(documents), selection)) == repr(expected)
    assert built == [("piqa", "boolq"), tuple(task for task in suite.tasks if task not in ("piqa", "boolq"))]


def test_the_cache_has_no_other_documents_or_selection(documents: Path, tmp_path: Path, built: list[Any]) -> None:
    """Also where a field differs that does not count for the content hash."""
    lines = (documents / "arc_easy.jsonl").read_text("utf-8").splitlines()
    named = [json.dumps(json.loads(line) | {"id": "renamed"}) for line in lines]
    for content in (lines, named, lines[1:]):
        for selection in (ALL_DOCUMENTS, FirstDocuments(2)):
            (tmp_path / "arc_easy.jsonl").write_text("\n".join(content), "utf-8")
            [found] = pinned_questions(suite_of("arc_easy"), library(tmp_path), selection).values()
            assert found == questions_of(tmp_path, "arc_easy", selection)
    assert len(built) == 6
    own_documents(tmp_path, 2)
    for shots in (0, 1):
        [found] = pinned_questions(suite_of("mmlu", shots=shots), library(tmp_path), FirstDocuments(2)).values()
        assert found == questions_of(tmp_path, "mmlu", FirstDocuments(2), shots=shots)


@pytest.mark.parametrize("part", ["version", "source_digest", "folder_digest"])
def test_other_libraries_code_and_task_files_build_anew(
    documents: Path, built: list[Any], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned_questions(suite_of("piqa"), library(documents), ALL_DOCUMENTS)
    monkeypatch.setattr(tasks, part, lambda *_: "another")
    pinned_questions(suite_of("piqa"), library(documents), ALL_DOCUMENTS)
    assert len(built) == 2


def test_documents_that_are_not_plain_json_are_not_stored(
    documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*given: Any) -> Any:
        found = load_questions(*given)
        return {task: [replace(one, doc={"id": (1, 2)}) for one in members] for task, members in found.items()}

    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tasks, "load_questions", load)
    assert pinned_questions(suite_of("piqa"), library(documents), ALL_DOCUMENTS)["piqa"][0].doc == {"id": (1, 2)}
    assert not (tmp_path / "cache" / "questions").exists()
