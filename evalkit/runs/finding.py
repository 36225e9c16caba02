"""Names of run folders, and runs by name.

In: a folder of runs, and a reference to a run: its folder; its folder's name or id, or a prefix of either; or its
checkpoint, where only one run has it. Out: the `Run`. Every command that takes a run finds it here.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalkit.errors import RunError, UnknownNameError, UsageError
from evalkit.inputs import values
from evalkit.paths import RUNS
from evalkit.runs.folder import JOURNAL, MANIFEST, RESULTS, Run, is_file, load_run

if TYPE_CHECKING:
    from evalkit.models.loading.locate import Checkpoint

_GENERIC = re.compile(
    r"(best|checkpoints?|ckpts?|epoch|final|global|hf|iter(ation)?|last|latest|main|models?|outputs?|step|weights"
    r"|\d+[km]?|[-_=.])*",
    re.IGNORECASE,
)
"""Folder names that do not identify a training: steps, and words for any checkpoint."""


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
    """Return the folder of the run with a manifest; it need not exist yet."""
    dtype = manifest["specification"]["dtype"]
    folder = folder_name(model_name(checkpoint), suite, template, dtype, manifest["id"])
    if checkpoint.kind == "live" and not folder.startswith(f"{checkpoint.name}-"):
        # The id does not depend on the name of a model in memory, so that the folder must
        digest = hashlib.sha256(checkpoint.name.encode()).hexdigest()[:6]
        folder = f"{folder.removesuffix(manifest['id'])}{digest}-{manifest['id']}"
    return output / folder


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


def find_run(given: str, root: Path) -> Run:
    run = find_any_run(given, root)
    run.require_finished()
    return run


def find_any_run(given: str, root: Path) -> Run:
    """Find a run, finished or not, under a folder of runs."""
    if not given.strip():
        raise UsageError("a run's name is empty; give its folder, id or checkpoint (evalkit ls runs lists them)")
    for folder in (Path(given), root / given):
        if is_file(folder / MANIFEST):
            return load_run(folder)
    path = None
    with suppress(OSError, RuntimeError):
        path = str(Path(given).expanduser().resolve())
    stored = list(scan(root))
    matching = [run.folder for run in stored if _matches(run, given, path)]
    if len(matching) > 1:
        listed = ", ".join(folder.name for folder in matching[:10]) + (", …" if len(matching) > 10 else "")
        raise UsageError(f"'{given}' matches {len(matching)} runs in {root}: {listed}; name one of them")
    if matching:
        return load_run(matching[0])
    # Unlike `Path.is_dir`, false for a path that the file system rejects
    if path is not None and os.path.isdir(path):  # noqa: PTH112
        raise RunError(f"{given} is neither a run folder (it has no {MANIFEST}) nor the checkpoint of a run in {root}")
    raise UnknownNameError("run", given, [run.folder.name for run in stored] or [f"none in {root}"])


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
        if any(is_file(folder / name) for name in (MANIFEST, RESULTS, JOURNAL)):
            try:
                yield load_run(folder)
            except (RunError, UsageError) as error:  # UsageError: a folder name that is not valid text
                yield DamagedRun(folder, str(error))


def _matches(run: Run | DamagedRun, given: str, path: str | None) -> bool:
    if isinstance(run, DamagedRun) or run.folder.name.startswith(given):
        return run.folder.name.startswith(given)
    manifest = run.manifest
    model, local = manifest["model"].rstrip("/"), manifest.get("path")
    names = {model}
    if local is None:  # of the hub: also without its revision, and with its commit
        name = model.partition("@")[0]
        names |= {name, f"{name}@{manifest['revision']}"}
    is_named = manifest["id"].startswith(given) or given.rstrip("/") in names
    return is_named or (path is not None and local == path)
