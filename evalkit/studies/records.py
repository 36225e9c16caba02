"""Records of a study's runs: which folder each has, and why it failed.

In: a `StudyRun` and a folder of runs. Out: its `Record`, one small file each in `.studies`, written by every process
that runs the study. With it, a study's runs are found without their checkpoints.
"""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from evalkit.errors import RunError
from evalkit.inputs.reading import read_json
from evalkit.inputs.validated import Stored, misfit
from evalkit.paths import replace_file
from evalkit.runs.folder import RESULTS, Run, load_run
from evalkit.studies.study import Study, StudyRun

_RECORDS = ".studies"
_LARGEST = 1 << 20
"""Most bytes of a record."""


class Record(Stored):
    """What is known of a study's run."""

    label: str
    """Checkpoint and benchmark, for people."""
    folder: str
    """Name of its folder among the runs."""
    id: str
    checkpoint: str = ""
    """Its checkpoint, relative to the study file: so seeds and steps are known where their files are not."""
    place: str = ""
    """Folder of the study file, relative to that of the runs."""
    error: str = ""
    """Why it failed when it was last tried; empty: it did not."""
    parameters: int | None = None
    """Of its model, for estimates of time; None: unknown."""
    written: str = ""
    """ISO 8601."""


def save_record(
    root: Path,
    run: StudyRun,
    folder: Path,
    identity: str,
    error: str = "",
    parameters: int | None = None,
) -> None:
    """Store where a run is, and why it failed.

    Args:
        root: the folder of runs.
        run: the run.
        folder: its run folder.
        identity: its id.
        error: why it failed; empty: it did not.
        parameters: of its model; None: as recorded.

    Raises:
        RunError: it cannot be written.
    """
    path = root / _RECORDS / f"{run.key}.json"
    known = record_of(root, run)
    same = known if known and known.id == identity else None
    record = Record(
        label=run.label,
        checkpoint=run.checkpoint.given,
        place=run.checkpoint.place,
        folder=folder.name,
        id=identity,
        error=error,
        parameters=same.parameters if same and parameters is None else parameters,
        written=datetime.now(UTC).isoformat(timespec="milliseconds"),
    )
    # A failure is written again: waiting processes see by its time that it is a new one
    if known and not error and known.model_copy(update={"written": ""}) == record.model_copy(update={"written": ""}):
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(record.model_dump(), indent=2).encode())
    except OSError as failure:
        raise RunError(f"{path} cannot be written ({failure.strerror or failure})") from failure


def record_of(root: Path, run: StudyRun) -> Record | None:
    """Return the record of a run; None if it has none, or a damaged one."""
    return _read(root / _RECORDS / f"{run.key}.json")


def recorded_checkpoints(root: Path, place: str) -> frozenset[str]:
    """Return the checkpoints with a finished run, of studies in one folder, relative to the study files.

    Args:
        root: folder of runs.
        place: the studies' folder, relative to `root`.
    """
    found = (_read(path) for path in (root / _RECORDS).glob("*.json"))
    own = (one for one in found if one is not None and one.checkpoint and one.place == place)
    return frozenset(one.checkpoint for one in own if (root / one.folder / RESULTS).is_file())


def _read(path: Path) -> Record | None:
    with suppress(RunError):
        content = read_json(path, RunError, most=_LARGEST)
        if misfit(content, Record) is None and "/" not in content["folder"]:
            return Record.model_validate(content)
    return None


def finished_run_of(study: Study, run: StudyRun) -> Run | None:
    """Return the finished run of a study; None if it is not finished or was never begun.

    Raises:
        RunError: its folder is damaged.
    """
    record = record_of(study.output, run)
    if record is None or not (study.output / record.folder / RESULTS).is_file():
        return None
    found = load_run(study.output / record.folder)
    return found if found.complete and found.manifest["id"] == record.id else None
