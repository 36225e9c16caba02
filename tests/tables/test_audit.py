"""The audit finds planted errors and nothing else; verdicts, which snapshots have, depend on the numbers."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import pytest

from evalkit.errors import EvalkitError
from evalkit.paths import resource
from evalkit.reporting.decimals import half_up
from evalkit.reporting.report import render
from evalkit.tables.audit import (
    CONTRADICTED,
    FAILS,
    HOLDS,
    UNCHECKED,
    Audited,
    Claims,
    audit_averages,
    audit_marks,
    audited,
    check_claims,
    read_claims,
)
from evalkit.tables.fill import CellKey, Number, Printed, computed, contests, printed_cells, published_numbers
from evalkit.tables.layout import layout_names, load_layout

VERDICTS = (CONTRADICTED, FAILS, HOLDS, UNCHECKED)
CLAIMS = read_claims(resource("results", "published", "claims.yaml"))


def published(name: str) -> Audited:
    layout = load_layout(name)
    return Audited(layout, published_numbers(layout), printed_cells(layout))


def flawless(name: str) -> Audited:
    """A table whose printed averages and marks are what its numbers give."""
    table = published(name)
    exact = {key: number.value for key, number in computed(table.layout, table.numbers).items()}
    values = {key: half_up(value, table.layout.decimals) for key, value in exact.items()}
    marks: dict[CellKey, frozenset[str]] = {}
    for mark, measure, _, winners in contests(table.layout, exact):
        marks |= {(model, measure): marks.get((model, measure), frozenset()) | {mark} for model in winners}
    printed = {key: value for key, value in values.items() if key[1] in table.layout.averages}
    return table._replace(printed=Printed(printed, marks))


def with_cell(table: Audited, model: str, measure: str, value: float) -> Audited:
    numbers = {name: dict(row) for name, row in table.numbers.items()}
    numbers[model][measure] = Number(Fraction(str(value)))
    return table._replace(numbers=numbers)


@pytest.fixture(scope="module")
def tables() -> dict[str, Audited]:
    return {name: published(name) for name in layout_names()}


@pytest.mark.parametrize("name", ["main_res", "app_long_contx", "backbone_abl_app"])
def test_planted_averages_and_marks_are_found(name: str) -> None:
    """A mark taken from where it belongs, and given where it does not."""
    table = flawless(name)
    assert [*audit_averages(table), *audit_marks(table)] == []
    if averages := {key: value + Fraction(2, 10) for key, value in list(table.printed.values.items())[:1]}:
        [finding] = audit_averages(table._replace(printed=table.printed._replace(values=averages)))
        assert float(finding.printed) == pytest.approx(float(finding.recomputed) + 0.2)
    mark = next(iter(table.layout.marks))
    right = next(key for key, kinds in table.printed.marks.items() if mark in kinds)
    cells = computed(table.layout, table.numbers)
    wrong = next(key for key in cells if key[1] == right[1] and key not in table.printed.marks)
    for key, kinds in ((right, frozenset[str]()), (wrong, frozenset({str(mark)}))):
        planted = table._replace(printed=table.printed._replace(marks=table.printed.marks | {key: kinds}))
        assert mark in {finding.printed.partition(":")[0] for finding in audit_marks(planted)}


def holds(claims: Claims, tables: dict[str, Audited], key: str) -> bool:
    """Whether a claim follows from the tables."""
    [sentence] = check_claims(claims.model_copy(update={"claims": {key: claims.claims[key]}}), list(tables.values()))
    return sentence.verdict == HOLDS


@pytest.mark.parametrize(
    ("key", "table", "model", "measure", "value"),
    [
        ("twelve_of_sixteen", "app_long_contx", "intg_1b", "passage_count", 2.2),
        ("behind_cosmo", "res_intg_app", "cosmo", "mmlu", 35.6),
        ("rank_by_depth", "anly_rank_main", "diff", "1b_last3", 71),
    ],
)
def test_another_number_makes_it_so(
    tables: dict[str, Audited], key: str, table: str, model: str, measure: str, value: float
) -> None:
    assert not holds(CLAIMS, tables, key)
    assert holds(CLAIMS, tables | {table: with_cell(tables[table], model, measure, value)}, key)


@pytest.mark.slow
def test_what_holds_does_so_by_the_tables(tables: dict[str, Audited]) -> None:
    """Each claim on a table's numbers fails for some other number; those on sizes of tables depend on none."""
    holding = [finding for finding in audited(layout_names()).content if finding["verdict"] == HOLDS]
    by_size = {"eight_tasks", "five_and_three", "samples", "long_context_sets", "long_context_tasks"}
    assert by_size < {sentence["key"] for sentence in holding}
    for sentence in holding:
        used = {name: tables[name] for name in sentence["table"].split(", ") if name != "text"}
        changes = (
            used | {name: with_cell(table, model, measure, value)}
            for name, table in used.items() for model, row in table.numbers.items() for measure in row
            for value in (0, 100)
        )  # fmt: skip
        if used and sentence["key"] not in by_size:
            assert not all(holds(CLAIMS, changed, sentence["key"]) for changed in changes), sentence["key"]


def test_sixteen_heads_are_compared_with_as_many(tables: dict[str, Audited]) -> None:
    """16 heads of 8 signals (39.6) are below Vanilla of 8 heads (39.8), and above Vanilla of 16 (39.3)."""
    averages = tables["vanilla_head_app"].values, tables["sig_abl_main"].values
    assert half_up(averages[0]["vanilla_16heads", "Average"], 1) == Fraction("39.3")
    assert half_up(averages[1]["intg_16heads_s8", "Average"], 1) == Fraction("39.6")
    assert holds(CLAIMS, tables, "sixteen_by_eight")
    assert not holds(CLAIMS, tables, "sixteen_by_eight_alike")


def test_an_audit_begins_with_its_summary_and_has_a_block_for_each_table() -> None:
    report = audited(layout_names())
    summary, *blocks = report.parts
    *_, total = summary.tables[0].lines
    counts = Counter(finding["verdict"] for finding in report.content)
    assert [int(cell.value) for cell in total.cells] == [counts[name] for name in VERDICTS]
    wrong = {finding["table"] for finding in report.content if finding["verdict"] in VERDICTS[:2]}
    assert [block.verdict[0] for block in blocks[:-2]] == sorted(wrong)
    assert sum(len(list(block.tables[0].lines)) for block in blocks[:-2]) == counts[FAILS] + counts[VERDICTS[0]]
    assert [len(block.facts) for block in blocks[-2:]] == [counts[HOLDS], counts[VERDICTS[3]]]
    lines = render(report, "terminal", width=100).splitlines()
    assert len(lines) < 400 and max(map(len, lines)) <= 100


def test_ties_and_relations(tables: dict[str, Audited]) -> None:
    """`wins` by hand, with and without ties: at 1.2B HellaSwag is tied."""
    of = {"table": "main_res", "model": "intg_all_1b", "among": ["vanilla_1b", "diff_1b", "intg_1b"]}

    def follows(printed: str = "so", **way: Any) -> bool:
        made = {"where": "here", "says": "it", "printed": printed} | way
        return holds(Claims.model_validate({"models": {}, "claims": {"made": made}}), tables, "made")

    assert follows("3", computed={"wins": of})
    assert follows("2", computed={"wins": of | {"alone": True}})
    assert follows("2.5", computed={"ratio": [5, 2]})
    assert follows("2", computed={"ratio": [249, 100]})
    assert not follows("2", computed={"ratio": [5, 2]})  # half up
    for name, numbers, true in (
        ("rising", [1, 2, 2], False), ("not_falling", [1, 2, 2], True), ("falling", [3, 2, 1], True),
        ("not_rising", [2, 2, 3], False), ("above", [3, 1, 2], True), ("above", [2, 2], False),
        ("equal", [2, 2, 2], True), ("equal", [2, 2, 1], False),
    ):  # fmt: skip
        assert follows(holds=[{name: numbers}]) == true, (name, numbers)
    for way in ({"computed": "no_table/a/b"}, {"computed": {"eval": "1"}}, {"computed": {"ratio": [1, 0]}},
                {"computed": {"wins": of | {"among": ["x"]}}}, {"computed": 1}, {"holds": [{"growing": [1, 2]}]},
                {"computed": {"shape": {"model": "llama-1.2b-intq", "of": "parameters"}}}):  # fmt: skip
        with pytest.raises(EvalkitError, match=r"claim .made.|unknown model"):
            follows(**way)
