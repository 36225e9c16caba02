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


def test_a_failed_run_sets_the_exit_code(folder: Path, evalkit: Command) -> None:
    path = folder / "study.yaml"
    for command in ("run", "status"):
        code, out, _ = evalkit("study", command, path)
        assert (code, "2 runs: 2 finished" in out) == (0, True)
    path = made_study(folder, {"A": "vanilla", "B": "intg-seed2"})
    for run in (folder / "runs").glob("vanilla-*"):
        (run / "results.json").write_text("{}")
    code, out, err = evalkit("study", "run", path)
    assert (code, "1 finished, 1 failed" in out) == (1, True)
    assert "A on zeroshot8" in err and "results.json" in err and "Traceback" not in err
    code, out, _ = evalkit("study", "status", path)
    assert (code, "1 failed" in out) == (1, True)


def test_problems_are_printed_on_a_line_each(folder: Path, evalkit: Command) -> None:
    path = made_study(folder, {f"gone{number}": f"./nix{number}" for number in range(40)})
    code, out, err = evalkit("study", "run", path)
    assert (code, out) == (1, "")
    lines = err.splitlines()[-41:]
    assert "40 problems" in lines[0]
    assert all(f"checkpoint gone{number}: " in line for number, line in enumerate(lines[1:]))
    assert evalkit("study", "run", folder / "nix.yaml")[0] == 2


def test_a_dry_run_computes_nothing(folder: Path, evalkit: Command) -> None:
    path = made_study(folder, {"A": "vanilla", "B": "intg-seed2"}, output="dry")
    code, out, _ = evalkit("study", "run", path, "--dry-run")
    assert (code, "2 runs, 2 of them not finished" in out) == (0, True)
    assert not (folder / "dry").exists()
    for option in (("--wait",), ("--workers", "2"), ("--ray", "auto")):
        code, _, err = evalkit("study", "run", path, "--dry-run", *option)
        assert (code, option[0] in err) == (2, True)


def test_a_study_whose_checkpoints_are_gone_is_still_finished(folder: Path, evalkit: Command) -> None:
    """Also where only patterns named them; seeds keep their numbers."""
    checkpoints = {"B": "intg-*", "C": {"model": "train-*", "steps": "checkpoint-*"}}
    path = made_study(folder, checkpoints)
    assert evalkit("study", "run", path)[0] == 0
    _, before, _ = evalkit("study", "status", path, "--format", "json")
    for name in ("intg-seed1", "intg-seed2", "train-seed1/checkpoint-20", "train-seed1/checkpoint-100",
                 "train-seed2/checkpoint-20"):  # fmt: skip
        shutil.rmtree(folder / name)
    code, after, _ = evalkit("study", "status", path, "--format", "json")
    assert (code, json.loads(after)["runs"]) == (0, json.loads(before)["runs"])
    assert evalkit("study", "run", path)[0] == 0
    # Of a checkpoint without a finished run nothing is known
    made_study(folder, checkpoints, {"zeroshot8": CHOICES, "needle": NEEDLE})
    code, out, _ = evalkit("study", "status", path, "--format", "json")
    totals = json.loads(out)["totals"]
    assert (code, totals["finished"], totals["missing"], totals["not planned"]) == (0, 6, 1, 5)


def several(folder: Path) -> list[Any]:
    """Return the options of `evalkit run`."""
    options = ["--data-dir", folder / "documents", "--allow-unofficial-data", "--output", folder / "adhoc"]
    return [*options, "--tasks", ",".join(CHOICES["tasks"]), "--dtype", "float32", "--device", "cpu"]


def test_run_on_several_checkpoints_has_a_line_for_each(folder: Path, evalkit: Command) -> None:
    pattern = folder / "train-seed1" / "checkpoint-*"
    code, out, err = evalkit("run", "--model", pattern, *several(folder))
    assert (code, "2 of 2 checkpoints are finished on zeroshot8" in out) == (0, True), err
    lines = [line.split() for line in out.splitlines() if "checkpoint-" in line]
    assert [line[0] for line in lines] == ["checkpoint-20", "checkpoint-100"]
    # The same numbers as single runs, which are finished now
    for line in lines:
        code, single, _ = evalkit("run", pattern.parent / line[0], *several(folder), "--format", "json")
        content = json.loads(single)
        values = [task["accuracy"] for task in content["tasks"]] + [content["averages"][-1]["accuracy"]]
        assert [float(cell) for cell in line[1:]] == pytest.approx([100 * value for value in values], abs=0.051)
    # As the shell expands the pattern: several arguments have the order in which they are given
    code, again, _ = evalkit("run", *sorted(pattern.parent.glob("*")), *several(folder))
    assert [line.split() for line in again.splitlines() if "checkpoint-" in line] == lines[::-1]
    code, out, _ = evalkit("run", pattern, *several(folder), "--format", "csv")
    assert out.splitlines()[0] == "model,state,message,run,folder,piqa,boolq,average"


def test_bad_lists_of_checkpoints(folder: Path, evalkit: Command) -> None:
    code, _, err = evalkit("run", folder / "nix-*", *several(folder))
    assert (code, "nix-*" in err) == (2, True)
    code, _, err = evalkit("run", folder / "vanilla", folder / "nix", folder / "nox", *several(folder))
    assert (code, "2 problems" in err) == (1, True)
    assert not (folder / "adhoc").exists()
    for option in (["--detail"], ["--show-prompts", "1"], ["--model", "demo"]):
        code, _, err = evalkit("run", folder / "vanilla", folder / "intg-seed1", *several(folder), *option)
        assert (code, option[0] in err) == (2, True)
