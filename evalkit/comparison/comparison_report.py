"""Reports of comparisons.

In: `Comparison`s. Out: a `Report` with tables (shares in percent and points, other measures in their unit) and records.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from evalkit.comparison.differences import (
    DOWN,
    UNDECIDED,
    UP,
    Comparison,
    ContinuousEvidence,
    Difference,
    RuleVerdict,
    Unit,
    difference_text,
    interval_text,
    p_text,
    unit_of,
)
from evalkit.comparison.line import SEEDS, SIGN_FLIP
from evalkit.reporting.decimals import fixed, percent
from evalkit.reporting.report import Report
from evalkit.reporting.table import Table, simple_table
from evalkit.stats.significance import DRAWS

_SMALL = 10
"""Ratios below it are printed with a decimal."""


def continuous_sentence(found: Comparison) -> str | None:
    """Return what the continuous outcome shows, and how many times fewer documents it needs; None if there is none."""
    one = found.continuous
    if one is None:
        return None
    unit, average = unit_of(one.measure, [one.average.stderr]), one.average
    tasks = ", ".join(found.labels[task].full for task in one.left_out)
    without = f", without {tasks}, whose answers are letters" if tasks else ""
    name = f"{one.measure.name[:1].upper()}{one.measure.name[1:]}"
    numbers = f"{name}{without}: average {difference_text(average, unit)}"
    direction = "lower" if one.measure.higher_is_better is False else "higher"
    if average.verdict == UNDECIDED:
        return f"{numbers}; {direction} is better: undecided."
    said = f"{numbers}; {direction} is better, so {found.b} is {average.verdict}"
    if found.average.verdict not in (UNDECIDED, average.verdict):
        return f"{said}, and the two outcomes contradict each other."
    return f"{said}{_documents(one)}."


def _documents(one: ContinuousEvidence) -> str:
    if one.times_low is None:
        return ""
    if one.times_high is None:
        if one.times_low < 1:
            return ""
        return f"; for the same power it needs at least {_ratio(one.times_low)} times fewer documents than accuracy"
    assert one.times is not None
    interval = f"95 % interval {_ratio(one.times_low)} to {_ratio(one.times_high)}"
    if one.times >= 1:
        return f"; for the same power it needs {_ratio(one.times)} times fewer documents than accuracy ({interval})"
    turned = f"95 % interval {_ratio(1 / one.times_high)} to {_ratio(1 / one.times_low)}"
    return f"; for the same power accuracy needs {_ratio(1 / one.times)} times fewer documents ({turned})"


def _ratio(times: float) -> str:
    return f"{round(times):,}" if times >= _SMALL else fixed(times, 1)


_PROMPT_NOTES = (
    "mean over prompts: of each document the mean of its values under its prompts (1 or 0: right or wrong)",
    "prompts one by one: a task that lacks a prompt (an order of options that it does not list) counts with the run's "
    "own prompt; p and intervals of single prompts are not corrected for their number",
    "under all prompts: intersection-union test, whose p is the largest of the prompts' and needs no correction "
    "(Berger 1982); the claim is about these prompts, not about others",
)
_MEAN = "mean over prompts"


def _prompt_of(rule: str) -> str:
    """Return the prompt of "RULE@PROMPT"; of a rule alone, that it is the mean over them."""
    return rule.partition("@")[2] or _MEAN


def _single_prompts(found: Comparison) -> list[RuleVerdict]:
    """Return the verdict under each prompt, without that on the mean."""
    return [one for one in found.rules if "@" in one.rule]


def prompts_sentence(found: Comparison) -> str:
    """Return whether B is better, or worse, than A under all prompts."""
    single = _single_prompts(found)
    up, down = (sum(one.average.verdict in verdicts for one in single) for verdicts in (UP, DOWN))
    count, on = len(single), " on average over the tasks" if len(found.tasks) > 1 else ""
    better, worse = found.verdicts
    if count in (up, down):
        last = max(single, key=lambda one: 1.0 if one.average.p is None else one.average.p)
        said = f"{found.b} is {better if up else worse} than {found.a} under all {count} prompts{on}"
        return f"{said} (intersection-union test: the largest p is {p_text(last.average.p)}, {_prompt_of(last.rule)})."
    if not up and not down:
        sign = -1 if found.measure.higher_is_better is False else 1
        ahead, behind = (sum(sign * side * one.average.difference > 0 for one in single) for side in (1, -1))
        said = f"No difference between {found.b} and {found.a} is shown under any of {count} prompts{on}"
        return f"{said}; {found.b} is ahead under {ahead}, {found.a} under {behind}."
    counts = {better: up, worse: down, "undecided": count - up - down}
    said = ", ".join(f"{verdict} under {number}" for verdict, number in counts.items() if number)
    return (
        f"Of {count} prompts{on}, {found.b} against {found.a} is {said}: neither is shown to be {better} under all of "
        "them."
    )


def headline(found: Comparison) -> str:
    """Return the verdict as a sentence."""
    up, down = found.verdicts
    better, worse, count = found.count(up), found.count(down), len(found.tasks)
    tasks, average = f"{count} {'layer' if found.measure.layers else 'task'}" + "s" * (count > 1), found.average
    unit = page_unit(found)
    if not (better or worse) and count > 1 and average.verdict != UNDECIDED:
        alone = f"none of {tasks} shows it alone after Holm's correction"
        return f"{found.b} is {average.verdict} than {found.a} on average, {difference_text(average, unit)}; {alone}."
    if better and worse:
        said = f"{found.b} is {up} than {found.a} on {better} of {tasks} and {down} on {worse}"
    elif better or worse:
        said = f"{found.b} is {up if better else down} than {found.a} on {better or worse} of {tasks}"
    else:
        on = f"any of {tasks}" if count > 1 else tasks
        said = f"No difference between {found.b} and {found.a} is shown on {on}"
    corrected = " after Holm's correction" if count > 1 else ""
    if count == 1:
        return f"{said}: {difference_text(found.tasks[0], unit)}."
    return f"{said}{corrected}; average {difference_text(average, unit)}: {average.verdict}."


def page_unit(found: Comparison) -> Unit:
    """Return the unit that a comparison is printed in."""
    return unit_of(found.measure, [one.stderr for one in (*found.tasks, *found.averages)])


def label(found: Comparison, name: str) -> str:
    """Return the printed label of a line; of an average, its name."""
    return found.labels[name].full if name in found.labels else name


def comparison_report(found: Sequence[Comparison]) -> Report:
    """Build the report of comparisons with the same baseline."""
    letters = [chr(ord("A") + place) if place < 26 else str(place) for place in range(len(found) + 1)]
    parts = tuple(_one(one, "A", letter) for one, letter in zip(found, letters[1:], strict=True))
    content = {
        "comparisons": [
            {"verdict": headline(one)} | asdict(one) | {"notes": list(part.notes)}
            for one, part in zip(found, parts, strict=True)
        ]
    }
    return Report((), content=content, records=[record for one in found for record in _records(one)], parts=parts)


def _one(found: Comparison, a: str, b: str) -> Report:
    """Build the report of one comparison; sides are called by their letters."""
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
    prompts = prompts_sentence(found) if found.measure.alternatives == "prompt" else None
    sentences = (headline(found), prompts, continuous_sentence(found), found.claim.sentence)
    verdict = tuple(filter(None, sentences))
    return Report(tuple(tables), verdict, tuple(facts), tuple(_notes(found, a, b)))


def _records(found: Comparison) -> Iterator[dict[str, Any]]:
    """Yield a record for each task and average; differences and scores are fractions."""
    for kind, members in (("task", found.tasks), ("average", found.averages)):
        for one in members:
            content = {key: value for key, value in asdict(one).items() if key not in ("spread", "name")}
            yield {
                "a": found.a,
                "b": found.b,
                "rule": found.rule,
                "kind": kind,
                "name": one.name,
                **({"layer": content.get("layer")} if found.measure.layers else {}),
                **{key: content.get(key) for key in _COLUMNS},
                **{f"variance_{key}": getattr(one.spread, key, None) for key in ("seeds", "documents", "shared")},
            }


_COLUMNS = ("n", "sources", "dropped", "official", "score_a", "score_b", "difference", "low", "high", "stderr",
            "freedom", "test", "p", "p_holm", "verdict", "won", "lost", "same", "detectable")  # fmt: skip


def _differences(found: Comparison, a: str, b: str) -> Table:
    unit = page_unit(found)
    rows = [
        (
            label(found, task.name) + "†" * (task.sources < task.n) + "*" * (not task.official),
            f"{task.n:,}",
            *_common(task, unit),
            p_text(task.p_holm),
            f"{task.won:,}",
            f"{task.lost:,}",
            "–" if task.detectable is None else unit.value(task.detectable),
            "" if task.verdict == UNDECIDED else task.verdict,
        )
        for task in found.tasks
    ]
    averages = [
        (one.name, "", *_common(one, unit), p_text(one.p), *[""] * 3, "" if one.verdict == UNDECIDED else one.verdict)
        for one in (found.averages if len(found.tasks) > 1 else ())
    ]
    about = ("task", "n", a, b, f"{b} − {a}", "95 % interval", "± SE", "p (Holm)")
    won = ("higher", "lower") if found.measure.higher_is_better is None else ("won", "lost")
    headers = (*about, *won, "could show", f"{b} is")
    lines = [*rows, *averages]
    # Without a significant difference the last column is empty
    last = len(headers) if any(line[-1] for line in lines) else len(headers) - 1
    return simple_table(f"comparison-{b}", headers[:last], [line[:last] for line in lines], ruled={len(rows)})


def _common(one: Difference, unit: Unit) -> tuple[str, ...]:
    scores = unit.value(one.score_a), unit.value(one.score_b), unit.difference(one.difference)
    return *scores, interval_text(one, unit), unit.error(one.stderr)


def _spreads(found: Comparison, a: str, b: str) -> Table:
    """Build the table of standard errors by component: runs and documents."""
    rows, unit = [], page_unit(found)
    for one in (*found.tasks, *found.averages):
        if parts := one.spread:
            name = label(found, one.name)
            sources = (*parts.deviations, math.sqrt(parts.seeds), _root(parts.documents))
            freedom = fixed(one.freedom, 1)
            rows.append((name, *map(unit.error, sources), unit.error(one.stderr), freedom))
    runs = (f"SD of {a}'s runs", f"SD of {b}'s runs")
    headers = ("task", *runs, "± from runs", "± from documents", "± both", "t with df")
    title = f"Sources of the standard error{' (in points)' if unit.points else ''}"
    return simple_table(f"errors-{b}", headers, rows, ruled={len(found.tasks)}, title=title)


def _rules(found: Comparison, a: str, b: str) -> Table:
    unit, by_prompt = page_unit(found), found.measure.alternatives == "prompt"
    rows = tuple(
        (
            (_prompt_of(one.rule) if by_prompt else one.rule) + " <" * (one.rule == found.rule),
            unit.difference(one.average.difference),
            interval_text(one.average, unit),
            p_text(one.average.p),
            str(one.better),
            str(one.worse),
            one.average.verdict,
        )
        for one in found.rules
    )
    what, above = "The same scores under every rule that all runs support", "the rule above"
    if by_prompt:
        what, above = "The prompts one by one", "the table above"
    verdicts = [one.average.verdict for one in (_single_prompts(found) if by_prompt else found.rules)]
    agree = verdicts.count(found.average.verdict)
    title = f"{what}: {agree} of {len(verdicts)} agree on the average (<: {above})."
    counted = (f"tasks {verdict}" for verdict in found.verdicts)
    headers = ("prompt" if by_prompt else "rule", f"average {b} − {a}", "95 % interval", "p", *counted, f"{b} is")
    return simple_table(f"rules-{b}", headers, rows, title=title)


def _notes(found: Comparison, a: str, b: str) -> Iterator[str]:
    yield found.measure.words + ("; differences in points" if found.measure.is_share else "")
    if found.measure.layers and found.average.name == "Average":
        yield "average: mean over documents of each document's mean over the layers"
    if any(task.test == SEEDS for task in found.tasks):
        yield (
            "p: t over runs and documents, which are crossed; each side's spread has its own degrees of freedom (runs "
            "less one), so the test is valid for unequal groups and spreads; Holm over the tasks, averages uncorrected"
        )
    else:
        if graded := [task for task in found.tasks if task.test == SIGN_FLIP and found.measure.graded]:
            every = "" if len(graded) == len(found.tasks) else "; exact McNemar where answers are right or wrong"
            test = (
                f"the larger of the sign-flip test's ({DRAWS:,} sampled patterns where there are too many to "
                f"enumerate) and the interval's t{every}"
            )
        else:
            test = "exact McNemar"
        yield f"p: {test}; Holm over the tasks; averages: t, uncorrected; a p of 0.05 is significant"
    if found.letters:
        listed = ", ".join(label(found, task) for task in found.letters)
        yield f"answers of {listed} are letters: the values mostly measure the format, and outweigh others in averages"
    if share := found.measure.resolution:
        yield f"differences up to {percent(share, 2)} % of the values are rounding and have p 1"
    won, more = {True: ("won, lost", "higher"), False: ("won, lost", "lower"), None: ("higher, lower", "higher")}[
        found.measure.higher_is_better
    ]
    yield f"{won}: documents on which {b}, or {a}, scores {more}; intervals are not corrected"
    if clustered := [task for task in found.tasks if task.sources < task.n]:
        listed = ", ".join(f"{label(found, task.name)} {task.sources:,}" for task in clustered)
        exact = "exact " * (not found.measure.graded)
        larger = f", p: the larger of the {exact}sign-flip test's over whole sources and the interval's t"
        tested = "" if clustered[0].test == SEEDS else larger
        yield f"†: documents share sources ({listed}): clustered error{tested}"
    if strata := [task for task in found.tasks if task.strata > 1]:
        yield f"stratified by subject: {', '.join(label(found, task.name) for task in strata)}"
    evidence = "documents and runs" if any(task.spread for task in found.tasks) else "documents"
    if found.measure.alternatives == "prompt":
        yield from _PROMPT_NOTES
    yield f"could show: the smallest true difference that so many {evidence} detect with 80 % power, before Holm"
    if dropped := [task for task in found.tasks if task.dropped]:
        yield "dropped, because not every run has them: " + ", ".join(
            f"{task.dropped:,} documents of {label(found, task.name)}" for task in dropped
        )
    reasons: dict[str, list[str]] = {}
    for task, reason in found.left_out.items():
        reasons.setdefault(reason, []).append(label(found, task))
    for reason, tasks in reasons.items():
        yield f"not compared ({reason}): {', '.join(tasks)}"
    if any(not task.official for task in found.tasks):
        yield "*: not the official documents of the task"


def _root(variance: float) -> float:
    return math.sqrt(variance) if variance >= 0 else math.nan
