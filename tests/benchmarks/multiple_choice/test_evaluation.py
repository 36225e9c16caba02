"""From a request to a finished run folder: run ids, resumption, and the state after a failure."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from evalkit.benchmarks.run import evaluate
from evalkit.display import Progress
from evalkit.errors import DataError, RunError, ScoringError, UnknownNameError, UsageError
from evalkit.runs.folder import Run, load_run
from evalkit.runs.journal import Journal
from tests.documents import made_up, rewrite
from tests.tiny import tiny_checkpoint

Evaluate = Callable[..., Run]


class Lines(Progress):
    """Progress that records its messages."""

    def __init__(self) -> None:
        super().__init__(live=False)
        self.said: list[str] = []

    def say(self, line: str) -> None:
        self.said.append(line)


@pytest.fixture
def small(checkpoint: Path, documents: Path, tmp_path: Path) -> Evaluate:
    """`evaluate` on a few documents of two tasks in small batches; keyword arguments change the rest."""

    def run(model: Path = checkpoint, **options: Any) -> Run:
        asked = {
            "data_dir": documents,
            "allow_unofficial_data": True,
            "output": tmp_path / "runs",
            "tasks": ("piqa", "arc_easy"),
            "token_budget": 110,
            "progress": Lines(),
        }
        return evaluate(str(model), **(asked | options))

    return run


def test_every_document_and_choice_is_scored_once(finished: Run) -> None:
    scores = finished.scores
    assert not scores.duplicated(["subtask", "doc_id", "choice"]).any()
    documents = scores.groupby(["task", "subtask", "doc_id"], sort=False)
    assert documents.ngroups == 7 * 6 + 57
    assert (documents.size() == documents["choices"].first()).all()
    assert (documents["choice"].agg(list).map(lambda places: places == list(range(len(places))))).all()


def test_every_segment_of_the_papers_prompt_is_scored(finished: Run) -> None:
    scores = finished.scores
    for segment in ("special", "instruction", "context", "continuation", "end"):
        assert (scores[f"n_{segment}"] > 0).all() or segment == "context"
        assert np.isfinite(scores[f"ll_{segment}"]).all()
        assert (scores[f"ll_{segment}"] <= 0).all()
    assert (scores["n_end"] == 1).all()
    assert scores["ll_unconditional"].isna().all()


def test_results_json_holds_every_rule(finished: Run) -> None:
    stored = json.loads((finished.folder / "results.json").read_text(encoding="utf-8"))
    assert set(stored["rules"]) == {
        "ppl",
        "ppl_continuation",
        "ppl_continuation_end",
        "acc",
        "acc_norm",
        "acc_bytes",
        "acc_token",
    }
    for rule, content in stored["rules"].items():
        assert content == json.loads(json.dumps(finished.results(rule).to_json()))
    assert {task["task"] for task in stored["tasks"]} == set(finished.manifest["documents"])
    assert sum(task["seconds"] for task in stored["tasks"]) > 0


def test_a_finished_run_is_only_opened(small: Evaluate, monkeypatch: pytest.MonkeyPatch) -> None:
    first = small()
    before = {path: path.stat().st_mtime_ns for path in first.folder.rglob("*")}
    monkeypatch.setattr("evalkit.runs.writing.open_run", None)
    again = small()
    assert again.folder == first.folder
    assert {path: path.stat().st_mtime_ns for path in first.folder.rglob("*")} == before


def test_whatever_changes_the_numbers_is_another_run(small: Evaluate, checkpoint: Path, tmp_path: Path) -> None:
    other_weights = tiny_checkpoint(tmp_path / "weights" / checkpoint.name, window=4096, seed=1)
    other_documents = made_up(tmp_path / "documents")
    rewrite(other_documents / "piqa.jsonl", 1, {"goal": "Another goal."})
    runs = [
        small(),
        small(limit=3),
        small(template="plain"),
        small(dtype="bfloat16"),
        small(attention="eager"),
        small(rule="pmi"),
        small(tasks=("piqa",)),
        small(model=other_weights),
        small(data_dir=other_documents),
    ]
    assert len({run.folder for run in runs}) == len(runs)


def test_whatever_does_not_is_the_same_run(small: Evaluate, checkpoint: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(checkpoint, tmp_path / "elsewhere" / checkpoint.name)
    runs = [small(), small(rule="acc"), small(token_budget=512), small(model=moved), small(device="cpu")]
    assert len({run.folder for run in runs}) == 1


@pytest.mark.parametrize("budget", [128, 1024, None])
def test_scores_do_not_depend_on_the_budget(small: Evaluate, tmp_path: Path, budget: int | None) -> None:
    expected = small().scores
    found = small(token_budget=budget, output=tmp_path / "other").scores
    pd.testing.assert_frame_equal(found, expected, rtol=1e-4, atol=1e-4)


def test_an_interrupted_run_resumes(small: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted three times: nothing is scored again, and the table equals the uninterrupted one."""
    whole = small(output=tmp_path / "whole")
    append, written = Journal.append, []

    def interrupt(journal: Journal, entry: Any, rows: Any, packed: Any = None) -> Any:
        found = append(journal, entry, rows)
        written.append((entry.task, entry.batch))
        if len(written) in (1, 3, 5):
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(Journal, "append", interrupt)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            small()
        assert not any((tmp_path / "runs").glob("*/results.json"))
    run = small()
    assert len(written) == len(set(written)) > 5
    pd.testing.assert_frame_equal(run.scores, whole.scores, check_exact=True)


def test_a_run_killed_after_running_out_of_memory_resumes(
    small: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured memory must not change the plan, or batches would be mistaken for others."""
    import torch

    from evalkit.scoring.forward import Forward, Trunk
    from evalkit.scoring.head import Scores
    from evalkit.scoring.tree import Tree

    whole = small(output=tmp_path / "whole", token_budget=200)
    real, append, written = Forward.score, Journal.append, []

    def scarce(own: Forward, tree: Tree, trunk: Trunk) -> Scores:
        if len(tree.tokens) > 120:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(own, tree, trunk)

    def interrupt(journal: Journal, entry: Any, rows: Any, packed: Any = None) -> Any:
        found = append(journal, entry, rows)
        written.append((entry.task, entry.batch))
        if len(written) == 2:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(Forward, "score", scarce)
    monkeypatch.setattr(Journal, "append", interrupt)
    with pytest.raises(KeyboardInterrupt):
        small(token_budget=200)
    monkeypatch.setattr(Forward, "score", real)
    run = small(token_budget=200)
    assert len(written) == len(set(written)) > 2
    pd.testing.assert_frame_equal(run.scores, whole.scores, rtol=1e-4, atol=1e-4)


def test_a_resumed_run_keeps_its_batches(small: Evaluate, tmp_path: Path) -> None:
    """With another budget the remaining batches would differ."""
    whole = small()
    lines = (whole.folder / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (whole.folder / "journal.jsonl").write_bytes(b"".join(lines[: len(lines) // 2]) + lines[-1][:40])
    (whole.folder / "results.json").unlink()
    progress = Lines()
    resumed = small(token_budget=4096, progress=progress)
    assert "resuming with the token budget that the run was started with, 110" in progress.said
    assert any("1 damaged line(s) dropped" in line for line in progress.said)
    fresh = small(output=tmp_path / "fresh")
    pd.testing.assert_frame_equal(resumed.scores, fresh.scores, check_exact=True)
    assert (resumed.folder / "journal.jsonl").read_bytes().count(b"\n") == len(lines)


@pytest.mark.parametrize("absent", ["scores.parquet", "results.json"])
def test_results_are_made_anew_from_the_journal(small: Evaluate, absent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = small()
    before = (first.folder / absent).read_bytes()
    (first.folder / absent).unlink()
    monkeypatch.setattr("evalkit.benchmarks.session.load_checked", None)  # nothing is left to score
    again = small()
    assert again.complete
    assert (again.folder / absent).read_bytes() == before


def test_results_are_gone_while_they_are_made_anew(small: Evaluate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise old files would remain beside new tables if the process were killed."""
    from evalkit.runs.writing import RunWriter

    first = small()
    (first.folder / "scores.parquet").unlink()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunWriter, "save_results", interrupt)
        small()
    assert (first.folder / "scores.parquet").is_file()
    assert not load_run(first.folder).complete
    assert small().scores.equals(first.scores)


def test_a_journal_of_other_batches_is_gone_on_with(small: Evaluate) -> None:
    """Without the manifest and its budget the remaining batches differ: documents count, not batches."""
    run = small()
    expected = run.scores
    journal = run.folder / "journal.jsonl"
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:2]))
    (run.folder / "results.json").unlink()
    (run.folder / "manifest.json").unlink()
    again = small(token_budget=2048)
    assert again.complete
    pd.testing.assert_frame_equal(again.scores, expected, rtol=1e-5)


def test_a_run_that_could_not_begin_leaves_nothing(small: Evaluate, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cuda"):
        small(device="cuda:7", output=tmp_path / "fresh")
    assert not list((tmp_path / "fresh").glob("*"))


@pytest.mark.parametrize("after", [0, 1, 2, 3, 9, 11])
def test_a_full_disk_loses_nothing_that_was_saved(
    small: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """The disk is full after any number of writes: an error, then on resumption the same result."""
    fsync, calls = os.fsync, []

    def full(handle: int) -> None:
        calls.append(handle)
        if len(calls) > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RunError, match=r"No space left on device"):
            small(log_samples=True)
    assert not any((tmp_path / "runs").glob("*/results.json"))
    run = small(log_samples=True)
    pd.testing.assert_frame_equal(run.scores, small(output=tmp_path / "other").scores, check_exact=True)


def test_samples_are_all_there_or_asked_for_again(small: Evaluate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of one task, left by a run killed during writing, are not accepted for those of all tasks."""
    plain = small()
    assert not plain.has_samples
    fsync, calls = os.fsync, []

    def full(handle: int) -> None:
        calls.append(handle)
        # scores, lm_eval/results, the first task's samples
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RunError, match=r"samples_arc_easy|samples_piqa"):
            small(log_samples=True)
    assert len(list(plain.folder.glob("lm_eval/samples_*"))) == 1
    run = small(log_samples=True)
    assert run.has_samples
    assert len(list(run.folder.glob("lm_eval/samples_*"))) == 2


def test_pmi_scores_each_choice_without_its_context(small: Evaluate) -> None:
    run = small(rule="pmi")
    scores = run.scores
    assert np.isfinite(scores["ll_unconditional"]).all()
    assert run.results().rule == "pmi"
    gained = (scores["ll_continuation"] - scores["ll_unconditional"]).to_numpy()
    starts = np.flatnonzero(scores["choice"] == 0)
    best = [int(np.argmax(part)) for part in np.split(gained, starts[1:])]
    right = [place == gold for place, gold in zip(best, scores["gold"].iloc[starts], strict=True)]
    by_task = pd.Series(right).groupby(scores["task"].iloc[starts].to_numpy()).mean()
    assert {task.task: task.accuracy for task in run.results().tasks} == pytest.approx(by_task.to_dict())


def test_a_run_without_the_pass_says_so(finished: Run) -> None:
    with pytest.raises(UsageError, match=r"needs the unconditional pass.*--rule pmi"):
        finished.results("pmi")


def test_context_that_does_not_fit_is_cut_and_counted(small: Evaluate, tmp_path: Path) -> None:
    narrow = tiny_checkpoint(tmp_path / "narrow", window=160)
    run = small(model=narrow, tasks=("boolq",))
    [boolq] = run.results().tasks
    assert boolq.truncated == (run.scores.groupby("doc_id")["truncated"].max() > 0).sum() > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"limit": 0}, "--limit is 0; it must be at least 1"),
        ({"limit": -3}, "--limit is -3"),
        ({"token_budget": 0}, "--token-budget is 0"),
        ({"suite": "zeroshot"}, "unknown suite 'zeroshot': did you mean 'zeroshot8'"),
        ({"tasks": ("piqqa",)}, "unknown task 'piqqa': did you mean 'piqa'"),
        ({"template": "plian"}, "unknown template 'plian': did you mean 'plain'"),
        ({"rule": "accnorm"}, "unknown rule 'accnorm': did you mean 'acc_norm'"),
        ({"attention": "spda"}, "unknown attention implementation 'spda': did you mean 'sdpa'"),
        ({"dtype": "float31"}, "unknown dtype 'float31': did you mean 'float32'"),
        ({"template": "plain", "rule": "ppl"}, "rule ppl needs the log-likelihood of context"),
        ({"tasks": ("piqa", "piqa")}, "named twice"),
    ],
)
def test_invalid_requests_are_rejected_before_anything_is_written(
    small: Evaluate, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        small(**options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()
    if words.startswith("unknown"):
        assert isinstance(caught.value, UnknownNameError)


def test_options_in_the_forms_people_write_them(small: Evaluate, documents: Path) -> None:
    spelled = small(tasks="piqa, arc_easy", token_budget="auto", limit="2", data_dir=str(documents))
    assert spelled.manifest["groups"] == {"Reasoning": ["arc_easy"], "Knowledge": ["piqa"]}
    assert spelled.manifest["specification"]["limit"] == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"limit": 0}, "--limit is 0; it must be at least 1"),
        ({"limit": "many"}, "--limit is 'many'; it must be a whole number"),
        ({"token_budget": "lots"}, "--token-budget is 'lots'; it must be a whole number, or auto"),
    ],
)
def test_invalid_options(small: Evaluate, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        small(**options)


def test_a_data_dir_without_the_documents(small: Evaluate, documents: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"has no documents of arc_easy, piqa; expected files named <task>.jsonl"):
        small(data_dir=tmp_path / "empty")
    beneath = tmp_path / "downloads" / "documents"
    beneath.parent.mkdir()
    beneath.symlink_to(documents)
    with pytest.raises(DataError, match=rf"expected files named <task>.jsonl \(did you mean {beneath}\?\)$"):
        small(data_dir=beneath.parent)


def test_a_document_that_cannot_fit_is_reported(small: Evaluate, documents: Path, tmp_path: Path) -> None:
    """In the last task, while documents of earlier tasks fit."""
    model = tiny_checkpoint(tmp_path / "narrow", window=64)
    with pytest.raises(ScoringError, match=r"tokens remain without its context, more than the context window of 64"):
        small(model, tasks=None)


def test_a_token_budget_too_small_for_a_document_says_what_it_needs(small: Evaluate) -> None:
    with pytest.raises(
        ScoringError, match=r"--token-budget 20 is too small: \w+ document \d+ takes \d+ tokens"
    ) as error:
        small(token_budget=20)
    needed = int(str(error.value).split("give at least ")[1].split(",")[0])
    assert needed > 20


def test_the_manifest_says_whether_prefixes_were_shared(
    small: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path / "cache"))
    for number, stored in enumerate((False, True)):
        sharing = small(output=tmp_path / str(number)).manifest["sharing"]
        assert sharing.pop("checked")["row"] >= 1
        assert sharing == {"shares": True, "why_not": "", "kernel": "tiles", "dropped": [], "stored": stored}
