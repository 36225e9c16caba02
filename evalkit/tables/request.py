"""Requests of `evalkit table`. In: a `TableRequest`. Out: a `Table`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from evalkit.benchmarks.registry import benchmark_of
from evalkit.errors import TableError, UnknownNameError, UsageError
from evalkit.paths import resource
from evalkit.reporting.markup import Text, literal, parse, plain
from evalkit.reporting.table import Table
from evalkit.runs.finding import find_run, root_of_runs
from evalkit.runs.outcomes import ACCURACY, OUTCOMES, outcome_key
from evalkit.tables.audit import Audited, as_table, audit
from evalkit.tables.fill import Filling, Lead, fill
from evalkit.tables.layout import Group, LayoutItem, TableLayout, layout_names, load_layout
from evalkit.tables.measured import Measured, RunMapping, map_runs, measure, read_mapping
from evalkit.tables.published import Number, Printed, read_numbers, read_printed

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
    texts = {title: _text(given, f"{where}, title '{title}'") for title, given in titles.items()}

    def renamed(groups: tuple[Group, ...]) -> tuple[Group, ...]:
        return tuple(replace(group, title=texts.get(plain(group.title), group.title)) for group in groups)

    return replace(
        layout,
        caption=layout.caption if caption is None else _text(caption, f"{where}, caption"),
        rows=renamed(layout.rows),
        columns=renamed(layout.columns),
    )


def of_outcome(layout: TableLayout, name: str) -> TableLayout:
    """Return a layout for the means of a continuous outcome: another caption, its decimals, and marks by its direction.

    Raises:
        UnknownNameError: there is no such outcome.
        UsageError: the layout does not show means.
    """
    if name not in OUTCOMES:
        raise UnknownNameError("outcome", name, (ACCURACY, *OUTCOMES))
    if layout.pairs:
        raise UsageError(f"table {layout.name} shows shares of documents, not means; omit --outcome {name}")
    outcome = OUTCOMES[name]
    turned = {"highest": "lowest", "lowest": "highest"}
    marks = {
        kind: mark if outcome.higher_is_better else replace(mark, extreme=turned[mark.extreme])
        for kind, mark in layout.marks.items()
    }
    direction = "higher" if outcome.higher_is_better else "lower"
    legend = [f"{kind.capitalize()}: {mark.extreme} in {_SCOPES[mark.scope]}." for kind, mark in marks.items()]
    title = f"{outcome.title[:1].upper()}{outcome.title[1:]} of suite {layout.suite}, mean over documents; {direction}"
    caption = " ".join([f"{title} is better.", *legend])
    return replace(layout, caption=literal(caption), decimals=_DECIMALS, unit="", marks=marks)


def without_empty(layout: TableLayout, filled: Collection[str]) -> TableLayout:
    """Return a layout without models that have no numbers, and without sections that have no models.

    A row stays if an indented row below it has numbers: "all layers" alone would be read as that of the row above.

    Args:
        layout: the layout.
        filled: keys of the models with numbers.
    """
    groups = tuple(
        replace(group, items=items)
        for group in layout.model_groups
        if (items := _filled(group.items, filled, layout.models_are_rows))
    )
    return replace(layout, rows=groups) if layout.models_are_rows else replace(layout, columns=groups)


def _filled(items: tuple[LayoutItem, ...], filled: Collection[str], indented: bool) -> tuple[LayoutItem, ...]:
    """Return the items with numbers, and those that an indented one with numbers belongs to."""
    kept, parent = set(filled), None
    for item in items:
        if not item.indent:
            parent = item.key
        elif indented and parent is not None and item.key in filled:
            kept.add(parent)
    return tuple(item for item in items if item.key in kept)


def _text(given: str, where: str) -> Text:
    return parse(" ".join(given.split()), where)


@dataclass(frozen=True)
class TableRequest:
    """A table with its source and options."""

    name: str
    """Name of a layout, or a layout file."""
    source: str = "published"
    """published, runs or both."""
    mapping: Path | None = None
    """YAML file that maps rows to runs."""
    runs: tuple[str, ...] = ()
    """Runs in place of a mapping, by folder or name; they are assigned to rows by their models."""
    drop_empty: bool = False
    """Leave out rows without a run, and sections without rows."""
    rule: str | None = None
    outcome: str | None = None
    """Continuous outcome in place of accuracy (`scores.outcomes`)."""
    as_printed: bool = False
    """Print the paper's own averages and marks."""
    spreads: bool = False
    """Print ±."""
    significance: bool = False
    """Mark best numbers with a significant lead."""
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
    return made_of_runs(layout, _mapping(layout, request), request)


def requested_layout(request: TableRequest) -> TableLayout:
    """Return the layout of a request, for its outcome.

    Raises:
        EvalkitError: there is no such layout or outcome, or the layout is not valid.
    """
    layout = load_layout(request.name)
    return layout if request.outcome in (None, ACCURACY) else of_outcome(layout, request.outcome)


def made_of_runs(layout: TableLayout, mapping: RunMapping, request: TableRequest, remarks: Sequence[str] = ()) -> Table:
    """Fill a layout from runs.

    Args:
        layout: the layout; the request's name is not used.
        mapping: the runs of its rows.
        request: the options.
        remarks: further notes.

    Raises:
        EvalkitError: as `make`; or all rows are empty and none are to be printed.
    """
    key = request.rule
    if request.outcome not in (None, ACCURACY):
        key = outcome_key(request.outcome, request.rule or mapping.rule)
    found = measure(layout, mapping, key, request.mixed)
    published = published_numbers(layout) if request.source == "both" else None
    if request.drop_empty:
        layout = without_empty(layout, found.numbers)
        if not layout.models:
            raise UsageError(f"table {layout.name}: no row has a run, so --drop-empty leaves nothing to print")
    return fill(
        layout,
        Filling(
            found.numbers,
            published=published,
            leads=_significant(layout, found) if request.significance else None,
            spreads=request.spreads,
            row_marks=found.row_marks,
            notes=(*found.notes, *(literal(text) for text in (*_legend(request, found), *remarks))),
        ),
    )


def _mapping(layout: TableLayout, request: TableRequest) -> RunMapping:
    if request.mapping is not None:
        return read_mapping(request.mapping)
    return map_runs(layout, [find_run(name, root_of_runs()) for name in request.runs])


def audited(names: Sequence[str]) -> Table:
    """Audit tables, and the sentences about them, against the printed numbers.

    All other tables are read too, for comparison. Sentences about no table are included if all tables are audited.

    Raises:
        EvalkitError: a layout, its numbers or the claims cannot be read, or a table has no file of printed cells.
    """
    from evalkit.tables import claims
    from evalkit.tables.claims import read_claims

    layouts = [load_layout(name) for name in dict.fromkeys((*layout_names(), *names))]
    shown = {load_layout(name).name for name in names}
    tables = [Audited(layout, published_numbers(layout), printed_cells(layout)) for layout in layouts]
    table = as_table([finding for finding in audit(tables) if finding.table in shown])
    verdicts = claims.check_claims(read_claims(resource("results", "published", "claims.yaml")), tables)
    if not shown.issuperset(layout_names()):
        verdicts = [verdict for verdict in verdicts if verdict.tables & shown]
    return table._replace(sections=(*table.sections, *claims.sections(verdicts)))


def published_numbers(layout: TableLayout) -> dict[str, dict[str, Number]]:
    """Read the layout's published numbers.

    Raises:
        UsageError: it has none.
        TableError: they cannot be read, or their columns do not fit the layout.
    """
    if not layout.data.is_file():
        raise UsageError(
            f"table {layout.name} has no published numbers ({layout.data} does not exist): fill it from runs with "
            "--source runs, or name a CSV under 'data' in its layout"
        )
    numbers = read_numbers(layout.data, layout.in_percent)
    columns = {column for row in numbers.values() for column in row}
    if stored := columns & layout.averages.keys():
        raise TableError(f"{layout.data}: column '{min(stored)}' is an average, which is computed; remove it")
    if missing := [task for task in layout.tasks if task not in columns]:
        raise TableError(f"{layout.data} has no numbers in a column '{missing[0]}', which layout {layout.path} shows")
    return numbers


def printed_cells(layout: TableLayout) -> Printed:
    """Read the averages and marks as they were printed.

    Raises:
        UsageError: the table has no file of printed cells.
        TableError: the file cannot be read.
    """
    if not layout.printed.is_file():
        raise UsageError(f"table {layout.name} has no printed averages and marks ({layout.printed} does not exist)")
    return read_printed(layout.printed)


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
                 "--outcome": request.outcome not in (None, ACCURACY),
                 "--allow-mixed": request.mixed, "--drop-empty": request.drop_empty}  # fmt: skip
    if published and (asked := [name for name, on in runs_only.items() if on]):
        raise UsageError(f"{asked[0]} is for numbers of runs, not for published ones; add --source runs")
    if request.source == "both" and request.outcome not in (None, ACCURACY):
        raise UsageError(f"the published numbers are accuracies; use --outcome {request.outcome} with --source runs")


def _legend(request: TableRequest, found: Measured) -> list[str]:
    lines = []
    if request.spreads and found.runs:
        seeds = {len(runs) > 1 for runs in found.runs.values()}
        one = next(iter(found.runs.values()))[0]
        known = any(metric.stderr is not None for metric in benchmark_of(one).metrics(one, found.rule))
        error = "standard error over documents" if known else f"not stored by single runs of {one.kind}"
        kinds = {False: error, True: "standard deviation over seeds (rows of several runs)"}
        lines.append("±: " + ", ".join(kinds[several] for several in sorted(seeds)) + ".")
    if request.source == "both":
        lines.append("In brackets: difference from the published number.")
    if request.significance:
        lines.append(
            "†: the lead over the next best is significant (p at most 0.05 after Holm's correction over all leads of "
            "the table; paired on documents, those of one source together)."
        )
        if len({len(runs) > 1 for runs in found.runs.values()}) > 1:
            lines.append("A row of a single run is that one checkpoint: nothing is claimed about other seeds.")
    return lines


def _significant(layout: TableLayout, found: Measured) -> Callable[[Sequence[Lead]], Set[Lead]]:
    if layout.pairs:
        raise UsageError(f"--significance tests means, and table {layout.name} shows shares of documents; omit it")
    if "bold" not in layout.marks:
        raise UsageError(f"table {layout.name} marks no best numbers, so --significance has nothing to test; omit it")
    # Imported here, since it needs pandas
    from evalkit.tables.significant_leads import significant

    return partial(significant, layout, found)
