"""Rows of tables and named models share one vocabulary: a run finds its row, and another model is marked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

import evalkit.models.auto  # noqa: F401
from evalkit.errors import TableError, UsageError
from evalkit.models.zoo.named import models, named_model
from evalkit.models.zoo.shapes import shape_facts
from evalkit.reporting.table import Table, plain
from evalkit.runs.folder import Run, load_run
from evalkit.tables.layout import layout_names, load_layout
from evalkit.tables.request import TableRequest, make
from evalkit.tables.rows import map_runs, row_mismatch
from tests.comparison.made import make_longbench
from tests.sealed import reseal
from tests.tables.runs import altered, lines, loaded, mapped, written

ROWS = [(name, key, of_row) for name in layout_names() for key, of_row in load_layout(name).assigned.items()]
PIQA = [{"items": {"piqa": "PIQA"}}]


def of_model(finished: Run, name: str) -> Run:
    """The finished run with a named model's sizes; its folder is not changed."""
    return Run(finished.folder, finished.manifest | {"loaded": finished.manifest["loaded"] | loaded(name)})


@pytest.fixture
def run_of(finished: Run, tmp_path: Path) -> Any:
    """Copy the finished run with a named model's sizes, in a folder with an unrelated name."""
    count = iter(range(100))

    def make_run(name: str, **changes: object) -> Run:
        manifest = {"loaded": finished.manifest["loaded"] | loaded(name, **changes)}
        return load_run(altered(finished, tmp_path / f"run{next(count)}", 0.0, manifest))

    return make_run


def of_runs(name: str, *runs: Run) -> Table:
    return make(TableRequest(name, "runs", runs=tuple(str(run.folder) for run in runs)))


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


def test_what_is_loaded_has_the_facts_of_the_named_model(finished: Run) -> None:
    for model in models():
        config = AutoConfig.for_model(**model.config).to_dict()
        assert json.loads(json.dumps(shape_facts(config))) == shape_facts(model.config), model.name
    shape = finished.manifest["loaded"]["shape"]
    assert (shape["backbone"], shape["attention_variant"], shape["variant_layers"]) == ("llama", "vanilla", [])
    assert shape_facts({"model_type": "mistral"}) is None


def test_a_run_of_a_named_model_finds_its_row(finished: Run) -> None:
    for name, key, of_row in ROWS:
        layout = load_layout(name)
        for model in of_row if layout.suite == "zeroshot8" else ():
            run = of_model(finished, model)
            assert map_runs(layout, [run]).rows == {key: [run]}
            assert row_mismatch(layout, key, run) == ""


def test_runs_alone_fill_a_table(run_of: Any, tmp_path: Path) -> None:
    runs = [run_of("llama-125m-intg-16h-2s"), run_of("llama-125m-intg"), run_of("llama-125m-intg-2s")]
    average = lines(of_runs("sig_abl_main", *runs))["Average"]
    assert [value == "-" for value in average] == [False, True, False, False, True, True]
    longbench = []
    for name in ("vanilla", "intg"):
        folder = make_longbench(tmp_path, {"trec": [1.0, 0.0]}, model=f"org/{name}")
        content = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        content["loaded"] = loaded(f"llama-1.2b-{name}")
        (folder / "manifest.json").write_text(json.dumps(content), encoding="utf-8")
        reseal(folder)
        longbench.append(load_run(folder))
    assert lines(of_runs("app_long_contx", *longbench))["trec"] == ["50.00", "-", "50.00"]


def test_seeds_share_a_row_and_steps_do_not(run_of: Any) -> None:
    seeds = [run_of("llama-125m-diff") for _ in range(3)]
    notes = map(plain, of_runs("main_res", *seeds).notes)
    assert "Means over several runs: 'diff_125m' (3 runs)." in notes
    steps = [
        Run(run.folder, run.manifest | {"model": f"training/checkpoint-{n}"}) for n, run in enumerate(seeds, start=5)
    ]
    with pytest.raises(UsageError, match=r"'diff_125m' of table main_res and have different training steps"):
        map_runs(load_layout("main_res"), steps)


def test_another_reading_finds_the_row_and_is_noted(finished: Run, run_of: Any) -> None:
    layout = load_layout("main_res")
    for name, row, note in (
        ("llama-125m-diff-all-keep", "diff_all_125m", "diff_heads is keep, in llama-125m-diff-all halve"),
        ("llama-1.2b-intg-full-head", "intg_1b", "signal_rope is full_head, in llama-1.2b-intg per_signal"),
    ):
        run = of_model(finished, name)
        assert map_runs(layout, [run]).rows == {row: [run]}
        assert row_mismatch(layout, row, run) == note
    with pytest.raises(UsageError, match=r"row 'intg_125m': the models of runs .* differ in signal_rope"):
        of_runs("main_res", run_of("llama-125m-intg"), run_of("llama-125m-intg-full-head"))


def test_runs_that_find_none(finished: Run, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{finished.folder.name}.*4 heads with vanilla attention.*table main_res"):
        map_runs(load_layout("main_res"), [finished])
    foreign = Run(finished.folder, finished.manifest | {"loaded": {"parameters": 1, "shape": None}})
    with pytest.raises(UsageError, match="its manifest lacks the model's sizes and attention"):
        map_runs(load_layout("main_res"), [foreign])
    with pytest.raises(UsageError, match=r"of suite zeroshot8, but table app_long_contx shows suite longbench"):
        of_runs("app_long_contx", finished)
    path = tmp_path / "own.yaml"
    items: dict[str, Any] = {key: {"model": "llama-125m-diff"} for key in ("10B", "20B")}
    layout = load_layout(written(path, suite="zeroshot8", rows=[{"items": items}], columns=PIQA))
    with pytest.raises(UsageError, match="rows 10B and 20B of table own"):
        map_runs(layout, [of_model(finished, "llama-125m-diff")])
    for name, words in (("llama-125m-dif", "'llama-125m-diff'"), ("no.yaml:x", r"no\.yaml")):
        items = {"a": {"model": name}}
        layout = load_layout(written(path, suite="zeroshot8", rows=[{"items": items}], columns=PIQA))
        with pytest.raises(TableError, match=rf"layout .*own\.yaml, model of 'a': .*{words}"):
            map_runs(layout, [finished])


def test_a_layout_of_ones_own_names_models_of_a_file_beside_it(finished: Run, tmp_path: Path) -> None:
    """From a checkpoint's config to the row, nothing made up."""
    base = {**named_model("llama-125m-vanilla").config, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "tie_word_embeddings": False}  # fmt: skip
    del base["model_type"]
    tiny = {"tiny": {"attention_variant": "vanilla", "variant_layers": "none"}}
    written(tmp_path / "zoo.yaml", backbone="llama", base=base, models=tiny)
    items = {"mine": {"model": "zoo.yaml:tiny"}, "yours": None}
    layout = written(tmp_path / "table.yaml", suite="zeroshot8", rows=[{"items": items}], columns=PIQA)
    table = of_runs(layout, finished)
    assert lines(table)["mine"] != ["-"] == lines(table)["yours"]


def notes(run: Run | str, folder: Path, row: str = "diff_1b") -> str:
    path = run if isinstance(run, str) else str(run.folder)
    return " ".join(map(plain, make(TableRequest("main_res", "runs", mapped(folder, rows={row: path}))).notes))


def test_a_run_of_another_model_is_marked(finished: Run, run_of: Any, tmp_path: Path) -> None:
    note, count = notes(finished, tmp_path), finished.manifest["loaded"]["parameters"]
    assert "row 'diff_1b' is llama-1.2b-diff, llama of 1,195,997,312 parameters and 32 heads with differential" in note
    assert "in layers 11–21 of 22" in note
    assert f"the run's model is llama of {count:,} parameters and 4 heads with vanilla attention" in note
    assert "(they differ in tie_word_embeddings)" in notes(
        run_of("llama-1.2b-diff", tie_word_embeddings=False), tmp_path
    )
    assert "2 signals in layers 10–19 of 20" in notes(run_of("llama-125m-intg-2s"), tmp_path, "intg_125m")
    assert "the run's model" not in notes(run_of("llama-1.2b-diff"), tmp_path)


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        ({"architecture": "LlamaForCausalLM", "parameters": 292_160}, "LlamaForCausalLM of 292,160 parameters"),
        ({"architecture": "Other", "parameters": 1_195_997_312, "shape": None}, "is Other of 1,195,997,312"),
        ({"architecture": "Older", "parameters": 1_195_997_312}, ""),
        ({}, ""),
    ],
)
def test_manifests_that_keep_less(finished: Run, tmp_path: Path, kept: dict[str, Any], words: str) -> None:
    note = notes(altered(finished, tmp_path / "run", 0.0, {"loaded": kept}), tmp_path)
    assert words in note
    assert ("the run's model" in note) == bool(words)
