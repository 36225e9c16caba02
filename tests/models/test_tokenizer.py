"""The tokenizer is the one in tokenizer.json, whatever class transformers has for the model."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from evalkit.errors import CheckpointError
from evalkit.models.loading.locate import silent
from evalkit.models.loading.tokenizer import load_tokenizer
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


@pytest.mark.parametrize("dropout", [0.5, 0.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_bpe_dropout_is_switched_off(tmp_path: Path, family: Family, dropout: float) -> None:
    path = tiny_checkpoint(tmp_path, family)
    reference = Tokenizer.from_file(str(path / "tokenizer.json"))
    rewrite_tokenizer(path, lambda content: content["model"].update(dropout=dropout))
    said: list[str] = []
    tokenizer = load_tokenizer(path, 512, say=said.append)
    assert any("dropout" in line for line in said) == (dropout > 0)
    for text in TEXTS:
        assert (
            tokenizer(text, add_special_tokens=False)["input_ids"]
            == reference.encode(text, add_special_tokens=False).ids
        )


RANDOM_CODE = """
import random
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    def _encode_plus(self, text, *arguments, **options):
        return super()._encode_plus(text[random.randrange(2) :], *arguments, **options)
"""


def test_code_that_samples_is_refused(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "llama")
    (path / "tokenization_own.py").write_text(RANDOM_CODE)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "OwnTokenizer"}
    settings |= {"auto_map": {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="differently each time"):
        load_tokenizer(path, 512, trust_remote_code=True)


def test_a_panic_of_the_tokenizer_is_an_error(tmp_path: Path) -> None:
    """In Rust; at loading, or at a text on which a regular expression takes too many steps."""
    path = tiny_checkpoint(tmp_path, "llama")
    add_split(path, "(.+)+$(?<=x)")
    with pytest.raises(CheckpointError, match="retry-limit"):
        load_tokenizer(path, 512)
    add_split(path, "(a+)+$")
    tokenizer = load_tokenizer(path, 512)
    copied = pickle.loads(pickle.dumps(tokenizer))
    assert copied("A text") == tokenizer("A text")
    for encode in (tokenizer, tokenizer.encode, tokenizer.tokenize, copied, copy.deepcopy(tokenizer)):
        with pytest.raises(CheckpointError, match="retry-limit"):
            encode("a" * 40 + " b")


def add_split(path: Path, pattern: str) -> None:
    """Split text by a regular expression before anything else."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    parts = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    rewrite_tokenizer(path, lambda content: content.update(pre_tokenizer=parts))


def rewrite_tokenizer(path: Path, change: Callable[[Any], None]) -> None:
    file = path / "tokenizer.json"
    content = json.loads(file.read_text("utf-8"))
    change(content)
    file.write_text(json.dumps(content), "utf-8")
