"""Reports of comparisons: tables and notes, below the verdicts of `sentences.py`.

In: `Comparison`s. Out: a `Report` with sentences, tables and records.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from evalkit.benchmarks.outcomes import flat_fields
from evalkit.comparison.differences import TOO_FEW, UNDECIDED, Comparison, TaskDifference
from evalkit.comparison.line import PAIRS, SEEDS, SIGN_FLIP
from evalkit.comparison.sentences import (
    continuous_sentence,
    headline,
    label,
    looks_sentence,
    margin_sentence,
    p_text,
    page_unit,
    prompt_of,
    prompts_sentence,
    tasks_sentence,
)
from evalkit.escape import counted
from evalkit.reporting.decimals import fixed, percent
from evalkit.reporting.report import Report
from evalkit.reporting.table import Table, filled_table, simple_table
from evalkit.runs.notes import macro_note
from evalkit.stats.significance import DRAWS

_DOMINANT = 0.25
"""Share of the variance over documents from which a single document is named."""
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


_COLUMNS = ("n", "sources", "dropped", "official", "score_a", "score_b", "difference", "low", "high", "stderr",
            "freedom", "test", "p", "p_holm", "verdict", "won", "lost", "same", "detectable", "dominance")  # fmt: skip
"""Fields of a record; those that only tasks have are None for averages."""


def comparison_report(comparisons: Sequence[Comparison]) -> Report:
    """Build the report of comparisons with the same baseline, whose sides are called by letters."""
    letters = (chr(ord("A") + n) if n < 26 else str(n) for n in range(1, len(comparisons) + 1))
    parts = tuple(map(_one_comparison, comparisons, letters))
    content = []
    for compared, part in zip(comparisons, parts, strict=True):
        fields = asdict(compared, dict_factory=flat_fields)
        content.append({"verdict": headline(compared)} | fields | {"notes": list(part.notes)})
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
    first = (headline(compared), margin_sentence(compared), looks_sentence(compared), tasks_sentence(compared))
    claim = compared.claim
    last = None if claim.sentence == claim.caution else claim.sentence
    sentences = tuple(filter(None, (*first, prompts, continuous_sentence(compared), last)))
    caution = (claim.caution,) * bool(claim.caution)
    return Report(tables, sentences, facts, tuple(_notes(compared, b)), caution=caution)


def _records(compared: Comparison) -> Iterator[dict[str, Any]]:
    columns = ("layer", *_COLUMNS) if compared.measure.layers else _COLUMNS
    about = {"a": compared.a, "b": compared.b, "rule": compared.rule} | compared.measure.scale.entries
    for row in (*compared.tasks, *compared.averages):
        kind = "task" if isinstance(row, TaskDifference) else "average"
        numbers = {column: getattr(row, column, None) for column in columns}
        parts = {f"variance_{part}": getattr(row.spread, part, None) for part in ("seeds", "documents", "shared")}
        yield {**about, "kind": kind, "name": row.name, **numbers, **parts}


def _differences(compared: Comparison, b: str) -> Table:
    unit = page_unit(compared)

    rows = []
    for row in (*compared.tasks, *(compared.averages if len(compared.tasks) > 1 else ())):
        mark = "*" * row.has_caveats
        shown, n, p = row.name + mark, "", row.p if row.p_holm is None else row.p_holm
        counts = ["", "", unit.value(row.detectable) if row is compared.average else ""]
        if isinstance(row, TaskDifference):
            shown = label(compared, row.name) + "†" * (row.sources < row.n) + mark
            n, counts = f"{row.n:,}", [f"{row.won:,}", f"{row.lost:,}", unit.value(row.detectable)]
        verdict = "" if row.verdict == UNDECIDED else row.verdict
        rows.append([shown, n, *unit.cells(row), unit.error(row.stderr), p_text(p), *counts, verdict])
    about = ("task", "n", "A", b, f"{b} − A", "95 % interval", "± SE", "p (Holm)")
    won = ("higher", "lower") if compared.measure.higher_is_better is None else ("won", "lost")
    headers = (*about, *won, "could show", f"{b} is")
    return filled_table(f"comparison-{b}", headers, rows, ruled={len(compared.tasks)})


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
        shown = (prompt_of(rule) if by_prompt else rule) + " <" * (rule == compared.rule)
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
    yield from macro_note({task.name: label(compared, task.name) for task in strata})
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
    yield from compared.remarks
