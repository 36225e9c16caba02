"""Plans before a run: how many documents, how many seeds and which outcome a difference needs.

In: a `Pairing` of finished runs, or a guess of how often two sides' answers differ. Out: a `Report` of the smallest
differences that other numbers of documents and seeds detect with 80 % power. Observed variances are taken as true.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from statistics import median_low
from typing import Any

import numpy as np

from evalkit.benchmarks.outcomes import Measure
from evalkit.comparison.comparison import compare_pairing
from evalkit.comparison.differences import AverageDifference
from evalkit.comparison.line import MCNEMAR, ScoredLine, average_difference, by_task, samples_of
from evalkit.comparison.pairing import PairedTask, Pairing, pair
from evalkit.comparison.sentences import Unit, continuous_sentence, unit_of
from evalkit.comparison.sides import Side
from evalkit.data import TASKS
from evalkit.data.sampling import ALL_DOCUMENTS, selection_of
from evalkit.errors import UsageError
from evalkit.reporting.decimals import percent
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.runs.continuous import keys_beside
from evalkit.runs.folder import Run
from evalkit.runs.scales import ACCURACY, CORRECT
from evalkit.stats.estimates import Estimate, Floats, average
from evalkit.stats.power import ALPHA, MOST_SEEDS, mcnemar_detectable, seeds_detectable, t_detectable
from evalkit.suites.suites import DEFAULT_SUITE

SIZES, SEEDS = (50, 100, 200, 500, 1000), (1, 2, 3, 5, 8)
"""Documents of each task, and seeds of each side, in a report."""
_LEAST = 10
"""Documents of each task below which nothing is planned."""
_NOTES = (
    "smallest true difference that a test at 5 % detects with a power of 80 %; –: none",
    "a task: the difference that half of the tasks detect alone, at Holm's first level: 5 % / tasks",
    "observed variances and differences are taken as true: few documents, and above all few seeds, estimate them badly",
)


@dataclass(frozen=True)
class OutcomePlan:
    """The smallest differences that an outcome detects, in the unit of its scores."""

    name: str
    lines: Sequence[ScoredLine]
    totals: Sequence[int]
    """Documents that the benchmark has, by line."""
    expected: float
    """Expected difference of the average."""

    @cached_property
    def observed(self) -> AverageDifference:
        return average_difference("Average", self.lines)

    @cached_property
    def unit(self) -> Unit:
        return unit_of(self.lines[0].measure, [self.observed.stderr])

    def smallest(self, documents: int, seeds: int, of: int) -> float:
        """Return that of the average, at 5 % (`of` 0), or the one that half of the tasks detect alone, at 5 % / tasks.

        Of so many documents of each task, or all of a task that has fewer. Infinite if no difference is detected.
        """
        if of or len(self.lines) == 1:
            level = ALPHA / len(self.lines)
            tasks = (
                self._of_task(*line, documents, seeds, level) for line in zip(self.lines, self.totals, strict=True)
            )
            return median_low(math.inf if smallest is None else smallest for smallest in tasks)
        scaled = [_scaled(line, min(documents, n)) for line, n in zip(self.lines, self.totals, strict=True)]
        whole = average(scaled, samples_of(self.lines))
        if (spread := self.observed.spread) is not None:
            scale = spread.documents / whole.variance if whole.variance else 1.0
            of_average = seeds_detectable(spread, seeds, scale) if seeds > 1 else None
        else:
            of_average = t_detectable(whole.stderr, whole.freedom, self.lines[0].measure.span)
        return math.inf if of_average is None else of_average

    def _of_task(self, line: ScoredLine, total: int, documents: int, seeds: int, level: float) -> float | None:
        count = min(documents, total)
        if line.spread is not None:
            return seeds_detectable(line.spread, seeds, count / line.paired.n, level) if seeds > 1 else None
        if line.test == MCNEMAR:
            return mcnemar_detectable(count, (line.won + line.lost) * count / line.paired.n, level)
        error = _scaled(line, count)
        return t_detectable(error.stderr, error.freedom, line.measure.span, level)

    def fewest(self, of: int, seeds: int | None = None, documents: int | None = None) -> int | None:
        """Return the fewest documents of each task, or seeds of each side, for the expected difference.

        None if those of the benchmark, or `MOST_SEEDS`, are too few. `of`: 0 for the average, 1 for half of the tasks.
        """

        def suffice(count: int) -> bool:
            return self.smallest(documents or count, seeds or count, of) <= abs(self.expected)

        least, most = (2, MOST_SEEDS) if seeds is None else (min(_LEAST, max(self.totals)), max(self.totals))
        counts = range(least, most + 1)
        index = bisect_left(counts, True, key=suffice)
        return counts[index] if index < len(counts) else None


def _scaled(line: ScoredLine, documents: int) -> Estimate:
    """Return the error that a line has with so many documents."""
    scale = documents / line.paired.n
    return Estimate(0.0, line.documents.variance / scale, line.documents.freedom * scale)


def plan_pairing(pairing: Pairing, rule: str | None, difference: float | None) -> Report:
    """Plan from two finished sides, under a rule and every continuous outcome of its runs.

    `difference` is the expected one, in the unit of the rule's scores; None: the observed one, as for other outcomes.
    """
    counts = {len(pairing.a.runs), len(pairing.b.runs)}
    if 1 in counts and len(counts) > 1:
        raise UsageError("one side has several runs, the other a single one; a plan needs several of both, or one")
    graded, key, plans, unpaired = pairing.graded[0], pairing.key(rule), list[OutcomePlan](), list[OutcomePlan]()
    for name in (key, *(keys_beside(key) if graded.beside(key) else ())):
        letters = graded.of_letters(name) if plans else ()
        with suppress(*[UsageError] * len(plans)):  # a run may lack an outcome, as that of a log
            kept = replace(pairing, tasks=tuple(task for task in pairing.tasks if task.task not in letters))
            lines = by_task(kept, name)
            title = f"accuracy ({key})" if (title := lines[0].measure.name) == ACCURACY else title
            expected = average_difference("Average", lines).difference
            if difference is not None and not plans:
                expected = difference
            plans.append(OutcomePlan(title, lines, totals := _benchmark(pairing, lines)[1], expected))
            if pairing.in_pairs:
                lines = by_task(replace(kept, in_pairs=False), name)
                unpaired.append(OutcomePlan(f"{title}, unpaired", lines, totals, expected))
    suite, _ = _benchmark(pairing, plans[0].lines)
    compared = compare_pairing(pairing, key)
    report = _report(plans, suite, min(counts), continuous_sentence(compared), unpaired)
    return report.with_caution(compared.claim.caution)


def plan_guess(
    run: Run | None, rule: str | None, accuracy: float, discordant: float | None, difference: float
) -> Report:
    """Plan from a guess of the share of documents that only one of both sides gets right.

    Without it, the sides' answers are taken as independent: 2 p (1 - p), with the accuracy p of a finished run's tasks,
    or the guessed one of the eight tasks. All are fractions.
    """
    suite, sizes = DEFAULT_SUITE, {task.name: (task.count, accuracy) for task in TASKS.values()}
    if run is not None:
        alone = Side(run.folder.name, (run,))
        pairing = pair(alone, alone, {})
        of_run = by_task(pairing, pairing.key(rule))
        if of_run[0].measure.graded:
            raise UsageError(f"{of_run[0].measure.name}: one run does not show how it differs; name two")
        suite, totals = _benchmark(pairing, of_run)
        sizes = {line.paired.task: (n, line.a.mean()) for line, n in zip(of_run, totals, strict=True)}
    lines = []
    for task, (n, right) in sizes.items():
        share = 2 * right * (1 - right) if discordant is None else discordant
        if not difference <= share <= 1:
            raise UsageError(
                f"{task}: {percent(difference)} points need as many discordant documents, not {percent(share)} %"
            )
        won: Floats = (np.arange(n)[None] < n * share / 2).astype(np.float64)
        paired = PairedTask(task, None, None, (np.arange(n),) * 2, 0, True)
        lines.append(ScoredLine(paired, won, won[:, ::-1], Measure(CORRECT, "right or wrong", False)))
    return _report([OutcomePlan("accuracy", lines, [line.paired.n for line in lines], difference)], suite, 1)


def _benchmark(pairing: Pairing, lines: Sequence[ScoredLine]) -> tuple[str, list[int]]:
    """Return the name of what is planned, and its documents by line; of a selection of unknown size, the runs' own."""
    manifest, seen = pairing.graded[0].run.manifest, [line.paired.n for line in lines]
    totals = [max(line.paired.n, manifest["documents"][line.paired.task]["total"] or 0) for line in lines]
    is_whole = selection_of(manifest["specification"]) == ALL_DOCUMENTS
    return pairing.graded[0].run.suite if is_whole or totals != seen else "the runs' documents", totals


def _report(
    plans: Sequence[OutcomePlan],
    suite: str,
    seeds: int,
    sentence: str | None = None,
    unpaired: Sequence[OutcomePlan] = (),
) -> Report:
    """Build the report of plans; the verdict is about the first one's expected difference.

    `unpaired` has the plans of seeds that are not in pairs, for comparison with those that are.
    """
    first, most, records = plans[0], max(plans[0].totals), list[dict[str, Any]]()
    kinds, unit = ("average", "a task")[: len(first.lines)], first.unit

    def rows(
        plans: Sequence[OutcomePlan], fixed: dict[str, int], name: str, counts: Sequence[int]
    ) -> Iterator[list[str]]:
        for plan, (of, kind) in product(plans, enumerate(kinds)):
            if of and plan in unpaired:
                continue
            fewest, cells = plan.fewest(of, **fixed), list[str]()
            about = {"outcome": plan.name, "of": kind, "expected": plan.expected, "needs": fewest} | fixed
            for count in counts:
                value = plan.smallest(**fixed, **{name: count}, of=of)
                cells.append(plan.unit.value(detectable := value if value < math.inf else None))
                records.append(about | {name: count, "detectable": detectable})
            yield [plan.name, kind, *cells, plan.unit.difference(plan.expected), f"{fewest:,}" if fewest else "more"]

    def share(documents: int) -> str:
        return percent(sum(min(documents, total) for total in first.totals) / sum(first.totals)) + " %"

    sizes = [*(size for size in SIZES if size < most), most]
    body = [[f"share of {suite}", "", *map(share, sizes), "", ""], *rows(plans, {"seeds": seeds}, "documents", sizes)]
    headers = ("documents of each task", "", *(f"{size:,}" for size in sizes[:-1]), "all", "expected", "needs")
    tables = [simple_table("documents", headers, body, texts=2, ruled={1})]
    fewest, alone = (first.fewest(of, seeds=seeds) for of in (0, 1))
    shown = f"all {sum(first.totals):,} documents detect {unit.value(first.smallest(most, seeds, 0))}{unit.points}"
    enough = f"{fewest:,} documents of each task (--sample {fewest}, {share(fewest)} of {suite})" if fewest else ""
    verdict = f"A difference of {unit.value(abs(first.expected))}{unit.points} in {first.name} needs "
    verdict += enough or f"more than {suite} has: {shown}"
    if len(kinds) > 1:
        verdict += f"; for half of its tasks alone {f'{alone:,}' if alone else 'more than it has'}"
    if first.observed.spread is not None:
        headers = ("seeds of each side, all documents", "", *map(str, SEEDS), "expected", "needs")
        of_seeds = [*rows([*plans, *unpaired], {"documents": most}, "seeds", SEEDS)]
        tables.append(simple_table("seeds", headers, of_seeds, texts=2))
        needed, *without = (
            plan.fewest(0, documents=most) or f"more than {MOST_SEEDS:,}" for plan in (first, *unpaired)
        )
        verdict += f"; with {seeds} seeds of each side. With all documents it needs {needed} seeds"
        verdict += f" in pairs, unpaired {without[0]}" if without else ""
    content = {"verdict": f"{verdict}.", "suite": suite, "plan": records, "notes": [*_NOTES]}
    return Report(tuple(tables), tuple(filter(None, [f"{verdict}.", sentence])), (), _NOTES, content, records)
