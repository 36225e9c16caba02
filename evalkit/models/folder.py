"""Atomic creation of a checkpoint folder: complete, or absent.

In: the path of the folder. Out: a temporary folder beside it to write to, renamed to that path on success.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from evalkit.errors import CheckpointError, UsageError, first_line


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yield a folder to write to; rename it to `output` at the end, or remove it on failure.

    Raises:
        UsageError: `output` exists and is not empty, or is the working directory.
        CheckpointError: the folder cannot be written.
    """
    if output.exists() and output.samefile(Path.cwd()):
        # Replacing it would invalidate the shell's working directory
        raise UsageError(
            f"--output {output}: is the working directory; choose another folder, for example one inside it"
        )
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"--output {output}: already exists; choose another folder, or remove it first")
    part = output.with_name(f".{output.name}.partial")
    try:
        # Left behind by a killed process
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        yield part
        part.replace(output)
    except Exception as error:
        if isinstance(error, OSError) or _of_safetensors(error):
            why = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
            raise CheckpointError(
                f"--output {output}: cannot be written ({why}); free space, or choose another --output"
            ) from error
        raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _of_safetensors(error: Exception) -> bool:
    """Return whether safetensors raised the error, for example because the disk is full."""
    from safetensors import SafetensorError

    return isinstance(error, SafetensorError)
