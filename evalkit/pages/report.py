"""`evalkit report`: finished runs → one HTML file.

In: runs, or a study's, as `PageContents`. Out: the file. Static parts are `Panel`s: those of `overview.py`, and the
comparisons of runs of one suite; documents are blocks (`documents.py`); `page.py` turns both into HTML.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from errno import EISDIR
from functools import partial
from pathlib import Path

from evalkit import __version__
from evalkit.benchmarks.outcomes import Comparable
from evalkit.benchmarks.registry import results_of
from evalkit.cache import remembering
from evalkit.comparison.comparison import compare_pairing, decided_together, rule_of, subject_differences
from evalkit.comparison.comparison_report import comparison_report
from evalkit.comparison.curves import Curve, curve, curve_report
from evalkit.comparison.differences import UNDECIDED, Comparison
from evalkit.comparison.pairing import PairedTask, Pairing, pair
from evalkit.comparison.sentences import headline, p_text, unit_of
from evalkit.comparison.sides import Group, Side, check_unique, names, sides_of
from evalkit.data.sampling import DocumentSample
from evalkit.display import doing
from evalkit.errors import EvalkitError, RunError, UsageError
from evalkit.escape import counted, printable
from evalkit.pages.documents import document_data
from evalkit.pages.overview import by_suite, figure_panels, result_panels, sources_panel
from evalkit.pages.page import Page, PageFigure, Panel, svg_of, write_page
from evalkit.pages.tables import PageBenchmark
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.runs.continuous import with_default_rule
from evalkit.runs.folder import Run
from evalkit.studies.results import StudyResults, StudyTraining, finished_sides
from evalkit.studies.study import StudyBenchmark, StudyCheckpoint, select, trainings


@dataclass(frozen=True)
class PageContents:
    """What a page shows."""

    benchmarks: tuple[PageBenchmark, ...]
    title: str = ""
    """By default the names of the runs."""
    notes: tuple[str, ...] = ()
    """For readers of the page: what is not finished, and checkpoints that have changed since."""


def contents_of_runs(
    singles: Sequence[Run], groups: Sequence[Group] = (), rule: str | None = None, given_names: Sequence[str] = ()
) -> PageContents:
    """Return the contents of a page of finished runs, `singles` and named groups, each a side of comparisons.

    `rule` is a scoring rule or measure, for the runs that have it, by default their own.
    `given_names` are those of the singles.
    """
    runs = [*singles, *(run for _, members in groups for run in members)]
    if not runs:
        raise UsageError("name the runs of the report: evalkit report RUN -o report.html (evalkit ls runs lists them)")
    for run in runs:
        run.require_finished()
    if given_names and len(given_names) != len(singles):
        given, needed = counted(len(given_names), "name"), counted(len(singles), "run")
        raise UsageError(f"--names has {given} for {needed}; give one for each run")
    named = list(given_names) or _own_names(singles)
    sides = sides_of(singles, groups, named)
    shown = [[f"{side.name}{mark}" for mark in side.marks] for side in sides]
    every = [name for of_side in shown for name in of_side]
    if twice := [name for name in every if every.count(name) > 1]:
        raise UsageError(f"two runs are called '{twice[0]}'; give the groups or the runs other names")
    rules, benchmarks = _rules(runs, rule), []
    for (kind, suite), numbers in by_suite([side.runs[0] for side in sides]).items():
        # The title has the suite
        members = (replace(sides[number], name=sides[number].name.removesuffix(f" on {suite}")) for number in numbers)
        of_runs = tuple(name for number in numbers for name in shown[number])
        benchmarks.append(PageBenchmark(suite, tuple(members), of_runs, rules[kind]))
    return PageContents(tuple(benchmarks))


def _own_names(runs: Sequence[Run]) -> list[str]:
    """Return a name for each run, unique in its suite; with its suite where suites share names."""
    short = dict[int, str]()
    for numbers in by_suite(runs).values():
        short |= zip(numbers, names([runs[number] for number in numbers]), strict=True)
    several = len(set(short.values())) < len(short)
    return [short[number] + f" on {run.suite}" * several for number, run in enumerate(runs)]


def _rules(runs: Sequence[Run], rule: str | None) -> dict[str, str | None]:
    """Return kind of run → the requested rule, None for kinds that do not have it; a `UsageError` if none has it."""
    by_kind: dict[str, str | None] = dict.fromkeys(run.kind for run in runs)
    problems = []
    for kind, run in {run.kind: run for run in runs}.items() if rule is not None else ():
        try:
            results_of(run).comparable().measure(str(rule))
            by_kind[kind] = rule
        except EvalkitError as error:
            problems.append(str(error))
    if len(problems) == len(by_kind):
        raise UsageError(f"--rule {rule}: {problems[0]}")
    return by_kind


def contents_of_study(
    results: StudyResults, chosen: Sequence[str] = (), benchmark: str | None = None, rule: str | None = None
) -> PageContents:
    """Return the contents of a page of a study's finished runs; what is not finished is named in the notes.

    `chosen` are NAME or NAME@STEP, by default every model at its last step; of one benchmark or all.
    """
    study = results.study
    benchmarks = [study.benchmark(benchmark)] if benchmark else list(study.benchmarks)
    models = [select(study, name) for name in chosen or study.names]
    checkpoints = [checkpoint for model in models for checkpoint in model.checkpoints]
    pages, notes = list[PageBenchmark](), list[str]()
    for each in benchmarks:
        suffix = f" on {each.name}" if len(benchmarks) > 1 else ""
        sides = finished_sides(results, models, each)
        check_unique(sides)
        names = [f"{side.name}{mark}{suffix}" for side in sides for mark in side.marks]
        notes += [*results.unfinished(checkpoints, each), *results.changes(checkpoints, each)]
        notes += results.pairs_note(checkpoints, each)
        curves = tuple(_trainings(results, checkpoints, each))
        key = with_default_rule(rule, each.rule)
        pages.append(PageBenchmark(each.name, tuple(sides), tuple(names), key, curves, study.pair_seeds))
    if not any(page.sides for page in pages):
        raise UsageError(f"study {study.path}: no run is finished; run {results.remedy}")
    title = study.path.resolve().parent.name if study.path.stem == "study" else study.path.stem
    return PageContents(tuple(pages), title, tuple(dict.fromkeys(notes)))


def _trainings(
    results: StudyResults, checkpoints: Sequence[StudyCheckpoint], benchmark: StudyBenchmark
) -> Iterator[StudyTraining]:
    for model in dict.fromkeys(checkpoint.name for checkpoint in checkpoints if checkpoint.step is not None):
        for name, of_training in trainings(results.study, model):
            steps = [each.step for each in of_training if results.run(each, benchmark) and each.step is not None]
            if len(steps) > 1:
                side = Side(name, results.runs(of_training, benchmark))
                yield StudyTraining(side, tuple(steps), (), printable(model))


def write_report(
    contents: PageContents,
    path: Path,
    say: Callable[[str], None],
    *,
    title: str | None = None,
    with_documents: bool = True,
    sample: DocumentSample | None = None,
) -> int:
    """Write the page of finished runs, and return its size in bytes.

    The title is by default that of the contents; `sample` says which documents of each task are shown, by default all.
    That the file cannot be at this path raises `UsageError` before the runs are read.
    """
    runs = [run for each in contents.benchmarks for run in each.runs]
    names, documents = [name for each in contents.benchmarks for name in each.names], None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(EISDIR, "it is a folder")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}; name another file") from error
    with remembering():
        with doing("results"):
            panels = [result_panels(each, number) for number, each in enumerate(contents.benchmarks, 1)]
            # Runs of two benchmarks are no seeds of each other
            several = len(contents.benchmarks) > 1
            sides = [(side, each.title) for each in contents.benchmarks for side in each.sides for _ in side.runs]
            models = [f"{side.name} on {title}" if several else side.name for side, title in sides]
            figures = figure_panels(runs, names, models)
        with doing("comparisons"):
            numbered = enumerate(contents.benchmarks, 1)
            compared = tuple(panel for number, each in numbered for panel in _compared(each, number, several))
        if with_documents:
            with doing("documents"):
                documents = document_data(runs, names, say, sample)
    with doing("writing the page"):
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        made = " ".join([f"Made by evalkit {__version__} on {now}.", *_verdicts(contents), *contents.notes])
        title = title or contents.title or ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)
        chapters: dict[str, Sequence[Panel]] = {
            "Results": [panel for results, _ in panels for panel in results],
            "Comparisons": compared,
            "Figures": figures,
            "Runs": [panel for _, singles in panels for panel in singles],
            "Documents": (),
            "Sources": [sources_panel(runs)],
        }
        page = Page(title, made, chapters, documents)
        try:
            write_page(page, path)
        except OSError as error:
            raise RunError(f"{path} cannot be written: {error.strerror or error}") from error
    return path.stat().st_size


def _verdicts(contents: PageContents) -> Iterator[str]:
    """Yield on how many benchmarks primary verdicts are, if on several."""
    compared = [each.title for each in contents.benchmarks if len(each.sides) > 1]
    if len(compared) > 1:
        yield f"Primary verdicts: on {len(compared)} benchmarks, of each at 5 %; not corrected over benchmarks."


def _compared(comparison: PageBenchmark, number: int, several: bool) -> Iterator[Panel]:
    suite = comparison.title if several else ""
    if len(comparison.sides) > 1:
        name = f"comparison-{number}"
        yield from comparison_panels(comparison.sides, comparison.rule, suite, name, comparison.in_pairs)
    if comparison.trainings:
        name = f"curves-{number}"
        try:
            curves = [curve(each.side, comparison.rule, each.steps, each.model) for each in comparison.trainings]
            yield curve_panel(curves, suite, name)
        except EvalkitError as error:
            yield Panel(name, "Training curves", (Report((), facts=(f"There are no curves: {error}",)),))


def comparison_panels(
    sides: Sequence[Side],
    rule: str | None = None,
    suite: str = "",
    name: str = "comparison",
    in_pairs: bool = False,
) -> tuple[Panel, ...]:
    """Return a panel for each side but the first, the baseline; with the reason for a side that cannot be compared.

    `suite` is added to the titles, and `name` is the beginning of the panels' anchors.
    """
    from evalkit.comparison.plots import forest

    panels: list[Panel] = []
    graded: dict[str, Comparable] = {}
    baseline, *others = sides
    pairings = dict[str, Pairing]()
    compared_sides, errors = dict[str, Comparison](), dict[str, EvalkitError]()
    for other in others:
        try:
            pairings[other.name] = pair(baseline, other, graded, in_pairs)
        except EvalkitError as error:
            errors[other.name] = error
    for side, pairing in pairings.items():
        try:
            key, own = rule_of([*pairings.values()], rule)
            compared_sides[side] = compare_pairing(pairing, key, own, len(pairings))
        except EvalkitError as error:
            errors[side] = error
    decided = dict(zip(compared_sides, decided_together([*compared_sides.values()]), strict=True))
    for number, other in enumerate(others, 1):
        address, title = f"{name}-{number}", f"{other.name} against {baseline.name}" + (f": {suite}" if suite else "")
        if other.name in errors:
            reason = f"{other.name} is not compared with {baseline.name}: {str(errors[other.name]).rstrip('.')}."
            panels.append(Panel(address, title, (Report((), facts=(reason,)),)))
            continue
        compared, pairing = decided[other.name], pairings[other.name]
        lines = "layer" if compared.measure.layers else "task"
        words = f"Difference on each {lines} with its 95 % interval. {headline(compared)}"
        figure = PageFigure(f"{address}-forest", words, svg_of(partial(forest, [compared])))
        inner = []
        if len(pairing.graded) == 2:
            report = _agreement_report(pairing, compared)
            inner.append(Panel(f"{address}-agreement", "Agreement by document", (report,)))
        with_subjects = (task for task in pairing.tasks if task.strata is not None)
        for of_task, task in enumerate(with_subjects, 1):
            report, label = _subject_report(pairing, task, compared), pairing.label(task.task).full
            inner.append(Panel(f"{address}-subjects-{of_task}", f"{label} by subject", (report,)))
        panels.append(Panel(address, title, comparison_report([compared]).parts, (figure,), panels=tuple(inner)))
    return tuple(panels)


def curve_panel(curves: Sequence[Curve], suite: str = "", name: str = "curves") -> Panel:
    from evalkit.comparison.plots import curves as draw

    measure, names = curves[0].measure.name, ", ".join(each.name for each in curves)
    words = f"{measure[:1].upper()}{measure[1:]} by training step of {names}, with 95 % intervals."
    figure = PageFigure(f"{name}-figure", words, svg_of(partial(draw, curves)))
    about = f", {suite}" if suite else ""
    return Panel(name, f"Training curves{about}: {names}", (curve_report(curves),), (figure,))


def _agreement_report(pairing: Pairing, compared: Comparison) -> Report:
    title, rows = f"Documents by the answers of both, rule {compared.rule}", []
    counts = ["both right", "A right, B wrong", "A wrong, B right", "both wrong"]
    if graded := compared.measure.graded:
        title = f"Documents by which score is higher ({pairing.measure(compared.rule).name})"
        counts = ["A higher", "equal", "B higher"]
    for task in pairing.tasks:
        [a], [b] = pairing.scores(task, compared.rule)
        alike = [~((a > b) | (b > a))] if graded else [(a > 0) & (b > 0), (a == 0) & (b == 0)]
        flags = [a > b, *alike, b > a] if graded else [alike[0], a > b, b > a, alike[1]]
        rows.append([pairing.label(task.task).full, f"{task.n:,}", *(f"{int(flag.sum()):,}" for flag in flags)])
    table = simple_table("agreement", ["task", "n", *counts], rows, title=title)
    return Report((table,), facts=(f"A: {compared.a}", f"B: {compared.b}"))


_SUBJECT_NOTES = (
    "p: corrected by Holm's method over the subjects of this task; intervals are not corrected",
    "the comparison of the tasks does not depend on this table, which is for exploration",
)


def _subject_report(pairing: Pairing, task: PairedTask, compared: Comparison) -> Report:
    subjects = subject_differences(pairing, task, compared.rule)
    better, worse = (sum(subject.verdict == verdict for subject in subjects) for verdict in compared.verdicts)
    (up, down), count = compared.verdicts, len(subjects)
    verdict = f"{compared.b} is {up} than {compared.a} on {better} of {count} subjects and {down} on {worse}"
    sides, unit = (f"A: {compared.a}", f"B: {compared.b}"), unit_of(compared.measure, [row.stderr for row in subjects])
    rows = []
    for subject in subjects:
        name, shown = subject.name.removeprefix(f"{task.task}_"), subject.verdict.replace(UNDECIDED, "")
        rows.append([name, f"{subject.n:,}", *unit.cells(subject), p_text(subject.p_holm), shown])
    headers = ["subject", "n", "A", "B", "B − A", "95 % interval", "p (Holm)", "B is"]
    table = simple_table(f"subjects-{task.task}", headers, rows)
    return Report((table,), (f"{verdict}, after Holm's correction over them.",), sides, _SUBJECT_NOTES)
