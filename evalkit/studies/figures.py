"""Runs of a study's figures.

In: a study's results, and names as on the command line. Out: its finished analyses of attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evalkit.benchmarks.attention import ATTENTION
from evalkit.errors import UsageError
from evalkit.runs.folder import Run
from evalkit.studies.results import StudyResults, steps_note
from evalkit.studies.selection import select
from evalkit.studies.study import Study, StudyBenchmark


@dataclass(frozen=True)
class StudyAnalyses:
    """Finished analyses of a study."""

    runs: tuple[Run, ...]
    names: tuple[str, ...]
    """Model of each, with its seed where it has several."""
    notes: tuple[str, ...]
    """Steps of the models, runs that are not finished, and checkpoints that have changed since."""


def study_analyses(results: StudyResults, names: Sequence[str], benchmark: str | None) -> StudyAnalyses:
    """Return the finished analyses of a study's models, one of each seed.

    Args:
        results: of the study.
        names: NAME or NAME@STEP; empty: every model, at its last step.
        benchmark: name of the study's benchmark; None: the only one that analyses attention.

    Raises:
        UnknownNameError: an unknown name.
        UsageError: no benchmark analyses attention, several do and none is named, or no run is finished.
    """
    study = results.study
    chosen = _benchmark(study, benchmark)
    selected = [select(study, name) for name in names or study.names]
    checkpoints = [one for model in selected for one in model.checkpoints]
    labels = [label for model in selected for label in model.labels]
    if names:
        results.require(checkpoints, chosen)
    found = [(run, label) for one, label in zip(checkpoints, labels, strict=True) if (run := results.run(one, chosen))]
    if not found:
        raise UsageError(f"study {study.path}: no run of {chosen.name} is finished; run {results.remedy}")
    notes = (
        *steps_note(selected),
        *results.unfinished(checkpoints, chosen),
        *results.changes(checkpoints, chosen),
    )
    return StudyAnalyses(tuple(run for run, _ in found), tuple(label for _, label in found), notes)


def _benchmark(study: Study, given: str | None) -> StudyBenchmark:
    if given is not None:
        named = study.benchmark(given)
        if named.kind != ATTENTION:
            raise UsageError(f"study {study.path}: benchmark {given} is of {named.kind}; figures are of {ATTENTION}")
        return named
    fitting = [one for one in study.benchmarks if one.kind == ATTENTION]
    if not fitting:
        raise UsageError(
            f"study {study.path}: no benchmark analyses attention; add one, such as 'benchmarks: {{attention: {{suite: "
            "attention}}}'"
        )
    if len(fitting) > 1:
        known = " | ".join(one.name for one in fitting)
        raise UsageError(f"study {study.path} has several benchmarks of attention: give --benchmark {known}")
    return fitting[0]
