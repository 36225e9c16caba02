"""One row of LongBench, checked.

In: a line of a task's file. Out: a `LongBenchDocument`. A row that cannot be evaluated raises a `DataError` that names
the field; whoever reads the file adds where the row stands.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evalkit.benchmarks.longbench.protocol import Task
from evalkit.data.fields import Record, text, value, wrong
from evalkit.errors import DataError
from evalkit.inputs.reading import Unreadable, parse_json

LARGEST_ROW = 32 << 20
"""Bytes; the rows of the official file with the longest have 0.11 MiB on average (narrativeqa)."""

CONTENT_ID = "content-"
"""How the ids begin that a copy lacks and evalkit makes from the row's content."""

_REWORKED = ("question", "answer_prefix", "max_new_tokens")
"""Fields that only re-worked copies have, such as the hub's Xnhyacinth/LongBench."""

_CUES = {"trec": "Type:", "triviaqa": "Answer:", "samsum": "Summary:"}
"""What the `input` of few-shot rows ends with; re-worked copies move it to a field of its own."""


_MOST_WORDS = 2**31
"""No document has as many."""


@dataclass(frozen=True)
class LongBenchDocument:
    """One document with its question and gold answers."""

    task: str
    id: str
    """The official `_id`; where a copy lacks it, a hash of what determines the evaluation."""
    index: int
    """Position in the file, from 0."""
    context: str
    input: str
    """The question; for few-shot tasks the last, unanswered example; empty where a task has none."""
    answers: tuple[str, ...]
    """Gold answers, any of which will do."""
    length: int
    """The stored length in words, which sorts LongBench-E's rows into its buckets."""
    all_classes: tuple[str, ...]
    """The labels of a classification task; empty for others."""


def parse_row(task: Task, line: bytes, index: int, *, template_start: str | None) -> LongBenchDocument:
    """One line of a task's file.

    Args:
        task: whose file it is.
        line: JSON in UTF-8.
        index: position among the rows, from 0.
        template_start: how the task's prompt begins, to recognise copies that have it in their `context`; None where
            the file is known to be official, which then is not checked for that.

    Raises:
        DataError: it is no row of this task; names the field.
    """
    record = read_record(line)
    stored = record.get("dataset", task.name)
    if stored not in (task.name, f"{task.name}_e"):  # LongBench-E's rows bear either
        raise DataError(f"field 'dataset': expected '{task.name}', found {ascii(stored)[:60]}: another task's file")
    if template_start is not None:
        _refuse_reworked(task, record, template_start)
    context = text(record, "context")
    question = text(record, "input", may_be_empty=True)
    answers = _texts(record, "answers")
    if not any(answer.strip() for answer in answers):
        raise wrong("answers", "at least one gold answer", list(answers))
    length = words(record)
    classes = () if record.get("all_classes") is None else _texts(record, "all_classes")
    if task.metric == "classification" and not set(answers) <= set(classes):
        raise wrong("all_classes", f"the labels of {task.name}, the gold answer among them", record.get("all_classes"))
    if task.metric == "retrieval" and not all("Paragraph " in answer for answer in answers):
        raise wrong("answers", "'Paragraph' and a number", list(answers))
    if record.get("_id") is None:
        identity = CONTENT_ID + _content_hash(task, context, question, answers)
    else:
        identity = text(record, "_id")
    return LongBenchDocument(task.name, identity, index, context, question, answers, length, classes)


def read_record(line: bytes) -> Record:
    """The JSON object of a line; a `DataError` says what it is instead."""
    try:
        record = parse_json(line)
    except Unreadable as error:
        raise DataError(f"expected one JSON object a line: {error.reason}") from error
    if not isinstance(record, dict):
        raise DataError(f"expected a JSON object, found {type(record).__name__}")
    return record


def words(record: Record) -> int:
    """The length that is stored with a row; a `DataError` says what it is instead."""
    length = value(record, "length", "an integer")
    if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length < _MOST_WORDS:
        raise wrong("length", "a number of words", length)
    return length


def _refuse_reworked(task: Task, record: Record, template_start: str) -> None:
    """Copies with the instruction already in their fields would be prompted twice, or lack the cue to answer."""
    advice = "; such a copy cannot give LongBench's scores: take the files of data.zip from THUDM/LongBench"
    names = [name for name in _REWORKED if name in record]
    if names:
        raise DataError(f"a re-worked copy of LongBench (it has a field '{names[0]}', official rows do not){advice}")
    context, question = record.get("context"), record.get("input")
    if isinstance(context, str) and len(template_start) > 20 and context.startswith(template_start.rstrip()):
        raise DataError(f"a re-worked copy of LongBench (the prompt is already in its 'context'){advice}")
    cue = _CUES.get(task.name)
    if cue and isinstance(question, str) and not question.rstrip().endswith(cue):
        raise DataError(f"a re-worked copy of LongBench (its 'input' does not end with '{cue}'){advice}")


def _texts(record: Record, field: str) -> tuple[str, ...]:
    expected = "a list of strings with something in it"
    found: Any = value(record, field, expected)
    if not isinstance(found, list) or not found:
        raise wrong(field, expected, found)
    return tuple(text({field: item}, field, may_be_empty=True) for item in found)


def _content_hash(task: Task, context: str, question: str, answers: Sequence[str]) -> str:
    content = json.dumps([task.name, context, question, list(answers)])
    return hashlib.sha256(content.encode("ascii")).hexdigest()[:24]
