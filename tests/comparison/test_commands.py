"""`evalkit compare` through the command line: every output format, and errors of bad input."""

from __future__ import annotations

import csv
import io
import json
import os
import resource
import shutil
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


def test_an_average_can_show_what_no_task_does(compare: Compare, make: Make) -> None:
    out = compare(make("org/a", 0.5), make("org/b", 0.54)).out
    assert out.startswith("b is better than a on average, +")
    assert "; none of 3 tasks shows it alone after Holm's correction." in out.splitlines()[0]


def test_several_are_each_compared_with_the_first(compare: Compare, make: Make) -> None:
    runs = [make(f"org/{name}", share) for name, share in (("x", 0.2), ("y", 0.9), ("z", 0.3))]
    outcome = compare(*(run.name for run in runs))
    firsts = [line for line in outcome.out.splitlines() if line.startswith(("A: ", "B: ", "C: "))]
    assert [line[:4] for line in firsts] == ["A: x", "B: y", "A: x", "C: z"]
    assert len(json.loads(compare(*runs, "--format", "json").out)["comparisons"]) == 2


def test_markdown(compare: Compare, make: Make) -> None:
    out = compare(make("org/a", 0.3), make("org/b|c", 0.9), "--format", "markdown").out
    assert out.startswith("**b\\|c is better than a on ")
    rows = [line for line in out.splitlines() if line.startswith("|")]
    table = rows[: rows.index(next(row for row in rows if row.startswith("| Average"))) + 1]
    assert {row.replace("\\|", "").count("|") for row in table} == {13}


def test_latex_prints_names_as_they_are(compare: Compare, make: Make, tmp_path: Path) -> None:
    a, b = make("org/a", 0.3), make(f"org/{NASTY}", 0.9)
    out = compare(a, b, "--format", "latex").out
    assert out.count(r"\toprule") == out.count(r"\bottomrule") == 2
    body = [line for line in out.splitlines() if not line.startswith("%")]
    assert not any("<" in line or "_" in line.replace(r"\_", "") for line in body)
    assert "$-$" in out
    if not shutil.which("pdflatex"):
        pytest.skip("no pdflatex to typeset it with")
    from evalkit.escape import PACKAGES, in_latex

    text = rf"\documentclass{{article}}{PACKAGES}\begin{{document}}{in_latex(NASTY)}{{\tiny {out}"
    (tmp_path / "page.tex").write_text(text + "\n}\\end{document}\n", encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stdout[-2000:]


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


def test_groups_show_both_parts_of_the_error(compare: Compare, make: Make) -> None:
    groups = []
    for name, share in (("old", 0.4), ("new one", 0.6)):
        members = [make(f"org/{name[0]}{seed}", share, seed) for seed in (1, 4, 8)]
        groups += ["--group", f"{name}=" + ",".join(run.name for run in members)]
    out = compare(*groups).out
    assert "about two architectures" in out
    assert "SD of A's runs" in out
    assert "± from runs" in out
    assert "t with df" in out
    assert "that so many documents and runs detect" in out
    assert "each side's spread has its own degrees of freedom" in out
    [content] = json.loads(compare(*groups, "--format", "json").out)["comparisons"]
    assert content["tasks"][0]["spread"].keys() >= {"seeds_a", "seeds_b", "documents", "shared"}
    assert all(task["freedom"] >= 2 for task in content["tasks"])
    assert len(content["runs_b"]) == 3


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


def test_two_trainings(compare: Compare, make: Make) -> None:
    groups = []
    for name in ("old", "new"):
        members = [make(f"org/{name}/checkpoint-{step}", 0.4, step) for step in (10, 20)]
        groups += ["--group", f"{name}=" + ",".join(map(str, members))]
    curves = json.loads(compare("--curve", *groups, "--format", "json", "--plot", "c.pdf").out)["curves"]
    assert [one["name"] for one in curves] == ["old", "new"]
    assert [point["step"] for point in curves[0]["average"]] == [10, 20]
    assert Path("c.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize("name", ["forest.png", "deep/forest.pdf"])
def test_forest_plots(compare: Compare, make: Make, name: str) -> None:
    assert compare(make("org/a", 0.3), make(f"org/{NASTY}", 0.9), make("org/c", 0.1), "--plot", name).code == 0
    assert Path(name).stat().st_size > 10_000


def test_for_continuous_integration(compare: Compare, make: Make) -> None:
    a, same, worse = make("org/a", 0.6), make("org/b", 0.6), make("org/c", 0.1)
    assert compare(a, same, "--fail-if-worse").code == 4
    assert compare(a, same, "--fail-if-worse", "--margin", 10).code == 0
    assert compare(a, worse, "--fail-if-worse").code == 3
    assert compare(worse, a, "--fail-if-worse").code == 0
    assert compare(a, worse).code == 0


# Bad input


def test_runs_that_are_not_there(compare: Compare, make: Make) -> None:
    run = make("org/a")
    refused(compare(), 2, "name two runs")
    refused(compare(run), 2, "nothing to compare a with")
    other = f"b{run.name[1:]}"
    refused(compare(run, other), 2, f"unknown run '{other}'", f"did you mean '{run.name}'")
    refused(compare(run, "x", "--output", "elsewhere"), 2, "none in elsewhere")


def test_the_same_run_twice(compare: Compare, make: Make) -> None:
    a, b = make("org/a"), make("org/b")
    refused(compare(a, a.name), 2, a.name, "named twice", "remove one")
    refused(compare(a, "--group", f"B={b},{b}"), 2, b.name, "named twice")
    refused(compare("--curve", a, a), 2, a.name, "named twice")
    refused(compare("--group", f"x={a}", "--group", f"x={b}"), 2, "two sides are called 'x'")


def test_a_run_in_progress(compare: Compare, make: Make) -> None:
    a, b = make("org/a"), make("org/b")
    (b / "results.json").unlink()
    refused(compare(a, b), 1, str(b), "not finished", "run its command again")


def test_a_damaged_run(compare: Compare, make: Make) -> None:
    a, b = make("org/a"), make("org/b")
    (b / "scores.parquet").write_bytes(b"PAR1")
    refused(compare(a, b), 1, f"{b}/scores.parquet is damaged")


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


def test_invalid_curves(compare: Compare, make: Make) -> None:
    first = make("org/a/step10")
    refused(compare("--curve", first), 2, "two checkpoints or more")
    refused(compare("--curve", first, make("org/b/step10")), 2, "both have step 10")
    refused(compare("--curve"), 2, "name the runs")


def test_a_picture_that_cannot_be_written(compare: Compare, make: Make) -> None:
    Path("file").touch()
    outcome = compare(make("org/a"), make("org/b"), "--plot", "file/forest.png")
    assert outcome.code == 1
    assert outcome.err.startswith("evalkit: file/forest.png cannot be written: ")


def test_a_name_with_a_terminals_orders(compare: Compare, make: Make) -> None:
    out = compare(make("org/a"), make("org/\x1b[31mred\nline")).out
    assert "\x1b" not in out
    assert "\\x1b[31mred\\nline" in out.splitlines()[0]


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
