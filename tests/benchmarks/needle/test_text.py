"""Haystacks: requested length, requested depth of the needle, and determinism."""

from __future__ import annotations

import re
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from evalkit.benchmarks.needle.text import BUILT_IN, Haystack, NeedleCase, is_found, pattern_of
from evalkit.errors import DataError, UsageError
from tests.tiny import TRAINING_TEXT, tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), adds_bos=True))


def made(haystack: Haystack, tokenizer: Any, cell: NeedleCase, cue: bool = True) -> np.ndarray:
    size = cache(lambda text: len(tokenizer(text, add_special_tokens=False).input_ids))
    return np.asarray(haystack.prompt(cell, lambda text: tokenizer(text).input_ids, size, cue=cue))


def text_of(tokenizer: Any, tokens: np.ndarray) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


@pytest.mark.parametrize("length", [400, 777, 2000])
@pytest.mark.parametrize("depth", [0.0, 25.0, 60.0, 100.0])
def test_length_and_depth(tokenizer: Any, length: int, depth: float) -> None:
    cell = NeedleCase(length, depth, 1)
    tokens = made(Haystack(None), tokenizer, cell)
    assert length - 80 < len(tokens) <= length  # a sentence of this tokenizer has up to 70
    text = text_of(tokenizer, tokens)
    needle = f"The secret number of {cell.city} is {cell.secret}."
    assert text.count(needle) == text.count(cell.secret) == 1
    assert text.endswith(
        f"\n\nQuestion: What is the secret number of {cell.city}?\nAnswer: The secret number of {cell.city} is"
    )
    body = text.split("\n\n")[1]
    before, after = (len(tokenizer(part).input_ids) for part in body.split(needle))
    assert depth / 100 == pytest.approx(before / (before + after), abs=40 / (before + after))


@pytest.mark.parametrize("wrong", [0.7, 1.0, 1.5])
def test_a_text_is_filled_however_sentences_are_sized(tokenizer: Any, wrong: float) -> None:
    """Alone they may be more or fewer tokens than in a text."""
    cell = NeedleCase(2000, 50.0, 0)

    def size(text: str) -> int:
        return round(wrong * len(tokenizer(text, add_special_tokens=False).input_ids))

    tokens = Haystack(None).prompt(cell, lambda text: tokenizer(text).input_ids, size, cue=True)
    assert 2000 - 80 < len(tokens) <= 2000


def test_without_a_cue_the_answer_is_asked_for(tokenizer: Any) -> None:
    cell = NeedleCase(500, 50.0, 0)
    text = text_of(tokenizer, made(Haystack(None), tokenizer, cell, cue=False))
    assert text.endswith(f"Question: What is the secret number of {cell.city}? Answer with the number alone.")


def test_texts_of_a_repeat_begin_alike(tokenizer: Any) -> None:
    """So that the text before the needle is shared, also between lengths."""
    late, later, longer = (
        made(Haystack(None), tokenizer, NeedleCase(*cell, 2)) for cell in ((900, 75), (900, 100), (1800, 90))
    )
    other = made(Haystack(None), tokenizer, NeedleCase(900, 75, 3))
    assert (late[:500] == later[:500]).all()
    assert (late[:500] == longer[:500]).all()
    assert not (late[:500] == other[:500]).all()


def test_pinned() -> None:
    """Another secret, or another text, would be another test: raise the number in `BUILT_IN`."""
    assert BUILT_IN == "built-in 1"
    assert (NeedleCase(1000, 50.0, 0).secret, NeedleCase(1000, 50.0, 0).city) == ("2220526", "Warsaw")
    assert next(iter(Haystack(None).sentences(0))) == (
        "The mirror beside the mill was more dusty than the teacher remembered. "
    )


def test_secrets_differ() -> None:
    secrets = [NeedleCase(length, depth, n).secret for length in (1, 2, 3) for depth in range(10) for n in range(10)]
    assert len(set(secrets)) == len(secrets)
    assert all(re.fullmatch(r"[1-9]\d{6}", secret) for secret in secrets)


def test_the_built_in_text_is_varied_and_without_numbers() -> None:
    sentences = list(islice(Haystack(None).sentences(0), 3000))
    assert len(set(sentences)) > 2900
    text = "".join(sentences)
    assert not re.search(r"\d|secret|[{}]", text)
    assert all(re.fullmatch(r"[A-Z].*[.?] ", sentence) for sentence in sentences)


@pytest.mark.parametrize(
    ("answer", "found"),
    [(" 2220526.", True), ("It is 2,220,526", True), ("2220526", True), ("1 2220526 3", True), ("", False),
     ("22205261", False), ("12220526", False), ("222052", False), ("2 220 526", False), ("2220527", False),
     ("2220526,1234567", True), ("1,2220526", True), ("2,2205260", False)],
)  # fmt: skip
def test_found(answer: str, found: bool) -> None:
    assert is_found(NeedleCase(1000, 50.0, 0), answer) == found


PIECES = st.sampled_from(["2220526", "2,220,526", "2220", "526", ",", "1", "890", " ", ".", "a"])


@given(st.lists(PIECES, max_size=8).map("".join), st.lists(PIECES, max_size=4).map("".join))
def test_what_ends_a_text_is_what_is_found(answer: str, more: str) -> None:
    """Whatever would have been written after it; and a secret after which the text goes on ends it."""
    cell = NeedleCase(1000, 50.0, 0)
    ends = re.search(pattern_of(cell), answer) is not None
    if ends:
        assert is_found(cell, answer + more)
    if is_found(cell, answer + " a"):
        assert re.search(pattern_of(cell), answer + " a")


@given(st.text(min_size=1, max_size=3000).filter(str.strip))
def test_a_users_text_is_kept_to_the_letter(text: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.txt"
        path.write_text(text, encoding="utf-8", newline="")
        haystack = Haystack(path)
    pieces = list(islice(haystack.sentences(0), 50))
    assert max(map(len, pieces)) <= 500 + len(text) - len(text.rstrip())
    whole = "".join(islice(haystack.sentences(0), 6000))
    assert re.sub(r"\s+", "", whole).startswith(re.sub(r"\s+", "", text).removeprefix("\ufeff")[:2000])


def test_a_users_text_is_repeated(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(TRAINING_TEXT), encoding="utf-8")
    haystack = Haystack(path)
    assert (haystack.source, len(haystack.identity)) == (str(path), 64)
    text = text_of(tokenizer, made(haystack, tokenizer, NeedleCase(2500, 50.0, 0)))
    assert text.count("Der Fluss stieg über Nacht") > 1
    assert text.count("Der Fluss stieg über Nacht") == pytest.approx(text.count("桥已经不见了"), abs=1)
    beginnings = {next(iter(haystack.sentences(repeat))) for repeat in range(5)}
    assert len(beginnings) > 3


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "the file has no text"), (b" \n\t", "the file has no text"), (b"\xff\xfe\x00", "UTF-8")],
)
def test_files_that_hold_no_text(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=words):
        Haystack(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere.txt: cannot be read: No such file"):
        Haystack(tmp_path / "nowhere.txt")
    with pytest.raises(DataError, match=r"cannot be read: Is a directory"):
        Haystack(tmp_path)


def test_too_short(tokenizer: Any) -> None:
    with pytest.raises(UsageError, match="--lengths 60: no room for a needle and a sentence"):
        made(Haystack(None), tokenizer, NeedleCase(60, 50.0, 0))
