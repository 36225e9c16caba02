"""GGUF files: dequantised once to float32, kept as a safetensors folder, read from there ever after.

In: a `.gguf` file. Out: a folder with the same model and tokenizer. Reading a GGUF file of 135M parameters
takes about ten seconds, most of it spent on parsing its vocabulary in Python; the folder loads in under one,
to the same bits.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

from evalkit.errors import CheckpointError
from evalkit.models.files import safetensors_header, weight_files
from evalkit.models.fingerprint import file_sha256
from evalkit.models.locate import Say
from evalkit.models.quiet import quiet
from evalkit.resources import cache_dir

_GROWTH = 9
"""Float32 takes at most about this many times the room of a GGUF file (4-bit blocks with their scales)."""


def dequantised(gguf: Path, say: Say) -> Path | None:
    """The folder with this file's model and tokenizer in float32, made now if it is not yet there.

    The folder is named after the file's content and the transformers version, whose reading it is. It is
    written beside its place and renamed into it, so it is whole or absent.

    Returns:
        None if the cache cannot hold it; the file itself must be read then.

    Raises:
        CheckpointError: the file is damaged, or transformers cannot read its architecture.
    """
    folder = cache_dir() / "gguf" / f"{file_sha256(gguf)}-{version('transformers')}"
    if _whole(folder):
        return folder
    if not _has_room(folder.parent, gguf.stat().st_size * _GROWTH):
        say(f"{gguf.name}: the cache folder cannot hold its dequantised copy, so each load takes as long")
        return None
    say(f"{gguf.name}: dequantising it once; later loads will be quick")
    model, tokenizer = _read(gguf)
    try:
        with quiet(), tempfile.TemporaryDirectory(dir=folder.parent, prefix=".writing-") as temporary:
            ready = Path(temporary) / "ready"
            model.save_pretrained(ready)
            tokenizer.save_pretrained(ready)
            _put(ready, folder)
    except Exception as error:  # a full disk comes as OSError or as safetensors' own error
        say(f"{gguf.name}: its dequantised copy could not be kept ({error})")
        return None
    return folder


def reading_options(gguf: Path) -> dict[str, Any]:
    """Keyword arguments that make `from_pretrained` read a GGUF file into ordinary, unpacked weights."""
    import transformers

    options: dict[str, Any] = {"gguf_file": gguf.name}
    # Later versions leave the weights packed where they find a kernel for it; then nothing could hook them.
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return options


@contextmanager
def reading(gguf: Path) -> Iterator[None]:
    """Turn what a damaged GGUF file makes its readers raise into a `CheckpointError` that names it."""
    try:
        yield
    except Exception as error:  # the reader checks nothing: a damaged file can raise anything
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"{gguf}: damaged, or not a GGUF file that can be read ({lines[0]})") from error


def _read(gguf: Path) -> tuple[Any, Any]:
    with quiet(), reading(gguf), _parsed_once():
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), dtype=torch.float32, local_files_only=True, **reading_options(gguf)
        )
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name, local_files_only=True)
    # The weights are plain float32 by now; these two only keep transformers from saving them.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, tokenizer


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Let transformers parse a file's vocabulary, and list a layout's tensor names, once and not each time.

    It asks for the first three times and for the second once per module: half of the time that reading takes.
    """
    import gguf

    with (
        patch.object(gguf, "GGUFReader", cache(gguf.GGUFReader)),
        patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
    ):
        yield


def _whole(folder: Path) -> bool:
    """Whether a folder in the cache still has its files at full length; a damaged one is removed."""
    if not folder.is_dir():
        return False
    try:
        for path in weight_files(folder, allow_pickle=False):
            safetensors_header(path)
        if (folder / "config.json").is_file() and (folder / "tokenizer.json").is_file():
            return True
    except CheckpointError:
        pass
    shutil.rmtree(folder, ignore_errors=True)
    return False


def _has_room(folder: Path, size: int) -> bool:
    """Whether a folder can be written to (it is made if need be) and its disk has `size` bytes to spare."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return shutil.disk_usage(folder).free > size
    except OSError:
        return False


def _put(ready: Path, folder: Path) -> None:
    """Rename a finished folder into its place; if another process was sooner, its folder is as good."""
    with contextlib.suppress(OSError):
        ready.rename(folder)
    if not _whole(folder):
        raise OSError(f"{folder} could not be put in place")
