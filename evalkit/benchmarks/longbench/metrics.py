"""LongBench's metrics: one function each, from a prediction and one gold answer to a fraction.

Written anew after the behaviour of THUDM/LongBench@2e00731 (`metrics.py`, `eval.py`), and held to its scores of public
predictions. ROUGE-L stands in `rouge`.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Literal

from evalkit.benchmarks.longbench.protocol import Task
from evalkit.benchmarks.longbench.rouge import rouge_l
from evalkit.errors import DataError, UsageError

EditVariant = Literal["difflib", "rapidfuzz"]
EDIT_VARIANTS: tuple[EditVariant, ...] = ("difflib", "rapidfuzz")
"""The official code's edit similarity without and with python-Levenshtein; published scores are the former."""

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NUMBER = re.compile(r"\d+")
_PARAGRAPH = re.compile(r"Paragraph (\d+)")


def qa_f1(prediction: str, answer: str) -> float:
    """F1 of the words in common, 2PR / (P + R), with P and R over words counted as often as they stand there.

    Both texts are put in lower case, lose ASCII punctuation and then the words a, an, the, and are split at white
    space. 0 where nothing is in common, as where either is left empty.

    Source: Rajpurkar et al., "SQuAD" (2016), section 6.1.
    """
    predicted, expected = _normal_words(prediction), _normal_words(answer)
    common = (Counter(predicted) & Counter(expected)).total()
    if not common:
        return 0.0
    precision, recall = common / len(predicted), common / len(expected)
    return 2 * precision * recall / (precision + recall)


def classification(prediction: str, answer: str, all_classes: Sequence[str]) -> float:
    """1 / (labels named) where the gold label is among the labels that stand anywhere in the prediction, else 0.

    Labels that are part of the gold label without being it do not count as named. (The official code skips some of
    those while it removes them; no label of TREC is part of another, so no score differs.)
    """
    named = [label for label in all_classes if label in prediction]
    named = [label for label in named if label == answer or label not in answer]
    return 1.0 / len(named) if answer in named else 0.0


def retrieval(prediction: str, answer: str) -> float:
    """Of the numbers in the prediction, the fraction that is the gold paragraph's; 0 without numbers.

    Raises:
        DataError: the answer does not name a paragraph.
    """
    gold = _PARAGRAPH.search(answer)
    if gold is None:
        raise DataError(f"expected an answer like 'Paragraph 3', found {ascii(answer)[:60]}")
    return count(prediction, gold[1])


def count(prediction: str, answer: str) -> float:
    """Of the numbers in the prediction, the fraction that is the answer, digit by digit; 0 without numbers."""
    numbers = _NUMBER.findall(prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def edit_similarity(prediction: str, answer: str, backend: EditVariant = "difflib") -> float:
    """Similarity of two lines of code in whole percent, as a fraction: int(round(100 s)) / 100.

    With `difflib`, s is the standard library's ratio of matching blocks, 2M / T, junk heuristic included; it is not
    symmetric, the prediction comes first. With `rapidfuzz`, s is 1 - (insertions + deletions) / T. Equal texts give 1,
    two empty ones too; an empty one and another give 0.

    Source: fuzzywuzzy's `ratio`, without and with python-Levenshtein.

    Raises:
        UsageError: rapidfuzz is asked for and not installed.
    """
    if prediction == answer:
        return 1.0
    if not prediction or not answer:
        return 0.0
    if backend == "difflib":
        ratio = SequenceMatcher(None, prediction, answer).ratio()
        return round(100 * ratio) / 100
    try:
        from rapidfuzz.distance import Indel
    except ImportError:
        raise UsageError(
            "the edit similarity 'rapidfuzz' needs that package: pip install rapidfuzz, or take 'difflib'"
        ) from None
    similarity: float = Indel.normalized_similarity(prediction, answer)
    return round(100 * similarity) / 100


def first_line(prediction: str) -> str:
    """The first line, leading newlines apart; nothing else is stripped."""
    return prediction.lstrip("\n").split("\n", 1)[0]


def code_line(prediction: str) -> str:
    """The first line that has no backtick, "#" or "//", leading newlines apart; empty if there is none.

    A blank line in between counts, and indentation stays. (So Markdown fences and comments are passed over.)
    """
    lines = prediction.lstrip("\n").split("\n")
    return next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")


def score_prediction(
    task: Task,
    prediction: str,
    row_answers: Sequence[str],
    all_classes: Sequence[str] = (),
    variant: EditVariant = "difflib",
) -> float:
    """Score of a prediction, from 0 to 1: the best over the gold answers.

    Args:
        task: whose metric and first-line rule apply.
        prediction: as generated, special tokens apart.
        row_answers: gold answers, at least one.
        all_classes: labels of the task (classification only).
        variant: of the edit similarity (code completion only).

    Raises:
        DataError: there is no gold answer, or one that the metric cannot take.
        UsageError: the variant's package is not installed.
    """
    if not row_answers:
        raise DataError(f"{task.name}: a row without gold answers cannot be scored")
    if task.first_line_only:
        prediction = first_line(prediction)
    return max(_score(task, prediction, answer, all_classes, variant) for answer in row_answers)


def _score(task: Task, prediction: str, answer: str, all_classes: Sequence[str], variant: EditVariant) -> float:
    match task.metric:
        case "f1":
            return qa_f1(prediction, answer)
        case "rouge_l":
            return rouge_l(prediction, answer)
        case "classification":
            return classification(prediction, answer, all_classes)
        case "retrieval":
            return retrieval(prediction, answer)
        case "count":
            return count(prediction, answer)
        case "edit_similarity":
            return edit_similarity(code_line(prediction), answer, variant)


def _normal_words(text: str) -> list[str]:
    return _ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()
