"""Write a named model with random weights as a checkpoint folder that evalkit and transformers load.

In: a `NamedModel`, a seed, and the source of its tokenizer. Out: config.json, model.safetensors, the tokenizer's
files and generation_config.json. The same seed gives bit-identical weights; another dtype gives the same weights,
rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evalkit.activity import doing, imports
from evalkit.errors import UnknownNameError, UsageError, first_line
from evalkit.models.files import copy_files, tokenizer_files
from evalkit.models.folder import new_folder
from evalkit.models.locate import DTYPES, Say, silent, tokenizer_folder
from evalkit.models.train_tokenizer import train_tokenizer
from evalkit.models.zoo import NamedModel


def write_random(
    model: NamedModel,
    output: Path,
    *,
    seed: int,
    dtype: str = "float32",
    tokenizer: str | None = None,
    texts: Sequence[Path] = (),
    say: Say = silent,
) -> None:
    """Write a checkpoint with random weights.

    Args:
        model: the model to build.
        output: the folder to write; must not exist or be empty.
        seed: of the weights.
        dtype: of the saved weights.
        tokenizer: a folder or a hub name whose tokenizer files are copied.
        texts: files or folders to train a tokenizer on instead.
        say: called with warnings.

    Raises:
        UsageError: not exactly one of `tokenizer` and `texts` is given, `output` exists and is not empty, or
            transformers cannot build the model.
        CheckpointError: the tokenizer is larger than the model's vocabulary, or `output` cannot be written.
    """
    if dtype not in DTYPES:
        raise UnknownNameError("dtype", dtype, DTYPES)
    if (tokenizer is None) == (not texts):
        raise UsageError("a checkpoint needs a tokenizer: either --tokenizer FOLDER|HUB-NAME or --train-tokenizer TEXT")
    with new_folder(output) as folder:
        with doing("training a tokenizer" if texts else "reading the tokenizer", slow=imports("transformers")):
            written = _write_tokenizer(folder, model.shape.vocabulary, tokenizer, texts, say)
        with doing(f"making the weights of {model.name}", slow=imports("torch")):
            _write_model(folder, model, written, seed, dtype)


def _write_tokenizer(folder: Path, vocabulary: int, tokenizer: str | None, texts: Sequence[Path], say: Say) -> Any:
    """Write the tokenizer files to the folder and return the loaded tokenizer."""
    from evalkit.models.tokenizer import load_tokenizer

    if tokenizer is not None:
        given = tokenizer_folder(tokenizer, say)
        copy_files(tokenizer_files(given), given, folder)
        # Read from the user's folder, because errors name it
        return load_tokenizer(given, vocabulary)
    reached = train_tokenizer(texts, vocabulary, folder)
    if reached < vocabulary:
        say(
            f"the text yields only {reached:,} tokens; the model's vocabulary stays at {vocabulary:,}, "
            f"whose last {vocabulary - reached:,} rows are unused"
        )
    return load_tokenizer(folder, vocabulary)


def _write_model(folder: Path, model: NamedModel, tokenizer: Any, seed: int, dtype: str) -> None:
    import torch

    from evalkit.models.quiet import quiet
    from evalkit.models.registration import register_models

    with quiet():
        from transformers import AutoConfig, AutoModelForCausalLM

        register_models()
        ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                config = AutoConfig.for_model(**model.config, **ids)
                built: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            except Exception as error:  # transformers raises errors of any type; the model's keys are the cause
                raise UsageError(
                    f"{model.source}: model '{model.name}' cannot be built ({first_line(error)})"
                ) from error
        built.to(getattr(torch, dtype)).save_pretrained(folder)
