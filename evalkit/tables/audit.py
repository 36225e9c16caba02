"""Audit of the paper's tables and its sentences about them, by the printed numbers.

In: layouts, the numbers as printed and claims (`claims.py`). Out: a table of findings and verdicts. Three questions are
answered from the printed tables alone:

1. Is each printed average the mean of its parts, rounded half up? If not, could the rounding of the parts explain it
   (`decimals.could_print`)?
2. Is each mark at the cell that the table's own rule marks, given the recomputed numbers?
3. Do rows with the same description print the same numbers, and rows with different descriptions different ones? Rows
   are described by their keys in the layouts, which follow the paper's words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations
from typing import NamedTuple

from evalkit.paths import resource
from evalkit.reporting.decimals import could_print, half_up, to_text
from evalkit.reporting.table import Line, Section, Table, literal, parse, plain
from evalkit.tables.claims import CLAIM_KINDS, Audited, Verdict, check_claims, read_claims
from evalkit.tables.fill import CellKey, Contest, computed, contests
from evalkit.tables.layout import LayoutItem, TableLayout, layout_names, load_layout
from evalkit.tables.published import printed_cells, published_numbers

HEADINGS = ("table", "row", "column", "printed", "recomputed", "why")

TOLERANCE = (
    "Rounding is decimal, half up. A printed number stands for any within half a unit of its last digit, so a printed "
    "average less than a whole unit away from the mean of its printed parts may still be right; farther away it is not."
)


class Finding(NamedTuple):
    """A printed value that contradicts the printed numbers."""

    table: str
    row: str
    column: str
    printed: str
    recomputed: str
    why: str


def audited(names: Sequence[str]) -> Table:
    """Audit tables, and the sentences about them, against the printed numbers.

    All other tables are read too, for comparison. Sentences about no table are included if all tables are audited.

    Raises:
        EvalkitError: a layout, its numbers or the claims cannot be read, or a table has no file of printed cells.
    """
    layouts = [load_layout(name) for name in dict.fromkeys((*layout_names(), *names))]
    shown = {load_layout(name).name for name in names}
    tables = [Audited(layout, published_numbers(layout), printed_cells(layout)) for layout in layouts]
    findings = [finding for finding in audit(tables) if finding.table in shown]
    verdicts = check_claims(read_claims(resource("results", "published", "claims.yaml")), tables)
    if not shown.issuperset(layout_names()):
        verdicts = [verdict for verdict in verdicts if verdict.tables & shown]
    return Table(
        name="audit",
        caption=(),
        corner=literal(HEADINGS[0]),
        facts=tuple(map(literal, HEADINGS[1:])),
        columns=(),
        sections=(Section((), "line", tuple(_line(*finding) for finding in findings)), *verdict_sections(verdicts)),
        notes=(parse(TOLERANCE, "audit"),),
    )


def audit(tables: Sequence[Audited]) -> list[Finding]:
    """Return all findings, table by table, followed by those between tables."""
    within = [finding for table in tables for finding in (*audit_averages(table), *audit_marks(table))]
    return [*within, *audit_rows(tables)]


def audit_averages(table: Audited) -> Iterator[Finding]:
    """Yield printed averages that differ from the mean of their parts."""
    layout, places = table.layout, table.layout.decimals
    cells = computed(layout, table.numbers)
    for model in layout.models:
        for measure in layout.measures:
            key = (model.key, measure.key)
            printed, number = table.printed.values.get(key), cells.get(key)
            if printed is None or number is None or printed == half_up(number.value, places):
                continue
            possible = could_print(printed, number.value, places)
            why = "the rounding of its parts can explain it" if possible else "no rounding of its parts explains it"
            why = f"the mean is {_exact(number.value)}; {why}"
            place = _place(layout, _name(layout, model.key), plain(measure.label))
            yield Finding(layout.name, *place, to_text(printed, places), to_text(number.value, places), why)


def audit_marks(table: Audited) -> Iterator[Finding]:
    """Yield marks that contradict the table's rule."""
    layout = table.layout
    values = {key: number.value for key, number in computed(layout, table.numbers).items()}
    as_printed = values | table.printed.values
    by_printed = {(c.kind, c.measure, c.models): c.winners for c in contests(layout, as_printed)}

    def shown(contest: Contest, models: frozenset[str], numbers: dict[CellKey, Fraction]) -> str:
        parts = [
            f"{_name(layout, model)} {to_text(numbers[model, contest.measure], layout.decimals)}"
            for model in contest.models
            if model in models
        ]
        return f"{contest.kind}: {', '.join(parts) or 'nothing'}"

    for contest in contests(layout, values):
        marked = frozenset(
            m for m in contest.models if contest.kind in table.printed.marks.get((m, contest.measure), ())
        )
        if marked == contest.winners:
            continue
        mark, first, last = layout.marks[contest.kind], contest.models[0], contest.models[-1]
        why = f"{mark.extreme} in the {mark.scope}"
        if marked == by_printed[contest.kind, contest.measure, contest.models]:
            why += "; right by the printed averages"
        elif marked < contest.winners:
            why += "; a tie, marked in part"
        whole = len(contest.models) == len(layout.models)
        models = "all" if whole else f"{_name(layout, first)} to {_name(layout, last)}"
        measure = next(plain(item.label) for item in layout.measures if item.key == contest.measure)
        yield Finding(
            layout.name,
            *_place(layout, models, measure),
            shown(contest, marked, as_printed),
            shown(contest, contest.winners, values),
            why,
        )


def audit_rows(tables: Sequence[Audited]) -> Iterator[Finding]:
    """Yield rows of different tables that contradict each other, or that are one row with two descriptions."""
    sources = list({table.layout.data: table for table in reversed(tables)}.values())[::-1]
    reported: set[tuple[frozenset[str], bool]] = set()
    rows = [
        (t, model, dict(t.numbers[model.key])) for t in sources for model in t.layout.models if model.key in t.numbers
    ]
    for (table, model, here), (other, second, there) in combinations(rows, 2):
        shared = [task for task in here if task in there]
        differing = [task for task in shared if here[task].value != there[task].value]
        if not shared or (model.key == second.key) == (not differing):
            continue
        if (pair := (frozenset((model.key, second.key)), not differing)) in reported:
            continue
        reported.add(pair)
        if model.key == second.key:
            why = f"described alike, but {len(differing)} of {len(shared)} numbers differ"
        else:
            why = "described otherwise, but every number is the same"
        row = f"{_name(other.layout, second.key)} ({second.key})"
        recomputed = f"{table.layout.name}, {_name(table.layout, model.key)} ({model.key}): "
        recomputed += _listed(table, model, shared)
        yield Finding(other.layout.name, row, f"{len(shared)} tasks", _listed(other, second, shared), recomputed, why)


def verdict_sections(verdicts: Sequence[Verdict]) -> Iterator[Section]:
    """Yield the verdicts on claims, those that do not follow first."""
    for title, kinds in CLAIM_KINDS.items():
        lines = []
        for key, claim, verdict, computed_, names in verdicts:
            if verdict in kinds:
                why = "; ".join(filter(None, (claim.unchecked or verdict, claim.note)))
                label = ", ".join(sorted(names)) or "text"
                lines.append(_line(label, claim.where, claim.says, claim.printed, computed_, why, key=key))
        if lines:
            yield Section(literal(title), "heading", tuple(lines))


def _line(label: str, *texts: str, key: str = "") -> Line:
    return Line(key or label, literal(label), False, tuple(map(literal, texts)), ())


def _place(layout: TableLayout, model: str, measure: str) -> tuple[str, str]:
    return (model, measure) if layout.models_are_rows else (measure, model)


def _listed(table: Audited, model: LayoutItem, tasks: Sequence[str]) -> str:
    numbers = table.numbers[model.key]
    return " ".join(to_text(numbers[task].value, table.layout.decimals) for task in tasks)


def _name(layout: TableLayout, key: str) -> str:
    """Return a model's label, prefixed by its section's title or its parent line where the label is ambiguous."""
    for group in layout.model_groups:
        above = plain(group.title) if group.style == "heading" or not layout.models_are_rows else ""
        for item in group.items:
            label = plain(item.label)
            if item.key == key:
                return f"{above} {label}" if above and (item.indent or not layout.models_are_rows) else label
            if layout.models_are_rows and not item.indent:
                above = label
    raise KeyError(key)


def _exact(value: Fraction) -> str:
    text = to_text(value, 4)
    return text.rstrip("0").rstrip(".") if Fraction(text) == value else f"{to_text(value, 3)}…"
