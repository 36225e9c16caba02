"""Helpers of tests of loading: load or change a checkpoint folder, or expect a one-line error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from evalkit.errors import CheckpointError
from evalkit.models.loading.load import LoadedModel, load
from evalkit.models.loading.locate import locate


def load_folder(folder: Path, **options: Any) -> LoadedModel:
    located = {key: options.pop(key) for key in ("tokenizer", "allow_pickle", "trust_remote_code") if key in options}
    return load(locate(str(folder), **located), **{"device": "cpu"} | options)


def refused(folder: Path, words: str, **options: Any) -> str:
    """Return the one-line message of the `CheckpointError` that loading raises."""
    with pytest.raises(CheckpointError, match=words) as caught:
        load_folder(folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit_config(folder: Path, *without: str, **changes: object) -> None:
    path = folder / "config.json"
    content = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if key not in without}))


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of a file, or of the model.safetensors in a folder."""
    file = path / "model.safetensors" if path.is_dir() else path
    stored = load_file(file)
    change(stored)
    save_file(stored, file, metadata={"format": "pt"})
