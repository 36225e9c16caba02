"""Documents of a perplexity run, their windows, and batches of windows.

In: files and folders of `--text`, a tokenizer, a context window. Out: tasks of texts; sequences in which each token is
scored once, batches of them, and the rows of their log-probabilities. Without a stride these are the windows of
lm-eval's rolling log-likelihood: before the first comes the prefix; each later window repeats one token; and the last
window is as long as the others, with more context. The prefix is what the tokenizer adds before a text by itself, else
BOS, else EOS. It is never scored, whereas lm-eval scores a BOS that the tokenizer adds, after its own.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evalkit.benchmarks.generated import TaskDocuments
from evalkit.data.sources import read
from evalkit.errors import DataError, ScoringError, UsageError
from evalkit.escape import printable
from evalkit.inputs.reading import MOST_TEXT_BYTES, decoded, read_as
from evalkit.inputs.values import by_number, check_text
from evalkit.scoring.tree import Ints

if TYPE_CHECKING:
    from evalkit.scoring.pack import TreeBatch

Counts = NDArray[np.int64]
LONG = 2048
"""Tokens from which a window is scored alone, by the model's own attention: a batch of several is not faster."""
WIDTH = 64
"""Positions of a bin. Windows of usual models and their halves are multiples of it."""
KEY = ("document", "window", "is_last")
"""Columns that identify a window. With `is_last`, the windows in the journal show whether a document is finished."""
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
class PerplexityFacts:
    """Properties of a model that planning needs."""

    window: int
    """Context window in tokens, at most the requested one: the most that the model reads at once. The last token of a
    sequence is only predicted, so a sequence has one more."""
    token_budget: int
    prefix: tuple[int, ...]
    """Tokens before a document."""


@dataclass(frozen=True)
class TextWindow:
    """A sequence of tokens, the last of which are scored."""

    document: int
    number: int
    is_last: bool
    context: int
    """Tokens at the beginning that are not scored; at least one."""
    tokens: Ints
    """[length] token ids, at most the context window and one more."""
    bytes: Ints
    """[length - context] bytes of the text that each scored token covers."""


def windows_of(
    document: TextDocument, tokenizer: Any, facts: PerplexityFacts, stride: int | None = None
) -> list[TextWindow]:
    """Return the windows of a document; each after the first scores `stride` tokens, by default the whole window."""
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
    before = len(facts.prefix)
    tokens = np.array([*facts.prefix, *ids], np.int32)
    windows: list[TextWindow] = []
    for start, context, stop in spans(len(ids), before, facts.window, stride or facts.window):
        of_tokens = sizes[start + context - before : stop - before]
        last = stop == len(tokens)
        windows.append(TextWindow(document.number, len(windows), last, context, tokens[start:stop], of_tokens))
    return windows


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


class WindowsContent(NamedTuple):
    windows: tuple[TextWindow, ...]
    batch: TreeBatch

    @property
    def is_alone(self) -> bool:
        return len(self.windows) == 1

    def warm(self) -> None:
        if not self.is_alone:
            _ = self.batch.tree


def packed(windows: Iterable[TextWindow], budget: int) -> Iterator[tuple[TextWindow, ...]]:
    """Group windows, in order, up to a token budget; those of at least `longest_shared` tokens stay alone."""
    members: list[TextWindow] = []
    tokens = 0
    for window in windows:
        size = len(window.tokens) - 1
        if size >= longest_shared(budget):
            size = budget  # a batch by itself
        if members and tokens + size > budget:
            yield tuple(members)
            members, tokens = [], 0
        members.append(window)
        tokens += size
    if members:
        yield tuple(members)


def longest_shared(budget: int) -> int:
    """Return the tokens from which a window is a batch by itself."""
    return min(LONG, budget // 2)


def content_of(task: str, windows: tuple[TextWindow, ...]) -> WindowsContent:
    from evalkit.scoring.pack import Sequences, SequenceSet, TreeBatch

    items = []
    for window in windows:
        label = f"{task} document {window.document}, window {window.number}"
        is_scored = np.arange(len(window.tokens)) >= window.context
        items.append(SequenceSet(label, task, (window.tokens,), (is_scored,)))
    batch = TreeBatch(np.empty(0, np.int32), tuple(range(len(items))), Sequences.of(items))
    return WindowsContent(windows, batch)


class PositionRow(NamedTuple):
    """Sums over the scored tokens of a window in one bin of positions.

    A token's position is the number of tokens before it in its window, with the prefix.
    """

    document: int
    window: int
    is_last: bool
    position: int
    """First position of the bin: 1, 65, 129, …"""
    tokens: int
    bytes: int
    nats: float
    """Sum of -ln p, in float64."""


def rows_of(window: TextWindow, logprobs: NDArray[np.float32]) -> list[PositionRow]:
    """Return the rows of a window from the log-probabilities of its tokens, [length]; of the context none is read."""
    bins = (np.arange(window.context, len(window.tokens)) - 1) // WIDTH
    first = int(bins[0])
    tokens, sizes = np.bincount(bins - first), np.bincount(bins - first, window.bytes)
    nats = np.bincount(bins - first, -logprobs[window.context :].astype(np.float64))
    key = window.document, window.number, window.is_last
    return [
        PositionRow(*key, (first + number) * WIDTH + 1, *sums)
        for number, sums in enumerate(zip(tokens.tolist(), map(int, sizes), nats.tolist(), strict=True))
    ]
