"""LongBench's prompts: read from the installed lm-eval, repaired, and held to their hash.

In: a task and a row. Out: the official prompt, to the letter. lm-eval 0.4.13's task files differ from the official
templates in white space on six tasks; the repair is said here and the hash proves it.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from evalkit.benchmarks.longbench.documents import LongBenchDocument
from evalkit.benchmarks.longbench.protocol import Task
from evalkit.errors import DataError, TemplateError
from evalkit.inputs.yaml_reading import read_task_file

_FIELDS = {"{{context}}": "{context}", "{{question}}": "{input}"}
_FIELD = re.compile(r"\{(context|input)\}")

_REPAIRS: dict[str, tuple[str, str]] = {
    "triviaqa": ("\n{input}", "\n\n{input}"),
    "samsum": ("\n{input}", "\n\n{input}"),
}
"""Task → what of lm-eval's text is replaced by what."""

_ENDINGS: dict[str, str] = {
    "passage_count": " ",
    "passage_retrieval_en": " ",
    "lcc": "\n",
    "repobench-p": "\n",
}
"""Task → the white space that lm-eval's text lacks at its end."""


@cache
def template(task: Task) -> str:
    """The official prompt template, with fields {context} and (most tasks) {input}.

    Raises:
        TemplateError: lm-eval is not installed, lacks the task, or has another text than lm-eval 0.4.13's.
    """
    path = _task_folder() / f"{task.name}.yaml"
    content = read_task_file(path, _unreadable)
    if not isinstance(content, dict) or "doc_to_text" not in content:
        raise _unreadable(f"{path}: it holds no prompt for {task.name}")
    text = str(content["doc_to_text"])
    for theirs, ours in _FIELDS.items():
        text = text.replace(theirs, ours)
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
    """The prompt for one row. Braces in the row's own text stay what they are.

    Raises:
        DataError: the row is of another task.
        TemplateError: as `template`.
    """
    if row.task != task.name:
        raise DataError(f"row {row.id} is of task {row.task}, not of {task.name}")
    fields = {"context": row.context, "input": row.input}
    return _FIELD.sub(lambda found: fields[found[1]], template(task))


def _task_folder() -> Path:
    # Found, not imported: lm-eval takes seconds to import
    spec = find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise TemplateError("LongBench's prompts are read from lm-eval, which is not installed: install lm-eval 0.4.13")
    return Path(spec.origin).parent / "tasks" / "longbench"


def _unreadable(reason: str) -> TemplateError:
    return TemplateError(f"LongBench's prompt cannot be read ({reason}); install lm-eval 0.4.13")
