"""Results of a study: its finished runs, and what is compared, by the names of its models.

In: a study file, and names as on the command line. Out: a `StudyResults`; the sides of a comparison and the
trainings of a curve, with notes about them. Runs are found by their records, so that neither checkpoints nor torch are
needed. Where the checkpoint is on this machine, a run of other files than it has now is reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from evalkit.comparison.sides import Side, check_unique
from evalkit.display import doing
from evalkit.errors import EvalkitError, UnknownNameError, UsageError
from evalkit.escape import printable
from evalkit.models.loading.fingerprint import fingerprint, known_fingerprint
from evalkit.models.loading.spec import model_spec
from evalkit.runs.folder import Run
from evalkit.studies.study import (
    Selected,
    Study,
    StudyBenchmark,
    StudyCheckpoint,
    StudyRun,
    finished_run_of,
    record_of,
    select,
    trainings,
)
from evalkit.studies.study_file import read_study


class StudyResults:
    """The finished runs of a study; each is opened once."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self.remedy = printable(f"evalkit study run {study.path}")
        """The command that computes missing runs."""
        self._runs: dict[str, Run | None] = {}

    def run(self, checkpoint: StudyCheckpoint, benchmark: StudyBenchmark) -> Run | None:
        """Return the finished run of a checkpoint on a benchmark, or None; raise `RunError` if it is damaged."""
        asked = StudyRun(checkpoint, benchmark)
        if asked.key not in self._runs:
            self._runs[asked.key] = finished_run_of(self.study, asked)
        return self._runs[asked.key]

    def runs(self, checkpoints: Iterable[StudyCheckpoint], benchmark: StudyBenchmark) -> tuple[Run, ...]:
        """Return the finished runs of checkpoints on a benchmark, in their order."""
        return tuple(run for checkpoint in checkpoints if (run := self.run(checkpoint, benchmark)) is not None)

    def missing(self, checkpoints: Iterable[StudyCheckpoint], benchmark: StudyBenchmark) -> list[StudyCheckpoint]:
        """Return the checkpoints whose run on a benchmark is not finished."""
        return [checkpoint for checkpoint in checkpoints if self.run(checkpoint, benchmark) is None]

    def unfinished(self, checkpoints: Iterable[StudyCheckpoint], benchmark: StudyBenchmark) -> list[str]:
        """Return a sentence that names the runs that are not finished, with the errors that ended them, if any.

        Checkpoints that do not run on the benchmark are not in it.
        """
        names, known = [], self.study.names_on(benchmark)
        checkpoints = [checkpoint for checkpoint in checkpoints if checkpoint.name in known]
        for missing in (StudyRun(checkpoint, benchmark) for checkpoint in self.missing(checkpoints, benchmark)):
            record = record_of(self.study.output, missing)
            error = f" ({printable(record.error)})" if record and record.error else ""
            names.append(f"{missing.label}{error}")
        return [f"Not finished: {', '.join(names)}."] if names else []

    def require(self, checkpoints: Sequence[StudyCheckpoint], benchmark: StudyBenchmark) -> None:
        """Raise `UsageError` if a run of these checkpoints is not finished, or is none of the study's; names all."""
        known = self.study.names_on(benchmark)
        if other := next((checkpoint.name for checkpoint in checkpoints if checkpoint.name not in known), None):
            raise UnknownNameError(f"checkpoint of benchmark {benchmark.name} of study {self.study.path}", other, known)
        for sentence in self.unfinished(checkpoints, benchmark):
            raise UsageError(f"study {self.study.path}: {sentence.rstrip('.')}; run {self.remedy}")

    def pairs_note(self, checkpoints: Sequence[StudyCheckpoint], benchmark: StudyBenchmark) -> list[str]:
        """Return a sentence that says when seeds were declared as pairs, of a study that declares it."""
        if not self.study.pair_seeds or all(checkpoint.seed is None for checkpoint in checkpoints):
            return []
        records = [record_of(self.study.output, StudyRun(checkpoint, benchmark)) for checkpoint in checkpoints]
        if all(record is not None and record.in_pairs for record in records):
            return ["Seeds in pairs: recorded by the study before these runs had results."]
        return ["Seeds in pairs: declared when a run had results already, so results may have suggested it."]

    def changes(self, checkpoints: Iterable[StudyCheckpoint], benchmark: StudyBenchmark) -> list[str]:
        """Return a sentence for each finished run of other files than its checkpoint has now."""
        sentences = []
        for checkpoint in checkpoints:
            if (run := self.run(checkpoint, benchmark)) is not None:
                with doing(f"comparing {checkpoint.label} with its run"):
                    what = _change_of(run, checkpoint)
                sentences += [f"{checkpoint.label}: {what}; {self.remedy} evaluates it."] if what else []
        return sentences


def read_results(path: Path, root: Path | None = None) -> StudyResults:
    """Read a study and open its results; raises as `read_study`."""
    return StudyResults(read_study(path, root))


def _change_of(run: Run, checkpoint: StudyCheckpoint) -> str:
    """Describe how a checkpoint's files differ from the run's; empty if they do not, or if none is on this machine."""
    spec = model_spec(checkpoint.model, **checkpoint.options)
    here, evaluated = Path(spec.model).expanduser(), run.manifest.get("path")
    if spec.model == "demo" or not here.exists():
        return ""
    # Two studies can have checkpoints of one name in different folders, whose weights were perhaps never hashed here
    elsewhere = evaluated is not None and Path(evaluated).exists() and not here.samefile(evaluated)
    has_tokenizer = spec.tokenizer is None or Path(spec.tokenizer).expanduser().is_dir()
    try:
        known = (spec if has_tokenizer else replace(spec, tokenizer=None)).locate()
        digests = asdict(fingerprint(known)) if elsewhere else dict(known_fingerprint(known))  # without the network
    except EvalkitError:  # a folder that is not complete any more
        return ""
    if not has_tokenizer:
        digests.pop("tokenizer", None)
    recorded = run.manifest["specification"]["checkpoint"]
    changed = [part for part, digest in digests.items() if recorded.get(part, digest) != digest]
    return f"{checkpoint.given} has other files than this run's ({', '.join(changed)})" if changed else ""


def steps_note(models: Sequence[Selected]) -> list[str]:
    """Return a sentence with the training steps of models, if any has steps."""
    listed = [f"{model.name} {model.step:,}" for model in models if model.step is not None]
    return [f"Training steps: {', '.join(listed)}."] if listed else []


@dataclass(frozen=True)
class StudySides:
    """Models of a study as sides; the first is the baseline."""

    sides: tuple[Side, ...]
    notes: tuple[str, ...]
    """Steps of the models, runs that are not finished, and checkpoints that have changed since."""


def study_sides(results: StudyResults, names: Sequence[str], benchmark: StudyBenchmark, last: int = 1) -> StudySides:
    """Return the sides of a comparison, by NAME or NAME@STEP; by default every model. Seeds are runs of one side.

    With `last`, the mean over the last checkpoints of each seed is its score.

    Raises:
        UsageError: fewer than two sides, an unknown name, or a run that is not finished; names all such runs.
    """
    study = results.study
    known = study.names_on(benchmark)
    chosen = [select(study, name, last) for name in names or known]
    if len(chosen) < 2:
        raise UsageError(
            f"there is nothing to compare {chosen[0].name} with; name two checkpoints or more of study {study.path}: "
            f"{', '.join(known)}"
        )
    checkpoints = [checkpoint for model in chosen for checkpoint in model.checkpoints]
    results.require(checkpoints, benchmark)
    sides = tuple(Side(model.name, results.runs(model.checkpoints, benchmark), each=last) for model in chosen)
    check_unique(sides)
    declared = results.pairs_note(checkpoints, benchmark)
    return StudySides(sides, (*steps_note(chosen), *declared, *results.changes(checkpoints, benchmark)))


def finished_sides(results: StudyResults, models: Sequence[Selected], benchmark: StudyBenchmark) -> list[Side]:
    """Return a side for each model with a finished run, of its finished seeds."""
    sides = []
    for model in models:
        marks = (label.removeprefix(model.name) for label in model.labels)
        runs = (results.run(checkpoint, benchmark) for checkpoint in model.checkpoints)
        finished = {mark: run for mark, run in zip(marks, runs, strict=True) if run is not None}
        sides += [Side(model.name, tuple(finished.values()), tuple(finished))] if finished else []
    return sides


@dataclass(frozen=True)
class StudyTraining:
    """One training of a study: a seed of a model with steps."""

    side: Side
    steps: tuple[int, ...]
    notes: tuple[str, ...]
    """Steps that are not finished, and checkpoints that have changed since."""
    model: str = ""
    """The name that its seeds share."""
    seed: int | None = None
    """Its number; None for a model with a single one."""


def study_trainings(results: StudyResults, names: Sequence[str], benchmark: StudyBenchmark) -> list[StudyTraining]:
    """Return the trainings of a curve, one for each seed; steps that are not finished are left out with a note.

    Raises:
        UsageError: an unknown name, a model without steps, or a training of which fewer than two runs are finished.
    """
    study = results.study
    with_steps = {checkpoint.name for checkpoint in study.checkpoints if checkpoint.step is not None}
    if not (chosen := names or [name for name in study.names_on(benchmark) if name in with_steps]):
        raise UsageError(f"study {study.path}: no checkpoint has 'steps', so there is no curve")
    curves = []
    for model, (name, checkpoints) in ((of, seed) for of in chosen for seed in trainings(study, of)):
        missing = results.missing(checkpoints, benchmark)
        done = [checkpoint for checkpoint in checkpoints if checkpoint not in missing]
        if len(done) < 2:
            results.require(missing, benchmark)
        notes = results.changes(done, benchmark)
        if missing:
            lacking = ", ".join(f"{checkpoint.step:,}" for checkpoint in missing)
            notes = [f"{name}: not finished: {'step' if len(missing) == 1 else 'steps'} {lacking}.", *notes]
        steps = tuple(checkpoint.step for checkpoint in done if checkpoint.step is not None)
        side = Side(name, results.runs(done, benchmark))
        curves.append(StudyTraining(side, steps, tuple(notes), printable(model), checkpoints[0].seed))
    check_unique([training.side for training in curves])
    return curves
