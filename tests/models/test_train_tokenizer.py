"""A trained tokenizer is lossless, has Llama's format, and reports its input and unreadable files."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from evalkit.errors import DataError, UsageError
from evalkit.models.zoo.train_tokenizer import FEWEST, train_tokenizer
from tests.tiny import TRAINING_TEXT

TEXT = "\n".join(TRAINING_TEXT * 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    train_tokenizer([folder / "text.txt"], 512, folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def test_form(folder: Path, tokenizer: Any) -> None:
    assert len(tokenizer) == 512
    assert (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer.convert_ids_to_tokens([3, 13, 258]) == ["<0x00>", "<0x0A>", "<0xFF>"]
    assert tokenizer("The river")["input_ids"][0] == 1
    whole = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    assert [token["content"] for token in whole["added_tokens"]] == ["<unk>", "<s>", "</s>"]


def test_words_are_learnt_with_their_space_and_digits_stand_alone(tokenizer: Any) -> None:
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("the 1234", add_special_tokens=False)["input_ids"])
    assert tokens == ["▁the", "▁", "1", "2", "<0x33>", "<0x34>"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\n",
        "  two  spaces ",
        "東京は夜の七時",
        "🌊🏳️‍🌈",
        "e\u0301 é",
        "a\r\n\tb\x00\u2028",
        "<0x0A>",
        "12,345.60",
    ],
)
def test_no_text_is_lost(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


@given(st.text() | st.text(alphabet=" \n▁abthe1,."))
def test_no_text_is_lost_whatever_it_is(tokenizer: Any, text: str) -> None:
    """Except ▁ itself, which encodes a space, as in Llama's."""
    ids = tokenizer(text)["input_ids"]
    assert 0 not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text.replace("▁", " ")


def test_offsets_cover_the_text(tokenizer: Any) -> None:
    text = "The river 東 rose."
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    assert [start for start, _ in encoded["offset_mapping"]] == sorted(start for start, _ in encoded["offset_mapping"])
    assert encoded["offset_mapping"][-1][1] == len(text)


def test_the_same_text_gives_the_same_files(folder: Path, tmp_path: Path) -> None:
    train_tokenizer([folder / "text.txt"], 512, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_files_folders_and_json_lines_are_the_same_text(folder: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts" / "inner"
    texts.mkdir(parents=True)
    lines = TEXT.splitlines(keepends=True)
    (texts / "a.txt").write_text("".join(lines[:20]), encoding="utf-8")
    (texts / "b.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines[20:]), encoding="utf-8")
    (texts / ".hidden").write_bytes(b"\xff\xff")
    train_tokenizer([tmp_path / "texts"], 512, tmp_path)
    vocabularies = [Tokenizer.from_file(str(where / "tokenizer.json")).get_vocab() for where in (folder, tmp_path)]
    assert vocabularies[0] == vocabularies[1]


def test_too_little_text(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("so so so so", encoding="utf-8")
    reached = train_tokenizer([tmp_path / "text.txt"], 512, tmp_path)
    assert reached == len(AutoTokenizer.from_pretrained(tmp_path))
    assert FEWEST < reached < FEWEST + 10


@pytest.mark.parametrize("text", ["a" * 300_000, " " * 300_000 + "b", "ab" * 150_000, "ก" * 100_000])
def test_a_word_without_end(tmp_path: Path, text: str) -> None:
    """As one word it would take minutes: the trainer's time is quadratic in a word's length."""
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    train_tokenizer([tmp_path / "text.txt"], 512, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode(tokenizer(text[-2000:])["input_ids"], skip_special_tokens=True) == text[-2000:]


def test_text_that_spells_byte_tokens(tmp_path: Path) -> None:
    """Such a word must not become the token that stands for the byte."""
    (tmp_path / "text.txt").write_text("<0x0A> " * 50, encoding="utf-8")
    train_tokenizer([tmp_path / "text.txt"], 512, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode(tokenizer("<0x0A> <0x0A>")["input_ids"], skip_special_tokens=True) == "<0x0A> <0x0A>"


def test_invalid_texts(tmp_path: Path) -> None:
    def refused(kind: type[Exception], words: str, path: Path, size: int = 512) -> None:
        with pytest.raises(kind, match=words):
            train_tokenizer([path], size, tmp_path)

    refused(DataError, r"nowhere\.txt: cannot be read: No such file", tmp_path / "nowhere.txt")
    (tmp_path / "empty").mkdir()
    refused(UsageError, "empty: the folder holds no files", tmp_path / "empty")
    (tmp_path / "binary").write_bytes(b"ab\xff\xfe")
    refused(DataError, r"binary: cannot be read as a text in UTF-8 .*position 2", tmp_path / "binary")
    (tmp_path / "blank").write_text("  ", encoding="utf-8")
    refused(UsageError, "blank: there is no text to train on", tmp_path / "blank")
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "a"}\n{"txt": "b"}\n', encoding="utf-8")
    refused(DataError, r"lines\.jsonl line 2: .*'text'", lines)
    lines.write_text('{"text": "a"\n', encoding="utf-8")
    refused(DataError, r"lines\.jsonl line 1: .*not valid JSON", lines)
    refused(
        UsageError, "a vocabulary of 258 is too small for 3 special tokens and 256 bytes; use 259 or more", lines, 258
    )


def test_a_long_line_of_long_words_takes_seconds(tmp_path: Path) -> None:
    """Its words are just below the length at which they are cut."""
    (tmp_path / "long.txt").write_text(("a" * 999 + " ") * 3000, encoding="utf-8")
    started = time.process_time()
    assert train_tokenizer([tmp_path / "long.txt"], 400, tmp_path) < 400
    assert time.process_time() - started < 3
