"""Train a BPE tokenizer like Llama 2's and Mixtral's on a user's text.

In: files or folders of text, and the number of tokens. Out: tokenizer.json and tokenizer_config.json. Words begin with
▁, digits are split, and characters outside the vocabulary are encoded as bytes, so that no text is lost. As in these
tokenizers, ids 0, 1 and 2 are <unk>, <s> and </s>, 256 bytes follow, and <s> precedes every text.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from evalkit.errors import DataError, UsageError, reading_as
from evalkit.inputs.reading import parse_json

_SPACE = "▁"
_SPECIAL = ("<unk>", "<s>", "</s>")
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
FEWEST = len(_SPECIAL) + len(_BYTES)
_WORDS = rf"{_SPACE}+(?={_SPACE})|{_SPACE}?[\p{{L}}\p{{M}}]+|\p{{N}}|\n+|{_SPACE}?[^{_SPACE}\p{{L}}\p{{M}}\p{{N}}\n]+"
"""Repeated spaces; letters with a leading space; single digits; line ends; other characters."""
_RUN = re.compile(r"\S+|\s+")
_LONGEST = 1000
"""Longest word, or space between words, in training, in characters: the trainer's time is quadratic in the length of a
word."""
_ALPHABET_SHARE = 4
"""At most one in this many tokens is a single character; rarer characters are encoded as bytes."""


def train_tokenizer(texts: Sequence[Path], size: int, folder: Path) -> int:
    """Train a tokenizer on texts, write its files, and return its size: `size`, or less if there is too little text.

    Of a folder all files are used, of a `.jsonl` file the "text" of each line.
    """
    from tokenizers import Tokenizer, models, trainers

    files = _files(texts)
    # The trainer's choice among equally frequent characters is not deterministic
    alphabet = _alphabet(_lines(files), (size - FEWEST) // _ALPHABET_SHARE)
    if not alphabet:
        raise UsageError(f"--train-tokenizer {', '.join(str(text) for text in texts)}: there is no text to train on")
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=[*_SPECIAL, *_BYTES],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    learner = _with_pipeline(Tokenizer(models.BPE()))
    learner.train_from_iterator((piece for line in _lines(files) for piece in _without_long_words(line)), trainer)
    learned = json.loads(learner.to_str())["model"]
    tokenizer = _with_byte_fallback(learned["vocab"], learned["merges"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**30,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return int(tokenizer.get_vocab_size())


def _with_byte_fallback(vocabulary: dict[str, int], merges: Iterable[Sequence[str]]) -> Any:
    from tokenizers import AddedToken, Tokenizer, models, processors

    # A text with many "<0x0A>" would train merges to this string, which is the token of the byte
    kept = [(left, right) for left, right in merges if not {left, right, left + right} & set(_BYTES)]
    model = models.BPE(vocabulary, kept, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = _with_pipeline(Tokenizer(model))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def _with_pipeline(tokenizer: Any) -> Any:
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def _alphabet(lines: Iterable[str], most: int) -> list[str]:
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(line)
    frequent = sorted(set(counts) - {" ", _SPACE}, key=lambda character: (-counts[character], character))
    return sorted([_SPACE, *frequent[: max(0, most - 1)]]) if frequent else []


def _files(texts: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for text in texts:
        inside = sorted(path for path in text.rglob("*") if path.is_file() and not path.name.startswith("."))
        files += inside if text.is_dir() else [text]
    return files


def _lines(files: Iterable[Path]) -> Iterator[str]:
    for path in files:
        with reading_as(path, "a text in UTF-8", DataError), path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                yield _text_of(path, number, line) if path.suffix == ".jsonl" else line


def _without_long_words(line: str) -> Iterator[str]:
    """Split a line within overlong words, such as base64 or a repeated character."""
    start = 0
    # Runs are matched completely and then split: a pattern with a length limit would be retried at every character
    for run in _RUN.finditer(line):
        for end in range(run.start() + _LONGEST, run.end() + 1, _LONGEST):
            yield line[start:end]
            start = end
    if start < len(line):
        yield line[start:]


def _text_of(path: Path, number: int, line: str) -> str:
    with reading_as(f"{path} line {number}", "an object with a string under 'text'", DataError):
        text: str = parse_json(line.encode())["text"]
        if not isinstance(text, str):
            raise TypeError(f"'text' is {text!r:.60}")
    return text
