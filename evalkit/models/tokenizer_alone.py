"""The tokenizer of a checkpoint, loaded without its weights, and its context window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from evalkit.display import Say
from evalkit.errors import CheckpointError
from evalkit.models.context import configured_window
from evalkit.models.context_settings import config_of
from evalkit.models.locate import Checkpoint
from evalkit.models.spec import ModelSpec
from evalkit.models.tokenizer import load_tokenizer

_ASSUMED_WINDOW = 2048


def tokenizer_alone(checkpoint: Checkpoint, say: Say) -> Any:
    """Load the tokenizer of a checkpoint; of a GGUF file, that of its dequantised copy.

    Raises:
        CheckpointError: it has none, or it does not match the model's config.
    """
    if checkpoint.gguf is not None and checkpoint.tokenizer is None:
        from evalkit.models.gguf import dequantised

        folder = dequantised(checkpoint.gguf, say)
        if folder is None:
            raise CheckpointError(f"{checkpoint.given}: the cache folder has no room for its dequantised copy")
        checkpoint = replace(checkpoint, folder=folder, gguf=None)
    config = config_of(checkpoint, say)
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    rows = int((text or {}).get("vocab_size") or 1 << 31)
    folder = checkpoint.tokenizer or checkpoint.folder
    return load_tokenizer(folder, rows, trust_remote_code=checkpoint.trust_remote_code, say=say)


def window_of(model: ModelSpec, checkpoint: Checkpoint, tokenizer: Any, say: Say) -> int:
    """Return the context window that a model would be loaded with, in tokens."""
    if (extension := model.extension(checkpoint)) is not None:
        return extension.target
    _, window = configured_window(config_of(checkpoint, say))
    longest = int(tokenizer.model_max_length)
    return window or (longest if 0 < longest < 1 << 30 else _ASSUMED_WINDOW)
