"""A checkpoint's folder while it is being written: whole at the end, or not there.

In: where it should be. Out: a folder beside it to write into, which takes its place when all went well.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from evalkit.errors import CheckpointError, UsageError, first_line


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yield a folder to write into; rename it to `output` at the end, remove it if anything fails.

    Raises:
        UsageError: there is something at `output` already, or it is the working folder.
        CheckpointError: it cannot be written there.
    """
    if output.exists() and output.samefile(Path.cwd()):
        # It would be replaced under the shell that stands in it
        raise UsageError(f"--output {output}: is the folder that you are in; choose another, even one inside it")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"--output {output}: there is something already; choose another, or remove it first")
    part = output.with_name(f".{output.name}.partial")
    try:
        # What a killed process left behind
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
    """Whether it is what safetensors raises for a full disk, among others."""
    from safetensors import SafetensorError

    return isinstance(error, SafetensorError)
