"""Scripts of benchmarks/: the comparison with earlier runs, and parts under time limits. Not their measurements."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import architectures, gpu, track
from benchmarks.track import Change, Measured

MACHINE = "a processor, 2 threads"


def run(machine: str = MACHINE, **ratios: float) -> Measured:
    return Measured("2026-01-01T00:00:00+00:00", "0.1.0", machine, ratios)


def test_a_ratio_is_compared_with_the_median_of_the_same_kind_of_machine() -> None:
    history = [run(help=1.0), run(help=2.0), run(help=9.0), run("another", help=100.0), run(journal=5.0)]
    [found] = track.changes(run(help=3.0), history)
    assert (found.median, found.runs) == (2.0, 3)
    assert found.moved == 0.5
    assert found.verdict == "worse"


def test_a_ratio_without_earlier_runs_has_not_moved() -> None:
    [found] = track.changes(run(help=3.0), [run("another", help=1.0)])
    assert found == Change("help", 3.0, None, 0)
    assert found.verdict == ""
    assert "| help | 3 | – | 0 | – |  |" in track.table([found])


@pytest.mark.parametrize(
    ("name", "ratio", "verdict"),
    [("help", 1.09, ""), ("help", 1.12, "worse"), ("help", 0.88, "better"), ("help", 0.92, ""),
     ("lm_eval", 1.12, "better"), ("lm_eval", 0.88, "worse"), ("lm_eval", 0.95, "")],
)  # fmt: skip
def test_what_is_marked(name: str, ratio: float, verdict: str) -> None:
    assert Change(name, ratio, 1.0, 3).verdict == verdict


def test_the_table_names_what_moved() -> None:
    text = track.table([Change("help", 1.3, 1.0, 3), Change("journal", 30.0, 30.0, 3)])
    assert "| help | 1.3 | 1 | 3 | +30% | worse |" in text
    assert "| journal | 30 | 30 | 3 | +0% |  |" in text
    assert track.MEANINGS["help"].text in text
    assert track.MEANINGS["journal"].text not in text


def test_the_latest_runs_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "track.json"
    assert track.read(path) == []
    history = [run(help=float(number)) for number in range(25)]
    track.write(path, history)
    assert track.read(path) == history[-track.KEPT :]


@pytest.fixture
def three_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of three runs of this machine, and measurements that are made up."""
    path = tmp_path / "track.json"
    track.write(path, [run(help=1.0)] * 3)
    monkeypatch.setattr(track, "machine", lambda: MACHINE)
    monkeypatch.setattr(track, "measured", lambda name: {name: 2.0})
    yield path


@pytest.mark.parametrize(("options", "code"), [([], 0), (["--strict"], 1)])
def test_only_strict_fails(
    three_runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], code: int
) -> None:
    monkeypatch.setattr(sys, "argv", ["track.py", "--only", "help", "--file", str(three_runs), *options])
    assert track.main() == code
    assert "+100%" in capsys.readouterr().out
    assert [one.ratios for one in track.read(three_runs)] == [{"help": 1.0}] * 3 + [{"help": 2.0}]


def test_every_ratio_is_explained_in_the_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["track.py", "--help"])
    with pytest.raises(SystemExit):
        track.main()
    shown = capsys.readouterr().out
    assert all(meaning.text in shown for meaning in track.MEANINGS.values())


@pytest.mark.parametrize(
    ("code", "state", "output"),
    [
        ("print('a')", "finished", "a"),
        ("print('a'); raise SystemExit('no GPU')", "failed (no GPU)", "a"),
        ("import time; print('a'); time.sleep(60)", "out of time (2 s)", "a"),
    ],
)
def test_a_part_keeps_its_output_however_it_ends(tmp_path: Path, code: str, state: str, output: str) -> None:
    found = gpu.measured("part", [sys.executable, "-c", code], 2, tmp_path / "log")
    assert (found.state, found.output) == (state, output)
    assert found.seconds < 30


def test_the_next_part_begins_after_a_failed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def command(part: str, _: object) -> list[str]:
        return [sys.executable, "-c", "1 / 0" if part == "suite" else "print('measured')"]

    monkeypatch.setattr(gpu, "command_of", command)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--out", str(tmp_path)])
    assert gpu.main() == 1
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [one["part"] for one in found] == list(gpu.LIMITS)
    assert found[0]["state"] == "failed (ZeroDivisionError: division by zero)"
    assert {one["output"] for one in found[1:]} == {"measured"}
    assert "Skipped without CUDA" in (tmp_path / "gpu.md").read_text()


def test_the_parts_fit_in_ten_minutes() -> None:
    assert sum(gpu.LIMITS.values()) <= 600


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
