"""Bytes of each token, compared with tokenizers whose tokens are bytes, and with the length of the text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from evalkit.benchmarks.perplexity.windows import token_bytes
from tests.tiny import TRAINING_TEXT, tiny_tokenizer

ODD = "Hé 👍🏽 夜里  x\n\n朝 क्षि\u200d👩\u200d👩\u200d👧 \ufeffend \t"
BYTES = {character: number for number, character in bytes_to_unicode().items()}


def counted(tokenizer: Any, text: str) -> tuple[list[int], list[str]]:
    encoding = tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True)
    spans, added = np.array(encoding["offset_mapping"]).reshape(-1, 2), np.array(encoding["special_tokens_mask"], bool)
    spelled = tokenizer.convert_ids_to_tokens(encoding["input_ids"])
    return token_bytes(text, spans, added, spelled).tolist(), spelled


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The vocabulary spells each byte as one character; the second, as GPT-2's, leaves out the space before a token."""
    folder, tokenizers = tiny_tokenizer(tmp_path_factory.mktemp("bytes")), []
    for trims in (False, True):
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=trims)
        tokenizers.append(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    return tokenizers


@pytest.fixture(scope="module")
def fallback() -> Any:
    """As Llama 2's: characters, with bytes for those that it does not know, and BOS."""
    kinds = [f"<0x{number:02X}>" for number in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", "<s>", *kinds], show_progress=False)
    tokenizer.train_from_iterator(TRAINING_TEXT[:5], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


@pytest.fixture(scope="module")
def pieces() -> Any:
    """As BERT's: lower case without accents, white space dropped, unknown words as one token."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(TRAINING_TEXT[:8], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


@settings(max_examples=100)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@example(ODD)
@example("👍")
def test_every_byte_is_counted_once(byte_level: list[Any], fallback: Any, pieces: Any, text: str) -> None:
    """The bytes of byte-level tokens are known without offsets."""
    for tokenizer in byte_level:
        sizes, tokens = counted(tokenizer, text)
        assert b"".join(bytes(BYTES[character] for character in token) for token in tokens) == text.encode()
        assert sizes == [len(token) for token in tokens]
    for tokenizer in (fallback, pieces):
        sizes, tokens = counted(tokenizer, text)
        assert min(sizes, default=0) >= 0
        assert sum(sizes) == (len(text.encode()) if tokens else 0)


def test_tokens_by_hand(fallback: Any) -> None:
    sizes, tokens = counted(fallback, "a 👍b")
    assert (tokens[0], sizes[0], sum(sizes)) == ("<s>", 0, 7)
    assert [size for size, token in zip(sizes, tokens, strict=True) if token.startswith("<0x")] == [1, 1, 1, 1]

    def count(text: str, spans: list[tuple[int, int]], pieces: list[str], added: tuple[int, ...] = ()) -> list[int]:
        mask = np.isin(np.arange(len(spans)), added)
        return token_bytes(text, np.array(spans), mask, pieces).tolist()

    # What no token covers belongs to the next one, and at the end to the last
    assert count("  é b  ", [(2, 3), (4, 5)], ["é", "b"]) == [4, 4]
    # Added tokens have none; without any other token all bytes are theirs
    assert count("ab", [(0, 0), (0, 2), (0, 0)], ["<s>", "ab", "</s>"], (0, 2)) == [0, 2, 0]
    assert count("ab", [(0, 0)], ["<s>"], (0,)) == [2]
    # A character whose parts are spelled in an unknown way is divided evenly; nothing is lost
    assert count("x👍", [(0, 1), (1, 2), (1, 2), (1, 2)], ["x", "?", "??", "????"]) == [1, 1, 1, 2]
