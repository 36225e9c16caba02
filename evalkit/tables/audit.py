"""Audit of the paper's tables and its sentences about them, by the printed numbers.

In: layouts, the numbers as printed, and claims (`results/published/claims.yaml`). Out: a report: how many findings each
table has; the findings, table by table; then the sentences that follow, and those that no table can verify. Three
questions are answered from the printed tables alone:

1. Is each printed average the mean of its parts, rounded half up? If not, could the rounding of the parts explain it
   (`decimals.could_print`)?
2. Is each mark at the cell that the table's own rule marks, given the recomputed numbers?
3. Do rows with the same description print the same numbers, and rows with different descriptions different ones? Rows
   are described by their keys in the layouts, which follow the paper's words.

A claim is a sentence with the definition of how its figure follows from the tables (`computed`), or relations between
numbers (`holds`), in the following vocabulary. A value is a number; TABLE/MODEL/MEASURE; or one of

- {difference: [a, b]}, {ratio: [a, b]}, {percent_more: [a, b]}, {sum: [a, …]}, {product: [a, …]};
- {least: TABLE}; {size: {table: TABLE, of: measures}} (or models, groups);
- {wins: {table: TABLE, model: MODEL}}: on how many measures the model is the highest, ties included; with `among:
  [MODEL, …]`, `alone: true` (no ties) or `of: groups` (highest on all measures of a group);
- {shape: {model: NAME, of: parameters}} of a named model (or head_size, layers).

A relation is {rising: [a, b, …]}, falling, not_rising, not_falling, equal, or above: the first above all others.

Numbers are used as the tables print them, rounded. Averages are recomputed; a claim that follows only from the printed
averages has a verdict of its own.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BeforeValidator

from evalkit.errors import TableError, reading_as
from evalkit.inputs.validated import FileSettings, Listed, Named, read_settings
from evalkit.models.zoo.named import named_model
from evalkit.models.zoo.shapes import parameters, read_shape
from evalkit.paths import resource
from evalkit.reporting.decimals import could_print, half_up, to_text
from evalkit.reporting.report import Report
from evalkit.reporting.table import plain, simple_table
from evalkit.tables.fill import CellKey, Numbers, Printed, computed, contests, printed_cells, published_numbers
from evalkit.tables.layout import TableLayout, layout_names, load_layout

TOLERANCE = (
    "Rounding is decimal, half up. A printed number stands for any within half a unit of its last digit, so a printed "
    "average less than a whole unit away from the mean of its printed parts may still be right; farther away it is not."
)
CONTRADICTED, FAILS, HOLDS, UNCHECKED = "contradicts", "does not follow", "follows", "not verifiable"
"""Verdicts on a value, and three on a sentence."""
_WITHOUT_TABLE = "text"


class Audited(NamedTuple):
    layout: TableLayout
    numbers: Numbers
    printed: Printed

    @property
    def values(self) -> dict[CellKey, Fraction]:
        """The numbers of all cells, averages recomputed."""
        return {key: number.value for key, number in computed(self.layout, self.numbers).items()}


class Finding(NamedTuple):
    """A printed value that contradicts the printed numbers, or a sentence; what the numbers make of it."""

    table: str
    """Tables whose numbers it depends on, separated by commas."""
    what: str
    """Row and column of a value; the paraphrase of a sentence."""
    printed: str
    recomputed: str
    why: str
    where: str = ""
    """Place of a sentence in the paper."""
    verdict: str = CONTRADICTED
    key: str = ""
    """Key of the claim."""

    @property
    def full(self) -> str:
        """What it is about, of a sentence with its place."""
        return f"{self.where}: {self.what}" if self.where else self.what


def audited(names: Sequence[str]) -> Report:
    """Audit tables, and the sentences about them, against the printed numbers.

    All other tables are read too, for comparison; sentences about no table are included if all tables are audited.
    """
    layouts = [load_layout(name) for name in dict.fromkeys((*layout_names(), *names))]
    shown = {Path(name).stem for name in names}
    tables = [Audited(layout, published_numbers(layout), printed_cells(layout)) for layout in layouts]
    within = [finding for table in tables for finding in (*audit_averages(table), *audit_marks(table))]
    findings = [finding for finding in (*within, *audit_rows(tables)) if finding.table in shown]
    claims = read_claims(resource("results", "published", "claims.yaml"))
    findings += check_claims(claims, tables, None if shown.issuperset(layout_names()) else shown)
    wrong: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.verdict in (CONTRADICTED, FAILS):
            wrong.setdefault(finding.table, []).append(finding)
    parts = [_summary(findings), *(_block(table, members) for table, members in sorted(wrong.items()))]
    titles = {HOLDS: "Sentences that follow", UNCHECKED: "Sentences that the tables cannot verify"}
    lists = [_sentences(findings, verdict, title) for verdict, title in titles.items()]
    parts += [part for part in lists if part.facts]
    records = [finding._asdict() for finding in findings]
    return Report((), content=records, records=records, parts=tuple(parts))


def _summary(findings: Sequence[Finding]) -> Report:
    """Return a report of the number of findings of each kind, by table."""
    verdicts = (CONTRADICTED, FAILS, HOLDS, UNCHECKED)
    rows = []
    for name in sorted({finding.table for finding in findings}):
        count = Counter(finding.verdict for finding in findings if finding.table == name)
        rows.append([name, *(str(count[verdict] or "") for verdict in verdicts)])
    total = Counter(finding.verdict for finding in findings)
    rows.append(["total", *(str(total[verdict]) for verdict in verdicts)])
    table = simple_table("audit", ["table", *verdicts], rows, ruled=(len(rows) - 1,))
    sentences = total.total() - total[CONTRADICTED]
    verdict = (
        f"Printed values that contradict the numbers beside them: {total[CONTRADICTED]}. Of {sentences} sentences "
        f"{total[FAILS]} do not follow from the tables, {total[HOLDS]} do, and {total[UNCHECKED]} cannot be verified."
    )
    return Report((table,), (verdict,), notes=(TOLERANCE,))


def _block(table: str, findings: Sequence[Finding]) -> Report:
    """Return a report of what contradicts a table, or the tables together."""
    rows = [[finding.full, finding.printed, finding.recomputed, finding.why] for finding in findings]
    name = f"audit_{table.replace(', ', '_')}"
    return Report((simple_table(name, ["what", "printed", "recomputed", "why"], rows, texts=4),), (table,))


def _sentences(findings: Sequence[Finding], verdict: str, title: str) -> Report:
    """Return a list of the sentences with a verdict, those of a table together."""
    members = sorted((finding for finding in findings if finding.verdict == verdict), key=lambda each: each.table)
    facts = []
    for finding in members:
        numbers = "; ".join(filter(None, (finding.printed, finding.recomputed, finding.why)))
        facts.append(f"{finding.table}, {finding.full}: {numbers}")
    return Report((), (title,), facts=tuple(facts))


def audit_averages(table: Audited) -> Iterator[Finding]:
    layout, places = table.layout, table.layout.decimals
    for (model, measure), value in table.values.items():
        printed = table.printed.values.get((model, measure))
        if printed is None or printed == half_up(value, places):
            continue
        possible = could_print(printed, value, places)
        why = "the rounding of its parts can explain it" if possible else "no rounding of its parts explains it"
        exact = to_text(value, 4)
        shown = exact.rstrip("0").rstrip(".") if Fraction(exact) == value else f"{to_text(value, 3)}…"
        texts = to_text(printed, places), to_text(value, places), f"the mean is {shown}; {why}"
        yield Finding(layout.name, _row_and_column(layout, _name(layout, model), measure), *texts)


def audit_marks(table: Audited) -> Iterator[Finding]:
    layout, values = table.layout, table.values
    as_printed = values | table.printed.values

    def listed(models: Sequence[str], mark: str, measure: str, numbers: Mapping[CellKey, Fraction]) -> str:
        parts = [f"{_name(layout, model)} {to_text(numbers[model, measure], layout.decimals)}" for model in models]
        return f"{mark}: {', '.join(parts) or 'nothing'}"

    for contest, by_printed in zip(contests(layout, values), contests(layout, as_printed), strict=True):
        mark, measure, models, winners = contest
        marked = [model for model in models if mark in table.printed.marks.get((model, measure), ())]
        if set(marked) == winners:
            continue
        why = layout.marks[mark].replace(" in ", " in the ")
        if set(marked) == by_printed.winners:
            why += "; right by the printed averages"
        elif set(marked) < winners:
            why += "; a tie, marked in part"
        ends = f"{_name(layout, models[0])} to {_name(layout, models[-1])}"
        among = "all" if len(models) == len(layout.model_items) else ends
        right = [model for model in models if model in winners]
        texts = listed(marked, mark, measure, as_printed), listed(right, mark, measure, values)
        yield Finding(layout.name, _row_and_column(layout, among, measure), *texts, why)


def audit_rows(tables: Sequence[Audited]) -> Iterator[Finding]:
    """Yield rows of different tables that contradict each other, or that are one row with two descriptions."""
    sources = list({table.layout.data_file: table for table in reversed(tables)}.values())[::-1]
    reported: set[tuple[frozenset[str], bool]] = set()
    rows = [(table, key) for table in sources for key in table.layout.model_items if key in table.numbers]
    for (table, key), (other, other_key) in combinations(rows, 2):
        numbers, others = table.numbers[key], other.numbers[other_key]
        shared = [task for task in numbers if task in others]
        differing = [task for task in shared if numbers[task].value != others[task].value]
        pair = (frozenset((key, other_key)), not differing)
        if not shared or (key == other_key) == (not differing) or pair in reported:
            continue
        reported.add(pair)
        why = "described otherwise, but every number is the same"
        if key == other_key:
            why = f"described alike, but {len(differing)} of {len(shared)} numbers differ"
        row, printed = f"{_name(other.layout, other_key)} ({other_key})", _listed(other, other_key, shared)
        recomputed = f"{table.layout.name}, {_name(table.layout, key)} ({key}): {_listed(table, key, shared)}"
        yield Finding(other.layout.name, f"{row}, {len(shared)} tasks", printed, recomputed, why)


def _row_and_column(layout: TableLayout, models: str, measure: str) -> str:
    label = plain(layout.measures[measure].label)
    return f"{models}, {label}" if layout.models_are_rows else f"{label}, {models}"


def _listed(table: Audited, key: str, tasks: Sequence[str]) -> str:
    return " ".join(to_text(table.numbers[key][task].value, table.layout.decimals) for task in tasks)


def _name(layout: TableLayout, key: str) -> str:
    """A model's label, prefixed by its section's title or its parent line where the label is ambiguous."""
    for group in layout.model_groups:
        above = plain(group.title) if group.style == "heading" or not layout.models_are_rows else ""
        for item_key, item in group.items.items():
            label = plain(item.label)
            if item_key == key:
                return f"{above} {label}" if above and (item.indent or not layout.models_are_rows) else label
            if layout.models_are_rows and not item.indent:
                above = label
    raise KeyError(key)


# Sentences


_Written = Annotated[str, BeforeValidator(lambda text: " ".join(str(text).split()))]


class PaperClaim(FileSettings):
    """A paraphrased sentence of the paper, and how it follows from the tables."""

    where: _Written
    """Section or caption of the paper, and the line of its source."""
    says: _Written
    printed: _Written
    figure: _Written = ""
    """The printed figure as a number, where `printed` is not one."""
    computed: Any = None
    holds: Listed[dict[str, list[Any]]] = ()
    unchecked: _Written = ""
    """Why the tables cannot verify it."""
    note: _Written = ""


class Claims(FileSettings):
    models: Named[Annotated[dict[str, Any], AfterValidator(read_shape)]]
    """Shapes of models that evalkit does not know by name, validated from their config.json."""
    claims: Named[PaperClaim]


def read_claims(path: Path) -> Claims:
    return read_settings(path, Claims, TableError)


def check_claims(content: Claims, tables: Sequence[Audited], about: set[str] | None = None) -> list[Finding]:
    """Return a finding for each claim about some tables, by default about all."""
    findings = []
    recomputed, printed = (_Evaluator(tables, content.models, as_printed) for as_printed in (False, True))
    for key, claim in content.claims.items():
        recomputed.used.clear()
        verdict, remarks, shown = UNCHECKED, [claim.unchecked], ""
        if not claim.unchecked:
            with reading_as(f"claim '{key}'", "relations of numbers", TableError):
                (follows, values), (follows_printed, _) = recomputed.check(claim), printed.check(claim)
            verdict, remarks = HOLDS if follows else FAILS, []
            if follows_printed and not follows:
                remarks = ["holds by the printed averages only"]
            shown = "; ".join(", ".join(map(_shown, group)) for group in values)
        if about is None or recomputed.used & about:
            names = ", ".join(sorted(recomputed.used)) or _WITHOUT_TABLE
            why = "; ".join(filter(None, (*remarks, claim.note)))
            findings.append(Finding(names, claim.says, claim.printed, shown, why, claim.where, verdict, key))
    return findings


Values = list[Fraction]
_RELATIONS: dict[str, Callable[[Values], bool]] = {
    "rising": lambda values: all(map(operator.lt, values, values[1:])),
    "falling": lambda values: all(map(operator.gt, values, values[1:])),
    "not_falling": lambda values: all(map(operator.le, values, values[1:])),
    "not_rising": lambda values: all(map(operator.ge, values, values[1:])),
    "equal": lambda values: len(set(values)) == 1,
    "above": lambda values: values[0] > max(values[1:]),
}
_ARITHMETIC: dict[str, Callable[[Values], Fraction]] = {
    "difference": lambda values: values[0] - values[1],
    "ratio": lambda values: values[0] / values[1],
    "percent_more": lambda values: 100 * (values[0] / values[1] - 1),
    "sum": lambda values: sum(values, Fraction(0)),
    "product": lambda values: math.prod(values, start=Fraction(1)),
}


class _Evaluator:
    """Values that claims can refer to: the tables' numbers and the models' shapes."""

    def __init__(self, tables: Sequence[Audited], shapes: Mapping[str, Any], as_printed: bool) -> None:
        self._shapes = shapes
        self._tables: dict[str, tuple[TableLayout, dict[CellKey, Fraction]]] = {}
        self.used: set[str] = set()
        """Tables that were referred to."""
        for table in tables:
            values = {key: half_up(value, table.layout.decimals) for key, value in table.values.items()}
            self._tables[table.layout.name] = table.layout, values | (table.printed.values if as_printed else {})

    def check(self, claim: PaperClaim) -> tuple[bool, list[Values]]:
        """Return whether a claim follows, with the values that it was computed from."""
        if claim.holds:
            relations = [relation for pairs in claim.holds for relation in pairs.items()]
            groups = [list(map(self._value, operands)) for _, operands in relations]
            return all(_RELATIONS[name](group) for (name, _), group in zip(relations, groups, strict=True)), groups
        text, value = claim.figure or claim.printed, self._value(claim.computed)
        return half_up(value, len(text.partition(".")[2])) == Fraction(text), [[value]]

    def _value(self, expression: Any) -> Fraction:
        if isinstance(expression, (int, float)):
            return Fraction(str(expression))
        if isinstance(expression, str):
            table, model, measure = expression.split("/")
            return self._table(table)[1][model, measure]
        [(name, operands)] = expression.items()
        if name in _ARITHMETIC:
            return _ARITHMETIC[name](list(map(self._value, operands)))
        if name == "least":
            return min(self._table(operands)[1].values())
        look_up: dict[str, Callable[..., int]] = {"size": self._size, "wins": self._wins, "shape": self._shape}
        return Fraction(look_up[name](**operands))

    def _table(self, name: str) -> tuple[TableLayout, dict[CellKey, Fraction]]:
        self.used.add(name)
        return self._tables[name]

    def _size(self, table: str, of: str) -> int:
        layout, _ = self._table(table)
        return len(layout.model_items if of == "models" else _measures(layout, of))

    def _wins(
        self, table: str, model: str, among: Sequence[str] = (), alone: bool = False, of: str = "measures"
    ) -> int:
        layout, values = self._table(table)
        if unknown := set(among) - layout.model_items.keys():
            raise KeyError(min(unknown))
        others = [key for key in among or layout.model_items if key != model]

        def wins(measure: str) -> bool:
            value = values[model, measure]
            best = max(values[other, measure] for other in others if (other, measure) in values)
            return value > best or (value == best and not alone)

        return sum(all(map(wins, group)) for group in _measures(layout, of))

    def _shape(self, model: str, of: str) -> int:
        shape = self._shapes[model] if model in self._shapes else named_model(model).shape
        if of == "parameters":
            return parameters(shape).total
        return {"head_size": shape.attention.head_size, "layers": shape.attention.layers}[of]


def _measures(layout: TableLayout, of: str) -> list[tuple[str, ...]]:
    groups = [tuple(key for key in group.items if key not in layout.averages) for group in layout.measure_groups]
    alone: list[tuple[str, ...]] = [(measure,) for group in groups for measure in group]
    return {"groups": [group for group in groups if group], "measures": alone}[of]


def _shown(value: Fraction) -> str:
    if value.denominator == 1:
        return f"{value.numerator:,}"
    return to_text(value, 2).rstrip("0").rstrip(".")
