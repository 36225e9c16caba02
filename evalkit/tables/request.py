"""Requests of `evalkit table`. In: a `TableRequest`. Out: a `Table`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from evalkit.benchmarks.registry import benchmark_of
from evalkit.errors import UnknownNameError, UsageError
from evalkit.reporting.table import Table, literal, parse, plain
from evalkit.runs.finding import find_run, root_of_runs
from evalkit.runs.outcomes import ACCURACY, OUTCOMES, outcome_key
from evalkit.tables.fill import Filling, Lead, fill
from evalkit.tables.layout import Group, LayoutItem, TableLayout, load_layout
from evalkit.tables.measured import Measured, RunMapping, map_runs, measure, read_mapping
from evalkit.tables.published import printed_cells, published_numbers

_DECIMALS = 3
"""Of continuous outcomes."""
_SCOPES = {"section": "each section", "table": "the table"}


def retitled(layout: TableLayout, caption: str | None, titles: Mapping[str, str], where: str) -> TableLayout:
    """Return a layout with another caption and other titles.

    Args:
        layout: the layout.
        caption: in markup; None: the layout's own.
        titles: title of a group of rows or columns, as plain text → its replacement, in markup.
        where: source of the texts, for messages.

    Raises:
        UnknownNameError: no group has such a title.
        TableError: the markup is invalid.
    """
    known = {plain(group.title) for group in (*layout.rows, *layout.columns) if group.title}
    if unknown := next((title for title in titles if title not in known), None):
        raise UnknownNameError(f"title of table {layout.name} ({where})", unknown, known)
    texts = {title: parse(" ".join(given.split()), f"{where}, title '{title}'") for title, given in titles.items()}

    def renamed(groups: tuple[Group, ...]) -> tuple[Group, ...]:
        return tuple(group._replace(title=texts.get(plain(group.title), group.title)) for group in groups)

    return replace(
        layout,
        caption=layout.caption if caption is None else parse(" ".join(caption.split()), f"{where}, caption"),
        rows=renamed(layout.rows),
        columns=renamed(layout.columns),
    )


def _of_outcome(layout: TableLayout, name: str) -> TableLayout:
    """Return a layout for the means of an outcome: another caption, its decimals, and marks by its direction."""
    if name not in OUTCOMES:
        raise UnknownNameError("outcome", name, (ACCURACY, *OUTCOMES))
    if layout.pairs:
        raise UsageError(f"table {layout.name} shows shares of documents, not means; omit --outcome {name}")
    outcome = OUTCOMES[name]
    direction, marks = "higher", layout.marks
    if not outcome.higher_is_better:
        turned = {"highest": "lowest", "lowest": "highest"}
        direction, marks = "lower", {k: mark._replace(extreme=turned[mark.extreme]) for k, mark in marks.items()}
    legend = [f"{kind.capitalize()}: {mark.extreme} in {_SCOPES[mark.scope]}." for kind, mark in marks.items()]
    title = f"{outcome.title[:1].upper()}{outcome.title[1:]} of suite {layout.suite}, mean over documents; {direction}"
    caption = " ".join([f"{title} is better.", *legend])
    return replace(layout, caption=literal(caption), decimals=_DECIMALS, unit="", marks=marks)


def without_empty(layout: TableLayout, filled: Collection[str]) -> TableLayout:
    """Return a layout without models that have no numbers, and without sections that have no models.

    A row stays if an indented row below it has numbers: "all layers" alone would be read as that of the row above.
    """
    groups = tuple(
        group._replace(items=items)
        for group in layout.model_groups
        if (items := _filled(group.items, filled, layout.models_are_rows))
    )
    return replace(layout, rows=groups) if layout.models_are_rows else replace(layout, columns=groups)


def _filled(items: tuple[LayoutItem, ...], filled: Collection[str], indented: bool) -> tuple[LayoutItem, ...]:
    kept, parent = set(filled), None
    for item in items:
        if not item.indent:
            parent = item.key
        elif indented and parent is not None and item.key in filled:
            kept.add(parent)
    return tuple(item for item in items if item.key in kept)


@dataclass(frozen=True)
class TableRequest:
    """A table with its source and the options of `evalkit table`."""

    name: str
    """Name of a layout, or a layout file."""
    source: str = "published"
    """published, runs or both."""
    mapping: Path | None = None
    """YAML file that maps rows to runs."""
    runs: tuple[str, ...] = ()
    """Runs in place of a mapping, by folder or name; they are assigned to rows by their models."""
    drop_empty: bool = False
    rule: str | None = None
    outcome: str | None = None
    """Continuous outcome in place of accuracy (`runs.outcomes`)."""
    as_printed: bool = False
    spreads: bool = False
    """Print ±."""
    significance: bool = False
    mixed: bool = False
    """Mark runs with another protocol instead of rejecting them."""


def make(request: TableRequest) -> Table:
    """Read the layout and its numbers, and fill the table.

    Raises:
        EvalkitError: the layout, the numbers, the runs or the combination of options is invalid.
    """
    _check_source(request)
    check_options(request)
    layout = requested_layout(request)
    if request.source == "published":
        printed = printed_cells(layout) if request.as_printed else None
        return fill(layout, Filling(published_numbers(layout), printed=printed))
    if request.mapping is not None:
        mapping = read_mapping(request.mapping)
    else:
        mapping = map_runs(layout, [find_run(name, root_of_runs()) for name in request.runs])
    return made_of_runs(layout, mapping, request)


def requested_layout(request: TableRequest) -> TableLayout:
    """Return the layout of a request, for its outcome."""
    layout = load_layout(request.name)
    return _of_outcome(layout, request.outcome) if request.outcome and _has_other_outcome(request) else layout


def made_of_runs(layout: TableLayout, mapping: RunMapping, request: TableRequest, remarks: Sequence[str] = ()) -> Table:
    """Fill a layout from the runs of its rows, with the options of a request and `remarks` as further notes.

    Raises:
        EvalkitError: as `make`; or all rows are empty and none are to be printed.
    """
    key = request.rule
    if request.outcome and _has_other_outcome(request):
        key = outcome_key(request.outcome, request.rule or mapping.rule)
    measured = measure(layout, mapping, key, request.mixed)
    published = published_numbers(layout) if request.source == "both" else None
    if request.drop_empty:
        layout = without_empty(layout, measured.numbers)
        if not layout.models:
            raise UsageError(f"table {layout.name}: no row has a run, so --drop-empty leaves nothing to print")
    return fill(
        layout,
        Filling(
            measured.numbers,
            published=published,
            leads=_significant(layout, measured) if request.significance else None,
            spreads=request.spreads,
            row_marks=measured.row_marks,
            notes=(*measured.notes, *(literal(text) for text in (*_legend(request, measured), *remarks))),
        ),
    )


def _has_other_outcome(request: TableRequest) -> bool:
    return request.outcome not in (None, ACCURACY)


def _check_source(request: TableRequest) -> None:
    published, given = request.source == "published", request.mapping is not None or bool(request.runs)
    if published and given:
        raise UsageError("--runs is for --source runs or both; add one of them")
    if not published and not given:
        raise UsageError(
            f"--source {request.source} needs --runs FILE.yaml, which maps the table's rows to run folders, "
            "--runs RUN RUN …, or --study FILE.yaml"
        )


def check_options(request: TableRequest) -> None:
    """Raise `UsageError` if an option is not one of the source's."""
    published = request.source == "published"
    if request.as_printed and not published:
        raise UsageError("--as-printed shows the paper's own marks; use it with --source published only")
    runs_only = {"--stderr": request.spreads, "--significance": request.significance, "--rule": bool(request.rule),
                 "--outcome": _has_other_outcome(request),
                 "--allow-mixed": request.mixed, "--drop-empty": request.drop_empty}  # fmt: skip
    if published and (asked := [name for name, on in runs_only.items() if on]):
        raise UsageError(f"{asked[0]} is for numbers of runs, not for published ones; add --source runs")
    if request.source == "both" and _has_other_outcome(request):
        raise UsageError(f"the published numbers are accuracies; use --outcome {request.outcome} with --source runs")


def _legend(request: TableRequest, measured: Measured) -> list[str]:
    lines = []
    several = sorted({len(runs) > 1 for runs in measured.runs.values()})
    if request.spreads and measured.runs:
        run = next(iter(measured.runs.values()))[0]
        known = any(metric.stderr is not None for metric in benchmark_of(run).metrics(run, measured.rule))
        error = "standard error over documents" if known else f"not stored by single runs of {run.kind}"
        kinds = {False: error, True: "standard deviation over seeds (rows of several runs)"}
        lines.append("±: " + ", ".join(kinds[kind] for kind in several) + ".")
    if request.source == "both":
        lines.append("In brackets: difference from the published number.")
    if request.significance:
        lines.append(
            "†: the lead over the next best is significant (p at most 0.05 after Holm's correction over all leads of "
            "the table; paired on documents, those of one source together)."
        )
        if len(several) > 1:
            lines.append("A row of a single run is that one checkpoint: nothing is claimed about other seeds.")
    return lines


def _significant(layout: TableLayout, measured: Measured) -> Callable[[Sequence[Lead]], Set[Lead]]:
    if layout.pairs:
        raise UsageError(f"--significance tests means, and table {layout.name} shows shares of documents; omit it")
    if "bold" not in layout.marks:
        raise UsageError(f"table {layout.name} marks no best numbers, so --significance has nothing to test; omit it")
    # Imported here, since it needs pandas
    from evalkit.tables.row_models import significant_leads

    return lambda leads: significant_leads(layout, measured.runs, measured.rule, leads)
