"""Verification of the paper's sentences against its tables.

In: a file of claims and the tables that they refer to. Out: a verdict on each. A claim defines how its figure follows
from the tables (`computed`), or relations between numbers (`holds`), in the following vocabulary.

A value is a number; TABLE/MODEL/MEASURE; or one of

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
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import AfterValidator, BeforeValidator, model_validator

from evalkit.errors import EvalkitError, TableError, first_line
from evalkit.inputs.validated import FileSettings, Listed, Named, read_settings
from evalkit.models.zoo.named import named_model
from evalkit.models.zoo.shapes import ModelShape, parameters, read_shape
from evalkit.reporting.decimals import half_up, parse_number, to_text
from evalkit.tables.fill import computed
from evalkit.tables.layout import TableLayout
from evalkit.tables.published import Numbers, Printed


class Audited(NamedTuple):
    """A published table with its numbers, printed averages and marks."""

    layout: TableLayout
    numbers: Numbers
    printed: Printed


def _written(given: object) -> object:
    """Join a text into one line; a number is converted to text."""
    return " ".join(str(given).split()) if isinstance(given, str) or type(given) in (int, float) else given


_Written = Annotated[str, BeforeValidator(_written)]


class PaperClaim(FileSettings):
    """A paraphrased sentence of the paper, and how it follows from the tables."""

    where: _Written
    """Section or caption of the paper, and the line of its source."""
    says: _Written
    printed: _Written
    """A figure or a few words, as printed."""
    figure: _Written = ""
    """The printed figure as a number, where `printed` is not one."""
    computed: Any = None
    holds: Listed[dict[str, list[Any]]] = ()
    unchecked: _Written = ""
    """Why the tables cannot verify it."""
    note: _Written = ""

    @model_validator(mode="after")
    def _follows_in_one_way(self) -> Self:
        if len(self.model_fields_set & {"computed", "holds", "unchecked"}) != 1:
            raise ValueError("give one of computed, holds and unchecked")
        return self


class Claims(FileSettings):
    """Content of a file of claims."""

    models: Named[Annotated[dict[str, Any], AfterValidator(read_shape)]]
    """Shapes of models that evalkit does not know by name, validated from their config.json."""
    claims: Named[PaperClaim]


def read_claims(path: Path) -> Claims:
    """Read a file of claims; a `TableError` names the invalid claim."""
    return read_settings(path, Claims, TableError)


HOLDS, BY_PRINTED = "holds", "holds by the printed averages only"
FAILS, UNCHECKED = "does not follow", "cannot be checked"


class Verdict(NamedTuple):
    """Result of checking a claim: what the tables give, and which tables were used."""

    key: str
    claim: PaperClaim
    verdict: str
    """`HOLDS`, `BY_PRINTED`, `FAILS` or `UNCHECKED`."""
    computed: str
    tables: frozenset[str]


def check_claims(content: Claims, tables: Sequence[Audited]) -> list[Verdict]:
    """Return the verdict on each claim, in the file's order.

    Raises:
        TableError: a claim names a table, a row, a measure, a model or an operation that does not exist.
    """
    verdicts = []
    recomputed, printed = (_Facts(tables, content.models, as_printed) for as_printed in (False, True))
    for key, claim in content.claims.items():
        if claim.unchecked:
            verdicts.append(Verdict(key, claim, UNCHECKED, "", frozenset()))
            continue
        recomputed.used.clear()
        try:
            (follows, values), (follows_printed, _) = recomputed.check(claim), printed.check(claim)
        except (EvalkitError, KeyError, ValueError, TypeError, IndexError, ZeroDivisionError) as error:
            raise TableError(f"claim '{key}' cannot be computed: {first_line(error)}") from error
        verdict = HOLDS if follows else BY_PRINTED if follows_printed else FAILS
        shown = "; ".join(", ".join(map(_shown, group)) for group in values)
        verdicts.append(Verdict(key, claim, verdict, shown, frozenset(recomputed.used)))
    return verdicts


def _throughout(compare: Callable[[Fraction, Fraction], bool]) -> Callable[[list[Fraction]], bool]:
    return lambda values: all(compare(*neighbours) for neighbours in pairwise(values))


_RELATIONS: dict[str, Callable[[list[Fraction]], bool]] = {
    "rising": _throughout(operator.lt),
    "falling": _throughout(operator.gt),
    "not_falling": _throughout(operator.le),
    "not_rising": _throughout(operator.ge),
    "equal": _throughout(operator.eq),
    "above": lambda values: all(values[0] > other for other in values[1:]),
}
_ARITHMETIC: dict[str, Callable[[list[Fraction]], Fraction]] = {
    "difference": lambda values: values[0] - values[1],
    "ratio": lambda values: values[0] / values[1],
    "percent_more": lambda values: 100 * (values[0] / values[1] - 1),
    "sum": lambda values: sum(values, Fraction(0)),
    "product": lambda values: math.prod(values, start=Fraction(1)),
}


class _Facts:
    """Values that claims can refer to: the tables' numbers and the models' shapes."""

    def __init__(self, tables: Sequence[Audited], shapes: Mapping[str, Any], as_printed: bool) -> None:
        self._shapes = shapes
        self._tables: dict[str, tuple[TableLayout, dict[tuple[str, str], Fraction]]] = {}
        self.used: set[str] = set()
        """Tables that were referred to."""
        for layout, numbers, printed in tables:
            cells = computed(layout, numbers).items()
            values = {key: half_up(number.value, layout.decimals) for key, number in cells}
            self._tables[layout.name] = layout, values | (printed.values if as_printed else {})

    def check(self, claim: PaperClaim) -> tuple[bool, list[list[Fraction]]]:
        """Return whether a claim follows from the tables, and the values used."""
        if not claim.holds:
            text = claim.figure or claim.printed
            figure, value = parse_number(text), self._value(claim.computed)
            if figure is None:
                raise ValueError(f"no figure is printed in '{text}'")
            return half_up(value, len(text.partition(".")[2])) == figure, [[value]]
        relations = [relation for [relation] in map(dict.items, claim.holds)]
        groups = [list(map(self._value, operands)) for _, operands in relations]
        follows = [_RELATIONS[name](values) for (name, _), values in zip(relations, groups, strict=True)]
        return all(follows), groups

    def _value(self, raw: Any) -> Fraction:
        """Evaluate an expression of the vocabulary."""
        if isinstance(raw, (int, float)):
            return Fraction(str(raw))
        if isinstance(raw, str):
            table, model, measure = raw.split("/")
            return self._table(table)[1][model, measure]
        [(name, operands)] = raw.items()
        if name in _ARITHMETIC:
            return _ARITHMETIC[name](list(map(self._value, operands)))
        if name == "least":
            return min(self._table(operands)[1].values())
        look_up: dict[str, Callable[..., int]] = {"size": self._size, "wins": self._wins, "shape": self._shape}
        return Fraction(look_up[name](**operands))

    def _table(self, name: str) -> tuple[TableLayout, dict[tuple[str, str], Fraction]]:
        self.used.add(name)
        return self._tables[name]

    def _size(self, table: str, of: str) -> int:
        layout, _ = self._table(table)
        return len(layout.models if of == "models" else _measures(layout, of))

    def _wins(
        self, table: str, model: str, among: Sequence[str] = (), alone: bool = False, of: str = "measures"
    ) -> int:
        layout, values = self._table(table)
        others = [key for key in layout.models if key != model and (not among or key in among)]
        if strange := set(among) - layout.models.keys():
            raise KeyError(min(strange))

        def wins(measure: str) -> bool:
            value, best = values[model, measure], max(values[o, measure] for o in others if (o, measure) in values)
            return value > best or (value == best and not alone)

        return sum(all(map(wins, group)) for group in _measures(layout, of))

    def _shape(self, model: str, of: str) -> int:
        shape = self._shapes[model] if model in self._shapes else _named_shape(model)
        attention = shape.attention
        return {"parameters": parameters(shape).total, "head_size": attention.head_size, "layers": attention.layers}[of]


@cache
def _named_shape(name: str) -> ModelShape:
    return named_model(name).shape


def _measures(layout: TableLayout, of: str) -> list[tuple[str, ...]]:
    """Return the measures of each column group, or each measure alone; without averages."""
    groups = [tuple(key for key in group.items if key not in layout.averages) for group in layout.measure_groups]
    alone: list[tuple[str, ...]] = [(measure,) for group in groups for measure in group]
    return {"groups": [group for group in groups if group], "measures": alone}[of]


def _shown(value: Fraction) -> str:
    """Format an integer with separators, or a number with at most two decimals."""
    if value.denominator == 1:
        return f"{value.numerator:,}"
    return to_text(value, 2).rstrip("0").rstrip(".")
