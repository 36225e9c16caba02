"""Guards of numbers behind the score table, and of what enters it: files of a run, documents, comparisons, tables."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.guards.bench import MANIFEST, RESULTS, SCORES, Bench, Guard, Guards, Outcome, edit, reseal, seal, write

GUARDS = Guards()


@pytest.mark.parametrize("guard", GUARDS)
def test_results(guard: Guard, bench: Bench) -> None:
    guard.check(bench)


# Files of a run: bound to each other and to the run


def file(
    identity: str, text: str, damage: Callable[[Bench, Path], Any], *nouns: str, command: tuple[str, ...] = ("rescore",)
) -> None:
    """A copy of the finished run with damage, read by a command."""

    def act(bench: Bench) -> Outcome:
        folder = bench.run()
        return bench(*command, damage(bench, folder) or folder)

    GUARDS.add(identity, text, act, *nouns)


def _changed(name: str, change: Callable[[Any], Any], sealed: bool = False) -> Callable[[Bench, Path], Any]:
    def damage(_: Bench, folder: Path) -> None:
        path = edit(folder / name, change)
        if sealed:
            path.write_text(json.dumps(seal(json.loads(path.read_text(encoding="utf-8")))), encoding="utf-8")

    return damage


def _resealed(name: str, change: Callable[[Any], Any]) -> Callable[[Bench, Path], Any]:
    def damage(_: Bench, folder: Path) -> Path:
        edit(folder / name, change)
        reseal(folder)
        return folder.rename(folder.with_name("renamed"))

    return damage


def _of_other(*names: str) -> Callable[[Bench, Path], Any]:
    def damage(bench: Bench, folder: Path) -> None:
        for name in names:
            shutil.copy(bench.shared.other_run / name, folder / name)

    return damage


def _scores_shifted(_: Bench, folder: Path) -> None:
    table = pd.read_parquet(folder / SCORES)
    table.assign(ll_continuation=table["ll_continuation"] + 1).to_parquet(folder / SCORES, index=False)


def _without(name: str) -> Callable[[Any], Any]:
    return lambda content: content.pop(name)


_other_rule: Callable[[Any], Any] = lambda content: content.update(rule="acc")  # noqa: E731
_other_spec: Callable[[Any], Any] = lambda content: content["specification"].update(limit=1)  # noqa: E731

file("manifest-changed", "A manifest whose bytes changed is not read.", _changed(MANIFEST, _other_rule), MANIFEST,
    "its content does not match its 'sha256'")  # fmt: skip
file("manifest-unsealed", "Nor one without its digest.", _changed(MANIFEST, _without("sha256")), MANIFEST,
    "no 'sha256'")  # fmt: skip
file("manifest-id", "An id is that of its specification.", _changed(MANIFEST, _other_spec, sealed=True), MANIFEST,
    "its id does not match")  # fmt: skip
file("manifest-bound", "Results are of the manifest that they were written with.",
    _changed(MANIFEST, _other_rule, sealed=True), RESULTS, f"{MANIFEST} is not the one")  # fmt: skip
file("manifest-form", "A manifest of another form is not read.",
    _resealed(MANIFEST, lambda content: content.update(groups={"A": "piqa"})), MANIFEST, "'groups.A'")  # fmt: skip
file("manifest-twice", "Of a key with two values none is chosen.",
    lambda _, folder: write(folder / MANIFEST, '{"id": 1, ' + (folder / MANIFEST).read_text()[1:]) and None, MANIFEST,
    "'id' occurs twice")  # fmt: skip
file("results-changed", "Results whose bytes changed are not read.",
    _changed(RESULTS, lambda content: content["tasks"][0].update(accuracy=1.0)), RESULTS,
    "its content does not match its 'sha256'")  # fmt: skip
file("results-of-another", "Nor those of another run.", _of_other(RESULTS), RESULTS, "it belongs to run")
file("results-form", "Nor those of another form (two guards: of all runs, of the benchmark).",
    _resealed(RESULTS, lambda content: content["tasks"][0].pop("n")), RESULTS, "'tasks[0].n'")  # fmt: skip
file("scores-changed", "A score table whose bytes changed is not read.", _scores_shifted, SCORES,
    "its digest is not the one")  # fmt: skip
file("scores-of-another", "Nor that of another run.", _of_other(SCORES), SCORES, "it belongs to run")
file("run-of-another", "A whole run under another run's name is not read.", _of_other(MANIFEST, RESULTS, SCORES),
    "its name is that of run")  # fmt: skip
file("samples-changed", "A file of lm-eval's form whose bytes changed is not exported.",
    lambda _, folder: [write(path, path.read_bytes() + b" ") for path in folder.glob("lm_eval/samples_piqa*")] and None,
    "samples_piqa", "damaged", command=("export", "--to", "lm_eval"))  # fmt: skip


def table(identity: str, text: str, change: Callable[[Any], Any], *nouns: str, options: tuple[str, ...] = ()) -> None:
    """A copy of the finished run with another score table that is bound to it."""
    GUARDS.add(
        identity, text, lambda bench: bench("compare", bench.scores(change), bench.shared.other_run, *options), *nouns
    )


LOSS = ("--outcome", "log_loss")


@GUARDS("gold-out-of-range", "A gold answer that is no choice has no outcome.",
        "a gold answer is not one of its document's choices")  # fmt: skip
def _(bench: Bench) -> Outcome:
    runs = [bench.scores(lambda t: t.__setitem__("gold", 7), name) for name in ("a", "b")]
    return bench("compare", *runs, *LOSS)


table("likelihood-nan", "A continuation without a finite log-likelihood has no outcome.",
    lambda t: t.__setitem__("ll_continuation", t["ll_continuation"].where(t.index != 1)), "no finite log-likelihood",
    options=LOSS)  # fmt: skip
table("segment-nan", "A rule does not read a segment that some rows lack.",
    lambda t: t.__setitem__("ll_context", t["ll_context"].where(t.index != 1)), "ll_context",
    options=("--rule", "ppl"))  # fmt: skip
table("no-bytes", "A gold answer without bytes has no bits per byte.", lambda t: t.__setitem__("bytes", 0),
    "no bytes", options=("--outcome", "bits_per_byte"))  # fmt: skip
GUARDS.add("rule-unscored", "A rule that reads a segment which the template does not score is an error.",
    lambda bench: bench.score(None, "--template", "plain", "--rule", "ppl"), "rule ppl", code=2)  # fmt: skip
GUARDS.add("unfinished-rescored", "A run that is not finished has no numbers.",
    lambda bench: bench("rescore", _unfinished(bench)), "is not finished")  # fmt: skip


def _unfinished(bench: Bench) -> Path:
    folder = bench.altered("unfinished")
    (folder / RESULTS).unlink()
    return folder


# Comparisons: paired on the same documents, under the same measurement


def compared(identity: str, text: str, act: Callable[[Bench], list[object]], *nouns: str, code: int = 2) -> None:
    GUARDS.add(identity, text, lambda bench: bench("compare", *act(bench)), *nouns, code=code)


def _of_another_model(bench: Bench) -> Path:
    return bench.altered("b", lambda content: content["loaded"]["shape"].update(layers=9))


def _group(*runs: Path) -> str:
    return f"group={','.join(map(str, runs))}"


compared("pair-documents", "Documents of another content are not paired.",
    lambda bench: [bench.shared.run, bench.altered("b", documents={"piqa": "0" * 64, "boolq": "0" * 64})],
    "content hash of the documents")  # fmt: skip
compared("pair-suites", "Runs of other suites are not paired.",
    lambda bench: [bench.shared.run, bench.altered("b", suite="zeroshot8_text")], "zeroshot8_text")  # fmt: skip
compared("pair-nothing", "Runs without a common task are not compared.",
    lambda bench: [bench.folder_of(bench.score()), bench.folder_of(bench.score(None, "--tasks", "boolq"))],
    "no task in common")  # fmt: skip
compared("pair-answers", "A document with another gold answer is another document.",
    lambda bench: [bench.shared.run, bench.scores(lambda t: t.__setitem__("gold", 1 - t["gold"]))],
    "'gold'")  # fmt: skip
compared("pair-unfinished", "A run that is not finished is not compared.",
    lambda bench: [bench.shared.run, _unfinished(bench)], "is not finished", code=1)  # fmt: skip
compared("pair-itself", "A run is not compared with itself.", lambda bench: [bench.shared.run, bench.shared.run],
    "two sides are one run")  # fmt: skip
compared("group-settings", "Seeds of a group are measured alike.",
    lambda bench: [bench.shared.other_run, "--group", _group(bench.shared.run, bench.altered("b", dtype="bfloat16"))],
    "differ in dtype")  # fmt: skip
compared("group-models", "Seeds of a group are of one model.",
    lambda bench: [bench.shared.other_run, "--group", _group(bench.shared.run, _of_another_model(bench))],
    "mixes models")  # fmt: skip
compared("group-checkpoint", "One checkpoint is not two seeds.",
    lambda bench: [bench.shared.other_run, "--group", _group(bench.shared.run, bench.folder_of(bench.score()))],
    "same checkpoint")  # fmt: skip
compared("rules-differ", "A verdict that a program acts on is of one rule, which it names.",
    lambda bench: [bench.shared.run, bench.altered("b", lambda content: content.update(rule="acc")), "--fail-if-worse"],
    "different rules")  # fmt: skip


def _analyses(bench: Bench) -> list[object]:
    """Analyses of the attention of two models: of one layer, and of both."""
    options = ("--data-dir", bench.shared.documents, "--allow-unofficial-data", "--tasks", "piqa", "--measures",
               "entropy", "--output", "runs")  # fmt: skip
    return [bench.folder_of(bench("attention", bench.shared.model, *options, "--layers", 0)),
            bench.folder_of(bench("attention", bench.shared.other, *options))]  # fmt: skip


compared("pair-layers", "Measures of different layers are not paired by their position.",
    lambda bench: [*_analyses(bench), "--rule", "entropy@all"], "1 layers", "2 layers")  # fmt: skip
compared("pair-layers-averaged", "Nor are means over different layers compared.",
    lambda bench: [*_analyses(bench), "--rule", "entropy"], "layer 0", "all layers")  # fmt: skip


@GUARDS("pair-common", "Runs on other selections are compared on their common documents, and it is said.")
def _(bench: Bench) -> None:
    outcome = bench(
        "compare", bench.shared.run, bench.folder_of(bench.score(bench.shared.other, "--limit", 2)), "--format", "json"
    )
    assert '"n": 2' in outcome.out and '"n": 4' not in outcome.out


# Tables


def tabled(identity: str, text: str, rows: Callable[[Bench], dict[str, Any]], *nouns: str, code: int = 2) -> None:
    """Rows of the paper's table from runs."""

    def act(bench: Bench) -> Outcome:
        content = rows(bench)
        mapping = {"rows": {key: [str(run) for run in runs] for key, runs in content.items()}}
        return bench("table", "main_res", "--source", "runs", "--runs", write("runs.yaml", mapping))

    GUARDS.add(identity, text, act, *nouns, code=code)


tabled("table-unfinished", "A run that is not finished fills no row.",
    lambda bench: {"vanilla_125m": [_unfinished(bench)]}, "unfinished", "is not finished", code=1)  # fmt: skip
tabled("table-protocol", "Rows of a table are measured alike.",
    lambda bench: {"vanilla_125m": [bench.shared.run], "cog_125m": [bench.altered("b", limit=2)]}, "cog_125m",
    "the first 2 documents")  # fmt: skip
tabled("table-suite", "A run of another suite fills no row.",
    lambda bench: {"vanilla_125m": [bench.altered("b", suite="another")]}, "suite another")  # fmt: skip
tabled("table-seeds", "One checkpoint is not two seeds.",
    lambda bench: {"vanilla_125m": [bench.shared.run, bench.folder_of(bench.score())]}, "one checkpoint")  # fmt: skip
tabled("table-models", "Seeds of a row are of one model.",
    lambda bench: {"vanilla_125m": [bench.shared.run, _of_another_model(bench)]},
    "seeds of one model")  # fmt: skip
tabled("table-row", "A run of a row that the table does not have is not left out.",
    lambda bench: {"vanila_125m": [bench.shared.run]}, "vanila_125m")  # fmt: skip


@GUARDS("table-unofficial", "A table says which runs are of other documents.",
        "piqa*, boolq*: not the official documents", code=0)  # fmt: skip
def _(bench: Bench) -> Outcome:
    return bench(
        "table",
        "main_res",
        "--source",
        "runs",
        "--runs",
        write("runs.yaml", {"rows": {"vanilla_125m": str(bench.shared.run)}}),
    )


def _values(text: str) -> Callable[[Bench], Outcome]:
    def act(bench: Bench) -> Outcome:
        write("values.csv", text)
        return bench("table", "main_res", "--source", "runs", "--runs", write("runs.yaml", {"values": "values.csv"}))

    return act


GUARDS.add("values-percent", "A number that is no percentage is not printed as one.",
    _values("model,piqa\nintg_125m,150\n"), "values.csv, line 2", "150")  # fmt: skip
GUARDS.add("values-number", "Nor a text.", _values("model,piqa\nintg_125m,1/2\n"), "values.csv", "1/2")
GUARDS.add("values-twice", "Of a row with two numbers none is chosen.",
    _values("model,piqa\nintg_125m,1\nintg_125m,2\n"), "line 3", "intg_125m")  # fmt: skip
GUARDS.add("values-cells", "A row of fewer cells does not move them.", _values("model,piqa,boolq\nintg_125m,1\n"),
    "line 2", "1 cells for 2")  # fmt: skip
GUARDS.add("values-column", "A column that the table does not have is not left out.",
    _values("model,pica\nintg_125m,1\n"), "pica")  # fmt: skip
