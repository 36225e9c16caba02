"""LongBench's prompts, read from the installed lm-eval, repaired, and verified by hash.

In: a task and a row. Out: the official prompt, verbatim. lm-eval 0.4.13's task files differ from the official templates
in white space on six tasks. The repairs are listed here and verified by the hash.
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
