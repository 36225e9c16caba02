"""Study files: what they name, and what is rejected."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from evalkit.errors import UsageError
from evalkit.runs.folder import RESULTS
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


def test_checkpoints_that_were_evaluated_stand_for_those_that_are_gone(folder: Path) -> None:
    """Steps are those on disk and recorded, seeds on disk alone unless none is left; other studies do not count."""
    checkpoints = {"B": "b-*", "T": {"model": "t-*", "steps": "checkpoint-*"}, "A": {"model": "t-1", "steps": "*-20"}}
    study = study_of(folder, checkpoints)
    for number, run in enumerate(study.runs):
        save_record(study.output, run, study.output / f"run{number}", f"{number}")
        if run.checkpoint.label != "T seed 1 step 100":  # this one is not finished
            (study.output / f"run{number}").mkdir()
            (study.output / f"run{number}" / RESULTS).touch()
    whole = labels(study)
    for name in ("b-1", "t-1/checkpoint-20", "t-1/checkpoint-100", "t-2"):
        shutil.rmtree(folder / name)
    found = labels(read_study(study.path))
    assert found == [
        ("B seed 1", "b-2"),
        ("B seed 2", "b-10"),
        ("T step 20", "t-1/checkpoint-20"),
        ("A step 20", "t-1/checkpoint-20"),
    ]
    assert [checkpoint.is_gone for checkpoint in read_study(study.path).checkpoints] == [False, False, True, True]
    for name in ("b-2", "b-10", "t-1"):
        shutil.rmtree(folder / name)
    assert labels(read_study(study.path)) == [pair for pair in whole if pair[0] != "T seed 1 step 100"]
    with pytest.raises(UsageError, match="'B'"):
        study_of(folder, checkpoints, output="elsewhere")
    (folder / "moved").mkdir()
    with pytest.raises(UsageError, match="'B'"):
        study_of(folder / "moved", checkpoints, output="../runs")


def test_options_of_benchmarks(folder: Path) -> None:
    """They have the shared settings that they know, and the paths of files and folders beside the study file."""
    settings = {"limit": 5, "device": "cpu", "context": 2048, "repeats": 2, "tokenizer": "a", "data_dir": "documents"}
    benchmarks = {
        "plain": {"suite": "zeroshot8", "template": "plain", "limit": 7, "tokenizer": "b-1"},
        "needle": None,
        "texts": {"suite": "perplexity", "text": ["own.yaml", "documents", "nix.txt"]},
        "long": {"suite": "zeroshot8", "template": "own.yaml", "data_dir": "y", "context_config": "nix.yaml"},
    }
    checkpoints = {"A": {"model": "a", "context": 4096, "context_config": "context.yaml"}}
    study = study_of(folder, checkpoints, benchmarks, settings=settings)
    plain, needle, texts, long = (run.options for run in study.runs)
    here = {name: str(folder / name) for name in ("own.yaml", "documents", "b-1", "context.yaml", "a")}
    assert study.benchmarks[0].given["data_dir"] == "documents"  # the same on every machine
    assert (plain["limit"], plain["context"], plain["device"], plain["template"]) == (7, 4096, "cpu", "plain")
    assert (plain["tokenizer"], plain["data_dir"]) == (here["b-1"], here["documents"])
    assert plain["context_config"] == here["context.yaml"]
    assert dict(study.benchmarks[1].options) == {"repeats": 2, "suite": "needle"}
    assert (needle["tokenizer"], needle["suite"]) == (here["a"], "needle")
    assert texts["text"] == [here["own.yaml"], here["documents"], "nix.txt"]
    assert (long["template"], long["data_dir"]) == (here["own.yaml"], "y")
    assert long["context_config"] == "nix.yaml"
    assert study.benchmark("plain") is study.benchmarks[0]
    for name in (None, "plan"):
        with pytest.raises(UsageError, match=r"benchmark.* plain"):
            study.benchmark(name)


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
    ({"checkpoints": {}}, "'checkpoints'"),
    ({"checkpoints": {"A": {"model": "a", "stps": "x"}}}, "stps.*'steps'"),
    ({"checkpoints": {"A": "nix-*"}}, r"'A'.*'nix-\*'"),
    ({"checkpoints": {"A": "b-3.l*"}}, "'A'"),
    ({"checkpoints": {"A": {"model": "t-1", "steps": "check*-7"}}}, r"'A'.*'t-1'.*check\*-7"),
    ({"checkpoints": {"A": {"model": "./nix", "steps": "step*"}}}, "'A'.*nix"),
    ({"checkpoints": {"A": {"model": "org/x", "steps": ["main"]}}}, "'main' has no training step"),
    ({"checkpoints": {"A": {"model": "org/x", "steps": ["step1000", "step1k"]}}}, r"step1000, step1k"),
    ({"benchmarks": {"zeroshot9": {}}}, "suite 'zeroshot9'"),
    ({"benchmarks": {"x": {"suite": "zeroshot8", "lengths": [1]}}}, "'x'.*'lengths'"),
    ({"benchmarks": {"x": {"suite": 8}}}, "'x'.*'suite'.*8"),
    ({"tables": {"main_res": {"benchmark": "y"}}}, "table 'main_res'.*benchmark 'y'"),
    ({"tables": {"main_res": {"rows": {"r": "B"}}}}, "table 'main_res', row 'r'.*checkpoint 'B'"),
]


def test_what_is_wrong_is_named(folder: Path) -> None:
    for change, nouns in WRONG:
        path = changed(write_study(folder / "study.yaml", {"A": "a"}, {"needle": NEEDLE}, settings=PLAIN), **change)
        with pytest.raises(UsageError, match=f"{re.escape(str(path))}.*{nouns}") as raised:
            read_study(path)
        assert "\n" not in str(raised.value)
