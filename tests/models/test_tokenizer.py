"""The tokenizer is the one in tokenizer.json, whatever class transformers has for the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from evalkit.models.locate import silent
from evalkit.models.tokenizer import load_tokenizer
from tests.tiny import TOKENS, TRAINING_TEXT, Family, tiny_checkpoint

FAMILIES: tuple[Family, ...] = ("llama", "gpt_neox", "qwen2")
TEXTS = (*TRAINING_TEXT, "In 1987 it's 12,345.60  (twice)\n\n\tdone", "e\u0301 é ﬁ Ａ", " leading", "")


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_are_those_of_tokenizer_json(tmp_path: Path, family: Family) -> None:
    path = tiny_checkpoint(tmp_path, family)
    reference = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer = load_tokenizer(path, 512)
    for text in TEXTS:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        assert encoded["input_ids"] == reference.encode(text, add_special_tokens=False).ids
        assert encoded["offset_mapping"] == reference.encode(text, add_special_tokens=False).offsets


def test_a_difference_from_transformers_class_is_reported(tmp_path: Path) -> None:
    said: list[str] = []
    tokenizer = load_tokenizer(tiny_checkpoint(tmp_path / "own", "qwen2"), 512, say=said.append)
    assert len(said) == 1 and "tokenizer.json is used as written" in said[0]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    load_tokenizer(tiny_checkpoint(tmp_path / "other", "llama"), 512, say=said.append)
    assert len(said) == 1


def test_tokens_that_transformers_adds_do_not_count_against_the_embedding(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "qwen2")
    assert max(load_tokenizer(path, TOKENS).get_vocab().values()) == TOKENS - 1


def test_special_tokens_that_only_the_class_knows(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "gpt_neox", bos="<|endoftext|>", eos="<|endoftext|>")
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPTNeoXTokenizer"}))
    tokenizer = load_tokenizer(path, 512, say=silent)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 0)
