"""Text as one array of tokens in a file: documents one after the other, each between BOS and EOS.

In: sources of text and a tokenizer. Out: a folder with `tokens.bin` (uint16, or uint32 for a vocabulary above 65,536)
and `packing.json`, which is complete or absent, and is named by its content's hash. Rows of any length are views of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from glob import glob
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from evalkit.data.wheels import file_digest
from evalkit.errors import DataError, EvalkitError, first_line
from evalkit.inputs.reading import Unreadable, parse_json
from evalkit.inputs.values import check_text, in_calls
from evalkit.paths import replace_file
from recipe.settings import Text

VERSION = 1
_DOCUMENTS = 512
"""Most documents that are tokenised at once."""
_SECONDS = 30.0
"""Between lines of progress, which is then stored."""
_PROGRESS = "progress.json"
Say = Callable[[str], None]


def packed(texts: Iterable[Text], tokenizer: Any, root: Path, say: Say) -> Path:
    """Return the folder of the packed tokens of some texts; write it if it is not there, or continue if interrupted.

    Args:
        texts: the sources, in order.
        tokenizer: a fast tokenizer with an EOS token.
        root: folder of all packed texts.
        say: called with lines of progress.

    Raises:
        EvalkitError: a text cannot be read, or has no tokens.
    """
    texts = list(texts)
    content = {
        "version": VERSION,
        "tokenizer": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        "special": [tokenizer.bos_token_id, tokenizer.eos_token_id],
        "sources": [_identity(text) for text in texts],
    }
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
    folder = root / key
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f".{key}.lock"):  # several trainings may begin at once
        if not folder.exists():
            part = root / f".{key}.partial"  # kept if it is interrupted
            part.mkdir(exist_ok=True)
            try:
                counts = _write(texts, tokenizer, part, say)
            except EvalkitError:
                if not any(text.dataset for text in texts):  # a connection may be restored, a bad file is another text
                    shutil.rmtree(part)
                raise
            (part / "packing.json").write_text(json.dumps({**content, **counts}, indent=1), encoding="utf-8")
            (part / _PROGRESS).unlink(missing_ok=True)
            part.replace(folder)
    return folder


def tokens_of(folder: Path) -> np.ndarray[Any, Any]:
    """Return the packed tokens of a folder, [n], as a read-only memory map."""
    facts = json.loads((folder / "packing.json").read_text(encoding="utf-8"))
    return np.memmap(folder / "tokens.bin", dtype=facts["dtype"], mode="r")


def documents(text: Text) -> Iterator[str]:
    """Yield the documents of a source.

    Raises:
        EvalkitError: a file cannot be read, or a document has no text, or too much for a tokenizer.
    """
    for found, where in _hub_documents(text) if text.dataset else _file_documents(text):
        check_text(found, where)
        yield found


def _file_documents(text: Text) -> Iterator[tuple[str, str]]:
    """Yield each document and its place."""
    for path in map(Path, text.files):
        try:
            if path.suffix != ".jsonl":
                yield path.read_text(encoding="utf-8"), str(path)
                continue
            with path.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    where = f"{path}:{number}"
                    try:
                        record = parse_json(line)
                    except Unreadable as error:
                        raise DataError(f"{where}: {error}") from error
                    yield _text_of(record, text.key, where), where
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from error
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def _hub_documents(text: Text) -> Iterator[tuple[str, str]]:
    """Yield each document and its place."""
    from datasets import load_dataset

    more = {"data_files": text.data_files} if text.data_files else {}
    try:
        records = load_dataset(text.dataset, text.config, split=text.split, streaming=True, **more)
        for number, record in enumerate(records):
            where = f"{text.dataset}, document {number}"
            yield _text_of(record, text.key, where), where
    except EvalkitError:
        raise
    except Exception as error:  # of any type: of the network, the format, the name
        raise DataError(f"dataset {text.dataset}: cannot be read ({first_line(error)})") from error


def _text_of(record: Any, key: str, where: str) -> str:
    if not isinstance(record, dict) or not isinstance(record.get(key), str):
        raise DataError(f"{where}: has no text under '{key}'")
    found: str = record[key]
    return found


def _identity(text: Text) -> dict[str, Any]:
    """Return what determines a source's documents: local files by their content, data sets of the hub by name."""
    # Path.glob takes no absolute patterns
    files = [*text.files, *sorted(glob(text.pattern or "", recursive=True))]  # noqa: PTH207
    return {**text.model_dump(exclude={"files"}), "files": [digest_of(Path(file)) for file in files]}


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file.

    Raises:
        DataError: it cannot be read.
    """
    try:
        return file_digest(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _write(texts: list[Text], tokenizer: Any, part: Path, say: Say) -> dict[str, Any]:
    """Write the tokens of all texts, after those that an interrupted call wrote; return their numbers and dtype."""
    dtype = np.dtype(np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32)
    counts, read = [0], 0  # tokens of each text so far, and documents of the last one
    if (part / _PROGRESS).is_file():
        counts, read = json.loads((part / _PROGRESS).read_text(encoding="utf-8"))
        say(f"packing: continues after {sum(counts):,} tokens")
    last = time.monotonic()
    with (part / "tokens.bin").open("ab") as file:
        file.truncate(sum(counts) * dtype.itemsize)
        for text in texts[len(counts) - 1 :]:
            for ids in _tokenised(text, tokenizer, read):
                if text.tokens and counts[-1] >= text.tokens:
                    break
                row = np.array(ids[: text.tokens - counts[-1]] if text.tokens else ids, dtype=dtype)
                file.write(row.tobytes())
                counts[-1], read = counts[-1] + len(row), read + 1
                if time.monotonic() - last > _SECONDS:
                    say(f"packing: {sum(counts):,} tokens")
                    file.flush()
                    os.fsync(file.fileno())
                    replace_file(part / _PROGRESS, json.dumps([counts, read]).encode())
                    last = time.monotonic()
            if not counts[-1]:
                raise DataError(f"{text.dataset or ', '.join(text.files)}: holds no document")
            counts, read = [*counts, 0], 0
    return {"dtype": dtype.name, "tokens": counts[:-1]}


def _tokenised(text: Text, tokenizer: Any, read: int) -> Iterator[list[int]]:
    """Yield each document's tokens, with BOS (where the tokenizer has one) and EOS, without the first `read` ones."""
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    for some in in_calls(islice(documents(text), read, None), str, _DOCUMENTS):
        for ids in tokenizer(some, add_special_tokens=False)["input_ids"]:
            yield [*first, *ids, tokenizer.eos_token_id]
