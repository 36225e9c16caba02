"""Questions of lm-eval's tasks: documents, preprocessed by lm-eval.

In: lm-eval task files and a `Library` of documents. Out: one `Question` for each document, built from lm-eval's own
requests, so that text, choices and gold answers are exactly lm-eval's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from evalkit.compatibility.lm_eval import fewshot_seed, gold_index, index_of, index_tasks, processed_once, replace_index
from evalkit.data.lm_eval_dataset import dataset
from evalkit.data.sampling import DocumentSelection, clusters_of
from evalkit.errors import DataError, UsageError
from evalkit.inputs.values import text_digest
from evalkit.paths import resource
from evalkit.suites.lm_eval_tasks import quiet_lm_eval
from evalkit.suites.questions import LeafTask, Question, places_for_estimate, selected_documents
from evalkit.suites.suites import TASK_DIR, Suite

if TYPE_CHECKING:
    from evalkit.data import Library
    from evalkit.display import Say
    from evalkit.suites.lm_eval_tasks import TaskSet


def questions_of_lm_eval(
    suite: Suite,
    tasks: Sequence[str],
    library: Library,
    selection: DocumentSelection,
    others: Mapping[str, TaskSet],
    estimate: int | None,
) -> dict[str, list[Question]]:
    with quiet_lm_eval():
        from lm_eval.tasks import TaskManager

        shots = suite.num_fewshot
        manager = TaskManager(include_defaults=False, metadata={"library": library, "num_fewshot": shots})
        folder = resource(*TASK_DIR)
        replace_index(manager, index_of(index_tasks(folder), folder))
        questions: dict[str, list[Question]] = {}
        for task in tasks:
            other = others.get(task)
            with nullcontext() if other else processed_once():
                leaves = other.tasks if other else manager.load([task])["tasks"]
                questions[task] = _task_questions(task, leaves, shots, selection, estimate)
    return questions


def _task_questions(
    task: str, leaves: Mapping[str, Any], shots: int, selection: DocumentSelection, estimate: int | None
) -> list[Question]:
    sizes = {name: len(leaf.eval_docs) for name, leaf in leaves.items()}
    if not sum(sizes.values()):
        raise DataError(f"task {task} has no documents; check its data files")
    questions: list[Question] = []
    for name, numbers in selected_documents(task, sizes, selection).items():
        numbers = places_for_estimate(numbers, len(sizes), estimate)
        if numbers:
            questions += _leaf_questions(task, leaves[name], sizes[name], shots, numbers, estimate is None)
    return questions


def _leaf_questions(
    task: str, leaf: Any, documents: int, shots: int, numbers: Sequence[int], in_turn: bool
) -> list[Question]:
    """Build questions by the steps of lm-eval's `build_all_requests`, without its progress bar for each subject.

    A document's solved examples are drawn after those of the documents before it. With `in_turn` they are drawn for
    these documents too, so that a document of a sample has the same examples as in a run of all.
    """
    name, metadata = leaf.config.task, leaf.config.metadata or {}
    about = LeafTask(leaf.config.task_alias or name, metadata.get("version"), documents)
    if shots:
        # As in lm-eval's `simple_evaluate`, which would fail with an assertion on too few examples
        leaf.set_fewshot_seed(fewshot_seed())
        if (examples := len(leaf.sampler.df)) < shots:
            raise DataError(f"task {name}: expected {shots} few-shot examples, found {examples}; lower --num-fewshot")
    count = numbers[-1] + 1
    if leaf.config.custom_dataset is dataset:
        # Documents of texts and numbers, whose rows are the same in bulk, in a tenth of the time
        first = list(enumerate(leaf.eval_docs.select(range(count)).to_list()))
    else:
        first = list(leaf.doc_iterator(rank=0, limit=count, world_size=1))
    questions = []
    clusters, chosen = clusters_of([doc for _, doc in first], metadata), set(numbers)
    for doc_id, doc in first if shots and in_turn else [first[number] for number in numbers]:
        context = leaf.fewshot_context(doc, num_fewshot=shots, gen_prefix=leaf.doc_to_prefix(doc))
        if doc_id in chosen:
            instances = leaf.construct_requests(doc=doc, ctx=context, metadata=(name, doc_id, 1))
            questions.append(_question(task, leaf, about, doc_id, clusters[doc_id], instances))
    return questions


def _question(task: str, leaf: Any, about: LeafTask, doc_id: int, cluster: int, instances: list[Any]) -> Question:
    instances.sort(key=lambda instance: instance.idx)
    doc, delimiter, label = instances[0].doc, leaf.config.target_delimiter, f"{leaf.config.task} document {doc_id}"
    # For tasks that measure mutual information, lm-eval appends the choices without their context
    pairs = [instance.args for instance in instances[: len(leaf.doc_to_choice(doc))]]
    continuations = tuple(continuation.removeprefix(delimiter) for _, continuation in pairs)
    gap = " "
    if field := (leaf.config.metadata or {}).get("written_in"):
        rest = doc[field].partition("_")[2]
        gap = rest[: len(rest) - len(rest.lstrip())]
    # A task with multiple inputs has its options in the contexts and repeats one continuation
    choices = continuations if leaf.multiple_input else tuple(leaf.doc_to_choice(doc))
    if empty := [number for number, choice in enumerate(choices) if not choice.strip()]:
        raise DataError(f"{label}: choice {empty[0]} is empty, so there is no text to score; correct the document")
    gold = leaf.doc_to_text(doc) if leaf.multiple_input else leaf.doc_to_target(doc)
    index = gold_index(gold, choices)
    if index is None:
        raise DataError(f"{label}: gold answer {gold!r} is not one of its {len(choices)} choices; correct the document")
    return Question(
        task=task,
        subtask=leaf.config.task,
        doc_id=doc_id,
        contexts=tuple(context for context, _ in pairs),
        continuations=continuations,
        delimiter=delimiter,
        gaps=(gap,) * len(pairs),
        choices=choices,
        gold=index,
        cluster=cluster,
        doc=dict(doc),
        leaf=about,
    )


def load_others(suite: Suite, library: Library, say: Say) -> dict[str, TaskSet]:
    """Load the tasks of a suite that are not pinned, one by one; each must have choices with one right answer."""
    from evalkit.suites.lm_eval_tasks import load_tasks, names_in
    from evalkit.suites.task_identity import set_seeds

    defined = () if suite.task_files is None else names_in(suite.task_files)
    if clash := [task for task in suite.pinned if task in defined]:
        raise UsageError(
            f"task {clash[0]} is in {suite.task_files} and among evalkit's own tasks; rename the task in your folder"
        )
    set_seeds()
    loaded = {}
    for task in suite.others:
        loaded[task] = load_tasks((task,), suite.task_files, suite.num_fewshot, library, say)
        for name, leaf in loaded[task].tasks.items():
            why = "its documents have several right answers" if getattr(leaf, "multiple_target", 0) else ""
            if leaf.OUTPUT_TYPE != "multiple_choice":
                why = f"its output type is {leaf.OUTPUT_TYPE}"
            elif callable(getattr(leaf.config, "process_results", None)):
                why = "it computes its metrics by its own function"
            if why:
                raise UsageError(
                    f"task {name if name == task else f'{task} ({name})'}: {why}, but templates and rules need choices "
                    f"with one right answer; run it with its own metrics: --suite lm_eval --tasks {task}"
                )
            # The specification includes the content of the examples only if their number is set
            leaf.set_config(key="num_fewshot", value=suite.num_fewshot)
    return loaded


def identity_of(tasks: TaskSet, library: Library) -> tuple[str, dict[str, Any]]:
    from evalkit.suites.task_identity import source_of, task_specification

    sources = [source_of(leaf, name in tasks.pinned, library) for name, leaf in tasks.tasks.items()]
    contents = [[name, task_specification(leaf, None)] for name, leaf in tasks.tasks.items()]
    text = json.dumps(contents, sort_keys=True, ensure_ascii=False)
    source = {
        "source": "; ".join(dict.fromkeys(leaf["source"] for leaf in sources)),
        "official": all(leaf["official"] for leaf in sources),
        "total": sum(leaf["total"] for leaf in sources),
    }
    return text_digest(text), source
