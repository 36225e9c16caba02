"""Claims of the paper's text about its tables: each verdict, and its dependence on the tables."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml

from evalkit.errors import TableError
from evalkit.paths import resource
from evalkit.tables.audit import verdict_sections
from evalkit.tables.claims import (
    BY_PRINTED,
    FAILS,
    HOLDS,
    UNCHECKED,
    Audited,
    Claims,
    PaperClaim,
    Verdict,
    check_claims,
    read_claims,
)
from evalkit.tables.layout import layout_names, load_layout
from evalkit.tables.published import Number, printed_cells, published_numbers

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
"""Claims that do not follow, with what does."""
NOT_CHECKED = {
    "negative_attention", "quarters_alike", "backbone_sizes", "attention_to_kinds", "entropy", "corpora",
    "training_time", "comparable", "rouge",
}  # fmt: skip
HOLD = {
    "best_small", "best_large", "eight_tasks", "vanilla_below", "rank_more_effectively", "size_small", "size_large",
    "no_significant_increase", "logits_as_signals", "five_and_three", "cog_gain", "diff_gain", "intg_gain", "cog_half",
    "diff_half", "intg_half", "all_layers_still_best", "four_of_eight", "one_each", "top_three", "diff_gain_large",
    "intg_half_large", "six_of_eight", "remaining_two", "half_best_knowledge", "all_slightly_worse",
    "bottom_below_vanilla", "quarters_below_vanilla", "more_signals", "sixteen_heads_degrade", "sixteen_by_eight",
    "channels_of_a_signal", "more_heads_worse", "vanilla_heads", "eight_signals_chosen", "half_chosen",
    "backbone_gains", "samples", "layers_large", "rank_above_half", "rank_over_cog", "rank_over_diff", "rank_by_size",
    "tokens_large", "batch_small", "batch_large", "no_parameters_intg", "no_parameters_cog", "tinyllamas_data",
    "cosmos_size", "cosmos_epochs", "behind_tinyllama", "stretched_by", "long_context_sets", "long_context_tasks",
}  # fmt: skip


@pytest.fixture(scope="module")
def claims() -> Claims:
    return read_claims(FILE)


@pytest.fixture(scope="module")
def tables() -> dict[str, Audited]:
    layouts = map(load_layout, layout_names())
    return {one.name: Audited(one, published_numbers(one), printed_cells(one)) for one in layouts}


@pytest.fixture(scope="module")
def verdicts(claims: Claims, tables: dict[str, Audited]) -> dict[str, Verdict]:
    return {verdict.key: verdict for verdict in check_claims(claims, list(tables.values()))}


def with_cell(table: Audited, model: str, measure: str, value: float) -> Audited:
    numbers = {name: dict(row) for name, row in table.numbers.items()}
    numbers[model][measure] = Number(Fraction(str(value)))
    return table._replace(numbers=numbers)


def alone(claims: Claims, key: str) -> Claims:
    return claims.model_copy(update={"claims": {key: claims.claims[key]}})


def test_the_verdict_on_each(verdicts: dict[str, Verdict]) -> None:
    assert set(verdicts) == HOLD | NOT_SO.keys() | NOT_CHECKED
    for key, verdict in verdicts.items():
        if key in NOT_SO:
            assert verdict.verdict == (BY_PRINTED if key == "backbone_order" else FAILS), key
            assert verdict.computed == NOT_SO[key]
        else:
            assert verdict.verdict == (UNCHECKED if key in NOT_CHECKED else HOLDS), (key, verdict.computed)


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
    [verdict] = check_claims(alone(claims, key), list(changed.values()))
    assert (verdict.verdict, verdict.tables) == (HOLDS, {table})


def test_what_holds_does_so_by_the_tables(
    claims: Claims, tables: dict[str, Audited], verdicts: dict[str, Verdict]
) -> None:
    """Each claim on a table's numbers fails for some other number; those on its size alone cannot."""
    by_size = {key for key, verdict in verdicts.items() if key in HOLD and verdict.tables and _size_alone(verdict)}
    assert by_size == {"eight_tasks", "five_and_three", "samples", "long_context_sets", "long_context_tasks"}
    for key in HOLD - by_size:
        used = {name: tables[name] for name in verdicts[key].tables}
        one = alone(claims, key)
        changes = (
            with_cell(table, model, measure, value)
            for table in used.values() for model, row in table.numbers.items() for measure in row for value in (0, 100)
        )  # fmt: skip
        others = (check_claims(one, list((used | {table.layout.name: table}).values()))[0] for table in changes)
        assert not used or any(verdict.verdict != HOLDS for verdict in others), key


def _size_alone(verdict: Verdict) -> bool:
    text = str(verdict.claim.computed or verdict.claim.holds)
    return not any(word in text for word in ("/", "wins", "least"))


def test_parameters_decide_too(tables: dict[str, Audited], tmp_path: Path) -> None:
    """A TinyLlama with an untied head and all keys and values would have others; the paper's own has the paper's."""
    content = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    content["models"]["tinyllama"] |= {"num_key_value_heads": 32, "tie_word_embeddings": True}
    path = tmp_path / "claims.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    found = {v.key: v.verdict for v in check_claims(read_claims(path), list(tables.values()))}
    assert {key for key in NOT_SO if found[key] == HOLDS} == {"tinyllamas_parameters", "tinyllamas_size"}


def test_ties_and_relations(tables: dict[str, Audited]) -> None:
    """`wins` by hand, with and without ties: at 1.2B HellaSwag is tied."""
    of = {"table": "main_res", "model": "intg_all_1b", "among": ["vanilla_1b", "diff_1b", "intg_1b"]}

    def follows(printed: str = "so", **way: Any) -> bool:
        claim = PaperClaim(where="here", says="it", printed=printed, **way)
        return check_claims(Claims(models={}, claims={"made": claim}), list(tables.values()))[0].verdict == HOLDS

    assert follows(printed="3", computed={"wins": of})
    assert follows(printed="2", computed={"wins": of | {"alone": True}})
    assert follows(printed="2.5", computed={"ratio": [5, 2]})
    assert follows(printed="2", computed={"ratio": [249, 100]})
    assert not follows(printed="2", computed={"ratio": [5, 2]})  # half up
    for name, numbers, true in (
        ("rising", [1, 2, 2], False),
        ("not_falling", [1, 2, 2], True),
        ("falling", [3, 2, 1], True),
        ("not_rising", [2, 2, 3], False),
        ("above", [3, 1, 2], True),
        ("above", [2, 2], False),
        ("equal", [2, 2, 2], True),
        ("equal", [2, 2, 1], False),
    ):
        assert follows(holds=({name: numbers},)) == true, (name, numbers)


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"computed": {"difference": ["main_res/intg_2b/Average", 1]}}, "claim 'made' cannot be computed"),
        ({"computed": "no_table/a/b"}, "claim 'made' cannot be computed: KeyError 'no_table'"),
        ({"computed": {"eval": "1"}}, "claim 'made' cannot be computed: KeyError 'eval'"),
        ({"computed": {"wins": {"table": "main_res", "model": "intg_1b", "among": ["x"]}}}, "KeyError 'x'"),
        ({"computed": {"shape": {"model": "llama-1.2b-intq", "of": "parameters"}}}, "unknown model 'llama-1.2b-intq'"),
        ({"computed": {"ratio": [1, 0]}}, "claim 'made' cannot be computed"),
        ({"computed": 1, "printed": "one"}, "'one' is not a number"),
        ({"holds": [{"growing": [1, 2]}]}, "KeyError 'growing'"),
        ({"holds": [], "computed": 1}, "'claims.made': give one of computed, holds and unchecked"),
        ({"unchecked": "why", "wher": "x"}, "'claims.made': unknown key 'wher': did you mean 'where'"),
        ({"where": ["x"], "computed": 1}, "'claims.made.where' is "),
        ({"holds": {"above": [1, 2]}}, "'claims.made.holds' is "),
    ],
)
def test_invalid_claims(tables: dict[str, Audited], tmp_path: Path, about: dict[str, Any], words: str) -> None:
    path = tmp_path / "claims.yaml"
    made = {"where": "here", "says": "it", "printed": "1"} | about
    path.write_text(yaml.safe_dump({"models": {}, "claims": {"made": made}}), encoding="utf-8")
    with pytest.raises(TableError, match=words):
        check_claims(read_claims(path), list(tables.values()))


def test_sentences_are_in_words_of_our_own(claims: Claims) -> None:
    """Printed values are figures or a few words."""
    assert max(len(claim.printed.split()) for claim in claims.claims.values()) <= 8


def test_all_of_them_are_shown(verdicts: dict[str, Verdict]) -> None:
    shown = [(str(section.title), len(section.lines)) for section in verdict_sections(list(verdicts.values()))]
    assert [count for _, count in shown] == [len(NOT_SO), len(HOLD), len(NOT_CHECKED)]
