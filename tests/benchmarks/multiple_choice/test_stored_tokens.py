"""Tokens in the cache: equal to those encoded anew, and never those of another tokenizer, template or text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence
from transformers import PreTrainedTokenizerFast

from evalkit.benchmarks.multiple_choice import stored
from evalkit.benchmarks.multiple_choice.encoded import EncodedQuestion, EncodedQuestions
from evalkit.benchmarks.multiple_choice.prompts import Prompter
from evalkit.benchmarks.multiple_choice.stored import encoded_questions
from evalkit.benchmarks.multiple_choice.templates import load_template
from tests.questions import question
from tests.tiny import tiny_tokenizer

QUESTIONS = [
    question("Why does ice float on water?", ["Ice is less dense", "It is cold."]),
    question("夜里河水上涨，清晨时桥", ["已经不见了。", "還在🌊", "x"], doc_id=1, gap=""),
    question(["Ann thanked Sue because Ann", "Ann thanked Sue because Sue"], ["had helped"] * 2, doc_id=2),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(stored, "_LEAST", 0)
    return tmp_path / "cache"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(str(tiny_tokenizer(tmp_path / "tokenizer")))


def prompter(tokenizer: Any, template: str = "inst", window: int = 1000) -> Prompter:
    return Prompter(load_template(template), tokenizer, window)


def files(cache: Path) -> int:
    return len(list((cache / "tokens").glob("*")))


def lists(found: list[EncodedQuestion]) -> list[Any]:
    return [
        (one.question, [(s.tokens.tolist(), s.segments.tolist(), s.truncated, s.straddles) for s in part])
        for one in found
        for part in (one.sequences, one.unconditional)
    ]


@pytest.mark.parametrize("unconditional", [False, True])
@pytest.mark.parametrize("window", [30, 1000])
def test_what_is_read_is_what_was_encoded(
    tokenizer: Any, cache: Path, unconditional: bool, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [QUESTIONS[1], QUESTIONS[2]] if window == 30 else QUESTIONS
    encoder = prompter(tokenizer, "plain", window)
    expected = lists(list(encoder.encode(asked, unconditional)))
    first = encoded_questions(encoder, asked, unconditional)
    assert files(cache) == 1
    monkeypatch.setattr(Prompter, "encode", None)
    second = encoded_questions(encoder, asked, unconditional)
    assert lists(list(first)) == lists(list(second)) == expected
    assert lists([second[len(asked) - 1]]) == expected[-2:]


def test_each_difference_has_a_file_of_its_own(tokenizer: Any, cache: Path, tmp_path: Path) -> None:
    other = PreTrainedTokenizerFast.from_pretrained(str(tiny_tokenizer(tmp_path / "other", eos="<end>")))
    added = PreTrainedTokenizerFast.from_pretrained(str(tmp_path / "tokenizer"))
    added.add_tokens(["water"])
    changed = [replace(QUESTIONS[0], delimiter="\n"), *QUESTIONS[1:]]
    made = [
        (prompter(tokenizer), QUESTIONS, False),
        (prompter(tokenizer), QUESTIONS, True),
        (prompter(tokenizer), QUESTIONS[:2], False),
        (prompter(tokenizer), changed, False),
        (prompter(tokenizer, "plain"), QUESTIONS, False),
        (prompter(tokenizer, window=999), QUESTIONS, False),
        (prompter(other), QUESTIONS, False),
        (prompter(added), QUESTIONS, False),
    ]
    for encoder, asked, unconditional in made:
        encoded_questions(encoder, asked, unconditional)
    assert files(cache) == len(made)


@pytest.mark.parametrize("part", ["bos", "eos", "system", "never"])
def test_templates_that_differ_in_one_setting(tokenizer: Any, cache: Path, part: str) -> None:
    inst = load_template("inst")
    changes = {"eos": {"eos": False}, "system": {"system": "Be brief."}, "never": {"bos": "never"}}
    if part == "bos":  # the text of BOS is the same, its id another
        tokenizer.add_special_tokens({"bos_token": "<begin>"})
        other = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.backend_tokenizer, bos_token="</s>", eos_token="</s>"
        )
        made = [Prompter(inst, one, 1000) for one in (tokenizer, other)]
    else:
        made = [Prompter(one, tokenizer, 1000) for one in (inst, replace(inst, **changes[part]))]
    found = [encoded_questions(one, QUESTIONS, False) for one in made]
    assert files(cache) == 2
    assert not np.array_equal(found[0].tokens, found[1].tokens)
    for one, expected in zip(made, found, strict=True):
        assert lists(list(encoded_questions(one, QUESTIONS, False))) == lists(list(expected))


@pytest.mark.parametrize("part", ["version", "source_digest"])
def test_other_libraries_and_other_code_encode_anew(
    tokenizer: Any, cache: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded_questions(prompter(tokenizer), QUESTIONS, False)
    monkeypatch.setattr(stored, part, lambda *_: "another")
    encoded_questions(prompter(tokenizer), QUESTIONS, False)
    assert files(cache) == 2


def test_a_tokenizer_with_a_part_in_python_is_not_stored(tokenizer: Any, cache: Path) -> None:
    class Whole:
        """Splits nothing."""

        def pre_tokenize(self, text: Any) -> None:
            text.split(lambda _, words: [words])

    before = lists(list(prompter(tokenizer).encode(QUESTIONS[:1])))
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [PreTokenizer.custom(Whole()), ByteLevel(add_prefix_space=False)]
    )
    assert lists(list(encoded_questions(prompter(tokenizer), QUESTIONS[:1], False))) == before
    assert not (cache / "tokens").exists()


def test_no_questions() -> None:
    assert list(EncodedQuestions.of([], [])) == []  # type: ignore[call-overload]


def test_a_damaged_file_is_encoded_again(tokenizer: Any, cache: Path) -> None:
    expected = encoded_questions(prompter(tokenizer), QUESTIONS, False)
    [file] = (cache / "tokens").iterdir()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    found = encoded_questions(prompter(tokenizer), QUESTIONS, False)
    assert np.array_equal(found.tokens, expected.tokens)


def test_tokenizers_with_code_of_their_own_are_not_stored(tokenizer: Any, cache: Path) -> None:
    class Own(PreTrainedTokenizerFast):
        pass

    own = Own(tokenizer_object=tokenizer.backend_tokenizer, bos_token="<s>", eos_token="</s>")
    encoded_questions(prompter(own), QUESTIONS, False)
    assert not (cache / "tokens").exists()


def test_few_tokens_are_not_stored(tokenizer: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = EncodedQuestions.of(QUESTIONS, prompter(tokenizer).encode(QUESTIONS))
    monkeypatch.setattr(stored, "_LEAST", len(found.segments) + 1)
    encoded_questions(prompter(tokenizer), QUESTIONS, False)
    assert not (cache / "tokens").exists()
