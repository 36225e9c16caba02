"""Questions of request files, and of MMLU in OLMo-core's form, whose requests are built; and with swapped contexts.

In: the tasks of a suite that are requests. Out: for each its `Requests`: the hash of what determines its numbers, its
provenance, and its questions, whose contexts and continuations are scored as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from evalkit.data.requests import (
    MOST_TOKENS,
    RequestDocument,
    RequestFile,
    are_cached,
    own_file,
    request_tasks,
    wheel_files,
)
from evalkit.errors import DataError
from evalkit.inputs.values import text_digest
from evalkit.suites.questions import LeafTask, Question, by_subtask

if TYPE_CHECKING:
    from evalkit.data import Library
    from evalkit.data.requests import RequestTask
    from evalkit.data.sources import Record
    from evalkit.display import Say
    from evalkit.suites.suites import Suite

_MMLU_EXAMPLES = "mmlu_dev"
_CATEGORIES = {
    "stem": "abstract_algebra astronomy college_biology college_chemistry college_computer_science "
    "college_mathematics college_physics computer_security conceptual_physics electrical_engineering "
    "elementary_mathematics high_school_biology high_school_chemistry high_school_computer_science "
    "high_school_mathematics high_school_physics high_school_statistics machine_learning",
    "humanities": "formal_logic high_school_european_history high_school_us_history high_school_world_history "
    "international_law jurisprudence logical_fallacies moral_disputes moral_scenarios philosophy "
    "prehistory professional_law world_religions",
    "social_sciences": "econometrics high_school_geography high_school_government_and_politics "
    "high_school_macroeconomics high_school_microeconomics high_school_psychology "
    "human_sexuality professional_psychology public_relations security_studies sociology "
    "us_foreign_policy",
    "other": "",
}
"""MMLU's categories of subjects, as its authors group them; "other" has the rest."""


@dataclass(frozen=True)
class Requests:
    """The requests of a task."""

    content_hash: str
    provenance: dict[str, Any]
    """Its source, whether it is official, and the number of documents."""
    single: bool
    """Whether each document has one gold answer in place of choices."""
    questions: Callable[[], list[Question]]
    """Reads or builds the questions of all documents."""


def load_requests(suite: Suite, library: Library, say: Say) -> dict[str, Requests]:
    """Return the requests of each task of a suite that has any. Raises a `DataError` if a file cannot be read."""
    own = {task: own_file(path) for task, path in suite.requests.items() if task in suite.tasks}
    files = own | wheel_files((task for task in suite.requested if task not in own), say)
    return {
        task: _of_file(task, files[task]) if task in files else _of_mmlu(task, request_tasks()[task], library)
        for task in suite.requested
    }


def are_here(task: str, library: Library) -> bool:
    """Whether the requests of evalkit's own task can be read without a download."""
    about = request_tasks()[task]
    built_of = () if about.file else (about.documents, _MMLU_EXAMPLES)
    return all(library.where(name).path for name in built_of) if built_of else are_cached()


def _of_file(task: str, file: RequestFile) -> Requests:
    read = cache(file.documents)
    count = file.about.count if file.about else len(read())
    single = file.about.single if file.about else len(read()[0].continuations) == 1
    leaf = LeafTask(task, None, count, MOST_TOKENS if file.about else None)
    provenance = {"source": file.source, "official": True if file.about else None, "total": count}
    questions = lambda: [_question(task, task, document, leaf) for document in read()]  # noqa: E731
    return Requests(file.sha256, provenance, single, questions)


def _question(task: str, subtask: str, document: RequestDocument, leaf: LeafTask) -> Question:
    count = len(document.continuations)
    return Question(
        task=task,
        subtask=subtask,
        doc_id=document.doc_id,
        contexts=document.contexts,
        continuations=document.continuations,
        delimiter="",
        gaps=("",) * count,
        choices=document.continuations,
        gold=document.gold,
        cluster=document.cluster,
        doc={},
        leaf=leaf,
        alone=document.alone,
    )


def _of_mmlu(task: str, about: RequestTask, library: Library) -> Requests:
    documents, examples = library.load(about.documents), library.load(_MMLU_EXAMPLES)
    subjects = _subjects(about.category)
    chosen = [document for document in documents.records if subjects is None or document["subject"] in subjects]
    form = {"category": about.category, "letters": about.letters, "version": 1}
    identity = json.dumps([documents.content_hash, examples.content_hash, form])
    official = documents.official and examples.official
    provenance = {"source": documents.source, "official": official, "total": len(chosen)}
    build = lambda: list(_mmlu_questions(task, about, chosen, examples.records))  # noqa: E731
    return Requests(text_digest(identity), provenance, about.single, build)


def _subjects(category: str) -> frozenset[str] | None:
    if category != "other":
        return frozenset(_CATEGORIES[category].split()) if category else None
    from evalkit.data import SUBJECTS

    return frozenset(SUBJECTS) - {subject for subjects in _CATEGORIES.values() for subject in subjects.split()}


def _mmlu_questions(
    task: str, about: RequestTask, documents: Sequence[Record], examples: Sequence[Record]
) -> Iterator[Question]:
    """Yield MMLU's questions with the subject's five examples before each, in the form of OLMo-core's evaluation."""

    def answers(document: Record) -> list[str]:
        return [f" {letter}" for letter in "ABCD"] if about.letters else [f" {text}" for text in document["choices"]]

    def asked(document: Record) -> str:
        question = document["question"].strip()
        if not about.letters:
            return f"Question: {question}\nAnswer:"
        return "\n".join([question, *map("{}. {}".format, "ABCD", document["choices"]), "Answer:"])

    by_subject: dict[str, list[Record]] = {}
    for document in documents:
        by_subject.setdefault(document["subject"], []).append(document)
    for subject, members in by_subject.items():
        words = subject.replace("_", " ")
        solved = [example for example in examples if example["subject"] == subject]
        before = f"The following are multiple choice questions (with answers) about {words}:\n\n"
        before += "".join(f"{asked(example)}{answers(example)[example['answer']]}\n\n" for example in solved)
        leaf = LeafTask(words, None, len(members), MOST_TOKENS)
        for number, document in enumerate(members):
            texts = tuple(answers(document))
            alone = () if about.letters else ("Answer:",) * len(texts)
            contexts = (before + asked(document),) * len(texts)
            built = RequestDocument(number, contexts, texts, document["answer"], alone, number)
            yield _question(task, f"{task}_{subject}", built, leaf)


def swapped(questions: Sequence[Question]) -> list[Question]:
    """Return all questions of a task, each with the context of another document.

    A model that reads the context falls to what the answers alone give: chance, where these do not give the gold away.

    The other document is half of the subtask's documents further on, or the next one from there with another context
    and another source.
    """
    return [_with_context_of_another(question, number, members)
            for members in by_subtask(questions).values() for number, question in enumerate(members)]  # fmt: skip


def _with_context_of_another(question: Question, number: int, members: Sequence[Question]) -> Question:
    count = len(members)
    for step in range(count):
        other = members[(number + count // 2 + step) % count]
        shares = len(set(other.contexts)) == 1
        if other.cluster == question.cluster or other.contexts == question.contexts:
            continue
        if shares or len(other.contexts) == len(question.contexts):
            contexts = other.contexts[:1] * len(question.contexts) if shares else other.contexts
            return replace(question, contexts=contexts)
    raise DataError(f"{question.label}: --control swap needs another document with another context; it has none")
