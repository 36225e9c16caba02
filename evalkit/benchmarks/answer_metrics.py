"""Metrics of generated answers: what each measures, its function, its unit and its direction.

In: the name of a metric. Out: its `AnswerMetric`, of evalkit or of a package with an entry point of the group
`evalkit.answer_metrics`. The functions of two texts are LongBench's official ones, and tested against these; of several
references the best-matching one counts, as in SQuAD and LongBench.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from itertools import chain
from typing import Literal

from evalkit.benchmarks.outcomes import Measure
from evalkit.plugins import load_entry
from evalkit.runs.scales import FRACTION, Scale

GROUP = "evalkit.answer_metrics"
EditVariant = Literal["difflib", "rapidfuzz"]
"""The official code's edit similarity without and with python-Levenshtein; published scores use the first."""
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(a|an|the)\b")


@dataclass(frozen=True)
class AnswerMetric:
    """A score of a generated answer."""

    scale: Scale
    """Its name is the metric's."""
    score: Callable[[str, Sequence[str]], float]
    """Function of an answer and its references, of which there is at least one."""
    graded: bool = True
    """False: a score is 1 (right) or 0 (wrong), so that means are accuracies."""
    version: int = 1
    """Increase it when `score` changes, so that runs before and after have different ids."""

    @property
    def name(self) -> str:
        return self.scale.name

    @property
    def measure(self) -> Measure:
        return measure_of(self.scale, self.graded)


def measure_of(scale: Scale, graded: bool) -> Measure:
    """Return the measure of an `AnswerMetric` with these attributes."""
    return Measure(scale, f"{scale.name} in {'%' if scale.is_fraction else scale.unit}", graded)


@cache
def find_answer_metric(name: str) -> AnswerMetric:
    """Return a metric by name, of evalkit or another package; `UnknownNameError`, or `UsageError` if it is invalid."""
    return load_entry(GROUP, name, "metric of answers", AnswerMetric, ANSWER_METRICS)


def _best(function: Callable[[str, str], float]) -> Callable[[str, Sequence[str]], float]:
    """Return the function of several references: the maximum over them."""

    def score(answer: str, references: Sequence[str]) -> float:
        return max(function(answer, reference) for reference in references)

    return score


def normalised_words(text: str) -> list[str]:
    """Return the words of a text in lower case, without ASCII punctuation and then without the words a, an, the.

    Source: Rajpurkar et al., "SQuAD" (2016), section 6.1.
    """
    return _ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def exact_match(prediction: str, answer: str) -> float:
    """Return whether two texts have the same `normalised_words`; of an answer without any, the same text."""
    words = normalised_words(answer)
    if not words:
        return float(prediction.strip() == answer.strip())
    return float(normalised_words(prediction) == words)


def contains(prediction: str, answer: str) -> float:
    """Return whether an answer stands anywhere in a prediction, in upper or lower case."""
    return float(answer.lower() in prediction.lower())


def qa_f1(prediction: str, answer: str) -> float:
    """Return the F1 of the common `normalised_words`, 2PR / (P + R), with P and R over words with multiplicity."""
    predicted = normalised_words(prediction)
    expected = normalised_words(answer)
    common = (Counter(predicted) & Counter(expected)).total()
    if not common:
        return 0.0
    precision = common / len(predicted)
    recall = common / len(expected)
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


ANSWER_METRICS = {
    metric.name: metric
    for metric in (
        AnswerMetric(Scale("exact_match", FRACTION), _best(exact_match), graded=False),
        AnswerMetric(Scale("contains", FRACTION), _best(contains), graded=False),
        AnswerMetric(Scale("f1", FRACTION), _best(qa_f1)),
        AnswerMetric(Scale("rouge_l", FRACTION), _best(rouge_l)),
        AnswerMetric(Scale("edit_similarity", FRACTION), _best(edit_similarity)),
    )
}
"""evalkit's own metrics, by name; each takes the maximum over the references."""
