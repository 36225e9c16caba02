"""LongBench's official code, reimplemented from its behaviour: prompts, stopping criteria and metrics.

In: a task's documents and a tokenizer, or a prediction and its gold answers. Out: generation requests, or a score.
Source: THUDM/LongBench@2e00731 (`pred.py`, `metrics.py`, `eval.py`); scores are tested against its scores of public
predictions. Prompt templates are lm-eval's, repaired where they differ from the official ones, and pinned by hash. What
other benchmarks have of it too is in `answer_metrics` (F1, ROUGE-L, edit similarity) and `fit_prompt` (truncation).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from evalkit.benchmarks.answer_metrics import EditVariant, edit_similarity, qa_f1, rouge_l
from evalkit.errors import TemplateError
from evalkit.generation.prompts import Prompt, Stops, fit_prompt
from evalkit.inputs.reading import read_task_file
from evalkit.inputs.values import text_digest
from evalkit.longcontext.longbench.protocol import Task
from evalkit.requests.requests import Generate

if TYPE_CHECKING:
    from evalkit.longcontext.longbench.data import LongBenchDocument

FIRST_LINE = r"\A\n*[^\n]+\n"
"""Matches when the first line after leading newlines is complete (`first_line`)."""
CODE_LINE = r"\A\n*(?=[^\n])(?:[^\n]*\n)*?(?:(?!//)[^\n`#])*\n"
"""Matches when a line without a backtick, "#" or "//" is complete (`code_line`); an empty line counts."""
_INSTALL = "install lm-eval 0.4.13"
_FIELD = re.compile(r"\{(context|input)\}")
_REPAIRED = ("triviaqa", "samsum")
"""Tasks in whose template of lm-eval a newline is missing before the last example."""
_ENDINGS = {"passage_count": " ", "passage_retrieval_en": " ", "lcc": "\n", "repobench-p": "\n"}
"""Task → the white space missing at the end of lm-eval's template."""
_NUMBER = re.compile(r"\d+")
_PARAGRAPH = re.compile(r"Paragraph (\d+)")


@cache
def template(task: Task) -> str:
    """Return the official prompt template, with fields {context} and (most tasks) {input}."""
    # Not imported, since that takes seconds
    origin: Any = getattr(find_spec("lm_eval"), "origin", "")
    path = Path(origin).parent / "tasks" / "longbench" / f"{task.name}.yaml"
    content = read_task_file(path, lambda reason: TemplateError(f"{reason}; {_INSTALL}"), "LongBench's prompt")
    text = str(content.get("doc_to_text") if isinstance(content, dict) else None)
    text = text.replace("{{context}}", "{context}").replace("{{question}}", "{input}")
    if task.name in _REPAIRED:
        text = text.replace("\n{input}", "\n\n{input}")
    text += _ENDINGS.get(task.name, "")
    if not text_digest(text).startswith(task.prompt_hash):
        raise TemplateError(f"{path}: the prompt is not the official one of {task.name}; {_INSTALL}")
    return text


def prompt_text(task: Task, row: LongBenchDocument) -> str:
    """Return the prompt for one row. Braces in the row's text are not fields."""
    fields = {"context": row.context, "input": row.input}
    return _FIELD.sub(lambda match: fields[match[1]], template(task))


def generation_requests(
    task: Task,
    rows: Sequence[LongBenchDocument],
    tokenizer: Any,
    ends: Collection[int],
    max_prompt_tokens: int,
    context: int,
    chat: bool = False,
) -> list[Generate]:
    """Return the requests of a task's rows, in order; prompt and answer fit into `context` tokens."""
    stops, most = stops_of(task, frozenset(ends), tokenizer), context - task.max_new_tokens
    requests = []
    for row in rows:
        text, label = prompt_text(task, row), f"{task.name} row {row.id}"
        tokens, before = fit_prompt(tokenizer, text, max_prompt_tokens, most, chat=chat and task.chat, label=label)
        prompt = Prompt(row.index, np.asarray(tokens, np.int64), task.max_new_tokens, stops)
        requests.append(Generate(row.id, prompt, text_digest(text), before))
    return requests


def stops_of(task: Task, ends: frozenset[int], tokenizer: Any) -> Stops:
    """Return the stopping criteria; samsum ends at a newline too, and starts with neither a newline nor EOS."""
    barred: frozenset[int] = frozenset()
    if task.newline_ends:
        # The official code uses the tokenizer's EOS token here, not the model's end tokens
        eos = ends if tokenizer.eos_token_id is None else frozenset([tokenizer.eos_token_id])
        ends = barred = eos | frozenset(tokenizer("\n", add_special_tokens=False).input_ids[-1:])
    if task.first_line_only:
        return Stops(ends, barred, pattern=FIRST_LINE)
    return Stops(ends, barred, pattern=CODE_LINE if task.metric == "edit_similarity" else "")


def score_prediction(
    task: Task,
    prediction: str,
    row_answers: Sequence[str],
    all_classes: Sequence[str] = (),
    variant: EditVariant = "difflib",
) -> float:
    """Score a prediction, text without special tokens, from 0 to 1: the maximum over the gold answers."""
    if task.first_line_only:
        prediction = first_line(prediction)
    if task.metric == "edit_similarity":
        prediction = code_line(prediction)
    by_metric: dict[str, Callable[[str, str], float]] = {
        "f1": qa_f1,
        "rouge_l": rouge_l,
        "classification": partial(classification, all_classes=all_classes),
        "retrieval": retrieval,
        "count": count,
        "edit_similarity": partial(edit_similarity, backend=variant),
    }
    return max(by_metric[task.metric](prediction, answer) for answer in row_answers)


def first_line(prediction: str) -> str:
    return prediction.lstrip("\n").split("\n", 1)[0]


def code_line(prediction: str) -> str:
    """Return the first line without a backtick, "#" or "//", after leading newlines; a later blank line counts."""
    lines = prediction.lstrip("\n").split("\n")
    return next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")


def classification(prediction: str, answer: str, all_classes: Sequence[str]) -> float:
    """Return 1 / (number of labels in the prediction) if the gold label is one of them, else 0.

    Labels that are proper substrings of the gold label do not count. (The official code misses some of them while it
    removes them; no label of TREC is a substring of another, so no score differs.)
    """
    named = [label for label in all_classes if label in prediction]
    named = [label for label in named if label == answer or label not in answer]
    return 1.0 / len(named) if answer in named else 0.0


def retrieval(prediction: str, answer: str) -> float:
    """Return the fraction of numbers in the prediction that equal the gold paragraph's number; 0 without numbers."""
    return count(prediction, _PARAGRAPH.findall(answer)[0])


def count(prediction: str, answer: str) -> float:
    """Return the fraction of numbers in the prediction that equal the answer as strings; 0 without numbers."""
    numbers = _NUMBER.findall(prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0
