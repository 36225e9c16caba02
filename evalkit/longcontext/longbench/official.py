"""LongBench's official code, reimplemented from its behaviour: prompts, truncation, stopping criteria and metrics.

In: a task's documents and a tokenizer, or a prediction and its gold answers. Out: generation requests, or a score.
Source: THUDM/LongBench@2e00731 (`pred.py`, `metrics.py`, `eval.py`); scores are tested against its scores of public
predictions. Prompt templates are lm-eval's, repaired where they differ from the official ones, and pinned by hash.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from difflib import SequenceMatcher
from functools import cache, partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from evalkit.errors import DataError, TemplateError
from evalkit.generation.prompts import Prompt, Stops, as_message
from evalkit.inputs.reading import read_task_file
from evalkit.inputs.values import text_digest
from evalkit.longcontext.longbench.protocol import Task
from evalkit.requests.requests import Generate

if TYPE_CHECKING:
    from evalkit.longcontext.longbench.data import LongBenchDocument

EditVariant = Literal["difflib", "rapidfuzz"]
"""The official code's edit similarity without and with python-Levenshtein; published scores use the first."""

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
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(a|an|the)\b")
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


def fit_prompt(
    tokenizer: Any, text: str, max_prompt_tokens: int, most: int, *, chat: bool, label: str
) -> tuple[list[int], int | None]:
    """Return a prompt's token ids, and their number before truncation in the middle if it is too long.

    As in the official code, prompts are tokenised with special tokens. Of one longer than `max_prompt_tokens`, the
    first and the last max_prompt_tokens / 2 tokens are decoded without special tokens, and their joined texts are
    tokenised again, as one user message if `chat`. The result may have more tokens than before, and a chat template has
    tokens too; where it exceeds `most`, all that the context window allows, the text is truncated further, which the
    official code does not do.
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


def qa_f1(prediction: str, answer: str) -> float:
    """Return the F1 of the common words, 2PR / (P + R), with P and R over words counted with multiplicity.

    Both texts are lower-cased, ASCII punctuation and then the words a, an, the are removed, and the rest is split at
    white space. Source: Rajpurkar et al., "SQuAD" (2016), section 6.1.
    """
    predicted, expected = (
        _ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split() for text in (prediction, answer)
    )
    common = (Counter(predicted) & Counter(expected)).total()
    if not common:
        return 0.0
    precision, recall = common / len(predicted), common / len(expected)
    return 2 * precision * recall / (precision + recall)


def rouge_l(prediction: str, answer: str) -> float:
    """Return the ROUGE-L of a prediction and one answer, from 0 to 1.

    Let U be the set of words in a longest common subsequence of any answer sentence and any predicted
    sentence; m and n the numbers of distinct words of answer and prediction; R = |U| / m and P = |U| / n. The score is
    2 P R / (P + R + 1e-8), so that equal texts score slightly below 1. It is 0 if either text has no sentence.

    Source: Lin, "ROUGE" (2004), section 3.2, as in the Python package `rouge` 1.0.1, `rouge_l_summary_level`.
    """
    # A sentence of white space only is one empty word, as in the package
    predicted, expected = (
        [" ".join(sentence.split()).split(" ") for sentence in text.split(".") if sentence]
        for text in (prediction, answer)
    )
    if not predicted or not expected:
        return 0.0
    common: set[str] = set()
    # Equal sentences, frequent in repetitive predictions, have equal subsequences
    candidates = [(list(sentence), set(sentence)) for sentence in dict.fromkeys(map(tuple, predicted))]
    for reference in expected:
        words = set(reference)
        for candidate, candidate_words in candidates:
            # A pair only adds words that both sentences have
            if not words & candidate_words <= common:
                common |= _common_subsequence(reference, candidate, words)
    precision, recall = (len(common) / len(set(chain.from_iterable(text))) for text in (predicted, expected))
    return 2.0 * (precision * recall / (precision + recall + 1e-8))


def _common_subsequence(reference: list[str], candidate: list[str], words: set[str]) -> set[str]:
    """Return the words of one longest common subsequence; of several, the one that the package finds.

    Row i of the table of lengths T is stored as one integer: its bit j is 0 where T[i, j + 1] exceeds T[i, j] by one.
    Hyyrö, "Bit-parallel LCS-length computation revisited" (2004). In the backtrace from the end, the package skips the
    reference's word if that keeps the length and skipping the candidate's word would reduce it, which is where the bit
    is 0; otherwise it skips the candidate's word.
    """
    # The backtrace always skips words that are not in the reference
    candidate = [word for word in candidate if word in words]
    places: dict[str, int] = {}
    for position, word in enumerate(candidate):
        places[word] = places.get(word, 0) | 1 << position
    every = (1 << len(candidate)) - 1
    row, rows = every, list[int]()
    for word in reference:
        kept = row & places.get(word, 0)
        row = ((row + kept) | (row - kept)) & every
        rows.append(row)
    common: set[str] = set()
    i, j = len(reference) - 1, len(candidate) - 1
    while i >= 0 and j >= 0:
        if reference[i] == candidate[j]:
            common.add(reference[i])
            i, j = i - 1, j - 1
        elif rows[i] >> j & 1:
            j -= 1
        else:
            i -= 1
    return common


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


def edit_similarity(prediction: str, answer: str, backend: EditVariant = "difflib") -> float:
    """Return the similarity of two lines of code, rounded to whole percent, as a fraction: int(round(100 s)) / 100.

    With `difflib`, s is the standard library's ratio of matching blocks, 2M / T, with its junk heuristic. It is not
    symmetric; the prediction is the first argument. With `rapidfuzz`, s is 1 - (insertions + deletions) / T. Equal
    texts give 1, also two empty ones; one empty text gives 0. Source: fuzzywuzzy's `ratio`, without and with
    python-Levenshtein.
    """
    if prediction == answer:
        return 1.0
    if not prediction or not answer:
        return 0.0
    if backend == "difflib":
        return round(100 * SequenceMatcher(None, prediction, answer).ratio()) / 100
    from rapidfuzz.distance import Indel

    return round(100 * float(Indel.normalized_similarity(prediction, answer))) / 100
