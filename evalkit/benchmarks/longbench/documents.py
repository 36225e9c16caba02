"""Validation of LongBench's rows.

In: a line of a task's file. Out: a `LongBenchDocument`. A row that is not valid raises a `DataError` that names the
field; the reader of the file adds file and line.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from evalkit.benchmarks.longbench.protocol import Task
from evalkit.data.files import Record, text, value, wrong
from evalkit.errors import DataError, TemplateError
from evalkit.inputs.reading import Unreadable, parse_json
from evalkit.inputs.yaml_reading import read_task_file

LARGEST_ROW = 32 << 20
"""Most bytes of a row. The longest official rows (narrativeqa) have 0.11 MiB on average."""

CONTENT_ID = "content-"
"""Prefix of ids that evalkit computes from the content of rows without `_id`."""

_REWORKED = ("question", "answer_prefix", "max_new_tokens")
"""Fields that exist only in re-worked copies, such as the hub's Xnhyacinth/LongBench."""

_CUES = {"trec": "Type:", "triviaqa": "Answer:", "samsum": "Summary:"}
"""Task → the end of the `input` of its few-shot rows, which re-worked copies move to another field."""

_MOST_WORDS = 2**31
"""Upper bound of a document's length in words."""


@dataclass(frozen=True)
class LongBenchDocument:
    """One document with its question and gold answers."""

    task: str
    id: str
    """The official `_id`; if it is missing, a hash of the content that determines the evaluation."""
    index: int
    """Position in the file, from 0."""
    context: str
    input: str
    """The question; for few-shot tasks the last, unanswered example; empty where a task has none."""
    answers: tuple[str, ...]
    """Gold answers, of which any one is correct."""
    length: int
    """The stored length in words, which determines the bucket of LongBench-E's rows."""
    all_classes: tuple[str, ...]
    """The labels of a classification task; empty for others."""


def parse_row(task: Task, line: bytes, index: int, *, template_start: str | None) -> LongBenchDocument:
    """Parse one line of a task's file.

    Args:
        task: the file's task.
        line: JSON in UTF-8.
        index: position among the rows, from 0.
        template_start: start of the task's prompt, to detect copies with the prompt in their `context`; None for
            an official file, which is not checked.

    Raises:
        DataError: the row is not valid for this task; names the field.
    """
    record = read_record(line)
    stored = record.get("dataset", task.name)
    if stored not in (task.name, f"{task.name}_e"):  # LongBench-E's rows have either
        raise DataError(f"field 'dataset': expected '{task.name}', found {ascii(stored)[:60]}: another task's file")
    if template_start is not None:
        _reject_reworked(task, record, template_start)
    context = text(record, "context")
    question = text(record, "input", may_be_empty=True)
    answers = _texts(record, "answers")
    if not any(answer.strip() for answer in answers):
        raise wrong("answers", "at least one gold answer", list(answers))
    length = words(record)
    classes = () if record.get("all_classes") is None else _texts(record, "all_classes")
    if task.metric == "classification" and not set(answers) <= set(classes):
        raise wrong("all_classes", f"the labels of {task.name}, including the gold answer", record.get("all_classes"))
    if task.metric == "retrieval" and not all("Paragraph " in answer for answer in answers):
        raise wrong("answers", "'Paragraph' and a number", list(answers))
    if record.get("_id") is None:
        identity = CONTENT_ID + _content_hash(task, context, question, answers)
    else:
        identity = text(record, "_id")
    return LongBenchDocument(task.name, identity, index, context, question, answers, length, classes)


def read_record(line: bytes) -> Record:
    """Return the JSON object of a line; raise a `DataError` for any other content."""
    try:
        record = parse_json(line)
    except Unreadable as error:
        raise DataError(f"expected one JSON object a line: {error.reason}") from error
    if not isinstance(record, dict):
        raise DataError(f"expected a JSON object, found {type(record).__name__}")
    return record


def words(record: Record) -> int:
    """Return the stored length of a row in words; raise a `DataError` for any other value."""
    length = value(record, "length", "an integer")
    if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length < _MOST_WORDS:
        raise wrong("length", "a number of words", length)
    return length


def _reject_reworked(task: Task, record: Record, template_start: str) -> None:
    """Raise a `DataError` for re-worked copies, whose prompts would contain the instruction twice or lack the cue."""
    advice = "; its scores would not be LongBench's: use the files of data.zip from THUDM/LongBench"
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
    expected = "a list of strings that is not empty"
    found: Any = value(record, field, expected)
    if not isinstance(found, list) or not found:
        raise wrong(field, expected, found)
    return tuple(text({field: item}, field, may_be_empty=True) for item in found)


def _content_hash(task: Task, context: str, question: str, answers: Sequence[str]) -> str:
    content = json.dumps([task.name, context, question, list(answers)])
    return hashlib.sha256(content.encode("ascii")).hexdigest()[:24]


_FIELDS = {"{{context}}": "{context}", "{{question}}": "{input}"}
_FIELD = re.compile(r"\{(context|input)\}")

_REPAIRS: dict[str, tuple[str, str]] = {
    "triviaqa": ("\n{input}", "\n\n{input}"),
    "samsum": ("\n{input}", "\n\n{input}"),
}
"""Task → (text in lm-eval's template, official text)."""

_ENDINGS: dict[str, str] = {
    "passage_count": " ",
    "passage_retrieval_en": " ",
    "lcc": "\n",
    "repobench-p": "\n",
}
"""Task → the white space missing at the end of lm-eval's template."""


@cache
def template(task: Task) -> str:
    """Return the official prompt template, with fields {context} and (most tasks) {input}.

    Raises:
        TemplateError: lm-eval is not installed, lacks the task, or has another template than lm-eval 0.4.13.
    """
    path = _task_folder() / f"{task.name}.yaml"
    content = read_task_file(path, _unreadable)
    if not isinstance(content, dict) or "doc_to_text" not in content:
        raise _unreadable(f"{path}: no prompt for {task.name}")
    text = str(content["doc_to_text"])
    for lm_eval_field, official_field in _FIELDS.items():
        text = text.replace(lm_eval_field, official_field)
    if task.name in _REPAIRS:
        text = text.replace(*_REPAIRS[task.name])
    text += _ENDINGS.get(task.name, "")
    found = hashlib.sha256(text.encode()).hexdigest()
    if found != task.prompt_sha256:
        raise TemplateError(
            f"{path}: the prompt for {task.name} is not the official one (expected sha256 {task.prompt_sha256[:12]}…, "
            f"found {found[:12]}…); this lm-eval is another version: install lm-eval 0.4.13"
        )
    return text


def prompt(task: Task, row: LongBenchDocument) -> str:
    """Return the prompt for one row. Braces in the row's text are not fields.

    Raises:
        DataError: the row is of another task.
        TemplateError: see `template`.
    """
    if row.task != task.name:
        raise DataError(f"row {row.id} is of task {row.task}, not of {task.name}")
    fields = {"context": row.context, "input": row.input}
    return _FIELD.sub(lambda match: fields[match[1]], template(task))


def _task_folder() -> Path:
    # Not imported, since that takes seconds
    spec = find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise TemplateError("LongBench's prompts are read from lm-eval, which is not installed: install lm-eval 0.4.13")
    return Path(spec.origin).parent / "tasks" / "longbench"


def _unreadable(reason: str) -> TemplateError:
    return TemplateError(f"LongBench's prompt cannot be read ({reason}); install lm-eval 0.4.13")
