"""Windows of documents, compared with lm-eval's own and with what they must cover."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import AutoTokenizer

from evalkit.benchmarks.perplexity.texts import TextDocument
from evalkit.benchmarks.perplexity.windows import PerplexityFacts, packed, spans, windows_of
from evalkit.errors import ScoringError
from tests.tiny import TRAINING_TEXT, tiny_tokenizer

PREFIX = -7


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, int, int]:
    window = draw(st.integers(1, 20))
    return draw(st.integers(0, 70)), window, draw(st.integers(1, window))


@settings(max_examples=500)
@given(cuts())
def test_lm_evals_windows(cut: tuple[int, int, int]) -> None:
    """A stride is lm-eval's window less its context, which is one token by default."""
    count, window, stride = cut
    tokens = list(range(count))
    theirs = get_rolling_token_windows(tokens, PREFIX, window, window - stride + 1)
    expected = [(context, scored) for context, scored in map(make_disjoint_window, theirs)]
    full = [PREFIX, *tokens]
    found = [
        (full[start + 1 : start + 1 + context], tokens[start + context : stop])
        for start, context, stop in spans(count, window, stride)
    ]
    assert found == expected


@settings(max_examples=500)
@given(cuts())
def test_each_token_is_scored_once_with_its_context(cut: tuple[int, int, int]) -> None:
    count, window, stride = cut
    found = list(spans(count, window, stride))
    assert [token for start, context, stop in found for token in range(start + context, stop)] == list(range(count))
    for number, (start, context, stop) in enumerate(found):
        assert stop - start <= window + 1  # the last one is only predicted
        assert context == 1 if not number else context >= window - stride + 1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.parametrize("stride", [16, 5])
def test_the_windows_of_a_document(tokenizer: Any, stride: int) -> None:
    text = " ".join(TRAINING_TEXT)
    windows = windows_of(TextDocument("t", 3, text, "t.txt"), tokenizer, PerplexityFacts(16, 64, 0, "<s>"), stride)
    scored = np.concatenate([one.tokens[one.context :] for one in windows])
    assert scored.tolist() == tokenizer(text)["input_ids"]
    sizes = np.concatenate([one.bytes for one in windows])
    assert len(sizes) == len(scored)
    assert sizes.sum() == len(text.encode())
    assert [one.number for one in windows] == list(range(len(windows)))
    assert [one.is_last for one in windows] == [False] * (len(windows) - 1) + [True]
    assert {one.document for one in windows} == {3}
    assert windows[0].tokens[0] == 0


def test_a_text_that_begins_with_the_prefix(tmp_path: Any) -> None:
    """As in lm-eval, the tokenizer's own BOS is scored after the prefix, unless the text spells it."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path, adds_bos=True))
    facts = PerplexityFacts(16, 64, tokenizer.bos_token_id, "<s>")
    [plain] = windows_of(TextDocument("t", 0, "river", "t"), tokenizer, facts)
    [spelled] = windows_of(TextDocument("t", 0, "<s>river", "t"), tokenizer, facts)
    assert plain.tokens.tolist() == spelled.tokens.tolist()
    assert (plain.tokens[:2] == tokenizer.bos_token_id).all()
    assert (plain.bytes[0], spelled.bytes[0]) == (0, 3)


def test_a_document_without_tokens(tokenizer: Any) -> None:
    class Silent:
        def __call__(self, *_: Any, **__: Any) -> dict[str, list[Any]]:
            return {"input_ids": [], "offset_mapping": [], "special_tokens_mask": []}

    with pytest.raises(ScoringError, match=r"a\.jsonl, line 4: the tokenizer makes no token"):
        windows_of(TextDocument("a", 3, "\u200b", "a.jsonl, line 4"), Silent(), PerplexityFacts(8, 64, 0, "<s>"))


@settings(max_examples=100)
@given(st.lists(st.integers(1, 60), max_size=20), st.integers(1, 50))
def test_batches_hold_all_windows_in_order(lengths: list[int], budget: int) -> None:
    windows: Any = [type("W", (), {"tokens": np.zeros(size + 1)})() for size in lengths]
    found = list(packed(iter(windows), budget))
    assert [one for members in found for one in members] == windows
    for members in found:
        assert len(members) == 1 or sum(len(one.tokens) - 1 for one in members) <= budget
