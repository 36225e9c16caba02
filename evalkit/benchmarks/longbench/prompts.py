"""LongBench's prompts: a task and its rows → generation requests.

Prompt templates are lm-eval's, repaired where they differ from the official ones and pinned by their hashes. As in the
official code (THUDM/LongBench@2e00731, `pred.py`), prompts are tokenised with special tokens; of a prompt longer than
`max_prompt_tokens`, the first and the last max_prompt_tokens / 2 tokens are decoded without special tokens, and their
joined texts are tokenised again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from evalkit.benchmarks.generated import GenerationRequest
from evalkit.benchmarks.longbench.protocol import Task
from evalkit.errors import DataError, TemplateError
from evalkit.generation.prompts import Prompt, Stops, as_message
from evalkit.inputs.reading import read_task_file

if TYPE_CHECKING:
    from evalkit.benchmarks.longbench.data import LongBenchDocument

_FIELD = re.compile(r"\{(context|input)\}")
_REPAIRED = ("triviaqa", "samsum")
"""Tasks in whose template of lm-eval a newline is missing before the last example."""
_ENDINGS = {"passage_count": " ", "passage_retrieval_en": " ", "lcc": "\n", "repobench-p": "\n"}
"""Task → the white space missing at the end of lm-eval's template."""

FIRST_LINE = r"\A\n*[^\n]+\n"
"""Matches when the first line after leading newlines is complete (`metrics.first_line`)."""
CODE_LINE = r"\A\n*(?=[^\n])(?:[^\n]*\n)*?(?:(?!//)[^\n`#])*\n"
"""Matches when a line without a backtick, "#" or "//" is complete (`metrics.code_line`); an empty line counts."""


def generation_requests(
    task: Task,
    rows: Sequence[LongBenchDocument],
    tokenizer: Any,
    ends: Collection[int],
    max_prompt_tokens: int,
    context: int,
    chat: bool = False,
) -> list[GenerationRequest]:
    """Return the generation requests of a task's rows, in order.

    Prompts of more than `max_prompt_tokens` are truncated; prompt and answer fit into `context` tokens.
    """
    stops = stops_of(task, frozenset(ends), tokenizer)
    most, with_chat = context - task.max_new_tokens, chat and task.chat
    requests = []
    for row in rows:
        text, label = prompt_text(task, row), f"{task.name} row {row.id}"
        tokens, before = fit_prompt(tokenizer, text, max_prompt_tokens, most, chat=with_chat, label=label)
        prompt = Prompt(row.index, np.asarray(tokens, np.int64), task.max_new_tokens, stops)
        requests.append(GenerationRequest(row.id, prompt, hashlib.sha256(text.encode()).hexdigest(), before))
    return requests


@cache
def template(task: Task) -> str:
    """Return the official prompt template, with fields {context} and (most tasks) {input}."""
    # Not imported, since that takes seconds
    spec = find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise TemplateError("LongBench's prompts are read from lm-eval, which is not installed: install lm-eval 0.4.13")
    path = Path(spec.origin).parent / "tasks" / "longbench" / f"{task.name}.yaml"
    content = read_task_file(path, _unreadable)
    if not isinstance(content, dict) or "doc_to_text" not in content:
        raise _unreadable(f"{path}: no prompt for {task.name}")
    text = str(content["doc_to_text"]).replace("{{context}}", "{context}").replace("{{question}}", "{input}")
    if task.name in _REPAIRED:
        text = text.replace("\n{input}", "\n\n{input}")
    text += _ENDINGS.get(task.name, "")
    digest = hashlib.sha256(text.encode()).hexdigest()
    if digest != task.prompt_sha256:
        raise TemplateError(
            f"{path}: the prompt for {task.name} is not the official one (expected sha256 {task.prompt_sha256[:12]}…, "
            f"found {digest[:12]}…); this lm-eval is another version: install lm-eval 0.4.13"
        )
    return text


def _unreadable(reason: str) -> TemplateError:
    return TemplateError(f"LongBench's prompt cannot be read ({reason}); install lm-eval 0.4.13")


def prompt_text(task: Task, row: LongBenchDocument) -> str:
    """Return the prompt for one row. Braces in the row's text are not fields."""
    fields = {"context": row.context, "input": row.input}
    return _FIELD.sub(lambda match: fields[match[1]], template(task))


def fit_prompt(
    tokenizer: Any, text: str, max_prompt_tokens: int, most: int, *, chat: bool, label: str
) -> tuple[list[int], int | None]:
    """Return a prompt's token ids, and their number before truncation in the middle if it is too long.

    The text is truncated to `max_prompt_tokens`, then put into the chat template as one user message. A truncated text
    may be tokenised to more tokens than before, and a template has tokens too; where the prompt exceeds `most`, all
    that the context window allows, it is truncated further, which the official code does not do.
    """
    ids = tokenizer(text, verbose=False).input_ids  # no warning about long texts, which are truncated here
    before, kept, limit = len(ids), text, max_prompt_tokens
    truncated = before > max_prompt_tokens
    while True:
        if truncated:
            half = limit // 2
            parts = (ids[:half], ids[len(ids) - half :])
            kept = "".join(tokenizer.decode(part, skip_special_tokens=True) for part in parts)
        tokens = as_message(tokenizer, kept) if chat else tokenizer(kept, verbose=False).input_ids if truncated else ids
        if len(tokens) <= most:
            return tokens, before if truncated else None
        truncated = True
        limit = min(limit, before) - max(2, len(tokens) - most)
        if limit < 2:
            raise DataError(f"{label}: no room for its prompt in {most} tokens; raise --context")


def stops_of(task: Task, ends: frozenset[int], tokenizer: Any) -> Stops:
    """Return the stopping criteria of a task, of a model with these end tokens.

    samsum ends at a newline too, and must start with neither a newline nor the EOS token.
    """
    barred: frozenset[int] = frozenset()
    if task.newline_ends:
        # The official code uses the tokenizer's EOS token here, not the model's end tokens
        eos = ends if tokenizer.eos_token_id is None else frozenset([tokenizer.eos_token_id])
        ends = barred = eos | frozenset(tokenizer("\n", add_special_tokens=False).input_ids[-1:])
    if task.first_line_only:
        return Stops(ends, barred, pattern=FIRST_LINE)
    return Stops(ends, barred, pattern=CODE_LINE if task.metric == "edit_similarity" else "")
