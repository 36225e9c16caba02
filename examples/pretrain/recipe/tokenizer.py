"""The tokenizer of a training: one that is named, or one that is trained on the training's text.

In: a recipe. Out: a folder with its files, and the tokenizer as evalkit loads it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from filelock import FileLock

from evalkit.errors import UsageError
from evalkit.models.loading.locate import tokenizer_folder
from evalkit.models.loading.tokenizer import load_tokenizer
from evalkit.models.zoo.named import named_model, new_folder
from evalkit.models.zoo.train_tokenizer import train_tokenizer
from recipe.packing import Say, digest_of
from recipe.settings import Recipe

_KEY = "text"
"""Key of the texts that `train_tokenizer` reads."""


def prepared_tokenizer(recipe: Recipe, data: Path, say: Say) -> Path:
    """Return the folder of a recipe's tokenizer; train it in `data` if the recipe names none.

    Raises:
        EvalkitError: the tokenizer is not found, or there is no text to train it on, or none under "text".
    """
    if recipe.tokenizer:
        return tokenizer_folder(recipe.tokenizer, say)
    files = [Path(file) for text in recipe.text for file in text.files]
    if not files:
        raise UsageError("a tokenizer is trained on files only; give 'tokenizer' in the settings")
    for text in recipe.text:
        if text.key != _KEY and any(Path(file).suffix == ".jsonl" for file in text.files):
            raise UsageError(
                f"a tokenizer is trained on texts under '{_KEY}', not '{text.key}'; give 'tokenizer' in the settings"
            )
    size = named_model(recipe.model).shape.vocabulary
    content = json.dumps([size, *map(digest_of, files)])
    folder = data / f"tokenizer-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
    data.mkdir(parents=True, exist_ok=True)
    with FileLock(data / f".{folder.name}.lock"):  # several trainings may begin at once
        if not folder.exists():
            say(f"training a tokenizer of {size:,} tokens")
            with new_folder(folder) as part:
                train_tokenizer(files, size, part)
    return folder


def read_tokenizer(folder: Path, recipe: Recipe) -> Any:
    """Load a tokenizer that can separate documents.

    Raises:
        EvalkitError: it cannot be read, is larger than the model's vocabulary, or has no EOS token.
    """
    tokenizer = load_tokenizer(folder, named_model(recipe.model).shape.vocabulary)
    if tokenizer.eos_token_id is None:
        raise UsageError(f"{folder}: the tokenizer has no EOS token, which separates documents")
    return tokenizer
