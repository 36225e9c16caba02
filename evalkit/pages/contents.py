"""Contents of a page: which runs it shows, under which names, and what is compared.

In: finished runs and groups, or the finished runs of a study. Out: `PageContents`. Runs of different suites share a
page; compared are those of one suite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from evalkit.benchmarks.registry import benchmark_of
from evalkit.comparison.sides import Side, check_unique, named_sides, names
from evalkit.errors import EvalkitError, UsageError
from evalkit.escape import counted
from evalkit.runs.folder import Run
from evalkit.runs.outcomes import with_default_rule
from evalkit.studies.results import StudyResults
from evalkit.studies.sides import StudyTraining
from evalkit.studies.study import Selected, StudyBenchmark, select, trainings


@dataclass(frozen=True)
class PageComparison:
    """Sides that are compared; the first is the baseline."""

    title: str
    """The suite, or the benchmark of a study."""
    sides: tuple[Side, ...]
    rule: str | None = None
    """None: the runs' own."""
    trainings: tuple[StudyTraining, ...] = ()
    """Trainings with two finished steps or more, drawn as curves."""


@dataclass(frozen=True)
class PageContents:
    """What a page shows."""

    runs: tuple[Run, ...]
    names: tuple[str, ...]
    """One for each run, unique."""
    comparisons: tuple[PageComparison, ...]
    notes: tuple[str, ...] = ()
    """For readers of the page: what is not finished, and checkpoints that have changed since."""


def contents_of_runs(
    singles: Sequence[Run],
    groups: Sequence[tuple[str, Sequence[Run]]] = (),
    rule: str | None = None,
    given_names: Sequence[str] = (),
) -> PageContents:
    """Return the contents of a page of runs.

    Args:
        singles: runs, each a side of a comparison.
        groups: name → the runs of one side.
        rule: scoring rule or measure of comparisons, where the runs have it; None: the runs' own.
        given_names: a name for each of `singles`; empty: from the runs.

    Raises:
        UsageError: no run, a run that is named twice, names that do not fit, or a rule that no run has.
        RunError: a run is not finished.
    """
    runs = [*singles, *(run for _, members in groups for run in members)]
    if not runs:
        raise UsageError("name the runs of the report: evalkit report RUN -o report.html (evalkit ls runs lists them)")
    for run in runs:
        run.require_finished()
    if given_names and len(given_names) != len(singles):
        raise UsageError(
            f"--names has {counted(len(given_names), 'name')} for {counted(len(singles), 'run')}; give one for each run"
        )
    own = list(given_names) or _own_names(singles)
    sides = named_sides(own, singles, groups)
    check_unique(sides)
    shown = [*own, *(f"{name} {number}" for name, members in groups for number in range(1, len(members) + 1))]
    if twice := [name for place, name in enumerate(shown) if name in shown[:place]]:
        raise UsageError(f"two runs are called '{twice[0]}'; give the groups or the runs other names")
    rules = _rules(runs, rule)
    compared = [
        PageComparison(suite, tuple(_without(sides[place], f" on {suite}") for place in places), rules[kind])
        for (kind, suite), places in places_by_suite([side.runs[0] for side in sides]).items()
        if len(places) > 1
    ]
    return PageContents(tuple(runs), tuple(shown), tuple(compared))


def places_by_suite(runs: Sequence[Run]) -> dict[tuple[str, str], list[int]]:
    """Return (kind, suite) → places of its runs, in the order of the first of each."""
    found: dict[tuple[str, str], list[int]] = {}
    for place, run in enumerate(runs):
        found.setdefault((run.kind, run.suite), []).append(place)
    return found


def _without(side: Side, ending: str) -> Side:
    """Return a side without the suite in its name, which the title of a comparison has."""
    return replace(side, name=side.name.removesuffix(ending))


def _own_names(runs: Sequence[Run]) -> list[str]:
    """Return a name for each run, which tells it from others of its suite; with its suite where suites share names."""
    found = [""] * len(runs)
    for places in places_by_suite(runs).values():
        for place, name in zip(places, names([runs[place] for place in places]), strict=True):
            found[place] = name
    if len(set(found)) == len(found):
        return found
    return [f"{name} on {run.suite}" for name, run in zip(found, runs, strict=True)]


def _rules(runs: Sequence[Run], rule: str | None) -> dict[str, str | None]:
    """Return kind of run → the requested rule, None for kinds that do not have it."""
    found: dict[str, str | None] = dict.fromkeys((run.kind for run in runs), None)
    if rule is None:
        return found
    problems = []
    for run in {run.kind: run for run in runs}.values():
        try:
            benchmark_of(run).comparable(run).measure(rule)
        except EvalkitError as error:
            problems.append(str(error))
        else:
            found[run.kind] = rule
    if not any(found.values()):
        raise UsageError(f"--rule {rule}: {problems[0]}")
    return found


def contents_of_study(
    results: StudyResults, chosen: Sequence[str] = (), benchmark: str | None = None, rule: str | None = None
) -> PageContents:
    """Return the contents of a page of a study's finished runs; what is not finished is named in the notes.

    Args:
        results: of the study.
        chosen: NAME or NAME@STEP; empty: every model, at its last step.
        benchmark: name of a benchmark; None: all.
        rule: scoring rule of comparisons; None: the benchmark's.

    Raises:
        UnknownNameError: an unknown name.
        UsageError: no run is finished, or one is named twice.
    """
    study = results.study
    benchmarks = [study.benchmark(benchmark)] if benchmark else list(study.benchmarks)
    parts = [_of_benchmark(results, chosen, one, rule, len(benchmarks) > 1) for one in benchmarks]
    if not any(part.runs for part in parts):
        raise UsageError(f"study {study.path}: no run is finished; run {results.remedy}")
    return PageContents(
        tuple(run for part in parts for run in part.runs),
        tuple(name for part in parts for name in part.names),
        tuple(one for part in parts for one in part.comparisons),
        tuple(dict.fromkeys(note for part in parts for note in part.notes)),
    )


def _of_benchmark(
    results: StudyResults, chosen: Sequence[str], benchmark: StudyBenchmark, rule: str | None, several: bool
) -> PageContents:
    study = results.study
    models = [select(study, name) for name in chosen or study.names]
    suffix = f" on {benchmark.name}" if several else ""
    runs, shown, sides = [], [], []
    for model in models:
        pairs = zip(model.checkpoints, model.labels, strict=True)
        found = [(run, label) for one, label in pairs if (run := results.run(one, benchmark)) is not None]
        runs += [run for run, _ in found]
        shown += [f"{label}{suffix}" for _, label in found]
        if found:
            sides.append(Side(model.name, tuple(run for run, _ in found)))
    check_unique(sides)
    checkpoints = [one for model in models for one in model.checkpoints]
    notes = [*results.unfinished(checkpoints, benchmark), *results.changes(checkpoints, benchmark)]
    comparisons = []
    curves = _trainings(results, models, benchmark)
    if len(sides) > 1 or curves:
        comparisons.append(
            PageComparison(benchmark.name, tuple(sides), with_default_rule(rule, benchmark.rule), tuple(curves))
        )
    return PageContents(tuple(runs), tuple(shown), tuple(comparisons), tuple(notes))


def _trainings(results: StudyResults, models: Sequence[Selected], benchmark: StudyBenchmark) -> list[StudyTraining]:
    """Return the trainings of models that have two finished steps or more."""
    found = []
    chosen = [one for model in models for one in model.checkpoints]
    with_steps = dict.fromkeys(one.name for one in chosen if one.step is not None)
    for model in with_steps:
        for name, checkpoints in trainings(results.study, model):
            done = [one for one in checkpoints if results.run(one, benchmark) is not None]
            if len(done) > 1:
                steps = tuple(one.step for one in done if one.step is not None)
                found.append(StudyTraining(Side(name, results.runs(done, benchmark)), steps, ()))
    return found
