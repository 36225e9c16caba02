"""Sets of prompts: the shipped one by factors, and a user's file; orders of listed options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from evalkit.benchmarks.multiple_choice.tasks import Question
from evalkit.benchmarks.multiple_choice.templates import Part, load_template
from evalkit.benchmarks.prompt_variants.prompt_sets import in_orders, load_prompts, order_name, orders_of, under_order
from evalkit.errors import DataError, TemplateError, UsageError
from tests.questions import question

INST = load_template("inst")
HASHES = {
    "inst": "48356555",
    "no-instruction": "c8650ff9",
    "instruction-line": "c3d5aa61",
    "dialogue": "1af7b859",
    "system-2": "0c0bc130",
    "system-3": "126a2d5b",
}
"""Of prompts in finished runs: a change would repeat them."""
BY_TEMPLATE = ["inst", "no-instruction", "instruction-line", "dialogue"]
BY_SYSTEM = ["inst", "system-1", "system-2", "system-3"]


def written(folder: Path, **content: Any) -> str:
    (folder / "my.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    return str(folder / "my.yaml")


@pytest.mark.parametrize(
    ("vary", "names", "orders"),
    [
        (["template"], BY_TEMPLATE, 1),
        (["choice_order"], ["inst"], 4),
        (["choice_order", "system_prompt", "template"], [*BY_TEMPLATE, *BY_SYSTEM[1:]], 4),
    ],
)
def test_each_factor_adds_its_own_prompts(vary: list[str], names: list[str], orders: int) -> None:
    prompts = load_prompts(vary, INST)
    assert ([*prompts.templates], prompts.choice_orders) == (names, orders)
    hashes = prompts.specification["templates"]
    assert {name: digest[:8] for name, digest in hashes.items() if name != "system-1"}.items() <= HASHES.items()
    # Every rule applies to every prompt
    assert all(template.scores_all for template in prompts.templates.values())
    for name in {"system-2", "system-3"} & set(names):
        assert replace(prompts.templates[name], name="inst", system=INST.system) == INST


def test_no_system_prompt_leaves_no_space_of_its_own(tmp_path: Path) -> None:
    texts = {"instruction": "{system}\n", "context": "{context}", "special": "\n\n", "continuation": "{continuation}"}
    for base, text in (
        (INST, "[INST] [/INST] Context yes"),
        (load_template("instruction-line"), "Context yes"),
        (load_template("dialogue"), "User: Context\nAssistant: yes"),
        (replace(INST, parts=tuple(Part(*part) for part in texts.items())), "Context\n\nyes"),
    ):
        [_, without] = load_prompts([written(tmp_path, system_prompts=[""])], base).templates.values()
        assert "".join(piece.text for piece in without.pieces(question("Context", ["yes", "no"]), 0)) == text


def test_a_file_names_its_own_prompts_and_none_is_repeated(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("parts:\n- context: '{context}'\n- continuation: ' {continuation}'\n")
    content: dict[str, Any] = {"templates": ["inst", "plain", "mine.yaml"], "choice_orders": 2}
    prompts = load_prompts([written(tmp_path, **content, system_prompts=["Be brief."])], INST)
    assert [*prompts.templates] == ["inst", "plain", "mine", "system-1"] and prompts.choice_orders == 2
    assert prompts.templates["mine"] == load_template(str(tmp_path / "mine.yaml"))
    for change in ({"system_prompts": ["Be kind."]}, {"system_prompts": ["Be brief."], "choice_orders": 3}):
        assert load_prompts([written(tmp_path, **content | change)], INST).specification != prompts.specification
    # Neither the run's own, nor one that is another template without its system prompt
    prompts = load_prompts(["template", "system_prompt"], load_template("instruction-line"))
    assert [*prompts.templates] == ["instruction-line", "inst", "no-instruction", "dialogue", "system-2", "system-3"]


@pytest.mark.parametrize(
    ("vary", "noun"),
    [
        (["templates"], "did you mean 'template'"),
        ({"templates": ["absent.yaml"]}, "absent.yaml"),
        ({"choice_orders": 1}, "templates, choice_orders, system_prompts"),
        ({"templates": ["inst"]}, "inst"),
        ({"system_prompts": ["x", "x"]}, "'system-2'.*'system-1'"),
    ],
)
def test_invalid_sets(vary: Any, noun: str, tmp_path: Path) -> None:
    with pytest.raises((UsageError, TemplateError), match=noun):
        load_prompts(vary if isinstance(vary, list) else [written(tmp_path, **vary)], INST)
    with pytest.raises(UsageError, match="plain"):  # which has no system prompt
        load_prompts(["system_prompt"], load_template("plain"))


OPTIONS = ["red", "green", "blue", "A. red\nB. green"]
"""The last one looks like a list itself."""


def listed(
    options: list[str] = OPTIONS, gold: int = 0, before: str = "Which colour?", form: str = "{}. {}"
) -> Question:
    letters = "ABCDE"[: len(options)]
    lines = "\n".join(form.format(letter, text) for letter, text in zip(letters, options, strict=True))
    asked = question(f"{before}\n{lines}\nAnswer:", list(letters), gold=gold)
    return replace(asked, doc={"choices": options, "answer": gold})


@given(st.permutations(range(4)), st.integers(0, 3), st.sampled_from(["{}. {}", "{}) {}", "({}) {}"]))
def test_options_move_and_the_gold_letter_still_names_the_gold_option(order: list[int], gold: int, form: str) -> None:
    """Letters and solved examples stay."""
    example = listed(form=form).contexts[0] + " A\n\nWhich colour?"
    moved = under_order(listed(gold=gold, form=form, before=example), tuple(order))
    options = [OPTIONS[number] for number in order]
    assert moved.contexts == listed(options, form=form, before=example).contexts
    assert options[moved.gold] == OPTIONS[gold]
    assert moved.choices == moved.continuations == ("A", "B", "C", "D")


def test_orders_are_cyclic_begin_with_the_original_and_follow_each_other() -> None:
    assert orders_of([listed(), listed(gold=3)], 4) == [(0, 1, 2, 3), (1, 2, 3, 0), (2, 3, 0, 1), (3, 0, 1, 2)]
    assert orders_of([listed(["red", "green"])], 9) == [(0, 1), (1, 0)]
    assert order_name((1, 2, 3, 0)) == "order-BCDA"
    orders = orders_of([listed()], 3)
    joined = in_orders(listed(gold=2), orders)
    assert joined.contexts == tuple(text for order in orders for text in under_order(listed(gold=2), order).contexts)
    assert (joined.continuations, joined.gold) == (("A", "B", "C", "D") * 3, 2)
    assert len(joined.gaps) == len(joined.choices) == 12
    assert in_orders(listed(), orders[:1]) == listed()
    # One document that lists them does not suffice, nor documents with different numbers
    plain = replace(question("Which colour?", ["red", "green"]), doc={"choices": ["red", "green"]})
    lettered = replace(plain, continuations=("A", "B"), choices=("A", "B"))
    for members in ([plain], [listed(["red", "green"]), lettered], [listed(["red", "green"]), listed()]):
        assert orders_of(members, 4) == [(0, 1)]
    with pytest.raises(DataError, match="made_up document 0"):
        under_order(plain, (1, 0))
