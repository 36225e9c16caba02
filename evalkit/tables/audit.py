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

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import combinations
from typing import NamedTuple

from evalkit.paths import resource
from evalkit.reporting.decimals import could_print, half_up, to_text
from evalkit.reporting.table import Line, Section, Table, literal, parse, plain
from evalkit.tables.claims import BY_PRINTED, FAILS, HOLDS, UNCHECKED, Audited, Verdict, check_claims, read_claims
from evalkit.tables.fill import computed, contests
from evalkit.tables.layout import TableLayout, layout_names, load_layout
from evalkit.tables.published import CellKey, printed_cells, published_numbers

TOLERANCE = (
    "Rounding is decimal, half up. A printed number stands for any within half a unit of its last digit, so a printed "
    "average less than a whole unit away from the mean of its printed parts may still be right; farther away it is not."
)
_TITLES = {
    "Sentences that do not follow from the tables": (FAILS, BY_PRINTED),
    "Sentences that do": (HOLDS,),
    "Sentences that the tables cannot verify": (UNCHECKED,),
}
"""Title → verdicts."""


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
    findings = tuple(_line(*finding) for finding in audit(tables) if finding.table in shown)
    verdicts = check_claims(read_claims(resource("results", "published", "claims.yaml")), tables)
    if not shown.issuperset(layout_names()):
        verdicts = [verdict for verdict in verdicts if verdict.tables & shown]
    return Table(
        name="audit",
        caption=(),
        corner=literal(Finding._fields[0]),
        facts=tuple(map(literal, Finding._fields[1:])),
        columns=(),
        sections=(Section((), "line", findings), *verdict_sections(verdicts)),
        notes=(parse(TOLERANCE, "audit"),),
    )


def audit(tables: Sequence[Audited]) -> list[Finding]:
    """Return all findings, table by table, followed by those between tables."""
    within = [finding for table in tables for finding in (*audit_averages(table), *audit_marks(table))]
    return [*within, *audit_rows(tables)]


def audit_averages(table: Audited) -> Iterator[Finding]:
    """Yield printed averages that differ from the mean of their parts."""
    layout, places = table.layout, table.layout.decimals
    for (model, measure), number in computed(layout, table.numbers).items():
        printed, value = table.printed.values.get((model, measure)), number.value
        if printed is None or printed == half_up(value, places):
            continue
        possible = could_print(printed, value, places)
        why = "the rounding of its parts can explain it" if possible else "no rounding of its parts explains it"
        place = _place(layout, _name(layout, model), measure)
        exact = to_text(value, 4)
        shown = exact.rstrip("0").rstrip(".") if Fraction(exact) == value else f"{to_text(value, 3)}…"
        recomputed = to_text(value, places)
        yield Finding(layout.name, *place, to_text(printed, places), recomputed, f"the mean is {shown}; {why}")


def audit_marks(table: Audited) -> Iterator[Finding]:
    """Yield marks that contradict the table's rule."""
    layout = table.layout
    values = {key: number.value for key, number in computed(layout, table.numbers).items()}
    as_printed = values | table.printed.values

    def shown(models: Mapping[str, bool], kind: str, measure: str, numbers: Mapping[CellKey, Fraction]) -> str:
        parts = [
            f"{_name(layout, model)} {to_text(numbers[model, measure], layout.decimals)}"
            for model, is_marked in models.items()
            if is_marked
        ]
        return f"{kind}: {', '.join(parts) or 'nothing'}"

    for contest, by_printed in zip(contests(layout, values), contests(layout, as_printed), strict=True):
        kind, measure, models, winners = contest
        marked = {model: kind in table.printed.marks.get((model, measure), ()) for model in models}
        of_marked = {model for model, is_marked in marked.items() if is_marked}
        if of_marked == winners:
            continue
        mark = layout.marks[kind]
        why = f"{mark.extreme} in the {mark.scope}"
        if of_marked == by_printed.winners:
            why += "; right by the printed averages"
        elif of_marked < winners:
            why += "; a tie, marked in part"
        among = f"{_name(layout, models[0])} to {_name(layout, models[-1])}"
        place = _place(layout, "all" if len(models) == len(layout.models) else among, measure)
        right = {model: model in winners for model in models}
        printed, recomputed = shown(marked, kind, measure, as_printed), shown(right, kind, measure, values)
        yield Finding(layout.name, *place, printed, recomputed, why)


def audit_rows(tables: Sequence[Audited]) -> Iterator[Finding]:
    """Yield rows of different tables that contradict each other, or that are one row with two descriptions."""
    sources = list({table.layout.data: table for table in reversed(tables)}.values())[::-1]
    reported: set[tuple[frozenset[str], bool]] = set()
    rows = [
        (table, key, table.numbers[key]) for table in sources for key in table.layout.models if key in table.numbers
    ]
    for (table, key, here), (other, second, there) in combinations(rows, 2):
        shared = [task for task in here if task in there]
        differing = [task for task in shared if here[task].value != there[task].value]
        pair = (frozenset((key, second)), not differing)
        if not shared or (key == second) == (not differing) or pair in reported:
            continue
        reported.add(pair)
        if key == second:
            why = f"described alike, but {len(differing)} of {len(shared)} numbers differ"
        else:
            why = "described otherwise, but every number is the same"
        row = f"{_name(other.layout, second)} ({second})"
        recomputed = f"{table.layout.name}, {_name(table.layout, key)} ({key}): {_listed(table, key, shared)}"
        yield Finding(other.layout.name, row, f"{len(shared)} tasks", _listed(other, second, shared), recomputed, why)


def verdict_sections(verdicts: Sequence[Verdict]) -> Iterator[Section]:
    """Yield the verdicts on claims, those that do not follow first."""
    for title, kinds in _TITLES.items():
        lines = []
        for key, claim, verdict, recomputed, names in verdicts:
            if verdict in kinds:
                why = "; ".join(filter(None, (claim.unchecked or verdict, claim.note)))
                label = ", ".join(sorted(names)) or "text"
                lines.append(_line(label, claim.where, claim.says, claim.printed, recomputed, why, key=key))
        if lines:
            yield Section(literal(title), "heading", tuple(lines))


def _line(label: str, *texts: str, key: str = "") -> Line:
    return Line(key or label, literal(label), False, tuple(map(literal, texts)), ())


def _place(layout: TableLayout, models: str, measure: str) -> tuple[str, str]:
    """Return row and column of models and a measure, as the table labels them."""
    label = plain(layout.measures[measure].label)
    return (models, label) if layout.models_are_rows else (label, models)


def _listed(table: Audited, model: str, tasks: Sequence[str]) -> str:
    return " ".join(to_text(table.numbers[model][task].value, table.layout.decimals) for task in tasks)


def _name(layout: TableLayout, key: str) -> str:
    """Return a model's label, prefixed by its section's title or its parent line where the label is ambiguous."""
    for group in layout.model_groups:
        above = plain(group.title) if group.style == "heading" or not layout.models_are_rows else ""
        for item_key, item in group.items.items():
            label = plain(item.label)
            if item_key == key:
                return f"{above} {label}" if above and (item.indent or not layout.models_are_rows) else label
            if layout.models_are_rows and not item.indent:
                above = label
    raise KeyError(key)
