"""Packed text: every document between BOS and EOS, in order; complete or absent; and the errors of bad text."""

from __future__ import annotations

import hashlib
import json
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recipe import packing
from recipe.packing import documents, packed, tokens_of
from recipe.settings import Text
from recipe.tokenizer import prepared_tokenizer
from tokenizers import Tokenizer

from evalkit.errors import DataError, EvalkitError, UsageError
from evalkit.models.loading.tokenizer import load_tokenizer
from tests.pretrain.trainings import pack_until, training_of
from tests.tiny import TOKENS, TRAINING_TEXT, tiny_tokenizer

LINES: list[str] = []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return load_tokenizer(folder, TOKENS)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "text.jsonl", list(TRAINING_TEXT))


def write(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def text_of(*files: Path, **more: Any) -> Text:
    return Text(files=tuple(map(str, files)), **more)


def pack(tokenizer: Any, root: Path, *texts: Text) -> Path:
    return packed(texts, tokenizer, root, LINES.append)


def test_documents_stand_between_bos_and_eos(tokenizer: Any, folder: Path, file: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.txt"
    plain.write_text("one\ntwo", encoding="utf-8")
    found = tokens_of(pack(tokenizer, tmp_path / "data", text_of(file, plain)))
    alone = Tokenizer.from_file(str(folder / "tokenizer.json"))
    first, last = alone.token_to_id("<s>"), alone.token_to_id("</s>")
    texts = (*TRAINING_TEXT, "one\ntwo")
    assert found.tolist() == [token for text in texts for token in (first, *alone.encode(text).ids, last)]
    assert found.dtype == np.uint16
    assert not found.flags.writeable


def test_more_documents_than_are_tokenised_at_once(
    tokenizer: Any, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tokens_of(pack(tokenizer, tmp_path / "a", text_of(file)))
    monkeypatch.setattr(packing, "_DOCUMENTS", 3)
    assert tokens_of(pack(tokenizer, tmp_path / "b", text_of(file))).tolist() == whole.tolist()


def test_ids_above_65535_need_uint32(tokenizer: Any, file: Path, tmp_path: Path) -> None:
    class Large:
        """A tokenizer with more ids than uint16 has."""

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def __len__(self) -> int:
            return 70_000

        def __call__(self, texts: list[str], **_: Any) -> Any:
            return {"input_ids": [[69_999] for _ in texts]}

    found = tokens_of(pack(Large(), tmp_path / "data", text_of(file)))
    assert found.dtype == np.uint32
    assert found[1] == 69_999


def test_a_limit_of_tokens(tokenizer: Any, file: Path, tmp_path: Path) -> None:
    whole = tokens_of(pack(tokenizer, tmp_path / "data", text_of(file)))
    for limit in (1, 57, 10**6):
        cut = tokens_of(pack(tokenizer, tmp_path / "data", text_of(file, tokens=limit), text_of(file, tokens=5)))
        assert cut.tolist() == [*whole[:limit], *whole[:5]]


def test_the_key_changes_with_the_content(tokenizer: Any, file: Path, tmp_path: Path) -> None:
    root = tmp_path / "data"
    one = pack(tokenizer, root, text_of(file))
    other = load_tokenizer(tiny_tokenizer(tmp_path / "other", eos="<end>"), TOKENS)
    folders = {one, pack(tokenizer, root, text_of(file, tokens=9)), pack(other, root, text_of(file)),
               pack(tokenizer, root, text_of(file), text_of(file))}  # fmt: skip
    assert len(folders) == 4
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(file.read_bytes())
    before = (one / "tokens.bin").stat().st_mtime_ns
    assert pack(tokenizer, root, text_of(moved)) == one
    assert (one / "tokens.bin").stat().st_mtime_ns == before
    file.write_bytes(file.read_bytes() + b'{"text": "more"}\n')
    assert pack(tokenizer, root, text_of(file)) != one


def test_a_data_set_of_datasets(tokenizer: Any, tmp_path: Path) -> None:
    """The way of the hub's data sets, by the builder of local files."""
    files = [write(tmp_path / f"{name}.jsonl", [f"{name} {text}" for text in TRAINING_TEXT], "body") for name in "ab"]
    given = Text(dataset="json", data_files=f"{tmp_path}/*.jsonl", key="body")
    root = tmp_path / "data"
    found = pack(tokenizer, root, given)
    assert tokens_of(found).tolist() == tokens_of(pack(tokenizer, root, text_of(*files, key="body"))).tolist()
    cut = Text(dataset="json", data_files=f"{tmp_path}/*.jsonl", key="body", tokens=30)
    assert tokens_of(pack(tokenizer, root, cut)).tolist() == tokens_of(found)[:30].tolist()
    write(files[0], ["another"], "body")
    assert pack(tokenizer, root, given) != found


BAD = {
    "a line that is no JSON": (b'{"text": "a"}\n{"text": "b"\n', "{file}:2: not valid JSON"),
    "a line without text": (b'{"text": "a"}\n{"body": "b"}\n', "{file}:2: has no text under 'text'"),
    "a line with a number": (b'{"text": 3}\n', "{file}:1: has no text under 'text'"),
    "no object": (b"[1]\n", "{file}:1: has no text under 'text'"),
    "half a character": (b'{"text": "\\ud800"}\n', "{file}:1: "),
    "bytes that are not UTF-8": (b'{"text": "\xff"}\n', "{file}:1: "),
    "no line": (b"", "{file}: holds no document"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_text(tokenizer: Any, tmp_path: Path, case: str) -> None:
    content, message = BAD[case]
    file = tmp_path / "text.jsonl"
    file.write_bytes(content)
    with pytest.raises(DataError) as raised:
        pack(tokenizer, tmp_path / "data", text_of(file))
    assert str(raised.value).startswith(message.format(file=file))
    assert not [path for path in (tmp_path / "data").iterdir() if path.is_dir()]


def test_files_that_cannot_be_read(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none.jsonl: cannot be read \(No such file"):
        pack(tokenizer, tmp_path / "data", text_of(tmp_path / "none.jsonl"))
    latin = tmp_path / "latin.txt"
    latin.write_bytes("é".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin.txt: not UTF-8 text"):
        list(documents(text_of(latin)))
    long = tmp_path / "long.txt"
    long.write_text("a" * (2**23 + 1))
    with pytest.raises(EvalkitError, match=r"long.txt: its text has 8,388,609 characters"):
        list(documents(text_of(long)))
    with pytest.raises(DataError, match="dataset json: cannot be read"):
        list(documents(Text(dataset="json", data_files=str(tmp_path / "none.json"))))


def test_no_tokenizer_on_texts_under_another_key(shared: Path, tmp_path: Path) -> None:
    """Lines that have both keys: the tokenizer would be of the other texts."""
    file = tmp_path / "text.jsonl"
    file.write_text(json.dumps({"text": "one", "body": "two"}))
    texts = [{"files": [str(shared / "text.jsonl")]}, {"files": [str(file)], "key": "body"}]
    recipe = training_of(shared, tmp_path, text=texts, tokenizer=None).recipe
    with pytest.raises(UsageError, match="a tokenizer is trained on texts under 'text', not 'body'; give 'tokenizer'"):
        prepared_tokenizer(recipe, tmp_path / "data", LINES.append)
    named = training_of(shared, tmp_path, text=texts)
    assert prepared_tokenizer(named.recipe, tmp_path / "data", LINES.append) == shared / "tokenizer"


def test_names_of_files_under_text(shared: Path, tmp_path: Path) -> None:
    """Hashes that the folders of earlier trainings have, by their formulas."""
    file = shared / "text.jsonl"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    folder = prepared_tokenizer(training_of(shared, tmp_path, tokenizer=None).recipe, tmp_path, LINES.append)
    assert folder.name == f"tokenizer-{hashlib.sha256(json.dumps([512, digest]).encode()).hexdigest()[:12]}"
    source = {"dataset": None, "config": None, "data_files": None, "split": "train", "key": "text", "tokens": None,
              "files": [digest]}  # fmt: skip
    tokenizer = load_tokenizer(shared / "tokenizer", TOKENS + 12)
    content = {
        "version": 1,
        "tokenizer": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        "special": [tokenizer.bos_token_id, tokenizer.eos_token_id],
        "sources": [source],
    }
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
    assert pack(tokenizer, tmp_path / "data", text_of(file)).name == key


@pytest.mark.slow
def test_a_killed_packing_leaves_nothing(processes: ForkServerContext, shared: Path, tmp_path: Path) -> None:
    training, marker = training_of(shared, tmp_path / "x"), tmp_path / "marker"
    root = tmp_path / "data"
    process = processes.Process(target=pack_until, args=(training, root, marker))
    process.start()
    process.join(60) if marker.exists() else None
    while not marker.exists() and process.is_alive():
        process.join(0.01)
    process.kill()
    process.join()
    assert [path.suffix for path in root.iterdir() if path.is_dir()] == [".partial"]
    tokenizer = load_tokenizer(shared / "tokenizer", TOKENS + 12)
    found = pack(tokenizer, root, *training.recipe.text)
    assert [path for path in root.iterdir() if path.is_dir()] == [found]
    assert tokens_of(found).tolist() == tokens_of(pack(tokenizer, tmp_path / "other", *training.recipe.text)).tolist()
