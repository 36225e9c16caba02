"""Diagnostics of the machine: versions, device, documents and disk, as a `Report`."""

from __future__ import annotations

import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from evalkit import __version__
from evalkit.activity import doing, imports
from evalkit.data import TASKS, Library
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.resources import cache_dir

_PACKAGES = ("lm-eval", "torch", "transformers", "tokenizers", "datasets", "safetensors", "gguf",
             "numpy", "pandas", "pyarrow")  # fmt: skip
_TESTED = {"lm-eval": "0.4.13"}
_SCRATCH = 2**30
"""Free bytes that a run needs: its own files, the documents and the demo model."""


def report(data_dir: Path | None, output: Path) -> Report:
    """Return a report for bug reports and first runs; problems are marked with "!"."""
    rows = [*_versions(), *_device(), *_documents(data_dir), *_disk(output)]
    problems = sum(row[0] == "!" for row in rows)
    verdict = f"{problems} problem(s), marked !" if problems else "no problems found"
    return Report((simple_table("doctor", ["", "what", "state"], rows, texts=3),), notes=(verdict,))


def _versions() -> list[list[str]]:
    rows = [["", "python", platform.python_version()], ["", "evalkit", __version__]]
    for name in _PACKAGES:
        try:
            found = version(name)
        except PackageNotFoundError:
            pinned = f"=={_TESTED[name]}" if name in _TESTED else ""
            rows.append(["!", name, f"not installed: pip install {name}{pinned}"])
            continue
        wrong = name in _TESTED and found != _TESTED[name]
        rows.append(["!" if wrong else "", name, found + (f" (evalkit needs {_TESTED[name]})" if wrong else "")])
    return rows


def _device() -> list[list[str]]:
    with doing("importing torch", slow=imports("torch")):
        import torch
    memory = psutil.virtual_memory()
    rows = [
        ["", "processor", f"{platform.machine()}, {torch.get_num_threads()} threads"],
        ["", "memory", f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"],
    ]
    if not torch.cuda.is_available():
        return [*rows, ["", "GPU", "none that torch can use"]]
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        rows.append(["", f"GPU {index}", f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"])
    return rows


def _documents(data_dir: Path | None) -> list[list[str]]:
    library = Library(data_dir)
    here = {task: library.where(task).source for task in TASKS}
    absent = [task for task, source in here.items() if source == "absent"]
    rows = [["", "documents", f"{len(TASKS) - len(absent)} of {len(TASKS)} tasks here (evalkit data)"]]
    if absent:
        rows.append(["!", "absent", f"{', '.join(absent)}: evalkit data --fetch, --data-dir, or the hub during a run"])
    return rows


def _disk(output: Path) -> list[list[str]]:
    rows = []
    for label, folder in (("cache", cache_dir()), ("runs", output)):
        existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
        free = shutil.disk_usage(existing).free
        rows.append(["!" if free < _SCRATCH else "", label, f"{folder}, {free / 2**30:.1f} GiB free"])
    return rows
