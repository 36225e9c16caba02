"""Questions, compared with lm-eval's own task files on the same raw documents; and in evalkit's cache."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import lm_eval
import pytest

from evalkit.data import Library
from evalkit.data.sampling import ALL_DOCUMENTS, DocumentSample, FirstDocuments
from evalkit.data.schema import SUBJECTS
from evalkit.errors import DataError
from evalkit.suites import question_loading as tasks
from evalkit.suites.question_loading import load_questions, pinned_questions
from evalkit.suites.questions import Question
from evalkit.suites.suites import Suite, choose_tasks, load_suite, with_fewshot
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


def library(folder: Path) -> Library:
    return Library(folder, allow_unofficial=True)


def questions_of(folder: Path, task: str, *selection: Any, shots: int = 0) -> list[Question]:
    return load_questions(suite_of(task, shots=shots), library(folder), *selection)[task]


def requests_of(question: Question) -> list[tuple[str, str]]:
    pairs = zip(question.contexts, question.continuations, strict=True)
    return [(context, question.delimiter + continuation) for context, continuation in pairs]


def raw(folder: Path, task: str) -> list[dict[str, Any]]:
    documents = list(map(json.loads, (folder / f"{task}.jsonl").read_text("utf-8").splitlines()))
    if task == "boolq":  # lm-eval reads it from SuperGLUE, which writes the title into the passage
        documents = [
            {"question": d["question"], "passage": f"{d['title']} -- {d['passage']}", "label": int(d["answer"])}
            for d in documents
        ]
    return documents


def lm_evals_config(file: str, **splits: list[dict[str, Any]]) -> dict[str, Any]:
    """lm-eval's own task file, with other documents only."""
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


@pytest.fixture(params=fast(["a few"], ["a few", "complete"]), scope="module")
def folder(request: pytest.FixtureRequest) -> Path:
    if request.param == "a few":
        return Path(request.getfixturevalue("real_documents"))
    return Path(request.getfixturevalue("shared_data")) / "zeroshot8"


@pytest.mark.parametrize("task", BUILT_IN)
def test_questions_are_lm_evals(folder: Path, task: str) -> None:
    from lm_eval.api.task import ConfigurableTask

    questions = questions_of(folder, task, FirstDocuments(LIMIT))
    leaf = ConfigurableTask(config=lm_evals_config(BUILT_IN[task], test=raw(folder, task)[:LIMIT]))
    for doc_id, (question, doc) in enumerate(zip(questions, leaf.eval_docs, strict=True)):
        context = leaf.fewshot_context(doc, num_fewshot=0)
        requests = leaf.construct_requests(doc=doc, ctx=context, metadata=(leaf.config.task, doc_id, 1))
        assert requests_of(question) == [request.args for request in requests]
        if leaf.multiple_input:
            assert question.gold == leaf.doc_to_text(doc)
        else:
            assert (question.gold, list(question.choices)) == (leaf.doc_to_target(doc), leaf.doc_to_choice(doc))
        assert (question.task, question.subtask, question.doc_id) == (task, task, doc_id)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("asked", fast([("mmlu", 5)], [("mmlu", 5), ("mmlu_continuation", 2)]))
def test_questions_with_examples_are_those_of_lm_evals_own_run(real_documents: Path, asked: tuple[str, int]) -> None:
    """Two documents of each of the 57 subjects, in lm-eval's order; lm-eval is left as it was."""
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    class Indifferent(LM):  # type: ignore[misc]
        """A model with constant log-likelihoods; lm-eval's own dummy requests a tokenizer from the hub."""

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            return [(0.0, False) for _ in requests]

        loglikelihood_rolling = generate_until = None

    task, shots = asked
    assert {path.stem for path in (FOLDER / "mmlu" / "default").glob("mmlu_*.yaml")} == {f"mmlu_{s}" for s in SUBJECTS}
    rows = {split: raw(real_documents, split) for split in ("mmlu", "mmlu_dev")}
    documents, examples = (
        {name: [row for row in rows[split] if row["subject"] == name] for name in SUBJECTS} for split in rows
    )
    leaves = [
        lm_evals_config(OF_SUBJECTS[task].format(name), test=documents[name], dev=examples[name]) for name in SUBJECTS
    ]
    settings = {"num_fewshot": shots, "limit": 2, "bootstrap_iters": 0}
    logged = simple_evaluate(Indifferent(), tasks=leaves, task_manager=TaskManager(include_defaults=False), **settings)
    by_document = {(leaf, line["doc_id"]): line for leaf, lines in logged["samples"].items() for line in lines}
    before = logging.getLogger("lm_eval").level, lm_eval.utils.env.from_string
    questions = questions_of(real_documents, task, shots=shots)
    assert before == (logging.getLogger("lm_eval").level, lm_eval.utils.env.from_string)
    assert [(question.subtask, question.doc_id) for question in questions] == list(by_document)
    for question, line in zip(questions, by_document.values(), strict=True):
        assert requests_of(question) == [tuple(pair) for pair in line["arguments"]]
        assert str(question.gold) == str(line["target"])


def test_winogrande_keeps_the_sentences_own_spacing(folder: Path, tmp_path: Path) -> None:
    """Context, gap and continuation are the sentence with its option; lm-eval's own request always has a space."""
    questions = questions_of(folder, "winogrande")
    assert len(questions) in (10, COUNTS["winogrande"])
    for question in questions:
        for choice, option in enumerate((question.doc["option1"], question.doc["option2"])):
            whole = question.contexts[choice] + question.gaps[choice] + question.continuations[choice]
            assert whole == question.doc["sentence"].replace("_", option, 1).rstrip()
    for rest, gap in (("'s coat.", ""), (" coat.", " "), ("  coat. ", "  "), (".", "")):
        document = {"sentence": f"Ann gave Eve _{rest}", "option1": "Ann", "option2": "Eve", "answer": "2"}
        write(tmp_path, "winogrande", document)
        [question] = questions_of(tmp_path, "winogrande")
        assert question.contexts == ("Ann gave Eve Ann", "Ann gave Eve Eve")
        assert question.continuations == (rest.strip(),) * 2
        assert (question.gaps, question.delimiter, question.gold) == ((gap, gap), " ", 1)


def test_a_document_of_a_sample_has_the_examples_of_the_whole_run(tmp_path: Path) -> None:
    """lm-eval draws examples one document after the other, so those of a later one depend on the draws before it."""
    write(tmp_path, "mmlu", *(sample("mmlu", subject=name, question=f"{n}?") for name in SUBJECTS for n in range(2)))
    shown = [sample("mmlu_dev", subject=name, question=f"Is it {n}?", answer=n) for name in SUBJECTS for n in range(4)]
    write(tmp_path, "mmlu_dev", *shown)
    whole = {(question.subtask, question.doc_id): question for question in questions_of(tmp_path, "mmlu", shots=2)}
    chosen = questions_of(tmp_path, "mmlu", DocumentSample(40, 3), shots=2)
    assert len(chosen) == 40
    assert [whole[question.subtask, question.doc_id] for question in chosen] == chosen
    with pytest.raises(DataError, match=r"mmlu_abstract_algebra: .* 5 .* 4"):
        questions_of(tmp_path, "mmlu", shots=5)


# The cache


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


@pytest.mark.slow
def test_the_cache_has_what_lm_eval_built(documents: Path, built: list[Any]) -> None:
    """Types too: 1 is not 1.0 or True. Only what is missing is built."""
    suite, selection = load_suite("zeroshot8"), DocumentSample(3, 1)
    expected = load_questions(suite, library(documents), selection)
    pinned_questions(choose_tasks(suite, ("piqa", "boolq")), library(documents), selection)
    for _ in range(2):
        assert repr(pinned_questions(suite, library(documents), selection)) == repr(expected)
    assert built == [("piqa", "boolq"), tuple(task for task in suite.tasks if task not in ("piqa", "boolq"))]


@pytest.mark.slow
def test_the_cache_has_nothing_else(
    documents: Path, tmp_path: Path, built: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents, also where a field differs that the content hash leaves out; selections, examples, code, types."""
    lines = (documents / "arc_easy.jsonl").read_text("utf-8").splitlines()
    named = [json.dumps(json.loads(line) | {"id": "renamed"}) for line in lines]
    for content in (lines, named, lines[1:]):
        for selection in (ALL_DOCUMENTS, FirstDocuments(2)):
            (tmp_path / "arc_easy.jsonl").write_text("\n".join(content), "utf-8")
            [questions] = pinned_questions(suite_of("arc_easy"), library(tmp_path), selection).values()
            assert questions == questions_of(tmp_path, "arc_easy", selection)
    assert len(built) == 6
    for part in ("version", "source_digest", "folder_digest"):
        monkeypatch.setattr(tasks, part, lambda *_: "another")
        pinned_questions(suite_of("arc_easy"), library(tmp_path), ALL_DOCUMENTS)
    assert len(built) == 9
    for task in ("mmlu", "mmlu_dev"):
        write(tmp_path, task, *(sample(task, subject=name) for name in SUBJECTS))
    for shots, count in ((0, 1), (1, 2)):
        [[first, _]] = pinned_questions(suite_of("mmlu", shots=shots), library(tmp_path), FirstDocuments(2)).values()
        assert first.contexts[0].count("Answer:") == count
