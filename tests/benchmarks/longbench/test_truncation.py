"""Prompts are truncated as in the official code, and always fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from evalkit.benchmarks.longbench.prompts import fit_prompt
from evalkit.errors import DataError, TemplateError
from tests.tiny import TRAINING_TEXT, tiny_tokenizer

MIXED = "".join(f"{number}: {line}\n\n" for number, line in enumerate(TRAINING_TEXT * 6))
CHINESE = "夜里河水上涨，清晨时桥已经不见了。" * 40
CHAT = (
    "{% for m in messages %}<s>[{{ m.role }}] {{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %} [answer]{% endif %}"
)


def official(tokenizer: Any, prompt: str, max_length: int) -> list[int]:
    """Steps 2, 3 and 5 of LongBench's `pred.py`, written out."""
    tokenized = tokenizer(prompt, truncation=False, return_tensors="pt", verbose=False).input_ids[0]
    if len(tokenized) > max_length:
        half = int(max_length / 2)
        prompt = tokenizer.decode(tokenized[:half], skip_special_tokens=True) + tokenizer.decode(
            tokenized[-half:], skip_special_tokens=True
        )
    return [int(token) for token in tokenizer(prompt, truncation=False, verbose=False).input_ids]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), adds_bos=True))


@pytest.fixture(scope="module")
def real() -> Any:
    """The demo checkpoint's tokenizer, if a run has cached it."""
    found = sorted(Path.home().glob(".cache/evalkit/gguf/*/tokenizer.json"))
    if not found:
        pytest.skip("no demo checkpoint in the cache; `evalkit run --model demo --limit 1` puts it there")
    return AutoTokenizer.from_pretrained(found[0].parent)


@pytest.mark.parametrize("text", [MIXED, CHINESE, "short", ""], ids=["mixed", "chinese", "short", "empty"])
@pytest.mark.parametrize("window", [2, 3, 20, 77, 400, 401])
@pytest.mark.parametrize("which", ["tiny", "real"])
def test_the_official_recipe(which: str, window: int, text: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(which)
    tokens, truncated_from = fit_prompt(tokenizer, text, window, 10**6, chat=False, label="row")
    assert tokens == official(tokenizer, text, window)
    length = len(tokenizer(text, verbose=False).input_ids)
    assert truncated_from == (length if length > window else None)


@pytest.mark.parametrize("which", ["tiny", "real"])
def test_real_rows(which: str, real_rows: Path, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(which)
    texts = [json.loads(path.read_bytes().split(b"\n")[0])["context"] for path in sorted(real_rows.glob("*.jsonl"))]
    cut = [fit_prompt(tokenizer, text, 1500, 10**6, chat=False, label="row") for text in texts]
    assert [tokens for tokens, _ in cut] == [official(tokenizer, text, 1500) for text in texts]
    assert sum(truncated_from is not None for _, truncated_from in cut) >= 7


@pytest.mark.parametrize("window", range(20, 60))
def test_text_that_grows_when_it_is_tokenised_again(tiny: Any, window: int) -> None:
    """Cut characters come back as several tokens; the official code lets them run over."""
    tokens, truncated_from = fit_prompt(tiny, CHINESE, window, window, chat=False, label="row")
    assert truncated_from is not None
    assert window - 12 < len(tokens) <= window


def test_some_text_does_grow(tiny: Any) -> None:
    assert max(len(official(tiny, CHINESE, window)) - window for window in range(20, 60)) > 0


def test_a_chat_template_is_put_around_what_is_left(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "chat_template", CHAT)
    short, _ = fit_prompt(tiny, "Why?", 100, 100, chat=True, label="row")
    # One begin token, the template's own
    assert short == tiny("<s>[user] Why? [answer]", add_special_tokens=False).input_ids
    # The window is that of the text, as in the official code; the template comes on top
    long, _ = fit_prompt(tiny, MIXED, 50, 200, chat=True, label="row")
    inside = tiny.decode(official(tiny, MIXED, 50), skip_special_tokens=True)
    assert long == tiny(f"<s>[user] {inside} [answer]", add_special_tokens=False).input_ids
    # Where both have no room, the text gives way
    tight, _ = fit_prompt(tiny, MIXED, 50, 50, chat=True, label="row")
    assert 40 < len(tight) <= 50
    assert tiny.decode(tight).startswith("<s>[user] 0: The river")
    assert tiny.decode(tight).endswith("[answer]")


def test_a_text_that_fits_without_its_template_only(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "chat_template", CHAT)
    length = len(tiny(TRAINING_TEXT[0]).input_ids)
    tokens, truncated_from = fit_prompt(tiny, TRAINING_TEXT[0], length, length, chat=True, label="row")
    assert truncated_from == length
    assert len(tokens) <= length


def test_no_room_at_all(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "chat_template", CHAT)
    with pytest.raises(DataError, match="qasper row 7: no room for its prompt in 5 tokens; raise --context"):
        fit_prompt(tiny, MIXED, 50, 5, chat=True, label="qasper row 7")


def test_no_chat_template(tiny: Any) -> None:
    with pytest.raises(TemplateError, match="the tokenizer has no chat template; leave out --chat"):
        fit_prompt(tiny, "Why?", 50, 50, chat=True, label="row")


def test_a_chat_template_that_fails(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "chat_template", "{{ raise_exception('no user here') }}")
    with pytest.raises(TemplateError, match="the tokenizer's chat template fails: no user here"):
        fit_prompt(tiny, "Why?", 50, 50, chat=True, label="row")
