"""Dequantise GGUF files to float32 and cache them as safetensors folders.

In: a `.gguf` file. Out: a folder with the same model and tokenizer. Reading a GGUF file of 135M parameters
takes about ten seconds, most of it spent on parsing its vocabulary in Python; the folder loads in under one,
with bit-identical weights.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from evalkit.cache import cache_dir, make_room, mark_used
from evalkit.compatibility.names import replaced
from evalkit.compatibility.transformers import quiet, without_gguf_bar
from evalkit.display import Say
from evalkit.errors import CheckpointError, reading_as, writing
from evalkit.models.loading.files import generation_settings, read_json
from evalkit.models.loading.fingerprint import Fingerprint, file_sha256, fingerprint, hash_file
from evalkit.models.loading.locate import Checkpoint
from evalkit.paths import temporary_folder

_RECORD = "fingerprint"
"""File beside the output of `save_pretrained`; its name matches none of the hashed files."""
_GROWTH = 9
"""Largest ratio, about, of float32 size to GGUF file size (4-bit blocks with their scales)."""


@contextmanager
def dequantised(checkpoint: Checkpoint, say: Say) -> Iterator[Checkpoint]:
    """Yield the copy of a GGUF checkpoint as a folder in float32: from the cache, or written now.

    The folder is named after the file's content and the version of transformers that read it. It is written to a
    temporary folder and renamed, so it is complete or absent. Without room in the cache, it exists in the context only.
    """
    file, root = Path(checkpoint.gguf or ""), cache_dir() / "gguf"
    folder = root / _folder_name(file_sha256(file))
    with ExitStack() as stack:
        if _is_intact(folder):
            mark_used(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)
            is_kept = _has_room(root, file.stat().st_size * _GROWTH)
            no_room = "the cache folder has no room for its dequantised copy, so every load takes this long"
            say(f"{file.name}: {'dequantising it once; later loads will be quick' if is_kept else no_room}")
            folder = _write(file, stack.enter_context(temporary_folder(root if is_kept else None)))
            if is_kept:
                with suppress(OSError):  # an equivalent folder that another process has written first
                    folder = folder.rename(root / folder.name)
                make_room()
        yield replace(checkpoint, kind="folder", folder=folder, gguf=None)


def _is_intact(folder: Path) -> bool:
    with suppress(CheckpointError, OSError):
        copy = Checkpoint(str(folder), "folder", folder)
        return bool(read_json(folder / _RECORD) == _record(folder.name, folder, fingerprint(copy)))
    return False


def file_fingerprint(copy: Checkpoint, content: Checkpoint, actual: Fingerprint) -> Fingerprint:
    """Return the fingerprint of the GGUF file of a dequantised copy.

    `content` is the checkpoint with its small files as loaded, `actual` the fingerprint of what was loaded. Raises
    `CheckpointError` if the copy has changed since it was written.
    """
    recorded, loaded = read_json(copy.folder / _RECORD), _record(copy.folder.name, content.folder, actual)
    digest = copy.folder.name.partition("-")[0]
    whole = Fingerprint(digest, digest, digest)
    if copy.tokenizer is not None:
        recorded["tokenizer"], whole = actual.tokenizer, replace(whole, tokenizer=actual.tokenizer)
    if recorded != loaded:
        raise CheckpointError(f"{copy.folder}: the dequantised copy changed while it was read; run the command again")
    return whole


def _folder_name(digest: str) -> str:
    return f"{digest}-{version('transformers')}"


def _record(name: str, content: Path, actual: Fingerprint) -> dict[str, Any]:
    """Return what determines the model of a dequantised copy, whose folder's name is the key of its content.

    The fingerprint does not include the generation settings.
    """
    return {"folder": name, "generation": generation_settings(content), **asdict(actual)}


def _write(gguf: Path, parent: Path) -> Path:
    """Write a GGUF file's model and tokenizer to a folder in `parent`, named after the bytes that were read."""
    # From a private copy, because transformers memory-maps the file
    copy = parent / gguf.name
    with writing(copy):
        shutil.copyfile(gguf, copy)
    model, tokenizer = _read(gguf, copy)
    folder = parent / _folder_name(hash_file(copy))
    with quiet(), writing(folder):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    actual = fingerprint(Checkpoint(str(folder), "folder", folder), hash_file)
    (folder / _RECORD).write_text(json.dumps(_record(folder.name, folder, actual)), encoding="utf-8")
    return folder


def _read(gguf: Path, copy: Path) -> tuple[Any, Any]:
    # The reader validates nothing: a damaged file can raise any error
    with reading_as(gguf, "an undamaged GGUF file", CheckpointError), quiet(), without_gguf_bar(), _parsed_once():
        import torch
        import transformers

        source: dict[str, Any] = {"gguf_file": copy.name, "local_files_only": True}
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(copy.parent), **source)
        # Otherwise weights stay packed if a kernel supports it
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

    with replaced(gguf, GGUFReader=cache, get_tensor_name_map=cache):
        yield


def _has_room(folder: Path, size: int) -> bool:
    """Return whether a folder is writable (created if missing) and its disk has more than `size` bytes free."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return shutil.disk_usage(folder).free > size
    except OSError:
        return False
