"""Studies in memory: checkpoints, benchmarks, and the runs that follow from them. `study_file.py` reads them.

Each run has a record, one small file in `.studies` of the folder of runs, written by every process that runs the study:
which folder it has, and why it failed. With it, a study's runs are found without their checkpoints.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import Field

from evalkit.benchmarks.registry import benchmark
from evalkit.errors import RunError, UnknownNameError, UsageError
from evalkit.escape import printable
from evalkit.inputs.reading import read_json
from evalkit.inputs.validated import FileSettings, Named, NonEmpty, Stored, misfit
from evalkit.paths import replace_file
from evalkit.runs.folder import RESULTS, Run, load_run

_RECORDS = ".studies"
_LARGEST = 1 << 20
"""Most bytes of a record."""


@dataclass(frozen=True)
class StudyCheckpoint:
    """One checkpoint of a study."""

    name: str
    """Its name in tables and comparisons; seeds and steps of one model share it."""
    seed: int | None
    """Number of the seed, from 1; None for a model with a single one."""
    step: int | None
    """Training step of a checkpoint that is listed under `steps`."""
    given: str
    """Folder relative to the study file, or name: the same on every machine."""
    model: str
    """As in `evalkit run --model`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of `ModelSpec`."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """The same as in the study file, on every machine."""
    place: str = ""
    """Folder of the study file relative to that of the runs: other studies may use the same names."""
    is_gone: bool = False
    """Whether a pattern matches only its record: it was evaluated, and its folder does not exist any more."""

    @property
    def label(self) -> str:
        """Return its name with seed and step."""
        seed = "" if self.seed is None else f" seed {self.seed}"
        return printable(f"{self.name}{seed}{'' if self.step is None else f' step {self.step}'}")


@dataclass(frozen=True)
class StudyBenchmark:
    """One benchmark of a study."""

    name: str
    suite: str
    kind: str
    """Of the suite's benchmark."""
    given: Mapping[str, Any]
    """Options as in the study file, the same on every machine."""
    options: Mapping[str, Any]
    """Options as `benchmarks.run.planned` takes them, with the suite."""

    @property
    def rule(self) -> str | None:
        """Return the scoring rule that its results are read under; None: each run's own."""
        return self.options.get("rule")


class StudyTable(FileSettings):
    """How a study fills a table."""

    benchmark: NonEmpty | None = None
    """Whose runs fill it; None: the only benchmark that fits."""
    rows: Named[NonEmpty] = Field(default_factory=dict)
    """Row of the layout → checkpoint, or NAME@STEP; others are assigned by their names, then by their models."""
    drop_empty: bool = False
    """Whether rows and sections without a run are left out."""
    caption: str | None = None
    """In markup."""
    titles: Named[str] = Field(default_factory=dict)
    """Title of a section, as plain text → its replacement, in markup."""


@dataclass(frozen=True)
class StudyRun:
    """A checkpoint on a benchmark."""

    checkpoint: StudyCheckpoint
    benchmark: StudyBenchmark

    @property
    def label(self) -> str:
        """Return its name in messages."""
        return f"{self.checkpoint.label} on {printable(self.benchmark.name)}"

    @property
    def columns(self) -> dict[str, Any]:
        """Return what identifies it in records for programs."""
        one = self.checkpoint
        return {"run": self.label, "checkpoint": one.name, "seed": one.seed, "step": one.step,
                "benchmark": self.benchmark.name}  # fmt: skip

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of its plan; a benchmark's own context counts more than its checkpoint's."""
        return {**self.checkpoint.options, **self.benchmark.options}

    @property
    def key(self) -> str:
        """Return a hash of everything in the study file that can change the run's id, the same on every machine."""
        given = {**self.checkpoint.written, **self.benchmark.given}
        without = benchmark(self.benchmark.kind).options_outside_id(self.options)
        options = {name: value for name, value in given.items() if name not in without}
        content = [self.checkpoint.place, self.checkpoint.given, options]
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Study:
    """Checkpoints and benchmarks."""

    path: Path
    output: Path
    checkpoints: tuple[StudyCheckpoint, ...]
    benchmarks: tuple[StudyBenchmark, ...]
    tables: Mapping[str, StudyTable]

    @property
    def runs(self) -> tuple[StudyRun, ...]:
        """Return every checkpoint on every benchmark; those of one checkpoint together."""
        return tuple(StudyRun(checkpoint, one) for checkpoint in self.checkpoints for one in self.benchmarks)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of its models, in order."""
        return tuple(dict.fromkeys(one.name for one in self.checkpoints))

    def benchmark(self, name: str | None) -> StudyBenchmark:
        """Return a benchmark by name; None: the only one.

        Raises:
            UsageError: there are several, and none is named.
            UnknownNameError: there is none of that name.
        """
        known = {one.name: one for one in self.benchmarks}
        if name is None and len(known) > 1:
            raise UsageError(f"study {self.path} has several benchmarks: give --benchmark {' | '.join(known)}")
        if name is not None and name not in known:
            raise UnknownNameError(f"benchmark of study {self.path}", name, known)
        return known[name] if name is not None else self.benchmarks[0]


@dataclass(frozen=True)
class Selected:
    """A model of a study at one step."""

    name: str
    """As printed: intg, or intg@1000 where the step was given."""
    step: int | None
    """Training step; None for a model without steps."""
    checkpoints: tuple[StudyCheckpoint, ...]
    """Its seeds, in order."""

    @property
    def labels(self) -> list[str]:
        """Name of each checkpoint: the model's, with the seed where there are several."""
        several = len(self.checkpoints) > 1
        return [f"{self.name} seed {one.seed}" if several else self.name for one in self.checkpoints]


def _members(study: Study, name: str) -> list[StudyCheckpoint]:
    """Return the checkpoints of a model; raise `UnknownNameError` if there are none."""
    if name not in study.names:
        raise UnknownNameError(f"checkpoint of study {study.path}", name, study.names)
    return [one for one in study.checkpoints if one.name == name]


def select(study: Study, given: str) -> Selected:
    """Return a model by NAME or NAME@STEP; of several steps by default the last one that all of its seeds have.

    Raises:
        UnknownNameError: the study has no such model, or the model no such step.
        UsageError: its seeds have no step in common.
    """
    name, sign, step = given.rpartition("@")
    if given in study.names or name not in study.names or not sign:
        name, step = given, ""
    members = _members(study, name)
    of_seeds: dict[int | None, set[int]] = {}
    for one in members:
        of_seeds.setdefault(one.seed, set()).update(() if one.step is None else (one.step,))
    steps = sorted(set.intersection(*of_seeds.values()))
    chosen = steps[-1] if steps else None
    if step:
        if step not in map(str, steps):
            if step in {str(one.step) for one in members}:
                raise UsageError(f"study {study.path}: not every seed of {name} has step {step}")
            known = [f"{name}@{one}" for one in steps]
            raise UnknownNameError(f"step of study {study.path}", given, known or [f"{name} (it has no steps)"])
        chosen = int(step)
    elif members[0].step is not None and not steps:
        raise UsageError(f"study {study.path}: the seeds of {name} have no training step in common; list such steps")
    return Selected(printable(given), chosen, tuple(one for one in members if one.step == chosen))


def trainings(study: Study, name: str) -> list[tuple[str, list[StudyCheckpoint]]]:
    """Return (name, checkpoints by step) of each seed of a model that has steps.

    Raises:
        UnknownNameError: the study has no such model.
        UsageError: the model has no steps.
    """
    members = _members(study, name)
    if members[0].step is None:
        raise UsageError(
            f"study {study.path}: {name} has no training steps, so it has no curve; list the checkpoints of its "
            "training under 'steps'"
        )
    by_seed: dict[int | None, list[StudyCheckpoint]] = {}
    for one in members:
        by_seed.setdefault(one.seed, []).append(one)
    return [(printable(name if seed is None else f"{name} seed {seed}"), found) for seed, found in by_seed.items()]


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
    root: Path, run: StudyRun, folder: Path, identity: str, error: str = "", parameters: int | None = None
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
    if parameters is None and known and known.id == identity:
        parameters = known.parameters
    record = Record(
        label=run.label,
        folder=folder.name,
        id=identity,
        checkpoint=run.checkpoint.given,
        place=run.checkpoint.place,
        error=error,
        parameters=parameters,
        written=datetime.now(UTC).isoformat(timespec="milliseconds"),
    )
    # A failure is written again: waiting processes see by its time that it is a new one
    if known and not error and record.model_copy(update={"written": known.written}) == known:
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
