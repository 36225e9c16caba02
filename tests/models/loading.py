"""Helpers of the loading tests: load a folder, or expect a one-line error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

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
