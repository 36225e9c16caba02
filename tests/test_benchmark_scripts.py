"""Scripts of benchmarks/: the comparison with earlier runs, and parts under time limits. Not their measurements."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import architectures, gpu, track
from benchmarks.track import Change, Measured

SCRIPTS = Path(__file__).parents[1] / "benchmarks"


def run(machine: str = "a processor", **ratios: float) -> Measured:
    return Measured("2026-01-01T00:00:00+00:00", "0.1.0", machine, ratios)


def test_a_ratio_is_compared_with_the_median_of_the_same_kind_of_machine() -> None:
    history = [run(help=1.0), run(help=2.0), run(help=9.0), run("another", help=100.0), run(journal=5.0)]
    [change] = track.changes(run(help=3.0), history)
    assert (change.median, change.runs, change.moved, change.verdict) == (2.0, 3, 0.5, "worse")
    [new] = track.changes(run(help=3.0), [run("another", help=1.0)])
    assert (new, new.verdict) == (Change("help", 3.0, None, 0), "")
    verdicts = {("help", 1.09): "", ("help", 1.12): "worse", ("help", 0.88): "better", ("lm_eval", 1.12): "better",
                ("lm_eval", 0.88): "worse", ("lm_eval", 0.95): ""}  # fmt: skip
    assert {case: Change(*case, 1.0, 3).verdict for case in verdicts} == verdicts


@pytest.mark.parametrize(("options", "code"), [([], 0), (["--strict"], 1)])
def test_only_strict_fails_and_the_latest_runs_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], code: int
) -> None:
    path = tmp_path / "track.json"
    track.write(path, [run(help=1.0)] * 25)
    monkeypatch.setattr(track, "machine", lambda: "a processor")
    monkeypatch.setattr(track, "measured", lambda name: {name: 2.0})
    monkeypatch.setattr(sys, "argv", ["track.py", "--only", "help", "--file", str(path), *options])
    assert track.main() == code
    assert [kept.ratios for kept in track.read(path)] == [{"help": 1.0}] * (track.KEPT - 1) + [{"help": 2.0}]


def test_a_part_keeps_its_output_however_it_ends(tmp_path: Path) -> None:
    for code, state in (
        ("print('a'); raise SystemExit('no GPU')", "failed (no GPU)"),
        ("import time; print('a', flush=True); time.sleep(60)", "out of time (1 s)"),
    ):
        part = gpu.measured("part", [sys.executable, "-S", "-c", code], 1, tmp_path / "log")
        assert (part.state, part.output) == (state, "a")
    assert sum(gpu.LIMITS.values()) <= 600


@pytest.mark.slow
def test_models_of_all_kinds_are_scored_as_by_lm_eval(tmp_path: Path, checkpoint: Path, documents: Path) -> None:
    kinds = ["llama", "mamba", "qwen3_next", "falcon_h1", "remote", "plain"]
    options = ["--size", "tiny", "--tasks", "openbookqa", "--limit", "3", "--batch-sizes", "4", "--repeats", "1"]
    places = ["--model", checkpoint, "--data-dir", documents]
    script = SCRIPTS / "versus_lm_eval.py"
    command = [sys.executable, script, "--kinds", *kinds, *options, *places, "--out", tmp_path / "out"]
    subprocess.run(command, check=True, capture_output=True)
    results = json.loads((tmp_path / "out" / "kinds.json").read_text())["results"]
    assert {(result["kind"], result["protocol"]) for result in results} == {
        (kind, protocol) for kind in kinds for protocol in ("plain", "inst")
    }
    for result in results:
        assert not result["failure"]
        assert result["way"] != "alone" or result["kind"] != "llama"
        assert max(task["difference"] for task in result["tasks"]) < 2e-5
    lines = (tmp_path / "out" / "kinds.md").read_text().splitlines()
    assert len([line for line in lines if line.startswith(tuple(f"| {kind} |" for kind in kinds))]) == len(results)


@pytest.mark.slow
def test_an_evaluation_in_a_loop_counts_its_passes(tmp_path: Path, checkpoint: Path, documents: Path) -> None:
    places = ["--tokenizer", checkpoint, "--data-dir", documents, "--out", tmp_path / "out"]
    command = [sys.executable, SCRIPTS / "in_loop.py", "--size", "tiny", "--documents", "3", "--repeats", "1", *places]
    subprocess.run(command, check=True, capture_output=True)
    [evaluation] = json.loads((tmp_path / "out" / "in_loop.json").read_text())["evaluations"]
    rows = sum(rows for rows, _ in evaluation["passes"])
    assert rows >= len(evaluation["passes"]) > 0
    assert evaluation["check_passes"]


@pytest.mark.slow
def test_architectures_are_scored_right_or_refused_for_a_true_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some of those that the survey of all types compares."""
    right = ["llama", "whisper", "deepseek_v4", "xlstm", "blt", "jamba", "bigbird_pegasus", "emu3", "mllama", "doge"]
    refused = ["prophetnet", "cpmant", "doge:ties", "doge:long-ties", "bert:both-ways"]
    monkeypatch.setattr(sys, "argv", ["architectures.py", "--seeds", "1", "--types", *right, *refused])
    assert architectures.main() == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    verdicts = {row[0].removeprefix("| "): row[1] for row in rows}
    assert {kind for kind, verdict in verdicts.items() if verdict == "agrees"} == set(right)
    assert {kind for kind, verdict in verdicts.items() if verdict == "refused, true"} == set(refused)


@pytest.mark.slow
def test_generated_texts_of_architectures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Some of those that the survey of all types compares; Moshi's `generate` drops keys that its passes use."""
    types = ["llama", "mllama", "nemotron_h", "roberta", "trocr", "minimax", "moshi"]
    monkeypatch.setattr(sys, "argv", ["architectures.py", "--generate", "--seeds", "1", "--types", *types])
    assert architectures.main() == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    verdicts = {row[0].removeprefix("| "): row[1] for row in rows[1:]}
    assert verdicts == dict.fromkeys(types, "agrees") | {"moshi": "agrees with passes"}
