"""Source records become lm-eval's documents, invalid ones are reported, and the hash covers the relevant fields."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalkit.data import SUBJECTS, TASKS
from evalkit.errors import DataError
from evalkit.inputs.values import LONGEST_TEXT
from tests.data.samples import sample

LETTERS = st.text(alphabet=st.characters(codec="utf-8"), min_size=1).filter(str.strip)


@pytest.mark.parametrize("task", TASKS)
def test_canonical_document_is_its_own_canonical_form(task: str) -> None:
    document = TASKS[task].canonical(sample(task))
    assert TASKS[task].canonical(document) == document


def test_boolq_forms_give_the_same_document() -> None:
    superglue = {"question": "is it", "passage": "Moon -- It is.", "label": 1, "idx": 4}
    original = {"question": "is it", "title": "Moon", "passage": "It is.", "answer": True}
    canonical = TASKS["boolq"].canonical
    assert canonical(superglue) == canonical(original) == {key: superglue[key] for key in canonical(superglue)}
    assert canonical(original)["label"] == 1


def test_hellaswag_takes_a_label_of_either_type() -> None:
    canonical = TASKS["hellaswag"].canonical
    assert canonical(sample("hellaswag", label=2)) == canonical(sample("hellaswag", label="2"))


def test_arc_hash_does_not_depend_on_how_choices_are_labelled() -> None:
    task = TASKS["arc_challenge"]
    digits = sample("arc_challenge")
    letters = sample("arc_challenge", id="other", answerKey="A")
    letters["choices"]["label"] = ["A", "B", "C", "D"]
    assert task.hash_of([task.canonical(digits)]) == task.hash_of([task.canonical(letters)])


def test_mmlu_order_does_not_depend_on_the_order_of_subjects() -> None:
    task = TASKS["mmlu"]
    documents = [sample("mmlu", subject=name, question=str(i)) for i, name in enumerate(["virology", "anatomy"] * 2)]
    assert [document["question"] for document in sorted(documents, key=task.sort_key)] == ["1", "3", "0", "2"]


def test_there_are_57_subjects() -> None:
    assert len(set(SUBJECTS)) == 57
    assert list(SUBJECTS) == sorted(SUBJECTS)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("winogrande", {"answer": "3"}, "answer"),
    ("winogrande", {"answer": 1}, "answer"),
    ("winogrande", {"answer": ""}, "answer"),
    ("winogrande", {"sentence": "No blank here."}, "sentence"),
    ("winogrande", {"option1": "  "}, "option1"),
    ("arc_easy", {"answerKey": "D"}, "answerKey"),
    ("arc_easy", {"answerKey": 1}, "answerKey"),
    ("arc_easy", {"id": None}, "id"),
    ("arc_easy", {"choices": ["a", "b"]}, "choices"),
    ("arc_easy", {"choices": {"text": ["a", "b"], "label": ["A", "B"]}}, "choices.text"),
    ("arc_easy", {"choices": {"text": ["a", "b", "c"], "label": ["A", "B"]}}, "choices.label"),
    ("arc_easy", {"choices": {"text": ["a", "b", "c"]}}, "choices.label"),
    ("arc_easy", {"choices": {"text": list("abc"), "label": list("ABB")}}, "choices.label"),
    ("hellaswag", {"label": "4"}, "label"),
    ("hellaswag", {"label": True}, "label"),
    ("hellaswag", {"label": ""}, "label"),
    ("hellaswag", {"endings": ["a", "b", "c"]}, "endings"),
    ("hellaswag", {"endings": ["a", "b", "c", None]}, "endings"),
    ("hellaswag", {"ctx_b": None}, "ctx_b"),
    ("piqa", {"label": 2}, "label"),
    ("piqa", {"label": -1}, "label"),
    ("piqa", {"label": True}, "label"),
    ("piqa", {"label": 1.0}, "label"),
    ("piqa", {"label": "1"}, "label"),
    ("piqa", {"goal": "\ud800"}, "goal"),
    ("piqa", {"goal": "x" * (LONGEST_TEXT + 1)}, "goal"),
    ("hellaswag", {"ctx_b": "x" * (LONGEST_TEXT + 1)}, "ctx_b"),
    ("hellaswag", {"endings": ["a", "b", "c", "[header] "]}, "endings"),
    ("openbookqa", {"answerKey": "E"}, "answerKey"),
    ("openbookqa", {"question_stem": ["x"]}, "question_stem"),
    ("boolq", {"answer": 1}, "answer"),
    ("boolq", {"answer": "yes"}, "answer"),
    ("boolq", {"label": -1}, "label"),
    ("boolq", {"title": ""}, "title"),
    ("mmlu", {"answer": 4}, "answer"),
    ("mmlu", {"answer": "D"}, "answer"),
    ("mmlu", {"subject": "alchemy"}, "subject"),
    ("mmlu", {"choices": ["a", "b", "c", "d", "e"]}, "choices"),
]


@pytest.mark.parametrize(("task", "change", "field"), WRONG)
def test_a_wrong_field_is_named(task: str, change: dict[str, Any], field: str) -> None:
    with pytest.raises(DataError) as caught:
        TASKS[task].canonical(sample(task, **change))
    assert f"'{field}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("task", TASKS)
def test_each_missing_field_is_named(task: str) -> None:
    for field in TASKS[task].canonical(sample(task)).keys() - {"id"}:
        record = TASKS[task].canonical(sample(task))
        del record[field]
        with pytest.raises(DataError) as caught:
            TASKS[task].canonical(record)
        # In BoolQ's original form
        assert ("title" if (task, field) == ("boolq", "label") else field) in str(caught.value)


@given(task=st.sampled_from(sorted(TASKS)), extra=st.dictionaries(st.text(), st.integers()), data=st.data())
def test_hash_ignores_extra_fields_and_key_order(task: str, extra: dict[str, int], data: st.DataObject) -> None:
    spec, record = TASKS[task], sample(task)
    # In BoolQ's original form a field named label would be read, as SuperGLUE's.
    widened = {key: value for key, value in extra.items() if key not in {"id", "label"}} | record
    shuffled = {key: widened[key] for key in data.draw(st.permutations(list(widened)))}
    assert spec.hash_of([spec.canonical(shuffled)]) == spec.hash_of([spec.canonical(record)])


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all evaluated strings and labels in a canonical document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    return [path] if items is None else [leaf for key, item in items for leaf in _leaves(item, (*path, key))]


def _changed(document: dict[str, Any], path: tuple[Any, ...], letters: str) -> dict[str, Any]:
    """Return the document with another text, or another valid label, in one field."""
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
    elif last == "subject":
        holder[last] = "anatomy"
    else:
        holder[last] = old + letters
    return result


@given(task=st.sampled_from(sorted(TASKS)), letters=LETTERS, data=st.data())
def test_hash_sees_any_change_of_what_is_evaluated(task: str, letters: str, data: st.DataObject) -> None:
    spec = TASKS[task]
    document = spec.canonical(sample(task))
    leaves = [leaf for leaf in _leaves(document) if leaf != ("id",) and leaf[:2] != ("choices", "label")]
    changed = spec.canonical(_changed(document, data.draw(st.sampled_from(leaves)), letters))
    assert spec.hash_of([changed]) != spec.hash_of([document])


@pytest.mark.parametrize("task", TASKS)
def test_hash_sees_order_and_number(task: str) -> None:
    spec = TASKS[task]
    text = (
        "question_stem"
        if task == "openbookqa"
        else next(k for k in ("sentence", "goal", "ctx_a", "question") if k in sample(task))
    )
    first, second = (spec.canonical(sample(task, **{text: f"{name} _ ."})) for name in ("one", "two"))
    hashes = {spec.hash_of(docs) for docs in ([first, second], [second, first], [first], [first, first], [])}
    assert len(hashes) == 5
