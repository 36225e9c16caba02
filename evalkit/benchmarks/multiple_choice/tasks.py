"""Questions: the documents of a suite's tasks, preprocessed by lm-eval.

In: lm-eval task files and a `Library` of documents. Out: one `Question` for each document, built from lm-eval's own
requests, so that text, choices and gold answers are exactly lm-eval's. Those of pinned tasks are kept in evalkit's
cache: it is a second of each run that lm-eval and datasets are not imported.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.lm_eval.tasks import quiet_lm_eval
from evalkit.benchmarks.multiple_choice.suites import TASK_DIR, Suite, choose_tasks
from evalkit.benchmarks.request import spread
from evalkit.cache import folder_digest, read_cached_bytes, source_digest, write_cached_bytes
from evalkit.compatibility.lm_eval import fewshot_seed, index_of, index_tasks, processed_once, replace_index
from evalkit.data.lm_eval_dataset import dataset
from evalkit.data.sampling import ALL_DOCUMENTS, DocumentSelection, clusters_of
from evalkit.errors import DataError, UsageError
from evalkit.models.loading.fingerprint import hash_file
from evalkit.paths import resource

if TYPE_CHECKING:
    from evalkit.benchmarks.lm_eval.tasks import TaskSet
    from evalkit.benchmarks.multiple_choice.requests import Requests
    from evalkit.data import Library
    from evalkit.display import Say

_CACHED = "questions"
_BLOCK, _OF_SUBJECT = 4, 3
"""Documents next to each other in a sample, and the least of a subject: with fewer, what they share is unknown."""


@dataclass(frozen=True)
class LeafTask:
    """Properties of an lm-eval leaf task, for exports."""

    alias: str
    """Name in lm-eval's printed tables, e.g. "anatomy"."""
    version: Any
    documents: int


@dataclass(frozen=True)
class Question:
    """One multiple-choice document, before any template.

    `contexts`, `continuations` and `gaps` have one entry for each choice. Choices share either the context (all tasks
    but WinoGrande) or the continuation (WinoGrande); the shared text is repeated.
    """

    task: str
    """Task of the suite, e.g. "mmlu"."""
    subtask: str
    """lm-eval's leaf task, e.g. "mmlu_anatomy"; the task itself if it has no subjects."""
    doc_id: int
    """lm-eval's index of the document within the subtask."""
    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    delimiter: str
    gaps: tuple[str, ...]
    """Separator of context and continuation in running text: one space, or the white space of WinoGrande's sentence."""
    choices: tuple[str, ...]
    """The answer options, whose lengths lm-eval normalises by."""
    gold: int
    cluster: int
    """`doc_id` of the subtask's first document with the same source, which may be the document itself."""
    doc: dict[str, Any]
    leaf: LeafTask
    alone: tuple[str, ...] = ()
    """Contexts without the question, for unconditional log-likelihoods; empty: there is no context in these."""

    @property
    def label(self) -> str:
        return f"{self.subtask} document {self.doc_id}"


def pinned_questions(
    suite: Suite,
    library: Library,
    selection: DocumentSelection,
    requests: Mapping[str, Requests] | None = None,
    control: str | None = None,
) -> dict[str, list[Question]]:
    """Return the questions of a suite as `load_questions`, without other tasks of lm-eval; from the cache if there."""
    code = [source_digest(), folder_digest(resource(*TASK_DIR)), control or ""]
    hashes = {task: of_task.content_hash for task, of_task in (requests or {}).items()}
    keys = {task: _cache_key(suite, library, task, selection, code, hashes.get(task)) for task in suite.tasks}
    contents = {task: read_cached_bytes(_CACHED, key) for task, key in keys.items()}
    questions = {task: _unpacked(bytes(content)) for task, content in contents.items() if content is not None}
    if missing := tuple(task for task in suite.tasks if task not in questions):
        built = load_questions(choose_tasks(suite, missing), library, selection, None, None, requests, control)
        for task, members in built.items():
            if (packed := _packed(members)) is not None:
                write_cached_bytes(_CACHED, keys[task], packed)
        questions |= built
    return {task: questions[task] for task in suite.tasks}


def _cache_key(
    suite: Suite, library: Library, task: str, selection: DocumentSelection, code: list[str], requests: str | None
) -> str:
    names = [suite.documents.get(task, task)] + ([suite.fewshot[task].documents] if suite.num_fewshot else [])
    identities = [] if requests is None else [[requests, "requests"]]
    for name in names if requests is None else ():
        loaded, location = library.load(name), library.where(name)
        # A user's file may have fields that the content hash does not cover
        own_file = location.path if location.source == "data-dir" else None
        identities.append([loaded.content_hash, hash_file(own_file) if own_file else loaded.source])
    content = {
        "task": task,
        "documents": identities,
        "num_fewshot": suite.num_fewshot,
        **selection.specification,
        "versions": {name: version(name) for name in ("lm-eval", "datasets")},
        "code": code,
    }
    return json.dumps(content, sort_keys=True)


def _packed(questions: Sequence[Question]) -> bytes | None:
    """Return questions as JSON; None if they have other values than JSON has."""
    rows = []
    for question in questions:
        is_shared = len(set(question.contexts)) == 1
        contexts = question.contexts[:1] if is_shared else question.contexts
        alone = question.alone[:1] if len(set(question.alone)) == 1 else question.alone
        rows.append(vars(question) | {"contexts": contexts, "alone": alone, "leaf": None})
    try:
        packed = json.dumps([{question.subtask: asdict(question.leaf) for question in questions}, rows]).encode()
    except (TypeError, ValueError):
        return None
    return packed if _unpacked(packed) == list(questions) else None


def _unpacked(packed: bytes) -> list[Question]:
    leaves, rows = json.loads(packed)
    leaf_tasks = {subtask: LeafTask(**leaf) for subtask, leaf in leaves.items()}
    questions = []
    for row in rows:
        texts = {name: tuple(row[name]) for name in ("contexts", "alone", "continuations", "gaps", "choices")}
        for name in ("contexts", "alone"):
            if len(texts[name]) == 1:
                texts[name] *= len(texts["continuations"])
        questions.append(Question(**row | texts | {"leaf": leaf_tasks[row["subtask"]]}))
    return questions


def load_questions(
    suite: Suite,
    library: Library,
    selection: DocumentSelection = ALL_DOCUMENTS,
    others: Mapping[str, TaskSet] | None = None,
    estimate: int | None = None,
    requests: Mapping[str, Requests] | None = None,
    control: str | None = None,
) -> dict[str, list[Question]]:
    """Return task → its questions, in the suite's order.

    Args:
        suite: its `num_fewshot` examples become part of each context.
        library: source of the pinned tasks' documents.
        selection: which documents of each task; a subject is a stratum.
        others: the suite's other tasks, loaded by lm-eval.
        estimate: about how many of these to return, for estimates; at least a few of each subject.
        requests: the suite's tasks that are requests.
        control: "swap": each document has the context of another one (`requests.swapped`).

    Raises:
        DataError: documents or examples are missing or malformed.
        UsageError: a document belongs to two tasks.
    """
    if control:
        from evalkit.benchmarks.multiple_choice.requests import swapped

        every = load_questions(suite, library, ALL_DOCUMENTS, others, requests=requests)
        return {task: chosen(task, swapped(members), selection, estimate) for task, members in every.items()}
    questions: dict[str, list[Question]] = {}
    of_lm_eval = [task for task in suite.tasks if task not in (requests or {})]
    if of_lm_eval:
        questions = _questions_of_lm_eval(suite, of_lm_eval, library, selection, others or {}, estimate)
    for task, of_task in (requests or {}).items():
        if task in suite.tasks:
            questions[task] = chosen(task, of_task.questions(), selection, estimate)
    owner: dict[str, str] = {}
    for task, members in questions.items():
        for subtask in dict.fromkeys(question.subtask for question in members):
            if owner.setdefault(subtask, task) != task:
                raise UsageError(
                    f"{subtask} is part of task {owner[subtask]} and of task {task}, so its documents would count "
                    "twice; leave one task out, or run them separately"
                )
    return {task: questions[task] for task in suite.tasks}


def chosen(
    task: str, questions: Sequence[Question], selection: DocumentSelection, estimate: int | None
) -> list[Question]:
    """Return the questions of a selection, of all documents of a task; `estimate` as of `load_questions`."""
    by_subtask: dict[str, list[Question]] = {}
    for question in questions:
        by_subtask.setdefault(question.subtask, []).append(question)
    sizes = {name: len(members) for name, members in by_subtask.items()}
    numbers = selected_documents(task, sizes, selection)
    return [by_subtask[name][number] for name, of_subtask in numbers.items()
            for number in _spread(of_subtask, len(sizes), estimate)]  # fmt: skip


def _spread(numbers: list[int], subjects: int, estimate: int | None) -> list[int]:
    if estimate is None:
        return numbers
    return [numbers[index] for index in spread(len(numbers), max(_OF_SUBJECT, estimate // subjects), _BLOCK)]


def _questions_of_lm_eval(
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
        numbers = _spread(numbers, len(sizes), estimate)
        if numbers:
            questions += _leaf_questions(task, leaves[name], sizes[name], shots, numbers, estimate is None)
    return questions


def selected_documents(task: str, sizes: Mapping[str, int], selection: DocumentSelection) -> dict[str, list[int]]:
    """Return subject → the numbers of its documents that are read, in order; `sizes`: subject → its documents."""
    strata = [(name, number) for name, size in sizes.items() for number in range(size)]
    selected: dict[str, list[int]] = {name: [] for name in sizes}
    for index in selection.places(task, [name for name, _ in strata]):
        name, number = strata[index]
        selected[name].append(number)
    return selected


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
    return Question(
        task=task,
        subtask=leaf.config.task,
        doc_id=doc_id,
        contexts=tuple(context for context, _ in pairs),
        continuations=continuations,
        delimiter=delimiter,
        gaps=(gap,) * len(pairs),
        choices=choices,
        gold=_gold_index(leaf.doc_to_text(doc) if leaf.multiple_input else leaf.doc_to_target(doc), choices, label),
        cluster=cluster,
        doc=dict(doc),
        leaf=about,
    )


def _gold_index(gold: Any, choices: Sequence[str], label: str) -> int:
    """Return the index of a gold answer, which may be given as a choice's text, as in lm-eval."""
    try:
        index = choices.index(gold) if isinstance(gold, str) and gold in choices else int(gold)
    except (TypeError, ValueError):
        index = -1
    if not 0 <= index < len(choices):
        raise DataError(f"{label}: gold answer {gold!r} is not one of its {len(choices)} choices; correct the document")
    return index


def load_others(suite: Suite, library: Library, say: Say) -> dict[str, TaskSet]:
    """Load the tasks of a suite that are not pinned, one by one; each must have choices with one right answer."""
    from evalkit.benchmarks.lm_eval.plan import set_seeds
    from evalkit.benchmarks.lm_eval.tasks import load_tasks, names_in

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
    from evalkit.benchmarks.lm_eval.plan import source_of, task_specification

    sources = [source_of(leaf, name in tasks.pinned, library) for name, leaf in tasks.tasks.items()]
    contents = [[name, task_specification(leaf, None)] for name, leaf in tasks.tasks.items()]
    text = json.dumps(contents, sort_keys=True, ensure_ascii=False)
    source = {
        "source": "; ".join(dict.fromkeys(leaf["source"] for leaf in sources)),
        "official": all(leaf["official"] for leaf in sources),
        "count": sum(leaf["count"] for leaf in sources),
    }
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(), source
