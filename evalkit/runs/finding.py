"""Names of run folders, and runs by name.

In: a folder of runs, and a reference to a run: its folder; its folder's name or id, or a prefix of either; or its
checkpoint. Out: the `Run`, or all that it may mean. Every command that takes a run finds it here.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalkit.errors import RunError, UnknownNameError, UsageError
from evalkit.inputs import values
from evalkit.paths import RUNS
from evalkit.runs.folder import CHECKPOINT, JOURNAL, MANIFEST, Run, is_file, is_run_folder, load_run
from evalkit.runs.traits import checkpoint_of, documents_read

if TYPE_CHECKING:
    from evalkit.models.loading.locate import Checkpoint

_GENERIC = re.compile(
    r"(best|checkpoints?|ckpts?|epoch|final|global|hf|iter(ation)?|last|latest|main|models?|outputs?|seed|step|weights"
    r"|\d+[km]?|[-_=.])*",
    re.IGNORECASE,
)
"""Folder names that do not identify a training: seeds, steps, and words for any checkpoint."""
_MOST_LISTED = 10
_ID_SHOWN = 7


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
        digest = hashlib.sha256(name.encode()).hexdigest()[:6]
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


def find_run(given: str, root: Path, usable: Callable[[Run], bool] = lambda _: True) -> Run:
    """Find a finished run; several raise a `UsageError` that says how they differ. Arguments as of `find_runs`."""
    return only_run(given, root, find_runs(given, root, usable))


def find_any_run(given: str, root: Path) -> Run:
    """Find a run, finished or not."""
    return only_run(given, root, _named(given, root))


def find_runs(given: str, root: Path, usable: Callable[[Run], bool] = lambda _: True) -> list[Run]:
    """Return the finished runs that a name may mean, those of all documents before others, each from the newest.

    They are of one checkpoint, as it was evaluated last; a name of several checkpoints raises a `UsageError`. `usable`
    says which runs a command can use; if it can use none, all are returned.
    """
    runs = _named(given, root)
    if len({_location(run.manifest) for run in runs}) > 1:
        only_run(given, root, runs)
    newest = sorted(runs, key=lambda run: str(run.manifest["created"]), reverse=True)
    last = [run for run in newest if checkpoint_of(run) == checkpoint_of(newest[0])]
    last = [run for run in last if run.complete] or last[:1]
    last[0].require_finished()
    fitting = list(filter(usable, last)) or last
    return sorted(fitting, key=lambda run: bool(documents_read(run.manifest["specification"])))


def only_run(given: str, root: Path, runs: Sequence[Run]) -> Run:
    if len(runs) > 1:
        listed = "; ".join(distinctions(runs)[:_MOST_LISTED]) + "; …" * (len(runs) > _MOST_LISTED)
        raise UsageError(f"'{given}' matches {len(runs)} runs in {root}: {listed}; name one by its id")
    return runs[0]


def settings_words(run: Run) -> tuple[str, ...]:
    """Return what distinguishes runs of one checkpoint on a suite, in words."""
    specification = run.manifest["specification"]
    shots, read = specification.get("num_fewshot"), documents_read(specification) or "all documents"
    computed = (str(specification.get(name) or "") for name in ("dtype", "quantise"))
    made = (str(run.manifest.get("revision") or ""), run.template, *computed)
    return *made, f"{shots}-shot" if shots else "", read


def distinctions(runs: Sequence[Run]) -> list[str]:
    """Return each run's id, and in parentheses the settings and the date in which it differs from the others."""
    dates = [str(run.manifest["created"])[:16].replace("T", " ") for run in runs]
    about = [(run.model, run.suite, *settings_words(run)) for run in runs]
    settings = [(*of_run, date) for of_run, date in zip(about, dates, strict=True)]
    differing = [len(set(values)) > 1 for values in zip(*settings, strict=True)]
    words = (", ".join(filter(None, compress(of_run, differing))) for of_run in settings)
    return [f"{run.manifest['id'][:_ID_SHOWN]} ({of_run})" for run, of_run in zip(runs, words, strict=True)]


def _named(given: str, root: Path) -> list[Run]:
    """Return all runs that a name may mean, at least one; a damaged one raises, since it may be the one meant."""
    if not given.strip():
        raise UsageError("a run's name is empty; give its folder, id or checkpoint (evalkit ls runs lists them)")
    for folder in (Path(given), root / given):
        if is_file(folder / MANIFEST) and is_run_folder(folder):
            return [load_run(folder)]
    if matching := matching_runs(given, root):
        return [run if isinstance(run, Run) else load_run(run.folder) for run in matching]
    # Unlike `Path.is_dir`, false for a path that the file system rejects
    if os.path.isdir(os.path.expanduser(given)):  # noqa: PTH111, PTH112
        raise RunError(f"{given} is neither a run folder (it has no {MANIFEST}) nor the checkpoint of a run in {root}")
    if not (names := [run.folder.name for run in scan(root)]):
        raise UsageError(
            f"'{given}' is no run folder, and there are no runs in {root} (--in or --output of their command)"
        )
    raise UnknownNameError("run", given, names)


def matching_runs(given: str, root: Path) -> list[Run | DamagedRun]:
    """Return the runs in a folder whose checkpoint, id or folder's name a text may mean; damaged ones too."""
    path, stored = None, list(scan(root))
    with suppress(OSError, RuntimeError):
        path = str(Path(given).expanduser().resolve())
    # A checkpoint that is here is meant itself, and no namesake
    is_here = path is not None and is_file(Path(path) / CHECKPOINT)
    for matches in (_is_at,) if is_here else (_is_at, _has_name, _begins):
        if matching := [run for run in stored if matches(run, given, path)]:
            return matching
    return []


def is_completed(run: Run, given: str) -> bool:
    """Return whether a name is only the beginning of the name of a run's folder, which may be another's than meant."""
    is_whole = run.folder.name == given or _has_name(run, given, None)
    return run.folder.name.startswith(given) and not is_whole


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


def _is_at(run: Run | DamagedRun, _: str, path: str | None) -> bool:
    """Return whether a run is of the checkpoint at a path."""
    return isinstance(run, Run) and path is not None and run.manifest.get("path") == path


def _has_name(run: Run | DamagedRun, given: str, _: str | None) -> bool:
    """Return whether a run is of the checkpoint with a name, or with the last parts of its path or name."""
    if isinstance(run, DamagedRun):
        return False
    model, local = run.manifest["model"].rstrip("/"), run.manifest.get("path")
    names = {model, model.rpartition("/")[2], run.manifest.get("name")}
    if local is None:  # of the hub: also without its revision, and with its commit
        name = model.partition("@")[0]
        names |= {name, f"{name}@{run.manifest['revision']}"}
    name = given.rstrip("/")
    return name in names or (local is not None and bool(name) and local.endswith(f"/{name}"))


def _begins(run: Run | DamagedRun, given: str, _: str | None) -> bool:
    """Return whether the name of a run's folder or its id begins with a text."""
    return run.folder.name.startswith(given) or (isinstance(run, Run) and run.manifest["id"].startswith(given))
