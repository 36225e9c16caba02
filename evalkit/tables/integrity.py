"""The paper's check of one's own checkpoint: beside models off the shelf, and how the protocols differ.

In: a finished run. Out: the table res_intg_app with the run in it, once under its own rule and once under each set of
rules that the published rows are believed to follow, since the same log-likelihoods answer for all. Nothing is marked
best: numbers of different protocols do not compete.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

from pydantic import AfterValidator

from evalkit.errors import TableError, UsageError
from evalkit.inputs.settings import FileSettings, read_settings
from evalkit.reporting.decimals import half_up, mean, to_text
from evalkit.reporting.markup import literal
from evalkit.reporting.table import Cell, Line, Section, Table
from evalkit.resources import resource
from evalkit.runs.folder import Run
from evalkit.runs.traits import summary, traits, unofficial
from evalkit.tables.fill import Filling, computed, fill
from evalkit.tables.layout import AVERAGE, TableLayout, load_layout
from evalkit.tables.measured import accuracies
from evalkit.tables.request import published_numbers

LAYOUT = "res_intg_app"


@dataclass(frozen=True)
class Published:
    """How a published row is believed to have been scored."""

    key: str
    name: str
    rules: dict[str, str]
    """Task → rule; "default" for the others."""
    prompts: str
    """The template that its prompts are nearest to."""
    why: str


class _BeliefFile(FileSettings):
    """What the file says of a row."""

    name: str
    rules: dict[str, str]
    prompts: str
    why: Annotated[str, AfterValidator(lambda why: " ".join(why.split()))]


def check(run: Run, rule: str | None = None, tokens: str | None = None) -> Table:
    """The run beside the published rows.

    Args:
        run: a finished run of the table's suite.
        rule: its rule; the run's own if none is named.
        tokens: what it was trained on, to be printed.

    Raises:
        UsageError: it is of another suite.
        UnknownNameError: it was not scored for the rule.
    """
    layout = load_layout(LAYOUT)
    if run.suite != layout.suite:
        raise UsageError(f"run {run.folder} is of suite {run.suite}; the published numbers are of suite {layout.suite}")
    beliefs = list(read_beliefs())
    own = rule or str(run.manifest["rule"])
    name = str(run.manifest["model"]).rstrip("/").rsplit("/", 1)[-1]
    rows = {f"{name}, {own}": _values(layout, run, {"default": own})}
    rows |= {f"as {' and '.join(names)}": _values(layout, run, rules) for names, rules in _by_rules(beliefs)}
    table = fill(layout, Filling(published_numbers(layout)))
    section = Section((), "line", tuple(_line(layout, run, label, tokens, row) for label, row in rows.items()))
    notes = [*_differences(layout, run, beliefs), *_protocol(run, own, beliefs)]
    return table._replace(
        name="integrity",
        caption=literal(f"{run.manifest['model']} beside the rows of the paper's table {LAYOUT}; accuracy in %."),
        sections=(*map(_unmarked, table.sections), section),
        notes=tuple(map(literal, notes)),
    )


def read_beliefs() -> Iterator[Published]:
    """What is believed of the published rows."""
    content = read_settings(resource("results", "published", "protocols.yaml"), dict[str, _BeliefFile], TableError)
    for key, belief in content.items():
        yield Published(key, **dict(belief))


def _by_rules(beliefs: list[Published]) -> Iterator[tuple[list[str], dict[str, str]]]:
    """(names, rules) of the published rows that are believed to follow the same rules."""
    distinct: list[dict[str, str]] = []
    for belief in beliefs:
        if belief.rules not in distinct:
            distinct.append(belief.rules)
    for rules in distinct:
        yield [belief.name for belief in beliefs if belief.rules == rules], rules


def _values(layout: TableLayout, run: Run, rules: Mapping[str, str]) -> dict[str, Fraction]:
    """Measure → accuracy in percent, each task under its rule; averages only over all of their tasks."""
    found: dict[str, Fraction] = {}
    for task in layout.tasks:
        scored = accuracies(run, rules.get(task, rules["default"]))
        if task in scored:
            found[task] = scored[task][0]
    for name, tasks in layout.averages.items():
        if all(task in found for task in tasks):
            found[name] = mean([found[task] for task in tasks])
    return found


def _line(layout: TableLayout, run: Run, label: str, tokens: str | None, values: Mapping[str, Fraction]) -> Line:
    parameters = run.manifest.get("loaded", {}).get("parameters")
    facts = (literal(_size(parameters) if parameters else "-"), literal(tokens or "-"))
    shown = [values.get(item.key) for item in layout.measures]
    cells = tuple(Cell() if value is None else Cell(to_text(value, layout.decimals)) for value in shown)
    return Line(label, literal(label), label.startswith("as "), facts, cells)


def _size(parameters: int) -> str:
    """As the paper writes sizes: 1.2B, 135M."""
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"


def _unmarked(section: Section) -> Section:
    lines = [line._replace(cells=tuple(cell._replace(bold=False) for cell in line.cells)) for line in section.lines]
    return section._replace(lines=tuple(lines))


def _differences(layout: TableLayout, run: Run, beliefs: list[Published]) -> Iterator[str]:
    """How far the run lies from each published row under that row's rules, as printed."""
    published = computed(layout, published_numbers(layout))
    for belief in beliefs:
        values, places = _values(layout, run, belief.rules), layout.decimals
        if AVERAGE not in values:
            continue
        theirs = published[belief.key, AVERAGE].value
        difference = half_up(values[AVERAGE], places) - half_up(theirs, places)
        ours, apart = to_text(values[AVERAGE], places), to_text(difference, places, signed=True)
        yield f"Average under {belief.name}'s rules: {ours}, {apart} from its {to_text(theirs, places)}."


def _in_words(rules: Mapping[str, str]) -> str:
    """The default, then the tasks that each other rule is for."""
    by_rule: dict[str, list[str]] = {}
    for task, rule in rules.items():
        if task != "default":
            by_rule.setdefault(rule, []).append(task)
    others = "; ".join(f"{rule} for {', '.join(tasks)}" for rule, tasks in by_rule.items())
    return rules["default"] + (f" ({others})" if others else "")


def _protocol(run: Run, rule: str, beliefs: list[Published]) -> Iterator[str]:
    own = traits(run, rule)
    yield f"Your run: {summary(run, rule)}."
    for belief in beliefs:
        yield f"{belief.name}: believed scored by {_in_words(belief.rules)}: {belief.why}."
    template = run.template
    if other := [belief.name for belief in beliefs if belief.prompts != template]:
        prompts = {belief.prompts for belief in beliefs if belief.prompts != template}
        yield f"Prompts differ: template {template} here; {' and '.join(other)} as {' or '.join(sorted(prompts))}."
    if own["limit"].value != "none":
        yield f"Documents differ: {own['limit'].words} here, all of them in the published numbers."
    for kind, tasks in unofficial(run.manifest).items():
        yield f"{kind.capitalize()} differ: not the official ones of {', '.join(tasks)} here."
    if own["solved examples"].value != "0":
        yield f"Prompts differ: {own['solved examples'].words} here, zero-shot in the published numbers."
    if own["context extension"].value != "none":
        yield f"Context differs: {own['context extension'].words} here, none is said to be in the published numbers."
