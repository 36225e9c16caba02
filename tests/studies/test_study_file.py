"""Study files: what they name, and what is rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evalkit.errors import UsageError
from evalkit.studies.study_file import StudyFolders, read_study
from tests.studies.tiny_studies import CHOICES, made_study

FOLDERS = ("a", "b-1", "b-2", "b-10", "t-1/checkpoint-20", "t-1/checkpoint-100", "t-2/checkpoint-20", "documents")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folders with the names of checkpoints; only names matter here."""
    for name in FOLDERS:
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "b-3.log").touch()
    return tmp_path


def test_seeds_and_steps_by_number(folder: Path) -> None:
    checkpoints = {
        "A": "a",
        "B": "b-*",
        "T": {"model": "t-*", "steps": "checkpoint-*", "dtype": "bfloat16"},
        "hub": {"model": "org/name", "steps": ["step2000", "step1000"]},
        "two": ["a", "org/other"],
    }
    study = read_study(made_study(folder, checkpoints, ["zeroshot8"]))
    found = [(one.label, one.given, one.options.get("revision"), one.options["dtype"]) for one in study.checkpoints]
    assert found == [
        ("A", "a", None, "float32"),
        ("B seed 1", "b-1", None, "float32"),
        ("B seed 2", "b-2", None, "float32"),
        ("B seed 3", "b-10", None, "float32"),
        ("T seed 1 step 20", "t-1/checkpoint-20", None, "bfloat16"),
        ("T seed 1 step 100", "t-1/checkpoint-100", None, "bfloat16"),
        ("T seed 2 step 20", "t-2/checkpoint-20", None, "bfloat16"),
        ("hub step 1000", "org/name@step1000", "step1000", "float32"),
        ("hub step 2000", "org/name@step2000", "step2000", "float32"),
        ("two seed 1", "a", None, "float32"),
        ("two seed 2", "org/other", None, "float32"),
    ]
    assert (study.checkpoints[0].model, study.checkpoints[-1].model) == (str(folder / "a"), "org/other")
    assert (study.names, study.output) == (("A", "B", "T", "hub", "two"), folder / "runs")
    assert len(study.runs) == len(study.checkpoints)


def names(found: list[tuple[str, bool]]) -> list[str]:
    return [name for name, _ in found]


def test_patterns(tmp_path: Path) -> None:
    for name in ("m/seed10", "m/seed2/x", "m/other", "a[1]", "a1"):
        (tmp_path / name).mkdir(parents=True)
    found = StudyFolders(tmp_path)
    for prefix in ("", "./", f"{tmp_path}/"):
        assert found.models("", f"{prefix}m/seed*") == [(f"{prefix}m/seed2", True), (f"{prefix}m/seed10", True)]
    # Names, also those with the characters of a pattern
    for name in ("org/name", "a[1]"):
        assert found.models("", name) == [(name, False)]


@pytest.mark.parametrize("root", ["", "/data/"])
def test_recorded_folders_stand_for_those_that_are_gone(tmp_path: Path, root: str) -> None:
    """Steps are those on disk and recorded, but seeds on disk alone."""
    recorded = ("d-seed10/checkpoint-5", "d-seed2/checkpoint-5", "d-seed2/checkpoint-50", "e")
    found = StudyFolders(tmp_path, frozenset([*(f"{root}t/{name}" for name in recorded), "org/hub@step5", "t-1/step1",
                                              "t-2/step9"]))  # fmt: skip
    seeds = [f"{root}t/d-seed2", f"{root}t/d-seed10"]
    assert names(found.models("", f"{root}t/d-seed*")) == seeds
    assert names(found.models("", f"{root}t/*/checkpoint-5")) == [f"{seed}/checkpoint-5" for seed in seeds]
    for pattern in (f"{root}t/x*", f"{root}d-seed*"):
        with pytest.raises(UsageError, match="no folder matches"):
            found.models("", pattern)
    assert found.is_folder(f"{root}t/d-seed2")
    assert not found.is_folder("org/hub") and not found.is_folder(f"{root}t/d-seed")
    assert names(found.steps("", f"{root}t/d-seed2", "checkpoint-*")) == ["checkpoint-5", "checkpoint-50"]
    assert names(found.steps("", f"{root}t/d-seed2/", "checkpoint-?")) == ["checkpoint-5"]
    for name in ("t-1/step9", "t-1/step30"):
        (tmp_path / name).mkdir(parents=True)
    assert names(found.models("", "t-*")) == ["t-1"]
    assert names(found.steps("", "t-1", "step*")) == ["step1", "step9", "step30"]
    assert found.is_path("t-1/step9") and not found.is_path("t-1/step1")


def test_benchmarks_have_the_shared_settings_that_they_know(folder: Path) -> None:
    settings = {"limit": 5, "device": "cpu", "context": 2048, "repeats": 2}
    benchmarks = {
        "plain": {"suite": "zeroshot8", "template": "plain", "limit": 7, "data_dir": "documents"},
        "needle": None,
    }
    study = read_study(made_study(folder, {"A": {"model": "a", "context": 4096}}, benchmarks, settings=settings))
    plain, needle = study.benchmarks
    assert dict(plain.given) == {"limit": 7, "suite": "zeroshot8", "template": "plain", "data_dir": "documents"}
    assert plain.options["data_dir"] == str(folder / "documents")
    assert dict(needle.options) == {"repeats": 2, "suite": "needle"}
    assert (study.runs[0].options["context"], study.runs[0].options["device"]) == (4096, "cpu")
    assert study.benchmark("plain") is plain
    for name in (None, "plan"):
        with pytest.raises(UsageError, match=r"benchmark.* plain"):
            study.benchmark(name)


def keys_of(place: Path, benchmarks: Any) -> set[str]:
    """Return the keys of a study of one checkpoint."""
    return {run.key for run in read_study(made_study(place, {"A": "a"}, benchmarks)).runs}


def test_a_runs_key_is_the_same_in_every_folder_and_differs_with_what_its_id_may_contain(
    folder: Path, tmp_path: Path
) -> None:
    def keys(place: Path, **more: Any) -> set[str]:
        return keys_of(place, {"zeroshot8": CHOICES | more})

    elsewhere = tmp_path / "elsewhere"
    for name in ("a", "documents"):
        (elsewhere / name).mkdir(parents=True)
    assert keys(folder) == keys(elsewhere)
    options: list[dict[str, Any]] = [
        {"limit": 3}, {"template": "plain"}, {"tokenizer": "documents"}, {"data_dir": "a"}, {"dtype": "bfloat16"},
        {"attention": "eager"}, {"context": 4096}, {"rule": "pmi"}, {"rule": "nix"}, {"allow_unofficial_data": False},
    ]  # fmt: skip
    assert len(keys(folder).union(*(keys(folder, **one) for one in options))) == 1 + len(options)
    for same in ({"rule": "acc"}, {"device": "cuda"}, {"device_map": "auto"}, {"log_samples": True},
                 {"token_budget": 77}):  # fmt: skip
        assert keys(folder, **same) == keys(folder), same
    # The device is in the id of generated texts
    for suite, given in (("needle", {}), ("lm_eval", {"tasks": ["sciq"]})):
        assert keys_of(folder, {suite: given | {"device": "cuda"}}) != keys_of(folder, {suite: given})
        assert keys_of(folder, {suite: given | {"token_budget": 9}}) == keys_of(folder, {suite: given})
    # Runs of a suite whose own rule reads more scores have other ids under another rule
    (folder / "my.yaml").write_text("groups: {Average: [piqa]}\ntemplate: plain\nrule: pmi\n")
    mine = {"suite": "my.yaml"}
    assert len(keys_of(folder, {"x": mine}) | keys_of(folder, {"x": mine | {"rule": "acc"}})) == 2


def test_paths_of_options_are_those_beside_the_file(folder: Path) -> None:
    for name in ("plain", "inst"):
        (folder / name).mkdir()  # which are no templates
    for name in ("context.yaml", "own.yaml"):
        (folder / name).touch()
    settings = {"device": "cpu", "tokenizer": "a", "data_dir": "documents"}
    benchmarks = {
        "plain": {"suite": "zeroshot8", "template": "plain", "tokenizer": "b-1"},
        "own": {"suite": "zeroshot8", "template": "own.yaml", "data_dir": "context.yaml"},
        "texts": {"suite": "perplexity", "text": ["own.yaml", "documents", "nix.txt"]},
        "long": {"suite": "zeroshot8", "template": "x" * 300, "data_dir": "y" * 5000, "context_config": "nix.yaml"},
    }
    checkpoints = {"A": {"model": "a", "context_config": "context.yaml"}}
    study = read_study(made_study(folder, checkpoints, benchmarks, settings=settings))
    plain, own, texts, long = (run.options for run in study.runs)
    here = {name: str(folder / name) for name in ("own.yaml", "documents", "b-1", "context.yaml", "a")}
    assert texts["text"] == [here["own.yaml"], here["documents"], "nix.txt"]
    assert (plain["template"], plain["tokenizer"], plain["data_dir"]) == ("plain", here["b-1"], here["documents"])
    assert plain["context_config"] == here["context.yaml"]
    assert (own["tokenizer"], own["template"], own["data_dir"]) == (here["a"], here["own.yaml"], "context.yaml")
    assert (long["template"], long["data_dir"], long["context_config"]) == ("x" * 300, "y" * 5000, "nix.yaml")


def test_the_users_folder(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(folder))
    (tmp_path / "elsewhere").mkdir()
    checkpoints = {"A": "~/a", "B": "~/b-*", "T": {"model": "~/t-1", "steps": "checkpoint-*"}}
    settings = {"data_dir": "~/documents"}
    study = read_study(made_study(tmp_path / "elsewhere", checkpoints, {"zeroshot8": {}}, settings=settings))
    expected = ("a", "b-1", "b-2", "b-10", "t-1/checkpoint-20", "t-1/checkpoint-100")
    assert [one.model for one in study.checkpoints] == [str(folder / name) for name in expected]
    assert study.checkpoints[0].given == "~/a"
    assert study.benchmarks[0].options["data_dir"] == str(folder / "documents")
    for model in ("~/nix", "./nix", "nix"):
        with pytest.raises(UsageError, match=rf"checkpoint 'T': folder {folder}/nix, .* does not exist$"):
            read_study(made_study(folder, {"T": {"model": model, "steps": "checkpoint-*"}}))


@pytest.mark.parametrize(
    ("change", "nouns"),
    [
        ({"checkpoint": {}}, "'checkpoint'.*'checkpoints'"),
        ({"settings": {"dtyp": "float32"}}, "'settings'.*'dtyp'.*'dtype'"),
        ({"checkpoints": {}}, "'checkpoints'"),
        ({"checkpoints": {"A": {"model": "a", "stps": "x"}}}, "stps.*'steps'"),
        ({"checkpoints": {"A": "nix-*"}}, r"'A'.*'nix-\*'"),
        ({"checkpoints": {"A": "b-3.l*"}}, "'A'"),
        ({"checkpoints": {"A": {"model": "t-1", "steps": "check*-7"}}}, r"'A', model 't-1'.*check\*-7"),
        ({"checkpoints": {"A": {"model": "org/x", "steps": ["main"]}}}, "'main' has no training step"),
        ({"checkpoints": {"A": {"model": "org/x", "steps": ["step1000", "step1k"]}}}, r"step1000, step1k"),
        ({"benchmarks": {"zeroshot9": {}}}, "suite 'zeroshot9'"),
        ({"benchmarks": {"x": {"suite": "zeroshot8", "lengths": [1]}}}, "'x'.*'lengths'"),
        ({"benchmarks": {"x": {"suite": 8}}}, "'x'.*'suite'.*8"),
        ({"tables": {"main_res": {"benchmark": "y"}}}, "table 'main_res'.*benchmark 'y'"),
        ({"tables": {"main_res": {"rows": {"r": "B"}}}}, "table 'main_res', row 'r'.*checkpoint 'B'"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], nouns: str, folder: Path) -> None:
    path = made_study(folder, **{"checkpoints": {"A": "a"}, **change})
    with pytest.raises(UsageError, match=nouns) as raised:
        read_study(path)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)
