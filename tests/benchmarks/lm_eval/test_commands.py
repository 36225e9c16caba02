"""lm-eval's tasks through the command line, and evalkit's own tasks among them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from evalkit.benchmarks.run import evaluate
from evalkit.cli import main
from evalkit.display import Progress
from tests.benchmarks.lm_eval.made import made_tasks

Command = Callable[..., tuple[str, str]]


@pytest.fixture
def evalkit(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert not left.value.code, err
        return out, err

    return run


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return made_tasks(tmp_path / "made", count=3)


def test_a_run_is_printed_listed_and_rescored(evalkit: Command, checkpoint: Path, made: Path) -> None:
    asked = ("run", "--model", checkpoint, "--include-path", made, "--tasks", "made_pair,made_answers,made_texts",
             "--output", "runs")  # fmt: skip
    out, err = evalkit(*asked)
    assert "not in suite zeroshot8, so this runs lm-eval's tasks" in err
    lines = out.splitlines()
    assert lines[0].split() == ["task", "filter", "metric", "n", "n-shot", "value", "±", "SE", "seconds"]
    assert [line.split()[0] for line in lines[2:] if line[:1].isalpha()][:5] == [
        "made_choice", "made_other", "made_answers", "made_texts", "made_pair"
    ]  # fmt: skip
    assert "word_perplexity ↓" in out
    assert "↓: lower is better" in out
    again = json.loads(evalkit(*asked, "--format", "json")[0])
    assert again["groups"][0]["task"] == "made_pair"
    assert again["tasks"][0]["metrics"][0].keys() == {"filter", "metric", "value", "stderr", "higher_is_better"}
    assert "made_pair acc" in evalkit("ls", "runs", "--output", "runs")[0]
    out, _ = evalkit("rescore", again["folder"], "--rule", "acc_norm")
    assert "acc_norm <" in out
    assert "made_other" in out
    assert "made_texts" not in out.partition("rule acc_norm")[0]


def test_prompts_are_shown_without_a_model(
    evalkit: Command, checkpoint: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evalkit.models.loading.load.load", None)
    asked = ("run", "--model", checkpoint, "--include-path", made, "--tasks", "made_shots,made_answers")
    out, _ = evalkit(*asked, "--show-prompts", 2)
    assert "made_shots document 1, loglikelihood" in out
    assert out.count("Question: ") >= 3 * 2
    assert "made_answers document 1, generate_until" in out
    assert not Path("results").exists()


def test_evalkits_own_tasks_keep_their_documents(checkpoint: Path, documents: Path, tmp_path: Path) -> None:
    """The same accuracies as under the suite's plain template, from the same folder of documents."""
    common = {
        "data_dir": documents,
        "allow_unofficial_data": True,
        "output": tmp_path / "runs",
        "progress": Progress(live=False),
    }
    names = ("winogrande", "arc_easy", "boolq", "mmlu_anatomy")
    found = evaluate(str(checkpoint), suite="lm_eval", tasks=names, **common)
    assert not any(source["official"] for source in found.manifest["documents"].values())
    suite = evaluate(
        str(checkpoint),
        suite="zeroshot8",
        template="plain",
        tasks=("winogrande", "arc_easy", "boolq", "mmlu"),
        **common,
    )
    for rule in ("acc", "acc_norm"):
        expected = {task.task: task.accuracy for task in suite.results(rule).tasks}
        expected |= {task.task: task.accuracy for task in suite.results(rule).subtasks["mmlu"]}
        assert {task.task: task.accuracy for task in found.results(rule).tasks} == {
            name: expected[name] for name in names
        }
    merged = found.scores.merge(suite.scores, on=["subtask", "doc_id", "choice"], suffixes=("", "_suite"))
    assert len(merged) == len(found.scores)
    for column in ("n_continuation", "chars", "bytes", "gold", "choices", "truncated"):
        assert (merged[column] == merged[f"{column}_suite"]).all(), column
    assert merged["ll_continuation"].to_numpy() == pytest.approx(merged["ll_continuation_suite"].to_numpy(), rel=1e-4)
