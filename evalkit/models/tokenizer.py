"""The tokenizer of a checkpoint: the one that its files describe, with offsets, within the embedding.

In: a folder and the number of embedding rows. Out: a transformers tokenizer, or a `CheckpointError`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evalkit.errors import CheckpointError
from evalkit.models.files import tokenizer_files
from evalkit.models.locate import Say, silent
from evalkit.models.quiet import quiet

_PROBE = (
    "It's 1234 o'clock;  two spaces, CamelCase_words and 3.14%.\n\n\tÜber naïve 東京 नदी привет 🌊 e\u0301 \n"
    " He said: “we’ll DON'T”… (x+1)*y == 0"
)
"""Text on which tokenizers part ways: digits, runs of space, apostrophes, scripts, a combining accent."""


def load_tokenizer(
    folder: Path, rows: int, *, gguf: str | None = None, trust_remote_code: bool = False, say: Say = silent
) -> Any:
    """Load a tokenizer and see to it that it is the one its files describe.

    Args:
        folder: holds the tokenizer's files.
        rows: rows of the model's embedding; an id at or past it could not be looked up.
        gguf: name of the GGUF file in `folder` that the tokenizer is inside of.
        trust_remote_code: whether the tokenizer may be Python code of the checkpoint.
        say: told if tokenizer.json is taken at its word against transformers' class.

    Raises:
        CheckpointError: none there, unreadable, without offsets, or with ids past the embedding.
    """
    if gguf is None and not tokenizer_files(folder):
        raise CheckpointError(
            f"{folder}: holds no tokenizer; put its files there (tokenizer.json, tokenizer_config.json) "
            "or pass --tokenizer FOLDER|HUB-NAME"
        )
    tokenizer = _as_transformers_reads_it(folder, gguf, trust_remote_code)
    if gguf is None and (folder / "tokenizer.json").is_file():
        tokenizer = _as_written(folder, tokenizer, rows, say)
    if not tokenizer.is_fast:
        raise CheckpointError(
            f"{folder}: {type(tokenizer).__name__} gives no character offsets; save it as tokenizer.json"
        )
    highest = _highest_id(tokenizer)
    if highest >= rows:
        raise CheckpointError(
            f"{folder}: the tokenizer has ids up to {highest}, but the model embeds only {rows}; "
            "they do not belong together (see --tokenizer)"
        )
    return tokenizer


def _as_transformers_reads_it(folder: Path, gguf: str | None, trust_remote_code: bool) -> Any:
    """What `AutoTokenizer` makes of the folder; the checkpoint's own code is a last resort, if trusted."""
    with quiet():
        from transformers import AutoTokenizer

        options = {"local_files_only": True} | ({"gguf_file": gguf} if gguf else {})
        for trust in (False, True) if trust_remote_code else (False,):
            try:
                return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust, **options)
            except Exception as error:  # whatever it is, the files are the cause and all a user can mend
                failure = error
    if "trust_remote_code" in str(failure):
        raise CheckpointError(
            f"{folder}: its tokenizer is Python code of the checkpoint; pass --trust-remote-code to run it "
            "if you trust where it comes from"
        ) from failure
    lines = str(failure).strip().splitlines() or [type(failure).__name__]
    raise CheckpointError(f"{folder}: the tokenizer cannot be read ({lines[0]})") from failure


def _as_written(folder: Path, tokenizer: Any, rows: int, say: Say) -> Any:
    """The tokenizer exactly as tokenizer.json describes it, where transformers' class departs from it.

    For some model types (Qwen2 among them) transformers 5 rebuilds its own pre-tokenizer around the
    vocabulary, and adds tokens of its own. A model trained with another one would be scored on
    token sequences that it has never seen.
    """
    with quiet():
        from transformers import PreTrainedTokenizerFast

        written = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    same = tokenizer.is_fast and _ids(tokenizer, _PROBE) == _ids(written, _PROBE)
    if same and not _highest_id(written) < rows <= _highest_id(tokenizer):
        return tokenizer
    if not same:
        say(
            f"{folder.name}: tokenizer.json is used as written; "
            f"transformers' {type(tokenizer).__name__} would split text differently"
        )
    vocabulary = written.get_vocab()
    for role in ("bos_token", "eos_token"):  # old files leave these to the class
        token = getattr(tokenizer, role)
        if getattr(written, role) is None and token in vocabulary:
            setattr(written, role, token)
    return written


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _highest_id(tokenizer: Any) -> int:
    return max(tokenizer.get_vocab().values(), default=-1)
