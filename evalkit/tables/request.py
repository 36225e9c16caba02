"""Requests of `evalkit table`. In: a `TableRequest`. Out: a `Table`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evalkit.benchmarks.registry import results_of
from evalkit.comparison.naming import find_runs
from evalkit.errors import UsageError
from evalkit.reporting.decimals import half_up
from evalkit.reporting.table import Table, Text, literal
from evalkit.runs.continuous import find_outcome, outcome_key
from evalkit.runs.finding import root_of_runs
from evalkit.runs.notes import error_note
from evalkit.runs.scales import ACCURACY
from evalkit.tables.fill import Numbers, computed, fill, printed_cells, published_numbers
from evalkit.tables.layout import TableLayout, load_layout
from evalkit.tables.measured import Measured, measure, significant_leads, with_quoted
from evalkit.tables.rows import RunMapping, map_runs, read_mapping

_DECIMALS = 3
_SIGNIFICANT = (
    "†: the lead over the next best is significant (p at most 0.05 after Holm's correction over all leads of the "
    "table; paired on documents, those of one source together)."
)


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
    """Folders of runs in place of a mapping; they are assigned to rows by their models."""
    root: Path | None = None
    """Folder of the run folders that are named; None: the default."""
    drop_empty: bool = False
    rule: str | None = None
    outcome: str | None = None
    """Continuous outcome in place of accuracy (`runs.score_table`)."""
    as_printed: bool = False
    spreads: bool = False
    significance: bool = False
    mixed: bool = False
    """Mark runs with another protocol instead of rejecting them."""

    @property
    def other_outcome(self) -> str | None:
        return None if self.outcome == ACCURACY else self.outcome


def make(request: TableRequest) -> Table:
    """Read the layout and its numbers, and fill the table."""
    has_runs = request.mapping is not None or bool(request.runs)
    if has_runs == (request.source == "published"):
        sources = "--runs FILE.yaml, which maps rows to run folders, --runs RUN RUN …, or --study FILE.yaml"
        raise UsageError(f"--source {request.source}: runs and both need {sources}; published takes none of them")
    check_options(request)
    layout = requested_layout(request)
    if not has_runs:
        numbers, printed = published_numbers(layout), printed_cells(layout) if request.as_printed else None
        if layout.published:
            layout = layout.model_copy(update={"caption": (*layout.caption, *literal(" "), *layout.published)})
        return fill(layout, numbers, printed=printed, notes=() if printed else _recomputed(layout, numbers))
    if request.mapping is not None:
        return made_of_runs(layout, read_mapping(layout, request.mapping, request.root), request)
    runs = find_runs(request.runs, request.root or root_of_runs())
    return made_of_runs(layout, map_runs(layout, runs), request)


def _recomputed(layout: TableLayout, numbers: Numbers) -> tuple[Text, ...]:
    """Return a note that averages are recomputed, with how many differ from the printed ones; none without those."""
    printed = printed_cells(layout).values if layout.printed_file.is_file() else {}
    averages = {key: number.value for key, number in computed(layout, numbers).items() if key in printed}
    if not averages:
        return ()
    differ = sum(half_up(value, layout.decimals) != printed[key] for key, value in averages.items())
    counts = f"printed averages that differ: {differ} of {len(averages)}"
    return (literal(f"Averages are recomputed from the tasks' published numbers; {counts}."),)


def check_options(request: TableRequest) -> None:
    """Raise `UsageError` if an option is not one of the source's."""
    published, outcome = request.source == "published", request.other_outcome
    if request.as_printed and not published:
        raise UsageError("--as-printed shows the paper's own marks; use it with --source published only")
    runs_only = {"--stderr": request.spreads, "--significance": request.significance, "--rule": request.rule}
    runs_only |= {"--outcome": outcome, "--allow-mixed": request.mixed, "--drop-empty": request.drop_empty}
    if published and (asked := [name for name, value in runs_only.items() if value]):
        raise UsageError(f"{asked[0]} is for numbers of runs, not for published ones; add --source runs")
    if request.source == "both" and outcome is not None:
        raise UsageError(f"the published numbers are accuracies; use --outcome {outcome} with --source runs")


def requested_layout(request: TableRequest) -> TableLayout:
    """Return the layout of a request; of another outcome than accuracy, with its caption, decimals and marks."""
    layout, name = load_layout(request.name), request.other_outcome
    if not name:
        return layout
    outcome = find_outcome(name)
    if layout.pairs:
        raise UsageError(f"table {layout.name} shows shares of documents, not means; omit --outcome {name}")
    marks = {mark: str(rule) for mark, rule in layout.marks.items()}
    if outcome.scale.higher_is_better is False:
        opposite = {"highest": "lowest", "lowest": "highest"}
        marks = {mark: opposite[rule.split()[0]] + rule[rule.index(" ") :] for mark, rule in marks.items()}
    legend = [f" {mark.capitalize()}: {rule}." for mark, rule in marks.items()]
    scopes = "".join(legend).replace("section", "each section").replace("table", "the table")
    of = outcome.scale.name
    title = f"{of[:1].upper()}{of[1:]} of suite {layout.suite}, mean over documents"
    caption = literal(f"{title}; {outcome.scale.direction}.{scopes}")
    return layout.model_copy(update={"caption": caption, "decimals": _DECIMALS, "unit": "", "marks": marks})


def made_of_runs(layout: TableLayout, mapping: RunMapping, request: TableRequest, remarks: Sequence[str] = ()) -> Table:
    """Fill a layout from the runs of its rows, with the options of a request and `remarks` as further notes."""
    key = request.rule
    if request.other_outcome:
        key = outcome_key(request.other_outcome, request.rule or mapping.rule)
    measured = measure(layout, mapping, key, request.mixed)
    published = published_numbers(layout) if request.source == "both" else None
    if published is not None:  # quoted rows have no difference
        published = {row: numbers for row, numbers in published.items() if row in measured.numbers}
    if not request.other_outcome:
        measured = with_quoted(layout, measured)
    if request.drop_empty:
        layout = layout.without_empty(measured.numbers)
        if not layout.model_items:
            raise UsageError(f"table {layout.name}: no row has a run, so --drop-empty leaves nothing to print")
    if request.significance and (layout.pairs or "bold" not in layout.marks):
        raise UsageError(f"table {layout.name} marks no best means, so --significance has nothing to test; omit it")
    significant = significant_leads(layout, measured) if request.significance else ()
    of_published = [layout.published] if published and layout.published else []
    notes = (*measured.notes, *map(literal, _legend(layout, request, measured)), *of_published, *map(literal, remarks))
    return fill(layout, measured.numbers, published, None, significant, request.spreads, measured.row_marks, notes)


def _legend(layout: TableLayout, request: TableRequest, measured: Measured) -> list[str]:
    several = sorted({len(runs) > 1 for runs in measured.runs.values()})
    legend = []
    if request.spreads and measured.runs:
        run = next(iter(measured.runs.values()))[0]
        known = any(metric.stderr is not None for metric in results_of(run).metrics(measured.rule))
        added = ", one won and one lost added" if layout.pairs else ""
        error = f"standard error over documents{added}" if known else f"not stored by single runs of {run.kind}"
        legend.append(f"{error_note(several, error)}.")
    if request.source == "both":
        averages = "; averages of those are recomputed" if layout.averages.keys() & layout.measures.keys() else ""
        legend.append(f"In brackets: difference from the published number{averages}.")
    if request.significance:
        legend.append(_SIGNIFICANT)
        if len(several) > 1:
            legend.append("A row of a single run is that one checkpoint: nothing is claimed about other seeds.")
    return legend
