"""Rows of tables and named models share one vocabulary: a run finds its row, and another model is marked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig

import evalkit.models.auto  # noqa: F401
from evalkit.errors import TableError, UsageError
from evalkit.models.zoo.named import models, named_model
from evalkit.models.zoo.shapes import parameters, shape_facts
from evalkit.reporting.table import plain
from evalkit.runs.folder import Run, load_run
from evalkit.tables.layout import layout_names as names
from evalkit.tables.layout import load_layout
from evalkit.tables.request import TableRequest, make
from evalkit.tables.row_models import find_rows, row_mismatch
from tests.comparison.made import make_longbench
from tests.models.small import small
from tests.sealed import reseal
from tests.tables.test_measured import altered, lines, mapped
from tests.tiny import tiny_checkpoint

ROWS = [(name, key, of_row) for name in names() for key, of_row in load_layout(name).assigned.items()]


def of_model(finished: Run, name: str) -> Run:
    """Return the finished run with a named model's sizes; its folder is not changed."""
    return Run(finished.folder, finished.manifest | {"loaded": finished.manifest["loaded"] | loaded(name)})


def loaded(name: str, **changes: object) -> dict[str, Any]:
    """Return a manifest's entry of a named model with changed sizes."""
    model = named_model(name)
    facts = shape_facts(model.config) or {}
    return {"parameters": parameters(model.shape).total, "architecture": "Some", "shape": facts | changes}


@pytest.fixture
def run_of(finished: Run, tmp_path: Path) -> Any:
    """Copy the finished run with a named model's sizes, in a folder with an unrelated name."""
    count = iter(range(100))

    def make_run(name: str, **changes: object) -> Run:
        manifest = {"loaded": finished.manifest["loaded"] | loaded(name, **changes)}
        return load_run(altered(finished, tmp_path / f"run{next(count)}", 0.0, manifest))

    return make_run


# Models of rows


def test_every_row_is_a_model_by_name_or_says_why_not() -> None:
    for name, key, of_row in ROWS:
        assert of_row or load_layout(name).models[key].no_model
        assert [named_model(model).name for model in of_row] == list(of_row)
    assert {key for _, key, of_row in ROWS if not of_row} == {"tinyllama", "cosmo"}


@pytest.mark.parametrize("name", names())
def test_no_model_is_two_rows(name: str) -> None:
    listed = [model for of_row in load_layout(name).assigned.values() for model in of_row]
    assert len(set(listed)) == len(listed)


def test_a_key_is_one_model_in_all_tables_but_where_the_paper_contradicts_itself() -> None:
    first: dict[str, tuple[str, ...]] = {}
    other = {key for _, key, of_row in ROWS if of_row and first.setdefault(key, of_row) != of_row}
    assert other == {"intg_all_125m", "intg_s2_all"}


def test_every_model_of_the_paper_has_a_row() -> None:
    """All except other readings of a row's model, which are assigned to it too."""
    left = {model.name for model in models()} - {model for *_, of_row in ROWS for model in of_row}
    assert left == {name for name in left if name.endswith(("-keep", "-full-head"))}


def test_the_documentation_lists_the_rows() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "tables.md").read_text(encoding="utf-8")
    tables: dict[tuple[str, str], list[str]] = {}
    for name, key, of_row in ROWS:
        shown = " or ".join(of_row) or f"none: {load_layout(name).models[key].no_model}"
        tables.setdefault((key, shown), []).append(name)
    listed = "".join(f"| {key} | {shown} | {', '.join(shown_in)} |\n" for (key, shown), shown_in in tables.items())
    assert listed in page


# Sizes in manifests


@pytest.mark.parametrize("model", models(), ids=lambda model: model.name)
def test_what_is_loaded_has_the_facts_of_the_named_model(model: Any) -> None:
    config = AutoConfig.for_model(**model.config).to_dict()
    assert json.loads(json.dumps(shape_facts(config))) == shape_facts(model.config)


def test_a_manifest_keeps_what_its_model_is(finished: Run) -> None:
    shape = finished.manifest["loaded"]["shape"]
    assert (shape["backbone"], shape["attention_variant"], shape["variant_layers"]) == ("llama", "vanilla", [])
    assert (shape["num_hidden_layers"], shape["num_attention_heads"], shape["num_key_value_heads"]) == (2, 4, 2)


def test_every_setting_of_an_attention_is_kept(tmp_path: Path) -> None:
    for attention in ("cog", "differential", "integral"):
        config = small(tmp_path, attention).config
        facts = shape_facts(config) or {}
        kept = {key: value for key, value in config.items() if key.startswith(("signal_", "diff_", "lambda_", "cog_"))}
        assert kept.items() <= facts.items()
        assert facts["variant_layers"] == config["variant_layers"]
    assert shape_facts({"model_type": "mistral"}) is None


# Runs find their rows


@pytest.mark.parametrize("name", [name for name in names() if load_layout(name).suite == "zeroshot8"])
def test_a_run_of_a_named_model_finds_its_row(name: str, finished: Run) -> None:
    layout = load_layout(name)
    for key, of_row in layout.assigned.items():
        for model in of_row:
            run = of_model(finished, model)
            assert find_rows(layout, [run]) == {key: [run]}
            assert row_mismatch(layout, key, run) == ""


def test_longbench_runs_find_theirs(tmp_path: Path) -> None:
    runs = []
    for name in ("vanilla", "intg"):
        folder = make_longbench(tmp_path, {"trec": [1.0, 0.0]}, model=f"org/{name}")
        content = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        content["loaded"] = loaded(f"llama-1.2b-{name}")
        (folder / "manifest.json").write_text(json.dumps(content), encoding="utf-8")
        reseal(folder)
        runs.append(str(folder))
    assert lines(make(TableRequest("app_long_contx", "runs", runs=tuple(runs))))["trec"] == ["50.00", "-", "50.00"]


def test_runs_alone_fill_a_table(run_of: Any) -> None:
    runs = [run_of("llama-125m-intg-2s"), run_of("llama-125m-intg"), run_of("llama-125m-intg-16h-2s")]
    table = make(TableRequest("sig_abl_main", "runs", runs=tuple(str(run.folder) for run in reversed(runs))))
    average = lines(table)["Average"]
    assert [value == "-" for value in average] == [False, True, False, False, True, True]


def test_seeds_share_a_row_and_steps_do_not(run_of: Any) -> None:
    layout = load_layout("main_res")
    seeds = [run_of("llama-125m-diff") for _ in range(3)]
    assert find_rows(layout, seeds) == {"diff_125m": seeds}
    table = make(TableRequest("main_res", "runs", runs=tuple(str(run.folder) for run in seeds)))
    assert any("Means over several runs: 'diff_125m' (3 runs)." in plain(note) for note in table.notes)
    steps = [
        Run(run.folder, run.manifest | {"model": f"training/checkpoint-{n}"}) for n, run in enumerate(seeds, start=5)
    ]
    with pytest.raises(UsageError, match=r"of row 'diff_125m' of table main_res and have different training steps"):
        find_rows(layout, steps)


def test_another_reading_finds_the_row_and_is_noted(finished: Run, run_of: Any) -> None:
    layout = load_layout("main_res")
    for name, row, note in (
        ("llama-125m-diff-all-keep", "diff_all_125m", "diff_heads is keep, in llama-125m-diff-all halve"),
        ("llama-1.2b-intg-full-head", "intg_1b", "signal_rope is full_head, in llama-1.2b-intg per_signal"),
    ):
        run = of_model(finished, name)
        assert find_rows(layout, [run]) == {row: [run]}
        assert row_mismatch(layout, row, run) == note
    pair = [run_of("llama-125m-intg"), run_of("llama-125m-intg-full-head")]
    with pytest.raises(UsageError, match=r"row 'intg_125m': the models of runs .* differ in signal_rope"):
        make(TableRequest("main_res", "runs", runs=tuple(str(run.folder) for run in pair)))


def test_runs_that_find_none(finished: Run, tmp_path: Path) -> None:
    layout = load_layout("main_res")
    with pytest.raises(UsageError) as caught:
        find_rows(layout, [finished])
    for word in (finished.folder.name, "4 heads with vanilla attention", "no row of table main_res", "FILE.yaml"):
        assert word in str(caught.value)
    foreign = load_run(altered(finished, tmp_path / "foreign", 0.0, {"loaded": {"parameters": 1, "shape": None}}))
    with pytest.raises(UsageError, match="its manifest lacks the model's sizes and attention"):
        find_rows(layout, [foreign])
    with pytest.raises(UsageError, match=r"of suite zeroshot8, but table app_long_contx shows suite longbench"):
        make(TableRequest("app_long_contx", "runs", runs=(str(finished.folder),)))
    twice = tmp_path / "twice.yaml"
    items = {key: {"model": "llama-125m-diff"} for key in ("10B", "20B")}
    twice.write_text(yaml.safe_dump({"suite": "zeroshot8", "rows": [{"items": items}],
                                     "columns": [{"items": {"piqa": "PIQA"}}]}))  # fmt: skip
    with pytest.raises(UsageError, match=r"is that of rows 10B and 20B of table twice"):
        find_rows(load_layout(str(twice)), [of_model(finished, "llama-125m-diff")])
    for name, words in (
        ("llama-125m-dif", "did you mean 'llama-125m-diff'"),
        ("no.yaml:x", r"no\.yaml cannot be read"),
    ):
        twice.write_text(yaml.safe_dump({"suite": "zeroshot8", "rows": [{"items": {"a": {"model": name}}}],
                                         "columns": [{"items": {"piqa": "PIQA"}}]}))  # fmt: skip
        with pytest.raises(TableError, match=rf"layout .*twice\.yaml, model of 'a': .*{words}"):
            find_rows(load_layout(str(twice)), [finished])


def test_a_layout_of_ones_own_names_models_of_a_file_beside_it(finished: Run, tmp_path: Path) -> None:
    """From a checkpoint's config to the row, nothing made up."""
    base = {**named_model("llama-125m-vanilla").config, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "tie_word_embeddings": False}  # fmt: skip
    del base["model_type"]
    own = {"tiny": {"attention_variant": "vanilla", "variant_layers": "none"}}
    (tmp_path / "zoo.yaml").write_text(yaml.safe_dump({"backbone": "llama", "base": base, "models": own}))
    layout = {"suite": "zeroshot8", "rows": [{"items": {"mine": {"model": "zoo.yaml:tiny"}, "yours": None}}],
              "columns": [{"items": {"piqa": "PIQA"}}]}  # fmt: skip
    (tmp_path / "table.yaml").write_text(yaml.safe_dump(layout))
    table = make(TableRequest(str(tmp_path / "table.yaml"), "runs", runs=(str(finished.folder),)))
    assert lines(table)["mine"] != ["-"] == lines(table)["yours"]


# Runs that contradict their row


def notes(run: Run | str, tmp_path: Path, row: str = "diff_1b") -> str:
    folder = run if isinstance(run, str) else str(run.folder)
    table = make(TableRequest("main_res", "runs", mapped(tmp_path, rows={row: folder})))
    return " ".join(map(plain, table.notes))


def test_a_run_of_another_model_is_marked(finished: Run, tmp_path: Path) -> None:
    said = notes(finished, tmp_path)
    count = finished.manifest["loaded"]["parameters"]
    assert (
        "row 'diff_1b' is llama-1.2b-diff, llama of 1,195,997,312 parameters and 32 heads with differential attention"
        in said
    )
    assert "in layers 11–21 of 22" in said
    assert f"the run's model is llama of {count:,} parameters and 4 heads with vanilla attention" in said
    label = make(TableRequest("main_res", "runs", mapped(tmp_path, rows={"diff_1b": str(finished.folder)})))
    assert label.sections[1].lines[1].label[-1].superscript


def test_what_else_differs_is_named(run_of: Any, tmp_path: Path) -> None:
    said = notes(run_of("llama-1.2b-diff", tie_word_embeddings=False), tmp_path)
    assert "(they differ in tie_word_embeddings)" in said
    assert "2 signals in layers 10–19 of 20" in notes(run_of("llama-125m-intg-2s"), tmp_path, "intg_125m")


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ({"architecture": "LlamaForCausalLM", "parameters": 292_160}, "LlamaForCausalLM of 292,160 parameters"),
        ({"architecture": "Other", "parameters": 1_195_997_312, "shape": None}, "is Other of 1,195,997,312"),
        ({"architecture": "Older", "parameters": 1_195_997_312}, ""),
        ({}, ""),
    ],
)
def test_manifests_that_keep_less(finished: Run, tmp_path: Path, kept: dict[str, Any], said: str) -> None:
    found = notes(altered(finished, tmp_path / "run", 0.0, {"loaded": kept}), tmp_path)
    assert said in found
    assert ("the run's model" in found) == bool(said)


def test_a_checkpoint_beside_the_right_row_says_nothing(run_of: Any, tmp_path: Path) -> None:
    assert "the run's model" not in notes(run_of("llama-1.2b-diff"), tmp_path)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen2"])
def test_a_stretched_checkpoint_is_the_same_model(tmp_path: Path, family: Any) -> None:
    from evalkit.models.context.extension import ContextSettings
    from evalkit.models.loading.load import load
    from evalkit.models.loading.locate import locate
    from evalkit.models.loading.spec import extension_of

    checkpoint = locate(str(tiny_checkpoint(tmp_path / "tiny", family)))
    extension = extension_of(checkpoint, ContextSettings(1024), lambda _: None)
    facts = [load(checkpoint, device="cpu", extension=one).facts() for one in (None, extension)]
    assert facts[0]["shape"] == facts[1]["shape"] is not None
    assert facts[0]["window"] < facts[1]["window"]
