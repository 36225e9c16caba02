"""Checkpoints small enough to build inside a test: real architectures, random weights, a real tokenizer.

In: a folder and what should be special about the checkpoint. Out: the folder, as `save_pretrained` would
have written it. The same arguments give the same weights and the same tokenizer everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Family = Literal["llama", "gpt_neox", "qwen2"]

VOCABULARY = 512
"""Rows of the embedding. The tokenizer stays below it, as in models whose embedding is padded."""
TOKENS = 500
"""Ids of the tokenizer; the gap also holds what transformers adds by itself (Qwen2's end-of-text token)."""
TRAINING_TEXT = (
    "The river rose in the night, and in the morning the bridge was gone.",
    "Question: Why does ice float on water? Answer: Ice is less dense than the water below it.",
    "She counted the coins twice: 12 in the left hand, 7 in the right, 19 in all.",
    "True or false? A whale is a fish. False; it breathes air and feeds its young with milk.",
    "Put the lid on the pot, turn down the heat and let the rice stand for ten minutes.",
    "He would rather repair the old clock than buy another, because his mother had wound it every evening.",
    "Der Fluss stieg über Nacht, und am Morgen war die Brücke fort; niemand hörte das Geräusch.",
    "L'été dernier, la rivière était si basse qu'on la traversait à pied près du vieux château.",
    "На рассвете дети вышли к реке и увидели, что моста больше нет.",
    "夜里河水上涨，清晨时桥已经不见了。",
    "朝になると橋は流されていた。",
    "في الصباح كان الجسر قد اختفى.",
    "रात में नदी चढ़ी और सुबह पुल गायब था। 🌊",
)


def tiny_tokenizer(
    folder: Path,
    *,
    bos: str | None = "<s>",
    eos: str | None = "</s>",
    adds_bos: bool = False,
    adds_eos: bool = False,
) -> Path:
    """A byte-level BPE tokenizer of at most `TOKENS` ids, written to `folder`.

    `bos` and `eos` may be equal, as in GPT-2; `adds_bos`: encoding puts the begin token in front, as Llama's does;
    `adds_eos`: it puts the end token after a text, as T5's does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = list(dict.fromkeys(token for token in (bos, eos) if token is not None))
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    before = [bos] if adds_bos and bos is not None else []
    after = [eos] if adds_eos and eos is not None else []
    if before or after:
        ids = [(token, tokenizer.token_to_id(token)) for token in (*before, *after)]
        tokenizer.post_processor = processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=ids)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 10**30}
    settings |= {"bos_token": bos} if bos is not None else {}
    settings |= {"eos_token": eos} if eos is not None else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def add_tokens(content: Any, last: str) -> None:
    """Add tokens to the content of a tokenizer.json, of which the last is the first beyond the embedding.

    The others are special, so that answers are decoded as before.
    """
    names = [*(f"<{number}>" for number in range(TOKENS, VOCABULARY)), last]
    for id, name in enumerate(names, TOKENS):
        about = {"id": id, "content": name, "special": name != last}
        content["added_tokens"].append(content["added_tokens"][0] | about)


def tiny_checkpoint(
    folder: Path,
    family: Family = "llama",
    *,
    seed: int = 0,
    dtype: str = "float32",
    window: int = 256,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    key_value_heads: int = 2,
    tied: bool = False,
    spread: float = 0.2,
    bos: str | None = "<s>",
    eos: str | None = "</s>",
    adds_bos: bool = False,
    adds_eos: bool = False,
    max_shard_size: str = "1GB",
) -> Path:
    """A checkpoint folder with random weights and a tokenizer.

    "llama" and "qwen2" have grouped-query attention, "gpt_neox" partial rotary and biases. The spread of the weights is
    large, so that predictions are far from uniform and a mistake in a mask or a position shows. `max_shard_size` may be
    small (e.g. "100KB") for a checkpoint in several shards with an index.
    """
    import torch

    tiny_tokenizer(folder, bos=bos, eos=eos, adds_bos=adds_bos, adds_eos=adds_eos)
    shape = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": window,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
        "initializer_range": spread,
        **_special_ids(folder, bos, eos),
    }
    if family != "gpt_neox":
        shape["num_key_value_heads"] = key_value_heads
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _model(family, shape)
        _disturb_vectors(model, spread)
    with _without_bars():
        model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


@contextmanager
def _without_bars() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    yield
    if shown:
        logging.enable_progress_bar()


def _special_ids(folder: Path, bos: str | None, eos: str | None) -> dict[str, int | None]:
    """The ids of the special tokens, because a configuration's defaults (1, 2, …) would name other tokens."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = {"bos_token_id": bos, "eos_token_id": eos}
    named = {key: None if token is None else tokenizer.token_to_id(token) for key, token in ids.items()}
    return {**named, "pad_token_id": None}


def _model(family: Family, shape: dict[str, Any]) -> PreTrainedModel:
    """A randomly initialised model, in evaluation mode."""
    from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, Qwen2Config

    configs: dict[str, type[PreTrainedConfig]] = {"llama": LlamaConfig, "gpt_neox": GPTNeoXConfig, "qwen2": Qwen2Config}
    model: PreTrainedModel = AutoModelForCausalLM.from_config(configs[family](**shape))
    return model.eval()


def _disturb_vectors(model: PreTrainedModel, spread: float) -> None:
    """Move biases and norm scales off 0 and 1, so that code that drops one of them fails."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * spread / 2)
