"""Samples equal those of the generators in RULER's wheel."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from evalkit.longcontext.ruler.data import TASKS, RulerData
from evalkit.longcontext.ruler.samples import samples
from evalkit.models.loading.locate import silent
from tests.longcontext.ruler.wheels import environment, generated


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("wheel")
    return folder, environment(folder)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two tokenizers of the essays: of 8,000 tokens in the manner of GPT-2, of 3,000 in that of Llama, with BOS."""
    folder = tmp_path_factory.mktemp("tokenizers")
    essays = RulerData(silent).essays
    texts = [" ".join(essays[start : start + 1000]) for start in range(0, len(essays), 5000)]
    gpt, llama = Tokenizer(models.BPE()), Tokenizer(models.BPE(unk_token="<unk>"))
    gpt.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    gpt.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=8000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    )
    llama.pre_tokenizer = pre_tokenizers.Metaspace()
    llama.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=3000, special_tokens=["<unk>", "<s>"]))
    llama.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    for name, tokenizer in (("gpt", gpt), ("llama", llama)):
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / name)
    return {"gpt": folder / "gpt", "llama": folder / "llama"}


def same(wheel: Any, folder: Path, task: str, length: int, template: str, count: int) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def size(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    data = RulerData(silent)
    made = samples(data, data.tasks(template)[task], length, 42, size)
    expected = generated(*wheel, folder, task, length, template, count)
    assert len(expected) == count
    for sample, theirs in zip(islice(made, count), expected, strict=True):
        assert sample.text == theirs["input"]
        assert list(sample.references) == theirs["outputs"] and sample.length == theirs["length"]


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["gpt", "llama"])
@pytest.mark.parametrize("task", TASKS)
def test_samples_are_those_of_the_wheel(task: str, tokenizer: str, wheel: Any, tokenizers: dict[str, Path]) -> None:
    # Ten documents of HotpotQA may have more than 4,096 tokens, for which the generators search without end
    length = 4096 if tokenizer == "gpt" and task != "qa_2" else 6000
    same(wheel, tokenizers[tokenizer], task, length, "base", 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "length", "template"),
    [("vt", 4096, "meta-chat"), ("niah_multiquery", 4096, "meta-chat"), ("cwe", 2048, "base"), ("fwe", 2048, "base"),
     ("niah_multikey_3", 2048, "base"), ("qa_1", 4096, "meta-chat")],
)  # fmt: skip
def test_other_templates_and_short_lengths(
    task: str, length: int, template: str, wheel: Any, tokenizers: dict[str, Path]
) -> None:
    same(wheel, tokenizers["gpt"], task, length, template, 8)
