"""Names of runs: folder names that distinguish checkpoints, and the lookup by each command."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evalkit.benchmarks.request import provenance
from evalkit.benchmarks.run import planned
from evalkit.benchmarks.run_listing import list_found, runs_report
from evalkit.comparison.sides import names
from evalkit.errors import RunError, UnknownNameError, UsageError
from evalkit.models.loading.locate import Checkpoint, locate, silent
from evalkit.models.loading.spec import ModelSpec
from evalkit.runs.finding import find_run, list_runs, model_name, scan
from evalkit.runs.folder import MANIFEST, RESULTS, load_run
from tests.cli.test_root import Command, _no_settings, complains, evalkit
from tests.comparison.conftest import Make, make
from tests.printed import printed
from tests.sealed import read, reseal

__all__ = ["_no_settings", "evalkit", "make"]

LONG = "x" * 300


def placed(folder: Path, path: Path | str | None) -> Path:
    """A run whose checkpoint lay there."""
    manifest = read(folder, MANIFEST) | {"path": None if path is None else str(path)}
    (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    reseal(folder)
    return folder


# Folder names


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("a/checkpoint-1000", "a-checkpoint-1000"),
        ("run 7/step_20k", "run 7-step_20k"),
        ("a/latest", "a-latest"),
        ("a/checkpoints/checkpoint-1000/hf", "a-checkpoints-checkpoint-1000-hf"),
        ("a/epoch=3-step=1000", "a-epoch=3-step=1000"),
        ("a/1000", "a-1000"),
        ("a/llama-125m", "llama-125m"),
        ("a/pythia-step1000", "pythia-step1000"),
        ("a/b/model.gguf", "b-model"),
    ],
)
def test_a_name_that_only_counts_has_the_folder_before_it(tmp_path: Path, path: str, name: str) -> None:
    folder = tmp_path / path
    is_gguf = folder.suffix == ".gguf"
    checkpoint = Checkpoint(path, "gguf", folder.parent, folder) if is_gguf else Checkpoint(path, "folder", folder)
    assert model_name(checkpoint) == name


def test_hub_names_stand_alone(tmp_path: Path) -> None:
    assert model_name(Checkpoint("org/model@step1000", "hub", tmp_path / "snapshots" / "latest")) == "model@step1000"
    assert model_name(Checkpoint("/", "folder", Path("/"))) == ""


def test_checkpoints_and_dtypes_have_folders_that_tell_them_apart(
    checkpoint: Path, documents: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"data_dir": documents, "allow_unofficial_data": True, "tasks": "piqa"}
    for parent in "ab":
        shutil.copytree(checkpoint, tmp_path / parent / "checkpoint-1000")
    names = [
        planned(tmp_path / parent / "checkpoint-1000", options | {"dtype": dtype}, silent).folder.name
        for parent in "ab"
        for dtype in ("float32", "bfloat16")
    ]
    assert [re.sub("[0-9a-f]{12}$", "", name) for name in names] == [
        "a-checkpoint-1000-zeroshot8-inst-float32-",
        "a-checkpoint-1000-zeroshot8-inst-bfloat16-",
        "b-checkpoint-1000-zeroshot8-inst-float32-",
        "b-checkpoint-1000-zeroshot8-inst-bfloat16-",
    ]


# Finding


def test_a_run_is_found_by_whatever_names_it_alone(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "checkpoint-1000").mkdir(parents=True)
    run = placed(make("a/checkpoint-1000"), tmp_path / "a" / "checkpoint-1000")
    other = placed(make("b/checkpoint-1000", seed=2), tmp_path / "b" / "checkpoint-1000")
    hub = make("org/name", seed=3)
    root, identity = run.parent, load_run(run).manifest["id"]
    for given in (
        str(run), run.name, run.name[:-3], identity, identity[:5], "a/checkpoint-1000", "a/checkpoint-1000/",
        "./a/checkpoint-1000", str(tmp_path / "a" / ".." / "a" / "checkpoint-1000"),
    ):  # fmt: skip
        assert find_run(given, root).folder == run, given
    assert find_run("b/checkpoint-1000", root).folder == other
    assert find_run("org/name", root).folder == hub
    assert find_run("na", root).folder == hub


def test_revisions_of_a_hub_model_are_distinguished(make: Make, checkpoint: Path) -> None:
    """By what was asked for, in whichever way, and by the commit that it stood for."""
    hub = replace(locate(str(checkpoint)), kind="hub", revision="0a1b2c")
    asked = [ModelSpec("org/name", revision="step1000"), ModelSpec("org/name@step2000"), ModelSpec("org/name")]
    about = [provenance(model, hub) for model in asked]
    assert [one["model"] for one in about] == ["org/name@step1000", "org/name@step2000", "org/name"]
    runs = [
        make(one["model"], seed=seed, manifest={"revision": f"{seed}a1b"})
        for seed, one in enumerate(about[:2], start=3)
    ]
    root = runs[0].parent
    for run, step, commit in zip(runs, (1000, 2000), ("3a1b", "4a1b"), strict=True):
        for given in (f"org/name@step{step}", f"org/name@{commit}"):
            assert find_run(given, root).folder == run
        for text in (f"step{step}", commit):
            assert [listed.folder for listed in list_found(root, text=text)] == [str(run)]
        assert f"org/name@step{step}" in printed(runs_report(list_found(root), root))
    assert names([load_run(run) for run in runs]) == ["org/name@step1000", "org/name@step2000"]
    with pytest.raises(UsageError, match="'org/name' matches 2 runs"):
        find_run("org/name", root)


def test_what_names_several_lists_them(make: Make) -> None:
    runs = [make("org/model", dtype=dtype) for dtype in ("float32", "bfloat16")]
    for given in ("org/model", "model-", "m"):
        with pytest.raises(UsageError, match=rf"'{given}' matches 2 runs in .*: model-.*; name one") as caught:
            find_run(given, runs[0].parent)
        assert all(run.name in str(caught.value) for run in runs)
    for run in runs:
        assert find_run(run.name, run.parent).folder == run


def test_what_names_no_run(make: Make, tmp_path: Path) -> None:
    root = make("org/model").parent
    with pytest.raises(UnknownNameError, match=r"unknown run 'modle': no known name is similar\. Known: model-"):
        find_run("modle", root)
    with pytest.raises(UnknownNameError, match="none in "):
        find_run("model", tmp_path / "elsewhere")
    for empty in ("", " "):
        with pytest.raises(UsageError, match="a run's name is empty"):
            find_run(empty, root)
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(RunError, match=r"is neither a run folder \(it has no manifest.json\) nor the checkpoint"):
        find_run(str(tmp_path / "checkpoint"), root)
    for long in (LONG, f"a/{LONG}", "~nobody/x"):
        with pytest.raises(UnknownNameError, match="unknown run"):
            find_run(long, root)
    with pytest.raises(RunError, match="cannot be read: File name too long"):
        find_run("x", tmp_path / LONG)


def test_folders_that_are_no_paths() -> None:
    for given, words in ((5, "is 5; it must be text"), ("a\0b", "holds a NUL"), ("", "is empty")):
        with pytest.raises(UsageError, match=f"^run folder .*{words}"):
            load_run(given)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=f"^folder of runs .*{words}"):
            list_runs(given)  # type: ignore[arg-type]


def test_a_run_that_cannot_be_read(make: Make) -> None:
    begun, damaged = make("org/begun"), make("org/damaged", seed=2)
    (begun / RESULTS).unlink()
    (damaged / MANIFEST).write_text("{", encoding="utf-8")
    with pytest.raises(RunError, match="is not finished"):
        find_run("org/begun", begun.parent)
    with pytest.raises(RunError, match=r"manifest.json is damaged"):
        find_run("dama", begun.parent)
    assert find_run(make("org/sound", seed=3).name[:4], begun.parent).complete


def test_folders_without_runs_are_not_runs(tmp_path: Path, make: Make) -> None:
    run = make("org/model")
    (run.parent / "notes").mkdir()
    (run.parent / "file").write_text("")
    (run.parent / "torn").mkdir()
    (run.parent / "torn" / "journal.jsonl").write_text("")
    assert [one.folder.name for one in scan(run.parent)] == [run.name, "torn"]


# Every command


@pytest.fixture
def named(own_run: Path) -> Callable[[str], str]:
    """What a finished run may be called."""
    identity = load_run(own_run).manifest["id"]
    return {"id": identity[:7], "name": own_run.name[:-2], "folder": str(own_run)}.__getitem__


@pytest.mark.parametrize("how", ["id", "name", "folder"])
def test_every_command_finds_a_run(
    evalkit: Command, own_run: Path, named: Callable[[str], str], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, root = named(how), own_run.parent
    shutil.copytree(own_run, root / "zz-copy")
    manifest = read(root / "zz-copy", MANIFEST)
    manifest["specification"]["limit"] = 3
    manifest["specification"]["checkpoint"]["weights"] = "other"
    (root / "zz-copy" / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    reseal(root / "zz-copy")
    assert evalkit("rescore", given, "-o", root).out.splitlines()[-1] == str(own_run)
    assert f"({own_run})" in evalkit("compare", given, "zz", "-o", root).out
    monkeypatch.setenv("EVALKIT_OUTPUT", str(root))
    assert evalkit("rescore", given).out.splitlines()[-1] == str(own_run)
    assert evalkit("integrity", given).code == 0
    assert evalkit("export", given, "--to", "hub").out.startswith(str(own_run / "hub"))
    Path("runs.yaml").write_text(f"rows: {{vanilla_125m: '{given}'}}\n", encoding="utf-8")
    assert evalkit("table", "main_res", "--source", "runs", "--runs", "runs.yaml", "--format", "csv").code == 0
    complains(evalkit("longbench", "rescore", given), 1, "is not a LongBench run")


def test_every_command_says_which_it_may_be(evalkit: Command, own_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(own_run, own_run.parent / f"{own_run.name}-copy")
    monkeypatch.setenv("EVALKIT_OUTPUT", str(own_run.parent))
    Path("runs.yaml").write_text("rows: {vanilla_125m: tiny}\n", encoding="utf-8")
    for command in (
        ["rescore", "tiny"],
        ["compare", "tiny", "tiny"],
        ["integrity", "tiny"],
        ["export", "tiny", "--to", "hub"],
        ["longbench", "rescore", "tiny"],
        ["table", "main_res", "--source", "runs", "--runs", "runs.yaml"],
    ):
        complains(evalkit(*command), 2, "'tiny' matches 2 runs in", own_run.name, f"{own_run.name}-copy")


def test_names_that_no_file_system_takes(evalkit: Command, checkpoint: Path, documents: Path) -> None:
    options = ["--model", checkpoint, "--data-dir", documents, "--allow-unofficial-data", "--tasks", "piqa"]
    complains(evalkit("run", *options, "--output", LONG), 1, "File name too long", "choose another --output")
    complains(evalkit("run", *options, "--output", f"a/{LONG}/b"), 1, "File name too long", "choose another --output")
    complains(evalkit("ls", "runs", "--output", LONG), 1, "File name too long")
    complains(evalkit("rescore", LONG), 2, "unknown run")
    complains(evalkit("compare", LONG, LONG), 2, "unknown run")
    complains(evalkit("longbench", "--model", checkpoint, "--plot", f"{LONG}.pdf"), 2, "--plot", "File name too long")
    complains(evalkit("longbench", "--model", checkpoint, "--plot", f"{'x' * 250}.pdf"), 2, "File name too long")
