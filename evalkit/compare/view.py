"""Comparisons and curves as a person reads them.

In: a `Comparison` or `Curve`. Out: a `Page` of tables in percent and points, and records in fractions for programs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from evalkit.benchmarks.longbench.protocol import LABELS as LONGBENCH_LABELS
from evalkit.benchmarks.multiple_choice.suites import label as suite_label
from evalkit.benchmarks.multiple_choice.suites import short_label
from evalkit.compare.comparison import (
    BETTER,
    SEEDS,
    SIGN_FLIP,
    UNDECIDED,
    WORSE,
    Comparison,
    Difference,
)
from evalkit.compare.curves import Curve
from evalkit.reporting.decimals import percent
from evalkit.reporting.page import Page, Table
from evalkit.stats.significance import DRAWS


def headline(found: Comparison) -> str:
    """The verdict in words."""
    better, worse, count = found.count(BETTER), found.count(WORSE), len(found.tasks)
    tasks, average = f"{count} task" + "s" * (count > 1), found.average
    if not (better or worse) and count > 1 and average.verdict != UNDECIDED:
        alone = f"none of {tasks} shows it alone after Holm's correction"
        return f"{found.b} is {average.verdict} than {found.a} on average, {_average_words(average)}; {alone}."
    if better and worse:
        said = f"{found.b} is better than {found.a} on {better} of {tasks} and worse on {worse}"
    elif better or worse:
        said = f"{found.b} is {BETTER if better else WORSE} than {found.a} on {better or worse} of {tasks}"
    else:
        on = f"any of {tasks}" if count > 1 else tasks
        said = f"No difference between {found.b} and {found.a} is shown on {on}"
    corrected = " after Holm's correction" if count > 1 else ""
    if count == 1:
        return f"{said}: {_average_words(found.tasks[0])}."
    return f"{said}{corrected}; average {_average_words(average)}: {average.verdict}."


def comparison_page(found: Comparison, a: str, b: str) -> Page:
    """A comparison's tables.

    Args:
        found: the comparison.
        a: letter of the baseline.
        b: letter of the other side.
    """
    facts = [
        f"{letter}: {name} ({', '.join(folders)})"
        for letter, name, folders in ((a, found.a, found.runs_a), (b, found.b, found.runs_b))
    ]
    facts += [f"{a} and {b} differ in {what}: {one} | {other}" for what, (one, other) in found.claim.settings.items()]
    tables = [_differences(found, a, b)]
    if any(task.spread for task in found.tasks):
        tables.append(_spreads(found, a, b))
    if len(found.rules) > 1:
        tables.append(_rules(found, a, b))
    return Page((headline(found), found.claim.sentence), tuple(facts), tuple(tables), tuple(_notes(found, a, b)))


def comparison_records(found: Comparison) -> Iterator[dict[str, Any]]:
    """A record a task and average, differences and scores as fractions."""
    for kind, members in (("task", found.tasks), ("average", found.averages)):
        for one in members:
            content = {key: value for key, value in asdict(one).items() if key not in ("spread", "name")}
            yield {
                "a": found.a,
                "b": found.b,
                "rule": found.rule,
                "kind": kind,
                "name": one.name,
                **{key: content.get(key) for key in _COLUMNS},
                **{f"variance_{key}": getattr(one.spread, key, None) for key in ("seeds", "documents", "shared")},
            }


_COLUMNS = ("n", "sources", "dropped", "official", "score_a", "score_b", "difference", "low", "high", "stderr",
            "freedom", "test", "p", "p_holm", "verdict", "won", "lost", "same", "detectable")  # fmt: skip


def curve_page(curves: Sequence[Curve]) -> Page:
    """Accuracy by step, a table for each training."""
    lead, tables = [], []
    for one in curves:
        first, last = one.average[0], one.average[-1]
        lead.append(
            f"{one.name}: average {percent(first.accuracy)} at step {first.step:,}, {percent(last.accuracy)} at step "
            f"{last.step:,} ({len(one.average)} checkpoints, {len(one.tasks)} task{'s' * (len(one.tasks) > 1)})"
        )
        rows = tuple(
            (
                f"{point.step:,}",
                *(percent(points[place].accuracy) for points in one.tasks.values()),
                percent(point.accuracy),
                _error(point.stderr),
            )
            for place, point in enumerate(one.average)
        )
        headers = ("step", *(_short(task) for task in one.tasks), "Avg.", "± SE")
        tables.append(Table(headers, rows, title=one.name if len(curves) > 1 else ""))
    return Page(tuple(lead), (), tuple(tables), (curves[0].measure.words,))


def curve_records(curves: Sequence[Curve]) -> Iterator[dict[str, Any]]:
    """A record a step and task."""
    for one in curves:
        for task, points in [*one.tasks.items(), ("Average", one.average)]:
            for point in points:
                yield {"curve": one.name, "rule": one.rule, "task": task, "n": one.documents.get(task)} | asdict(point)


def label(task: str) -> str:
    """How a task is printed."""
    return LONGBENCH_LABELS.get(task) or suite_label(task)


def points(fraction: float) -> str:
    """A difference in points, signed; nothing is not negative."""
    return percent(fraction, signed=True)


def p_text(p: float | None) -> str:
    """A p value in three places."""
    if p is None:
        return "–"
    return "<0.001" if p < 0.0005 else f"{p:.3f}"


def _average_words(average: Difference) -> str:
    sign = "" if average.p is not None and average.p < 0.0005 else "= "
    return (
        f"{points(average.difference)} points (95 % interval {points(average.low)} to {points(average.high)}), "
        f"p {sign}{p_text(average.p)}"
    )


def _differences(found: Comparison, a: str, b: str) -> Table:
    rows = [
        (
            label(task.name) + "†" * (task.sources < task.n) + "*" * (not task.official),
            f"{task.n:,}",
            *_common(task),
            p_text(task.p_holm),
            f"{task.won:,}",
            f"{task.lost:,}",
            f"{task.same:,}",
            "–" if task.detectable is None else percent(task.detectable),
            "" if task.verdict == UNDECIDED else task.verdict,
        )
        for task in found.tasks
    ]
    averages = [
        (one.name, "", *_common(one), p_text(one.p), "", "", "", "", "" if one.verdict == UNDECIDED else one.verdict)
        for one in (found.averages if len(found.tasks) > 1 else ())
    ]
    about = ("task", "n", a, b, f"{b} - {a}", "95 % interval", "± SE", "p (Holm)")
    headers = (*about, "won", "lost", "same", "could show", f"{b} is")
    return Table(headers, (*rows, *averages), frozenset({len(rows)} if averages else ()))


def _common(one: Difference) -> tuple[str, ...]:
    reach = f"{points(one.low)} to {points(one.high)}"
    return percent(one.score_a), percent(one.score_b), points(one.difference), reach, _error(one.stderr)


def _spreads(found: Comparison, a: str, b: str) -> Table:
    """Both parts of the error, of tasks and of the average."""
    rows = []
    for one in (*found.tasks, *found.averages):
        if parts := one.spread:
            name = label(one.name)
            sources = (*parts.deviations, math.sqrt(parts.seeds), _root(parts.documents))
            freedom = "–" if one.freedom is None else f"{one.freedom:,.1f}"
            rows.append((name, *map(_error, sources), _error(one.stderr), freedom))
    headers = (
        "task",
        f"SD of {a}'s runs",
        f"SD of {b}'s runs",
        "± from runs",
        "± from documents",
        "± both",
        "t with df",
    )
    return Table(headers, tuple(rows), frozenset({len(found.tasks)}), "Where the error comes from (in points):")


def _rules(found: Comparison, a: str, b: str) -> Table:
    rows = tuple(
        (
            f"{one.rule} <" if one.rule == found.rule else one.rule,
            points(one.average.difference),
            f"{points(one.average.low)} to {points(one.average.high)}",
            p_text(one.average.p),
            str(one.better),
            str(one.worse),
            one.average.verdict,
        )
        for one in found.rules
    )
    verdicts = [one.average.verdict for one in found.rules]
    agree = verdicts.count(found.average.verdict)
    title = (
        f"The same scores under every rule that all runs can answer: {agree} of {len(verdicts)} agree on the average."
    )
    headers = ("rule", f"average {b} - {a}", "95 % interval", "p", "tasks better", "tasks worse", f"{b} is")
    return Table(headers, rows, title=title)


def _notes(found: Comparison, a: str, b: str) -> Iterator[str]:
    yield f"{found.measure.words}; differences in points"
    if any(task.test == SEEDS for task in found.tasks):
        yield (
            "p: t over runs and documents, which are crossed; each side's spread has its own degrees of freedom (runs "
            "less one), so the test holds for unequal groups and spreads; Holm over the tasks, averages as they are"
        )
    else:
        if graded := [task for task in found.tasks if task.test == SIGN_FLIP and found.measure.graded]:
            every = "" if len(graded) == len(found.tasks) else "; exact McNemar where answers are right or wrong"
            test = (
                f"the larger of sign flips' ({DRAWS:,} drawn where there are more patterns than can be counted) and "
                f"the interval's t{every}"
            )
        else:
            test = "exact McNemar"
        yield f"p: {test}; Holm over the tasks; averages: t, as they are; a p of 0.05 is significant"
    yield f"won, lost: documents that {b} scores higher on, and {a}; intervals are each row's own, not corrected"
    if clustered := [task for task in found.tasks if task.sources < task.n]:
        listed = ", ".join(f"{label(task.name)} {task.sources:,}" for task in clustered)
        exact = "exact " * (not found.measure.graded)
        larger = f", p the larger of {exact}sign flips of whole sources and the interval's t"
        tested = "" if clustered[0].test == SEEDS else larger
        yield f"†: documents share sources ({listed}): clustered error{tested}"
    if strata := [task for task in found.tasks if task.strata > 1]:
        yield f"stratified by subject: {', '.join(label(task.name) for task in strata)}"
    evidence = "documents and runs" if any(task.spread for task in found.tasks) else "documents"
    yield f"could show: the smallest true difference that so many {evidence} find in four cases of five, before Holm"
    if dropped := [task for task in found.tasks if task.dropped]:
        yield "dropped, since not every run has them: " + ", ".join(
            f"{task.dropped:,} documents of {label(task.name)}" for task in dropped
        )
    reasons: dict[str, list[str]] = {}
    for task, reason in found.left_out.items():
        reasons.setdefault(reason, []).append(label(task))
    for reason, tasks in reasons.items():
        yield f"not compared ({reason}): {', '.join(tasks)}"
    if any(not task.official for task in found.tasks):
        yield "*: not the official documents of the task"


def _root(variance: float) -> float:
    return math.sqrt(variance) if variance >= 0 else math.nan


def _error(stderr: float | None) -> str:
    return "–" if stderr is None or math.isnan(stderr) else percent(stderr, 2)


def _short(task: str) -> str:
    return LONGBENCH_LABELS.get(task) or short_label(task)
