"""The paper's integrity check: a run beside public models, and how the protocols differ.

In: a finished run. Out: the table res_intg_app with the run in it, once under its own rule and once under each set of
rules that the published rows are assumed to follow, all from the same log-likelihoods. No number is marked best, since
numbers of different protocols are not comparable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated

from pydantic import AfterValidator

from evalkit.errors import TableError, UsageError
from evalkit.inputs.validated import FileSettings, read_settings
from evalkit.paths import resource
from evalkit.reporting.decimals import half_up, to_text
from evalkit.reporting.table import Table, literal
from evalkit.runs.folder import Run
from evalkit.runs.notes import run_notes
from evalkit.runs.traits import summary, traits
from evalkit.tables.fill import Number, computed, fill, published_numbers, with_averages
from evalkit.tables.layout import AVERAGE, Group, LayoutItem, TableLayout, load_layout
from evalkit.tables.measured import task_values

LAYOUT = "res_intg_app"


class PublishedProtocol(FileSettings):
    """Assumed protocol of a published row."""

    name: str
    rules: dict[str, str]
    """Task → rule; "default" for the others."""
    prompts: str
    """The template with the most similar prompts."""
    why: Annotated[str, AfterValidator(lambda why: " ".join(why.split()))]


def check(run: Run, rule: str | None = None, tokens: str | None = None) -> Table:
    """Return a table of a finished run, under a rule (its own by default), beside the published rows.

    `tokens`, the number of training tokens, is printed as given. A run of another suite is a `UsageError`.
    """
    layout = load_layout(LAYOUT)
    if run.suite != layout.suite:
        raise UsageError(f"run {run.folder} is of suite {run.suite}; the published numbers are of suite {layout.suite}")
    protocols = read_protocols()
    rule = rule or str(run.manifest["rule"])
    name = run.model.rstrip("/").rsplit("/", 1)[-1]
    by_rules: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for protocol in protocols.values():
        by_rules.setdefault(tuple(sorted(protocol.rules.items())), []).append(protocol.name)
    rules = {f"{name}, {rule}": {"default": rule}}
    rules |= {f"as {' and '.join(names)}": dict(pairs) for pairs, names in by_rules.items()}
    count = run.manifest.get("loaded", {}).get("parameters")
    size = "-" if not count else f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"
    facts = dict(zip(layout.facts, map(literal, (size, tokens or "-")), strict=True))
    items = {key: LayoutItem(label=literal(key), indent=key.startswith("as "), facts=facts) for key in rules}
    rows = (*layout.rows, Group.model_construct(items=items))
    numbers = published_numbers(layout) | {key: _numbers(layout, run, by_task) for key, by_task in rules.items()}
    caption = literal(f"{run.manifest['model']} beside the rows of the paper's table {LAYOUT}; accuracy in %.")
    notes = _notes(layout, run, rule, protocols)
    shown = layout.model_copy(update={"marks": {}, "rows": rows, "caption": caption})
    return fill(shown, numbers)._replace(name="integrity").with_notes(notes)


def read_protocols() -> dict[str, PublishedProtocol]:
    path = resource("results", "published", "protocols.yaml")
    return read_settings(path, dict[str, PublishedProtocol], TableError)


def _numbers(layout: TableLayout, run: Run, rules: Mapping[str, str]) -> dict[str, Number]:
    """Task → accuracy in percent, each task under its rule."""
    scored = {task: task_values(run, rules.get(task, rules["default"])).get(task) for task in layout.tasks}
    return {task: Number(value[0]) for task, value in scored.items() if value is not None}


def _notes(layout: TableLayout, run: Run, rule: str, protocols: Mapping[str, PublishedProtocol]) -> Iterator[str]:
    published, places = computed(layout, published_numbers(layout)), layout.decimals
    for key, protocol in protocols.items():
        if average := with_averages(layout, _numbers(layout, run, protocol.rules)).get(AVERAGE):
            theirs = published[key, AVERAGE].value
            apart = to_text(half_up(average.value, places) - half_up(theirs, places), places, signed=True)
            ours = f"Average under {protocol.name}'s rules: {to_text(average.value, places)}"
            yield f"{ours}, {apart} from its {to_text(theirs, places)}."
    yield f"Your run: {'; '.join([summary(run, rule), *run_notes(run.manifest)])}."
    for protocol in protocols.values():
        by_rule: dict[str, list[str]] = {}
        for task, other_rule in protocol.rules.items():
            if task != "default":
                by_rule.setdefault(other_rule, []).append(task)
        others = "; ".join(f"{other_rule} for {', '.join(tasks)}" for other_rule, tasks in by_rule.items())
        rules = protocol.rules["default"] + (f" ({others})" if others else "")
        yield f"{protocol.name}: believed scored by {rules}: {protocol.why}."
    if differing := [protocol for protocol in protocols.values() if protocol.prompts != run.template]:
        names = " and ".join(protocol.name for protocol in differing)
        prompts = " or ".join(sorted({protocol.prompts for protocol in differing}))
        yield f"Prompts differ: template {run.template} here; {names} as {prompts}."
    here = traits(run, rule)
    if here["limit"].value != "none":
        yield f"Documents differ: {here['limit'].words} here, all of them in the published numbers."
    if here["solved examples"].value != "0":
        yield f"Prompts differ: {here['solved examples'].words} here, zero-shot in the published numbers."
    if here["context extension"].value != "none":
        yield f"Context differs: {here['context extension'].words} here, none is said to be in the published numbers."
