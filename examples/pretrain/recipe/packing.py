"""Text as one array of tokens in a file: documents one after the other, each between BOS and EOS.

In: sources of text and a tokenizer. Out: a folder with `tokens.bin` (uint16, or uint32 for a vocabulary above 65,536)
and `packing.json`, which is complete or absent, and is named by its content's hash. Rows of any length are views of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from evalkit.errors import DataError
from evalkit.models.folder import new_folder
from recipe.settings import Text

VERSION = 1
_DOCUMENTS = 512
"""Documents that are tokenised at once."""


def packed(texts: Iterable[Text], tokenizer: Any, root: Path) -> Path:
    """Return the folder of the packed tokens of some texts; write it if it is not there.

    Args:
        texts: the sources, in order.
        tokenizer: a fast tokenizer with an EOS token.
        root: folder of all packed texts.

    Raises:
        DataError: a text cannot be read, or has no tokens.
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
            with new_folder(folder) as part:
                counts = _write(texts, tokenizer, part / "tokens.bin")
                (part / "packing.json").write_text(json.dumps({**content, **counts}, indent=1), encoding="utf-8")
    return folder


def tokens_of(folder: Path) -> np.ndarray[Any, Any]:
    """Return the packed tokens of a folder as a read-only memory map."""
    facts = json.loads((folder / "packing.json").read_text(encoding="utf-8"))
    return np.memmap(folder / "tokens.bin", dtype=facts["dtype"], mode="r")


def documents(text: Text) -> Iterator[str]:
    """Yield the documents of a source.

    Raises:
        DataError: a file cannot be read, or a line has no text.
    """
    if text.dataset:
        from datasets import load_dataset

        more = {"data_files": text.data_files} if text.data_files else {}
        records = load_dataset(text.dataset, text.config, split=text.split, streaming=True, **more)
        for number, record in enumerate(records):
            yield _text_of(record, text.key, f"{text.dataset}, document {number}")
        return
    for file in text.files:
        path = Path(file)
        try:
            if path.suffix == ".jsonl":
                with path.open(encoding="utf-8") as lines:
                    for number, line in enumerate(lines, 1):
                        yield _text_of(json.loads(line), text.key, f"{path}:{number}")
            else:
                yield path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be read as text in UTF-8 ({error})") from error


def _text_of(record: Any, key: str, where: str) -> str:
    if not isinstance(record, dict) or not isinstance(record.get(key), str):
        raise DataError(f"{where}: has no text under '{key}'")
    found: str = record[key]
    return found


def _identity(text: Text) -> dict[str, Any]:
    """Return what determines a source's documents: files by their content, data sets by name."""
    facts = text.model_dump(exclude={"files"})
    try:
        return {**facts, "files": [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in text.files]}
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from error


def _write(texts: list[Text], tokenizer: Any, path: Path) -> dict[str, Any]:
    """Write the tokens of all texts; return how many there are, and their type."""
    dtype = "uint16" if len(tokenizer) <= 1 << 16 else "uint32"
    counts = []
    with path.open("wb") as file:
        for text in texts:
            count = 0
            for ids in _tokenised(text, tokenizer):
                row = np.array(ids[: text.tokens - count] if text.tokens else ids, dtype=dtype)
                row.tofile(file)
                count += len(row)
                if text.tokens and count >= text.tokens:
                    break
            counts.append(count)
    if not sum(counts):
        raise DataError(f"{', '.join(map(str, texts))}: there is no text")
    return {"dtype": dtype, "tokens": counts}


def _tokenised(text: Text, tokenizer: Any) -> Iterator[list[int]]:
    """Yield each document's tokens, with BOS (where the tokenizer has one) and EOS."""
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    rest = documents(text)
    while some := list(islice(rest, _DOCUMENTS)):
        for ids in tokenizer(some, add_special_tokens=False)["input_ids"]:
            yield [*first, *ids, tokenizer.eos_token_id]
