"""`evalkit decide`, and samples that continue from another one's scores, on random checkpoints."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import evalkit
from evalkit.benchmarks.run import planned
from evalkit.benchmarks.session import run_plan
from evalkit.cli.root import cli
from evalkit.errors import UsageError
from evalkit.models.loading.locate import silent
from evalkit.runs.folder import JOURNAL, MANIFEST, Run
from evalkit.runs.traits import NO_BATCH
from evalkit.studies import deciding
from evalkit.studies.deciding import Decision, decide, decision_report, samples
from tests.benchmarks.lm_eval.made import write_task
from tests.journals import entries_of
from tests.marks import fast
from tests.sealed import read, reseal, write
from tests.studies.made import Told
from tests.tiny import tiny_checkpoint

DOCUMENTS = 600


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints, and a file of 600 questions. Do not modify."""
    folder = tmp_path_factory.mktemp("deciding")
    for seed, name in enumerate("ab"):
        tiny_checkpoint(folder / name, seed=seed, window=256)
    lines = [
        {"doc_id": 2 * number + 1, "context": f"{number} apples and {number % 7} are", "continuation": f" {answer}",
         "idx": choice, "label": number % 2}
        for number in range(DOCUMENTS) for choice, answer in enumerate((f"{number}", "many"))
    ]  # fmt: skip
    (folder / "apples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def options(folder: Path, output: Path, **more: Any) -> dict[str, Any]:
    return {"requests": folder / "apples.jsonl", "output": output, "device": "cpu", "dtype": "float32"} | more


def run(folder: Path, output: Path, told: Told | None = None, **more: Any) -> Run:
    return evalkit.evaluate(str(folder / "a"), progress=told or Told(), **options(folder, output, **more))


def rows_in(run: Run) -> int:
    return len((run.folder / JOURNAL).read_text().splitlines())


def taken_rows(run: Run) -> int:
    """Return how many rows of a run are in the journal without a batch."""
    return sum(len(rows) for entry, rows in entries_of(run) if entry.batch == NO_BATCH)


def same_scores(run: Run, other: Run) -> None:
    """Float32 in batches of other sizes: equal to 2e-5 of the log-likelihood."""
    first, second = run.scores, other.scores
    numbers = [name for name in first if name.startswith("ll_")]
    assert first.drop(columns=numbers).equals(second.drop(columns=numbers))
    np.testing.assert_allclose(first[numbers], second[numbers], rtol=2e-5, equal_nan=True)


def decision(
    folder: Path, output: Path, told: Told | None = None, margin: float = 1.0, most: int | None = None, **more: Any
) -> Decision:
    models = [str(folder / name) for name in "ab"]
    return decide(models, options(folder, output, **more), margin, most, None, told or Told())


# A sample continues from another


SELECTIONS = [({"sample": 40}, {"sample": 90}), ({"sample": 90}, {"sample": 40}), ({"limit": 50}, {"sample": 90}),
              ({"sample": 90}, {})]  # fmt: skip


@pytest.mark.parametrize(("first", "then"), [pytest.param(*each, marks=[pytest.mark.slow] * (number > 1))
                                             for number, each in enumerate(SELECTIONS)])  # fmt: skip
def test_only_new_documents_are_scored(folder: Path, tmp_path: Path, first: Any, then: Any) -> None:
    one, told = run(folder, tmp_path, **first), Told()
    both = run(folder, tmp_path, told, **then)
    alone = run(folder, tmp_path / "alone", **then)
    same_scores(both, alone)
    count = len(set(one.scores["doc_id"]) & set(alone.scores["doc_id"]))
    assert any(f"{count} of {len(set(alone.scores['doc_id']))} documents have" in line for line in told.lines)
    counts = both.scores.groupby("doc_id").size()
    assert (counts == 2).all() and json.loads((both.folder / "manifest.json").read_text())["loaded"]


@pytest.mark.parametrize("other", fast([{"dtype": "bfloat16"}], [{"dtype": "bfloat16"}, {"template": "inst"},
                                                                 {"num_fewshot": None, "context": 512}]))  # fmt: skip
def test_scores_of_other_settings_are_not_taken(folder: Path, tmp_path: Path, other: dict[str, Any]) -> None:
    run(folder, tmp_path, **{"sample": 40} | other)
    told = Told()
    run(folder, tmp_path, told, sample=90)
    assert not any("which are reused" in line for line in told.lines)


ROUNDED: list[dict[str, str]] = [{"dtype": "bfloat16"}, {"dtype": "float16"}, {"quantise": "w8a8"}]


@pytest.mark.parametrize("rounded", fast(ROUNDED[:1], ROUNDED))
def test_a_rounded_run_is_the_same_after_another_sample(folder: Path, tmp_path: Path, rounded: dict[str, str]) -> None:
    """Its scores depend on the other documents of a batch by more than float32's rounding."""
    run(folder, tmp_path, sample=40, **rounded)
    told = Told()
    both = run(folder, tmp_path, told, sample=90, **rounded)
    assert not any("which are reused" in line for line in told.lines)
    assert both.scores.equals(run(folder, tmp_path / "alone", sample=90, **rounded).scores)


@pytest.mark.parametrize(
    ("changed", "reused"),
    [({}, True), ({"device": "cuda:0", "hardware": "NVIDIA H200"}, False), ({"hardware": "another"}, False)],
)
def test_batches_of_other_devices_are_not_taken(
    folder: Path, tmp_path: Path, changed: dict[str, str], reused: bool
) -> None:
    """In half precision; the other run is the first look of a decision."""
    more: dict[str, Any] = {"dtype": "bfloat16", "token_budget": 512}
    other = run(folder, tmp_path / "runs", sample=40, **more)
    manifest = read(other.folder, MANIFEST)
    manifest["devices"] = [device | changed for device in manifest["devices"]]
    write(other.folder, MANIFEST, manifest)
    reseal(other.folder)
    runs, told = {}, Told()
    for name in ("runs", "alone"):
        given = options(folder, tmp_path / name, sample=90, **more)
        runs[name] = run_plan(planned(str(folder / "a"), given, silent, [40]), told)
    assert any("which are reused" in line for line in told.lines) is reused
    assert runs["runs"].scores.equals(runs["alone"].scores)


def test_products_in_a_faster_format_are_rounded(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path, sample=40)
    told, before = Told(), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        run(folder, tmp_path, told, sample=90)
    finally:
        torch.set_float32_matmul_precision(before)
    assert not any("which are reused" in line for line in told.lines)


DRAWN = """
import random

def drawn(doc):
    return f"{doc['q']} {random.randrange(10**6)}"

def gold(doc):
    return random.randrange(2)
"""
CALLS = {"drawn": ("!function code.drawn", "0"), "gold": ("'{{q}}'", "!function code.gold")}
"""Name → doc_to_text and doc_to_target."""


@pytest.mark.parametrize("call", fast(["drawn"], CALLS))
def test_other_texts_of_the_same_documents_are_scored(folder: Path, tmp_path: Path, call: str) -> None:
    """A task whose code draws texts or gold answers, document by document."""
    task = {"task": "drawn", "output_type": "multiple_choice", "doc_to_text": "TEXT", "doc_to_choice": ["yes", "no"],
            "doc_to_target": "GOLD"}  # fmt: skip
    write_task(tmp_path / "tasks", task, [{"q": f"question {number}"} for number in range(30)])
    path = tmp_path / "tasks" / "drawn.yaml"
    text, gold = CALLS[call]
    path.write_text(path.read_text("utf-8").replace("TEXT", text).replace("GOLD", gold), "utf-8")
    (tmp_path / "tasks" / "code.py").write_text(DRAWN, "utf-8")
    own = {"requests": None, "include_path": tmp_path / "tasks", "tasks": ("drawn",), "template": "plain"}
    run(folder, tmp_path / "runs", sample=8, **own)
    same_scores(run(folder, tmp_path / "runs", sample=16, **own), run(folder, tmp_path / "alone", sample=16, **own))


def test_a_damaged_journal_is_not_taken(folder: Path, tmp_path: Path) -> None:
    """And it stays as it is."""
    journal = run(folder, tmp_path, sample=40).folder / JOURNAL
    journal.write_bytes(journal.read_bytes()[:-10])
    before = journal.read_bytes()
    same_scores(run(folder, tmp_path, sample=90), run(folder, tmp_path / "alone", sample=90))
    assert journal.read_bytes() == before


# Kills

DYING = """
import os, signal, sys
from evalkit.runs.journal import Journal

append, left = Journal.append, [int(sys.argv.pop(1))]

def last(*arguments):
    stored = append(*arguments)
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return stored

Journal.append = last
from evalkit.cli import main
main()
"""


def killed(lines: int, *command: Any) -> bool:
    """Run a command in a process that kills itself after some lines of journals; return whether it did."""
    process = subprocess.run([sys.executable, "-c", DYING, str(lines), *map(str, command)], capture_output=True)
    assert process.returncode in (0, 4, -signal.SIGKILL), process.stderr
    return process.returncode == -signal.SIGKILL


def command_of(folder: Path, output: Path, *more: Any) -> tuple[Any, ...]:
    return ("--requests", folder / "apples.jsonl", "-o", output, "--device", "cpu", *more)


def test_the_rest_of_a_sample_is_taken_after_a_kill(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "whole", sample=90, token_budget=128)
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    expected = run(folder, tmp_path / "whole", sample=180)
    more = ("--dtype", "float32", "--sample", "180")
    assert killed(3, "run", folder / "a", *command_of(folder, tmp_path / "part", *more))
    [begun] = (each for each in evalkit.list_runs(tmp_path / "part") if not each.complete)
    assert 0 < taken_rows(begun) < 180
    resumed = run(folder, tmp_path / "part", sample=180)
    assert taken_rows(resumed) == taken_rows(expected) == 180
    assert resumed.scores.equals(expected.scores)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("lines", [None, 9])
def test_a_decision_is_the_same_after_kills(folder: Path, tmp_path: Path, dtype: str, lines: int | None) -> None:
    """To the last bit; killed once in the middle of the rows that the second look takes, or again and again."""
    whole = decision(folder, tmp_path / "whole", margin=0.0, most=300, dtype=dtype, token_budget=512)
    expected = {each.folder.name: each for each in evalkit.list_runs(tmp_path / "whole")}
    first = [each for each in expected.values() if not each.manifest["specification"]["earlier"]]
    assert len(whole.steps) == 2 and len(first) == 2 and len(expected) == 4
    more = ("--dtype", dtype, "--token-budget", "512", "--margin", "0", "--max-sample", "300")
    command = ("decide", folder / "a", folder / "b", *command_of(folder, tmp_path / "part", *more))
    if lines is None:
        assert killed(sum(map(rows_in, first)) + 2, *command)
    while lines is not None and killed(lines, *command):
        pass
    again = decision(folder, tmp_path / "part", margin=0.0, most=300, dtype=dtype, token_budget=512)
    assert again.steps == whole.steps
    for each in evalkit.list_runs(tmp_path / "part"):
        assert each.scores.equals(expected[each.folder.name].scores)
        assert rows_in(each) == rows_in(expected[each.folder.name])


# Decisions


@pytest.mark.parametrize("dtype", fast(["bfloat16"], ["bfloat16", "float16"]))
def test_a_rounded_decision_is_what_its_ids_say(folder: Path, tmp_path: Path, dtype: str) -> None:
    """Each document is scored once, in the batches of a run that has all of them to score."""
    more = {"dtype": dtype, "token_budget": 512}
    decided = decision(folder, tmp_path / "runs", margin=0.0, **more)
    looks = [look.sample for look in decided.steps]
    assert len(looks) == 4
    for name, path in zip("ab", decided.runs, strict=True):
        given = options(folder, tmp_path / "alone", sample=looks[-1], **more)
        alone = run_plan(planned(str(folder / name), given, silent, looks[:-1]), Told())
        last = evalkit.load_run(path)
        assert alone.folder.name == last.folder.name and alone.scores.equals(last.scores)
        assert rows_in(alone) == rows_in(last) and set(last.manifest["taken_from"]) < {
            each.manifest["id"] for each in evalkit.list_runs(tmp_path / "runs")
        }
        assert last.manifest["specification"]["earlier"] == looks[:-1]


def test_a_decision_scores_each_document_once(folder: Path, tmp_path: Path) -> None:
    """The runs of the last sample, which go on from those of smaller ones, equal runs of that sample alone."""
    decided = decision(folder, tmp_path, margin=0.5)
    assert [look.sample for look in decided.steps] == samples([DOCUMENTS], None)[: len(decided.steps)]
    assert len(decided.steps) > 1 and len(list(tmp_path.iterdir())) == 2 * len(decided.steps)
    last = decided.steps[-1]
    for name, path in zip("ab", decided.runs, strict=True):
        alone = evalkit.evaluate(
            str(folder / name), progress=Told(), **options(folder, tmp_path / "alone", sample=last.sample)
        )
        same_scores(evalkit.load_run(path), alone)
    compared = evalkit.compare(*decided.runs)
    assert compared.average.difference == last.average.difference  # type: ignore[union-attr]
    assert last.average.low < compared.average.low < compared.average.high < last.average.high  # type: ignore[union-attr]


def test_a_decision_ends_at_the_first_verdict(folder: Path, tmp_path: Path) -> None:
    """A margin that any interval is within: equivalent at the first look, of some 200 documents."""
    decided = decision(folder, tmp_path, margin=99.0)
    assert decided.verdict in ("equivalent", "better", "worse") and len(decided.steps) == 1
    assert f"{decided.steps[0].documents} of {DOCUMENTS}" in decision_report(decided).verdict[0]


@pytest.mark.slow
def test_an_interrupted_decision_goes_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, run_plan, calls = decision(folder, tmp_path / "whole", margin=0.5), deciding.run_plan, list[int]()

    def interrupted(*arguments: Any) -> Run:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return run_plan(*arguments)

    monkeypatch.setattr(deciding, "run_plan", interrupted)
    with pytest.raises(KeyboardInterrupt):
        decision(folder, tmp_path / "part", margin=0.5)
    told = Told()
    again = decision(folder, tmp_path / "part", told, margin=0.5)
    assert [look.verdict for look in again.steps] == [look.verdict for look in whole.steps]
    assert again.steps[-1].average.difference == whole.steps[-1].average.difference


@pytest.mark.slow
def test_no_look_is_meant_by_a_checkpoints_name(folder: Path, tmp_path: Path) -> None:
    """A plain run before a decision is still the one that is compared, and its rows are taken."""
    size, told = samples([DOCUMENTS], None)[0], Told()
    given = options(folder, tmp_path, sample=size)
    plain = [evalkit.evaluate(str(folder / name), progress=told, **given) for name in "ab"]
    decided = decision(folder, tmp_path, told, margin=0.0)
    assert len(decided.steps) > 1 and any(f"{size} of {size} documents have" in line for line in told.lines)
    compared = evalkit.compare(folder / "a", folder / "b", root=tmp_path)
    assert [*compared.runs_a, *compared.runs_b] == [str(run.folder) for run in plain]  # type: ignore[union-attr]
    shutil.rmtree(plain[0].folder)
    with pytest.raises(
        UsageError, match=r"no look of evalkit decide.*(first look|300 after 213).*(first look|300 after 213)"
    ):
        evalkit.compare(folder / "a", folder / "b", root=tmp_path)


def test_what_cannot_be_decided(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="grow"):
        decide(
            [str(folder / "a")] * 2, {"suite": "needle", "lengths": [100], "output": tmp_path}, 1, None, None, Told()
        )
    with pytest.raises(evalkit.EvalkitError, match="one run"):
        decide([str(folder / "a")] * 2, options(folder, tmp_path), 1, None, None, Told())


def test_the_command(folder: Path, tmp_path: Path) -> None:
    common = ["decide", str(folder / "a"), "--requests", str(folder / "apples.jsonl"), "-o", str(tmp_path)]
    both = [*common[:2], str(folder / "b"), *common[2:]]
    deciding = [*both, "--margin", "99", "--max-sample", "220", "--seed", "1", "--format", "json"]
    result = CliRunner().invoke(cli, deciding)
    content = json.loads(result.stdout)
    assert result.exit_code == 0 and content["most"] == 220 and content["steps"][-1]["documents"] <= 220
    failing = [*both, "--margin", "0", "--max-sample", "220", "--fail-if-worse"]
    decided = CliRunner().invoke(cli, failing, standalone_mode=False)
    assert decided.return_value == 4 and "no difference" in decided.stdout
    for wrong in (both, [*common, "--margin", "1"]):  # without a margin, without a second checkpoint
        assert CliRunner().invoke(cli, wrong).exit_code != 0
