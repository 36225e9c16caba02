"""Requests of `evalkit table`. In: a `TableRequest`. Out: a `Table`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from evalkit.benchmarks.registry import benchmark_of
from evalkit.errors import UnknownNameError, UsageError
from evalkit.reporting.table import Table, literal, parse, plain
from evalkit.runs.finding import find_run, root_of_runs
from evalkit.runs.score_table import ACCURACY, OUTCOMES, outcome_key
from evalkit.tables.fill import Lead, fill
from evalkit.tables.layout import Group, TableLayout, load_layout
from evalkit.tables.measured import Measured, RunMapping, map_runs, measure, read_mapping
from evalkit.tables.published import printed_cells, published_numbers

_DECIMALS = 3
"""Of continuous outcomes."""
_SCOPES = {"section": "each section", "table": "the table"}


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
    """Continuous outcome in place of accuracy (`runs.score_table`)."""
    as_printed: bool = False
    spreads: bool = False
    """Print ±."""
    significance: bool = False
    mixed: bool = False
    """Mark runs with another protocol instead of rejecting them."""

    @property
    def other_outcome(self) -> str | None:
        """The outcome; None for accuracy."""
        return None if self.outcome == ACCURACY else self.outcome


def make(request: TableRequest) -> Table:
    """Read the layout and its numbers, and fill the table.

    Raises:
        EvalkitError: the layout, the numbers, the runs or the combination of options is invalid.
    """
    published, given = request.source == "published", request.mapping is not None or bool(request.runs)
    if published and given:
        raise UsageError("--runs is for --source runs or both; add one of them")
    if not published and not given:
        raise UsageError(
            f"--source {request.source} needs --runs FILE.yaml, which maps the table's rows to run folders, "
            "--runs RUN RUN …, or --study FILE.yaml"
        )
    check_options(request)
    layout = requested_layout(request)
    if published:
        return fill(
            layout, published_numbers(layout), printed=printed_cells(layout) if request.as_printed else None
        )  # fmt: skip
    if request.mapping is not None:
        mapping = read_mapping(request.mapping)
    else:
        mapping = map_runs(layout, [find_run(name, root_of_runs()) for name in request.runs])
    return made_of_runs(layout, mapping, request)


def check_options(request: TableRequest) -> None:
    """Raise `UsageError` if an option is not one of the source's."""
    published, outcome = request.source == "published", request.other_outcome
    if request.as_printed and not published:
        raise UsageError("--as-printed shows the paper's own marks; use it with --source published only")
    runs_only = {"--stderr": request.spreads, "--significance": request.significance, "--rule": request.rule,
                 "--outcome": outcome is not None, "--allow-mixed": request.mixed,
                 "--drop-empty": request.drop_empty}  # fmt: skip
    if published and (asked := [name for name, on in runs_only.items() if on]):
        raise UsageError(f"{asked[0]} is for numbers of runs, not for published ones; add --source runs")
    if request.source == "both" and outcome is not None:
        raise UsageError(f"the published numbers are accuracies; use --outcome {outcome} with --source runs")


def requested_layout(request: TableRequest) -> TableLayout:
    """Return the layout of a request; of another outcome than accuracy, with its caption, decimals and marks."""
    layout, name = load_layout(request.name), request.other_outcome
    if not name:
        return layout
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


def made_of_runs(layout: TableLayout, mapping: RunMapping, request: TableRequest, remarks: Sequence[str] = ()) -> Table:
    """Fill a layout from the runs of its rows, with the options of a request and `remarks` as further notes.

    Raises:
        EvalkitError: as `make`; or all rows are empty and none are to be printed.
    """
    key = request.rule
    if request.other_outcome:
        key = outcome_key(request.other_outcome, request.rule or mapping.rule)
    measured = measure(layout, mapping, key, request.mixed)
    published = published_numbers(layout) if request.source == "both" else None
    if request.drop_empty:
        layout = without_empty(layout, measured.numbers)
        if not layout.models:
            raise UsageError(f"table {layout.name}: no row has a run, so --drop-empty leaves nothing to print")
    if request.significance and layout.pairs:
        raise UsageError(f"--significance tests means, and table {layout.name} shows shares of documents; omit it")
    if request.significance and "bold" not in layout.marks:
        raise UsageError(f"table {layout.name} marks no best numbers, so --significance has nothing to test; omit it")

    def significant(leads: Sequence[Lead]) -> Collection[Lead]:
        # Imported here, since it needs pandas
        from evalkit.tables.row_models import significant_leads

        return significant_leads(layout, measured.runs, measured.rule, leads)

    return fill(
        layout,
        measured.numbers,
        published=published,
        significant=significant if request.significance else None,
        spreads=request.spreads,
        row_marks=measured.row_marks,
        notes=(*measured.notes, *map(literal, (*_legend(request, measured), *remarks))),
    )


def _legend(request: TableRequest, measured: Measured) -> Iterator[str]:
    several = sorted({len(runs) > 1 for runs in measured.runs.values()})
    if request.spreads and measured.runs:
        run = next(iter(measured.runs.values()))[0]
        known = any(metric.stderr is not None for metric in benchmark_of(run).metrics(run, measured.rule))
        error = "standard error over documents" if known else f"not stored by single runs of {run.kind}"
        kinds = {False: error, True: "standard deviation over seeds (rows of several runs)"}
        yield f"±: {', '.join(kinds[kind] for kind in several)}."
    if request.source == "both":
        yield "In brackets: difference from the published number."
    if request.significance:
        yield (
            "†: the lead over the next best is significant (p at most 0.05 after Holm's correction over all leads of "
            "the table; paired on documents, those of one source together)."
        )
        if len(several) > 1:
            yield "A row of a single run is that one checkpoint: nothing is claimed about other seeds."


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
    if caption is not None:
        layout = replace(layout, caption=parse(" ".join(caption.split()), f"{where}, caption"))

    def renamed(group: Group) -> Group:
        title = texts.get(plain(group.title), group.title)
        return group.model_copy(update={"title": title, "style": group.drawn})

    return replace(layout, rows=tuple(map(renamed, layout.rows)), columns=tuple(map(renamed, layout.columns)))


def without_empty(layout: TableLayout, filled: Collection[str]) -> TableLayout:
    """Return a layout without models that have no numbers, and without sections that have no models.

    A row stays if an indented row below it has numbers: "all layers" alone would be read as that of the row above.
    """
    groups = []
    for group in layout.model_groups:
        kept, parent = set(filled), None
        for key, item in group.items.items():
            if not item.indent:
                parent = key
            elif layout.models_are_rows and parent is not None and key in filled:
                kept.add(parent)
        if items := {key: item for key, item in group.items.items() if key in kept}:
            groups.append(group.model_copy(update={"items": items}))
    axis = "rows" if layout.models_are_rows else "columns"
    return replace(layout, **{axis: tuple(groups)})  # type: ignore[arg-type]
