"""Rows of tables and named models share one vocabulary: a run finds its row, and another model is marked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

import evalkit.models.auto  # noqa: F401
from evalkit.errors import UsageError
from evalkit.models.zoo.named import models, named_model
from evalkit.models.zoo.shapes import shape_facts
from evalkit.reporting.table import plain
from evalkit.runs.folder import Run
from evalkit.tables.layout import layout_names, load_layout
from evalkit.tables.request import TableRequest, make
from evalkit.tables.rows import map_runs, row_mismatch
from tests.tables.runs import altered, loaded

ROWS = [(name, key, of_row) for name in layout_names() for key, of_row in load_layout(name).assigned.items()]
PIQA = [{"items": {"piqa": "PIQA"}}]
MAIN = load_layout("main_res")


def of_model(finished: Run, name: str, **changes: object) -> Run:
    """The finished run with a named model's sizes; its folder is not changed."""
    return Run(finished.folder, finished.manifest | {"loaded": finished.manifest["loaded"] | loaded(name, **changes)})


def test_rows_and_the_papers_models_name_each_other() -> None:
    for name in layout_names():
        layout = load_layout(name)
        listed = [model for of_row in layout.assigned.values() for model in of_row]
        assert len(set(listed)) == len(listed)  # no model is two rows
        for key, of_row in layout.assigned.items():
            assert of_row or layout.model_items[key].no_model
            assert [named_model(model).name for model in of_row] == list(of_row)
    assert {key for _, key, of_row in ROWS if not of_row} == {"tinyllama", "cosmo"}
    first: dict[str, tuple[str, ...]] = {}
    other = {key for _, key, of_row in ROWS if of_row and first.setdefault(key, of_row) != of_row}
    assert other == {"intg_all_125m", "intg_s2_all"}  # where the paper contradicts itself
    left = {model.name for model in models()} - {model for *_, of_row in ROWS for model in of_row}
    assert all(name.endswith(("-keep", "-full-head")) for name in left)  # other readings of a row's model


def test_the_documentation_lists_the_rows() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "tables.md").read_text(encoding="utf-8")
    tables: dict[tuple[str, str], list[str]] = {}
    for name, key, of_row in ROWS:
        shown = " or ".join(of_row) or f"none: {load_layout(name).model_items[key].no_model}"
        tables.setdefault((key, shown), []).append(name)
    listed = "".join(f"| {key} | {shown} | {', '.join(shown_in)} |\n" for (key, shown), shown_in in tables.items())
    assert listed in page


def test_a_run_of_a_named_model_finds_its_row(finished: Run) -> None:
    for name, key, of_row in ROWS:
        layout = load_layout(name)
        specification = finished.manifest["specification"] | {"suite": layout.suite}
        for model in of_row if layout.suite else ():
            run = Run(finished.folder, of_model(finished, model).manifest | {"specification": specification})
            assert map_runs(layout, [run]).rows == {key: [run]}
            assert row_mismatch(layout, key, run) == ""
    for model in models():  # what transformers loads has the facts of the named model
        config = AutoConfig.for_model(**model.config).to_dict()
        assert json.loads(json.dumps(shape_facts(config))) == shape_facts(model.config), model.name
    assert shape_facts({"model_type": "mistral"}) is None


def test_seeds_share_a_row_and_steps_and_readings_do_not(finished: Run, tmp_path: Path) -> None:
    def table(*names: str) -> list[str]:
        copies = [
            altered(finished, tmp_path / f"{name}{n}", 0.0, {"loaded": finished.manifest["loaded"] | loaded(name)})
            for n, name in enumerate(names)
        ]
        return list(map(plain, make(TableRequest("main_res", "runs", runs=tuple(copies))).notes))

    assert "Means over several runs: 'diff_125m' (3 runs)." in table(*["llama-125m-diff"] * 3)
    with pytest.raises(UsageError, match=r"row 'intg_125m'.* signal_rope"):
        table("llama-125m-intg", "llama-125m-intg-full-head")
    run = of_model(finished, "llama-125m-diff")
    steps = [Run(run.folder, run.manifest | {"model": f"training/checkpoint-{n}"}) for n in (5, 6)]
    with pytest.raises(UsageError, match="'diff_125m' of table main_res and have different training steps"):
        map_runs(MAIN, steps)
    for name, row, note in (
        ("llama-125m-diff-all-keep", "diff_all_125m", "diff_heads is keep, in llama-125m-diff-all halve"),
        ("llama-1.2b-intg-full-head", "intg_1b", "signal_rope is full_head, in llama-1.2b-intg per_signal"),
    ):
        run = of_model(finished, name)
        assert map_runs(MAIN, [run]).rows == {row: [run]}
        assert row_mismatch(MAIN, row, run) == note


def test_a_run_of_another_model_is_marked(finished: Run) -> None:
    def note(run: Run, row: str = "diff_1b") -> str:
        return row_mismatch(MAIN, row, run)

    count = finished.manifest["loaded"]["parameters"]
    for words in ("llama-1.2b-diff", "1,195,997,312 parameters", "layers 11–21 of 22", f"{count:,}", "vanilla"):
        assert words in note(finished)
    assert "tie_word_embeddings" in note(of_model(finished, "llama-1.2b-diff", tie_word_embeddings=False))
    assert "2 signals in layers 10–19 of 20" in note(of_model(finished, "llama-125m-intg-2s"), "intg_125m")
    for kept, words in (
        ({"architecture": "LlamaForCausalLM", "parameters": 292_160}, "LlamaForCausalLM of 292,160 parameters"),
        ({"architecture": "Other", "parameters": 1_195_997_312, "shape": None}, "is Other of 1,195,997,312"),
    ):
        assert words in note(Run(finished.folder, finished.manifest | {"loaded": kept}))
    assert note(Run(finished.folder, finished.manifest | {"loaded": {}})) == ""
