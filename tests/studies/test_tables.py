"""Tables that a study fills: rows by name, key and shape, benchmarks by suite, and what is ambiguous."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from evalkit.errors import EvalkitError, TableError, UsageError
from evalkit.reporting.table import plain
from evalkit.runs.folder import Run
from evalkit.studies.results import read_results
from evalkit.studies.study import save_record
from evalkit.studies.study_file import read_study
from evalkit.studies.tables import FilledTable, study_layouts, study_table
from evalkit.tables.request import TableRequest
from tests.attention.made_ranks import made_ranks
from tests.sealed import read, reseal, write
from tests.studies.made import changed, recorded, write_study

CHECKPOINTS = {
    "base": "gone/base",
    "diff_125m": "gone/diff",
    "intg": ["gone/intg-seed1", "gone/intg-seed2"],
    "other": "gone/other",
    "cog": "gone/cog",
}
MODELS = {
    "base on zs": "llama-125m-vanilla",
    "diff_125m on zs": "llama-125m-vanilla-4h",
    "intg seed 1 on zs": "llama-125m-intg",
    "intg seed 2 on zs": "llama-125m-intg",
    "other on zs": None,
}
ZS = {"zs": {"suite": "zeroshot8"}}
ROWS = ["vanilla_125m", "diff_125m", "intg_125m"]


@pytest.fixture
def own(tmp_path: Path, finished: Run) -> Path:
    """A study of runs whose checkpoints are gone: vanilla and intg by shape, diff_125m by its name; cog has no run."""
    path = write_study(tmp_path / "study.yaml", CHECKPOINTS, ZS, settings={})
    recorded(path, finished, MODELS)
    return path


def filled(path: Path, name: str = "main_res", benchmark: str | None = None, **options: Any) -> FilledTable:
    table = study_table(read_results(path), TableRequest(name, "runs", **options), benchmark)
    assert table.table is not None, table
    return table


def unfilled(path: Path, name: str, benchmark: str | None = None) -> str:
    """Why a table has no run."""
    table = study_table(read_results(path), TableRequest(name, "runs"), benchmark)
    assert table.table is None
    return table.why


def with_tables(path: Path, **tables: Any) -> Path:
    return changed(path, tables=tables)


def rows(table: FilledTable) -> list[str]:
    """The keys of rows with numbers."""
    return [line.key for line in table.table.lines if any(cell.value != "-" for cell in line.cells)]


def values(table: FilledTable) -> dict[str, list[str]]:
    return {line.key: [cell.value for cell in line.cells] for line in table.table.lines}


def notes(table: FilledTable) -> str:
    return "\n".join(map(plain, table.table.notes))


def test_rows_by_key_and_by_shape(own: Path) -> None:
    """Those of the study file count most; a run of an early version, or of another architecture, has no shape."""
    table = filled(own)
    assert rows(table) == ROWS
    assert "Means over several runs: 'intg_125m' (2 runs)." in notes(table) and "Not finished" not in notes(table)
    assert "row 'diff_125m' is llama-125m-diff" in notes(table)  # its name says so, its model does not
    assert [line.partition(":")[0] for line in table.without_row] == ["other", "cog"]
    table = filled(with_tables(own, main_res={"rows": {"diff_125m": "other", "cog_125m": "cog", "intg_1b": "intg"}}))
    assert rows(table) == ["vanilla_125m", "diff_125m", "intg_1b"]
    assert "Not finished: cog." in notes(table) and "diff_125m: no row has this model" in table.without_row
    elsewhere = filled(with_tables(own, main_res={"rows": {"cog_125m": "other", "diff_125m": "base"}}))
    assert values(table)["diff_125m"] == values(elsewhere)["cog_125m"] != values(table)["vanilla_125m"]
    more = CHECKPOINTS | {"intg": [*CHECKPOINTS["intg"], "gone/intg-seed3"]}
    table = filled(changed(own, checkpoints=more, tables={}))
    assert "'intg_125m' (2 runs)" in notes(table) and "Not finished: intg seed 3." in notes(table)
    folder = next((own.parent / "runs").glob("run0-*"))
    manifest = read(folder, "manifest.json")
    del manifest["loaded"]["shape"]
    write(folder, "manifest.json", manifest)
    reseal(folder)
    assert any(line.startswith("base: ") and "shape" in line for line in filled(own).without_row)
    assert "vanilla_125m" in rows(filled(with_tables(own, main_res={"rows": {"vanilla_125m": "base"}})))


def test_models_and_rows_that_are_ambiguous(own: Path, finished: Run) -> None:
    recorded(own, finished, {"cog on zs": "llama-125m-vanilla"}, limit=None, dtype="float32")
    with pytest.raises(UsageError, match=r"'main_res'.*base and cog .*'vanilla_125m'"):
        filled(own)
    table = filled(with_tables(own, main_res={"rows": {"vanilla_125m": "base"}}))
    assert rows(table) == ROWS and "cog: row 'vanilla_125m' of this model is that of base" in table.without_row
    items = {"one": {"model": "llama-125m-intg"}, "two": {"model": "llama-125m-intg"}}
    layout = {"suite": "zeroshot8", "rows": [{"items": items}], "columns": [{"items": {"piqa": None}}]}
    (own.parent / "twice.yaml").write_text(yaml.safe_dump(layout), "utf-8")
    with pytest.raises(UsageError, match=r"'twice'.*intg has the model of rows one and two"):
        filled(own, str(own.parent / "twice.yaml"))


def test_benchmarks_by_suite(own: Path, finished: Run) -> None:
    more = {"plain": {"suite": "zeroshot8", "template": "plain"}, "text": {"suite": "zeroshot8_text"}, "needle": {}}
    changed(own, benchmarks=ZS | more)
    with pytest.raises(UsageError, match=r"benchmarks zs and plain.*--benchmark zs \| plain"):
        filled(own)
    assert rows(filled(own, benchmark="zs")) == ROWS
    assert rows(filled(with_tables(own, main_res={"benchmark": "zs"}))) == ROWS
    assert "no row has a finished run on plain" in unfilled(own, "main_res", "plain")
    assert "benchmark needle is of that suite" in unfilled(own, "main_res", "needle")
    recorded(own, finished, {"base on text": "llama-125m-vanilla"}, suite="zeroshot8_text")
    assert rows(filled(own, benchmark="text")) == ["vanilla_125m"]


def test_settings_of_a_layout_file_by_any_path(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = {
        "suite": "zeroshot8",
        "caption": "Theirs",
        "rows": [{"title": "A", "items": {"base": None, "none": None}}, {"title": "B", "items": {"empty": None}}],
        "columns": [{"items": {"piqa": None}}],
    }
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(layout), "utf-8")
    path = with_tables(own, **{"own.yaml": {"caption": "Ours", "drop_empty": True, "titles": {"A": "*C*"}}})
    (tmp_path / "elsewhere").mkdir()
    for folder, name in ((".", "own.yaml"), ("elsewhere", "own.yaml"), ("elsewhere", "../own.yaml")):
        monkeypatch.chdir(tmp_path / folder)
        table = filled(path, name).table
        assert plain(table.caption) == "Ours" and [line.key for line in table.lines] == ["base"]
        assert [plain(section.title) for section in table.sections] == ["C"]
    assert str(tmp_path / "own.yaml") in study_layouts(read_study(path))


def test_invalid_settings(own: Path, finished: Run) -> None:
    invalid: list[tuple[Any, type[EvalkitError], str]] = [
        ({"main_rse": {}}, UsageError, "'main_rse'.*'main_res'"),
        ({"main_res": {"rows": {"vanila_125m": "base"}}}, UsageError, "'main_res'.*'vanila_125m'"),
        ({"main_res": {"rows": {"intg_125m": "intg@5"}}}, UsageError, "'intg@5'"),
        ({"main_res": {"titles": {"Resoning": "x"}}}, UsageError, "main_res .*'Reasoning'"),
        ({"main_res": {"caption": "**x"}}, TableError, r"'main_res', caption: '\*\*'"),
    ]
    for tables, kind, nouns in invalid:
        with pytest.raises(kind, match=nouns):
            filled(with_tables(own, **tables))
    # Of other protocols
    recorded(with_tables(own), finished, {"cog on zs": "llama-125m-cog"}, limit=3)
    with pytest.raises(UsageError, match=r"'cog_125m'.*first 3 documents"):
        filled(own)
    assert "cog_125m" in rows(filled(own, mixed=True))


def test_runs_are_compared_with_their_baseline(tmp_path: Path) -> None:
    """Analyses of both sizes of diff, a baseline of the small ones only, and cog with two seeds."""
    names = {"base": "gone/base", "diff": "gone/diff", "large": "gone/large", "cog": ["gone/cog1", "gone/cog2"]}
    path = write_study(tmp_path / "study.yaml", names, {"maps": {"suite": "attention"}}, settings={})
    study, models = read_study(path), {"cog seed 1": "125m-cog", "base": "125m-vanilla", "cog seed 2": "125m-cog",
                                       "diff": "125m-diff", "large": "1.2b-diff"}  # fmt: skip
    runs = {run.label: run for run in study.runs}
    for number, (label, model) in enumerate(models.items()):
        last = 21 if "1.2b" in model else 19
        ranks = {last - layer: np.full((5, 3), float(number)) for layer in range(4)}
        made = made_ranks(study.output, f"llama-{model}", ranks, name=f"llama-{model}-{number}")
        save_record(study.output, runs[f"{label} on maps"], made.folder, made.manifest["id"])
    table = filled(path, "anly_rank_main")
    assert values(table)["cog"] == ["50%"] * 3 + ["-"] * 3 and values(table)["diff"] == ["100%"] * 3 + ["-"] * 3
    assert "No finished run of llama-1.2b-vanilla, the baseline of diff/1b." in notes(table)
    assert "Means over several runs: 'cog/125m' (2 runs)." in notes(table) and table.without_row == ()
    shown = with_tables(path, anly_rank_main={"rows": {"baseline/125m": "diff", "diff/125m": "base"}})
    assert values(filled(shown, "anly_rank_main"))["diff"][0] == "0%"
    with_tables(path)
    shutil.rmtree(next(study.output.glob("llama-125m-vanilla-*")))
    why = unfilled(path, "anly_rank_main")
    assert "no row has a finished run on maps" in why
    assert "llama-125m-vanilla, the baseline of cog/125m, diff/125m" in why
