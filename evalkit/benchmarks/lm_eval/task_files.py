"""Validation of user-defined lm-eval task files before lm-eval reads them.

In: the folder of `--include-path`. Out: nothing, or a `DataError` with file and line. lm-eval silently skips a file
that it cannot read, uses the last value of a duplicate key, and exits without a message on a deeply nested file.
"""

from __future__ import annotations

from pathlib import Path

from evalkit.errors import DataError
from evalkit.inputs.yaml_reading import read_task_file


def check_task_files(folder: Path) -> None:
    """Raise a `DataError` for the first task file of a folder, or included file, that is not valid."""
    seen: set[Path] = set()
    pending = sorted(folder.glob("**/*.yaml"))
    while pending:
        path = pending.pop(0).resolve()
        if path in seen:
            continue
        seen.add(path)
        content = read_task_file(path, DataError, "task file")
        included = content.get("include", []) if isinstance(content, dict) else []
        listed = included if isinstance(included, list) else [included]
        pending += [path.parent / name for name in listed if isinstance(name, str)]
