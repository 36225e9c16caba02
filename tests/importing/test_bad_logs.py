"""Invalid logs: a one-line error that names file and line, and nothing is written."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evalkit.benchmarks.run import evaluate
from evalkit.cli import main
from evalkit.data import Library
from evalkit.display import Progress
from evalkit.errors import DataError, UsageError
from evalkit.exchange import logs
from evalkit.exchange.exports import export_run
from evalkit.exchange.metric_runs import import_logs
from evalkit.models.loading.locate import silent
from tests.importing.logged import lines, rehash, rewrite

Line = dict[str, Any]
Change = Callable[[Line], Any]


@pytest.fixture(scope="module")
def exported(checkpoint: Path, documents: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of two tasks, with its results file."""
    folder = tmp_path_factory.mktemp("bad")
    run = evaluate(
        str(checkpoint), data_dir=documents, allow_unofficial_data=True, tasks=("arc_easy", "piqa"), template="plain",
        log_samples=True, output=folder / "runs", progress=Progress(live=False),
    )  # fmt: skip
    export_run(run, "lm_eval", output=folder / "log")
    return folder / "log"


@pytest.fixture
def log(exported: Path, tmp_path: Path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(exported, tmp_path / "log"))


def sample_file(log: Path, task: str = "arc_easy") -> Path:
    [path] = log.glob(f"samples_{task}_*.jsonl")
    return path


def results_file(log: Path) -> Path:
    [path] = log.glob("results_*.json")
    return path


@pytest.fixture
def rejected(documents: Path, tmp_path: Path) -> Callable[..., str]:
    """Import files that must be rejected; return the message."""

    def run(*paths: Path, model: str | None = None, kind: type[Exception] = DataError) -> str:
        library = Library(documents, allow_unofficial=True, say=silent)
        with pytest.raises(kind) as error:
            import_logs(paths, model, tmp_path / "imported", library, silent)
        assert not (tmp_path / "imported").exists()
        assert "\n" not in str(error.value)
        return str(error.value)

    return run


def other_gold(line: Line) -> None:
    labels = line["doc"]["choices"]["label"]
    line["doc"]["answerKey"] = labels[(labels.index(line["doc"]["answerKey"]) + 1) % len(labels)]
    rehash(line)


def other_question(line: Line) -> None:
    line["doc"]["question"] = "Another question?"
    rehash(line)


def other_acc(line: Line) -> None:
    line["acc"] = 1.0 - line["acc"]


def fewer_choices(line: Line) -> None:
    del line["arguments"][f"gen_args_{len(line['arguments']) - 1}"]


def fewer_answers(line: Line) -> None:
    line["filtered_resps"].pop()
    line["resps"].pop()


def other_target(target: str) -> Change:
    return lambda line: line.update(target=target, target_hash=hashlib.sha256(target.encode()).hexdigest())


def likelihood(value: Any) -> Change:
    def change(line: Line) -> None:
        line["filtered_resps"][0], line["resps"][0] = [value, "False"], [[value, "False"]]

    return change


CHANGES: dict[str, tuple[Change, str]] = {
    "a document that is not pinned": (other_question, "'Another question\\?'\\) is not document 3 of the 6"),
    "a gold answer that is not the pinned one": (other_gold, "is not document 3 of the 6 .* with the gold answer"),
    "a changed document": (lambda line: line["doc"].update(question="x"), "another content than its doc_hash says"),
    "a target that is not the gold answer": (other_target("17"), "target 17, but the gold answer"),
    "a target that is no number": (other_target("²"), "target ², but the gold answer"),
    "a target of 5,000 digits": (other_target("9" * 5000), "target 9{60}, but the gold answer"),
    "another target than its hash": (lambda line: line.update(target="17"), "than its target_hash says"),
    "another prompt than its hash": (lambda line: line["arguments"]["gen_args_0"].update(arg_0="x"), "its prompt_hash"),
    "answers that no filter has left": (lambda line: line["resps"].__setitem__(0, [["-1", "False"]]), "than in resps"),
    "a positive log-likelihood": (likelihood("0.5"), "log-likelihood 0.5, which no text has"),
    "a large log-likelihood": (likelihood("-1e308"), "log-likelihood -1e\\+308, which no text has"),
    "a log-likelihood with an underscore": (likelihood("-1_0"), "must have a log-likelihood for each of its"),
    "a log-likelihood of other digits": (likelihood("-١"), "must have a log-likelihood for each of its"),
    "a large metric": (lambda line: line.update(acc=1e308), "metric 'acc' is 1e\\+308"),
    "a changed metric": (other_acc, "but its log-likelihoods give"),
    "NaN": (likelihood("nan"), "log-likelihood nan; it must be a finite number"),
    "infinity": (likelihood("-inf"), "log-likelihood -inf; it must be a finite number"),
    "a text as log-likelihood": (likelihood("none"), "must have a log-likelihood for each of its"),
    "fewer log-likelihoods": (fewer_answers, "must have a log-likelihood for each of its"),
    "no log-likelihood": (lambda line: line.update(filtered_resps=[]), "must have a log-likelihood for each of its"),
    "fewer requests": (fewer_choices, "requests, but its pinned document has"),
    "no requests": (lambda line: line.update(arguments={}), "'arguments'"),
    "requests of other names": (lambda line: line.update(arguments={"a": {"arg_0": "x"}}), "gen_args_0"),
    "a request without text": (lambda line: line["arguments"].update(gen_args_0={"arg_0": 1}), "has no text"),
    "no document": (lambda line: line.pop("doc"), "'doc'"),
    "a number that is a text": (lambda line: line.update(doc_id="1"), "'doc_id'"),
    "a negative number": (lambda line: line.update(doc_id=-1), "'doc_id'"),
    "a number of 64 bits": (lambda line: line.update(doc_id=2**63), "'doc_id'"),
    "a number of 200 digits": (lambda line: line.update(doc_id=10**200), "'doc_id'"),
    "the number of another document": (lambda line: line.update(doc_id=99), "document 99"),
    "no hash of the document": (lambda line: line.pop("doc_hash"), "'doc_hash'"),
    "requests as lists": (lambda line: line.update(arguments=[["x", "y"]]), "'arguments'"),
    "numbers as log-likelihoods": (likelihood(-1.5), "must have a log-likelihood for each of its"),
    "the number of another line": (lambda line: line.update(doc_id=0), "document 0 is in line 1 already"),
    "a metric without a value": (lambda line: line.update(metrics=["f1"]), "f1"),
    "a metric that is infinite": (lambda line: line.update(acc=float("inf")), "metric 'acc' is inf"),
    "metrics of another task": (lambda line: line.update(metrics=["acc"]), "has metrics acc, but line 1 has acc_ppl_"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_line(name: str, log: Path, rejected: Callable[..., str]) -> None:
    change, message = CHANGES[name]
    path = sample_file(log)
    content = lines(path)
    change(content[3])
    rewrite(path, content)
    found = rejected(path)
    assert found.startswith(f"{path}, line 4: ")
    assert re.search(message, found), found


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-40], "not valid JSON"),
        (lambda data: data.replace(b"\n", b"\n\n", 1), "not valid JSON"),
        (lambda data: b"[1]\n" + data, "cannot be read as"),
        (lambda data: data.replace(b"Question", b"\xff", 1), "expected UTF-8"),
        (lambda data: b"[" * 10_000 + data, "nested more than 100 levels deep"),
        (lambda data: data + data.splitlines()[0] + b"\n", "is in line 1 already"),
        (lambda data: b"", "has no document"),
    ],
)
def test_a_damaged_file(damage: Callable[[bytes], bytes], message: str, log: Path, rejected: Any) -> None:
    path = sample_file(log)
    path.write_bytes(damage(path.read_bytes()))
    found = rejected(path)
    assert message in found and str(path) in found


def two_filters(content: list[Line]) -> list[Line]:
    return [line | {"filter": name} for name in ("strict", "flexible") for line in content]


def test_filters_of_other_documents(log: Path, rejected: Any) -> None:
    """As many lines of each filter, but of other documents; or another document under the same number."""
    path = sample_file(log)
    content = two_filters(lines(path))
    count = len(content) // 2
    rewrite(path, [*content[: count - 1], *content[count + 1 :]])
    found = rejected(path)
    assert found.startswith(f"{path}: filter flexible has other documents than filter strict")
    changed = [dict(line) for line in content]
    changed[count + 2]["doc"] = changed[count + 2]["doc"] | {"question": "Another question?"}
    rehash(changed[count + 2])
    rewrite(path, changed)
    found = rejected(path)
    assert found.startswith(f"{path}: filter flexible has other documents than filter strict")


def test_a_file_that_is_too_large(log: Path, rejected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MOST_DOCUMENT_BYTES", 1000)
    assert "more than 1,000 bytes" in rejected(sample_file(log))


def test_files_that_do_not_belong_together(log: Path, rejected: Any, tmp_path: Path) -> None:
    path, other = sample_file(log), tmp_path / "other"
    shutil.copytree(log, other)
    assert "are both of task arc_easy" in rejected(path, sample_file(other), kind=UsageError)
    results = json.loads(results_file(other).read_text(encoding="utf-8"))
    results_file(other).write_text(json.dumps(results | {"model_name": "another"}), encoding="utf-8")
    message = rejected(path, sample_file(other, "piqa"), kind=UsageError)
    assert "of another" in message and "import the files of one model at a time" in message
    results["config"]["model_dtype"] = "bfloat16"
    results_file(other).write_text(json.dumps(results), encoding="utf-8")
    message = rejected(path, sample_file(other, "piqa"), kind=UsageError)
    assert message.startswith("dtype: arc_easy has float32 and piqa has bfloat16")
    results["config"]["model_dtype"] = "float32"
    results["n-shot"]["piqa"] = 5
    results_file(other).write_text(json.dumps(results), encoding="utf-8")
    message = rejected(path, sample_file(other, "piqa"), kind=UsageError)
    assert message.startswith("solved examples: arc_easy has 0 and piqa has 5")


def test_a_results_file_of_another_evaluation(log: Path, rejected: Any) -> None:
    path = sample_file(log)
    rewrite(path, lines(path)[:4])
    message = rejected(path)
    assert "has 4 documents, but" in message and "says 6" in message
    results = json.loads(results_file(log).read_text(encoding="utf-8"))
    results["n-samples"] = {}
    results_file(log).write_text(json.dumps(results | {"task_hashes": {"arc_easy": "0" * 64}}), encoding="utf-8")
    assert "does not have the hash of arc_easy" in rejected(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"results": {"arc_easy": {"acc,none": 0.99}}},
        {"n-shot": {"arc_easy": -1}},
        {"n-shot": {"arc_easy": 10**300}},
        {"n-samples": {"arc_easy": {"original": 10**7, "effective": 6}}},
        {"n-samples": {"arc_easy": {"original": 5, "effective": 6}}},
    ],
    ids=str,
)
def test_a_results_file_that_its_documents_contradict(changes: dict[str, Any], log: Path, rejected: Any) -> None:
    results = json.loads(results_file(log).read_text(encoding="utf-8"))
    results_file(log).write_text(json.dumps(results | changes), encoding="utf-8")
    assert "arc_easy" in rejected(sample_file(log))


@pytest.mark.parametrize("content", ["{", "[]", '{"results": 1}', '{"results": {}, "model_name": 5}'])
def test_a_results_file_that_is_invalid(content: str, log: Path, rejected: Any) -> None:
    results_file(log).write_text(content, encoding="utf-8")
    assert str(results_file(log)) in rejected(sample_file(log))


def test_a_model_without_a_name(log: Path, rejected: Any) -> None:
    results = json.loads(results_file(log).read_text(encoding="utf-8"))
    results_file(log).write_text(json.dumps(results | {"model_name": ""}), encoding="utf-8")
    assert "give --model NAME" in rejected(sample_file(log), kind=UsageError)
    results_file(log).unlink()
    assert "give --model NAME" in rejected(sample_file(log), kind=UsageError)


def test_files_of_other_names(log: Path, rejected: Any, tmp_path: Path) -> None:
    assert "only the name samples_<task>_<time>.jsonl" in rejected(results_file(log), kind=UsageError)
    assert "name one or more sample files" in rejected(kind=UsageError)
    assert "cannot be read" in rejected(tmp_path / "samples_a_2026-01-01T00-00-00.000000.jsonl")
    pipe = tmp_path / "samples_b_2026-01-01T00-00-00.000000.jsonl"
    os.mkfifo(pipe)
    assert "is not a regular file" in rejected(pipe)


def test_the_command(log: Path, documents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["import", *map(str, log.glob("samples_*.jsonl")), "--data-dir", str(documents)]
    command += ["--allow-unofficial-data", "-o", str(tmp_path / "runs")]
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 0
    [folder] = capsys.readouterr().out.splitlines()
    for command in (["ls", "runs", "-o", str(tmp_path / "runs")], ["rescore", folder], ["integrity", folder]):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == 0
        assert "imported from a log of evalkit" in capsys.readouterr().out.replace("\n", " ")
    page = tmp_path / "page.html"
    with pytest.raises(SystemExit) as ended:
        main(["report", folder, "-o", str(page)])
    assert ended.value.code == 0 and "imported from a log of evalkit" in page.read_text(encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["import", str(tmp_path / "absent")])
    assert ended.value.code == 2
