"""Properties of every benchmark, evalkit's own and another package's, by the same tests."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from evalkit.benchmarks.base import Budget
from evalkit.benchmarks.registry import GROUP, benchmark, benchmark_of, differences, kind_of_suite
from evalkit.benchmarks.run import planned
from evalkit.benchmarks.run_listing import list_found
from evalkit.benchmarks.session import ModelHolder, run_plan
from evalkit.cli import main
from evalkit.cli.listing import suites
from evalkit.comparison.comparison import compare
from evalkit.comparison.pairing import pair
from evalkit.comparison.sides import Side
from evalkit.display import Progress
from evalkit.errors import UnknownNameError, UsageError
from evalkit.exchange.exports import export_run
from evalkit.runs.folder import JOURNAL, MANIFEST, RESULTS, Run, load_run
from evalkit.runs.journal import Entry, FinishedRows, Journal
from evalkit.tables.measured import accuracies
from tests.benchmarks.longbench.made import record, write
from tests.devices import needs_cuda
from tests.documents import made_up
from tests.marks import fast
from tests.printed import printed
from tests.sealed import read, reseal
from tests.tiny import tiny_checkpoint

KINDS = (
    "multiple_choice",
    "prompt_variants",
    "lm_eval",
    "longbench",
    "needle",
    "attention",
    "perplexity",
    "copying",
    "norms",
)
BUDGET = {
    "multiple_choice": 128,
    "prompt_variants": 128,
    "lm_eval": 128,
    "longbench": 900,
    "needle": 700,
    "attention": None,
    "perplexity": 128,
    "copying": 60,
    "norms": 60,
}
"""Small, so that there are many batches."""
LABELS = {
    "multiple_choice": {"PIQA", "BoolQ"},
    "prompt_variants": {"PIQA", "BoolQ"},
    "lm_eval": {"PIQA", "BoolQ"},
    "longbench": {"Qasper"},
    "needle": {"needle"},
    "attention": {"PIQA", "BoolQ"},
    "perplexity": {"lines"},
    "copying": {"Copying"},
    "norms": {"norms"},
}
"""How each one's tasks are printed."""


class Silent(Progress):
    """Prints nothing."""

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
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "lines.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def asked(kind: str, files: Path, output: Path, device: str = "cpu") -> dict[str, Any]:
    """Return the arguments of a run of a kind."""
    common: dict[str, Any] = {"output": output, "device": device, "dtype": "float32", "token_budget": BUDGET[kind]}
    if kind in ("multiple_choice", "prompt_variants", "lm_eval", "attention"):
        common |= {"data_dir": files / "documents", "allow_unofficial_data": True, "tasks": ("piqa", "boolq")}
    if kind == "prompt_variants":
        common |= {"vary": ("template", "system_prompt")}
    elif kind != "multiple_choice":
        common |= {"suite": kind}
    if kind == "longbench":
        common |= {"data_dir": files / "rows", "context": "none", "tasks": "qasper", "max_prompt_tokens": 400}
    if kind == "copying":
        common |= {"lists": 12}
    if kind == "norms":
        common |= {"count": 12}
    if kind == "attention":
        common |= {"measures": ("bos", "entropy", "similarity"), "sample": 7}
    if kind == "perplexity":
        common |= {"text": (str(files / "lines.jsonl"),), "stride": 100}
    if kind == "needle":
        common |= {"lengths": (200, 300), "depths": (0, 50), "repeats": 2}
    return common


def plan(kind: str, files: Path, output: Path, seed: int = 0, device: str = "cpu") -> Any:
    """A run of a kind."""
    return planned(files / f"model{seed}", asked(kind, files, output, device), Silent().say)


def made(kind: str, files: Path, output: Path, seed: int = 0, device: str = "cpu") -> Run:
    """A finished run of a kind."""
    return run_plan(plan(kind, files, output, seed, device), Silent())


def tables(run: Run) -> dict[str, pd.DataFrame]:
    """Return everything computed, except times."""
    names = [name for name in run.files if name.endswith(".parquet")]
    assert names
    return {name: run.table(name, ()).drop(columns="seconds", errors="ignore") for name in names}


def batches_in(output: Path) -> int:
    """Return the lines of the journal of the only run there."""
    return sum(path.read_bytes().count(b"\n") for path in output.glob(f"*/{JOURNAL}"))


def same(one: Run, other: Run) -> None:
    """Equal to the last bit."""
    found, expected = tables(one), tables(other)
    assert found.keys() == expected.keys()
    for name, table in expected.items():
        pd.testing.assert_frame_equal(found[name], table, check_exact=True)


@pytest.fixture(scope="module")
def runs(files: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Run]:
    """A finished run of each kind for both checkpoints. Do not modify."""
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


@pytest.mark.parametrize("kind", fast(["multiple_choice", "lm_eval", "perplexity"], KINDS))
def test_dropout_of_the_tokenizer_has_no_effect(
    kind: str, runs: dict[tuple[str, int], Run], files: Path, tmp_path: Path
) -> None:
    if not (folder := files / "model2").is_dir():
        shutil.copytree(files / "model0", folder)
        content = read(folder, "tokenizer.json")
        content["model"]["dropout"] = 0.5
        (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    same(made(kind, files, tmp_path, 2), runs[kind, 0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", fast([1], [1, 3]))
def test_an_interrupted_run_resumes(
    kind: str, after: int, runs: dict[tuple[str, int], Run], files: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    interrupt_and_resume(kind, after, runs[kind, 0], files, tmp_path, monkeypatch)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("kind", KINDS[:6])
def test_an_interrupted_run_resumes_on_a_gpu(kind: str, files: Path, tmp_path: Path, monkeypatch: Any) -> None:
    whole = made(kind, files, tmp_path / "whole", device="cuda")
    assert all(entry["device"].startswith("cuda") for entry in whole.manifest["devices"])
    interrupt_and_resume(kind, 3, whole, files, tmp_path / "resumed", monkeypatch, "cuda")


def interrupt_and_resume(
    kind: str, after: int, whole: Run, files: Path, output: Path, monkeypatch: Any, device: str = "cpu"
) -> None:
    """Stop a run after some batches and resume it: the result must equal the whole run's, to the last bit."""
    append, written = Journal.append, []

    def stops(own: Journal, entry: Any, rows: Any, packed: Any = None) -> Any:
        if len(written) == after:
            raise KeyboardInterrupt
        written.append(entry)
        return append(own, entry, rows)

    with monkeypatch.context() as during:
        during.setattr(Journal, "append", stops)
        with pytest.raises(KeyboardInterrupt):
            made(kind, files, output, device=device)
    assert batches_in(output) == after
    kept = next(output.glob(f"*/{JOURNAL}")).read_bytes()
    finished = made(kind, files, output, device=device)
    same(finished, whole)
    assert (finished.folder / JOURNAL).read_bytes().startswith(kept)
    assert batches_in(output) == (whole.folder / JOURNAL).read_bytes().count(b"\n")


def _run(kind: str, files: Path, output: Path, installed: str) -> None:
    sys.path.insert(0, installed)
    made(kind, files, output)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_resumes(
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
    monkeypatch.setattr("evalkit.benchmarks.session.load_checked", lambda *_: pytest.fail("a model was loaded"))
    again = made(kind, files, runs[kind, 0].folder.parent)
    assert again.folder == runs[kind, 0].folder
    # Neither does a run without results, since the journal has everything
    (again.folder / RESULTS).unlink()
    same(made(kind, files, again.folder.parent), runs[kind, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_line_runs_and_shows_it(
    kind: str, runs: dict[tuple[str, int], Run], files: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """`evalkit run --suite` with settings by `--set` gives the run that Python made."""
    monkeypatch.setattr("evalkit.benchmarks.session.load_checked", lambda *_: pytest.fail("a model was loaded"))
    command = ["run", str(files / "model0")]
    for name, value in asked(kind, files, runs[kind, 0].folder.parent).items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        if value is None:
            continue
        own = name in (
            "max_prompt_tokens",
            "lengths",
            "depths",
            "repeats",
            "lists",
            "count",
            "measures",
            "text",
            "stride",
        )
        flag = f"--{name.replace('_', '-')}"
        command += ["--set", f"{name}={text}"] if own else [flag] if value is True else [flag, text]
    for form in ("terminal", "json"):
        with pytest.raises(SystemExit) as ended:
            main([*command, "--format", form])
        out = capsys.readouterr().out
        assert ended.value.code == 0
        assert str(runs[kind, 0].folder) in out
        assert form == "terminal" or json.loads(out)["tasks"]
    for setting, said in (("nowhere=1", "'nowhere'"), ("output=x", "--output"), ("max_prompt_tokens", "KEY=VALUE")):
        with pytest.raises(SystemExit) as ended:
            main([*command, "--set", setting])
        assert ended.value.code == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_can_be_computed_elsewhere(
    kind: str, runs: dict[tuple[str, int], Run], files: Path, tmp_path: Path
) -> None:
    """In any order, each from its pickle alone; planned without weights, from unpickled facts."""
    served_by, one = benchmark(kind), plan(kind, files, Path("none"))
    loaded = ModelHolder().model_of(one, Silent().say)
    computer = served_by.computer(
        pickle.loads(pickle.dumps(served_by.setup(one))), loaded, Budget(BUDGET[kind], BUDGET[kind]), Silent().say
    )
    facts = pickle.loads(pickle.dumps(computer.facts))
    assert asdict(facts) == asdict(computer.facts)
    finished = FinishedRows(Journal(tmp_path / JOURNAL, one.manifest["id"], served_by.row, pytest.fail), served_by.key)
    planned = served_by.batches(one, facts, loaded.tokenizer, finished, Silent().say)
    pickled = [pickle.dumps(batch) for batch in planned.batches]
    assert len(pickled) > 2
    for batch in map(pickle.loads, pickled[::-1]):
        finished.append(
            Entry(batch.journal or batch.task, batch.number, 0.0, computer.place(batch)), computer.compute(batch)
        )
    assert not served_by.is_missing(one, finished)
    run = runs[kind, 0]
    stored = FinishedRows(Journal(run.folder / JOURNAL, run.manifest["id"], served_by.row, pytest.fail), served_by.key)
    tasks = {entry.task for entry in finished.entries}
    assert tasks == {entry.task for entry in stored.entries}
    # Read in the order of the batches' numbers, whatever the order that they were computed in
    for task in tasks:
        assert without_times(finished.rows(task)) == without_times(stored.rows(task))


def without_times(rows: Iterable[Any]) -> list[Any]:
    """Return rows that are equal if and only if the computed values are."""
    return [row._replace(seconds=0.0) if hasattr(row, "seconds") else row for row in rows]


@pytest.mark.parametrize("kind", KINDS)
def test_two_runs_are_compared(kind: str, runs: dict[tuple[str, int], Run]) -> None:
    a, b = runs[kind, 0], runs[kind, 1]
    rule = "bos_abs" if kind == "attention" else None
    found = compare(pair(Side("a", (a,)), Side("b", (b,)), {}), rule)
    assert {task.name for task in found.tasks} == set(a.manifest["documents"])
    assert {label.full for label in found.labels.values()} == LABELS[kind]
    # Several prompts give a document a share of them
    assert found.measure.graded is (a.rule is None or kind == "prompt_variants")
    metrics = [
        {m.task: m for m in reversed(benchmark_of(run).metrics(run)) if rule in (None, m.name)} for run in (a, b)
    ]
    if kind == "perplexity":  # the run's own number is over all bytes, the compared one a mean over documents
        metrics = [
            {m.task: m for m in benchmark_of(run).metrics(run) if m.name == "document_bits_per_byte"} for run in (a, b)
        ]
    if kind != "lm_eval":  # whose own metric need not be the rule's
        for task in found.tasks:
            bounds = metrics[0][task.name].bounds
            scale = 1 if bounds is None else bounds[1]
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
    results = content["evaluation_results"]
    assert len({one["evaluation_result_id"] for one in results}) == len(results)
    for one, metric in zip(results, benchmark_of(runs[kind, 0]).metrics(runs[kind, 0]), strict=True):
        score, bounded = one["score_details"]["score"], metric.bounds is not None
        assert score == pytest.approx(metric.value / (metric.bounds[1] if bounded else 1))
        assert ("min_score" in one["metric_config"]) is bounded
        assert one["metric_config"]["metric_parameters"].get("layer") == metric.layer


@pytest.mark.parametrize("kind", KINDS)
def test_it_says_what_must_agree_without_reading_a_table(
    kind: str, runs: dict[tuple[str, int], Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = runs[kind, 0], runs[kind, 1]
    monkeypatch.setattr(Run, "table", lambda *_: pytest.fail("a table was read"))
    for task in a.manifest["documents"]:
        agreed = benchmark_of(a).comparable(a).must_agree(task)
        assert agreed == benchmark_of(b).comparable(b).must_agree(task)
        assert agreed
        assert all(agreed.values())
    assert differences(a, b) == []
    # Other documents are another measurement
    other = Path(shutil.copytree(b.folder, tmp_path / "other"))
    manifest = json.dumps(read(other, MANIFEST))
    (other / MANIFEST).write_text(manifest.replace(list(agreed.values())[-1], "otherwise"), encoding="utf-8")
    reseal(other)
    assert [mine.refused for mine, _ in differences(a, load_run(other))] == [True]


@pytest.mark.parametrize("kind", KINDS)
def test_results_of_another_form_are_refused(kind: str, runs: dict[tuple[str, int], Run], tmp_path: Path) -> None:
    """As written by an earlier version; each benchmark defines its own required keys."""
    from evalkit.errors import RunError

    folder = Path(shutil.copytree(runs[kind, 0].folder, tmp_path / runs[kind, 0].folder.name))
    assert benchmark_of(load_run(folder)).kind == kind
    content = read(folder, RESULTS)
    (folder / RESULTS).write_text(json.dumps(content | {"tasks": [{"task": "a"}]}), encoding="utf-8")
    reseal(folder)
    with pytest.raises(
        RunError, match=r"results.json is damaged \(it lacks 'tasks\[0\]\.\w+'\); delete results.json and run"
    ):
        benchmark_of(load_run(folder))
    assert [one.state for one in list_found(tmp_path)] == ["damaged"]


def test_a_package_that_cannot_be_loaded_breaks_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    about = tmp_path / "broken-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n", encoding="utf-8")
    (about / "entry_points.txt").write_text(f"[{GROUP}]\nbroken = no_such_module:Broken\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match=r"benchmark 'broken' \(no_such_module:Broken\) cannot be loaded \(ModuleNotF"):
        benchmark("broken")
    with pytest.raises(UnknownNameError, match="unknown suite 'copyin': did you mean 'copying'"):
        kind_of_suite("copyin")
    assert "broken  " in printed(suites())
    assert "copying  " in printed(suites())


def test_a_measure_by_layer_is_compared(runs: dict[tuple[str, int], Run], capsys: Any) -> None:
    """Signed, unbounded, without a better direction: a line for each layer, in its own unit."""
    a, b = runs["copying", 0], runs["copying", 1]
    found = compare(pair(Side("a", (a,)), Side("b", (b,)), {}), "lead")
    assert [(task.name, task.layer) for task in found.tasks] == [(f"copying layer {n}", n) for n in (0, 1, 2)]
    tables = [run.table("answers.parquet", ()) for run in (a, b)]
    apart = [tables[1][f"lead {n}"] - tables[0][f"lead {n}"] for n in (0, 1, 2)]
    for task, values in zip(found.tasks, apart, strict=True):
        assert task.difference == pytest.approx(values.mean())
        assert task.stderr == pytest.approx(values.sem())
        assert (task.won, task.lost) == ((values > 0).sum(), (values < 0).sum())
        assert task.low < task.difference < task.high
    assert max(abs(task.difference) for task in found.tasks) > 1  # no share
    # Layers answer the same documents, so their mean is taken by document
    assert found.average.stderr == pytest.approx((sum(apart) / 3).sem())
    # Other quantities are not listed as rules of this one
    assert [one.rule for one in found.rules] == ["lead"]
    given = ["compare", str(a.folder), str(b.folder), "--rule"]
    code, out, _ = ended(capsys, *given, "lead")
    assert code == 0
    assert "Copying, layer 2" in out
    assert "points;" not in out
    code, _, err = ended(capsys, *given, "led")
    assert (code, "unknown measure" in err) == (2, True)
    code, _, err = ended(capsys, *given, "lead", "--fail-if-worse")
    assert (code, "of lead neither higher nor lower is better" in err) == (2, True)


def ended(capsys: Any, *given: str) -> tuple[int, str, str]:
    """Return a command's exit code and output."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main(list(given))
    return int(left.value.code or 0), *capsys.readouterr()


def test_a_run_of_a_benchmark_that_is_not_installed(runs: dict[tuple[str, int], Run], monkeypatch: Any) -> None:
    from evalkit.errors import RunError

    run = load_run(runs["copying", 0].folder)
    monkeypatch.setattr("evalkit.plugins.entry_points", lambda group: ())
    benchmark.cache_clear()
    with pytest.raises(RunError, match="is of benchmark 'copying', which is not installed"):
        benchmark_of(run)
    monkeypatch.undo()
    benchmark.cache_clear()
