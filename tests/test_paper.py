"""examples/paper: a file names the paper's models, benchmarks, tables and figures; a tiny version fills all of them."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from evalkit.attention.categories import load_tagger
from evalkit.attention.groups import GROUPS, MASS
from evalkit.cli import main
from evalkit.errors import EvalkitError
from evalkit.models.loading.locate import silent
from evalkit.models.zoo.named import named_model, read_models, write_random
from evalkit.models.zoo.shapes import shape_facts
from evalkit.studies.running import plan_runs
from evalkit.studies.study import Study
from evalkit.studies.study_file import read_study
from evalkit.tables.layout import layout_names, load_layout
from tests.documents import made_up
from tests.longcontext.longbench.made import record, write
from tests.tiny import VOCABULARY, tiny_checkpoint, tiny_tokenizer

ROOT = Path(__file__).parents[1]
PAPER = ROOT / "examples" / "paper"
COMMANDS = re.findall(r"`evalkit ((?:table|figure) \w.*?)`", (ROOT / "docs" / "paper.md").read_text("utf-8"))
"""Those of the page's table."""
QUOTED = {"tinyllama", "cosmo"}
"""Rows whose numbers the paper takes from other reports."""
FIGURES = {"bos", "categories", "entropy", "negative"}
"""Those of the paper, but for its drawing of the architectures; `rank` draws a table."""


@pytest.fixture
def study() -> Study:
    return read_study(PAPER / "study.yaml")


def models_in(study: Study, layout: str) -> set[str]:
    return {*study.tables[layout].rows.values()}


def test_the_papers_checkpoints(study: Study) -> None:
    """28 models, each needed by a table, are those of evalkit's names: 24 of 125M parameters, and 4 of 1.2B."""
    shapes = [shape_facts(named_model(name).config) for name in study.names]
    assert len(study.names) == len(study.checkpoints) == 28
    assert [name for name in study.names if models_in(study, "main_res") >= {name} and "1.2b" in name] == [
        f"llama-1.2b-{attention}" for attention in ("vanilla", "diff", "intg", "intg-all")
    ]
    assert sum("-125m-" in name for name in study.names) == 24
    assert all(shapes.count(shape) == 1 for shape in shapes)
    assert set(study.names) == set().union(*(models_in(study, name) for name in study.tables))


def test_every_row_that_the_paper_measured_has_a_checkpoint(study: Study) -> None:
    """Of a model of the row. Rows of a table and of its shorter form have the same ones."""
    assert set(study.tables) == set(layout_names())
    for name in layout_names():
        layout, rows = load_layout(name), study.tables[name].rows
        assert {*layout.assigned} - QUOTED == {*rows}, name
        for row, model in rows.items():
            assert model in layout.assigned[row], (name, row)
        shorter_of = study.tables.get(name.replace("_main", "_app"))
        assert shorter_of is None or shorter_of.rows == rows, name
    # What the captions and the text leave open is as the paper's numbers are (docs/measurements/paper_audit.md)
    rows = {name: study.tables[name].rows for name in ("backbone_abl_app", "sft_abl_app", "abl_top_app")}
    assert rows["backbone_abl_app"]["intg_all_125m"] == rows["abl_top_app"]["intg_s2_all"]
    assert rows["sft_abl_app"]["intg_s2_all"] == rows["abl_top_app"]["intg_s2_top50"]


def test_benchmarks_run_on_the_models_that_need_them(study: Study) -> None:
    on = {benchmark.name: {*study.names_on(benchmark)} for benchmark in study.benchmarks}
    drawn = {name for names in study.figures.values() for name in names}
    assert on == {
        "zeroshot8": {*study.names},
        "longbench": models_in(study, "app_long_contx"),
        "attention": models_in(study, "anly_rank_main") | drawn,
    }
    assert len(study.runs) == 28 + 3 + 9
    assert {*study.figures} >= FIGURES
    assert {*study.figures["bos"]} == {*study.figures["categories"]} == on["longbench"]
    assert {*study.figures["entropy"]} == {name for name in models_in(study, "anly_rank_main") if "125m" in name}


def test_the_page_has_every_table_and_figure() -> None:
    words = [command.split() for command in COMMANDS]
    assert sorted(name for kind, name, *_ in words if kind == "table") == layout_names()
    assert sorted(name for kind, name, *_ in words if kind == "figure") == sorted(FIGURES)


def test_the_trainings_are_of_the_studys_models(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "pretrain"))
    from recipe.settings import read_training_study

    _, recipes = read_training_study(PAPER / "training.yaml")
    assert [(name, recipe.model) for name, recipe in recipes.items()] == [(name, name) for name in study.names]
    for name, recipe in recipes.items():
        billions = 128 if "1.2b" in name else 28
        assert recipe.tokens == pytest.approx(billions * 10**9, rel=1e-3), name


def tiny_version(folder: Path, measures: list[str]) -> Path:
    """Write the study with options for tiny models, and its checkpoints: the paper's models with 4 narrow layers.

    `measures` are those of attention.
    """
    shapes: dict[str, Any] = {}
    for path in (ROOT / "configs" / "models").glob("*.yaml"):
        content = yaml.safe_load(path.read_text("utf-8"))
        # Rotary positions need an even number of channels in every signal
        narrow = {"hidden_size": 128} if content["backbone"] == "gpt_neox" else {"hidden_size": 64, "head_dim": 16}
        content["base"] |= {"vocab_size": VOCABULARY, "intermediate_size": 32, "num_hidden_layers": 4} | narrow
        content["base"]["initializer_range"] = 0.2
        (folder / path.name).write_text(yaml.safe_dump(content), "utf-8")
        shapes |= {model.name: model for model in read_models(folder / path.name)}
    content = yaml.safe_load((PAPER / "study.yaml").read_text("utf-8"))
    tokenizer = str(tiny_tokenizer(folder / "tokenizer"))
    for seed, name in enumerate(content["checkpoints"]):
        write_random(shapes[name], folder / "checkpoints" / name, seed=seed, tokenizer=tokenizer)
    made_up(folder / "documents", count=4)
    for task in load_layout("app_long_contx").tasks:
        write(folder / "documents" / f"{task}.jsonl", [record(task, number) for number in range(2)])
    options = {"device": "cpu", "dtype": "float32", "data_dir": "documents", "sample": 2}
    content["settings"] = options | {"allow_unofficial_data": True}
    content["benchmarks"]["attention"]["measures"] = measures
    (folder / "study.yaml").write_text(yaml.safe_dump(content), "utf-8")
    return folder / "study.yaml"


def cells(path: Path) -> dict[tuple[str, str], str]:
    """Return (row, column by its number) → text of a table, without the notes below it."""
    header, *lines = csv.reader(path.read_text("utf-8").splitlines())
    kept = [line for line in lines if line and line[0] != "note"]
    assert kept, path
    return {(line[0], str(place)): text for line in kept for place, text in enumerate(line[1 : len(header)])}


@pytest.mark.slow
def test_a_tiny_version_fills_every_table_and_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All cells that the paper fills, but for numbers quoted from other reports; found without the checkpoints."""

    def evalkit(*arguments: str) -> str:
        with pytest.raises(SystemExit) as left:
            main([*arguments])
        printed = capsys.readouterr()
        assert not left.value.code, printed.err
        return printed.err

    missing = set[str]()  # without spaCy's model
    try:
        load_tagger(silent)
    except EvalkitError as error:
        assert "pip cannot download" in str(error)
        missing = {"categories"}
    monkeypatch.chdir(tmp_path)
    given = str(tiny_version(tmp_path, [name for name in GROUPS if name != MASS or not missing]).relative_to(tmp_path))
    monkeypatch.setenv("CHECKPOINTS", "checkpoints")
    evalkit("study", "run", given)
    monkeypatch.delenv("CHECKPOINTS")
    evalkit("table", "--all", "--format", "csv", "-o", "published")
    assert "left out" not in evalkit("table", "--all", "--study", given, "--format", "csv", "-o", "tables")
    for name in layout_names():
        published, filled = (cells(tmp_path / folder / f"{name}.csv") for folder in ("published", "tables"))
        assert published.keys() == filled.keys(), name
        empty = {key for key, text in filled.items() if not text and published[key]}
        assert {row for row, _ in empty} <= QUOTED, (name, empty)
    for command in COMMANDS:
        if command.split()[1] not in missing:
            evalkit(*command.split(), "--study", given)
    evalkit("table", "--all", "--study", given, "--format", "latex", "-o", "tables")
    evalkit("figure", "--all", "--paper", "--study", given, "-o", "figures")
    drawn = {path.stem for path in (tmp_path / "figures").glob("*.pdf")}
    assert drawn >= (FIGURES | {"rank"}) - missing
    figures = read_study(tmp_path / given).figures
    for figure in figures.keys() - missing:
        rows = [*csv.DictReader((tmp_path / "figures" / f"{figure}.csv").read_text("utf-8").splitlines())]
        # The paper's rank is the share above the first model
        assert {row["run"] for row in rows} == {*figures[figure][figure == "rank" :]}, figure
    assert len(list((tmp_path / "tables").glob("*.tex"))) == 12


def test_a_checkpoint_of_another_attention_than_its_name_is_reported(tmp_path: Path) -> None:
    """As patched code saves an integral model; a checkpoint with its own name is not."""
    names = ("llama-125m-intg", "llama-125m-vanilla")
    for seed in range(len(names)):
        tiny_checkpoint(tmp_path / "checkpoints" / f"exp{seed}", window=1024, seed=seed)
    content = {"checkpoints": {name: f"checkpoints/exp{seed}" for seed, name in enumerate(names)},
               "benchmarks": {"needle": {"lengths": [300], "depths": [50], "repeats": 1}}}  # fmt: skip
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(content), "utf-8")
    said: list[str] = []
    plan_runs(read_study(tmp_path / "study.yaml"), said.append)
    assert [line.split(": ")[:2] for line in said if "models convert" in line] == [["warning", "llama-125m-intg"]]
