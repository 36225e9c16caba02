"""Studies in memory: checkpoints, benchmarks, and the runs that follow from them. `study_file.py` reads them.

Each run has a record, one small file in `.studies` of the folder of runs, written by every process that runs the study:
which folder it has, and why it failed. With it, a study's runs are found without their checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import Field

from evalkit.benchmarks.registry import benchmark
from evalkit.errors import RunError, UnknownNameError, UsageError, check_known
from evalkit.escape import printable
from evalkit.inputs.reading import read_json
from evalkit.inputs.validated import FileSettings, Named, NonEmpty, Stored, restored
from evalkit.inputs.values import text_digest
from evalkit.paths import replace_file
from evalkit.runs.folder import RESULTS, Run, is_file, load_run

_RECORDS = ".studies"
_LARGEST = 1 << 20
"""Most bytes of a record."""


@dataclass(frozen=True)
class StudyCheckpoint:
    name: str
    """Its name in tables and comparisons; seeds and steps of one model share it."""
    seed: int | None
    """Number of the seed, from 1; None for a model with a single one."""
    step: int | None
    """Training step of a checkpoint that is listed under `steps`."""
    given: str
    """Folder relative to the study file, or name: the same on every machine."""
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of `ModelSpec`."""
    written: Mapping[str, Any] = field(default_factory=dict)
    place: str = ""
    """Folder of the study file relative to that of the runs: other studies may use the same names."""
    is_gone: bool = False
    """Whether a pattern matches only its record: it was evaluated, and its folder does not exist any more."""
    in_pairs: bool = False
    """Whether the study declares that the n-th seeds of all models are pairs: the same data in the same order."""

    @property
    def label(self) -> str:
        """Return its name with seed and step."""
        seed = "" if self.seed is None else f" seed {self.seed}"
        return printable(f"{self.name}{seed}{'' if self.step is None else f' step {self.step}'}")


@dataclass(frozen=True)
class StudyBenchmark:
    name: str
    suite: str
    kind: str
    given: Mapping[str, Any]
    """Options as in the study file, the same on every machine."""
    options: Mapping[str, Any]
    """Options as `benchmarks.run.planned` takes them, with the suite."""
    checkpoints: tuple[str, ...] = ()
    """Names of the checkpoints that run on it; empty: all."""

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
    titles: Named[str] = Field(default_factory=dict)
    """Title of a section, as plain text → its replacement, in markup."""


@dataclass(frozen=True)
class StudyRun:
    checkpoint: StudyCheckpoint
    benchmark: StudyBenchmark

    @property
    def label(self) -> str:
        """Return its name in messages."""
        return f"{self.checkpoint.label} on {printable(self.benchmark.name)}"

    @property
    def columns(self) -> dict[str, Any]:
        """Return what identifies it in records for programs."""
        about = {name: getattr(self.checkpoint, name) for name in ("name", "seed", "step")}
        return {"run": self.label, "checkpoint": about.pop("name"), **about, "benchmark": self.benchmark.name}

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of its plan; a benchmark's own context counts more than its checkpoint's."""
        return {**self.checkpoint.options, **self.benchmark.options, "name": self.checkpoint.label}

    @property
    def key(self) -> str:
        """Return a hash of everything in the study file that can change the run's id, the same on every machine."""
        given = {**self.checkpoint.written, **self.benchmark.given}
        without = benchmark(self.benchmark.kind).options_outside_id(self.options)
        options = {name: value for name, value in given.items() if name not in without}
        content = [self.checkpoint.place, self.checkpoint.given, options]
        return text_digest(json.dumps(content, sort_keys=True, default=str))[:16]


@dataclass(frozen=True)
class Study:
    path: Path
    output: Path
    checkpoints: tuple[StudyCheckpoint, ...]
    benchmarks: tuple[StudyBenchmark, ...]
    tables: Mapping[str, StudyTable]
    figures: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Figure of analyses of attention → its models, NAME or NAME@STEP; of other figures all models."""
    pair_seeds: bool = False
    """See `StudyCheckpoint.in_pairs`."""

    @property
    def runs(self) -> tuple[StudyRun, ...]:
        """Return every checkpoint on each of its benchmarks; those of one checkpoint together."""
        return tuple(
            StudyRun(checkpoint, benchmark)
            for checkpoint in self.checkpoints
            for benchmark in self.benchmarks
            if checkpoint.name in self.names_on(benchmark)
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of its models, in order."""
        return tuple(dict.fromkeys(checkpoint.name for checkpoint in self.checkpoints))

    def names_on(self, benchmark: StudyBenchmark) -> tuple[str, ...]:
        """Return the names of the models that run on a benchmark, in order."""
        return tuple(name for name in self.names if name in (benchmark.checkpoints or self.names))

    def benchmark(self, name: str | None) -> StudyBenchmark:
        """Return a benchmark by name, by default the only one; raise `UsageError` if there is none, or several."""
        known = {benchmark.name: benchmark for benchmark in self.benchmarks}
        if name is None and len(known) > 1:
            raise UsageError(f"study {self.path} has several benchmarks: give --benchmark {' | '.join(known)}")
        if name is not None and name not in known:
            raise UnknownNameError(f"benchmark of study {self.path}", name, known)
        return known[name] if name is not None else self.benchmarks[0]

    def members(self, name: str) -> dict[int | None, dict[int | None, StudyCheckpoint]]:
        """Return seed → step → checkpoint of a model; raise `UnknownNameError` if there is none."""
        check_known(f"checkpoint of study {self.path}", [name], self.names)
        seeds: dict[int | None, dict[int | None, StudyCheckpoint]] = {}
        for checkpoint in self.checkpoints:
            if checkpoint.name == name:
                seeds.setdefault(checkpoint.seed, {})[checkpoint.step] = checkpoint
        return seeds


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
        return [f"{self.name} seed {checkpoint.seed}" if several else self.name for checkpoint in self.checkpoints]


def select(study: Study, given: str, last: int = 1) -> Selected:
    """Return a model by NAME or NAME@STEP; of several steps by default the last one that all of its seeds have.

    With `last`, each seed has so many checkpoints, up to that step. Raises `UsageError`: an unknown model or step, or
    seeds without steps in common.
    """
    name, sign, asked = given.rpartition("@")
    if given in study.names or name not in study.names or not sign:
        name, asked = given, ""
    seeds = study.members(name).values()
    common = set.intersection(*map(set, seeds))
    steps = {str(step): step for step in common if step is not None}
    if not common:
        raise UsageError(f"study {study.path}: the seeds of {name} have no training step in common; list such steps")
    if asked and asked not in steps:
        raise UnknownNameError(f"step of study {study.path}", given, [f"{name}@{step}" for step in steps])
    step = steps[asked] if asked else max(common, key=lambda step: step or 0)
    upto = sorted(other for other in common if other is not None and step is not None and other < step)
    if len(upto) < last - 1:
        raise UsageError(f"study {study.path}: {given} has {len(upto) + 1} common steps; --last {last} needs as many")
    chosen = (*upto[len(upto) + 1 - last :], step)
    return Selected(printable(given), step, tuple(seed[number] for seed in seeds for number in chosen))


def trainings(study: Study, name: str) -> list[tuple[str, list[StudyCheckpoint]]]:
    """Return (name, checkpoints by step) of each seed of a model; raise `UsageError` if it has no steps."""
    seeds = study.members(name)
    if any(None in seed for seed in seeds.values()):
        raise UsageError(f"study {study.path}: {name} has no training steps; list 'steps'")
    named = {seed: name if seed is None else f"{name} seed {seed}" for seed in seeds}
    return [(printable(named[seed]), list(steps.values())) for seed, steps in seeds.items()]


class Record(Stored):
    """What is known of a study's run."""

    label: str
    folder: str
    id: str
    checkpoint: str = ""
    """Its checkpoint, relative to the study file: so seeds and steps are known where their files are not."""
    place: str = ""
    """Folder of the study file, relative to that of the runs."""
    error: str = ""
    parameters: int | None = None
    """Of its model, for estimates of time; None: unknown."""
    in_pairs: bool = False
    """Whether seeds were declared as pairs when the run had no results yet; never changed afterwards."""
    written: str = ""


def save_record(
    root: Path, run: StudyRun, folder: Path, identity: str, error: str = "", parameters: int | None = None
) -> None:
    """Store where a run is, and why it failed; parameters of its model, if not given, as recorded.

    Raises `RunError` if it cannot be written.
    """
    path, known = root / _RECORDS / f"{run.key}.json", record_of(root, run)
    if parameters is None and known and known.id == identity:
        parameters = known.parameters
    where = {"folder": folder.name, "checkpoint": run.checkpoint.given, "place": run.checkpoint.place}
    in_pairs = run.checkpoint.in_pairs and not is_file(folder / RESULTS)
    if known and known.id == identity:
        in_pairs = known.in_pairs
    about = Record(label=run.label, id=identity, error=error, parameters=parameters, in_pairs=in_pairs, **where)
    # A failure is written again: waiting processes see by its time that it is a new one
    if known and not error and known.model_copy(update={"written": ""}) == about:
        return
    about = about.model_copy(update={"written": datetime.now(UTC).isoformat(timespec="milliseconds")})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(about.model_dump(), indent=2).encode())
    except OSError as failure:
        raise RunError(f"{path} cannot be written ({failure.strerror or failure})") from failure


def record_of(root: Path, run: StudyRun) -> Record | None:
    """Return the record of a run; None if it has none, or a damaged one."""
    return _read(root / _RECORDS / f"{run.key}.json")


def recorded_checkpoints(root: Path, place: str) -> frozenset[str]:
    """Return the checkpoints with a finished run, of studies in one folder (`place`), relative to the study files."""
    records = [record for path in (root / _RECORDS).glob("*.json") if (record := _read(path)) and record.place == place]
    finished = (record.checkpoint for record in records if (root / record.folder / RESULTS).is_file())
    return frozenset(checkpoint for checkpoint in finished if checkpoint)


def _read(path: Path) -> Record | None:
    with suppress(RunError):
        record = restored(read_json(path, RunError, most=_LARGEST), Record)
        return None if record is None or "/" in record.folder else record
    return None


def finished_run_of(study: Study, run: StudyRun) -> Run | None:
    """Return the finished run of a study, or None; raise `RunError` if its folder is damaged."""
    record = record_of(study.output, run)
    return None if record is None else finished_in(study.output / record.folder, record.id)


def finished_in(folder: Path, identity: str) -> Run | None:
    """Return the finished run of an id in a folder, or None; raise `RunError` if the folder is damaged."""
    run = load_run(folder) if is_file(folder / RESULTS) else None
    return run if run is not None and run.complete and run.manifest["id"] == identity else None
