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

from evalkit.benchmarks.haystack import BUILT_IN, Haystack, NeedleCase
from evalkit.errors import DataError
from tests.tiny import tiny_tokenizer

CASE = NeedleCase(1000, 50.0, 0)
PIECES = st.sampled_from(["2220526", "2,220,526", "2220", "526", ",", "1", "890", " ", ".", "a"])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), adds_bos=True))


def prompt(tokenizer: Any, case: NeedleCase, cue: bool = True, factor: float = 1.0) -> np.ndarray:
    size = cache(lambda text: round(factor * len(tokenizer(text, add_special_tokens=False).input_ids)))
    return np.asarray(Haystack(None).prompt(case, lambda text: tokenizer(text).input_ids, size, cue=cue))


@pytest.mark.parametrize(("length", "depth"), [(400, 0.0), (777, 60.0), (1500, 100.0)])
def test_length_and_depth(tokenizer: Any, length: int, depth: float) -> None:
    case = NeedleCase(length, depth, 1)
    tokens = prompt(tokenizer, case)
    assert length - 80 < len(tokens) <= length  # a sentence of this tokenizer has up to 70
    text = str(tokenizer.decode(tokens, skip_special_tokens=True))
    needle = f"The secret number of {case.city} is {case.secret}."
    assert text.count(needle) == text.count(case.secret) == 1
    question = f"\n\nQuestion: What is the secret number of {case.city}?"
    assert text.endswith(f"{question}\nAnswer: The secret number of {case.city} is")
    before, after = (len(tokenizer(part).input_ids) for part in text.split("\n\n")[1].split(needle))
    assert depth / 100 == pytest.approx(before / (before + after), abs=40 / (before + after))
    without_cue = tokenizer.decode(prompt(tokenizer, case, cue=False), skip_special_tokens=True)
    assert without_cue.endswith(f"{question} Answer with the number alone.")
    for factor in (0.7, 1.5):  # sentences alone may be more or fewer tokens than in a text
        assert length - 80 < len(prompt(tokenizer, case, factor=factor)) <= length


def test_the_built_in_text(tokenizer: Any) -> None:
    """Another secret, or another text, would be another test: raise the number in `BUILT_IN`."""
    assert (BUILT_IN, CASE.secret, CASE.city) == ("built-in 1", "2220526", "Warsaw")
    sentences = list(islice(Haystack(None).sentences(0), 1000))
    assert sentences[0] == "The mirror beside the mill was more dusty than the teacher remembered. "
    assert len(set(sentences)) > 980
    assert not re.search(r"\d|secret|[{}]", "".join(sentences))
    assert all(re.fullmatch(r"[A-Z].*[.?] ", sentence) for sentence in sentences)
    secrets = [NeedleCase(length, depth, n).secret for length in (1, 2, 3) for depth in range(10) for n in range(10)]
    assert len(set(secrets)) == len(secrets)
    assert all(re.fullmatch(r"[1-9]\d{6}", secret) for secret in secrets)
    # Texts of a repeat begin alike, so that the text before the needle is shared, also between lengths
    cases = ((900, 75, 2), (900, 100, 2), (1800, 90, 2), (900, 75, 3))
    late, later, longer, other = (prompt(tokenizer, NeedleCase(*case))[:500] for case in cases)
    assert (late == later).all() and (late == longer).all() and not (late == other).all()


@given(st.lists(PIECES, max_size=8).map("".join), st.lists(PIECES, max_size=4).map("".join))
def test_generation_stops_where_the_needle_is_found(answer: str, more: str) -> None:
    """Whatever would have been written after it; and a secret after which the text goes on ends it."""
    assert all(map(CASE.is_found, (" 2220526.", "It is 2,220,526", "1 2220526 3", "2220526,1234567", "1,2220526")))
    assert not any(map(CASE.is_found, ("22205261", "12220526", "2 220 526", "2,2205260")))
    if re.search(CASE.pattern, answer):
        assert CASE.is_found(answer + more)
    if CASE.is_found(answer + " a"):
        assert re.search(CASE.pattern, answer + " a")


def test_a_users_text_is_kept_to_the_letter(tmp_path: Path) -> None:
    """It is repeated, with another start for each repeat."""
    path = tmp_path / "text.txt"
    for text in ("\ufeffOne. Two! Three?\n\nfour", "x" * 1300 + " y", "夜里河水上涨。🌊\r\nEnd"):
        path.write_text(text, encoding="utf-8", newline="")
        haystack = Haystack(path)
        assert (haystack.source, len(haystack.identity)) == (str(path), 64)
        pieces = list(islice(haystack.sentences(0), 6))
        assert max(map(len, pieces)) <= 500
        letters = re.sub(r"\s+", "", text).removeprefix("\ufeff")
        assert re.sub(r"\s+", "", "".join(pieces)).startswith(letters)
    path.write_bytes(b" \n\t")
    with pytest.raises(DataError, match=r"--text .*text\.txt"):
        Haystack(path)
