"""Sides of a comparison and trainings of a curve, by a study's names.

In: a study's results, and names as on the command line. Out: `Side`s of finished runs, and notes about them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evalkit.benchmarks.attention import ATTENTION
from evalkit.comparison.sides import Side, check_unique
from evalkit.errors import UsageError
from evalkit.runs.folder import Run
from evalkit.studies.results import StudyResults, steps_note
from evalkit.studies.study import Study, StudyBenchmark, select, trainings


@dataclass(frozen=True)
class StudySides:
    """Models of a study as sides; the first is the baseline."""

    sides: tuple[Side, ...]
    notes: tuple[str, ...]
    """Steps of the models, and checkpoints that have changed since."""


@dataclass(frozen=True)
class StudyTraining:
    """One training of a study: a seed of a model with steps."""

    side: Side
    """Its finished runs."""
    steps: tuple[int, ...]
    """Step of each."""
    notes: tuple[str, ...]
    """Steps that are not finished, and checkpoints that have changed since."""


def study_sides(results: StudyResults, names: Sequence[str], benchmark: StudyBenchmark) -> StudySides:
    """Return the sides of a comparison: a model's seeds are the runs of its side.

    Args:
        results: of the study.
        names: NAME or NAME@STEP of each side; empty: every model.
        benchmark: whose runs are compared.

    Raises:
        UsageError: fewer than two sides, an unknown name, or a run that is not finished; names all such runs.
    """
    chosen = [select(results.study, name) for name in names or results.study.names]
    if len(chosen) < 2:
        raise UsageError(
            f"there is nothing to compare {chosen[0].name} with; name two checkpoints or more of study "
            f"{results.study.path}: {', '.join(results.study.names)}"
        )
    checkpoints = [checkpoint for one in chosen for checkpoint in one.checkpoints]
    results.require(checkpoints, benchmark)
    sides = tuple(Side(one.name, results.runs(one.checkpoints, benchmark)) for one in chosen)
    check_unique(sides)
    return StudySides(sides, (*steps_note(chosen), *results.changes(checkpoints, benchmark)))


def study_trainings(results: StudyResults, names: Sequence[str], benchmark: StudyBenchmark) -> list[StudyTraining]:
    """Return the trainings of a curve, one for each seed; steps that are not finished are left out with a note.

    Args:
        results: of the study.
        names: names of models; empty: every model with steps.
        benchmark: whose runs are points.

    Raises:
        UsageError: an unknown name, a model without steps, or a training with fewer than two finished runs.
    """
    study = results.study
    with_steps = dict.fromkeys(one.name for one in study.checkpoints if one.step is not None)
    if not (chosen := names or list(with_steps)):
        raise UsageError(f"study {study.path}: no checkpoint has 'steps', so there is no curve")
    found = []
    for name, checkpoints in (one for given in chosen for one in trainings(study, given)):
        missing = [one for one in checkpoints if results.run(one, benchmark) is None]
        done = [one for one in checkpoints if one not in missing]
        if len(done) < 2:
            results.require(missing, benchmark)
            raise UsageError(f"study {study.path}: {name} has one step; a curve needs two or more")
        lacking = ", ".join(f"{one.step:,}" for one in missing)
        notes = (
            *([f"{name}: not finished: {'step' if len(missing) == 1 else 'steps'} {lacking}."] if missing else []),
            *results.changes(done, benchmark),
        )
        steps = tuple(one.step for one in done if one.step is not None)
        found.append(StudyTraining(Side(name, results.runs(done, benchmark)), steps, notes))
    check_unique([one.side for one in found])
    return found


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
