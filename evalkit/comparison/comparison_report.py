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
from evalkit.comparison.differences import UNDECIDED, Comparison, Difference, TaskDifference, tally
from evalkit.comparison.line import SEEDS, SIGN_FLIP
from evalkit.escape import counted
from evalkit.reporting.decimals import fixed, percent
from evalkit.reporting.report import Report
from evalkit.reporting.table import Table, simple_table
from evalkit.stats.significance import DRAWS

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

    def words(self, difference: Difference) -> str:
        """Format a difference with its interval and p value."""
        sign = "" if difference.p is not None and difference.p < _LEAST_P else "= "
        value = f"{self.difference(difference.difference)}{self.points}"
        return f"{value} (95 % interval {self.interval(difference)}), p {sign}{p_text(difference.p)}"


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
    """Return the verdict as a sentence."""
    a, b, average, unit = compared.a, compared.b, compared.average, page_unit(compared)
    (up, down), count = compared.verdicts, len(compared.tasks)
    better, worse = compared.count(up), compared.count(down)
    tasks = counted(count, "layer" if compared.measure.layers else "task")
    if not (better or worse) and count > 1 and average.verdict != UNDECIDED:
        alone = f"none of {tasks} shows it alone after Holm's correction"
        return f"{b} is {average.verdict} than {a} on average, {unit.words(average)}; {alone}."
    if better and worse:
        sentence = f"{b} is {up} than {a} on {better} of {tasks} and {down} on {worse}"
    elif better or worse:
        sentence = f"{b} is {up if better else down} than {a} on {better or worse} of {tasks}"
    else:
        sentence = f"No difference between {b} and {a} is shown on {'any of ' * (count > 1)}{tasks}"
    if count == 1:
        return f"{sentence}: {unit.words(compared.tasks[0])}."
    return f"{sentence} after Holm's correction; average {unit.words(average)}: {average.verdict}."


def continuous_sentence(compared: Comparison) -> str | None:
    """Return what the continuous outcome shows, and how many times fewer documents it needs; None if there is none."""
    if (evidence := compared.continuous) is None:
        return None
    measure, average = evidence.measure, evidence.average
    tasks = ", ".join(compared.labels[task].full for task in evidence.left_out)
    without = f", without {tasks}, whose answers are letters" if tasks else ""
    numbers = unit_of(measure, [average.stderr]).words(average)
    sentence = f"{measure.name[:1].upper()}{measure.name[1:]}{without}: average {numbers}"
    sentence += f"; {'lower' if measure.higher_is_better is False else 'higher'} is better"
    if average.verdict == UNDECIDED:
        return f"{sentence}: undecided."
    sentence += f", so {compared.b} is {average.verdict}"
    if compared.average.verdict not in (UNDECIDED, average.verdict):
        return f"{sentence}, and the two outcomes contradict each other."
    times, low, high = evidence.times, evidence.times_low, evidence.times_high
    if low is None or (high is None and low < 1):
        return f"{sentence}."
    sentence += "; for the same power"
    if times is None or high is None:
        return f"{sentence} it needs at least {_ratio(low)} times fewer documents than accuracy."
    if times >= 1:
        interval = f"95 % interval {_ratio(low)} to {_ratio(high)}"
        return f"{sentence} it needs {_ratio(times)} times fewer documents than accuracy ({interval})."
    interval = f"95 % interval {_ratio(1 / high)} to {_ratio(1 / low)}"
    return f"{sentence} accuracy needs {_ratio(1 / times)} times fewer documents ({interval})."


def _ratio(times: float) -> str:
    return f"{round(times):,}" if times >= 10 else fixed(times, 1)


_SEEDS_NOTE = (
    "p: t over runs and documents, which are crossed; each side's spread has its own degrees of freedom (runs less "
    "one), so the test is valid for unequal groups and spreads; Holm over the tasks, averages uncorrected"
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
            "freedom", "test", "p", "p_holm", "verdict", "won", "lost", "same", "detectable")  # fmt: skip
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
    sentences = (headline(compared), prompts, continuous_sentence(compared), compared.claim.sentence)
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
        shown, n, p, counts = row.name, "", row.p, [""] * 3
        if isinstance(row, TaskDifference):
            shown = label(compared, row.name) + "†" * (row.sources < row.n) + "*" * (not row.official)
            n, p, counts = f"{row.n:,}", row.p_holm, [f"{row.won:,}", f"{row.lost:,}", unit.value(row.detectable)]
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
    rows, unit = [], page_unit(compared)
    for row in (*compared.tasks, *compared.averages):
        if parts := row.spread:
            errors = (math.sqrt(part) if part >= 0 else math.nan for part in (parts.seeds, parts.documents))
            sources = map(unit.error, (*parts.deviations, *errors, row.stderr))
            rows.append([label(compared, row.name), *sources, fixed(row.freedom, 1)])
    runs = ("SD of A's runs", f"SD of {b}'s runs")
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
    what, above = "The same scores under every rule that all runs support", "rule"
    if by_prompt:
        what, above = "The prompts one by one", "table"
    agree = alternatives.count(compared.average.verdict)
    title = f"{what}: {agree} of {len(alternatives)} agree on the average (<: the {above} above)."
    counts = (f"tasks {verdict}" for verdict in compared.verdicts)
    headers = ("prompt" if by_prompt else "rule", f"average {b} − A", "95 % interval", "p", *counts, f"{b} is")
    return simple_table(f"rules-{b}", headers, rows, title=title)


def _notes(compared: Comparison, b: str) -> Iterator[str]:
    measure, tasks = compared.measure, compared.tasks
    seeds = any(task.test == SEEDS for task in tasks)
    yield measure.words + ("; differences in points" if measure.is_share else "")
    if compared.own_rules:
        yield f"the runs' own rules differ: {', '.join(compared.own_rules)}; --rule chooses another for all"
    if measure.layers and compared.average.name == "Average":
        yield "average: mean over documents of each document's mean over the layers"
    if seeds:
        yield _SEEDS_NOTE
    else:
        test = "exact McNemar"
        if graded := [task for task in tasks if task.test == SIGN_FLIP and measure.graded]:
            every = "" if len(graded) == len(tasks) else "; exact McNemar where answers are right or wrong"
            sampled = f"{DRAWS:,} sampled patterns where there are too many to enumerate"
            test = f"the larger of the sign-flip test's ({sampled}) and the interval's t{every}"
        yield f"p: {test}; Holm over the tasks; averages: t, uncorrected; a p of 0.05 is significant"
    how = ["one won and one lost document are added (Bonett and Price 2012)"] if measure.bounds else []
    how += ["each component of the error has its own t quantile (Banerjee 1960)"] if seeds else []
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
    yield f"{won}: documents on which {b}, or A, scores {more}; intervals are not corrected"
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
    yield f"could show: the smallest true difference that so many {evidence} detect with 80 % power, before Holm"
    if dropped := [f"{task.dropped:,} documents of {label(compared, task.name)}" for task in tasks if task.dropped]:
        yield f"dropped, because not every run has them: {', '.join(dropped)}"
    for reason in dict.fromkeys(compared.left_out.values()):
        left_out = [label(compared, task) for task, why in compared.left_out.items() if why == reason]
        yield f"not compared ({reason}): {', '.join(left_out)}"
    if not all(task.official for task in tasks):
        yield "*: not the official documents of the task"
