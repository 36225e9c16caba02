"""Names of run folders, and the runs in a folder.

In: a checkpoint and the settings of its run, or a folder of runs. Out: the name of the run's folder; `Run`s.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalkit.errors import RunError, UsageError
from evalkit.inputs import values
from evalkit.inputs.values import text_digest
from evalkit.paths import RUNS
from evalkit.runs.folder import JOURNAL, Run, is_file, is_run_folder, load_run

if TYPE_CHECKING:
    from evalkit.models.loading.locate import Checkpoint

_GENERIC = re.compile(
    r"(best|checkpoints?|ckpts?|epoch|final|global|hf|iter(ation)?|last|latest|main|models?|outputs?|seed|step|weights"
    r"|\d+[km]?|[-_=.])*",
    re.IGNORECASE,
)
"""Folder names that do not identify a training: seeds, steps, and words for any checkpoint."""


@dataclass(frozen=True)
class DamagedRun:
    folder: Path
    why: str


def folder_name(model: str, suite: str, template: str, dtype: str, identity: str) -> str:
    """Return a readable, unique folder name: `<model>-<suite>-<template>-<dtype>-<id>`, at most 128 characters."""
    # A long model name loses its beginning, since a training step is at its end
    protocol = f"{suite}-{template}"[:50]
    safe = re.sub(r"[^\w.-]+", "_", f"{model[-50:]}-{protocol}-{dtype}", flags=re.ASCII).strip("._-")
    return f"{safe}-{identity}"


def run_folder(output: Path, checkpoint: Checkpoint, suite: str, template: str, manifest: Mapping[str, Any]) -> Path:
    """Return the folder of the run with a manifest; it need not exist yet.

    A run of the same checkpoint with the same id is that run, whatever its name.
    """
    specification = manifest["specification"]
    dtype = "-".join(filter(None, (specification["dtype"], specification.get("quantise"))))
    name = manifest.get("name") or model_name(checkpoint)
    folder = folder_name(name, suite, template, dtype, manifest["id"])
    if (checkpoint.kind == "live" or "name" in manifest) and not folder.startswith(f"{name}-"):
        # The id does not depend on a given name, so that the folder must
        digest = text_digest(name)[:6]
        folder = f"{folder.removesuffix(manifest['id'])}{digest}-{manifest['id']}"
    if not (output / folder).exists() and output.is_dir():
        for other in sorted(output.glob(f"*-{manifest['id']}")):
            with suppress(RunError):
                if _location(load_run(other).manifest) == _location(manifest):
                    return other
    return output / folder


def runs_of_other_documents(folder: Path, manifest: Mapping[str, Any]) -> list[Run]:
    """Return the finished runs beside a folder that differ from a manifest only in the selection of documents.

    Those of all documents come first, then others from the largest, so that few have to be read.
    """

    def settings(specification: Mapping[str, Any]) -> dict[str, Any]:
        selection = ("limit", "sample", "seed", "earlier")
        return {name: value for name, value in specification.items() if name not in selection}

    def documents(run: Run) -> float:
        specification = run.manifest["specification"]
        return float(specification.get("sample") or specification["limit"] or "inf")

    runs = list[Run]()
    for other in sorted(folder.parent.glob(f"{folder.name.removesuffix(manifest['id'])}*")):
        with suppress(RunError):
            run = load_run(other)
            same = settings(run.manifest["specification"]) == settings(manifest["specification"])
            if other != folder and run.complete and is_file(other / JOURNAL) and same:
                runs.append(run)
    return sorted(runs, key=documents, reverse=True)


def _location(manifest: Mapping[str, Any]) -> str:
    return str(manifest.get("path") or manifest["model"])


def model_name(checkpoint: Checkpoint) -> str:
    """Return a checkpoint's short name, with parent folders where the name alone is generic ("step1000", "final")."""
    if checkpoint.kind not in ("folder", "gguf"):
        return checkpoint.name
    path = (checkpoint.gguf or checkpoint.folder).resolve()
    names = [checkpoint.name]
    for parent in path.parents:
        if not (is_generic(names[0]) and parent.name):
            break
        names.insert(0, parent.name)
    return "-".join(names)


def is_generic(name: str) -> bool:
    """Return whether a folder's name does not identify a training, as "model" or "step1000"."""
    return _GENERIC.fullmatch(name) is not None


def root_of_runs() -> Path:
    """Return the default folder of runs, for commands without an option for it: the one `evalkit run` writes to."""
    return Path(os.environ.get("EVALKIT_OUTPUT") or RUNS)


def list_runs(root: Path | str = RUNS) -> list[Run]:
    """Return all readable runs in a folder, finished or not, sorted by name."""
    return [run for run in scan(values.path("folder of runs", root)) if isinstance(run, Run)]


def scan(root: Path) -> Iterator[Run | DamagedRun]:
    """Yield every run folder in a folder, sorted by name."""
    try:
        with os.scandir(root) as entries:
            # Hidden ones are being removed
            names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise RunError(f"folder of runs {root} cannot be read: {error.strerror or error}") from error
    for folder in (root / name for name in names):
        if is_run_folder(folder):
            try:
                yield load_run(folder)
            except (RunError, UsageError) as error:  # UsageError: a folder name that is not valid text
                yield DamagedRun(folder, str(error))
