"""LongBench's metrics: a prediction and a gold answer → a fraction.

Reimplemented from the behaviour of THUDM/LongBench@2e00731 (`metrics.py`, `eval.py`), and tested against its scores of
public predictions.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from functools import partial
from itertools import chain
from typing import Literal

from evalkit.benchmarks.longbench.protocol import Task
from evalkit.errors import DataError, UsageError


def rouge_l(prediction: str, answer: str) -> float:
    """Return the ROUGE-L of a prediction and one answer, from 0 to 1.

    Let U be the set of words in a longest common subsequence of any answer sentence and any predicted
    sentence; m and n the numbers of distinct words of answer and prediction; R = |U| / m and P = |U| / n. The score is
    2 P R / (P + R + 1e-8), so that equal texts score slightly below 1. It is 0 if either text has no sentence.

    Source: Lin, "ROUGE" (2004), section 3.2, as in the Python package `rouge` 1.0.1, `rouge_l_summary_level`.
    """
    predicted, expected = _sentences(prediction), _sentences(answer)
    if not predicted or not expected:
        return 0.0
    common = _union_of_subsequences(expected, predicted)
    precision, recall = (len(common) / len(set(chain.from_iterable(text))) for text in (predicted, expected))
    return 2.0 * (precision * recall / (precision + recall + 1e-8))


def _sentences(text: str) -> list[list[str]]:
    """Return the words of each sentence. A sentence of white space only is one empty word, as in the package."""
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _union_of_subsequences(expected: list[list[str]], predicted: list[list[str]]) -> set[str]:
    common: set[str] = set()
    # Equal sentences, frequent in repetitive predictions, have equal subsequences
    candidates = [(list(sentence), set(sentence)) for sentence in dict.fromkeys(map(tuple, predicted))]
    for reference in expected:
        words = set(reference)
        for candidate, candidate_words in candidates:
            # A pair only adds words that both sentences have
            if not words & candidate_words <= common:
                common |= _common_subsequence(reference, candidate, words)
    return common


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


EditVariant = Literal["difflib", "rapidfuzz"]
"""The official code's edit similarity without and with python-Levenshtein; published scores use the first."""

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NUMBER = re.compile(r"\d+")
_PARAGRAPH = re.compile(r"Paragraph (\d+)")


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
    gold = _PARAGRAPH.search(answer)
    if gold is None:
        raise DataError(f"expected an answer like 'Paragraph 3', found {ascii(answer)[:60]}")
    return count(prediction, gold[1])


def count(prediction: str, answer: str) -> float:
    """Return the fraction of numbers in the prediction that equal the answer as strings; 0 without numbers."""
    numbers = _NUMBER.findall(prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def edit_similarity(prediction: str, answer: str, backend: EditVariant = "difflib") -> float:
    """Return the similarity of two lines of code, rounded to whole percent, as a fraction: int(round(100 s)) / 100.

    With `difflib`, s is the standard library's ratio of matching blocks, 2M / T, with its junk heuristic. It is not
    symmetric; the prediction is the first argument. With `rapidfuzz`, s is 1 - (insertions + deletions) / T. Equal
    texts give 1, also two empty ones; one empty text gives 0.

    Source: fuzzywuzzy's `ratio`, without and with python-Levenshtein.
    """
    if prediction == answer:
        return 1.0
    if not prediction or not answer:
        return 0.0
    if backend == "difflib":
        return round(100 * SequenceMatcher(None, prediction, answer).ratio()) / 100
    try:
        from rapidfuzz.distance import Indel
    except ImportError:
        raise UsageError(
            "the edit similarity 'rapidfuzz' needs the package rapidfuzz: pip install rapidfuzz, or use 'difflib'"
        ) from None
    return round(100 * float(Indel.normalized_similarity(prediction, answer))) / 100


def first_line(prediction: str) -> str:
    """Return the first line after leading newlines."""
    return prediction.lstrip("\n").split("\n", 1)[0]


def code_line(prediction: str) -> str:
    """Return the first line without a backtick, "#" or "//", after leading newlines; empty if there is none.

    A blank line after the leading ones counts as a line, and indentation is kept. Markdown fences and comments are
    skipped this way.
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
    """Score a prediction, text without special tokens, from 0 to 1: the maximum over the gold answers.

    The labels of a classification task are `all_classes`; the variant is that of the edit similarity.
    """
    if not row_answers:
        raise DataError(f"{task.name}: a row without gold answers cannot be scored")
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
