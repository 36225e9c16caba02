"""GGUF files: dequantised once to float32, kept as a safetensors folder, read from there ever after.

In: a `.gguf` file. Out: a folder with the same model and tokenizer. Reading a GGUF file of 135M parameters
takes about ten seconds, most of it spent on parsing its vocabulary in Python; the folder loads in under one,
to the same bits.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

from evalkit.errors import CheckpointError, first_line
from evalkit.models.files import read_json
from evalkit.models.fingerprint import Fingerprint, combine, fingerprint
from evalkit.models.hashes import file_sha256, hash_file
from evalkit.models.locate import Checkpoint, Say
from evalkit.models.quiet import quiet
from evalkit.models.snapshot import Opened, snapshot
from evalkit.models.temporary import temporary_folder
from evalkit.resources import cache_dir

_RECORD = "fingerprint"
"""Beside what `save_pretrained` writes; of no kind that is counted."""
_ABANDONED = 24 * 3600
"""Seconds after which what stands beside the finished folders was left by a process that was killed."""
_GROWTH = 9
"""Float32 takes at most about this many times the room of a GGUF file (4-bit blocks with their scales)."""


def dequantised(gguf: Path, say: Say) -> Path | None:
    """The folder with this file's model and tokenizer in float32, made now if it is not yet there.

    The folder is named after the file's content and the transformers version, whose reading it is, and holds the
    fingerprint that it was written with. It is written beside its place and renamed into it, so it is whole or absent.

    Returns:
        None if the cache cannot hold it; the file itself must be read then.

    Raises:
        CheckpointError: the file is damaged, or transformers cannot read its architecture.
    """
    root = cache_dir() / "gguf"
    folder = root / _folder_name(file_sha256(gguf))
    if _whole(folder):
        return folder
    _remove_abandoned(root)
    if not _has_room(root, gguf.stat().st_size * _GROWTH):
        say(f"{gguf.name}: the cache folder cannot hold its dequantised copy, so each load takes as long")
        return None
    say(f"{gguf.name}: dequantising it once; later loads will be quick")
    with _private_copy(gguf, root) as (copy, digest), reading(gguf):
        model, tokenizer = _read(copy)
    folder = root / _folder_name(digest)
    try:
        with quiet(), tempfile.TemporaryDirectory(dir=root, prefix=".writing-") as temporary:
            ready = Path(temporary) / "ready"
            model.save_pretrained(ready)
            tokenizer.save_pretrained(ready)
            made = _folder_checkpoint(ready)
            record = combine(made, [(path.name, hash_file(path)) for path in made.weights()], hash_file)
            (ready / _RECORD).write_text(json.dumps(asdict(record)), encoding="utf-8")
            _put(ready, folder)
    except Exception as error:  # a full disk comes as OSError or as safetensors' own error
        say(f"{gguf.name}: its dequantised copy could not be kept ({first_line(error)})")
        return None
    return folder


@contextmanager
def opened(checkpoint: Checkpoint, say: Say) -> Iterator[Opened]:
    """Read a GGUF checkpoint: its dequantised copy, or where the cache holds none, the file itself.

    Raises:
        CheckpointError: see `dequantised`; or the copy in the cache is damaged.
    """
    if checkpoint.gguf is None:
        raise ValueError(f"{checkpoint.given} is not a GGUF file")
    folder = dequantised(checkpoint.gguf, say)
    if folder is None:
        with _dequantised_in_memory(checkpoint, checkpoint.gguf) as found:
            yield found
        return
    with snapshot(_as_folder(checkpoint, folder)) as held:
        found, written = held.read(), _written_with(folder)
        tokenizer = found.fingerprint.tokenizer if checkpoint.tokenizer else written.tokenizer
        if found.fingerprint != replace(written, tokenizer=tokenizer):
            raise CheckpointError(f"{folder}: the dequantised copy changed while it was read; run the command again")
        yield replace(found, fingerprint=_fingerprint(checkpoint, found, folder.name.partition("-")[0]))


@contextmanager
def _dequantised_in_memory(checkpoint: Checkpoint, gguf: Path) -> Iterator[Opened]:
    with _private_copy(gguf) as (copy, digest), reading(gguf):
        model, tokenizer = _read(copy)
    with temporary_folder() as folder:
        with quiet():
            for part in (model.config, model.generation_config, tokenizer):
                part.save_pretrained(folder)
        with snapshot(_as_folder(checkpoint, folder), weights=()) as held:
            found = replace(held.read(), tensors=model.state_dict())
            del model
            yield replace(found, fingerprint=_fingerprint(checkpoint, found, digest))


def _fingerprint(checkpoint: Checkpoint, found: Opened, digest: str) -> Fingerprint:
    """Of a GGUF checkpoint whose file has this digest."""
    return Fingerprint(digest, digest, found.fingerprint.tokenizer if checkpoint.tokenizer else digest)


def _as_folder(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    return replace(checkpoint, kind="folder", folder=folder, gguf=None)


def _written_with(folder: Path) -> Fingerprint:
    """The fingerprint that a folder of `dequantised` was written with. Raises `CheckpointError` if it has none."""
    try:
        return Fingerprint(**read_json(folder / _RECORD))
    except TypeError as error:
        raise CheckpointError(f"{folder / _RECORD}: damaged") from error


@contextmanager
def _private_copy(gguf: Path, place: Path | None = None) -> Iterator[tuple[Path, str]]:
    """A copy of a GGUF file in a folder of this process, and its SHA-256: transformers maps what it reads.

    Args:
        gguf: the file.
        place: to put that folder into; None: where temporary ones are.

    Raises:
        CheckpointError: it cannot be read, or there is no room for a copy.
    """
    with temporary_folder(place) as folder:
        copy = folder / gguf.name
        try:
            shutil.copyfile(gguf, copy)
        except OSError as error:
            raise CheckpointError(f"{gguf}: cannot be copied to {folder} ({error.strerror}); free space") from error
        yield copy, hash_file(copy)


def _reading_options(gguf: Path) -> dict[str, Any]:
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
    with quiet(), _parsed_once():
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), dtype=torch.float32, local_files_only=True, **_reading_options(gguf)
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


def _folder_name(digest: str) -> str:
    return f"{digest}-{version('transformers')}"


def _folder_checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint(given=str(folder), kind="folder", folder=folder)


def _whole(folder: Path) -> bool:
    """Whether a folder in the cache still is what was written; a damaged one is removed."""
    if not folder.is_dir():
        return False
    try:
        if fingerprint(_folder_checkpoint(folder)) == _written_with(folder):
            return True
    except CheckpointError:
        pass
    shutil.rmtree(folder, ignore_errors=True)
    return False


def _remove_abandoned(root: Path) -> None:
    with contextlib.suppress(OSError):
        for path in root.glob(".*"):
            if time.time() - path.stat().st_mtime > _ABANDONED:
                shutil.rmtree(path, ignore_errors=True)


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
    record = _written_with(ready)
    with contextlib.suppress(OSError):
        ready.rename(folder)
    if _written_with(folder) != record:
        raise OSError(f"{folder} could not be put in place")
