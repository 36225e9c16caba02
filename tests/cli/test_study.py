"""`evalkit study`, and `evalkit run` on several checkpoints: what they print, and their exit codes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evalkit.cli import main
from tests.studies.tiny_studies import CHOICES, NEEDLE, made_files, made_study

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints, documents, and a finished study of two of them. Copy it."""
    folder = made_files(tmp_path_factory.mktemp("study"))
    path = made_study(folder, {"A": "vanilla", "B": "intg-seed1"})
    with pytest.raises(SystemExit) as left:
        main(["study", "run", str(path)])
    assert left.value.code == 0
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of the folder."""
    return Path(shutil.copytree(made, tmp_path / "study"))


@pytest.fixture
def evalkit(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command; return its exit code, standard output and standard error."""

    def run(*given: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main(list(map(str, given)))
        return int(left.value.code or 0), *capsys.readouterr()

    return run


def test_a_finished_study_is_printed_in_every_format(folder: Path, evalkit: Command) -> None:
    path = folder / "study.yaml"
    for command in ("run", "status"):
        code, out, _ = evalkit("study", command, path)
        assert code == 0
        assert "2 runs: 2 finished" in out
        assert "B on zeroshot8" in out
        code, out, _ = evalkit("study", command, path, "--format", "json")
        content = json.loads(out)
        runs = content if command == "run" else content["runs"]
        assert [one["state"] for one in runs] == ["finished", "finished"]
        assert all(Path(one["folder"]).is_dir() for one in runs)
        code, out, _ = evalkit("study", command, path, "--format", "csv")
        assert (code, len(out.splitlines())) == (0, 3)
        code, out, _ = evalkit("study", command, path, "--format", "markdown")
        assert out.startswith("**2 runs: 2 finished**")


def test_a_failed_run_sets_the_exit_code(folder: Path, evalkit: Command) -> None:
    path = made_study(folder, {"A": "vanilla", "B": "intg-seed2", "C": "train-seed1/checkpoint-20"})
    for run in (folder / "runs").glob("vanilla-*"):
        (run / "results.json").write_text("{}")
    code, out, err = evalkit("study", "run", path)
    assert code == 1
    assert "3 runs: 2 finished, 1 failed" in out
    assert "A on zeroshot8 failed: " in err
    assert "results.json is damaged" in err
    assert "Traceback" not in err
    code, out, _ = evalkit("study", "status", path)
    assert code == 1
    assert "1 failed" in out


def test_problems_are_printed_on_a_line_each(folder: Path, evalkit: Command) -> None:
    path = made_study(folder, {f"gone{number}": f"./nix{number}" for number in range(40)})
    code, out, err = evalkit("study", "run", path)
    assert (code, out) == (1, "")
    assert f"evalkit: study {path} has 40 problems; nothing was computed:" in err.splitlines()
    lines = [line for line in err.splitlines() if line.endswith("file or folder not found")]
    assert len(lines) == 40
    assert lines[7].startswith("evalkit: checkpoint gone7: ")
    code, out, _ = evalkit("study", "status", path)
    assert (code, "40 not planned" in out) == (0, True)


@pytest.mark.parametrize("command", ["run", "status"])
def test_a_wrong_file_is_a_usage_error(command: str, folder: Path, evalkit: Command) -> None:
    assert evalkit("study", command, folder / "nix.yaml")[0] == 2
    path = made_study(folder, {"A": "vanilla"}, checkpoint={})
    code, _, err = evalkit("study", command, path)
    assert code == 2
    assert "unknown key 'checkpoint': did you mean 'checkpoints'" in err


def test_a_dry_run_computes_nothing(folder: Path, evalkit: Command) -> None:
    path = made_study(folder, {"A": "vanilla", "B": "intg-seed2"}, output="dry")
    code, out, _ = evalkit("study", "run", path, "--dry-run")
    assert code == 0
    assert "2 runs, 2 of them not finished, about 0:" in out
    assert not (folder / "dry").exists()
    code, _, err = evalkit("study", "run", path, "--dry-run", "--wait")
    assert (code, "leave out one of them" in err) == (2, True)
    for option in ("--workers", "2"), ("--ray", "auto"):
        code, _, err = evalkit("study", "run", path, "--dry-run", *option)
        assert code == 2
        assert err == f"evalkit: {option[0]}: a dry run computes nothing; leave out one of them\n"


def test_a_study_whose_checkpoints_are_gone_is_still_finished(folder: Path, evalkit: Command) -> None:
    """Also where only patterns named them; seeds keep their numbers."""
    checkpoints = {"B": "intg-*", "C": {"model": "train-*", "steps": "checkpoint-*"}}
    path = made_study(folder, checkpoints)
    assert evalkit("study", "run", path)[0] == 0
    _, before, _ = evalkit("study", "status", path, "--format", "json")
    steps = ("train-seed1/checkpoint-20", "train-seed1/checkpoint-100", "train-seed2/checkpoint-20")
    for name in ("intg-seed1", "intg-seed2", *steps):
        shutil.rmtree(folder / name)
    code, after, _ = evalkit("study", "status", path, "--format", "json")
    assert (code, json.loads(after)["runs"]) == (0, json.loads(before)["runs"])
    code, out, err = evalkit("study", "run", path)
    assert (code, "6 runs: 6 finished" in out) == (0, True), err
    # Of a checkpoint without a finished run nothing is known
    made_study(folder, checkpoints, {"zeroshot8": CHOICES, "needle": NEEDLE})
    code, out, _ = evalkit("study", "status", path, "--format", "json")
    content = json.loads(out)
    totals = content["totals"]
    assert (code, totals["finished"], totals["missing"], totals["not planned"]) == (0, 6, 1, 5)
    reasons = {one["reason"] for one in content["runs"] if one["state"] == "not planned"}
    assert reasons == {"its checkpoint was deleted before this run was finished"}


def several(folder: Path) -> list[Any]:
    """Return the options of `evalkit run`."""
    options = ["--data-dir", folder / "documents", "--allow-unofficial-data", "--output", folder / "adhoc"]
    return [*options, "--tasks", ",".join(CHOICES["tasks"]), "--dtype", "float32", "--device", "cpu"]


def test_run_on_several_checkpoints_has_a_line_for_each(folder: Path, evalkit: Command) -> None:
    pattern = folder / "train-seed1" / "checkpoint-*"
    code, out, err = evalkit("run", "--model", pattern, *several(folder))
    assert code == 0, err
    assert "2 of 2 checkpoints are finished on zeroshot8, inst prompts, rule ppl" in out
    lines = [line.split() for line in out.splitlines() if "checkpoint-" in line]
    assert [line[0] for line in lines] == ["checkpoint-20", "checkpoint-100"]
    assert "checkpoints are in " in out
    assert f"2 of 2: {folder / 'train-seed1' / 'checkpoint-100'}" in err
    # The same numbers as single runs, which are finished now
    for line in lines:
        code, single, _ = evalkit("run", pattern.parent / line[0], *several(folder), "--format", "json")
        content = json.loads(single)
        found = [task["accuracy"] for task in content["tasks"]] + [content["averages"][-1]["accuracy"]]
        assert [float(cell) for cell in line[1:]] == pytest.approx([100 * value for value in found], abs=0.051)
    # As the shell expands the pattern: several arguments have the order in which they are given
    expanded = sorted(pattern.parent.glob("*"))
    code, again, _ = evalkit("run", *expanded, *several(folder))
    assert code == 0
    assert [line.split() for line in again.splitlines() if "checkpoint-" in line] == lines[::-1]
    assert [path.name for path in expanded] == ["checkpoint-100", "checkpoint-20"]
    code, out, _ = evalkit("run", pattern, *several(folder), "--format", "json", "--rule", "acc_norm")
    assert [len(one["tasks"]) for one in json.loads(out)] == [2, 2]
    code, out, _ = evalkit("run", pattern, *several(folder), "--format", "csv")
    assert out.splitlines()[0] == "model,state,message,run,folder,piqa,boolq,average"


def test_one_match_is_a_single_run(folder: Path, evalkit: Command) -> None:
    code, out, _ = evalkit("run", "--model", folder / "van*", *several(folder))
    assert code == 0
    assert "The same scores under every rule" in out


def test_bad_lists_of_checkpoints(folder: Path, evalkit: Command) -> None:
    code, _, err = evalkit("run", folder / "nix-*", *several(folder))
    assert (code, "nix-*: no folder and no .gguf file matches" in err) == (2, True)
    code, _, err = evalkit("run", folder / "vanilla", folder / "nix", folder / "nox", *several(folder))
    assert code == 1
    assert "evalkit: 2 problems; nothing was computed:" in err
    assert not (folder / "adhoc").exists()
    for option in (["--detail"], ["--show-prompts", "1"]):
        code, _, err = evalkit("run", folder / "intg-*", *several(folder), *option)
        assert (code, f"{option[0]}: is for one checkpoint" in err) == (2, True)
    code, _, err = evalkit("run", folder / "vanilla", folder / "intg-seed1", "--model", "demo", *several(folder))
    assert (code, "--model demo" in err) == (2, True)
