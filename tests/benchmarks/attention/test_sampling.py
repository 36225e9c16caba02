"""Random samples of documents: size, order, shares of subjects, equal probability, seeds."""

from __future__ import annotations

from collections import Counter

from evalkit.benchmarks.attention.sampling import sampled, sampled_numbers
from tests.questions import question

SIZES = {"law": 60, "art": 30, "music": 7, "logic": 3}
QUESTIONS = [question("?", ["a"], doc_id=n, subtask=subject) for subject, size in SIZES.items() for n in range(size)]


def test_a_subject_has_its_share_rounded_up_or_down() -> None:
    for seed in range(50):
        found = Counter(one.subtask for one in sampled("mmlu", QUESTIONS, 25, seed))
        assert sum(found.values()) == 25
        for subject, size in SIZES.items():
            assert abs(found[subject] - size / 4) < 1 or found[subject] in (size // 4, -(-size // 4))


def test_documents_keep_their_order_and_none_is_taken_twice() -> None:
    places = [QUESTIONS.index(one) for one in sampled("mmlu", QUESTIONS, 40, 3)]
    assert places == sorted(set(places))


def test_a_sample_depends_on_seed_and_task_only() -> None:
    def ids(task: str, seed: int) -> list[tuple[str, int]]:
        return [(one.subtask, one.doc_id) for one in sampled(task, QUESTIONS, 20, seed)]

    assert ids("mmlu", 1) == ids("mmlu", 1)
    assert ids("mmlu", 1) != ids("mmlu", 2)
    assert ids("mmlu", 1) != ids("piqa", 1)


def test_every_document_is_taken_equally_often() -> None:
    """Of 2,000 samples of 25 of 100 documents each is in 500 ± 19.4; five standard errors are allowed."""
    counts = Counter((one.subtask, one.doc_id) for seed in range(2000) for one in sampled("t", QUESTIONS, 25, seed))
    assert len(counts) == 100
    assert all(abs(count - 500) < 5 * 19.4 for count in counts.values())


def test_a_large_sample_is_the_whole_task() -> None:
    assert sampled("mmlu", QUESTIONS, 100, 0) == QUESTIONS == sampled("mmlu", QUESTIONS, 1000, 5)
    assert sampled_numbers(4, 9, 0) == [0, 1, 2, 3]


def test_windows_are_random_distinct_and_in_order() -> None:
    found = sampled_numbers(1000, 10, 7)
    assert found == sorted(set(found))
    assert len(found) == 10
    assert found != sampled_numbers(1000, 10, 8)
    assert max(found) > 300
