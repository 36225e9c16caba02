"""Documents of a perplexity run, and their windows.

In: files and folders of `--text`, a tokenizer, a context window. Out: tasks of texts; requests in which each token is
scored once; and from their rows the log-probabilities by position. Without a stride these are the windows of
lm-eval's rolling log-likelihood: before the first comes the prefix; each later window repeats one token; and the last
window is as long as the others, with more context. The prefix is what the tokenizer adds before a text by itself, else
BOS, else EOS. It is never scored, whereas lm-eval scores a BOS that the tokenizer adds, after its own.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from evalkit.benchmarks.generated import TaskDocuments
from evalkit.data.sources import read
from evalkit.errors import CheckpointError, DataError, RunError, ScoringError, UsageError
from evalkit.escape import printable
from evalkit.inputs.reading import MOST_TEXT_BYTES, decoded, read_as
from evalkit.inputs.values import by_number, check_text
from evalkit.models.loading.tokenizer import added_tokens
from evalkit.requests.planner import LONG
from evalkit.requests.requests import Encoder, Score, ScoreDocument, TaskRequests
from evalkit.requests.rows import RequestKey

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

Counts = NDArray[np.int64]
FIRST_BIN = 1
"""Code of the segment of the first bin of positions; 0 is that of tokens that are not scored."""
_BYTES_PER_TOKEN = 5
"""Assumed bytes of a token; English text has 4 to 5."""
_CHECKED_CHARACTERS = 1000
"""Characters of the first document on which the model is run at the start."""
WIDTH = 64
"""Positions of a bin. Windows of usual models and their halves are multiples of it."""
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = sorted({*range(256)} - {*_PRINTABLE})
_SPELLING = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + n) for n, byte in enumerate(_OTHERS)}
"""Byte → its character in byte-level vocabularies, GPT-2's and all later ones."""
_OTHER_ENDINGS = (".json", ".parquet", ".csv", ".tsv", ".gz", ".zst", ".zip", ".xz", ".bz2", ".pdf", ".docx")
"""Of files that are no plain text, though some of them could be read as one."""
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""A token that stands for one byte, in tokenizers that fall back to bytes."""


@dataclass(frozen=True)
class TextDocument:
    task: str
    number: int
    text: str
    place: str
    """Where it is, for messages: "wiki.jsonl, line 3"."""

    @cached_property
    def content(self) -> bytes:
        """The text in UTF-8, whose bytes are counted."""
        return self.text.encode()


def read_texts(given: Sequence[Path], key: str) -> dict[str, TaskDocuments]:
    """Read the files and folders of `--text`, with the text of .jsonl files' objects under a key.

    A task is named after its file or folder, without the ending; its digest is of all documents, in order.
    """
    if not given:
        raise UsageError("name a text: --text FILE, a .txt file, a .jsonl file with a text on each line, or a folder")
    tasks: dict[str, TaskDocuments] = {}
    for path, files in _sources([path.expanduser() for path in given]):
        name = printable(path.name if path.is_dir() else path.stem)
        if name in tasks:
            raise UsageError(f"--text {path} and {tasks[name].source} would both be task {name}; rename one")
        documents = []
        for number, (text, source) in enumerate(_texts(files, name, key)):
            if not isinstance(text, str) or not text:
                raise DataError(f"--text {source}: no text (of .jsonl files: under '{key}', see --key); remove it")
            check_text(text, f"--text {source}")
            documents.append(TextDocument(name, number, text, source))
        if not documents:
            raise DataError(f"--text {path}: has no documents; give a file with one JSON object on each line")
        digest = hashlib.sha256(b"".join(hashlib.sha256(document.content).digest() for document in documents))
        tasks[name] = TaskDocuments(documents, str(path), digest.hexdigest())
    return tasks


def _sources(given: Sequence[Path]) -> Iterator[tuple[Path, list[Path]]]:
    for path in given:
        if not path.is_dir():
            if path.suffix.lower() in _OTHER_ENDINGS:
                raise UsageError(f"--text {path}: {path.suffix} files are not read; give .txt or .jsonl")
            yield path, [path]
            continue
        inside = sorted(path.iterdir(), key=lambda file: by_number(file.name))
        texts, lines = ([file for file in inside if file.suffix == ending] for ending in (".txt", ".jsonl"))
        if not texts and not lines:
            raise UsageError(f"--text {path}: the folder has no .txt or .jsonl files")
        if texts:
            yield path.resolve(), texts
        yield from ((file, [file]) for file in lines)


def _texts(files: Sequence[Path], task: str, key: str) -> Iterator[tuple[object, str]]:
    for path in files:
        if path.suffix == ".jsonl":
            for line, record in read(path, task):
                yield record.get(key) if isinstance(record, dict) else None, f"{path}, {line}"
        else:  # a byte order mark is not a part of the text
            text = read_as(path, DataError, "--text", MOST_TEXT_BYTES, decoded)
            yield text.removeprefix("\ufeff"), str(path)


def token_bytes(text: str, spans: NDArray[np.int64], pieces: Sequence[str]) -> Counts:
    """Return the bytes of each token, [tokens]; their sum is the length of the text in UTF-8.

    `spans`: [tokens, 2] first character of each token, and the end of its last. `pieces`: [tokens] as the vocabulary
    spells them.
    """
    if not len(spans) or "".join(pieces) == text.encode().decode("latin-1").translate(_SPELLING):
        return np.array([len(piece) for piece in pieces], np.int64)
    # Where each character begins in UTF-8, and the end of the last, [characters + 1]
    codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
    widths = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
    offsets = np.concatenate(([0], np.cumsum(widths))).astype(np.int64)
    starts = spans[:, 0]
    stops = np.maximum.accumulate(spans[:, 1])
    # A token that begins before the end of an earlier one shares a character with it; so does one without characters
    fresh = np.ones(len(spans), bool)
    fresh[1:] = (starts[1:] >= stops[:-1]) & (starts[1:] < spans[1:, 1])
    firsts = np.flatnonzero(fresh)
    ends = offsets[stops[np.append(firsts[1:], len(spans)) - 1]]
    ends[-1] = offsets[-1]
    begins = np.concatenate(([0], ends[:-1]))
    counts = np.diff(np.append(firsts, len(spans)))
    alone = counts == 1
    sizes = np.zeros(len(spans), np.int64)
    sizes[firsts[alone]] = (ends - begins)[alone]
    for group in np.flatnonzero(~alone):
        members = np.arange(firsts[group], firsts[group] + counts[group])
        total, gap = int(ends[group] - begins[group]), int(offsets[starts[firsts[group]]] - begins[group])
        sizes[members] = _shared([pieces[member] for member in members], total, gap)
    return sizes


def _shared(pieces: Sequence[str], total: int, gap: int) -> list[int]:
    """Share all bytes of tokens that have a character in common; only some vocabularies spell the gap before it."""
    # Byte-level vocabularies spell each byte as one character; others spell characters, or single bytes
    spelled = [1 if _BYTE.fullmatch(piece) else len(piece.replace("▁", " ").encode()) for piece in pieces]
    for sizes in ([len(piece) for piece in pieces], spelled):
        if sum(sizes) == total:
            return sizes
        if sum(sizes) == total - gap:
            return [sizes[0] + gap, *sizes[1:]]
    cuts = [total * number // len(pieces) for number in range(len(pieces) + 1)]
    return [stop - start for start, stop in pairwise(cuts)]


@dataclass(frozen=True)
class TextRequests(TaskRequests):
    """Texts of a task, whose windows are scored."""

    task: str
    documents: Sequence[TextDocument]
    tokens: int | None
    """Requested tokens of a window; None: the model's."""
    stride: int | None
    """Tokens that each window after the first scores; None: the whole window."""
    is_long: bool = False
    """Whether every document is likely to fill a window that is a batch by itself."""
    sizes: Mapping[str, int] | None = None
    in_order = True

    def costs(self) -> Iterator[tuple[RequestKey, float]]:
        for document in self.documents:
            yield RequestKey(self.task, str(document.number), 0, ""), len(document.content)

    def candidates(self) -> TextRequests:
        first = replace(self.documents[0], text=self.documents[0].text[:_CHECKED_CHARACTERS])
        # Where a document is short, its window is scored alone too
        sizes = [len(document.content) for document in self.documents]
        is_long = len(sizes) == 1 or min(sizes) >= _BYTES_PER_TOKEN * LONG
        return replace(self, documents=[first], is_long=is_long)

    def is_alone(self, window: int, longest_shared: int) -> bool:
        return self.is_long and min(window, self.tokens or window) >= longest_shared

    def scored(self, encoder: Encoder) -> Iterator[ScoreDocument]:
        window = min(encoder.facts.window, self.tokens or encoder.facts.window)
        if self.stride is not None and self.stride > window:
            raise UsageError(f"--stride {self.stride}: more than the context window of {window:,} tokens; give fewer")
        before, _ = added_tokens(encoder.tokenizer)
        prefix = before or encoder.first
        if not prefix:
            raise CheckpointError("the tokenizer has no BOS or EOS token; give another --tokenizer")
        for document in self.documents:
            yield from _windows_of(document, encoder.tokenizer, prefix, window, self.stride or window)


def _windows_of(
    document: TextDocument, tokenizer: Any, prefix: Sequence[int], window: int, stride: int
) -> Iterator[ScoreDocument]:
    """Yield the windows of a document, whose segments are bins of positions."""
    encoding = tokenizer(
        document.text,
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    ids = encoding["input_ids"]
    if not ids:
        raise ScoringError(f"{document.place}: the tokenizer makes no token of this document; remove it")
    characters = np.asarray(encoding["offset_mapping"], np.int64).reshape(-1, 2)
    sizes = token_bytes(document.text, characters, tokenizer.convert_ids_to_tokens(ids)).astype(np.int32)
    tokens = np.array([*prefix, *ids], np.int32)
    of_tokens = np.concatenate((np.zeros(len(prefix), np.int32), sizes))
    places = list(spans(len(ids), len(prefix), window, stride))
    for number, (start, context, stop) in enumerate(places):
        positions = np.arange(stop - start)
        is_scored = positions >= context
        score = Score(
            choice=0,
            texts="",
            tokens=tokens[start:stop],
            segments=np.where(is_scored, FIRST_BIN + (positions - 1) // WIDTH, 0).astype(np.int32),
            is_scored=is_scored,
            part=number,
            parts=len(places),
            bytes=of_tokens[start:stop] * is_scored,
        )
        label = f"{document.task} document {document.number}, window {number}"
        work = float(score.bytes.sum())  # type: ignore[union-attr]
        yield ScoreDocument(str(document.number), label, document.task, [score], work)


def spans(tokens: int, prefix: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first token, tokens of context, end) of the windows of a document of so many tokens, after a prefix.

    Tokens are counted from the first of the prefix.
    """
    if not tokens:
        return
    end = prefix + tokens
    done = min(window + 1, end)
    yield 0, prefix, done
    while done < end:
        stop = min(done + stride, end)
        start = stop - window - 1
        yield start, done - start, stop
        done = stop


def position_rows(rows: pa.Table) -> pd.DataFrame:
    """Return columns document, window, position, tokens, bytes and nats of a task's rows: a row for each bin.

    A token's position is the number of tokens before it in its window, with the prefix; a bin's is its first one. Of
    its tokens the nats are the sum of -ln p. Raises a `RunError` if a bin has no log-likelihood.
    """
    import pandas as pd

    table = pd.DataFrame(
        {
            "document": [int(document) for document in rows["document"].to_pylist()],
            "window": rows["part"].to_numpy(),
            "position": rows["segments"].to_pylist(),
            "tokens": rows["tokens"].to_pylist(),
            "bytes": rows["bytes"].to_pylist(),
            "nats": rows["likelihoods"].to_pylist(),
        }
    )
    table = table.explode(["position", "tokens", "bytes", "nats"], ignore_index=True)
    table = table[table["position"] >= FIRST_BIN].copy()
    table["position"] = (table["position"].astype("int64") - FIRST_BIN) * WIDTH + 1
    table["nats"] = -table["nats"].astype("float64")
    if table["nats"].isna().any():
        raise RunError("the journal lacks log-likelihoods of scored tokens; delete the folder, run again")
    return table.astype({"tokens": "int64", "bytes": "int64"}).reset_index(drop=True)
