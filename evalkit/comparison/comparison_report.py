"""Comparisons in words and numbers.

In: `Comparison`s. Out: their verdicts as sentences, and a `Report` with tables (shares in percent and points, other
measures in their unit) and records.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from evalkit.benchmarks.outcomes import Measure
from evalkit.comparison.differences import (
    EQUIVALENT,
    NOT_WORSE,
    TOO_FEW,
    UNDECIDED,
    WORSE,
    Comparison,
    Difference,
    TaskDifference,
    tally,
)
from evalkit.comparison.line import PAIRS, SEEDS, SIGN_FLIP
from evalkit.escape import counted
from evalkit.reporting.decimals import fixed, percent
from evalkit.reporting.report import Report
from evalkit.reporting.table import Table, simple_table
from evalkit.stats.significance import DRAWS, Spread

_DOMINANT = 0.25
"""Share of the variance over documents from which a single document is named."""
_LEAST_P = 0.0005
"""Smallest p value that three decimals can show."""


@dataclass(frozen=True)
class Unit:
    """Unit and decimals of the numbers in one report."""

    places: int | None
    """Decimals; None for shares, which are printed in percent."""

    @property
    def factor(self) -> float:
        return 100 if self.places is None else 1

    @property
    def points(self) -> str:
        return " points" if self.places is None else ""

    def value(self, score: float | None, signed: bool = False, more: int = 0) -> str:
        """Format a score with `more` further decimals; a dash if it is unknown."""
        if self.places is None and score is not None and math.isfinite(score):
            return percent(score, 1 + more, signed)
        return fixed(score, (self.places or 0) + more, signed)

    def error(self, stderr: float | None) -> str:
        return self.value(stderr, more=1)

    def difference(self, difference: float) -> str:
        return self.value(difference, signed=True)

    def interval(self, difference: Difference) -> str:
        return f"{self.difference(difference.low)} to {self.difference(difference.high)}"

    def cells(self, difference: Difference) -> list[str]:
        """Format both scores, the difference and its interval."""
        scores = map(self.value, (difference.score_a, difference.score_b))
        return [*scores, self.difference(difference.difference), self.interval(difference)]

    def words(self, difference: Difference, family: str = "") -> str:
        """Format a difference with its interval and p value, which may hold for a family of differences."""
        p = difference.p if difference.p_holm is None else difference.p_holm
        sign = "" if p is not None and p < _LEAST_P else "= "
        value = f"{self.difference(difference.difference)}{self.points}"
        holm = f" (Holm{family})" if family else ""
        return f"{value} (95 % interval{family} {self.interval(difference)}), p {sign}{p_text(p)}{holm}"


def unit_of(measure: Measure, errors: Iterable[float | None]) -> Unit:
    """Return the unit of a report. Measures other than shares have decimals for two digits of the smallest error."""
    if measure.is_share:
        return Unit(None)
    least = min((error for error in errors if error is not None and 0 < error < math.inf), default=None)
    return Unit(3 if least is None else max(0, min(12, 1 - math.floor(math.log10(least)))))


def page_unit(compared: Comparison) -> Unit:
    return unit_of(compared.measure, [row.stderr for row in (*compared.tasks, *compared.averages)])


def p_text(p: float | None) -> str:
    """Format a p value with three decimals."""
    if p is None:
        return "–"
    return "<0.001" if p < _LEAST_P else fixed(p, 3)


def label(compared: Comparison, name: str) -> str:
    return compared.labels[name].full if name in compared.labels else name


def headline(compared: Comparison) -> str:
    """Return the primary verdict as a sentence: that on the average of the chosen outcome."""
    a, b, average, unit = compared.a, compared.b, compared.average, page_unit(compared)
    shown = f"{b} is {average.verdict} than {a}"
    if average.verdict == TOO_FEW:
        shown = f"too few documents for a verdict on {b} and {a}"
    elif average.verdict == UNDECIDED:
        shown = f"no difference between {b} and {a} is shown"
    numbers = unit.words(average, f" over {compared.sides} sides" * (compared.sides > 1))
    if average.verdict == UNDECIDED and average.detectable is not None:
        numbers += f"; could show {unit.value(average.detectable)}"
    return f"Primary verdict: {shown}; {_primary(compared)} {numbers}."


def _primary(compared: Comparison) -> str:
    """Return the quantity of the primary verdict."""
    name, tasks = compared.measure.name, compared.tasks
    if len(tasks) == 1:
        return f"{name} on {label(compared, tasks[0].name)}"
    over = "mean over layers" if compared.measure.layers else f"unweighted mean over {len(tasks)} tasks"
    return f"{name}, {over},"


def tasks_sentence(compared: Comparison) -> str | None:
    """Return on how many tasks, or layers, a difference is shown; None for a single task."""
    if (count := len(compared.tasks)) == 1:
        return None
    what = "layers" if compared.measure.layers else "tasks"
    counts = {verdict: compared.count(verdict) for verdict in compared.verdicts}
    listed = " and ".join(f"{verdict} on {number}" for verdict, number in counts.items() if number)
    shown = f"{compared.b} is {listed} of {count}" if listed else f"none of {count} shows a difference"
    too_few = compared.count(TOO_FEW)
    without = f"; on {too_few} there are too few documents for a verdict" if too_few else ""
    return f"Secondary, {what} after Holm's correction: {shown}{without}."


def margin_sentence(compared: Comparison) -> str | None:
    """Return what is shown about the margin; None without a margin."""
    if (on := compared.margin) is None:
        return None
    a, b, unit = compared.a, compared.b, page_unit(compared)
    size = f"{unit.value(on.margin)}{unit.points}"
    shown = {
        EQUIVALENT: f"{b} and {a} are equivalent: the interval lies between -{size} and +{size}",
        NOT_WORSE: f"{b} is not worse than {a} by that (non-inferior): the interval excludes it",
        WORSE: f"{b} is worse than {a} by more than that: the whole interval is",
        UNDECIDED: f"undecided whether {b} is worse than {a} by that: the interval contains it",
    }[on.verdict]
    if (count := len(compared.tasks)) > 1:
        listed = f" ({', '.join(label(compared, task) for task in on.worse)})" if on.worse else ""
        shown += f". Tasks after Holm's correction: {len(on.worse)} of {count} worse by more{listed}"
        shown += f", {len(on.not_worse)} not worse by that"
    return f"Margin of {size}: {shown}."


def continuous_sentence(compared: Comparison) -> str | None:
    """Return what the continuous outcome shows, and how many documents accuracy needs; None if there is none."""
    if (evidence := compared.continuous) is None:
        return None
    measure, average = evidence.measure, evidence.average
    tasks = ", ".join(compared.labels[task].full for task in evidence.left_out)
    without = f" without {tasks}, whose answers are letters" if tasks else ""
    sentence = f"Secondary, {measure.name}{without}: average {unit_of(measure, [average.stderr]).words(average)}"
    if average.verdict in (UNDECIDED, TOO_FEW):
        sentence = f"{sentence}: {average.verdict}"
    else:
        sentence = f"{sentence}: {compared.b} is {average.verdict} in {measure.name}"
        if compared.average.verdict not in (UNDECIDED, average.verdict):
            sentence += ", and the two outcomes contradict each other"
    low, high = evidence.times_low, evidence.times_high
    if compared.average.spread and average.spread and None not in (compared.average.stderr, average.stderr):
        of_bits, of_accuracy = map(_limit, (average.spread, compared.average.spread))
        return f"{sentence}; most of its error is due to {of_bits}, of accuracy's to {of_accuracy}."
    if low is None:
        return f"{sentence}."
    if not low and high is None:
        return f"{sentence}; how many times as many documents accuracy needs for the same power is not known."
    times = f"{_ratio(low)} to {_ratio(high)}" if high is not None else f"at least {_ratio(low)}"
    return f"{sentence}; for the same power accuracy needs {times} times as many documents (95 % interval)."


def _limit(spread: Spread) -> str:
    """Return whether seeds or documents have the larger part of a variance, with that part."""
    documents = max(spread.documents - spread.shared, 0.0)
    share = spread.seeds / ((spread.seeds + documents) or 1.0)
    what, part = ("seeds", share) if share >= 0.5 else ("documents", 1 - share)
    return f"{what} ({percent(part, 0)} % of the variance)"


def _ratio(times: float) -> str:
    return f"{round(times):,}" if times >= 10 else fixed(times, 1)


_SEEDS_NOTE = (
    "p: t over runs and documents, which are crossed; each side's spread has its own degrees of freedom (runs less "
    "one), so the test is valid for unequal groups and spreads"
)
_PAIRS_NOTE = (
    "p: t over pairs of runs and documents, which are crossed: the n-th runs of both sides have one seed, so that only "
    "what a seed does to their difference is an error; declare this before results are seen"
)
_PROMPT_NOTES = (
    "mean over prompts: of each document the mean of its values under its prompts (1 or 0: right or wrong)",
    "prompts one by one: a task that lacks a prompt (an order of options that it does not list) counts with the run's "
    "own prompt; p and intervals of single prompts are not corrected for their number",
    "under all prompts: intersection-union test, whose p is the largest of the prompts' and needs no correction "
    "(Berger 1982); the claim is about these prompts, not about others",
)


def _prompt_of(rule: str) -> str:
    return rule.partition("@")[2] or "mean over prompts"


def prompts_sentence(compared: Comparison) -> str:
    """Return whether B is better, or worse, than A under all prompts."""
    a, b, (better, worse) = compared.a, compared.b, compared.verdicts
    averages = {verdict.rule: verdict.average for verdict in compared.rules if "@" in verdict.rule}
    up, down = tally(average.verdict for average in averages.values())
    count = len(averages)
    prompts = f"{count} prompts" + " on average over the tasks" * (len(compared.tasks) > 1)
    if count in (up, down):
        rule, last = max(averages.items(), key=lambda item: 1.0 if item[1].p is None else item[1].p)
        test = f"intersection-union test: the largest p is {p_text(last.p)}, {_prompt_of(rule)}"
        return f"{b} is {better if up else worse} than {a} under all {prompts} ({test})."
    if not up and not down:
        sign = -1 if compared.measure.higher_is_better is False else 1
        gains = [sign * average.difference for average in averages.values()]
        ahead, behind = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
        shown = f"No difference between {b} and {a} is shown under any of {prompts}"
        return f"{shown}; {b} is ahead under {ahead}, {a} under {behind}."
    counts = {better: up, worse: down, "undecided": count - up - down}
    listed = ", ".join(f"{verdict} under {number}" for verdict, number in counts.items() if number)
    return f"Of {prompts}, {b} against {a} is {listed}: neither is shown to be {better} under all of them."


_COLUMNS = ("n", "sources", "dropped", "official", "score_a", "score_b", "difference", "low", "high", "stderr",
            "freedom", "test", "p", "p_holm", "verdict", "won", "lost", "same", "detectable", "dominance")  # fmt: skip
"""Fields of a record; those that only tasks have are None for averages."""


def comparison_report(comparisons: Sequence[Comparison]) -> Report:
    """Build the report of comparisons with the same baseline, whose sides are called by letters."""
    letters = (chr(ord("A") + n) if n < 26 else str(n) for n in range(1, len(comparisons) + 1))
    parts = tuple(map(_one_comparison, comparisons, letters))
    content = []
    for compared, part in zip(comparisons, parts, strict=True):
        content.append({"verdict": headline(compared)} | asdict(compared) | {"notes": list(part.notes)})
    records = [record for compared in comparisons for record in _records(compared)]
    return Report((), content={"comparisons": content}, records=records, parts=parts)


def _one_comparison(compared: Comparison, b: str) -> Report:
    sides = (("A", compared.a, compared.runs_a), (b, compared.b, compared.runs_b))
    facts = [f"{letter}: {name} ({', '.join(folders)})" for letter, name, folders in sides]
    settings = compared.claim.settings.items()
    facts += [f"A and {b} differ in {what}: {of_a} | {of_b}" for what, (of_a, of_b) in settings]
    tables = [_differences(compared, b)]
    tables += [_spreads(compared, b)] if any(task.spread for task in compared.tasks) else []
    tables += [_rules(compared, b)] if len(compared.rules) > 1 else []
    prompts = prompts_sentence(compared) if compared.measure.alternatives == "prompt" else None
    of_tasks, of_outcome = tasks_sentence(compared), continuous_sentence(compared)
    sentences = (headline(compared), margin_sentence(compared), of_tasks, prompts, of_outcome, compared.claim.sentence)
    return Report(tuple(tables), tuple(filter(None, sentences)), tuple(facts), tuple(_notes(compared, b)))


def _records(compared: Comparison) -> Iterator[dict[str, Any]]:
    columns = ("layer", *_COLUMNS) if compared.measure.layers else _COLUMNS
    about = {"a": compared.a, "b": compared.b, "rule": compared.rule}
    for row in (*compared.tasks, *compared.averages):
        kind = "task" if isinstance(row, TaskDifference) else "average"
        numbers = {column: getattr(row, column, None) for column in columns}
        parts = {f"variance_{part}": getattr(row.spread, part, None) for part in ("seeds", "documents", "shared")}
        yield {**about, "kind": kind, "name": row.name, **numbers, **parts}


def _differences(compared: Comparison, b: str) -> Table:
    unit = page_unit(compared)

    rows = []
    for row in (*compared.tasks, *(compared.averages if len(compared.tasks) > 1 else ())):
        shown, n, p = row.name, "", row.p if row.p_holm is None else row.p_holm
        counts = ["", "", unit.value(row.detectable) if row is compared.average else ""]
        if isinstance(row, TaskDifference):
            shown = label(compared, row.name) + "†" * (row.sources < row.n) + "*" * (not row.official)
            n, counts = f"{row.n:,}", [f"{row.won:,}", f"{row.lost:,}", unit.value(row.detectable)]
        verdict = "" if row.verdict == UNDECIDED else row.verdict
        rows.append([shown, n, *unit.cells(row), unit.error(row.stderr), p_text(p), *counts, verdict])
    about = ("task", "n", "A", b, f"{b} − A", "95 % interval", "± SE", "p (Holm)")
    won = ("higher", "lower") if compared.measure.higher_is_better is None else ("won", "lost")
    headers = (*about, *won, "could show", f"{b} is")
    # Without a significant difference the last column is empty
    last = len(headers) if any(cells[-1] for cells in rows) else len(headers) - 1
    ruled = {len(compared.tasks)}
    return simple_table(f"comparison-{b}", headers[:last], [cells[:last] for cells in rows], ruled=ruled)


def _spreads(compared: Comparison, b: str) -> Table:
    rows, unit, in_pairs = [], page_unit(compared), compared.tasks[0].test == PAIRS
    for row in (*compared.tasks, *compared.averages):
        if parts := row.spread:
            errors = (math.sqrt(part) if part >= 0 else math.nan for part in (parts.seeds, parts.documents))
            deviations = parts.deviations[1:] if in_pairs else parts.deviations
            sources = map(unit.error, (*deviations, *errors, row.stderr))
            rows.append([label(compared, row.name), *sources, fixed(row.freedom, 1)])
    runs = ("SD of the pairs",) if in_pairs else ("SD of A's runs", f"SD of {b}'s runs")
    headers = ("task", *runs, "± from runs", "± from documents", "± both", "t with df")
    title = f"Sources of the standard error{' (in points)' if unit.points else ''}"
    return simple_table(f"errors-{b}", headers, rows, ruled={len(compared.tasks)}, title=title)


def _rules(compared: Comparison, b: str) -> Table:
    unit, by_prompt = page_unit(compared), compared.measure.alternatives == "prompt"
    rows, alternatives = [], []
    for verdict in compared.rules:
        rule, average = verdict.rule, verdict.average
        shown = (_prompt_of(rule) if by_prompt else rule) + " <" * (rule == compared.rule)
        numbers = unit.cells(average)[2:]
        rows.append([shown, *numbers, p_text(average.p), str(verdict.better), str(verdict.worse), average.verdict])
        alternatives += [average.verdict] if "@" in rule or not by_prompt else []
    what, above = "Secondary: the same scores under every rule that all runs support", "rule"
    if by_prompt:
        what, above = "Secondary: the prompts one by one", "table"
    agree = alternatives.count(compared.average.verdict)
    title = f"{what}: {agree} of {len(alternatives)} agree on the average (<: the {above} above)."
    counts = (f"tasks {verdict}" for verdict in compared.verdicts)
    headers = ("prompt" if by_prompt else "rule", f"average {b} − A", "95 % interval", "p", *counts, f"{b} is")
    return simple_table(f"rules-{b}", headers, rows, title=title)


def _family(compared: Comparison) -> str:
    """Return what is decided together, and what is not."""
    count, other = len(compared.tasks), "layers" if compared.measure.layers else "tasks"
    over = f", Holm over {compared.sides} sides" if compared.sides > 1 else ""
    secondary = [f"{counted(count, other[:-1])} (Holm)"] * (count > 1)
    if groups := len(compared.averages) - 1:
        secondary.append(counted(groups, "group average"))
    if (rules := len(compared.rules) - 1) > 0:
        secondary.append(counted(rules, f"other {compared.measure.alternatives}"))
    secondary += [compared.continuous.measure.name] if compared.continuous else []
    listed = f"; secondary, each at 5 % by itself, so that some may err: {', '.join(secondary)}" if secondary else ""
    return (
        f"family: one primary verdict at 5 % (the average{over}){listed}"
        if count > 1 or over
        else (f"family: one verdict at 5 %{listed}")
    )


def _notes(compared: Comparison, b: str) -> Iterator[str]:
    measure, tasks = compared.measure, compared.tasks
    seeds = any(task.test in (SEEDS, PAIRS) for task in tasks)
    yield measure.words + ("; differences in points" if measure.is_share else "")
    if compared.own_rules:
        yield f"the runs' own rules differ: {', '.join(compared.own_rules)}; --rule chooses another for all"
    if measure.layers and compared.average.name == "Average":
        yield "average: mean over documents of each document's mean over the layers"
    yield _family(compared)
    if seeds:
        yield _PAIRS_NOTE if tasks[0].test == PAIRS else _SEEDS_NOTE
    else:
        test = "exact McNemar"
        if graded := [task for task in tasks if task.test == SIGN_FLIP and measure.graded]:
            every = "" if len(graded) == len(tasks) else "; exact McNemar where answers are right or wrong"
            sampled = f"{DRAWS:,} sampled patterns where there are too many to enumerate"
            test = f"the larger of the sign-flip test's ({sampled}) and the interval's t{every}"
        yield f"p: {test}; averages: t; a p of 0.05 is significant"
    how = ["one won and one lost document are added (Bonett and Price 2012)"] if measure.bounds else []
    how += ["each component of the error has its own t quantile (Banerjee 1960)"] if seeds else []
    how += ["joined with that without skewness (Hall 1992)"] if not (seeds or measure.bounds) else []
    how += [f"that of the average holds for all {compared.sides} sides"] if compared.sides > 1 else []
    is_extended = any(0 in (row.low, row.high) for row in (*tasks, *compared.averages))
    if how := [*how, *["extended to 0 where the test shows nothing"] * is_extended]:
        yield f"95 % interval: not ± t × SE; {'; '.join(how)}"
    if compared.letters:
        listed = ", ".join(label(compared, task) for task in compared.letters)
        yield f"answers of {listed} are letters: the values mostly measure the format, and outweigh others in averages"
    if measure.resolution:
        yield f"differences up to {percent(measure.resolution, 2)} % of the values are rounding and have p 1"
    won = "higher, lower" if measure.higher_is_better is None else "won, lost"
    more = "lower" if measure.higher_is_better is False else "higher"
    yield f"{won}: documents on which {b}, or A, scores {more}"
    if clustered := [task for task in tasks if task.sources < task.n]:
        listed = ", ".join(f"{label(compared, task.name)} {task.sources:,}" for task in clustered)
        exact = "exact " * (not measure.graded)
        tested = f", p: the larger of the {exact}sign-flip test's over whole sources and the interval's t"
        yield f"†: documents share sources ({listed}): clustered error{tested * (not seeds)}"
    if strata := [task for task in tasks if task.strata > 1]:
        yield f"stratified by subject: {', '.join(label(compared, task.name) for task in strata)}"
    if measure.alternatives == "prompt":
        yield from _PROMPT_NOTES
    evidence = "documents and runs" if any(task.spread for task in tasks) else "documents"
    after = "after the correction if the others show nothing"
    yield f"could show: the smallest true difference that so many {evidence} detect with 80 % power, {after}"
    if dominated := [task for task in tasks if not measure.bounds and task.dominance >= _DOMINANT and task.n > 1]:
        listed = ", ".join(f"{label(compared, task.name)} {percent(task.dominance, 0)} %" for task in dominated)
        yield f"a single document's share of the variance is large: {listed}; its value decides there"
    if compared.count(TOO_FEW):
        least = f"fewer than {measure.least_documents} documents"
        yield f"too few: {least} often lack the rare values that decide a task's mean, so no test of it would hold"
    about = "errors are about documents like these, of which they are a sample"
    if most := [task for task in tasks if task.total / 2 <= task.n < task.total]:
        shares = (f"{label(compared, task.name)} {fixed(math.sqrt(1 - task.n / task.total), 2)}" for task in most)
        about += f"; about the mean over this benchmark's own documents, ± times √(1 − n/N): {', '.join(shares)}"
    yield about
    if dropped := [f"{task.dropped:,} documents of {label(compared, task.name)}" for task in tasks if task.dropped]:
        yield f"dropped, because not every run has them: {', '.join(dropped)}"
    for reason in dict.fromkeys(compared.left_out.values()):
        left_out = [label(compared, task) for task, why in compared.left_out.items() if why == reason]
        yield f"not compared ({reason}): {', '.join(left_out)}"
    if not all(task.official for task in tasks):
        yield "*: not the official documents of the task"
