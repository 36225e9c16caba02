"""Study files: what they name, and what is rejected."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from evalkit.errors import EvalkitError, UsageError
from evalkit.models.loading.locate import silent
from evalkit.runs.folder import RESULTS
from evalkit.studies.running import plan_runs
from evalkit.studies.study import Study, save_record
from evalkit.studies.study_file import read_study
from tests.studies.made import NEEDLE, changed, write_study

PLAIN = {"device": "cpu", "dtype": "float32"}
FOLDERS = ("a", "b-1", "b-2", "b-10", "t-1/checkpoint-20", "t-1/checkpoint-100", "t-2/checkpoint-20", "documents",
           "c[1]", "plain")  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folders with the names of checkpoints; only names matter here."""
    for name in FOLDERS:
        (tmp_path / name).mkdir(parents=True)
    for name in ("b-3.log", "context.yaml", "own.yaml"):
        (tmp_path / name).touch()
    return tmp_path


def study_of(folder: Path, checkpoints: Mapping[str, Any], benchmarks: Any = ("zeroshot8",), **more: Any) -> Study:
    """Write and read a study file."""
    given = list(benchmarks) if isinstance(benchmarks, tuple) else benchmarks
    return read_study(write_study(folder / "study.yaml", checkpoints, given, **{"settings": PLAIN, **more}))


def labels(study: Study) -> list[tuple[str, str]]:
    return [(checkpoint.label, checkpoint.given) for checkpoint in study.checkpoints]


def test_seeds_and_steps_by_number(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names with the characters of a pattern are names where such a folder exists; paths have any form."""
    monkeypatch.setenv("HOME", str(folder))
    checkpoints = {
        "A": "a",
        "B": "./b-*",
        "T": {"model": "t-*", "steps": "checkpoint-*", "dtype": "bfloat16"},
        "hub": {"model": "org/name", "steps": ["step2000", "step1000"]},
        "two": ["c[1]", "org/other"],
        "home": {"model": "~/t-1", "steps": "checkpoint-*"},
        "whole": f"{folder}/b-1*",
    }
    study = study_of(folder, checkpoints)
    assert labels(study) == [
        ("A", "a"),
        *((f"B seed {seed}", f"./b-{number}") for seed, number in ((1, 1), (2, 2), (3, 10))),
        ("T seed 1 step 20", "t-1/checkpoint-20"),
        ("T seed 1 step 100", "t-1/checkpoint-100"),
        ("T seed 2 step 20", "t-2/checkpoint-20"),
        ("hub step 1000", "org/name@step1000"),
        ("hub step 2000", "org/name@step2000"),
        ("two seed 1", "c[1]"),
        ("two seed 2", "org/other"),
        ("home step 20", "~/t-1/checkpoint-20"),
        ("home step 100", "~/t-1/checkpoint-100"),
        *((f"whole seed {seed}", f"{folder}/b-{number}") for seed, number in ((1, 1), (2, 10))),
    ]
    by_label = {checkpoint.label: checkpoint for checkpoint in study.checkpoints}
    assert by_label["A"].model == str(folder / "a") and by_label["two seed 2"].model == "org/other"
    assert by_label["home step 20"].model == str(folder / "t-1/checkpoint-20")
    assert by_label["hub step 1000"].options == PLAIN | {"revision": "step1000"}
    assert by_label["T seed 2 step 20"].options == PLAIN | {"dtype": "bfloat16"}
    assert (study.names, study.output) == (tuple(checkpoints), folder / "runs")
    assert len(study.runs) == len(study.checkpoints)


def test_environment_variables_in_paths(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not in the names, so runs are found where they are not set; from the current folder, if relative."""
    monkeypatch.chdir(folder.parent)
    checkpoints = {
        "A": "$WHERE/a",
        "T": {"model": "${WHERE}/t-1", "steps": "checkpoint-*"},
        "B": "$WHERE/b-1*",
        "C": "$WHERE/c[1]",
        "D": "t-$NUMBER/checkpoint-20",
    }
    found = {}
    monkeypatch.setenv("NUMBER", "2")
    for where in (str(folder), folder.name):
        monkeypatch.setenv("WHERE", where)
        study = study_of(folder, checkpoints, settings=PLAIN | {"tokenizer": "$WHERE/plain"})
        found[where] = [(checkpoint.label, checkpoint.given, checkpoint.model) for checkpoint in study.checkpoints]
        assert {checkpoint.options["tokenizer"] for checkpoint in study.checkpoints} == {str(folder / "plain")}
        keys = {run.label: run.key for run in study.runs}
    assert found[str(folder)] == found[folder.name] == [
        ("A", "$WHERE/a", str(folder / "a")),
        *((f"T step {step}", f"${{WHERE}}/t-1/checkpoint-{step}", str(folder / f"t-1/checkpoint-{step}"))
          for step in (20, 100)),
        *((f"B seed {seed}", str(folder / name), str(folder / name)) for seed, name in ((1, "b-1"), (2, "b-10"))),
        ("C", "$WHERE/c[1]", str(folder / "c[1]")),
        ("D", "t-$NUMBER/checkpoint-20", str(folder / "t-2/checkpoint-20")),
    ]  # fmt: skip
    del checkpoints["B"], checkpoints["C"], checkpoints["T"]
    monkeypatch.delenv("WHERE")
    study = study_of(folder, checkpoints, settings=PLAIN | {"tokenizer": "$WHERE/plain"})
    assert {run.label: run.key for run in study.runs}.items() <= keys.items()
    with pytest.raises(EvalkitError, match="environment variable WHERE is not set"):
        plan_runs(study, silent)


def test_checkpoints_of_a_benchmark(folder: Path) -> None:
    """Runs have the same keys, whatever others run on it."""
    checkpoints = {"A": "a", "B": "b-*", "P": "plain"}
    every = study_of(folder, checkpoints, {"zeroshot8": {}, "needle": {"repeats": 2}})
    study = study_of(folder, checkpoints, {"zeroshot8": {}, "needle": {"repeats": 2, "checkpoints": ["P", "A"]}})
    assert [run.label for run in study.runs if run.benchmark.name == "needle"] == ["A on needle", "P on needle"]
    assert [study.names_on(benchmark) for benchmark in study.benchmarks] == [("A", "B", "P"), ("A", "P")]
    assert {run.key for run in study.runs} < {run.key for run in every.runs} and len(study.runs) == 7


def test_checkpoints_that_were_evaluated_stand_for_those_that_are_gone(folder: Path) -> None:
    """Steps are those on disk and recorded, seeds on disk alone unless none is left; other studies do not count."""
    checkpoints = {"B": "b-*", "T": {"model": "t-*", "steps": "checkpoint-*"}}
    study = study_of(folder, checkpoints)
    for number, run in enumerate(study.runs):
        save_record(study.output, run, study.output / f"run{number}", f"{number}")
        (study.output / f"run{number}").mkdir(parents=True)
        (study.output / f"run{number}" / RESULTS).touch()
    whole = labels(study)
    for name in ("b-1", "t-1/checkpoint-20", "t-2"):
        shutil.rmtree(folder / name)
    found = read_study(study.path)
    steps = [("T step 20", "t-1/checkpoint-20"), ("T step 100", "t-1/checkpoint-100")]
    assert labels(found) == [("B seed 1", "b-2"), ("B seed 2", "b-10"), *steps]
    assert [checkpoint.is_gone for checkpoint in found.checkpoints] == [False, False, True, False]
    for name in ("b-2", "b-10", "t-1"):
        shutil.rmtree(folder / name)
    assert labels(read_study(study.path)) == whole
    assert all(checkpoint.is_gone for checkpoint in read_study(study.path).checkpoints)
    with pytest.raises(UsageError, match="'B'"):
        study_of(folder, checkpoints, output="elsewhere")


def test_options_of_benchmarks(folder: Path) -> None:
    """They have the shared settings, and the paths of files and folders beside the study file."""
    settings = {"limit": 5, "context": 2048, "tokenizer": "a"}
    benchmarks = {
        "plain": {"suite": "zeroshot8", "template": "own.yaml", "limit": 7, "tokenizer": "b-1",
                  "data_dir": "documents"},
        "longbench": None,
        "texts": {"suite": "perplexity", "text": ["own.yaml", "documents", "nix.txt"]},
    }  # fmt: skip
    checkpoints = {"A": {"model": "a", "context": 4096, "context_config": "context.yaml"}}
    study = study_of(folder, checkpoints, benchmarks, settings=settings)
    plain, longbench, texts = (run.options for run in study.runs)
    assert study.benchmarks[0].given["data_dir"] == "documents"  # the same on every machine
    assert (plain["limit"], plain["context"], longbench["limit"], longbench["suite"]) == (7, 4096, 5, "longbench")
    names = {"template": "own.yaml", "tokenizer": "b-1", "data_dir": "documents", "context_config": "context.yaml"}
    assert {name: plain[name] for name in names} == {name: str(folder / path) for name, path in names.items()}
    assert longbench["tokenizer"] == str(folder / "a")
    assert texts["text"] == [str(folder / "own.yaml"), str(folder / "documents"), "nix.txt"]
    with pytest.raises(UsageError, match=r"benchmark.* plain"):
        study.benchmark("plan")


@pytest.mark.parametrize("lacking", [{"limit": 5}, {"rule": "acc"}, {"control": "swap"}])
def test_a_setting_reaches_every_benchmark_or_is_an_error(folder: Path, lacking: dict[str, Any]) -> None:
    """Else an analysis of attention reads all of its 1,600 documents where the study's limit is 2."""
    [name] = lacking
    with pytest.raises(UsageError, match=rf"benchmark 'attention'.*'settings'.*'{name}'"):
        study_of(folder, {"A": "a"}, {"zeroshot8": None, "attention": None}, settings=lacking)


def test_a_runs_key_is_the_same_in_every_folder_and_differs_with_what_its_id_may_contain(folder: Path) -> None:
    def keys(place: Path, benchmark: str = "zeroshot8", **options: Any) -> set[str]:
        return {run.key for run in study_of(place, {"A": "a"}, {"x": {"suite": benchmark} | options}).runs}

    given = {"data_dir": "documents", "allow_unofficial_data": True, "tasks": ["piqa"], "token_budget": 128}
    elsewhere = folder / "elsewhere"
    for name in ("a", "documents"):
        (elsewhere / name).mkdir(parents=True)
    plain = keys(folder, **given)
    assert plain == keys(elsewhere, **given)
    options: list[dict[str, Any]] = [
        {"limit": 3}, {"template": "plain"}, {"tokenizer": "documents"}, {"data_dir": "a"}, {"dtype": "bfloat16"},
        {"attention": "eager"}, {"context": 4096}, {"rule": "pmi"}, {"rule": "nix"}, {"allow_unofficial_data": False},
    ]  # fmt: skip
    assert len(plain.union(*(keys(folder, **given | option) for option in options))) == 1 + len(options)
    for same in ({"rule": "acc"}, {"device": "cuda"}, {"device_map": "auto"}, {"log_samples": True},
                 {"token_budget": 77}):  # fmt: skip
        assert keys(folder, **given | same) == plain, same
    # The device is in the id of generated texts
    assert keys(folder, "needle", device="cuda") != keys(folder, "needle") == keys(folder, "needle", token_budget=9)
    # Runs of a suite whose own rule reads more scores have other ids under another rule
    (folder / "my.yaml").write_text("groups: {Average: [piqa]}\ntemplate: plain\nrule: pmi\n")
    assert keys(folder, "my.yaml") != keys(folder, "my.yaml", rule="acc")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"checkpoint": {}}, "'checkpoint'.*'checkpoints'"),
    ({"settings": {"dtyp": "float32"}}, "'settings'.*'dtyp'.*'dtype'"),
    ({"checkpoints": {"A": {"model": "a", "stps": "x"}}}, "stps.*'steps'"),
    ({"checkpoints": {"A": "nix-*"}}, r"'A'.*'nix-\*'"),
    ({"checkpoints": {"A": {"model": "t-1", "steps": "check*-7"}}}, r"'A'.*'t-1'.*check\*-7"),
    ({"checkpoints": {"A": {"model": "org/x", "steps": ["step1000", "step1k"]}}}, r"step1000, step1k"),
    ({"benchmarks": {"zeroshot9": {}}}, "suite 'zeroshot9'"),
    ({"benchmarks": {"x": {"suite": "zeroshot8", "lengths": [1]}}}, "'x'.*'lengths'"),
    ({"tables": {"main_res": {"rows": {"r": "B"}}}}, "table 'main_res', row 'r'.*checkpoint 'B'"),
    ({"benchmarks": {"needle": {"checkpoints": ["A", "B"]}}}, "benchmark 'needle'.*checkpoint 'B'"),
    ({"benchmarks": {"needle": {"checkpoints": []}}}, "benchmark 'needle': 'checkpoints'"),
    ({"figures": {"boss": ["A"]}}, "'figures'.*figure 'boss'.*bos"),
    ({"figures": {"bos": ["A", "B@5"]}}, "figure 'bos'.*checkpoint 'B'"),
]


def test_what_is_wrong_is_named(folder: Path) -> None:
    for change, nouns in WRONG:
        path = changed(write_study(folder / "study.yaml", {"A": "a"}, {"needle": NEEDLE}, settings=PLAIN), **change)
        with pytest.raises(UsageError, match=f"{re.escape(str(path))}.*{nouns}") as raised:
            read_study(path)
        assert "\n" not in str(raised.value)
