"""`evalkit show`: lists and single documents, compared with the score table."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from evalkit.benchmarks.run import evaluate
from evalkit.display import Progress
from evalkit.runs.folder import RESULTS, Run
from evalkit.runs.rules import decide, find_rule
from tests.cli.test_root import Command, _no_settings, complains, evalkit
from tests.documents import rewrite
from tests.test_api import heavy_after

__all__ = ["_no_settings", "evalkit"]  # fixtures


@pytest.fixture(scope="module")
def second(checkpoint: Path, documents: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same documents under another template."""
    return evaluate(
        str(checkpoint), data_dir=documents, allow_unofficial_data=True, template="plain",
        output=tmp_path_factory.mktemp("second"), progress=Progress(live=False),
    )  # fmt: skip


def listed(evalkit: Command, *arguments: object) -> dict[str, Any]:
    outcome = evalkit("show", *arguments, "--format", "json", "--limit", 1000)
    assert outcome.code == 0, outcome.err
    content: dict[str, Any] = json.loads(outcome.out)
    return content


def margins(run: Run, task: str, rule: str) -> dict[int, float]:
    """Document → margin, by a loop over the score table."""
    found = {}
    for doc_id, rows in run.scores[run.scores["task"] == task].groupby("doc_id"):
        scores = list(find_rule(rule).score(rows))
        gold = int(rows["gold"].iloc[0])
        found[int(doc_id)] = scores[gold] - max(score for place, score in enumerate(scores) if place != gold)
    return found


@pytest.mark.parametrize("rule", ["ppl", "acc_norm"])
def test_wrong_documents_the_surest_mistakes_first(evalkit: Command, finished: Run, rule: str) -> None:
    decided = decide(finished.scores, find_rule(rule))
    for task in ("boolq", "hellaswag"):
        content = listed(evalkit, finished.folder, "--task", task, "--wrong", "--rule", rule)
        expected = margins(finished, task, rule)
        wrong = decided[(decided["task"] == task) & (decided["correct"] == 0)]
        found = [(int(one["document"]), one["runs"][0]) for one in content["documents"]]
        assert sorted(doc for doc, _ in found) == sorted(wrong["doc_id"])
        assert [run["margin"] for _, run in found] == pytest.approx([expected[doc] for doc, _ in found])
        assert [run["margin"] for _, run in found] == sorted(run["margin"] for _, run in found)
        assert (content["count"], content["of"]) == (len(wrong), 6)
        right = listed(evalkit, finished.folder, "--task", task, "--right", "--rule", rule)
        assert right["count"] == 6 - len(wrong)


def test_two_runs(evalkit: Command, finished: Run, second: Run) -> None:
    rule = find_rule("acc")
    a, b = (decide(run.scores, rule) for run in (finished, second))
    keys = ["task", "subtask", "doc_id"]
    both = a.merge(b, on=keys, suffixes=("_a", "_b"))
    for flag, before, after in (("--won", 0, 1), ("--lost", 1, 0)):
        content = listed(evalkit, finished.folder, second.folder, flag, "--rule", "acc")
        expected = both[(both["correct_a"] == before) & (both["correct_b"] == after)]
        found = {(one["task"], one["subtask"], int(one["document"])) for one in content["documents"]}
        assert found == set(expected[keys].itertuples(index=False, name=None))
        assert content["count"] == len(expected) > 0
        for one in content["documents"]:
            assert [run["right"] for run in one["runs"]] == [bool(before), bool(after)]
    shown = evalkit("show", finished.folder, second.folder, "--won", "--rule", "acc")
    assert "A predicted" in " ".join(shown.out.split()) and "A: tiny inst" in shown.out


def test_one_document(evalkit: Command, finished: Run) -> None:
    outcome = evalkit("show", finished.folder, "--document", "arc_easy/2", "--format", "json")
    content = json.loads(outcome.out)
    rows = finished.scores.query("task == 'arc_easy' and doc_id == 2")
    [run] = content["runs"]
    for choice, (_, row) in zip(run["choices"], rows.iterrows(), strict=True):
        for segment in ("special", "instruction", "context", "continuation", "end"):
            one = choice[segment]
            assert (one["log_likelihood"], one["tokens"]) == (row[f"ll_{segment}"], row[f"n_{segment}"])
            assert one["perplexity"] == pytest.approx(math.exp(-row[f"ll_{segment}"] / row[f"n_{segment}"]))
    for one in run["rules"]:
        decided = decide(rows.reset_index(drop=True), find_rule(one["rule"])).iloc[0]
        assert (one["prediction"], one["right"]) == (decided["prediction"], bool(decided["correct"]))
    assert {one["rule"] for one in run["rules"]} == set(finished.stored["rules"])
    printed = evalkit("show", finished.folder, "--document", "arc_easy/2").out
    assert printed.startswith("[BOS][INST] You are a knowledgeable assistant.")
    assert f"[{run['gold']}]*" in printed and "\x1b" not in printed
    # The subject alone is enough where it has the document
    names = ("mmlu/mmlu_astronomy/0", "mmlu_astronomy/0")
    first, other = (evalkit("show", finished.folder, "--document", name).out for name in names)
    assert first == other and "mmlu/mmlu_astronomy/0: the gold answer is" in first


def test_text_is_searched(evalkit: Command, finished: Run) -> None:
    every = listed(evalkit, finished.folder, "--task", "piqa")["documents"]
    texts = {
        one["name"]: " ".join(p["text"] for pieces in (one["prompt"], *one["continuations"]) for p in pieces).casefold()
        for one in every
    }
    word = next(iter(texts.values())).split()[-1]
    words = f"{word.upper()} assistant"
    found = listed(evalkit, finished.folder, "--task", "piqa", "--text", words)["documents"]
    assert {one["name"] for one in found} == {name for name, text in texts.items() if word in text}
    assert listed(evalkit, finished.folder, "--text", "zyzzyva")["count"] == 0


def test_errors(evalkit: Command, finished: Run, second: Run, tmp_path: Path) -> None:
    run = finished.folder
    complains(evalkit("show"), 2, "name one run, or two")
    complains(evalkit("show", run, "--task", "bolq"), 2, "did you mean 'boolq'")
    complains(evalkit("show", run, "--document", "boolq/77"), 2, "unknown document of boolq '77'")
    complains(evalkit("show", run, "--document", "mmlu/0"), 2, "57 subtasks of mmlu have a document 0", "name one")
    complains(evalkit("show", run, "--won"), 2, "name both")
    complains(evalkit("show", run, "--rule", "pmi"), 2, "unconditional pass")
    unfinished = Path(shutil.copytree(run, tmp_path / "unfinished" / run.name))
    (unfinished / RESULTS).unlink()
    complains(evalkit("show", unfinished), 1, "is not finished")


def test_runs_of_other_documents(
    evalkit: Command, finished: Run, checkpoint: Path, documents: Path, tmp_path: Path
) -> None:
    own = Path(shutil.copytree(documents, tmp_path / "documents"))
    rewrite(own / "piqa.jsonl", 1, {"goal": "another goal"})
    other = evaluate(
        str(checkpoint), data_dir=own, allow_unofficial_data=True, output=tmp_path / "runs", tasks=("piqa", "boolq"),
        progress=Progress(live=False),
    )  # fmt: skip
    complains(evalkit("show", finished.folder, other.folder, "--won"), 2, "task piqa", "content hash")
    assert evalkit("show", finished.folder, other.folder, "--won", "--task", "boolq").code == 0
    # Without texts, scores are shown and the reason is said
    rewrite(own / "boolq.jsonl", 1, {"passage": "another passage"})
    outcome = evalkit("show", other.folder, "--task", "boolq")
    assert outcome.code == 0 and "not those that were scored" in " ".join(outcome.out.split())
    complains(
        evalkit("show", other.folder, "--task", "boolq", "--text", "a"), 2, "--text", "not those that were scored"
    )


def test_neither_torch_nor_transformers(finished: Run) -> None:
    command = ["show", str(finished.folder), "--task", "piqa", "--wrong"]
    statement = f"import sys\nfrom evalkit.cli import main\ntry: main({command!r})\nexcept SystemExit: pass"
    assert not {"torch", "transformers"} & heavy_after(statement)
