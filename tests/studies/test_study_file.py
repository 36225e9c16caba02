"""Study files: what they name, and what is rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from evalkit.errors import UsageError
from evalkit.studies.study import StudyRun
from evalkit.studies.study_file import read_study
from tests.studies.tiny_studies import CHOICES, made_study


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folders with the names of checkpoints; only names matter here."""
    for name in (
        "a",
        "b-1",
        "b-2",
        "b-10",
        "t-1/checkpoint-20",
        "t-1/checkpoint-100",
        "t-2/checkpoint-20",
        "documents",
    ):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "b-3.log").touch()
    return tmp_path


def test_it_expands_seeds_and_steps_by_number(folder: Path) -> None:
    path = made_study(
        folder,
        {
            "A": "a",
            "B": "b-*",
            "T": {"model": "t-*", "steps": "checkpoint-*", "dtype": "bfloat16"},
            "hub": {"model": "org/name", "steps": ["step2000", "step1000"]},
            "two": ["a", "org/other"],
        },
    )
    study = read_study(path)
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
    assert study.checkpoints[0].model == str(folder / "a")
    assert study.checkpoints[-1].model == "org/other"
    assert study.names == ("A", "B", "T", "hub", "two")
    assert study.output == folder / "runs"
    assert len(study.runs) == len(study.checkpoints)


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
    assert study.runs[0].options["context"] == 4096
    assert study.runs[0].options["device"] == "cpu"
    assert study.benchmark("plain") is plain
    with pytest.raises(UsageError, match=r"has several benchmarks: give --benchmark plain \| needle"):
        study.benchmark(None)
    with pytest.raises(UsageError, match=r"unknown benchmark of study .* 'plan': did you mean 'plain'"):
        study.benchmark("plan")


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
    for same in ({"rule": "acc"}, {"rule": "ppl"}, {"device": "cuda"}, {"device_map": "auto"}, {"log_samples": True},
                 {"token_budget": 77}):  # fmt: skip
        assert keys(folder, **same) == keys(folder), same


def keys_of(place: Path, benchmarks: Any) -> set[str]:
    """Return the keys of a study of one checkpoint."""
    return {run.key for run in read_study(made_study(place, {"A": "a"}, benchmarks)).runs}


def test_the_device_is_in_the_id_of_generated_texts(folder: Path) -> None:
    for suite in ("needle", "lm_eval"):
        given = {"tasks": ["sciq"]} if suite == "lm_eval" else {}
        assert keys_of(folder, {suite: given | {"device": "cuda"}}) != keys_of(folder, {suite: given})
        assert keys_of(folder, {suite: given | {"token_budget": 9}}) == keys_of(folder, {suite: given})


def test_a_suite_whose_own_rule_reads_more_scores(folder: Path) -> None:
    """Its runs under another rule have other ids."""
    (folder / "my.yaml").write_text("groups: {Average: [piqa]}\ntemplate: plain\nrule: pmi\n")
    mine = {"suite": "my.yaml"}
    assert len({*keys_of(folder, {"x": mine}), *keys_of(folder, {"x": mine | {"rule": "acc"}})}) == 2


def test_paths_of_options_are_those_beside_the_file(folder: Path) -> None:
    for name in ("plain", "inst"):
        (folder / name).mkdir()  # which are no templates
    (folder / "context.yaml").touch()
    (folder / "own.yaml").touch()
    settings = {"device": "cpu", "tokenizer": "a", "data_dir": "documents"}
    of_a = {"model": "a", "context_config": "context.yaml"}
    benchmarks = {
        "plain": {"suite": "zeroshot8", "template": "plain", "tokenizer": "b-1"},
        "own": {"suite": "zeroshot8", "template": "own.yaml", "data_dir": "context.yaml"},
        "texts": {"suite": "perplexity", "text": ["own.yaml", "documents", "nix.txt"]},
        "long": {"suite": "zeroshot8", "template": "x" * 300, "data_dir": "y" * 5000, "context_config": "nix.yaml"},
    }
    study = read_study(made_study(folder, {"A": of_a}, benchmarks, settings=settings))
    plain, own, texts, long = (run.options for run in study.runs)
    assert texts["text"] == [str(folder / "own.yaml"), str(folder / "documents"), "nix.txt"]
    assert plain["template"] == "plain"
    assert plain["tokenizer"] == str(folder / "b-1")
    assert plain["data_dir"] == str(folder / "documents")
    assert plain["context_config"] == str(folder / "context.yaml")
    assert own["tokenizer"] == str(folder / "a")
    assert own["template"] == str(folder / "own.yaml")
    assert own["data_dir"] == "context.yaml"
    assert (long["template"], long["data_dir"], long["context_config"]) == ("x" * 300, "y" * 5000, "nix.yaml")


def test_the_users_folder(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(folder))
    (tmp_path / "elsewhere").mkdir()
    checkpoints = {"A": "~/a", "B": "~/b-*", "T": {"model": "~/t-1", "steps": "checkpoint-*"}}
    settings = {"data_dir": "~/documents"}
    study = read_study(made_study(tmp_path / "elsewhere", checkpoints, {"zeroshot8": {}}, settings=settings))
    assert [one.model for one in study.checkpoints] == [
        str(folder / name) for name in ("a", "b-1", "b-2", "b-10", "t-1/checkpoint-20", "t-1/checkpoint-100")
    ]
    assert study.checkpoints[0].given == "~/a"
    assert study.benchmarks[0].options["data_dir"] == str(folder / "documents")
    for model in ("~/nix", "./nix", "nix"):
        path = made_study(folder, {"T": {"model": model, "steps": "checkpoint-*"}})
        with pytest.raises(UsageError, match=rf"checkpoint 'T': folder {folder}/nix, .* does not exist$"):
            read_study(path)
    with pytest.raises(UsageError, match=r"checkpoint 'B': no folder matches '~/nix-\*'$"):
        read_study(made_study(folder, {"B": "~/nix-*"}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"checkpoint": {}}, "study .*: unknown key 'checkpoint': did you mean 'checkpoints'"),
        ({"settings": {"dtyp": "float32"}}, "'settings': unknown setting 'dtyp': did you mean 'dtype'"),
        ({"checkpoints": {}}, "'checkpoints' is "),
        ({"checkpoints": {"A": {"model": "a", "stps": "x"}}}, "unknown key .*stps.*did you mean 'steps'"),
        ({"checkpoints": {"A": "nix-*"}}, "checkpoint 'A': no folder matches 'nix-\\*'"),
        ({"checkpoints": {"A": "b-3.l*"}}, "checkpoint 'A': no folder matches"),
        (
            {"checkpoints": {"A": {"model": "t-1", "steps": "check*-7"}}},
            "checkpoint 'A', model 't-1': no folder matches",
        ),
        ({"checkpoints": {"A": {"model": "org/x", "steps": ["main"]}}}, "'main' has no training step; expected a name"),
        (
            {"checkpoints": {"A": {"model": "org/x", "steps": ["step1000", "step1k"]}}},
            "two of its steps are the same \\(step1000, step1k\\)",
        ),
        ({"benchmarks": {"zeroshot9": {}}}, "benchmark 'zeroshot9': unknown suite 'zeroshot9'"),
        ({"benchmarks": {"x": {"suite": "zeroshot8", "lengths": [1]}}}, "benchmark 'x': unknown setting 'lengths'"),
        ({"benchmarks": {"x": {"suite": 8}}}, "benchmark 'x': 'suite' is 8; expected a name or a YAML file"),
        ({"tables": {"main_res": {"benchmark": "y"}}}, "table 'main_res': unknown benchmark 'y'"),
        ({"tables": {"main_res": {"rows": {"r": "B"}}}}, "table 'main_res', row 'r': unknown checkpoint 'B'"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], message: str, folder: Path) -> None:
    path = made_study(folder, {"A": "a"})
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | change))
    with pytest.raises(UsageError, match=message) as raised:
        read_study(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_benchmarks_may_be_a_list(folder: Path) -> None:
    study = read_study(made_study(folder, {"A": "a"}, ["zeroshot8", "needle"]))
    assert [one.name for one in study.benchmarks] == ["zeroshot8", "needle"]
    assert isinstance(study.runs[0], StudyRun)
