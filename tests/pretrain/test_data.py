"""Packed text: every document between BOS and EOS, complete or absent; and rows in an order of seed and position."""

from __future__ import annotations

import hashlib
import itertools
import json
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from recipe import packing
from recipe.packing import documents, packed, tokens_of
from recipe.rows import OrderedRows, as_rows, spread_rows, stacked
from recipe.settings import Text
from recipe.tokenizer import prepared_tokenizer
from tokenizers import Tokenizer
from torch.utils.data import BatchSampler, SequentialSampler

from evalkit.errors import DataError, EvalkitError, UsageError
from evalkit.models.loading.tokenizer import load_tokenizer
from tests.pretrain.made import pack_until, training_of
from tests.tiny import TOKENS, TRAINING_TEXT, tiny_tokenizer

LINES: list[str] = []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return load_tokenizer(folder, TOKENS)


def write(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def text_of(*files: Path, **more: Any) -> Text:
    return Text(files=tuple(map(str, files)), **more)


def pack(tokenizer: Any, root: Path, *texts: Text) -> Path:
    return packed(texts, tokenizer, root, LINES.append)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "text.jsonl", list(TRAINING_TEXT))


def test_documents_stand_between_bos_and_eos(
    tokenizer: Any, folder: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many are tokenised at once, up to a limit of tokens; ids above 65,535 need uint32."""
    plain = tmp_path / "plain.txt"
    plain.write_text("one\ntwo", encoding="utf-8")
    tokens = tokens_of(pack(tokenizer, tmp_path / "data", text_of(file, plain)))
    alone = Tokenizer.from_file(str(folder / "tokenizer.json"))
    first, last = alone.token_to_id("<s>"), alone.token_to_id("</s>")
    texts = (*TRAINING_TEXT, "one\ntwo")
    assert tokens.tolist() == [token for text in texts for token in (first, *alone.encode(text).ids, last)]
    assert tokens.dtype == np.uint16 and not tokens.flags.writeable
    monkeypatch.setattr(packing, "_DOCUMENTS", 3)
    assert tokens_of(pack(tokenizer, tmp_path / "b", text_of(file, plain))).tolist() == tokens.tolist()
    for limit in (1, 57, 10**6):
        cut = tokens_of(pack(tokenizer, tmp_path / "data", text_of(file, plain, tokens=limit), text_of(file, tokens=5)))
        assert cut.tolist() == [*tokens[:limit], *tokens[:5]]

    class Large:
        """A tokenizer with more ids than uint16 has."""

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def __len__(self) -> int:
            return 70_000

        def __call__(self, texts: list[str], **_: Any) -> Any:
            return {"input_ids": [[69_999] for _ in texts]}

    tokens = tokens_of(pack(Large(), tmp_path / "large", text_of(file)))
    assert tokens.dtype == np.uint32 and tokens[1] == 69_999


def test_the_key_changes_with_the_content(tokenizer: Any, file: Path, shared: Path, tmp_path: Path) -> None:
    """Also where it is a data set of files; names are the hashes that folders of earlier trainings have."""
    root = tmp_path / "data"
    whole = pack(tokenizer, root, text_of(file))
    other = load_tokenizer(tiny_tokenizer(tmp_path / "other", eos="<end>"), TOKENS)
    folders = {whole, pack(tokenizer, root, text_of(file, tokens=9)), pack(other, root, text_of(file)),
               pack(tokenizer, root, text_of(file), text_of(file))}  # fmt: skip
    assert len(folders) == 4
    before = (whole / "tokens.bin").stat().st_mtime_ns
    assert pack(tokenizer, root, text_of(write(tmp_path / "moved.jsonl", list(TRAINING_TEXT)))) == whole
    assert (whole / "tokens.bin").stat().st_mtime_ns == before
    file.write_bytes(file.read_bytes() + b'{"text": "more"}\n')
    assert pack(tokenizer, root, text_of(file)) != whole
    files = [
        write(tmp_path / f"set-{name}.jsonl", [f"{name} {text}" for text in TRAINING_TEXT], "body") for name in "ab"
    ]
    data_set = Text(dataset="json", data_files=f"{tmp_path}/set-*.jsonl", key="body")
    named = pack(tokenizer, root, data_set)
    assert tokens_of(named).tolist() == tokens_of(pack(tokenizer, root, text_of(*files, key="body"))).tolist()
    cut = tokens_of(pack(tokenizer, root, data_set.model_copy(update={"tokens": 30})))
    assert cut.tolist() == tokens_of(named)[:30].tolist()
    write(files[0], ["another"], "body")
    assert pack(tokenizer, root, data_set) != named
    # By their formulas
    file = shared / "text.jsonl"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    folder = prepared_tokenizer(training_of(shared, tmp_path, tokenizer=None).recipe, tmp_path, LINES.append)
    assert folder.name == f"tokenizer-{hashlib.sha256(json.dumps([512, digest]).encode()).hexdigest()[:12]}"
    tokenizer = load_tokenizer(shared / "tokenizer", TOKENS + 12)
    source = {"dataset": None, "config": None, "data_files": None, "split": "train", "key": "text", "tokens": None,
              "files": [digest]}  # fmt: skip
    content = {
        "version": 1,
        "tokenizer": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        "special": [tokenizer.bos_token_id, tokenizer.eos_token_id],
        "sources": [source],
    }
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
    assert pack(tokenizer, root, text_of(file)).name == key


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b'{"text": "a"}\n{"text": "b"\n', ":2"),
        (b'{"text": "a"}\n{"body": "b"}\n', ":2"),
        (b'{"text": 3}\n', ":1"),
        (b'{"text": "\\ud800"}\n', ":1"),
        (b'{"text": "\xff"}\n', ":1"),
        (b"", ""),
    ],
)
def test_bad_text(tokenizer: Any, tmp_path: Path, content: bytes, line: str) -> None:
    file = tmp_path / "text.jsonl"
    file.write_bytes(content)
    with pytest.raises(DataError, match=f"^{file}{line}: "):
        pack(tokenizer, tmp_path / "data", text_of(file))
    assert not [path for path in (tmp_path / "data").iterdir() if path.is_dir()]


def test_files_that_cannot_be_read(tokenizer: Any, shared: Path, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "long.txt").write_text("a" * (2**23 + 1))
    for text in (*(text_of(tmp_path / name) for name in ("none.jsonl", "latin.txt", "long.txt")),
                 Text(dataset="json", data_files=str(tmp_path / "none.json"))):  # fmt: skip
        with pytest.raises(EvalkitError, match=Path(text.files[0]).name if text.files else "dataset json"):
            list(documents(text))
    # Lines that have both keys: a tokenizer would be trained on the other texts
    file = tmp_path / "text.jsonl"
    file.write_text(json.dumps({"text": "one", "body": "two"}))
    texts = [{"files": [str(shared / "text.jsonl")]}, {"files": [str(file)], "key": "body"}]
    with pytest.raises(UsageError, match="'text', not 'body'; give 'tokenizer'"):
        prepared_tokenizer(training_of(shared, tmp_path, text=texts, tokenizer=None).recipe, tmp_path, LINES.append)


@pytest.mark.slow
def test_a_killed_packing_continues(processes: ForkServerContext, shared: Path, tmp_path: Path) -> None:
    training, marker, root = training_of(shared, tmp_path / "x"), tmp_path / "marker", tmp_path / "data"
    process = processes.Process(target=pack_until, args=(training, root, marker))
    process.start()
    while not marker.exists() and process.is_alive():
        process.join(0.01)
    process.kill()
    process.join()
    assert [path.suffix for path in root.iterdir() if path.is_dir()] == [".partial"]
    tokenizer = load_tokenizer(shared / "tokenizer", TOKENS + 12)
    whole = pack(tokenizer, root, *training.recipe.text)
    assert LINES[-1].startswith("packing: continues after ")
    assert [path for path in root.iterdir() if path.is_dir()] == [whole]
    assert tokens_of(whole).tolist() == tokens_of(pack(tokenizer, tmp_path / "other", *training.recipe.text)).tolist()


# Rows

NUMBERS = np.arange(1000, dtype=np.uint16)


def ordered(count: int = 70, seed: int = 5) -> OrderedRows:
    """Rows of 40 tokens, of which there are 25."""
    return OrderedRows(as_rows(NUMBERS, 40, "text"), count, seed)


def first_tokens(rows: OrderedRows) -> list[int]:
    return [int(rows[position]["input_ids"][0]) for position in range(len(rows))]


def test_each_epoch_is_a_permutation_of_seed_and_position_alone() -> None:
    item, tokens = ordered()[0], first_tokens(ordered(count=75))
    assert item["input_ids"].dtype == item["labels"].dtype == torch.int64
    start = int(item["labels"][0])
    assert item["input_ids"].tolist() == item["labels"].tolist() == list(range(start, start + 40))
    assert stacked([item, item])["labels"].shape == (2, 40)
    epochs = [tokens[start : start + 25] for start in (0, 25, 50)]
    assert all(sorted(epoch) == list(range(0, 1000, 40)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    expected = first_tokens(ordered())
    assert first_tokens(ordered()) == expected != first_tokens(ordered(seed=6))
    assert first_tokens(ordered(count=30)) == expected[:30]
    assert [int(ordered()[position]["input_ids"][0]) for position in range(69, -1, -1)] == expected[::-1]
    # By numpy 2.4's PCG64. Another order would not resume, or repeat, earlier trainings
    assert [ordered(seed=1).index(position) for position in range(5)] == [1, 20, 7, 21, 17]
    assert [ordered(seed=1).index(position) for position in range(25, 30)] == [21, 4, 15, 6, 7]


def test_an_update_has_the_same_rows_for_all_processes_and_micro_batches() -> None:
    """By the samplers that Trainer and accelerate use."""
    rows, batch = ordered(count=24), 8
    for processes, micro in itertools.product((1, 2, 4), (1, 2)):
        batches = BatchSampler(SequentialSampler(rows), micro, drop_last=False)
        shards = [list(BatchSamplerShard(batches, processes, process)) for process in range(processes)]
        each = batch // micro // processes
        for update in range(3):
            read = [row for shard in shards for part in shard[update * each : (update + 1) * each] for row in part]
            assert sorted(read) == list(range(update * batch, (update + 1) * batch))


@pytest.mark.parametrize(("most", "expected"), [(1, [0]), (3, [0, 12, 24]), (25, range(25)), (99, range(25))])
def test_spread_rows(most: int, expected: list[int]) -> None:
    rows = spread_rows(as_rows(NUMBERS, 40, "held_out"), most)
    assert [int(item["input_ids"][0]) // 40 for item in rows] == list(expected)
