"""Load and validate the tokenizer of a checkpoint.

In: a folder and the number of embedding rows. Out: a transformers tokenizer with character offsets, as its files
describe it, which adds tokens before a text only, and whose ids fit the embedding, but for added tokens; or a
`CheckpointError`. A text with an added token for which the embedding has no row is an error when it is scored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evalkit.compatibility.transformers import original_encoding, quiet, replace_encoding
from evalkit.display import Say
from evalkit.errors import CheckpointError, ScoringError, first_line, reading_as
from evalkit.escape import printable
from evalkit.models.loading.checks import register_type
from evalkit.models.loading.files import check_code, read_json, tokenizer_files
from evalkit.models.loading.locate import silent

_PROBE = (
    "It's 1234 o'clock;  two spaces, CamelCase_words and 3.14%.\n\n\tÜber naïve 東京 नदी привет 🌊 e\u0301 \n"
    " He said: “we’ll DON'T”… (x+1)*y == 0"
)
"""Text that tokenizers split differently: digits, repeated spaces, apostrophes, scripts, a combining accent."""
_REPEATS = 10
REMARKS = "remarks"
"""Attribute of a loaded tokenizer with remarks on what was changed; a tokenizer without changes lacks it."""
_STEPS = re.compile(r'"(normalizer|pre_tokenizer|decoder)"\s*:\s*(?=\{)')
_NESTED = ("normalizers", "pretokenizers", "decoders")
_LONGEST = 256
"""Most characters of a text in a step, and of what all steps make of such a text, or of a character."""
_MOST_STARTS = 1000
_SAMPLING = ("dropout", "alpha", "nbest_size")
"""Settings of BPE and Unigram models with which they split a word at random, a regularisation for training."""


def load_tokenizer(folder: Path, rows: int, *, trust_remote_code: bool = False, say: Say = silent) -> Any:
    """Load the tokenizer in a folder, for an embedding with `rows`, and check that it is the one its files describe.

    Tokens that it adds after each text, such as EOS, are left out (`REMARKS`): a choice, an answer or the next window
    follows a text, and as text to predict they would count in scores that are compared between tokenizers.

    Raises `CheckpointError` if it is missing or unreadable, has no offsets, has ids past the embedding beside added
    tokens, loses text, makes texts far longer, or encodes a text differently each time. So does each later encoding
    that fails in Rust.
    """
    if not tokenizer_files(folder):
        raise CheckpointError(
            f"{folder}: holds no tokenizer; copy its tokenizer.json there, or pass --tokenizer FOLDER|HUB-NAME"
        )
    with reading_as(folder, "a tokenizer", CheckpointError), quiet(), _panics_as_errors(folder):
        for path in folder.glob("tokenizer*.json"):
            _check_lengths(path)
        tokenizer = _auto_tokenizer(folder, trust_remote_code)
        disable_sampling(tokenizer)
        if len({tuple(probe_ids(tokenizer)) for _ in range(_REPEATS)}) > 1:
            raise CheckpointError(f"{folder}: the tokenizer encodes the same text differently each time")
        if (folder / "tokenizer.json").is_file():
            tokenizer = _from_tokenizer_json(folder, tokenizer, rows, say)
        _check(folder, tokenizer, rows)
        _leave_out_ending(folder, tokenizer, say)
    replace_encoding(tokenizer, _encoded)
    return tokenizer


def _check_lengths(path: Path) -> None:
    """Raise a `CheckpointError` if steps of a tokenizer.json make a text far longer, from which Rust would not return.

    Tried are what the steps replace, and its characters, on the steps of normalizer, pre-tokenizer and decoder.
    """
    content = path.read_text(encoding="utf-8")
    for match in _STEPS.finditer(content):
        described, _ = json.JSONDecoder().raw_decode(content, match.end())
        steps = list(_steps_of(described))
        normalizers = [normalizer for step in steps if (normalizer := _normalizer_of(step)) is not None]
        replacements = [step for step in steps if step.get("type") == "Replace"]
        old = [text for step in replacements for text in step["pattern"].values()]
        new = [step["content"] for step in replacements]
        starts = islice(dict.fromkeys((*old, *"".join(old + new), *_PROBE)), _MOST_STARTS)

        def grown(text: str, normalizers: Sequence[Any] = normalizers) -> str:
            for normalizer in normalizers:
                if len(text) <= _LONGEST:
                    text = normalizer.normalize_str(text)
            return text

        if any(len(text) > _LONGEST for text in chain(old, new, map(grown, starts))):
            raise CheckpointError(
                f"{path}: its {match[1]} makes more than {_LONGEST} characters of a few; correct its steps"
            )


def _steps_of(described: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a part of a tokenizer.json, which may be nested."""
    nested = [described[key] for key in _NESTED if key in described]
    if not nested:
        yield described
    for part in chain.from_iterable(nested):
        yield from _steps_of(part)


def _normalizer_of(step: Mapping[str, Any]) -> Any:
    """Return a step as a normalizer; None for one that is not among normalizers, and makes no text longer."""
    from tokenizers import Tokenizer

    model = {"type": "BPE", "vocab": {}, "merges": []}
    try:
        return Tokenizer.from_str(json.dumps({"added_tokens": [], "normalizer": step, "model": model})).normalizer
    except Exception:  # tokenizers has no class of its own for it
        return None


def _auto_tokenizer(folder: Path, trust_remote_code: bool) -> Any:
    """Load with `AutoTokenizer`; the checkpoint's own code is used only as a fallback and if trusted."""
    from transformers import AutoTokenizer

    if (config := folder / "config.json").is_file():
        register_type(read_json(config))
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        if not trust_remote_code:
            if "trust_remote_code" not in str(error):
                raise
            raise CheckpointError(
                f"{folder}: its tokenizer is Python code of the checkpoint; to trust it, pass --trust-remote-code"
            ) from error
        path = folder / "tokenizer_config.json"
        check_code(path, read_json(path).get("auto_map") if path.is_file() else None)
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=True)


def _from_tokenizer_json(folder: Path, tokenizer: Any, rows: int, say: Say) -> Any:
    """Return the tokenizer of tokenizer.json if transformers' class differs from it, else `tokenizer`.

    For some model types (Qwen2 among them) transformers 5 builds its own pre-tokenizer around the vocabulary and adds
    tokens. A model trained with the tokenizer of the file would be scored on token sequences that it has never seen.
    """
    from transformers import PreTrainedTokenizerFast

    written = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    if sampling := disable_sampling(written):
        say(f"tokenizer.json: {sampling}, with which words are split at random in training, is switched off")
    is_same = tokenizer.is_fast and probe_ids(tokenizer) == probe_ids(written)
    if is_same and not _highest_id(written) < rows <= _highest_id(tokenizer):
        return tokenizer
    if not is_same:
        say(f"tokenizer.json is used as written; transformers' {type(tokenizer).__name__} would split text differently")
    vocabulary = written.get_vocab()
    for role in ("bos_token", "eos_token"):  # in old files, the class defines these
        token = getattr(tokenizer, role)
        if getattr(written, role) is None and token in vocabulary:
            setattr(written, role, token)
    return written


def _check(folder: Path, tokenizer: Any, rows: int) -> None:
    if not tokenizer.is_fast:
        raise CheckpointError(
            f"{folder}: {type(tokenizer).__name__} has no character offsets; save it as tokenizer.json"
        )
    added = tokens_without_rows(tokenizer, rows).values()
    highest = max((id for token, id in tokenizer.get_vocab().items() if token not in added), default=-1)
    if highest >= rows:
        raise CheckpointError(
            f"{folder}: the tokenizer has ids up to {highest}, but the model's embedding has {rows} rows; "
            "the tokenizer belongs to another model (see --tokenizer)"
        )
    if not set(probe_ids(tokenizer)).difference({tokenizer.unk_token_id}):
        raise CheckpointError(
            f"{folder}: the tokenizer turns any text into nothing or unknown tokens; its files are damaged"
        )


def added_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the token ids that a tokenizer adds before each text, and those that it adds after it."""
    ids: list[int] = tokenizer(_PROBE)["input_ids"]
    of_text = probe_ids(tokenizer)
    starts = range(len(ids) - len(of_text) + 1)
    start = next((start for start in starts if ids[start : start + len(of_text)] == of_text), 0)
    return ids[:start], ids[start + len(of_text) :]


def first_token(tokenizer: Any) -> tuple[int, ...]:
    """Return the token from which a text without context is predicted, as in lm-eval: BOS, or else EOS.

    It is empty if there is neither.
    """
    known = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    return tuple(int(token) for token in known if token is not None)[:1]


def fed_text(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Return the text of a part of a sequence, with its special tokens and the space before its first word.

    Decoding strips such a space from the first token of a sequence, so another token is decoded before the part.
    """
    letter: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    before, both = (tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in (letter, [*letter, *tokens]))
    return str(both.removeprefix(before))


def _leave_out_ending(folder: Path, tokenizer: Any, say: Say) -> None:
    before, after = added_tokens(tokenizer)
    if not after:
        return
    from tokenizers import processors

    backend = tokenizer.backend_tokenizer
    state = json.loads(backend.post_processor.__getstate__())
    # RoBERTa's trims offsets as the byte-level one does
    trimming = [part for part in state.get("processors", [state]) if "trim_offsets" in part]
    kept = [processors.ByteLevel(part["add_prefix_space"], part["trim_offsets"]) for part in trimming]
    names = tokenizer.convert_ids_to_tokens(before)
    adding = processors.TemplateProcessing(single=[*names, "$A"], special_tokens=list(zip(names, before, strict=True)))
    backend.post_processor = processors.Sequence([*kept, adding])
    ending = " ".join(tokenizer.convert_ids_to_tokens(after))
    if added_tokens(tokenizer) != (before, []):
        raise CheckpointError(
            f"{folder}: its tokenizer ends each text with {ending}, which cannot be left out; change its post_processor"
        )
    remark = (
        f"the tokenizer adds {printable(ending)} after each text; it is left out, except where a template has it, "
        "since answers follow a text"
    )
    setattr(tokenizer, REMARKS, (remark,))
    say(remark)


def tokens_without_rows(tokenizer: Any, rows: int) -> dict[int, str]:
    """Return id → added token of a tokenizer for which an embedding with `rows` has no row."""
    return {id: token for token, id in tokenizer.get_added_vocab().items() if id >= rows}


def refuse_tokens_without_rows(model: Any, label: str, tokens: NDArray[Any]) -> None:
    """Raise a `ScoringError` if the token ids of a document, `label`, have one for which a loaded model has no row."""
    names: dict[int, str] = getattr(model, "tokens_without_rows", {})
    if names and len(places := np.flatnonzero(np.isin(tokens, [*names]))):
        id = int(tokens[places[0]])
        raise ScoringError(
            f"{label}: its text has the token {names[id]!r} (id {id}), which the tokenizer adds, but for which the "
            "model's embedding has no row; leave it out of the text, or resize the embedding"
        )


def disable_sampling(tokenizer: Any) -> str:
    """Make a tokenizer split a word in the same way each time; return the names of the settings that were on."""
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    settings = [name for name in _SAMPLING if getattr(model, name, None)]
    for name in settings:
        setattr(model, name, None)
    return " and ".join(settings)


def probe_ids(tokenizer: Any) -> list[int]:
    ids: list[int] = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
    return ids


def _highest_id(tokenizer: Any) -> int:
    return max(tokenizer.get_vocab().values(), default=-1)


def _encoded(tokenizer: Any, *arguments: Any, **options: Any) -> Any:
    with _panics_as_errors(tokenizer.name_or_path):
        return original_encoding(tokenizer)(*arguments, **options)


@contextmanager
def _panics_as_errors(name: object) -> Iterator[None]:
    """Raise a `CheckpointError` where code in Rust panics, e.g. on a regular expression that takes too many steps.

    A panic derives from `BaseException`, so that no handler of errors would see it.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(
            f"{name}: its tokenizer fails on a text ({first_line(error)}); see the patterns in its tokenizer.json"
        ) from error
