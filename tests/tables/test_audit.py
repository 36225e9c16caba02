"""The audit finds planted errors and nothing else; each verdict on the paper's sentences, and what it depends on."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml

from evalkit.errors import TableError
from evalkit.paths import resource
from evalkit.reporting.decimals import half_up
from evalkit.reporting.table import Line, plain
from evalkit.tables.audit import (
    FAILS,
    HOLDS,
    UNCHECKED,
    Audited,
    Claims,
    Finding,
    audit_averages,
    audit_marks,
    audit_rows,
    audited,
    check_claims,
    read_claims,
)
from evalkit.tables.fill import CellKey, Number, Printed, computed, contests, printed_cells, published_numbers
from evalkit.tables.layout import layout_names, load_layout
from tests.tables.runs import written

FILE = resource("results", "published", "claims.yaml")
NOT_SO = {
    "intg_gain_large": "1.7",
    "half_best_reasoning": "39.5, 38.6, 38.2, 39.9, 38.8",
    "backbone_order": "39.5, 39.8, 40; 40.4, 40.4, 41.2",
    "last_layers": "3",
    "rank_by_depth": "100, 70, 58; 100, 81, 59; 100, 100, 69; 63, 71, 54; 93, 93, 62",
    "long_context_untested": "16",
    "no_parameters_diff": "5,760",
    "tinyllamas_parameters": "95,944,704",
    "tinyllamas_size": "1.1",
    "cosmos_data": "40.63",
    "behind_cosmo": "1.8",
    "twelve_of_sixteen": "11",
    "three_of_six": "2",
}
"""Claims that do not follow, with what does; the file has 55 that do, and 9 that no table can verify."""
BY_SIZE = {"eight_tasks", "five_and_three", "samples", "long_context_sets", "long_context_tasks"}
"""Claims on the size of a table, which no other number changes."""


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


@pytest.fixture(scope="module")
def claims() -> Claims:
    return read_claims(FILE)


@pytest.fixture(scope="module")
def lines() -> dict[str, tuple[str, Line]]:
    """Key of a claim → its section and line in the audit of all tables."""
    return {line.key: (plain(part.title), line) for part in audited(layout_names()).sections for line in part.lines}


# Numbers and marks


def test_the_slips_that_a_reader_can_see() -> None:
    """1.81 is marked beside 2.18; 51.1 beside 51.5; 39.5 beside 39.9; Pythia's mean is 40.4, not 40.3."""
    lines = audited(layout_names()).sections[0].lines
    findings = [Finding(plain(line.label), *map(plain, line.facts)) for line in lines]
    for place, printed, recomputed, why in (
        (("app_long_contx", "Passage Count", "all"), "1.81", "2.18", ""),
        (("abl_top_app", "all", "Winogrd"), "51.1", "51.5", ""),
        (("abl_top_main", "Rsn.", "all"), "", "39.9", ""),
        (("backbone_abl_app", "Pythia Intg", "Avg."), "40.3", "40.4", "no rounding"),
        (("vanilla_head_app", "Llama2 heads=32", "Avg."), "38.8", "38.9", "can explain"),
        (("sft_abl_app", "logits (our) (intg_s2_all)", "8 tasks"), "", "intg_s2_top50", "every number"),
    ):
        assert any(printed in finding.printed and recomputed in finding.recomputed and why in finding.why
                   for finding in findings if finding[:3] == place), place  # fmt: skip
    within = {finding.table for finding in findings if not finding.column.endswith(" tasks")}
    assert not {"main_res", "sig_abl_main", "res_intg_app"} & within


@pytest.mark.parametrize("name", ["main_res", "app_long_contx", "abl_top_main", "backbone_abl_app", "res_intg_app"])
def test_planted_averages_and_marks_are_found(name: str) -> None:
    """A mark taken from where it belongs, and given where it does not."""
    table = flawless(name)
    assert [*audit_averages(table), *audit_marks(table)] == []
    if averages := {key: value + Fraction(2, 10) for key, value in list(table.printed.values.items())[:1]}:
        [finding] = audit_averages(table._replace(printed=table.printed._replace(values=averages)))
        assert float(finding.printed) == pytest.approx(float(finding.recomputed) + 0.2)
    mark = next(iter(table.layout.marks))
    right = next(key for key, kinds in table.printed.marks.items() if mark in kinds)
    wrong = next(
        key for key in computed(table.layout, table.numbers) if key[1] == right[1] and key not in table.printed.marks
    )
    for key, kinds in ((right, frozenset[str]()), (wrong, frozenset({str(mark)}))):
        planted = table._replace(printed=table.printed._replace(marks=table.printed.marks | {key: kinds}))
        assert mark in {finding.printed.partition(":")[0] for finding in audit_marks(planted)}


def test_a_planted_number_moves_average_and_mark_and_contradicts_another_table(tables: dict[str, Audited]) -> None:
    planted = with_cell(flawless("main_res"), "cog_125m", "piqa", 99)
    assert [(finding.row, finding.column) for finding in audit_averages(planted)] == [("Cog", "Avg.")]
    assert "PIQA" in {finding.column for finding in audit_marks(planted)}
    main, heads = tables["main_res"], tables["vanilla_head_app"]
    assert list(audit_rows([main, heads])) == []
    [finding] = audit_rows([main, with_cell(heads, "vanilla_125m", "boolq", 58)])
    assert finding.row.startswith("Llama2 heads=8")
    assert finding.why == "described alike, but 1 of 8 numbers differ"


# Sentences


def verdict(content: Claims, tables: dict[str, Audited]) -> str:
    """The section of the only claim."""
    [section] = check_claims(content, list(tables.values()))
    return plain(section.title)


def alone(claims: Claims, key: str) -> Claims:
    return claims.model_copy(update={"claims": {key: claims.claims[key]}})


def test_the_verdict_on_each(claims: Claims, lines: dict[str, tuple[str, Line]]) -> None:
    by_section = {title: {key for key, (of_key, _) in lines.items() if of_key == title}
                  for title in (FAILS, HOLDS, UNCHECKED)}  # fmt: skip
    assert {key: plain(lines[key][1].facts[3]) for key in by_section[FAILS]} == NOT_SO
    assert {title: len(keys) for title, keys in by_section.items()} == {FAILS: 13, HOLDS: 55, UNCHECKED: 9}
    by_printed = {key for key in NOT_SO if "printed averages only" in plain(lines[key][1].facts[4])}
    assert by_printed == {"backbone_order"}
    assert max(len(claim.printed.split()) for claim in claims.claims.values()) <= 8  # no sentence is copied


@pytest.mark.parametrize(
    ("key", "table", "model", "measure", "value"),
    [
        ("twelve_of_sixteen", "app_long_contx", "intg_1b", "passage_count", 2.2),
        ("three_of_six", "app_long_contx", "vanilla_1b", "passage_count", 1.5),
        ("behind_cosmo", "res_intg_app", "cosmo", "mmlu", 35.6),
        ("intg_gain_large", "main_res", "vanilla_1b", "boolq", 70.1),
        ("half_best_reasoning", "abl_top_main", "intg_s2_all", "arc_easy", 41.0),
        ("backbone_order", "backbone_abl_main", "pythia_intg", "boolq", 54.0),
        ("rank_by_depth", "anly_rank_main", "diff", "1b_last3", 71),
    ],
)
def test_another_number_makes_it_so(
    claims: Claims, tables: dict[str, Audited], key: str, table: str, model: str, measure: str, value: float
) -> None:
    changed = tables | {table: with_cell(tables[table], model, measure, value)}
    assert verdict(alone(claims, key), changed) == HOLDS


def test_what_holds_does_so_by_the_tables(
    claims: Claims, tables: dict[str, Audited], lines: dict[str, tuple[str, Line]]
) -> None:
    """Each claim on a table's numbers fails for some other number."""
    holding = {key: plain(line.label).split(", ") for key, (title, line) in lines.items() if title == HOLDS}
    for key in holding.keys() - BY_SIZE:
        used = {name: tables[name] for name in holding[key] if name != "text"}
        changes = (
            used | {name: with_cell(table, model, measure, value)}
            for name, table in used.items() for model, row in table.numbers.items() for measure in row
            for value in (0, 100)
        )  # fmt: skip
        assert not used or any(verdict(alone(claims, key), changed) != HOLDS for changed in changes), key


def test_parameters_decide_too(tables: dict[str, Audited], tmp_path: Path) -> None:
    """A TinyLlama with a tied head and all keys and values would have the parameters that the paper states."""
    content = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    content["models"]["tinyllama"] |= {"num_key_value_heads": 32, "tie_word_embeddings": True}
    sections = check_claims(read_claims(Path(written(tmp_path / "claims.yaml", **content))), list(tables.values()))
    holding = {line.key for section in sections if plain(section.title) == HOLDS for line in section.lines}
    assert NOT_SO.keys() & holding == {"tinyllamas_parameters", "tinyllamas_size"}


def test_ties_and_relations(tables: dict[str, Audited]) -> None:
    """`wins` by hand, with and without ties: at 1.2B HellaSwag is tied."""
    of = {"table": "main_res", "model": "intg_all_1b", "among": ["vanilla_1b", "diff_1b", "intg_1b"]}

    def follows(printed: str = "so", **way: Any) -> bool:
        made = {"where": "here", "says": "it", "printed": printed} | way
        return verdict(Claims.model_validate({"models": {}, "claims": {"made": made}}), tables) == HOLDS

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


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"computed": "no_table/a/b"}, "claim 'made'.*'no_table'"),
        ({"computed": {"eval": "1"}}, "claim 'made'.*'eval'"),
        ({"computed": {"wins": {"table": "main_res", "model": "intg_1b", "among": ["x"]}}}, "'x'"),
        ({"computed": {"shape": {"model": "llama-1.2b-intq", "of": "parameters"}}}, "'llama-1.2b-intq'"),
        ({"computed": {"ratio": [1, 0]}}, "claim 'made'"),
        ({"computed": 1, "printed": "one"}, "'one'"),
        ({"holds": [{"growing": [1, 2]}]}, "'growing'"),
        ({"holds": [], "computed": 1}, "'claims.made'"),
        ({"unchecked": "why", "wher": "x"}, "'claims.made'.*'where'"),
    ],
)
def test_invalid_claims(tables: dict[str, Audited], tmp_path: Path, about: dict[str, Any], words: str) -> None:
    made = {"where": "here", "says": "it", "printed": "1"} | about
    path = written(tmp_path / "claims.yaml", models={}, claims={"made": made})
    with pytest.raises(TableError, match=words):
        check_claims(read_claims(Path(path)), list(tables.values()))
