"""ROUGE-L as LongBench computes it: the summary-level F of the Python package `rouge` 1.0.1, for any length of text.

In: two texts. Out: a fraction. Reimplemented from that package's behaviour, which differs from `rouge-score`'s: texts
are split at every ".", words are case-sensitive and split at spaces, and *sets* of words are counted. The package
recurses once per word and fails on long texts, which LongBench's code then scores 0; this implementation does not.
"""

from __future__ import annotations

from collections.abc import Iterable


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
    precision = len(common) / _distinct_words(predicted)
    recall = len(common) / _distinct_words(expected)
    return 2.0 * (precision * recall / (precision + recall + 1e-8))


def _sentences(text: str) -> list[list[str]]:
    """Return the words of each sentence. A sentence of white space only is one empty word, as in the package."""
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _distinct_words(sentences: Iterable[list[str]]) -> int:
    return len({word for sentence in sentences for word in sentence})


def _union_of_subsequences(expected: list[list[str]], predicted: list[list[str]]) -> set[str]:
    found: set[str] = set()
    # Equal sentences, frequent in repetitive predictions, have equal subsequences
    candidates = [(list(sentence), set(sentence)) for sentence in dict.fromkeys(map(tuple, predicted))]
    for reference in expected:
        words = set(reference)
        for candidate, candidate_words in candidates:
            # A pair only adds words that both sentences have
            if not words & candidate_words <= found:
                found |= _common_subsequence(reference, candidate, words)
    return found


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
