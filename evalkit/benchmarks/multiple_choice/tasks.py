"""From a suite's lm-eval tasks to questions.

In: lm-eval task files and a `Library` of documents. Out: one `Question` a document, built from lm-eval's
own requests, so that text, choices and gold answers are lm-eval's to the letter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.lm_eval.quiet import quiet_lm_eval
from evalkit.benchmarks.multiple_choice.suites import TASK_DIR, Suite
from evalkit.compatibility.lm_eval import fewshot_seed
from evalkit.data.clusters import clusters_of
from evalkit.errors import DataError, UsageError
from evalkit.resources import resource

if TYPE_CHECKING:
    from evalkit.benchmarks.lm_eval.catalogue import TaskSet
    from evalkit.data import Library


@dataclass(frozen=True)
class LeafTask:
    """What lm-eval's own output says of a leaf task, for exports."""

    alias: str
    """How lm-eval prints it, e.g. "anatomy"."""
    version: Any
    """lm-eval's version of the task, as its file has it."""
    documents: int
    """How many there are, before any limit."""


@dataclass(frozen=True)
class Question:
    """One multiple-choice document, before any template.

    `contexts`, `continuations` and `gaps` have one entry a choice. Where choices share the context (all tasks
    but WinoGrande) its text is repeated; where they share the continuation (WinoGrande), that is.
    """

    task: str
    """Task of the suite, e.g. "mmlu"."""
    subtask: str
    """lm-eval's leaf task, e.g. "mmlu_anatomy"; the task itself where it has no subjects."""
    doc_id: int
    """Index of the document within the subtask, as lm-eval counts it."""
    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    delimiter: str
    """What lm-eval puts between context and continuation."""
    gaps: tuple[str, ...]
    """What stands between them in running text: one space, or what WinoGrande's own sentence has there."""
    choices: tuple[str, ...]
    """The answer options: what lm-eval's length normalisations count."""
    gold: int
    cluster: int
    """The first document of the subtask that it shares a source with; `doc_id` where it shares none."""
    doc: dict[str, Any]
    """The document as lm-eval sees it, for exports."""
    leaf: LeafTask
    """The lm-eval task that it belongs to, for exports."""

    @property
    def label(self) -> str:
        """How messages name the document."""
        return f"{self.subtask} document {self.doc_id}"


def load_questions(
    suite: Suite, library: Library, limit: int | None = None, others: Mapping[str, TaskSet] | None = None
) -> dict[str, list[Question]]:
    """All questions of a suite, by task, in the suite's order.

    Args:
        suite: its `num_fewshot` examples become part of each context.
        library: where the documents of pinned tasks come from.
        limit: at most this many documents of each task. The first ones, as lm-eval takes them; of a task with
            subjects the first of every subject in turn, so that a small sample is not one subject alone.
        others: the suite's other tasks, as lm-eval has loaded them.

    Raises:
        DataError: documents or examples are missing, malformed or none.
    """
    with quiet_lm_eval():
        from lm_eval.tasks import TaskManager

        shots = suite.num_fewshot
        metadata = {"library": library, "num_fewshot": shots}
        folder = str(resource(*TASK_DIR))
        manager = TaskManager(include_path=folder, include_defaults=False, metadata=metadata)
        found = {}
        for task in suite.tasks:
            leaves = others[task].tasks if others and task in others else manager.load([task])["tasks"]
            found[task] = _task_questions(task, leaves, shots, limit)
        _refuse_shared_subtasks(found)
        return found


def _task_questions(task: str, leaves: Mapping[str, Any], shots: int, limit: int | None) -> list[Question]:
    sizes = {name: len(leaf.eval_docs) for name, leaf in leaves.items()}
    if not sum(sizes.values()):
        raise DataError(f"task {task}: there are no documents")
    questions: list[Question] = []
    for name, count in share_limit(sizes, limit).items():
        if count:
            questions += _leaf_questions(task, leaves[name], sizes[name], shots, count)
    return questions


def _refuse_shared_subtasks(found: Mapping[str, Sequence[Question]]) -> None:
    """Raise a `UsageError` where a document would count for two tasks."""
    owner: dict[str, str] = {}
    for task, questions in found.items():
        for subtask in dict.fromkeys(question.subtask for question in questions):
            if owner.setdefault(subtask, task) != task:
                raise UsageError(
                    f"{subtask} is part of task {owner[subtask]} and of task {task}, and its documents would count "
                    "twice; leave one out, or run them apart"
                )


def refuse_without_choices(task: str, leaves: Mapping[str, Any]) -> None:
    """Raise a `UsageError` where a task's documents are no choices with one right answer."""
    for name, leaf in leaves.items():
        why = ""
        if leaf.OUTPUT_TYPE != "multiple_choice":
            why = f"its output type is {leaf.OUTPUT_TYPE}"
        elif callable(getattr(leaf.config, "process_results", None)):
            why = "a function of its own measures its documents"
        elif getattr(leaf, "multiple_target", 0):
            why = "its documents have several right answers"
        if why:
            raise UsageError(
                f"task {name if name == task else f'{task} ({name})'}: {why}, and templates and rules are for choices "
                f"with one right answer; run it by its own metrics: --suite lm_eval --tasks {task}"
            )


def share_limit(sizes: dict[str, int], limit: int | None) -> dict[str, int]:
    """How many documents each subject gives when a task is limited.

    One document of each subject in turn, in their order, until `limit` are taken.
    """
    if limit is None or limit >= sum(sizes.values()):
        return dict(sizes)
    taken = dict.fromkeys(sizes, 0)
    left = limit
    while left:
        for name in [name for name in sizes if taken[name] < sizes[name]][:left]:
            taken[name] += 1
            left -= 1
    return taken


def _leaf_questions(task: str, leaf: Any, documents: int, shots: int, count: int) -> list[Question]:
    """The steps of lm-eval's own `build_all_requests`, without its progress bar for each subject."""
    metadata = leaf.config.metadata or {}
    about = LeafTask(leaf.config.task_alias or leaf.config.task, metadata.get("version"), documents)
    if shots:
        _prepare_examples(leaf, shots)
    questions = []
    taken = list(leaf.doc_iterator(rank=0, limit=count, world_size=1))
    clusters = clusters_of([doc for _, doc in taken], metadata)
    for doc_id, doc in taken:
        context = leaf.fewshot_context(doc, num_fewshot=shots, gen_prefix=leaf.doc_to_prefix(doc))
        instances = leaf.construct_requests(doc=doc, ctx=context, metadata=(leaf.config.task, doc_id, 1))
        questions.append(_question(task, leaf, about, doc_id, clusters[doc_id], instances))
    return questions


def _prepare_examples(leaf: Any, shots: int) -> None:
    """Seed the sampler as lm-eval's `simple_evaluate` does. It would fail by an assertion on too few examples."""
    leaf.set_fewshot_seed(fewshot_seed())
    if (found := len(leaf.sampler.df)) < shots:
        raise DataError(f"task {leaf.config.task}: expected at least {shots} few-shot examples, found {found}")


def _question(task: str, leaf: Any, about: LeafTask, doc_id: int, cluster: int, instances: list[Any]) -> Question:
    instances.sort(key=lambda instance: instance.idx)
    doc = instances[0].doc
    # Where a task measures mutual information, lm-eval appends the choices without their context
    instances = instances[: len(leaf.doc_to_choice(doc))]
    delimiter = leaf.config.target_delimiter
    pairs = [instance.args for instance in instances]
    continuations = tuple(continuation.removeprefix(delimiter) for _, continuation in pairs)
    gold = leaf.doc_to_text(doc) if leaf.multiple_input else leaf.doc_to_target(doc)
    field = (leaf.config.metadata or {}).get("written_in")
    gap = _gap_after_blank(doc[field]) if field else " "
    # A task with several inputs has its options in the contexts and repeats one continuation
    choices = continuations if leaf.multiple_input else tuple(leaf.doc_to_choice(doc))
    if empty := [number for number, choice in enumerate(choices) if not choice.strip()]:
        raise DataError(
            f"task {leaf.config.task}, document {doc_id}: choice {empty[0]} is empty; there is no text to score"
        )
    return Question(
        task=task,
        subtask=leaf.config.task,
        doc_id=doc_id,
        contexts=tuple(context for context, _ in pairs),
        continuations=continuations,
        delimiter=delimiter,
        gaps=(gap,) * len(pairs),
        choices=choices,
        gold=_checked_gold(_index(gold, choices), len(pairs), leaf.config.task, doc_id),
        cluster=cluster,
        doc=dict(doc),
        leaf=about,
    )


def _gap_after_blank(sentence: str) -> str:
    rest = sentence[sentence.index("_") + 1 :]
    return rest[: len(rest) - len(rest.lstrip())]


def _index(gold: Any, choices: Sequence[str]) -> Any:
    """A gold answer that is one of the choices' texts, as its index, as lm-eval reads it."""
    return choices.index(gold) if isinstance(gold, str) and gold in choices else gold


def _checked_gold(gold: Any, choices: int, task: str, doc_id: int) -> int:
    try:
        index = int(gold)
    except (TypeError, ValueError):
        index = -1
    if not 0 <= index < choices:
        raise DataError(f"task {task}, document {doc_id}: gold answer {gold!r} is not one of its {choices} choices")
    return index
