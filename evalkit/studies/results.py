"""Results of a study: its finished runs, by checkpoint and benchmark.

In: a study file. Out: a `StudyResults`. Runs are found by their records (`records.py`), so that neither checkpoints nor
torch are needed. Where the checkpoint is on this machine, a run of other files than it has now is reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from evalkit.activity import doing
from evalkit.errors import UsageError
from evalkit.reporting.escape import printable
from evalkit.runs.folder import Run
from evalkit.studies.changes import change_of
from evalkit.studies.records import finished_run_of, record_of, recorded_checkpoints
from evalkit.studies.selection import Selected
from evalkit.studies.study import Study, StudyBenchmark, StudyCheckpoint, StudyRun
from evalkit.studies.study_file import read_study


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
