"""Tables that a study fills: rows by name, key and shape, benchmarks by suite, and what is ambiguous."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from evalkit.errors import EvalkitError, TableError, UnknownNameError, UsageError
from evalkit.reporting.table import plain
from evalkit.runs.folder import Run
from evalkit.studies.results import read_results
from evalkit.studies.study import save_record
from evalkit.studies.study_file import read_study
from evalkit.studies.tables import FilledTable, UnfilledTable, study_layouts, study_table
from evalkit.tables.request import TableRequest
from tests.benchmarks.attention.made_ranks import made_ranks
from tests.sealed import read, reseal, write
from tests.studies.made import recorded, write_study

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


@pytest.fixture
def own(tmp_path: Path, finished: Run) -> Path:
    """A study of runs whose checkpoints are gone: vanilla and intg by shape, diff_125m by its name; cog has no run."""
    path = write_study(tmp_path / "study.yaml", settings={}, checkpoints=CHECKPOINTS, benchmarks=ZS)
    recorded(path, finished, MODELS)
    return path


def filled(path: Path, name: str = "main_res", benchmark: str | None = None, **options: Any) -> FilledTable:
    found = study_table(read_results(path), TableRequest(name, "runs", **options), benchmark)
    assert isinstance(found, FilledTable), found
    return found


def with_tables(path: Path, **tables: Any) -> Path:
    content = yaml.safe_load(path.read_text("utf-8")) | {"tables": tables}
    path.write_text(yaml.safe_dump(content, sort_keys=False), "utf-8")
    return path


def rows(found: FilledTable) -> list[str]:
    """Return the keys of rows with numbers."""
    return [line.key for line in found.table.lines if any(cell.value != "-" for cell in line.cells)]


def values(found: FilledTable) -> dict[str, list[str]]:
    return {line.key: [cell.value for cell in line.cells] for line in found.table.lines}


def notes(found: FilledTable) -> str:
    return "\n".join(map(plain, found.table.notes))


def test_rows_by_key_and_by_shape(own: Path) -> None:
    found = filled(own)
    assert rows(found) == ["vanilla_125m", "diff_125m", "intg_125m"]
    assert "Means over several runs: 'intg_125m' (2 runs)." in notes(found)
    assert "row 'diff_125m' is llama-125m-diff" in notes(found)  # its name says so, its model does not
    assert found.without_row == (
        "other: no row has this model",
        "cog: no run is finished, so the row of this model is unknown",
    )
    assert "Not finished" not in notes(found)


def test_rows_of_the_study_count_most(own: Path) -> None:
    path = with_tables(own, main_res={"rows": {"diff_125m": "other", "cog_125m": "cog", "intg_1b": "intg"}})
    found = filled(path)
    assert rows(found) == ["vanilla_125m", "diff_125m", "intg_1b"]
    assert "Not finished: cog." in notes(found)
    assert "diff_125m: no row has this model" in found.without_row
    elsewhere = filled(with_tables(own, main_res={"rows": {"cog_125m": "other", "diff_125m": "base"}}))
    content = yaml.safe_load(own.read_text("utf-8"))
    content["checkpoints"]["intg"].append("gone/intg-seed3")
    own.write_text(yaml.safe_dump(content | {"tables": {}}, sort_keys=False), "utf-8")
    assert "'intg_125m' (2 runs)" in notes(filled(own)) and "Not finished: intg seed 3." in notes(filled(own))
    assert values(found)["diff_125m"] == values(elsewhere)["cog_125m"] != values(found)["vanilla_125m"]


def test_two_models_of_one_shape_are_ambiguous(own: Path, finished: Run) -> None:
    recorded(own, finished, {"cog on zs": "llama-125m-vanilla"}, limit=None, dtype="float32")
    words = (
        r"table 'main_res': several checkpoints have the model of one row: 'vanilla_125m' \(base, cog\); "
        r"write which one you mean, as in 'tables: \{main_res: \{rows: \{vanilla_125m: base\}\}\}'"
    )
    with pytest.raises(UsageError, match=words):
        filled(own)
    found = filled(with_tables(own, main_res={"rows": {"vanilla_125m": "base"}}))
    assert rows(found) == ["vanilla_125m", "diff_125m", "intg_125m"]
    assert "cog: row 'vanilla_125m' of this model is that of base" in found.without_row


def test_a_model_of_two_rows_is_ambiguous(own: Path, tmp_path: Path) -> None:
    items = {"one": {"model": "llama-125m-intg"}, "two": {"model": "llama-125m-intg"}}
    layout = {"suite": "zeroshot8", "rows": [{"items": items}], "columns": [{"items": {"piqa": None}}]}
    (tmp_path / "twice.yaml").write_text(yaml.safe_dump(layout), "utf-8")
    with pytest.raises(UsageError, match=r"intg has the model of rows one and two; write 'tables: \{twice\.yaml: "):
        filled(own, str(tmp_path / "twice.yaml"))


def test_runs_without_a_shape(own: Path) -> None:
    """Of an early version, or of an architecture of which evalkit stores none."""
    folder = next((own.parent / "runs").glob("run0-*"))
    manifest = read(folder, "manifest.json")
    del manifest["loaded"]["shape"]
    write(folder, "manifest.json", manifest)
    reseal(folder)
    assert "base: the run does not store the model's shape; name its row under 'tables'" in filled(own).without_row
    assert "vanilla_125m" in rows(filled(with_tables(own, main_res={"rows": {"vanilla_125m": "base"}})))


def test_benchmarks_by_suite(own: Path, finished: Run) -> None:
    content = yaml.safe_load(own.read_text("utf-8"))
    more = {"plain": {"suite": "zeroshot8", "template": "plain"}, "text": {"suite": "zeroshot8_text"}, "needle": {}}
    own.write_text(yaml.safe_dump(content | {"benchmarks": ZS | more}, sort_keys=False), "utf-8")
    with pytest.raises(
        UsageError, match=r"benchmarks zs and plain both fill it; give --benchmark zs \| plain, or write"
    ):
        filled(own)
    assert rows(filled(own, benchmark="zs")) == ["vanilla_125m", "diff_125m", "intg_125m"]
    assert rows(filled(with_tables(own, main_res={"benchmark": "zs"}))) == ["vanilla_125m", "diff_125m", "intg_125m"]
    for name, why in (("plain", "no row has a finished run on plain"), ("needle", "benchmark needle is of that suite")):
        found = study_table(read_results(own), TableRequest("main_res", "runs"), name)
        assert isinstance(found, UnfilledTable)
        assert why in found.why
    with pytest.raises(UnknownNameError, match=r"unknown benchmark of study .* 'zz'"):
        filled(own, benchmark="zz")
    recorded(own, finished, {"base on text": "llama-125m-vanilla"}, suite="zeroshot8_text")
    assert rows(filled(own, benchmark="text")) == ["vanilla_125m"]


def test_tables_that_no_run_fills(own: Path) -> None:
    layout = {"rows": [{"items": {"base": None}}], "columns": [{"items": {"x": None}}]}
    (own.parent / "suiteless.yaml").write_text(yaml.safe_dump(layout), "utf-8")
    with_tables(own, **{"suiteless.yaml": {}})
    reasons = {}
    for name in study_layouts(read_study(own)):
        found = study_table(read_results(own), TableRequest(name, "runs"), None)
        if isinstance(found, UnfilledTable):
            reasons[found.name] = found.why
    assert "it shows suite longbench, and no benchmark of the study is of that suite" in reasons["app_long_contx"]
    assert "it shows suite attention, and no benchmark of the study is of that suite" in reasons["anly_rank_main"]
    assert "it has no suite" in reasons["suiteless"]
    assert "base, diff_125m, intg, other: no row has this model" in reasons["abl_top_main"]
    assert not {"main_res", "sig_abl_app", "vanilla_head_app", "backbone_abl_main"} & reasons.keys()


def test_settings_of_a_layout_file_by_any_path(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = {
        "suite": "zeroshot8",
        "caption": "Theirs",
        "rows": [{"title": "A", "items": {"base": None, "none": None}}, {"title": "B", "items": {"empty": None}}],
        "columns": [{"items": {"piqa": None}}],
    }
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(layout), "utf-8")
    path = with_tables(own, **{"own.yaml": {"caption": "Ours", "drop_empty": True, "titles": {"A": "*C*"}}})
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for folder, name in ((tmp_path, "own.yaml"), (elsewhere, "own.yaml"), (elsewhere, "../own.yaml")):
        monkeypatch.chdir(folder)
        table = filled(path, name).table
        assert plain(table.caption) == "Ours"
        assert [plain(section.title) for section in table.sections] == ["C"]
        assert [line.key for line in table.lines] == ["base"]
    assert str(tmp_path / "own.yaml") in study_layouts(read_study(path))


@pytest.mark.parametrize(
    ("tables", "kind", "words"),
    [
        ({"main_rse": {}}, UsageError, "'tables': unknown table 'main_rse': did you mean 'main_res'"),
        ({"main_res": {"rows": {"vanila_125m": "base"}}}, UsageError, "table 'main_res': unknown row 'vanila_125m'"),
        ({"main_res": {"rows": {"intg_125m": "itng"}}}, UsageError, "row 'intg_125m': unknown checkpoint 'itng'"),
        ({"main_res": {"rows": {"intg_125m": "intg@5"}}}, UsageError, "unknown step of study .* 'intg@5'"),
        ({"main_res": {"benchmark": "zz"}}, UsageError, "table 'main_res': unknown benchmark 'zz'"),
        ({"main_res": {"titles": {"Resoning": "x"}}}, UsageError, "unknown title of table main_res .*'Reasoning'"),
        ({"main_res": {"caption": "**x"}}, TableError, r"table 'main_res', caption: '\*\*' is not closed"),
        ({"main_res": {"drop-empty": True}}, UsageError, "unknown key .*drop-empty.*drop_empty"),
    ],
)
def test_invalid_settings(own: Path, tables: Any, kind: type[EvalkitError], words: str) -> None:
    with pytest.raises(kind, match=words):
        filled(with_tables(own, **tables))


def test_protocols_that_differ_are_rejected(own: Path, finished: Run) -> None:
    recorded(own, finished, {"cog on zs": "llama-125m-cog"}, limit=3)
    with pytest.raises(UsageError, match=r"row 'cog_125m': run .* was measured with the first 3 documents"):
        filled(own)
    assert "cog_125m" in rows(filled(own, mixed=True))


# Tables of models and their baselines

MAPS = {"maps": {"suite": "attention"}}


def with_ranks(path: Path, labels: dict[str, str]) -> None:
    """Give a study runs of `evalkit attention`: label → named model; ranks grow with the place in the list."""
    study = read_study(path)
    runs = {run.label: run for run in study.runs}
    for place, (label, model) in enumerate(labels.items()):
        last = 21 if "1.2b" in model else 19
        ranks = {last - one: np.full((5, 3), float(place)) for one in range(4)}
        made = made_ranks(study.output, model, ranks, name=f"{model}-{place}")
        save_record(study.output, runs[label], made.folder, made.manifest["id"])


@pytest.fixture
def ranked(tmp_path: Path) -> Path:
    """A study of attention: both sizes of diff, a baseline of the small ones only, and cog with two seeds."""
    names = {"base": "gone/base", "diff": "gone/diff", "large": "gone/large", "cog": ["gone/cog1", "gone/cog2"]}
    path = write_study(tmp_path / "study.yaml", settings={}, checkpoints=names, benchmarks=MAPS)
    models = {"cog seed 1": "125m-cog", "base": "125m-vanilla", "cog seed 2": "125m-cog", "diff": "125m-diff",
              "large": "1.2b-diff"}  # fmt: skip
    with_ranks(path, {f"{label} on maps": f"llama-{model}" for label, model in models.items()})
    return path


def test_runs_are_compared_with_their_baseline(ranked: Path) -> None:
    found = filled(ranked, "anly_rank_main")
    assert values(found)["cog"] == ["50%"] * 3 + ["-"] * 3
    assert values(found)["diff"] == ["100%"] * 3 + ["-"] * 3
    assert "No finished run of llama-1.2b-vanilla, the baseline of diff/1b." in notes(found)
    assert "Means over several runs: 'cog/125m' (2 runs)." in notes(found)
    assert found.without_row == ()
    shown = with_tables(ranked, anly_rank_main={"rows": {"baseline/125m": "diff", "diff/125m": "base"}})
    assert values(filled(shown, "anly_rank_main"))["diff"][0] == "0%"


def test_a_study_without_pairs(ranked: Path) -> None:
    shutil.rmtree(next((ranked.parent / "runs").glob("llama-125m-vanilla-*")))
    found = study_table(read_results(ranked), TableRequest("anly_rank_main", "runs"), None)
    assert isinstance(found, UnfilledTable)
    assert "no row has a finished run on maps" in found.why
    assert "No finished run of llama-125m-vanilla, the baseline of cog/125m, diff/125m" in found.why
    for name in ("diff", "large", "cog"):
        for folder in (ranked.parent / "runs").glob(f"llama-*-{name}-*"):
            shutil.rmtree(folder)
    found = study_table(read_results(ranked), TableRequest("anly_rank_main", "runs"), None)
    assert isinstance(found, UnfilledTable)
