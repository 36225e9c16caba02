"""Runs of lm-eval's tasks: lm-eval's own numbers, stored, resumed and printed like those of a suite."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from evalkit.benchmarks.lm_eval.requests import RequestRow
from evalkit.benchmarks.run import evaluate
from evalkit.display import Progress
from evalkit.errors import ScoringError, UsageError
from evalkit.runs.folder import Run, load_run
from evalkit.runs.journal import Journal
from tests.benchmarks.lm_eval.made import ALL, ANSWERS, CHOICE, TEXTS, made_tasks, same_metrics, write_task
from tests.journals import entries_of
from tests.tiny import tiny_checkpoint

BUDGET = 300
"""Small, so that there are several batches, and no document is too large for it."""

Evaluate = Callable[..., Run]


class Silent(Progress):
    """Progress that shows nothing."""

    def say(self, line: str) -> None:
        pass


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval's bootstrap gives the same numbers without a pool of processes."""
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny", window=128, adds_bos=True)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture
def run(model: Path, tasks: Path, tmp_path: Path) -> Evaluate:
    def evaluated(**options: Any) -> Run:
        asked = {"include_path": tasks, "tasks": ALL, "token_budget": BUDGET, "output": tmp_path / "runs"}
        return evaluate(str(model), progress=Silent(live=False), **(asked | options))

    return evaluated


@pytest.fixture(scope="module")
def finished(model: Path, tasks: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An uninterrupted run of all tasks. Do not modify."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISABLE_MULTIPROC", "1")
        return evaluate(
            str(model),
            include_path=tasks,
            tasks=ALL,
            token_budget=BUDGET,
            log_samples=True,
            output=tmp_path_factory.mktemp("runs"),
            progress=Silent(live=False),
        )


def exported(run: Run) -> dict[str, Any]:
    [path] = run.folder.glob("lm_eval/results_*.json")
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def test_the_numbers_are_lm_evals(finished: Run, model: Path, tasks: Path) -> None:
    """Every metric, standard error and group of lm-eval's own run with its own model class."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    expected = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(model), "dtype": "float32", "logits_cache": False},
        tasks=list(ALL),
        device="cpu",
        batch_size=8,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
    )
    same_metrics(exported(finished)["results"], expected["results"])
    for part in ("n-shot", "n-samples", "higher_is_better", "versions", "group_subtasks"):
        assert exported(finished)[part] == expected[part], part
    hashes = finished.stored["task_hashes"]
    samples = expected["samples"]
    assert {name: len(members) for name, members in samples.items()} == {
        path.name.removeprefix("samples_").rpartition("_")[0]: len(path.read_text(encoding="utf-8").splitlines())
        for path in finished.folder.glob("lm_eval/samples_*.jsonl")
    }
    assert hashes.keys() == samples.keys()


def test_unofficial_documents_are_named_in_lm_evals_own_file(model: Path, documents: Path, tmp_path: Path) -> None:
    """For evalkit's pinned tasks: in the alias, which lm-eval's tables print, also the group's."""
    found = evaluate(
        str(model),
        suite="lm_eval",
        tasks="piqa,mmlu",
        data_dir=documents,
        allow_unofficial_data=True,
        limit=1,
        context=256,
        output=tmp_path,
        progress=Silent(live=False),
    )
    content = exported(found)
    marked = " (not the official documents)"
    assert all(entry["alias"].endswith(marked) for entry in content["results"].values())
    assert content["groups"]["mmlu"]["alias"] == f"mmlu{marked}"
    assert set(content["evalkit"]["unofficial"]["documents"]) == set(found.manifest["documents"])
    assert content["evalkit"]["context_extension"]["target"] == content["max_length"] == 256


def test_every_kind_is_measured(finished: Run) -> None:
    found = {entry["task"]: entry for entry in [*finished.stored["tasks"], *finished.stored["groups"]]}
    measured = {task: [metric["metric"] for metric in entry["metrics"]] for task, entry in found.items()}
    assert measured == {
        "made_choice": ["acc", "acc_norm"],
        "made_other": ["acc", "acc_norm"],
        "made_last_word": ["perplexity", "acc"],
        "made_texts": ["word_perplexity", "byte_perplexity", "bits_per_byte"],
        "made_answers": ["exact_match", "exact_match"],
        "made_shots": ["acc", "acc_norm"],
        "made_pair": ["acc"],
    }
    assert [metric["filter"] for metric in found["made_answers"]["metrics"]] == ["whole", "word"]
    assert found["made_shots"]["num_fewshot"] == 2
    assert found["made_pair"]["n"] == found["made_choice"]["n"] + found["made_other"]["n"]
    assert not found["made_texts"]["metrics"][0]["higher_is_better"]


def test_the_score_table_says_what_lm_eval_says(finished: Run) -> None:
    """The accuracies of evalkit's own rules, from the stored scores, are lm-eval's."""
    results = exported(finished)["results"]
    for rule in ("acc", "acc_norm"):
        found = {task.task: task.accuracy for task in finished.results(rule).tasks}
        assert found == {
            task: pytest.approx(results[task][f"{rule},none"]) for task in ("made_choice", "made_other", "made_shots")
        }
    scores = finished.scores
    assert np.isfinite(scores["ll_continuation"]).all()
    assert (scores["n_continuation"] > 0).all()
    assert (scores["n_context"] > scores["n_continuation"]).any()


def test_a_random_sample_has_the_whole_runs_prompts_and_scores(run: Evaluate, finished: Run) -> None:
    """Also where solved examples are drawn one document after the other; documents keep their numbers."""
    chosen, fewer = (run(sample=count, seed=2, log_samples=True) for count in (4, 2))
    of_run = [
        {
            (path.name.rpartition("_")[0], one["doc_id"]): (one["doc_hash"], one["prompt_hash"])
            for path in each.folder.glob("lm_eval/samples_*.jsonl")
            for one in map(json.loads, path.read_text(encoding="utf-8").splitlines())
        }
        for each in (fewer, chosen, finished)
    ]
    assert of_run[0].items() <= of_run[1].items() <= of_run[2].items()
    assert {doc_id for _, doc_id in of_run[1]} != {0, 1, 2, 3}  # not the first ones
    assert all(entry["n"] == 4 for entry in chosen.stored["tasks"])
    keys = ["task", "doc_id", "choice"]
    both = chosen.scores.merge(finished.scores, on=keys, suffixes=("", "_whole"))
    assert len(both) == len(chosen.scores)
    assert np.allclose(both["ll_continuation"], both["ll_continuation_whole"], rtol=1e-4)
    with pytest.raises(UsageError, match="give one of them"):
        run(sample=4, limit=3)


def test_mutual_information_fills_the_unconditional_column(run: Evaluate, tmp_path: Path) -> None:
    metrics = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_mutual_info")]
    documents = [{"question": "Why?", "choices": ["The river rose.", "Rice"], "gold": place % 2} for place in range(4)]
    write_task(tmp_path, CHOICE | {"task": "made_mutual", "metric_list": metrics}, documents)
    found = run(include_path=tmp_path, tasks=("made_mutual",))
    [task] = found.results("pmi").tasks
    assert task.accuracy == exported(found)["results"]["made_mutual"]["acc_mutual_info,none"]


def test_a_finished_run_is_only_opened(run: Evaluate, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(tasks=("made_choice",))
    before = {path: path.stat().st_mtime_ns for path in first.folder.rglob("*")}
    monkeypatch.setattr("evalkit.runs.writing.open_run", None)
    assert run(tasks=("made_choice",)).folder == first.folder
    assert {path: path.stat().st_mtime_ns for path in first.folder.rglob("*")} == before


def test_what_changes_the_numbers_is_another_run(run: Evaluate, tmp_path: Path) -> None:
    elsewhere = made_tasks(tmp_path / "elsewhere")
    (elsewhere / "made_choice.jsonl").write_text(
        json.dumps({"question": "Why?", "choices": ["a", "b"], "gold": 1}) + "\n", encoding="utf-8"
    )
    one = {"tasks": ("made_choice",)}
    runs = [
        run(**one),
        run(**one, limit=3),
        run(**one, num_fewshot=1),
        run(**one, dtype="bfloat16"),
        run(**one, include_path=elsewhere),
        run(tasks=("made_other",)),
    ]
    assert len({found.folder for found in runs}) == len(runs)


def test_another_way_to_aggregate_is_another_run(run: Evaluate, tmp_path: Path) -> None:
    elsewhere = made_tasks(tmp_path / "elsewhere")
    first = run(tasks=("made_pair",), include_path=elsewhere)
    group = elsewhere / "made_pair.yaml"
    group.write_text(group.read_text(encoding="utf-8").replace("weight_by_size: true", "weight_by_size: false"))
    assert run(tasks=("made_pair",), include_path=elsewhere).folder != first.folder


def test_an_answer_to_another_question_is_not_taken(run: Evaluate, tmp_path: Path) -> None:
    """A manipulated journal."""
    first = run(tasks=("made_choice",))
    entries = entries_of(first, RequestRow)
    (first.folder / "journal.jsonl").unlink()
    (first.folder / "results.json").unlink()
    rows = entries[0][1]
    rows[0] = rows[0]._replace(digest="0" * 16, likelihood=rows[0].likelihood - 100)
    journal = Journal(first.folder / "journal.jsonl", first.manifest["id"], RequestRow, pytest.fail)
    for entry, rows in entries:
        journal.append(entry, rows)
    again = run(tasks=("made_choice",))
    pd.testing.assert_frame_equal(again.scores, first.scores, check_exact=True)


def test_a_token_budget_too_small_names_the_document(run: Evaluate) -> None:
    with pytest.raises(ScoringError, match=r"--token-budget 5 is too small: made_choice document \d"):
        run(tasks=("made_choice",), token_budget=5)


def same_run(found: Run, expected: Run) -> None:
    """Equal to the last bit, with every answer once in the journal."""
    pd.testing.assert_frame_equal(found.scores, expected.scores, check_exact=True)
    assert exported(found)["results"] == exported(expected)["results"]
    journals = [entries_of(one, RequestRow) for one in (found, expected)]
    answers = [[(entry.task, entry.batch, row) for entry, rows in entries for row in rows] for entries in journals]
    assert answers[0] == answers[1]
    assert len({(task, *row[:3]) for task, _, row in answers[0]}) == len(answers[0])


def test_an_interrupted_run_resumes(run: Evaluate, finished: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted after every few batches, at any kind of request: nothing is scored twice, and nothing differs."""
    append, written = Journal.append, []

    def interrupt(journal: Journal, entry: Any, rows: Any, packed: Any = None) -> Any:
        found = append(journal, entry, rows)
        written.append((entry.task, entry.batch))
        if len(written) % 3 == 0:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(Journal, "append", interrupt)
    interrupted = 0
    while True:
        try:
            found = run()
            break
        except KeyboardInterrupt:
            interrupted += 1
    assert interrupted > 3
    assert len(written) == len(set(written))
    assert {task.partition(" ")[0] for task, _ in written} == {
        "loglikelihood", "loglikelihood_rolling", "generate_until"
    }  # fmt: skip
    same_run(found, finished)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_a_killed_command_is_given_again(model: Path, tasks: Path, finished: Run, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "evalkit", "run", "--model", model, "--include-path", tasks, "--tasks",
               ",".join(ALL), "--token-budget", BUDGET, "--output", tmp_path]  # fmt: skip
    arguments = [str(argument) for argument in command]

    def batches() -> int:
        return sum(path.read_bytes().count(b"\n") for path in tmp_path.glob("*/journal.jsonl"))

    for ahead in (1, 3):
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        enough = batches() + ahead
        end = time.monotonic() + 120
        while batches() < enough and process.poll() is None and time.monotonic() < end:
            time.sleep(0.001)
        process.kill()
        _, err = process.communicate()
        assert process.returncode == -signal.SIGKILL, err
        assert batches() >= enough
    done = subprocess.run(arguments, capture_output=True, text=True, env=os.environ, check=True)
    assert "made_last_word" in done.stdout
    [folder] = tmp_path.iterdir()
    same_run(load_run(folder), finished)


def test_a_run_without_multiple_choice_has_nothing_to_rescore(run: Evaluate) -> None:
    found = run(tasks=("made_texts",))
    assert found.complete
    with pytest.raises(UsageError, match=r"no multiple-choice task with one gold answer, so no rule applies"):
        found.results("acc")


def test_a_name_that_no_sample_file_can_have(run: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reported before anything is scored."""
    monkeypatch.setattr("evalkit.benchmarks.session.load_checked", lambda *_: pytest.fail("a model was loaded"))
    path = write_task(tmp_path / "own", TEXTS, [{"text": "The river rose."}])
    long = "made_" + "x" * 230
    path.write_text(path.read_text(encoding="utf-8").replace("task: made_texts", f"task: {long}"), encoding="utf-8")
    with pytest.raises(
        UsageError, match=r"task made_x+…: its name has 235 bytes, and --log-samples needs names of at mo"
    ):
        run(tasks=(long,), include_path=tmp_path / "own", log_samples=True)


def test_an_empty_text_is_kept_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no token unless the tokenizer adds one, so its log-likelihood is 0, as in lm-eval."""
    bare = str(tiny_checkpoint(tmp_path / "tiny", window=128))

    def measured(*texts: str) -> dict[str, float]:
        folder = tmp_path / str(len(texts))
        write_task(folder, TEXTS, [{"text": text} for text in texts])
        found = evaluate(bare, include_path=folder, tasks=("made_texts",), output=folder, progress=Silent(live=False))
        return {one["metric"]: one["value"] for one in found.stored["tasks"][0]["metrics"]}

    with_empty = measured("The river rose.", "", "Rice")
    # Without bytes it adds nothing to a mean over bytes
    assert with_empty["bits_per_byte"] == pytest.approx(measured("The river rose.", "Rice")["bits_per_byte"])
    [results] = tmp_path.glob("3/*/results.json")
    results.unlink()
    monkeypatch.setattr("evalkit.benchmarks.session.load_checked", None)  # nothing is left to score
    assert measured("The river rose.", "", "Rice") == with_empty


def test_results_are_made_anew_from_the_journal(run: Evaluate, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(tasks=("made_choice", "made_texts", "made_answers"))
    before = (first.folder / "results.json").read_bytes()
    (first.folder / "results.json").unlink()
    monkeypatch.setattr("evalkit.benchmarks.session.load_checked", None)  # nothing is left to score
    assert (run(tasks=("made_choice", "made_texts", "made_answers")).folder / "results.json").read_bytes() == before


def test_samples_are_those_of_lm_eval(finished: Run) -> None:
    [path] = finished.folder.glob("lm_eval/samples_made_answers_*.jsonl")
    first = json.loads(path.read_text(encoding="utf-8").splitlines()[0])
    assert {"doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "doc_hash"} <= first.keys()
    assert first["arguments"]["gen_args_0"]["arg_1"]["max_gen_toks"] == 8
    assert isinstance(first["resps"][0][0], str)


def test_a_model_is_checked_on_the_first_text_that_has_a_token(tmp_path: Path) -> None:
    bare = str(tiny_checkpoint(tmp_path / "tiny", window=128))
    write_task(tmp_path / "own", TEXTS, [{"text": ""}, {"text": "The river rose."}])
    found = evaluate(
        bare, include_path=tmp_path / "own", tasks=("made_texts",), output=tmp_path, progress=Silent(live=False)
    )
    assert found.manifest["sharing"]["shares"]
    assert found.manifest["sharing"]["checked"]["row"] > 0


def test_sampled_texts_are_those_of_an_undisturbed_run(
    run: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an interruption and in batches of other sizes; each repeat is a different text."""
    sampling = {"until": ["\n"], "max_gen_toks": 8, "do_sample": True, "temperature": 1.0, "top_p": 0.9}
    documents = [{"text": f"The river {word}", "answer": "a"} for word in ("rose", "fell", "was", "is", "ran")]
    own = ANSWERS | {"task": "made_sampled", "repeats": 3, "generation_kwargs": sampling}
    write_task(tmp_path / "own", own, documents)
    options = {"tasks": ("made_sampled",), "include_path": tmp_path / "own"}

    def texts(found: Run) -> list[tuple[int, int, str]]:
        return sorted((row[0], row[2], row[-1]) for _, rows in entries_of(found, RequestRow) for row in rows)

    whole = run(**options, output=tmp_path / "whole")
    expected = texts(whole)
    assert [place[:2] for place in expected] == [(doc, part) for doc in range(5) for part in range(3)]
    assert len({text for _, _, text in expected}) > 5
    assert texts(run(**options, output=tmp_path / "single", token_budget=1)) == expected
    append = Journal.append

    def interrupt(journal: Journal, entry: Any, rows: Any, packed: Any = None) -> None:
        append(journal, entry, rows)
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr(Journal, "append", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(**options, output=tmp_path / "cut", token_budget=60)
    # The original budget is kept, also of keys and values
    cut = run(**options, output=tmp_path / "cut")
    assert cut.manifest["kept_tokens"] == 60
    assert texts(cut) == expected
    # Its default differs from the token budget of scoring
    with monkeypatch.context() as during:
        during.setattr(Journal, "append", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(**options, output=tmp_path / "free", token_budget=None)
    begun = json.loads(next((tmp_path / "free").glob("*/manifest.json")).read_text(encoding="utf-8"))
    assert begun["kept_tokens"] != begun["token_budget"]
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=2**24, available=2**23))
    assert run(**options, output=tmp_path / "free", token_budget=None).manifest["kept_tokens"] == begun["kept_tokens"]


def test_a_setting_that_is_not_served_is_named_before_anything_is_scored(run: Evaluate, tmp_path: Path) -> None:
    beams = ANSWERS | {"task": "made_beams", "generation_kwargs": {"max_gen_toks": 8, "num_beams": 10}}
    write_task(tmp_path / "own", beams, [{"text": "a", "answer": "b"}])
    with pytest.raises(ScoringError, match=r"made_beams document 0: .* num_beams is 10"):
        run(tasks=("made_beams",), include_path=tmp_path / "own")
