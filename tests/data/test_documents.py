"""Documents of task files: every format, invalid records, content hashes, samples and clusters."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from evalkit.data import SUBJECTS, TASKS, Library
from evalkit.data.sampling import DocumentSample, FirstDocuments, clusters_of
from evalkit.data.sources import find, read
from evalkit.errors import DataError
from evalkit.inputs.values import LONGEST_TEXT
from evalkit.suites.question_loading import load_questions
from evalkit.suites.suites import load_suite
from tests.data.samples import sample, write

# Files; of a line of JSON lines, tests/guards name more


def test_what_is_no_file_of_documents(tmp_path: Path) -> None:
    for name, content, noun in (
        ("piqa.parquet", b"PAR1 no", "documents"),
        ("piqa.json", b'[{"goal": ""}]', "record 1"),
        ("piqa.jsonl", b"\n\n", "found none"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError) as caught:
            Library(tmp_path, allow_unofficial=True).load("piqa")
        assert "\n" not in str(caught.value) and noun in str(caught.value) and str(tmp_path / name) in str(caught.value)


def test_all_formats_give_the_same_records(tmp_path: Path) -> None:
    records = [sample("openbookqa"), sample("openbookqa", question_stem="Ünïcode \u2028 “stem”")]
    parquet.write_table(pa.Table.from_pylist(records), tmp_path / "openbookqa.parquet")
    assert find(tmp_path, "openbookqa") == tmp_path / "openbookqa.parquet"
    lines = write(tmp_path, "openbookqa", *records)
    (tmp_path / "a.json").write_text(json.dumps(records))
    (tmp_path / "c.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.read_bytes().replace(b"\n", b"\r\n"))
    for name in ("openbookqa.jsonl", "a.json", "openbookqa.parquet", "c.jsonl"):
        assert [record for _, record in read(tmp_path / name, "openbookqa")] == records, name
    assert find(tmp_path, "openbookqa") == lines and find(tmp_path, "piqa") is None


# Records

WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("winogrande", {"sentence": "No blank here."}, "sentence"),
    ("arc_easy", {"answerKey": "D"}, "answerKey"),
    ("arc_easy", {"choices": {"text": ["a", "b"], "label": ["A", "B"]}}, "choices.text"),
    ("hellaswag", {"endings": ["a", "b", "c", "[header] "]}, "endings"),
    ("hellaswag", {"ctx_b": "x" * (LONGEST_TEXT + 1)}, "ctx_b"),
    ("piqa", {"label": True}, "label"),
    ("mmlu", {"subject": "alchemy"}, "subject"),
    ("mmlu", {"choices": ["a", "b", "c", "d", "e"]}, "choices"),
]


def test_a_wrong_field_is_named() -> None:
    for task, change, field in WRONG:
        with pytest.raises(DataError, match=f"'{field}") as caught:
            TASKS[task].canonical(sample(task, **change))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("task", TASKS)
def test_canonical_documents(task: str) -> None:
    spec = TASKS[task]
    document = spec.canonical(sample(task))
    assert spec.canonical(document) == document
    for field in document.keys() - {"id"}:
        # Without its label, a document of BoolQ has the original form
        missing = "title" if (task, field) == ("boolq", "label") else field
        with pytest.raises(DataError, match=missing):
            spec.canonical({key: value for key, value in document.items() if key != field})


def test_forms_of_one_document_are_one_document() -> None:
    superglue = {"question": "is it", "passage": "Moon -- It is.", "label": 1, "idx": 4}
    original = {"question": "is it", "title": "Moon", "passage": "It is.", "answer": True}
    canonical = TASKS["boolq"].canonical
    assert canonical(superglue) == canonical(original) == {key: superglue[key] for key in canonical(superglue)}
    canonical = TASKS["hellaswag"].canonical
    assert canonical(sample("hellaswag", label=2)) == canonical(sample("hellaswag", label="2"))
    arc, letters = TASKS["arc_challenge"], sample("arc_challenge", id="other", answerKey="A")
    letters["choices"]["label"] = ["A", "B", "C", "D"]
    assert arc.hash_of([arc.canonical(sample("arc_challenge"))]) == arc.hash_of([arc.canonical(letters)])
    mmlu = [sample("mmlu", subject=name, question=str(i)) for i, name in enumerate(["virology", "anatomy"] * 2)]
    assert [record["question"] for record in sorted(mmlu, key=TASKS["mmlu"].sort_key)] == ["1", "3", "0", "2"]
    assert len(set(SUBJECTS)) == 57 and list(SUBJECTS) == sorted(SUBJECTS)


# Content hashes


@given(task=st.sampled_from(sorted(TASKS)), extra=st.dictionaries(st.text(), st.integers()), data=st.data())
def test_a_hash_ignores_extra_fields_and_key_order(task: str, extra: dict[str, int], data: st.DataObject) -> None:
    spec, record = TASKS[task], sample(task)
    # In BoolQ's original form a field named label would be read, as SuperGLUE's
    widened = {key: value for key, value in extra.items() if key not in {"id", "label"}} | record
    shuffled = {key: widened[key] for key in data.draw(st.permutations(list(widened)))}
    assert spec.hash_of([spec.canonical(shuffled)]) == spec.hash_of([spec.canonical(record)])


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all evaluated strings and labels in a canonical document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    return [path] if items is None else [leaf for key, item in items for leaf in leaves(item, (*path, key))]


def changed(document: dict[str, Any], path: tuple[Any, ...], letters: str) -> dict[str, Any]:
    """The document with another text, or another valid label, in one field."""
    result = copy.deepcopy(document)
    *parents, last = path
    holder: Any = result
    for key in parents:
        holder = holder[key]
    old = holder[last]
    if last == "answerKey":
        labels = document["choices"]["label"]
        holder[last] = labels[(labels.index(old) + 1) % len(labels)]
    elif last in {"label", "answer"}:
        holder[last] = str(3 - int(old)) if isinstance(old, str) else 1 - min(old, 1)
    else:
        holder[last] = "anatomy" if last == "subject" else old + letters
    return result


LETTERS = st.text(alphabet=st.characters(codec="utf-8"), min_size=1).filter(str.strip)


@given(task=st.sampled_from(sorted(TASKS)), letters=LETTERS, data=st.data())
def test_a_hash_sees_any_change_of_what_is_evaluated(task: str, letters: str, data: st.DataObject) -> None:
    spec = TASKS[task]
    document = spec.canonical(sample(task))
    paths = [path for path in leaves(document) if path != ("id",) and path[:2] != ("choices", "label")]
    other = spec.canonical(changed(document, data.draw(st.sampled_from(paths)), letters))
    orders = ([document, other], [other, document], [document], [document, document], [other], [])
    assert len({spec.hash_of(documents) for documents in orders}) == 6


# Samples

SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=20)


def strata_of(sizes: list[int]) -> list[str]:
    return [f"subject {number}" for number, size in enumerate(sizes) for _ in range(size)]


@given(SIZES, st.integers(0, 2**31), st.data())
def test_samples_are_nested_and_each_subject_has_its_share(sizes: list[int], seed: int, data: st.DataObject) -> None:
    strata = strata_of(sizes)
    larger = data.draw(st.integers(1, len(strata) + 3))
    smaller = data.draw(st.integers(1, larger))
    many, few = (DocumentSample(count, seed).places("mmlu", strata) for count in (larger, smaller))
    assert set(few) <= set(many) <= set(range(len(strata)))
    assert few == sorted(few) and len(set(few)) == len(few) == min(smaller, len(strata))
    taken = Counter(strata[number] for number in few)
    for subject, size in Counter(strata).items():
        # Below one for its own rounding, and its share of all subjects' roundings: at most a half each, four deviations
        allowed = 1 + size / len(strata) * 4 * (len(sizes) / 4) ** 0.5
        assert abs(taken[subject] - len(few) * size / len(strata)) < allowed
    turned = strata[::-1]  # however the subjects are interleaved
    assert taken == Counter(turned[number] for number in DocumentSample(smaller, seed).places("mmlu", turned))


def test_samples_are_uniform_and_differ_by_seed_and_task() -> None:
    strata, times = strata_of([37, 11, 52]), 4000
    counts = np.zeros(100)
    for seed in range(times):
        counts[DocumentSample(23, seed).places("mmlu", strata)] += 1
    # Binomial standard error 0.0067; the largest of 100 deviations is below four of them
    assert np.abs(counts / times - 0.23).max() < 4 * np.sqrt(0.23 * 0.77 / times)
    samples = [DocumentSample(20, seed).places(task, strata) for seed, task in ((0, "a"), (0, "a"), (1, "a"), (0, "b"))]
    assert samples[0] == samples[1] and samples[0] != samples[2] and samples[0] != samples[3]


@given(SIZES, st.integers(1, 120))
def test_first_documents_take_turns(sizes: list[int], limit: int) -> None:
    strata = strata_of(sizes)

    def first(count: int | None) -> dict[str, list[int]]:
        """Subject → numbers of its documents, which must be its first ones."""
        chosen: dict[str, list[int]] = {}
        for number in FirstDocuments(count).places("t", strata):
            chosen.setdefault(strata[number], []).append(number)
        for name, numbers in chosen.items():
            assert numbers == list(range(strata.index(name), strata.index(name) + len(numbers)))
        return chosen

    taken, more = first(limit), first(limit + 1)
    assert sum(map(len, taken.values())) == min(limit, len(strata))
    assert all(set(numbers) <= set(more[name]) for name, numbers in taken.items())
    assert sum(map(len, first(None).values())) == len(strata)
    # Counts of subjects with documents left differ by at most one, and earlier subjects have at least as many
    counts = [len(taken.get(f"subject {number}", [])) for number in range(len(sizes))]
    unfinished = [count for count, size in zip(counts, sizes, strict=True) if count < size]
    assert all(count >= max(counts) - 1 for count in unfinished) and unfinished == sorted(unfinished, reverse=True)


# Clusters


def test_documents_of_one_text_and_twins_are_clusters() -> None:
    passages = [{"passage": text} for text in ("a", "b", "a", "", "b", "")]
    assert clusters_of(passages, {"source": "passage"}) == [0, 1, 0, 3, 1, 5]
    assert clusters_of(passages[:3], {"source": "passage"}) == [0, 1, 0]
    assert clusters_of(passages, {}) == [0, 1, 2, 3, 4, 5]
    surgeon = "Sarah was a much better surgeon than Maria so _ always got the {} cases."
    sentences = [
        (surgeon.format("easier"), "Sarah", "Maria"),
        ("Sarah asked Maria for the way because _ was new in town.", "Sarah", "Maria"),
        (surgeon.format("harder"), "maria", "Sarah"),
        (surgeon.format("harder"), "Sarah", "Mary"),
    ]
    documents = [dict(zip(("sentence", "option1", "option2"), parts, strict=True)) for parts in sentences]
    assert clusters_of(documents, {"twins": "sentence"}) == [0, 1, 0, 3]


def test_official_documents_know_their_sources(real_documents: Path) -> None:
    """Clusters of one and of two twins, which must match the identifiers; and clusters of some tasks."""
    folder, clusters = real_documents, {"winogrande": 7, "boolq": 7, "openbookqa": 6}
    documents = [record for _, record in read(folder / "winogrande.jsonl", "winogrande")]
    named: dict[str, int] = {}
    expected = [named.setdefault(record["qID"].rsplit("-", 1)[0], number) for number, record in enumerate(documents)]
    without = [{key: value for key, value in record.items() if key != "qID"} for record in documents]
    assert clusters_of(without, {"twins": "sentence"}) == expected
    assert Counter(Counter(expected).values()) == {1: 4, 2: 3}
    suite = load_suite("zeroshot8").model_copy(update={"groups": {"Some": tuple(clusters)}})
    questions = load_questions(suite, Library(folder, allow_unofficial=True))
    assert {task: len({question.cluster for question in members}) for task, members in questions.items()} == clusters
