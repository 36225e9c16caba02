"""From what a user calls a run to its folder, and what runs there are.

A run is called by its folder, by its folder's name or id or the beginning of one, or by its checkpoint, where only one
run has it. Every command that takes a run finds it here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalkit.errors import RunError, UnknownNameError, UsageError
from evalkit.inputs import values
from evalkit.resources import RUNS
from evalkit.runs.folder import JOURNAL, MANIFEST, RESULTS, Run, folder_name, is_file, load_run

if TYPE_CHECKING:
    from evalkit.models.locate import Checkpoint

_MOST_SHOWN = 10

_SAYS_NOTHING = re.compile(
    r"(best|checkpoints?|ckpts?|epoch|final|global|hf|iter(ation)?|last|latest|main|models?|outputs?|step|weights"
    r"|\d+[km]?|[-_=.])*",
    re.IGNORECASE,
)
"""Names of folders that many trainings have: steps, and words for any checkpoint."""


@dataclass(frozen=True)
class DamagedRun:
    """A run folder that cannot be opened."""

    folder: Path
    why: str


def run_folder(output: Path, checkpoint: Checkpoint, suite: str, template: str, manifest: Mapping[str, Any]) -> Path:
    """The folder of a run with such a manifest, whether it exists yet or not."""
    dtype = manifest["specification"]["dtype"]
    return output / folder_name(model_name(checkpoint), suite, template, dtype, manifest["id"])


def model_name(checkpoint: Checkpoint) -> str:
    """A checkpoint's short name, with the folder before it where it only counts steps or is called as all are."""
    if checkpoint.kind not in ("folder", "gguf"):
        return checkpoint.name
    path = (checkpoint.gguf or checkpoint.folder).resolve()
    names = [checkpoint.name]
    for parent in path.parents:
        if not (_SAYS_NOTHING.fullmatch(names[0]) and parent.name):
            break
        names.insert(0, parent.name)
    return "-".join(names)


def root_of_runs() -> Path:
    """Where runs are looked for by a command that has no option for it: where `evalkit run` puts them."""
    return Path(os.environ.get("EVALKIT_OUTPUT") or RUNS)


def find_run(given: str, root: Path) -> Run:
    """A finished run by what a user calls it. As `find_begun_run`; raises a `RunError` too where it is not finished."""
    run = find_begun_run(given, root)
    run.refuse_unfinished()
    return run


def find_begun_run(given: str, root: Path) -> Run:
    """A run, finished or not, by what a user calls it.

    Args:
        given: its folder; its folder's name under `root` or its id, or the beginning of either; or its checkpoint.
        root: folder of runs.

    Raises:
        UsageError: several runs are called so; lists them.
        UnknownNameError: there is no such run.
        RunError: it is damaged, or the folder is of something else.
    """
    if not given.strip():
        raise UsageError("a run's name is empty; name its folder, its id, or its checkpoint (evalkit ls runs)")
    for place in (Path(given), root / given):
        if is_file(place / MANIFEST):
            return load_run(place)
    there = list(scan(root))
    path = _resolved(given)
    found = [one for one in there if _is_called(one, given, path)]
    if len(found) > 1:
        listed = ", ".join(one.folder.name for one in found[:_MOST_SHOWN]) + (", …" if len(found) > _MOST_SHOWN else "")
        raise UsageError(f"'{given}' may be any of {len(found)} runs in {root}: {listed}; name one of them")
    if not found and _is_folder(given):
        raise RunError(f"{given} is neither a run folder (it has no {MANIFEST}) nor the checkpoint of a run in {root}")
    if not found:
        raise UnknownNameError("run", given, [one.folder.name for one in there] or [f"none in {root}"])
    return load_run(found[0].folder)


def list_runs(root: Path | str = RUNS) -> list[Run]:
    """All readable runs under a folder, finished or not, by name.

    Raises:
        UsageError: that is no path.
        RunError: the folder cannot be read.
    """
    return [one for one in scan(values.path("folder of runs", root)) if isinstance(one, Run)]


def scan(root: Path) -> Iterator[Run | DamagedRun]:
    """Every run folder under a folder, by name.

    Raises:
        RunError: the folder cannot be read.
    """
    try:
        with os.scandir(root) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise RunError(f"folder of runs {root} cannot be read: {error.strerror or error}") from error
    for folder in (root / name for name in names):
        if any(is_file(folder / name) for name in (MANIFEST, RESULTS, JOURNAL)):
            try:
                yield load_run(folder)
            except (RunError, UsageError) as error:  # the latter: a name that is not text
                yield DamagedRun(folder, str(error))


def _is_called(run: Run | DamagedRun, given: str, path: str | None) -> bool:
    """Whether a run may be meant, by its names or by its checkpoint's; `path` is that of a checkpoint given so."""
    if run.folder.name.startswith(given) or isinstance(run, DamagedRun):
        return run.folder.name.startswith(given)
    manifest = run.manifest
    if str(manifest["id"]).startswith(given) or given.rstrip("/") in _model_names(manifest):
        return True
    return path is not None and manifest.get("path") == path


def _model_names(manifest: Mapping[str, Any]) -> set[str]:
    """As its checkpoint was named; one of the hub also without its revision, and with its commit."""
    model = str(manifest["model"]).rstrip("/")
    if manifest.get("path") is not None:
        return {model}
    name = model.partition("@")[0]
    return {model, name, f"{name}@{manifest['revision']}"}


def _is_folder(given: str) -> bool:
    try:
        return Path(given).is_dir()
    except OSError:
        return False


def _resolved(given: str) -> str | None:
    try:
        return str(Path(given).expanduser().resolve())
    except (OSError, RuntimeError):
        return None
