"""Prompts, stops and metrics, compared with the official code written out, the package rouge and closed forms."""

from __future__ import annotations

import hashlib
import json
import re
from difflib import SequenceMatcher
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalkit.benchmarks.answer_metrics import edit_similarity, qa_f1, rouge_l
from evalkit.errors import DataError, TemplateError
from evalkit.generation.prompts import end_tokens, fit_prompt
from evalkit.longcontext.longbench import official
from evalkit.longcontext.longbench.data import OFFICIAL_BLOBS, LongBenchDocument
from evalkit.longcontext.longbench.official import (
    CODE_LINE,
    FIRST_LINE,
    classification,
    code_line,
    count,
    first_line,
    prompt_text,
    retrieval,
    score_prediction,
    stops_of,
    template,
)
from evalkit.longcontext.longbench.protocol import E_TASKS, GROUPS, TASKS
from tests.fixtures import facts
from tests.longcontext.longbench.made import official_prompt, read, write
from tests.tiny import TRAINING_TEXT

MIXED = "".join(f"{number}: {line}\n\n" for number, line in enumerate(TRAINING_TEXT * 6))
CHINESE = "夜里河水上涨，清晨时桥已经不见了。" * 40
CHAT = "{% for m in messages %}<s>[{{ m.role }}] {{ m.content }}{% endfor %} [answer]"
STOPPED = ("trec", "triviaqa", "samsum", "lcc", "repobench-p")
LINES = st.text(alphabet="ab#`/ \n", max_size=30)
CODE = st.text(alphabet="ab (){}=\t'", max_size=60)
WORDS = st.lists(st.sampled_from([*"abcdeA", ".", ".", ". ", " ", "\n", "é", "a.b", ""]), max_size=40)
LETTERS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=14).map(" ".join)
TEXTS = WORDS.map(" ".join) | LETTERS | st.text(max_size=60)


def test_constants_and_templates_are_the_official_ones() -> None:
    expected, inserted = facts("protocol"), {"context": "{input} {0}", "input": "\\n {context}"}
    assert list(TASKS) == list(expected["tasks"])
    for name, task in TASKS.items():
        fact = expected["tasks"][name]
        keys = ("group", "metric", "max_new_tokens", "documents")
        assert [getattr(task, key) for key in keys] == [fact[key] for key in keys]
        assert task.chat == (name not in expected["chat_wrapper_skipped"])
        assert task.first_line_only == (name in expected["first_line_only"])
        assert task.newline_ends == (name == "samsum")
        text = template(task)
        assert fact["prompt_sha256"].startswith(task.prompt_hash) and len(task.prompt_hash) == 16
        assert hashlib.sha256(text.encode()).hexdigest() == fact["prompt_sha256"]
        fields = ("context",) if name in ("gov_report", "multi_news", "passage_count", "lcc") else ("context", "input")
        assert sorted(re.findall(r"\{(\w+)\}", text)) == list(fields)
        # Braces in a row's text are not fields
        row = LongBenchDocument(name, "1", 0, inserted["context"], inserted["input"], ("a",), 1, ())
        assert prompt_text(task, row) == re.sub(r"\{(\w+)\}", lambda field: inserted[field[1]], text)
    assert set(GROUPS) == {task.group for task in TASKS.values()}
    assert facts("blobs") == OFFICIAL_BLOBS
    assert set(E_TASKS) == {name.removesuffix("_e") for name in facts("blobs") if name.endswith("_e")}


def test_another_lm_eval_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(official, "find_spec", lambda _: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    template.cache_clear()
    write(tmp_path / "tasks" / "longbench" / "trec.yaml", [b'doc_to_text: "{{context}} new"'])
    with pytest.raises(TemplateError, match=r"trec\.yaml.*lm-eval 0\.4\.13"):
        template(TASKS["trec"])


def test_prompts_are_truncated_as_in_the_official_code(tokenizer: Any, real_rows: Path) -> None:
    texts = [json.loads(path.read_bytes().split(b"\n")[0])["context"] for path in sorted(real_rows.glob("*.jsonl"))]
    cases = [(text, window) for text in (MIXED, CHINESE, "short", "") for window in (2, 3, 77, 400, 401)]
    for text, window in cases + [(text, 1500) for text in texts]:
        ids, truncated_from = fit_prompt(tokenizer, text, window, 10**6, chat=False, label="row")
        assert ids == official_prompt(tokenizer, text, window)
        length = len(tokenizer(text, verbose=False).input_ids)
        assert truncated_from == (length if length > window else None)
    # Cut characters come back as several tokens; the official code lets them run over
    assert max(len(official_prompt(tokenizer, CHINESE, window)) - window for window in range(20, 60)) > 0
    for window in range(20, 60):
        ids, truncated_from = fit_prompt(tokenizer, CHINESE, window, window, chat=False, label="row")
        assert truncated_from is not None
        assert window - 12 < len(ids) <= window


def test_a_chat_template_encloses_the_truncated_prompt(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    # The window is that of the text, as in the official code; the template comes on top, with its own begin token
    long, _ = fit_prompt(tokenizer, MIXED, 50, 200, chat=True, label="row")
    inside = tokenizer.decode(official_prompt(tokenizer, MIXED, 50), skip_special_tokens=True)
    assert long == tokenizer(f"<s>[user] {inside} [answer]", add_special_tokens=False).input_ids
    # Where both have no room, the text gives way, also one that fits without its template
    for text, window in ((MIXED, 50), (TRAINING_TEXT[0], len(tokenizer(TRAINING_TEXT[0]).input_ids))):
        ids, truncated_from = fit_prompt(tokenizer, text, window, window, chat=True, label="row")
        assert truncated_from == len(tokenizer(text).input_ids)
        assert window - 12 < len(ids) <= window
    with pytest.raises(DataError, match=r"qasper row 7: .*--context"):
        fit_prompt(tokenizer, MIXED, 50, 5, chat=True, label="qasper row 7")


@given(LINES, LINES)
def test_stops_are_where_no_continuation_changes_the_score(text: str, more: str) -> None:
    for pattern, scored in ((FIRST_LINE, first_line), (CODE_LINE, code_line)):
        if re.search(pattern, text):
            assert scored(text + more) == scored(text)
    whole = text.lstrip("\n")
    if "\n" in whole:
        assert re.search(FIRST_LINE, text) or first_line(text + "\n") == whole.rstrip("\n")
        kept = [line for line in whole.split("\n")[:-1] if not any(mark in line for mark in ("`", "#", "//"))]
        assert (re.search(CODE_LINE, text) is not None) == bool(kept)


@pytest.mark.parametrize(("stored", "ends"), [(7, {7}), ([7, 9], {7, 9}), (None, {1})])
def test_stops(stored: Any, ends: set[int], tokenizer: Any) -> None:
    """End tokens of the generation config, else the tokenizer's; some tasks have a pattern.

    On samsum `eos_token_id=[eos, newline]` and a minimum length of one token, as in the official code.
    """
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=stored))
    stops = {name: stops_of(task, end_tokens(model, tokenizer), tokenizer) for name, task in TASKS.items()}
    assert (stops["qasper"].ends, stops["qasper"].barred_first) == (ends, frozenset())
    assert {name for name in stops if stops[name].pattern} == set(STOPPED)
    both = {tokenizer.eos_token_id, tokenizer("\n", add_special_tokens=False).input_ids[-1]}
    assert stops["samsum"].ends == stops["samsum"].barred_first == both


def test_closed_forms() -> None:
    for prediction, answer, score in (
        ("The cat, sat.", "a CAT sat", 1.0),
        ("cat cat mat", "cat mat", 2 * (2 / 3) * 1 / (2 / 3 + 1)),
        ("", "cat", 0.0),
        ("the", "a", 0.0),  # nothing is left of either
        ("well-known", "wellknown", 1.0),
        ("“cat”", "cat", 0.0),  # only ASCII punctuation is removed
    ):
        assert qa_f1(prediction, answer) == qa_f1(answer, prediction) == pytest.approx(score, abs=1e-15)
    labels = ["City", "Other entity", "Food"]
    for prediction, score in (("Other entity", 1.0), ("either City or Other entity", 1 / 2), ("other entity", 0.0)):
        assert classification(prediction, "Other entity", labels) == score
        # The official code, which removes while it iterates, keeps "entity" here and gives half
        assert classification(prediction, "Other entity", ["City", "Other", "entity", "Other entity"]) == score
    for prediction, score in (("Paragraph 3", 1.0), ("3, 4 and 3", 2 / 3), ("03 13 three", 0.0)):
        assert retrieval(prediction, "Paragraph 3") == count(prediction, "3") == score
    assert code_line("\n\n    return x\nmore") == "    return x"
    assert code_line("```python\n# why\nx = 1") == "x = 1"
    assert code_line("// why\n\nx = 1") == code_line("# only") == ""  # a blank line counts
    assert (edit_similarity("tide", "diet"), edit_similarity("diet", "tide")) == (0.25, 0.5)  # it depends on the order
    # The best of the answers; the first line of few-shot tasks, where only newlines are skipped
    assert (first_line("\n\n one \ntwo"), first_line(" \none")) == (" one ", " ")
    assert score_prediction(TASKS["hotpotqa"], "cat", ["dog", "cat"]) == 1
    assert score_prediction(TASKS["lcc"], "\n  x = 1\ny", ["no", "  x = 1"]) == 1
    assert score_prediction(TASKS["trec"], "\nPerson\nPlace", ["Person"], ["Person", "Place"]) == 1
    assert score_prediction(TASKS["triviaqa"], "\nparis\nis it", ["Paris"]) == 1
    assert score_prediction(TASKS["hotpotqa"], "paris\nlondon", ["paris"]) == pytest.approx(2 / 3)


@given(CODE, CODE)
def test_edit_similarity(prediction: str, answer: str) -> None:
    """difflib's ratio in whole percent; rapidfuzz's is 1 - (insertions + deletions) / T, that is 2 LCS / T."""
    ratio = SequenceMatcher(None, prediction, answer).ratio() if prediction or answer else 1.0
    assert edit_similarity(prediction, answer) == round(100 * ratio) / 100
    assert edit_similarity(answer, answer) == 1
    pytest.importorskip("rapidfuzz")
    table = [[0] * (len(answer) + 1)]
    for left in prediction:
        above, row = table[-1], [0]
        for column, right in enumerate(answer):
            row.append(above[column] + 1 if left == right else max(above[column + 1], row[-1]))
        table.append(row)
    total = len(prediction) + len(answer)
    expected = round(100 * 2 * table[-1][-1] / total) / 100 if total else 1.0
    assert edit_similarity(prediction, answer, "rapidfuzz") == pytest.approx(expected, abs=0.0100001)


def rouge_package(prediction: str, answer: str) -> float:
    """As LongBench's code calls it; 0 where the package raises."""
    rouge = pytest.importorskip("rouge")
    try:
        scores = rouge.Rouge(metrics=["rouge-l"]).get_scores([prediction], [answer], avg=True)
    except (ValueError, RecursionError):
        return 0.0
    return float(scores["rouge-l"]["f"])


@given(TEXTS, TEXTS)
def test_rouge_is_the_packages(prediction: str, answer: str) -> None:
    assert rouge_l(prediction, answer) == pytest.approx(rouge_package(prediction, answer), abs=1e-12)
    assert 0 <= rouge_l(prediction, answer) < 1
    assert rouge_l(answer, answer) == (pytest.approx(1, abs=1e-8) if answer.strip(".") else 0)


def test_rouge_is_the_packages_on_real_texts(golden: Path) -> None:
    for row in read(golden / "gov_report.jsonl")[::40]:
        expected = rouge_package(row["pred"], row["answers"][0])
        assert rouge_l(row["pred"], row["answers"][0]) == pytest.approx(expected, abs=1e-12) != 0
    # Lin's example: the union of "w1 w2" and "w1 w3 w5" has four of five words; precision counts distinct words
    recall, precision = 4 / 5, 4 / 8
    score = rouge_l("w1 w2 w6 w7 w8.w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5")
    assert score == pytest.approx(2 * recall * precision / (recall + precision), abs=1e-7)
    text = " ".join(f"w{number}" for number in range(3000))
    assert rouge_l(text, text) == pytest.approx(1, abs=1e-8)  # where the package fails
