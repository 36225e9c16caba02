"""What holds for every benchmark, evalkit's own and another package's, by the same tests."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from evalkit.benchmarks.base import Budget, Held
from evalkit.benchmarks.registry import benchmark, benchmark_of
from evalkit.benchmarks.request import request_of
from evalkit.benchmarks.session import load_model, run_plan
from evalkit.cli import main
from evalkit.compare.comparison import compare
from evalkit.compare.pairing import pair
from evalkit.compare.sides import Side
from evalkit.export import export_run
from evalkit.progress import Progress
from evalkit.runs.folder import JOURNAL, RESULTS, Run, load_run
from evalkit.runs.journal import Journal
from evalkit.runs.listing import list_found
from evalkit.tables.measured import accuracies
from tests.documents import made_up
from tests.longbench.made import record, write
from tests.tiny import tiny_checkpoint

KINDS = ("multiple_choice", "lm_eval", "longbench", "needle", "copying")
BUDGET = {"multiple_choice": 128, "lm_eval": 128, "longbench": 900, "needle": 700, "copying": 60}
"""Small, so that there are many batches."""


class Silent(Progress):
    """Says nothing."""

    def __init__(self) -> None:
        super().__init__(live=False)

    def say(self, line: str) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints, documents of suites and rows of LongBench."""
    folder = tmp_path_factory.mktemp("files")
    for seed in (0, 1):
        tiny_checkpoint(folder / f"model{seed}", seed=seed, window=1024)
    made_up(folder / "documents", count=12)
    texts = [" ".join(f"word{n}" for n in range(start, start + 150)) for start in range(0, 900, 100)]
    write(folder / "rows" / "qasper.jsonl", [record("qasper", n, context=text) for n, text in enumerate(texts)])
    return folder


def plan(kind: str, files: Path, output: Path, seed: int = 0) -> Any:
    """A run of a kind."""
    common: dict[str, Any] = {"output": output, "dtype": "float32", "token_budget": BUDGET[kind]}
    if kind in ("multiple_choice", "lm_eval"):
        common |= {"data_dir": files / "documents", "allow_unofficial_data": True, "tasks": ("piqa", "boolq")}
    if kind == "lm_eval":
        common |= {"suite": "lm_eval"}
    if kind == "longbench":
        common |= {"data_dir": files / "rows", "context": "none"}
    request = request_of(str(files / f"model{seed}"), common)
    say = Silent().say
    if kind == "copying":
        from tests.plugin.copying import plan_copying

        return plan_copying(request, say)
    if kind == "longbench":
        from evalkit.benchmarks.longbench.plan import LongBenchRequest, plan_longbench

        return plan_longbench(LongBenchRequest(request, tasks=("qasper",), window=400), say)
    if kind == "needle":
        from evalkit.benchmarks.needle.plan import NeedleRequest, plan_needle

        return plan_needle(NeedleRequest(request, lengths=(200, 300), depths=(0.0, 50.0), repeats=2), say)
    from evalkit.benchmarks.run import planned

    return planned(request, say)


def made(kind: str, files: Path, output: Path, seed: int = 0) -> Run:
    """A finished run of a kind."""
    return run_plan(plan(kind, files, output, seed), Silent())


def tables(run: Run) -> dict[str, pd.DataFrame]:
    """All that was computed, but for times."""
    names = [name for name in run.files if name.endswith(".parquet")]
    assert names
    return {name: run.table(name, ()).drop(columns="seconds", errors="ignore") for name in names}


def batches_in(output: Path) -> int:
    """Lines of the journal of the one run there."""
    return sum(path.read_bytes().count(b"\n") for path in output.glob(f"*/{JOURNAL}"))


def same(one: Run, other: Run) -> None:
    """To the last bit."""
    found, expected = tables(one), tables(other)
    assert found.keys() == expected.keys()
    for name, table in expected.items():
        pd.testing.assert_frame_equal(found[name], table, check_exact=True)


@pytest.fixture(scope="module")
def runs(files: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Run]:
    """A finished run of each kind for both checkpoints. Not to be changed."""
    output = tmp_path_factory.mktemp("runs")
    return {(kind, seed): made(kind, files, output / kind / str(seed), seed) for kind in KINDS for seed in (0, 1)}


@pytest.mark.parametrize("kind", KINDS)
def test_it_names_its_benchmark_and_is_listed(kind: str, runs: dict[tuple[str, int], Run]) -> None:
    run = runs[kind, 0]
    assert run.manifest["kind"] == run.kind == kind
    assert benchmark_of(run) is benchmark(kind)
    [listed] = list_found(run.folder.parent)
    assert listed.state == "finished"
    assert listed.result
    metrics = benchmark_of(run).metrics(run)
    assert {metric.task for metric in metrics} == set(run.manifest["documents"])
    assert all(metric.n > 0 for metric in metrics)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", [1, 3])
def test_an_interrupted_run_goes_on(
    kind: str, after: int, runs: dict[tuple[str, int], Run], files: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    append, written = Journal.append, []

    def stops(own: Journal, entry: Any) -> None:
        if len(written) == after:
            raise KeyboardInterrupt
        append(own, entry)
        written.append(entry)

    with monkeypatch.context() as during:
        during.setattr(Journal, "append", stops)
        with pytest.raises(KeyboardInterrupt):
            made(kind, files, tmp_path)
    assert batches_in(tmp_path) == after
    kept = next(tmp_path.glob(f"*/{JOURNAL}")).read_bytes()
    finished = made(kind, files, tmp_path)
    same(finished, runs[kind, 0])
    assert (finished.folder / JOURNAL).read_bytes().startswith(kept)
    assert batches_in(tmp_path) == (runs[kind, 0].folder / JOURNAL).read_bytes().count(b"\n")


def _run(kind: str, files: Path, output: Path, installed: str) -> None:
    sys.path.insert(0, installed)
    made(kind, files, output)


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] * (k != "copying")) for k in KINDS])
def test_a_killed_run_goes_on(
    kind: str, runs: dict[tuple[str, int], Run], files: Path, tmp_path: Path, plugin: Path
) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_run, args=(kind, files, tmp_path, str(plugin)))
    process.start()
    end = time.monotonic() + 120
    while batches_in(tmp_path) < 2 and process.is_alive() and time.monotonic() < end:
        time.sleep(0.001)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert batches_in(tmp_path) >= 2
    assert not list(tmp_path.glob(f"*/{RESULTS}"))
    same(made(kind, files, tmp_path), runs[kind, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_finished_run_loads_no_model(
    kind: str, runs: dict[tuple[str, int], Run], files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evalkit.benchmarks.session.load_model", lambda *_: pytest.fail("a model was loaded"))
    again = made(kind, files, runs[kind, 0].folder.parent)
    assert again.folder == runs[kind, 0].folder
    # Nor does one whose results are gone, since the journal has all of it
    (again.folder / RESULTS).unlink()
    same(made(kind, files, again.folder.parent), runs[kind, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_can_be_computed_elsewhere(kind: str, runs: dict[tuple[str, int], Run], files: Path) -> None:
    """In any order, each from its pickle alone; planned without weights, from facts that went through a pickle too."""
    served_by, one = benchmark(kind), plan(kind, files, Path("none"))
    loaded = load_model(one.checkpoint, one.common, one.manifest["specification"], Silent())
    computer = served_by.computer(one, loaded, Budget(BUDGET[kind], BUDGET[kind]), Silent().say)
    facts = pickle.loads(pickle.dumps(computer.facts))
    assert asdict(facts) == asdict(computer.facts)
    planned = served_by.batches(one, facts, loaded.tokenizer, Held(served_by.key), Silent().say)
    pickled = [pickle.dumps(batch) for batch in planned.batches]
    assert len(pickled) > 2
    held = Held(served_by.key)
    for batch in map(pickle.loads, pickled[::-1]):
        held.keep(batch.journal or batch.task, 0.0, computer.compute(batch))
    assert not served_by.is_missing(one, held)
    stored = Held(served_by.key)
    run = runs[kind, 0]
    for entry in Journal(run.folder / JOURNAL, run.manifest["id"], pytest.fail).read(served_by.row):
        stored.keep(entry.task, entry.seconds, [served_by.row(*row) for row in entry.rows])
    assert without_times(held) == without_times(stored)


def without_times(held: Held) -> dict[Any, list[Any]]:
    """Rows by key."""
    return {
        key: [row._replace(seconds=0.0) if hasattr(row, "seconds") else row for row in rows]
        for key, rows in held.rows.items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_two_runs_are_compared(kind: str, runs: dict[tuple[str, int], Run]) -> None:
    a, b = runs[kind, 0], runs[kind, 1]
    found = compare(pair(Side("a", (a,)), Side("b", (b,)), {}))
    assert {task.name for task in found.tasks} == set(a.manifest["documents"])
    assert found.measure.graded is (a.rule is None)
    metrics = [{m.task: m for m in reversed(benchmark_of(run).metrics(run))} for run in (a, b)]
    if kind != "lm_eval":  # whose own metric need not be the rule's
        for task in found.tasks:
            scale = metrics[0][task.name].bounds[1]
            values = [float(one[task.name].value) / scale for one in metrics]
            assert task.difference == pytest.approx(values[1] - values[0], abs=2e-4)  # LongBench's are rounded


@pytest.mark.parametrize("kind", ["multiple_choice", "longbench", "copying"])
def test_it_fills_a_table(kind: str, runs: dict[tuple[str, int], Run], tmp_path: Path, capsys: Any) -> None:
    task = next(iter(runs[kind, 0].manifest["documents"]))
    layout = {
        "caption": "Made up.",
        "suite": runs[kind, 0].manifest["specification"]["suite"],
        "rows": [{"items": {"a": "First", "b": "Second"}}],
        "columns": [{"items": {task: "T"}}],
    }
    rows = {name: str(runs[kind, seed].folder) for seed, name in enumerate("ab")}
    (tmp_path / "layout.yaml").write_text(json.dumps(layout), encoding="utf-8")
    (tmp_path / "runs.yaml").write_text(json.dumps({"rows": rows}), encoding="utf-8")
    given = ["table", str(tmp_path / "layout.yaml"), "--source", "runs", "--runs", str(tmp_path / "runs.yaml")]
    with pytest.raises(SystemExit) as left:
        main([*given, "--format", "csv"])
    out, err = capsys.readouterr()
    assert left.value.code in (0, None), err
    printed = [line.split(",") for line in out.splitlines()]
    assert [row[0] for row in printed[1:3]] == ["a", "b"]
    for row, seed in zip(printed[1:3], (0, 1), strict=True):
        assert float(row[-1]) == pytest.approx(float(accuracies(runs[kind, seed], None)[task][0]), abs=0.051)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_exported(kind: str, runs: dict[tuple[str, int], Run], tmp_path: Path) -> None:
    if kind == "lm_eval":
        assert export_run(runs[kind, 0], "lm_eval", output=tmp_path)
        return
    [path] = export_run(runs[kind, 0], "every_eval_ever", output=tmp_path)
    content = json.loads(path.read_text(encoding="utf-8"))
    named = {one["evaluation_name"] for one in content["evaluation_results"]}
    assert named == set(runs[kind, 0].manifest["documents"])
    assert all(0 <= one["score_details"]["score"] <= 1 for one in content["evaluation_results"])


def test_a_run_of_a_benchmark_that_is_not_installed(runs: dict[tuple[str, int], Run], monkeypatch: Any) -> None:
    from evalkit.errors import RunError

    run = load_run(runs["copying", 0].folder)
    monkeypatch.setattr("evalkit.benchmarks.registry.entry_points", lambda group: ())
    benchmark.cache_clear()
    with pytest.raises(RunError, match="is of benchmark 'copying', which is not installed"):
        benchmark_of(run)
    monkeypatch.undo()
    benchmark.cache_clear()
