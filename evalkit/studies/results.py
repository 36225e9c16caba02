"""Results of a study: its finished runs, by checkpoint and benchmark.

In: a study file. Out: a `StudyResults`. Runs are found by their records (`records.py`), so that neither checkpoints nor
torch are needed. Where the checkpoint is on this machine, a run of other files than it has now is reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from evalkit.display import doing
from evalkit.errors import EvalkitError, UsageError
from evalkit.escape import printable
from evalkit.models.fingerprint import fingerprint, known_fingerprint
from evalkit.models.spec import ModelSpec, model_spec
from evalkit.runs.folder import Run
from evalkit.studies.records import finished_run_of, record_of, recorded_checkpoints
from evalkit.studies.study import Selected, Study, StudyBenchmark, StudyCheckpoint, StudyRun
from evalkit.studies.study_file import read_study


def change_of(run: Run, checkpoint: StudyCheckpoint) -> str:
    """Describe how a checkpoint's files differ from the run's; empty if they do not, or if none is on this machine."""
    spec = model_spec(checkpoint.model, **checkpoint.options)
    here, evaluated = Path(spec.model).expanduser(), run.manifest.get("path")
    if spec.model == "demo" or not here.exists():
        return ""
    # Two studies can have checkpoints of one name in different folders
    elsewhere = evaluated is not None and Path(evaluated).exists() and not here.samefile(evaluated)
    recorded = run.manifest["specification"]["checkpoint"]
    changed = [part for part, digest in _known(spec, elsewhere).items() if recorded.get(part, digest) != digest]
    return f"{checkpoint.given} has other files than this run's ({', '.join(changed)})" if changed else ""


def _known(spec: ModelSpec, unhashed: bool) -> dict[str, str]:
    """Return part → digest, as far as known without the network; empty for a folder that is not complete any more.

    Args:
        spec: the model.
        unhashed: whether to read weights that were never hashed on this machine.
    """
    own = spec.tokenizer is None or Path(spec.tokenizer).expanduser().is_dir()
    try:
        checkpoint = (spec if own else replace(spec, tokenizer=None)).locate()
        found = asdict(fingerprint(checkpoint)) if unhashed else known_fingerprint(checkpoint)
    except EvalkitError:
        return {}
    return found if own else {part: digest for part, digest in found.items() if part != "tokenizer"}


class StudyResults:
    """The finished runs of a study; each is opened once."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self._runs: dict[str, Run | None] = {}
        self._changes: dict[str, str] = {}

    def run(self, checkpoint: StudyCheckpoint, benchmark: StudyBenchmark) -> Run | None:
        """Return the finished run of a checkpoint on a benchmark; None if there is none.

        Raises:
            RunError: its folder is damaged.
        """
        asked = StudyRun(checkpoint, benchmark)
        if asked.key not in self._runs:
            self._runs[asked.key] = finished_run_of(self.study, asked)
        return self._runs[asked.key]

    def runs(self, checkpoints: Iterable[StudyCheckpoint], benchmark: StudyBenchmark) -> tuple[Run, ...]:
        """Return the finished runs of checkpoints on a benchmark, in their order."""
        found = (self.run(one, benchmark) for one in checkpoints)
        return tuple(run for run in found if run is not None)

    def missing(self, checkpoints: Iterable[StudyCheckpoint], benchmark: StudyBenchmark) -> list[StudyRun]:
        """Return the runs of checkpoints on a benchmark that are not finished."""
        return [StudyRun(one, benchmark) for one in checkpoints if self.run(one, benchmark) is None]

    def require(self, checkpoints: Iterable[StudyCheckpoint], benchmark: StudyBenchmark) -> None:
        """Raise `UsageError` if a run of these checkpoints is not finished; names all of them."""
        if missing := self.missing(checkpoints, benchmark):
            verb = "is" if len(missing) == 1 else "are"
            raise UsageError(
                f"{', '.join(map(self.described, missing))} {verb} not finished; run {self.remedy}, which computes "
                "what is missing"
            )

    def unfinished(self, checkpoints: Iterable[StudyCheckpoint], benchmark: StudyBenchmark) -> list[str]:
        """Return a sentence that names the runs that are not finished, if there are any."""
        missing = [self.described(one) for one in self.missing(checkpoints, benchmark)]
        return [f"Not finished: {', '.join(missing)}."] if missing else []

    def described(self, missing: StudyRun) -> str:
        """Return the name of a run that is not finished, with the error that ended it if one did."""
        record = record_of(self.study.output, missing)
        return missing.label + (f" ({printable(record.error)})" if record is not None and record.error else "")

    @property
    def remedy(self) -> str:
        """The command that computes missing runs."""
        return printable(f"evalkit study run {self.study.path}")

    def changes(self, checkpoints: Iterable[StudyCheckpoint], benchmark: StudyBenchmark) -> list[str]:
        """Return a sentence for each finished run of other files than its checkpoint has now."""
        found = []
        for one in checkpoints:
            if (run := self.run(one, benchmark)) is None:
                continue
            key = StudyRun(one, benchmark).key
            if key not in self._changes:
                with doing(f"comparing {one.label} with its run"):
                    self._changes[key] = change_of(run, one)
            if what := self._changes[key]:
                found.append(f"{one.label}: {what}; {self.remedy} evaluates it.")
        return found


def read_results(path: Path) -> StudyResults:
    """Read a study and open its results.

    Raises:
        UsageError: the study file is invalid, or neither its checkpoints nor records of them exist.
    """
    return StudyResults(read_study(path, recorded_checkpoints))


def steps_note(found: Sequence[Selected]) -> list[str]:
    """Return a sentence with the training steps of models, if any has steps."""
    listed = [f"{one.name} {one.step:,}" for one in found if one.step is not None]
    return [f"Training steps: {', '.join(listed)}."] if listed else []
