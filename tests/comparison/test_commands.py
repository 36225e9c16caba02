"""`evalkit compare` through the command line: every output format, and errors of bad input."""

from __future__ import annotations

import csv
import io
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from evalkit.cli import main
from tests.arguments import arguments
from tests.comparison.conftest import Make
from tests.comparison.made import make_run, scores_of
from tests.documents import COUNTS

NASTY = r"100%_of\{it} & $more$ ~#^<b>|x"
"""A model's name with everything that LaTeX or Markdown would obey."""


class Outcome(NamedTuple):
    """Outcome of a command."""

    code: int
    out: str
    err: str


Compare = Callable[..., Outcome]


@pytest.fixture
def compare(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compare:
    for name in [name for name in os.environ if name.startswith("EVALKIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)

    def run(*given: object) -> Outcome:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main(["compare", *arguments({"--output": "runs"}, given)])
        return Outcome(int(left.value.code or 0), *capsys.readouterr())

    return run


def refused(outcome: Outcome, code: int, *words: str) -> None:
    """Check a one-line error with these words."""
    assert outcome.code == code, outcome
    assert outcome.out == ""
    [line] = outcome.err.splitlines()
    assert line.startswith("evalkit: ")
    for word in words:
        assert word in line, line


def test_the_first_line_says_the_verdict(compare: Compare, make: Make) -> None:
    a, b = make("org/small", 0.2), make("org/large", 0.95)
    outcome = compare(a.name, b.name)
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[0].startswith("large is better than small on 3 of 3 tasks after Holm's correction; average +")
    assert lines[0].endswith(", p <0.001: better.")
    assert lines[1].startswith("Bits per byte: ") and "lower is better" in lines[1]
    assert "about these two checkpoints" in lines[2]
    assert lines[4:6] == [f"A: small (runs/{a.name})", f"B: large (runs/{b.name})"]
    rows = {line.split()[0]: line.split() for line in lines[7:] if line}
    assert rows["ARC-Easy"][1] == "60"
    assert rows["ARC-Easy"][-1] == "better"
    assert "BoolQ†" in rows
    assert "†: documents share sources (BoolQ 20)" in outcome.out
    assert compare(b.name, a.name).out.startswith("small is worse than large on 3 of 3 tasks")
    assert compare(a, make("org/other", 0.2)).out.startswith("No difference between other and small is shown on any of")


def test_csv_and_json_say_the_same_in_full(compare: Compare, make: Make) -> None:
    runs = (make("org/a", 0.3), make("org/b", 0.5, seed=3))
    records = list(csv.DictReader(io.StringIO(compare(*runs, "--format", "csv").out)))
    shown = {line.split()[0]: line for line in compare(*runs).out.splitlines() if line.startswith(("ARC-Easy", "MMLU"))}
    assert f" {float(records[0]['p_holm']):.3f} " in shown["ARC-Easy"]
    assert records[0]["p_holm"] != records[0]["p"]
    [content] = json.loads(compare(*runs, "--format", "json").out)["comparisons"]
    assert [record["name"] for record in records] == ["arc_easy", "boolq", "mmlu", "Knowledge", "Average"]
    for record, task in zip(records, content["tasks"], strict=False):
        for key in ("difference", "low", "high", "stderr", "freedom", "p", "p_holm", "detectable"):
            assert float(record[key]) == task[key]
        assert int(record["won"]) == task["won"]
    assert records[-1]["kind"] == "average"
    assert float(records[-1]["difference"]) == content["averages"][-1]["difference"]
    assert content["claim"]["kind"] == "checkpoints"
    assert [one["rule"] for one in content["rules"]][3:6] == ["acc", "acc_norm", "acc_bytes"]


def test_curves(compare: Compare, make: Make) -> None:
    runs = [make(f"org/base/step{step}", 0.3 + step / 10_000, 1) for step in (4000, 1000, 2000)]
    outcome = compare("--curve", *runs, "--plot", "curve.png")
    assert outcome.code == 0, outcome
    lines = outcome.out.splitlines()
    assert lines[0].startswith("base: average ")
    assert "at step 4,000 (3 checkpoints, 3 tasks)" in lines[0]
    assert [line.split()[0] for line in lines[4:7]] == ["1,000", "2,000", "4,000"]
    assert Path("curve.png").read_bytes().startswith(b"\x89PNG")
    records = list(csv.DictReader(io.StringIO(compare("--curve", *runs, "--format", "csv").out)))
    assert [record["step"] for record in records[-3:]] == ["1000", "2000", "4000"]
    assert all(float(r["low"]) <= float(r["accuracy"]) <= float(r["high"]) for r in records)


# Bad input


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--group", "x"], ["--group x", "NAME=RUN,RUN"]),
        (["--group", "x="], ["--group x=", "NAME=RUN,RUN"]),
        (["--plot", "forest.gif"], ["--plot forest.gif", ".png, .pdf or .svg"]),
        (["--margin", "1"], ["--margin", "--fail-if-worse"]),
        (["--curve", "--fail-if-worse"], ["--fail-if-worse", "--curve"]),
        (["--rule", "acc_nrm"], ["unknown rule 'acc_nrm'", "'acc_norm'"]),
        (["--curve"], ["has no training step", "trainer_state.json"]),
    ],
)
def test_invalid_options(compare: Compare, make: Make, options: list[str], words: list[str]) -> None:
    refused(compare(make("org/a"), make("org/b"), *options), 2, *words)


# As a process


@pytest.mark.slow
def test_two_full_suites_within_two_seconds_of_work(tmp_path: Path) -> None:
    """34,507 documents of each, from a cold start; CPU time, so that a busy machine does not fail the test."""
    dice = np.random.default_rng(1)
    runs = []
    for model in ("a", "b"):
        tables = {}
        for task, count in COUNTS.items():
            subtasks = [f"mmlu_{place % 57}" for place in range(count)] if task == "mmlu" else None
            tables[task] = scores_of(task, dice.integers(0, 2, count).tolist(), subtasks=subtasks)
            tables[task]["ll_continuation"] += dice.normal(0, 0.01, len(tables[task]))
        runs.append(str(make_run(tmp_path, tables, model=model)))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "evalkit", "compare", *runs], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


def test_needs_neither_torch_nor_matplotlib(make: Make) -> None:
    runs = [str(make("org/a")), str(make("org/b"))]
    command = [sys.executable, "-X", "importtime", "-m", "evalkit", "compare", *runs]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "pandas" in imported
    assert imported.isdisjoint({"torch", "transformers", "datasets", "lm_eval", "matplotlib", "scipy.stats"})
