"""Checks of the documents, prompts and solved examples of lm-eval's tasks.

In: a loaded task, the requests that lm-eval has built of it, or lm-eval's own warnings. Out: caveats of its metrics,
with numbers of documents; a task without any valid reference is a `DataError`. Solved examples never have the content
of the evaluated document.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from evalkit.compatibility.lm_eval import gold_index, is_index, reads_references
from evalkit.compatibility.names import replaced
from evalkit.data.sampling import repeated_prompts
from evalkit.errors import DataError
from evalkit.escape import counted, printable

if TYPE_CHECKING:
    import logging

_SHOWN = 40
"""Characters of a document's value in a message."""
_NAME = re.compile(r"Group '(?P<group>[^']+)': |\[(?:Task: )?(?P<task>[^]]+)\] ")
"""Beginning of lm-eval's warnings about a group or a task."""
_GOLD_WARNING = "Label index was not in"
_LONGEST_WARNING = 200
"""Characters of a text."""


class ReferenceProblem(NamedTuple):
    text: str
    is_answerable: bool
    """Whether an answer can be right nevertheless: one of several gold answers is valid."""


def fix_documents(task: Any) -> None:
    """Make a task return the same evaluated documents at each access.

    lm-eval calls the `process_docs` of a task file at each access. One that shuffles without a seed would return other
    documents when lm-eval measures the answers than when it built the requests.
    """
    documents = task.eval_docs
    split = "test_docs" if task.has_test_docs() else "validation_docs"
    setattr(task, split, lambda: documents)


def exclude_evaluated_document(task: Any) -> None:
    """Make a task draw its solved examples from documents with another content than the evaluated one.

    lm-eval excludes the document only if the task file names one split for both, and only if all fields are equal.
    Where lm-eval's examples have another content, they are lm-eval's.
    """
    if not hasattr(task, "sampler") or not hasattr(task, "fewshot_cfg"):
        return
    others, fewshot_context = _OtherExamples(task), task.fewshot_context

    def with_other_examples(doc: Any, *arguments: Any, **options: Any) -> Any:
        with replaced(task.sampler, sample=lambda draw: partial(others.draw, doc, draw)):
            return fewshot_context(doc, *arguments, **options)

    task.fewshot_context = with_other_examples


class _Content(NamedTuple):
    """What identifies a document in its prompt."""

    question: str
    answers: list[str]
    """The options, sorted; without options the target."""


class _OtherExamples:
    """Solved examples of a task that are not the evaluated document."""

    def __init__(self, task: Any) -> None:
        self._task = task
        self._contents: dict[int, tuple[Any, _Content]] = {}
        """Examples that were drawn, with their contents, by the identity of the object."""

    def draw(self, doc: Any, draw: Callable[..., Sequence[Any]], n: int, **options: Any) -> Sequence[Any]:
        """Return `n` examples by the sampler's own `draw`; if the document is among them, draw from the others."""
        task, sampler = self._task, self._task.sampler
        before = sampler.rnd.getstate()
        examples = draw(n=n, **options)
        if not any(self._is_like(doc, examples)):
            return examples
        after = sampler.rnd.getstate()
        likeness = self._is_like(doc, sampler.df)
        others = [example for example, is_like in zip(sampler.df, likeness, strict=True) if not is_like]
        if len(others) < n:
            count = counted(len(others), "few-shot example")
            raise DataError(
                f"task {task.task_name}: expected {n}, found {count} apart from the document itself; lower "
                "--num-fewshot"
            )
        sampler.rnd.setstate(before)
        with replaced(sampler, df=lambda _: others):
            examples = draw(n=n)
        # Later documents have lm-eval's examples
        sampler.rnd.setstate(after)
        if any(self._is_like(doc, examples)):
            raise DataError(
                f"task {task.task_name}: its sampler draws the evaluated document as a solved example; name another "
                "fewshot_split"
            )
        return examples

    def _is_like(self, doc: Any, examples: Sequence[Any]) -> list[bool]:
        """Whether each example has the content of a document."""
        form = self._task.fewshot_cfg
        # Examples that the task file lists may lack fields of the documents
        has_their_fields = all(example.keys() <= doc.keys() for example in examples[:1])
        content = self._content(doc, form if has_their_fields else self._task.config)
        return [self._content_of(example) == content for example in examples]

    def _content_of(self, example: Any) -> _Content:
        if id(example) not in self._contents:
            self._check_gold(example)
            self._contents[id(example)] = example, self._content(example, self._task.fewshot_cfg)
        return self._contents[id(example)][1]

    def _content(self, doc: Any, form: Any) -> _Content:
        task = self._task
        question = " ".join(str(task.doc_to_text(doc, form.doc_to_text)).split())
        if form.doc_to_choice:
            return _Content(question, sorted(map(str, task.doc_to_choice(doc, form.doc_to_choice))))
        return _Content(question, [str(task.doc_to_target(doc, form.doc_to_target))])

    def _check_gold(self, example: Any) -> None:
        """Raise a `DataError` if a gold index is negative: lm-eval would show a choice counted from the end."""
        form = self._task.fewshot_cfg
        gold = self._task.doc_to_target(example, form.doc_to_target)
        if form.doc_to_choice and is_index(gold) and gold < 0:
            name = self._task.task_name
            raise DataError(f"task {name}: a solved example has the gold answer {gold}; name a labelled split")


def task_caveats(task: Any) -> list[str]:
    """Return what makes the metrics of a task doubtful, from the requests that lm-eval has built.

    Raises a `DataError` if lm-eval needs references and no document has a valid one.
    """
    requests: dict[int, list[Any]] = {}
    for instance in task.instances:
        requests.setdefault(instance.doc_id, []).append(instance)
    documents = {doc_id: members[0].doc for doc_id, members in requests.items()}
    caveats = [*_reference_caveats(task, documents)]
    if task.OUTPUT_TYPE == "multiple_choice":
        empty = [doc_id for doc_id, doc in documents.items() if "" in task.doc_to_choice(doc)]
        caveats += _of_documents(empty, len(documents), "a choice is empty")
    first = {doc_id: members[0].args[0] for doc_id, members in requests.items()}
    without_prompt = [doc_id for doc_id, context in first.items() if not context.strip()]
    # The prompt of all documents may be empty, as in BLiMP, where only the choices differ
    if len(without_prompt) < len(documents):
        what = "the text is empty" if task.OUTPUT_TYPE == "loglikelihood_rolling" else "the prompt is empty"
        caveats += _of_documents(without_prompt, len(documents), what)
    texts = (tuple(_texts(members)) for members in requests.values())
    return [*caveats, *repeated_prompts(texts)]


def _texts(instances: Iterable[Any]) -> Iterator[str]:
    for instance in instances:
        yield from (part for part in instance.args if isinstance(part, str))


def _reference_caveats(task: Any, documents: Mapping[int, Any]) -> list[str]:
    problems = {}
    for doc_id, doc in documents.items():
        if (problem := _reference_problem(task, doc_id, doc)) is not None:
            problems[doc_id] = problem
    if not problems:
        return []
    doc_id, first = next(iter(problems.items()))
    unanswerable = [problem for problem in problems.values() if not problem.is_answerable]
    if len(unanswerable) == len(documents):
        raise DataError(
            f"task {task.task_name}: no document has a valid reference, document {doc_id} for one: {first.text}; "
            "correct the documents, or doc_to_target in the task file"
        )
    return _of_documents([*problems], len(documents), first.text)


def _reference_problem(task: Any, doc_id: int, doc: Any) -> ReferenceProblem | None:
    """Return why a document's reference is not valid; None if it is, or if the task's own metrics read it.

    A gold answer of a type that lm-eval fails on is a `DataError`.
    """
    if not reads_references(task):
        return None
    gold = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
    golds = gold if isinstance(gold, list) else [gold]
    shown = printable(repr(gold))[:_SHOWN]
    has_choices = task.OUTPUT_TYPE in ("multiple_choice", "generate_until") and task.config.doc_to_choice is not None
    if has_choices:
        choices = task.doc_to_choice(doc)
        # lm-eval reads the first document's to find out whether there are several
        are_several = isinstance(gold, list)
        texts_are_read = task.OUTPUT_TYPE == "multiple_choice" and not are_several
        are_read = all(is_index(answer) or (texts_are_read and isinstance(answer, str)) for answer in golds)
        if not are_read or are_several != bool(task.multiple_target):
            raise DataError(
                f"{task.task_name} document {doc_id}: gold answer {shown} is not the number of a choice, or is a list "
                "unlike the first document's"
            )
        others = [answer for answer in golds if gold_index(answer, choices) is None]
        is_answerable = len(others) < len(golds)
        # A negative index fills a list of fixed length
        if is_answerable and all(answer < 0 for answer in others):
            return None
        return ReferenceProblem(f"gold answer {shown} is not one of the {len(choices)} choices", is_answerable)
    is_empty = all(answer in (None, "") for answer in golds)
    if is_empty and task.OUTPUT_TYPE != "loglikelihood_rolling":
        return ReferenceProblem(f"the reference is {shown}", is_answerable=False)
    return None


def _of_documents(doc_ids: Sequence[int], total: int, what: str) -> list[str]:
    if not doc_ids:
        return []
    return [f"{len(doc_ids):,} of {total:,} documents, document {doc_ids[0]} for one: {what}"]


def listed_metrics(task: Any) -> list[str]:
    """Return the metrics of a task file that lm-eval itself measures and names so."""
    if not reads_references(task):
        return []
    return [entry["metric"] for entry in task.config.metric_list or () if not entry.get("hf_evaluate")]


def logged_caveats(warnings: Iterable[logging.LogRecord]) -> Iterator[tuple[str, str]]:
    """Yield each of lm-eval's warnings about results once, after its task or group, or "lm-eval", with its count.

    Gold answers that are no choice are left out, since `task_caveats` has the number of their documents.
    """
    messages = Counter(_named(printable(record.getMessage())) for record in warnings)
    for (name, text), count in messages.items():
        if not text.startswith(_GOLD_WARNING):
            yield name, f"lm-eval: {text[:_LONGEST_WARNING]}" + f" ({count:,} times)" * (count > 1)


def _named(warning: str) -> tuple[str, str]:
    """Return the task or group that a warning begins with, and the rest of its text."""
    match = _NAME.match(warning)
    if match is None:
        return "lm-eval", warning
    return match["group"] or match["task"], warning[match.end() :]
