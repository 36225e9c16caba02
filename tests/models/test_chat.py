"""A chat template that does not terminate is a one-line error."""

from __future__ import annotations

import gc
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from evalkit.benchmarks.multiple_choice.prompts import Prompter
from evalkit.benchmarks.multiple_choice.templates import load_template
from evalkit.errors import TemplateError
from evalkit.generation.prompts import as_message
from evalkit.models import tokenizer as tokenizer_module
from evalkit.models.tokenizer import apply_chat_template
from tests.tiny import tiny_tokenizer

PLAIN = "{% for turn in messages %}[{{ turn['role'] }}]{{ turn['content'] }}{% endfor %}"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}" + PLAIN
IN_A_FILTER = "{{ range(99999) | map('string') | list | length }}" * 400 + PLAIN
IN_JSON = "{{ ([[messages | length] * 1000] * 9000) | tojson(indent=1) | length }}" + PLAIN
IN_A_CONSTANT = "{{ ('ab' * 2000000) | batch(1) | list | length }}" + LOOPS.replace("99999", "3000")
TURNS = [{"role": "user", "content": "Is it?"}]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path))


def test_a_template_that_ends(tokenizer: Any) -> None:
    tokenizer.chat_template = PLAIN
    before = sys.gettrace()
    assert apply_chat_template(tokenizer, TURNS, tokenize=False) == "[user]Is it?"
    assert sys.gettrace() is before


def test_its_own_errors_pass(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ raise_exception('no system turn') }}"
    with pytest.raises(Exception, match="no system turn"):
        apply_chat_template(tokenizer, TURNS, tokenize=False)


@pytest.mark.parametrize("template", [LOOPS, IN_A_FILTER, IN_JSON, IN_A_CONSTANT])
def test_a_template_that_does_not_end(tokenizer: Any, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "MOST_SECONDS", 0.3)
    tokenizer.chat_template = template
    before, started = sys.gettrace(), time.monotonic()
    with pytest.raises(TemplateError, match=r"^the tokenizer's chat template runs for more than 0\.3 s; .*correct it"):
        apply_chat_template(tokenizer, TURNS, tokenize=False)
    assert time.monotonic() - started < 5
    assert sys.gettrace() is before


def test_time_that_passes_in_a_callback_of_the_garbage_collector(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python ignores an error raised there."""
    monkeypatch.setattr(tokenizer_module, "MOST_SECONDS", 0.3)
    tokenizer.chat_template = "{{ range(99999) | batch(1) | list | length }}" * 400 + PLAIN
    called = []

    def slow(phase: str, _: dict[str, int]) -> None:
        if not called:
            called.append(phase)
            time.sleep(0.4)
            after()

    def after() -> None:
        called.append("after")

    gc.callbacks.append(slow)
    try:
        with pytest.raises(TemplateError, match="runs for more than"):
            apply_chat_template(tokenizer, TURNS, tokenize=False)
    finally:
        gc.callbacks.remove(slow)
    assert called[1:] == ["after"]


def test_in_another_thread(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "MOST_SECONDS", 0.3)
    tokenizer.chat_template = LOOPS
    caught = []

    def run() -> None:
        try:
            apply_chat_template(tokenizer, TURNS, tokenize=False)
        except TemplateError as error:
            caught.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert len(caught) == 1


def test_whoever_applies_one_says_so(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "MOST_SECONDS", 0.3)
    tokenizer.chat_template = LOOPS
    with pytest.raises(TemplateError, match="more than"):
        as_message(tokenizer, "Is it?")
    with pytest.raises(TemplateError, match="more than"):
        Prompter(load_template("chat"), tokenizer, 256, pytest.fail)
