"""Dequantise GGUF files to float32 and cache them as safetensors folders.

In: a `.gguf` file. Out: a folder with the same model and tokenizer. Reading a GGUF file of 135M parameters
takes about ten seconds, most of it spent on parsing its vocabulary in Python; the folder loads in under one,
with bit-identical weights.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalkit.cache import cache_dir, make_room, mark_used
from evalkit.compatibility import names
from evalkit.compatibility.transformers import quiet, without_gguf_bar
from evalkit.display import Say
from evalkit.errors import CheckpointError, first_line, reading_as
from evalkit.models.loading.files import generation_settings, read_json
from evalkit.models.loading.fingerprint import Fingerprint, combine, file_sha256, fingerprint, hash_file
from evalkit.models.loading.locate import Checkpoint
from evalkit.paths import temporary_folder

if TYPE_CHECKING:
    from evalkit.models.loading.snapshot import LoadedFiles

_RECORD = "fingerprint"
"""File beside the output of `save_pretrained`; its name matches none of the hashed files."""
_ABANDONED = 24 * 3600
"""Seconds after which unfinished folders are assumed to be left by a killed process."""
_GROWTH = 9
"""Largest ratio, about, of float32 size to GGUF file size (4-bit blocks with their scales)."""


def dequantised(gguf: Path, say: Say) -> Path | None:
    """Return the cached folder with the file's model and tokenizer in float32; create it if missing.

    The folder is named after the file's content and the version of transformers that read it. It is written to a
    temporary folder and renamed, so it is complete or absent. None if the cache has no room for it; the file itself
    must be read then.
    """
    root = cache_dir() / "gguf"
    folder = root / _folder_name(file_sha256(gguf))
    if folder.is_dir():
        with suppress(CheckpointError):
            if read_json(folder / _RECORD) == _record(folder, folder, fingerprint(_as_folder(folder))):
                mark_used(folder)
                return folder
        shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        for path in root.glob(".*"):
            if time.time() - path.stat().st_mtime > _ABANDONED:
                shutil.rmtree(path, ignore_errors=True)
    if not _has_room(root, gguf.stat().st_size * _GROWTH):
        say(f"{gguf.name}: the cache folder has no room for its dequantised copy, so every load takes this long")
        return None
    say(f"{gguf.name}: dequantising it once; later loads will be quick")
    with _private_copy(gguf, root) as (copy, digest):
        model, tokenizer = _read(gguf, copy)
    folder = root / _folder_name(digest)
    try:
        with quiet(), tempfile.TemporaryDirectory(dir=root, prefix=".writing-") as temporary:
            ready = Path(temporary) / "ready"
            model.save_pretrained(ready)
            tokenizer.save_pretrained(ready)
            made = _as_folder(ready)
            written = combine(made, [(path.name, hash_file(path)) for path in made.weights()], hash_file)
            record = _record(folder, ready, written)
            (ready / _RECORD).write_text(json.dumps(record), encoding="utf-8")
            with suppress(OSError):  # an equivalent folder that another process has written first
                ready.rename(folder)
            if read_json(folder / _RECORD) != record:
                raise OSError(f"{ready} could not be renamed to {folder}")
        make_room()
    except Exception as error:  # a full disk comes as OSError or as safetensors' own error
        say(f"{gguf.name}: its dequantised copy could not be cached ({first_line(error)})")
        return None
    return folder


@contextmanager
def opened(checkpoint: Checkpoint, dtype: str, say: Say) -> Iterator[LoadedFiles]:
    """Read a GGUF checkpoint from its dequantised copy, or from the file itself if the cache has no room."""
    from evalkit.models.loading.snapshot import snapshot

    if checkpoint.gguf is None:
        raise ValueError(f"{checkpoint.given} is not a GGUF file")
    folder = dequantised(checkpoint.gguf, say)
    if folder is None:
        with _dequantised_in_memory(checkpoint, checkpoint.gguf) as read:
            yield read
        return
    with snapshot(replace(checkpoint, kind="folder", folder=folder, gguf=None)) as copies:
        copies.start(dtype)
        # While the weights are read
        import transformers.modeling_utils  # noqa: F401

        read, stored = copies.read(), read_json(folder / _RECORD)
        own = {"tokenizer": stored.get("tokenizer")} if checkpoint.tokenizer else {}
        if stored != _record(folder, read.checkpoint.folder, read.fingerprint) | own:
            raise CheckpointError(f"{folder}: the dequantised copy changed while it was read; run the command again")
        yield _of_file(read, checkpoint, folder.name.partition("-")[0])


@contextmanager
def _dequantised_in_memory(checkpoint: Checkpoint, gguf: Path) -> Iterator[LoadedFiles]:
    from evalkit.models.loading.snapshot import Weights, snapshot

    with _private_copy(gguf) as (copy, digest):
        model, tokenizer = _read(gguf, copy)
    with temporary_folder() as folder:
        with quiet():
            for part in (model.config, model.generation_config, tokenizer):
                part.save_pretrained(folder)
        with snapshot(replace(checkpoint, kind="folder", folder=folder, gguf=None), weights=()) as copies:
            read = replace(copies.read(), weights=Weights(model.state_dict()))
            del model
            yield _of_file(read, checkpoint, digest)


def _of_file(read: LoadedFiles, checkpoint: Checkpoint, digest: str) -> LoadedFiles:
    """Return loaded files with the fingerprint of the GGUF file that has this digest."""
    tokenizer = read.fingerprint.tokenizer if checkpoint.tokenizer else digest
    return replace(read, fingerprint=Fingerprint(digest, digest, tokenizer))


def _folder_name(digest: str) -> str:
    return f"{digest}-{version('transformers')}"


def _as_folder(folder: Path) -> Checkpoint:
    return Checkpoint(given=str(folder), kind="folder", folder=folder)


def _record(folder: Path, content: Path, found: Fingerprint) -> dict[str, Any]:
    """Return what determines the model of a folder of `dequantised`, whose name is the key of its content.

    `content` is where its small files are; the fingerprint does not include the generation settings.
    """
    return {"folder": folder.name, "generation": generation_settings(content), **asdict(found)}


@contextmanager
def _private_copy(gguf: Path, parent: Path | None = None) -> Iterator[tuple[Path, str]]:
    """Copy a GGUF file to a temporary folder and yield the copy and its SHA-256; transformers memory-maps the file."""
    with temporary_folder(parent) as folder:
        copy = folder / gguf.name
        try:
            shutil.copyfile(gguf, copy)
        except OSError as error:
            raise CheckpointError(f"{gguf}: cannot be copied to {folder} ({error.strerror}); free space") from error
        yield copy, hash_file(copy)


def _read(gguf: Path, copy: Path) -> tuple[Any, Any]:
    """Read model and tokenizer from the copy of a GGUF file, which errors name."""
    # The reader validates nothing: a damaged file can raise any error
    with reading_as(gguf, "an undamaged GGUF file", CheckpointError), quiet(), without_gguf_bar(), _parsed_once():
        import torch
        import transformers

        source: dict[str, Any] = {"gguf_file": copy.name, "local_files_only": True}
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(copy.parent), **source)
        # Later versions keep weights packed if a kernel supports it
        if hasattr(transformers, "GgufConfig"):
            source["quantization_config"] = transformers.GgufConfig(dequantize=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(str(copy.parent), dtype=torch.float32, **source)
    # The weights are plain float32 now; these two would only prevent transformers from saving them
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, tokenizer


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Cache the parsed GGUF file and the tensor names of its architecture.

    transformers parses the file three times and lists the names once per module, which is half of the reading time.
    """
    import gguf

    with names.replaced("gguf", gguf, GGUFReader=cache, get_tensor_name_map=cache):
        yield


def _has_room(folder: Path, size: int) -> bool:
    """Return whether a folder is writable (created if missing) and its disk has more than `size` bytes free."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return shutil.disk_usage(folder).free > size
    except OSError:
        return False
