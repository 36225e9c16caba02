"""The user's own lm-eval task files, looked through before lm-eval reads them.

lm-eval passes over a file that it cannot read, takes the last of two values under one key, and ends without a word on
one that is nested deeply enough. In: the folder of `--include-path`. Out: nothing, or a `DataError` with file and line.
"""

from __future__ import annotations

from pathlib import Path

from evalkit.errors import DataError
from evalkit.inputs.yaml_reading import read_task_file


def check_task_files(folder: Path) -> None:
    """Refuse a folder with a task file, or one that it includes, that is not valid."""
    seen: set[Path] = set()
    waiting = sorted(folder.glob("**/*.yaml"))
    while waiting:
        path = waiting.pop(0).resolve()
        if path in seen:
            continue
        seen.add(path)
        content = read_task_file(path, DataError, "task file")
        included = content.get("include", []) if isinstance(content, dict) else []
        listed = included if isinstance(included, list) else [included]
        waiting += [path.parent / name for name in listed if isinstance(name, str)]
