"""Selections of documents: the first ones, and random samples, nested, stratified and uniform."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from evalkit.data.sampling import DocumentSample, FirstDocuments

SUBJECTS = st.lists(st.integers(1, 60), min_size=1, max_size=20)


def strata_of(sizes: list[int]) -> list[str]:
    return [f"subject {number}" for number, size in enumerate(sizes) for _ in range(size)]


@given(SUBJECTS, st.integers(0, 2**31), st.data())
@settings(max_examples=200)
def test_a_larger_sample_contains_the_smaller(sizes: list[int], seed: int, data: st.DataObject) -> None:
    strata = strata_of(sizes)
    larger = data.draw(st.integers(1, len(strata) + 3))
    smaller = data.draw(st.integers(1, larger))
    many, few = (DocumentSample(count, seed).places("mmlu", strata) for count in (larger, smaller))
    assert set(few) <= set(many) <= set(range(len(strata)))
    assert few == sorted(few) and len(set(few)) == len(few) == min(smaller, len(strata))
    assert len(many) == min(larger, len(strata))


@given(SUBJECTS, st.integers(0, 2**31), st.data())
@settings(max_examples=200)
def test_each_subject_has_its_share(sizes: list[int], seed: int, data: st.DataObject) -> None:
    strata = strata_of(sizes)
    count = data.draw(st.integers(1, len(strata)))
    found = Counter(strata[place] for place in DocumentSample(count, seed).places("mmlu", strata))
    for subject, size in Counter(strata).items():
        # Below one for its own rounding, and its share of all subjects' roundings: at most a half each, four deviations
        allowed = 1 + size / len(strata) * 4 * (len(sizes) / 4) ** 0.5
        assert abs(found[subject] - count * size / len(strata)) < allowed


def test_order_of_subjects_in_the_file_does_not_matter() -> None:
    """A document is in the sample or not, however the subjects are interleaved."""
    strata = strata_of([30, 50, 20])
    turned = strata[::-1]
    first = Counter(strata[place] for place in DocumentSample(25, 3).places("mmlu", strata))
    assert first == Counter(turned[place] for place in DocumentSample(25, 3).places("mmlu", turned))


def test_seed_and_task_change_the_sample() -> None:
    strata = ["boolq"] * 3270
    found = DocumentSample(100, 0).places("boolq", strata)
    assert found == DocumentSample(100, 0).places("boolq", strata)
    assert found != DocumentSample(100, 1).places("boolq", strata)
    assert found != DocumentSample(100, 0).places("piqa", strata)


def test_every_document_has_the_same_probability() -> None:
    strata, times = strata_of([37, 11, 52]), 4000
    counts = np.zeros(100)
    for seed in range(times):
        counts[DocumentSample(23, seed).places("mmlu", strata)] += 1
    # Binomial standard error 0.0067; the largest of 100 deviations is below four of them
    assert np.abs(counts / times - 0.23).max() < 4 * np.sqrt(0.23 * 0.77 / times)


def test_of_a_few_subjects() -> None:
    """More subjects than documents: no subject has two while another that is as large has none twice as often."""
    strata = strata_of([10] * 57)
    found = Counter(strata[place] for place in DocumentSample(20, 5).places("mmlu", strata))
    assert sum(found.values()) == 20 and max(found.values()) <= 2


sizes_by_name = st.dictionaries(st.text(max_size=3), st.integers(0, 30), min_size=1, max_size=8)


def first_of(sizes: dict[str, int], limit: int | None) -> dict[str, int]:
    """Return subject → number of its documents; they must be its first ones."""
    strata = [name for name, size in sizes.items() for _ in range(size)]
    chosen: dict[str, list[int]] = {name: [] for name in sizes}
    starts = {name: strata.index(name) for name, size in sizes.items() if size}
    for place in FirstDocuments(limit).places("t", strata):
        chosen[strata[place]].append(place - starts[strata[place]])
    assert all(found == list(range(len(found))) for found in chosen.values())
    return {name: len(found) for name, found in chosen.items()}


@given(sizes_by_name, st.none() | st.integers(1, 120))
def test_first_documents_take_turns(sizes: dict[str, int], limit: int | None) -> None:
    taken = first_of(sizes, limit)
    total = sum(sizes.values())
    assert sum(taken.values()) == (total if limit is None else min(limit, total))
    # Counts of subjects with documents left differ by at most one, and earlier subjects have at least as many
    most = max(taken.values(), default=0)
    unfinished = [taken[name] for name in sizes if taken[name] < sizes[name]]
    assert all(count >= most - 1 for count in unfinished)
    assert unfinished == sorted(unfinished, reverse=True)


@given(sizes_by_name, st.integers(1, 120))
def test_a_larger_limit_only_adds(sizes: dict[str, int], limit: int) -> None:
    smaller, larger = first_of(sizes, limit), first_of(sizes, limit + 1)
    assert all(larger[name] >= smaller[name] for name in sizes)
