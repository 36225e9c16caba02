"""One contract for every benchmark, evalkit's own and another package's."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from evalkit.benchmarks.differences import differences
from evalkit.benchmarks.registry import GROUP, benchmark, kind_of_suite, results_of
from evalkit.benchmarks.run_listing import list_found
from evalkit.benchmarks.session import ModelHolder
from evalkit.cli import main
from evalkit.cli.listing import suites
from evalkit.comparison.comparison import Comparison, compare_pairing
from evalkit.comparison.pairing import pair
from evalkit.comparison.sides import Side
from evalkit.errors import RunError, ScoringError, UnknownNameError, UsageError
from evalkit.exchange.exports import export_run
from evalkit.models.loading.locate import silent
from evalkit.requests.batches import Budget
from evalkit.runs.folder import JOURNAL, MANIFEST, RESULTS, Run, load_run
from evalkit.runs.journal import Entry, FinishedRows, Journal
from tests.benchmarks.kinds import KINDS, files, made, options_of, plan, same
from tests.devices import needs_cuda
from tests.marks import fast
from tests.packages import install
from tests.printed import printed
from tests.sealed import read, reseal
from tests.tiny import VOCABULARY, add_tokens

Made = Callable[..., Run]
every_kind = pytest.mark.parametrize("kind", KINDS)

__all__ = ["files"]  # a fixture


def batches_in(output: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in output.glob(f"*/{JOURNAL}"))


@pytest.fixture(scope="module")
def runs(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A finished run of a kind and a checkpoint, made at the first use. Do not modify.

    Of the first checkpoint it was interrupted after a batch, and resumed.
    """
    output, finished = tmp_path_factory.mktemp("runs"), {}

    def run(kind: str, seed: int = 0) -> Run:
        if (kind, seed) not in finished:
            folder = output / kind / str(seed)
            finished[kind, seed] = made(kind, files, folder, 1) if seed else resumed(kind, 1, files, folder)
        return finished[kind, seed]

    return run


def resumed(kind: str, after: int, files: Path, output: Path, device: str = "cpu") -> Run:
    """A run that was interrupted after some batches, and has gone on with the others."""
    append, written = Journal.append, []

    def stops(own: Journal, entry: Any, *rows: Any) -> Any:
        if len(written) == after:
            raise KeyboardInterrupt
        written.append(entry)
        return append(own, entry, *rows)

    with pytest.MonkeyPatch.context() as during, pytest.raises(KeyboardInterrupt):
        during.setattr(Journal, "append", stops)
        made(kind, files, output, device=device)
    kept = next(output.glob(f"*/{JOURNAL}")).read_bytes()
    assert kept.count(b"\n") == after and not list(output.glob(f"*/{RESULTS}"))
    run = made(kind, files, output, device=device)
    assert (run.folder / JOURNAL).read_bytes().startswith(kept) and batches_in(output) > after
    return run


def ended(capsys: Any, *command: object) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main(list(map(str, command)))
    return int(left.value.code or 0), *capsys.readouterr()


@every_kind
def test_it_names_its_benchmark_and_is_listed_and_opened_without_a_model(
    kind: str, runs: Made, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs(kind)
    assert run.manifest["kind"] == run.kind == kind and isinstance(results_of(run), benchmark(kind).read)
    [listed] = list_found(run.folder.parent)
    assert listed.state == "finished" and listed.result
    metrics = results_of(run).metrics()
    assert {metric.task for metric in metrics} == set(run.manifest["documents"])
    assert all(metric.n > 0 for metric in metrics)
    monkeypatch.setattr("evalkit.benchmarks.session.load_checked", lambda *_: pytest.fail("a model was loaded"))
    assert made(kind, files, run.folder.parent).folder == run.folder
    # Neither for a run without results, since the journal has everything
    (run.folder / RESULTS).unlink()
    same(made(kind, files, run.folder.parent), run)


@pytest.mark.slow
@every_kind
def test_an_interrupted_run_resumes(kind: str, runs: Made, files: Path, tmp_path: Path) -> None:
    whole = made(kind, files, tmp_path / "whole")
    same(runs(kind), whole)
    same(resumed(kind, 3, files, tmp_path / "resumed"), whole)


@pytest.mark.parametrize("kind", fast(["lm_eval", "perplexity"], [kind for kind in KINDS if kind != "norms"]))
def test_an_added_token_beyond_the_embedding_is_refused_where_a_text_has_it(
    kind: str, runs: Made, files: Path, tmp_path: Path
) -> None:
    def changed(token: str, number: int) -> int:
        folder = shutil.copytree(files / "model0", files / f"model{number}", dirs_exist_ok=True)
        content = read(folder, "tokenizer.json")
        add_tokens(content, token)
        (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
        return number

    same(made(kind, files, tmp_path, changed("<unused>", 3)), runs(kind))
    # With a space, which no token of the vocabulary is written with
    with pytest.raises(ScoringError, match=rf" \S+: its text has the token ' .' \(id {VOCABULARY}\)"):
        made(kind, files, tmp_path, changed({"copying": " 1", "ruler": " m"}.get(kind, " w"), 4))


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("kind", [*KINDS][:6])
def test_an_interrupted_run_resumes_on_a_gpu(kind: str, files: Path, tmp_path: Path) -> None:
    whole = made(kind, files, tmp_path / "whole", device="cuda")
    assert all(entry["device"].startswith("cuda") for entry in whole.manifest["devices"])
    same(resumed(kind, 3, files, tmp_path / "resumed", "cuda"), whole)


def test_dropout_of_the_tokenizer_has_no_effect(runs: Made, files: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(files / "model0", files / "model2")
    content = read(folder, "tokenizer.json")
    content["model"]["dropout"] = 0.5
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    same(made("multiple_choice", files, tmp_path, 2), runs("multiple_choice"))


@every_kind
def test_the_command_line_opens_and_shows_it(
    kind: str, runs: Made, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    options, settings = options_of(kind, files, runs(kind).folder.parent)
    monkeypatch.setattr("evalkit.benchmarks.session.load_checked", lambda *_: pytest.fail("a model was loaded"))

    def text(value: Any) -> str:
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)

    command = ["run", str(files / "model0")]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        command += [flag] if value is True else [flag, text(value)] if value is not None else []
    command += [part for name, value in settings.items() for part in ("--set", f"{name}={text(value)}")]
    code, out, _ = ended(capsys, *command, "--format", "json")
    assert code == 0 and str(runs(kind).folder) in out and json.loads(out)["tasks"]
    code, _, err = ended(capsys, *command, "--set", "nowhere=1")
    assert (code, "setting" in err) == (2, True)


@every_kind
def test_what_loading_the_model_reported_is_in_its_report(kind: str, runs: Made, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs(kind).folder, tmp_path / "noted"))
    manifest = read(folder, MANIFEST)
    manifest["loaded"]["remarks"] = ["settings are unread"]
    (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    reseal(folder)
    run = load_run(folder)
    assert "settings are unread" in printed(results_of(run).report())


@every_kind
def test_a_batch_can_be_computed_elsewhere(kind: str, runs: Made, files: Path, tmp_path: Path) -> None:
    """In any order, each from its pickle alone; planned without weights, from unpickled facts."""
    served_by, planned_run = benchmark(kind).computation, plan(kind, files, Path("none"))
    loaded = ModelHolder().model_of(planned_run, silent)
    candidates, budget = pickle.loads(pickle.dumps(served_by.candidates(planned_run))), KINDS[kind].budget
    computer = served_by.computer(candidates, loaded, Budget(budget, budget), silent)
    facts = pickle.loads(pickle.dumps(computer.facts))
    assert asdict(facts) == asdict(computer.facts)

    def rows_in(folder: Path) -> FinishedRows:
        journal = Journal(folder / JOURNAL, planned_run.manifest["id"], served_by.rows, pytest.fail)
        return FinishedRows(journal, served_by.key)

    finished, stored = rows_in(tmp_path), rows_in(runs(kind).folder)
    batches = served_by.batches(planned_run, facts, loaded.tokenizer, finished, silent).batches
    pickled = [pickle.dumps(batch) for batch in batches]
    assert len(pickled) > 2
    for batch in map(pickle.loads, pickled[::-1]):
        finished.append(Entry(*batch.key, 0.0, computer.place(batch)), computer.compute(batch), batch.row)
    assert not served_by.is_missing(planned_run, finished)
    tasks = {entry.task for entry in finished.entries}
    assert tasks == {entry.task for entry in stored.entries}
    # Read in the order of the batches' numbers, whatever the order that they were computed in
    for task in tasks:
        assert without_times(finished.rows(task)) == without_times(stored.rows(task))


def without_times(rows: Iterable[Any]) -> list[Any]:
    """Rows that are equal if and only if the computed values are."""
    return [row._replace(seconds=0.0) if hasattr(row, "seconds") else row for row in rows]


def compared(a: Run, b: Run, rule: str | None = None) -> Comparison:
    return compare_pairing(pair(Side("a", (a,)), Side("b", (b,)), {}), rule)


@every_kind
def test_two_runs_are_compared(kind: str, runs: Made) -> None:
    both = a, b = runs(kind), runs(kind, 1)
    rule = "bos_abs" if kind == "attention" else None
    found = compared(a, b, rule)
    assert {task.name for task in found.tasks} == set(a.manifest["documents"])
    assert {label.full for label in found.labels.values()} == KINDS[kind].labels
    # Several prompts give a document a share of them
    assert found.measure.graded is (a.rule is None or kind == "prompt_variants")
    # Perplexity's own number is over all bytes, the compared one a mean over documents
    name = {"attention": rule, "perplexity": "document_bits_per_byte"}.get(kind)
    metrics = [{m.task: m for m in reversed(results_of(run).metrics()) if name in (None, m.name)} for run in both]
    for task in found.tasks if kind != "lm_eval" else ():  # whose own metric need not be the rule's
        bounds = metrics[0][task.name].bounds
        values = [float(of_run[task.name].value) / (1 if bounds is None else bounds[1]) for of_run in metrics]
        assert task.difference == pytest.approx(values[1] - values[0], abs=2e-4)  # LongBench's are rounded


SCALE = {"metric", "unit", "higher_is_better"}


@every_kind
def test_every_stored_value_says_what_it_is(kind: str, runs: Made) -> None:
    """No name of one metric stands for another's value: of no kind's is "accuracy" a key."""
    stored = runs(kind).stored
    assert '"accuracy":' not in json.dumps(stored)
    for average in stored["averages"]:
        assert average.keys() >= SCALE | {"name", "value", "stderr"}
    metrics = {metric.task: metric for metric in reversed(results_of(runs(kind)).metrics())}
    for task in stored["tasks"] if kind not in ("copying", "norms") else ():  # whose results are their own
        first = task
        if "metrics" in task:
            first = task["metrics"][0]
        elif "measures" in task:
            name, measured = next(iter(task["measures"].items()))
            first = measured | {"metric": name}
        elif "all" in task:
            first = task | task["all"]
        metric = metrics[task["task"]]
        unit, direction, value = first["unit"], first["higher_is_better"], first["value"]
        assert (unit, direction, value) == (metric.unit, metric.higher_is_better, metric.value)
        assert first["metric"] == metric.name or kind == "prompt_variants"


@every_kind
def test_documents_have_the_number_that_is_scored_and_that_of_the_task(kind: str, runs: Made, files: Path) -> None:
    documents = runs(kind).manifest["documents"]
    assert {metric.task: metric.n for metric in results_of(runs(kind)).metrics()} == {
        task: about["count"] for task, about in documents.items()
    }
    totals = {task: about["total"] for task, about in documents.items()}
    if kind in ("multiple_choice", "prompt_variants", "lm_eval", "longbench", "attention"):
        changes = {"sample": 2} if kind == "attention" else {"limit": 2}
        selected = plan(kind, files, Path("none"), **changes).manifest["documents"]
        assert {task: (about["count"], about["total"]) for task, about in selected.items()} == {
            task: (2, total) for task, total in totals.items()
        }
    if kind in ("prompt_variants", "attention"):  # a limit of 6, a sample of 7
        assert set(totals.values()) == {12}


@every_kind
def test_it_is_exported(kind: str, runs: Made, tmp_path: Path) -> None:
    if kind == "lm_eval":
        assert export_run(runs(kind), "lm_eval", output=tmp_path)
        return
    [path] = export_run(runs(kind), "every_eval_ever", output=tmp_path)
    results = json.loads(path.read_text(encoding="utf-8"))["evaluation_results"]
    assert {result["evaluation_name"] for result in results} == set(runs(kind).manifest["documents"])
    assert len({result["evaluation_result_id"] for result in results}) == len(results)
    for result, metric in zip(results, results_of(runs(kind)).metrics(), strict=True):
        scale = 1 if metric.bounds is None else metric.bounds[1]
        assert result["score_details"]["score"] == pytest.approx(metric.value / scale)
        assert ("min_score" in result["metric_config"]) is (metric.bounds is not None)
        assert result["metric_config"]["metric_parameters"].get("layer") == metric.layer


@every_kind
def test_it_says_what_must_agree_without_reading_a_table(
    kind: str, runs: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = runs(kind), runs(kind, 1)
    monkeypatch.setattr(Run, "table", lambda *_: pytest.fail("a table was read"))
    for task in a.manifest["documents"]:
        agreed = results_of(a).comparable().must_agree(task)
        assert agreed == results_of(b).comparable().must_agree(task)
        assert agreed and all(agreed.values())
    assert differences(a, b) == []
    # Other documents are another measurement
    other = Path(shutil.copytree(b.folder, tmp_path / "other"))
    manifest = json.dumps(read(other, MANIFEST))
    (other / MANIFEST).write_text(manifest.replace(list(agreed.values())[-1], "otherwise"), encoding="utf-8")
    reseal(other)
    assert [mine.refused for mine, _ in differences(a, load_run(other))] == [True]


def test_a_package_that_cannot_be_loaded_breaks_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "broken", {GROUP: {"broken": "no_such_module:Broken"}})
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match=r"'broken' \(no_such_module:Broken\)"):
        benchmark("broken")
    with pytest.raises(UnknownNameError, match="'copyin': did you mean 'copying'"):
        kind_of_suite("copyin")
    assert "broken  " in printed(suites()) and "copying  " in printed(suites())


def test_a_run_of_a_benchmark_that_is_not_installed(runs: Made, monkeypatch: Any) -> None:
    run = load_run(runs("copying").folder)
    with monkeypatch.context() as during:
        during.setattr("evalkit.plugins.entry_points", lambda group: ())
        benchmark.cache_clear()
        with pytest.raises(RunError, match="'copying'"):
            results_of(run)
    benchmark.cache_clear()


@pytest.mark.parametrize("name", [MANIFEST, RESULTS])
def test_a_damaged_run_is_listed_beside_the_others(own_run: Path, name: str) -> None:
    bad = Path(shutil.copytree(own_run, own_run.parent / "bad"))
    (bad / name).write_text("[]")
    states = {Path(run.folder).name: run.state for run in list_found(own_run.parent)}
    assert states == {"bad": "damaged", own_run.name: "finished"}
    (bad / RESULTS).unlink()
    states = {Path(run.folder).name: run.state for run in list_found(own_run.parent)}
    assert states["bad"] == ("damaged" if name == MANIFEST else "interrupted")
