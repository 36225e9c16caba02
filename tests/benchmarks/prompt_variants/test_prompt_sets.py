"""Sets of prompts: the shipped one by factors, a user's file, and messages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from evalkit.benchmarks.multiple_choice.templates import Part, load_template, template_names
from evalkit.benchmarks.prompt_variants.prompt_sets import load_prompts
from evalkit.errors import EvalkitError, TemplateError, UnknownNameError, UsageError
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


def written(folder: Path, **content: Any) -> str:
    (folder / "my.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    return str(folder / "my.yaml")


def test_each_factor_adds_its_own_prompts() -> None:
    by_template = load_prompts(["template"], INST)
    assert [*by_template.templates] == ["inst", "no-instruction", "instruction-line", "dialogue"]
    assert by_template.choice_orders == 1
    by_system = load_prompts(["system_prompt"], INST)
    assert [*by_system.templates] == ["inst", "system-1", "system-2", "system-3"]
    assert [one.system for one in by_system.templates.values()][1:3] == ["", "You are a helpful assistant."]
    # Only the system prompt differs
    assert all(replace(one, name="inst", system=INST.system) == INST for one in [*by_system.templates.values()][2:])
    by_order = load_prompts(["choice_order"], INST)
    assert ([*by_order.templates], by_order.choice_orders) == (["inst"], 4)
    every = load_prompts(["choice_order", "system_prompt", "template"], INST)
    assert [*every.templates] == [*by_template.templates, *[*by_system.templates][1:]]
    assert every.choice_orders == 4


ASKED = question("Context", ["yes", "no"])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("inst", "[INST] [/INST] Context yes"),
        ("instruction-line", "Context yes"),
        ("dialogue", "User: Context\nAssistant: yes"),
    ],
)
def test_no_system_prompt_leaves_no_space(name: str, text: str, tmp_path: Path) -> None:
    base = load_template(name)
    [_, found] = load_prompts([written(tmp_path, system_prompts=[""])], base).templates.values()
    pieces = found.pieces(ASKED, 0)
    assert "".join(piece.text for piece in pieces) == text
    assert found.content_hash != replace(base, system="").content_hash


def test_no_system_prompt_keeps_other_white_space(tmp_path: Path) -> None:
    """A template's parts may be line ends."""
    parts = [Part("instruction", "{system}\n"), Part("context", "{context}"), Part("special", "\n\n")]
    base = replace(INST, parts=(*parts, Part("continuation", "{continuation}")))
    [_, found] = load_prompts([written(tmp_path, system_prompts=[""])], base).templates.values()
    pieces = found.pieces(ASKED, 0)
    assert "".join(piece.text for piece in pieces) == "Context\n\nyes"


def test_a_prompt_that_is_another_template_without_system_prompt_is_not_repeated() -> None:
    found = load_prompts(["template", "system_prompt"], load_template("instruction-line"))
    assert [*found.templates] == ["instruction-line", "inst", "no-instruction", "dialogue", "system-2", "system-3"]


def test_specifications_of_other_prompts() -> None:
    hashes = load_prompts(["template", "system_prompt"], INST).specification["templates"]
    assert {name: one[:8] for name, one in hashes.items() if name != "system-1"} == HASHES


def test_shipped_templates_score_whole_sequences() -> None:
    """So every rule applies to every prompt."""
    assert all(one.scores_all for one in load_prompts(["template", "system_prompt"], INST).templates.values())
    assert {"no-instruction", "instruction-line", "dialogue"} <= {*template_names()}


def test_the_run_s_own_prompt_is_not_repeated() -> None:
    dialogue = load_template("dialogue")
    assert [*load_prompts(["template"], dialogue).templates][:2] == ["dialogue", "inst"]


def test_a_file_names_its_own_prompts(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("parts:\n- context: '{context}'\n- continuation: ' {continuation}'\n")
    given = written(tmp_path, templates=["inst", "plain", "mine.yaml"], system_prompts=["Be brief."], choice_orders=2)
    found = load_prompts([given], INST)
    assert [*found.templates] == ["inst", "plain", "mine", "system-1"]
    assert found.templates["mine"] == load_template(str(tmp_path / "mine.yaml"))
    assert found.choice_orders == 2


def test_texts_and_orders_determine_the_specification(tmp_path: Path) -> None:
    one, other = (load_prompts([written(tmp_path, system_prompts=[text])], INST) for text in ("Be brief.", "Be kind."))
    assert one.specification["templates"].keys() == other.specification["templates"].keys()
    assert one.specification != other.specification
    two, three = (load_prompts([written(tmp_path, choice_orders=count)], INST) for count in (2, 3))
    assert two.specification != three.specification


@pytest.mark.parametrize(
    ("vary", "error", "said"),
    [
        (["templates"], UnknownNameError, "unknown factor of --vary 'templates': did you mean 'template'?"),
        (["choice-order"], UnknownNameError, "did you mean 'choice_order'?"),
        (["template", "my.yaml"], UsageError, "give my.yaml alone"),
        (["absent.yaml"], UsageError, "absent.yaml"),
    ],
)
def test_unknown_factors(vary: list[str], error: type[EvalkitError], said: str) -> None:
    with pytest.raises(error) as raised:
        load_prompts(vary, INST)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"template": ["inst"]}, "did you mean 'templates'?"),
        ({"templates": ["isnt"]}, "unknown template 'isnt': did you mean 'inst'?"),
        ({"templates": ["absent.yaml"]}, "absent.yaml does not exist"),
        ({"templates": "inst"}, "'templates'"),
        ({"choice_orders": 0}, "'choice_orders'"),
        ({"choice_orders": 1}, "it varies nothing; give at least one of templates, choice_orders, system_prompts"),
        ({}, "it varies nothing"),
        ({"templates": ["inst"]}, "every prompt is template inst itself"),
        ({"system_prompts": ["x", "x"]}, "'system-2' is the same prompt as 'system-1'"),
        ({"templates": ["plain", "plain"]}, "two prompts are named 'plain'"),
    ],
)
def test_messages_about_a_file(content: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises((UsageError, TemplateError)) as raised:
        load_prompts([written(tmp_path, **content)], INST)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_template_without_system_prompt_cannot_vary_it() -> None:
    with pytest.raises(UsageError, match=r"template plain has no \{system\}"):
        load_prompts(["system_prompt"], load_template("plain"))
