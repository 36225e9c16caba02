"""ROUGE-L as LongBench computes it: the summary-level F of the Python package `rouge` 1.0.1, for any length of text.

In: two texts. Out: a fraction. Written anew after that package's behaviour, which differs from `rouge-score`'s: texts
are cut at every ".", words are case-sensitive and end at spaces, and *sets* of words are counted. The package recurses
once a word and fails on long texts, which LongBench's code then scores 0; this one does not.
"""

from __future__ import annotations

from collections.abc import Iterable


def rouge_l(prediction: str, answer: str) -> float:
    """ROUGE-L of a prediction against one answer, from 0 to 1.

    Let U be the set of words that stand in a longest common subsequence of any answer sentence and any predicted
    sentence; m and n the numbers of distinct words of answer and prediction; R = |U| / m and P = |U| / n. The score is
    2 P R / (P + R + 1e-8), so that equal texts score a hair below 1. 0 where either text has no sentence.

    Source: Lin, "ROUGE" (2004), section 3.2, in the form of pip's `rouge` 1.0.1, `rouge_l_summary_level`.
    """
    predicted, expected = _sentences(prediction), _sentences(answer)
    if not predicted or not expected:
        return 0.0
    common = _union_of_subsequences(expected, predicted)
    precision = len(common) / _distinct_words(predicted)
    recall = len(common) / _distinct_words(expected)
    return 2.0 * (precision * recall / (precision + recall + 1e-8))


def _sentences(text: str) -> list[list[str]]:
    """Words by sentence. A sentence of white space alone is one empty word, as it is to the package."""
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _distinct_words(sentences: Iterable[list[str]]) -> int:
    return len({word for sentence in sentences for word in sentence})


def _union_of_subsequences(expected: list[list[str]], predicted: list[list[str]]) -> set[str]:
    found: set[str] = set()
    # Equal sentences, which a model that repeats itself makes in plenty, have equal subsequences
    candidates = [(list(sentence), set(sentence)) for sentence in dict.fromkeys(map(tuple, predicted))]
    for reference in expected:
        words = set(reference)
        for candidate, candidate_words in candidates:
            # A pair can only add words that both have
            if not words & candidate_words <= found:
                found |= _common_subsequence(reference, candidate, words)
    return found


def _common_subsequence(reference: list[str], candidate: list[str], words: set[str]) -> set[str]:
    """The words of one longest common subsequence: where there are several, the one that the package finds.

    Row i of the table of lengths T is kept as one integer: its bit j is unset where T[i, j + 1] exceeds T[i, j] by one.
    Hyyrö, "Bit-parallel LCS-length computation revisited" (2004). Walking back from the end, the package steps over the
    reference's word where that keeps the length and stepping over the candidate's would lose one; which is where the
    bit is unset; else over the candidate's.
    """
    # The walk steps over such words first of all, wherever it meets them
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
    found: set[str] = set()
    i, j = len(reference) - 1, len(candidate) - 1
    while i >= 0 and j >= 0:
        if reference[i] == candidate[j]:
            found.add(reference[i])
            i, j = i - 1, j - 1
        elif rows[i] >> j & 1:
            j -= 1
        else:
            i -= 1
    return found
