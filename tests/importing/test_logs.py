"""An imported log of lm-eval equals evalkit's own run of the same checkpoint, documents and prompts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from evalkit.benchmarks.registry import benchmark_of
from evalkit.benchmarks.run import evaluate
from evalkit.comparison.comparison import compare_sides
from evalkit.comparison.sides import Side
from evalkit.data import Library
from evalkit.display import Progress
from evalkit.errors import DataError, UsageError
from evalkit.exchange.exports import export_run
from evalkit.exchange.metric_runs import import_logs
from evalkit.inspection.selection import check_same_documents
from evalkit.models.loading.locate import silent
from evalkit.reporting.table import plain
from evalkit.runs.folder import Run
from evalkit.runs.rules import find_rule, row_scores, why_unusable
from evalkit.runs.score_table import UNCOUNTED
from evalkit.runs.traits import origin_notes, traits
from tests.benchmarks.lm_eval.made import made_tasks
from tests.documents import SUBJECTS
from tests.importing.logged import lines, lm_eval_log, own_tasks, rehash, rewrite

RULES = ("acc", "acc_norm", "acc_bytes")
TASKS = ("arc_easy", "winogrande", "hellaswag")
pytestmark = [
    # lm-eval's own, all of them
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

Importer = Callable[..., list[Run]]


@pytest.fixture(scope="module")
def library(real_documents: Path) -> Library:
    return Library(real_documents, allow_unofficial=True, say=silent)


@pytest.fixture(scope="module")
def imported(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Importer:
    def run(paths: list[Path], model: str | None = None, output: Path | None = None) -> list[Run]:
        return import_logs(paths, model, output or tmp_path_factory.mktemp("imported"), library, silent)

    return run


@pytest.fixture(scope="module")
def log(checkpoint: Path, library: Library, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """lm-eval's log of three tasks and two of MMLU's subjects."""
    tasks = (*TASKS, *(f"mmlu_{subject}" for subject in SUBJECTS[:2]))
    return lm_eval_log(checkpoint, tmp_path_factory.mktemp("log"), tasks, 5, **own_tasks(library))


@pytest.fixture(scope="module")
def ours(checkpoint: Path, real_documents: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """evalkit's run with lm-eval's prompt."""
    return evaluate(
        str(checkpoint), data_dir=real_documents, allow_unofficial_data=True, tasks=(*TASKS, "mmlu"), template="plain",
        dtype="float32", log_samples=True, output=tmp_path_factory.mktemp("runs"), progress=Progress(live=False),
    )  # fmt: skip


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Task files that evalkit does not ship, one of each kind."""
    return made_tasks(tmp_path_factory.mktemp("tasks"))


def same(a: Run, b: Run, rule: str | None = None) -> int:
    """Check that every document has the same score in both runs; return the number of documents."""
    [found] = compare_sides([Side("a", (a,)), Side("b", (b,))], rule)
    for task in found.tasks:
        assert (task.won, task.lost, task.difference) == (0, 0, 0.0), task.name
    return sum(task.n for task in found.tasks)


def with_likelihoods(run: Run) -> pd.DataFrame:
    return run.scores.set_index(["task", "subtask", "doc_id", "choice"])


def test_an_imported_log_equals_the_run(log: list[Path], ours: Run, imported: Importer) -> None:
    [run] = imported(log)
    assert [same(ours, run, rule) for rule in RULES] == [len(run.scores.query("choice == 0"))] * 3
    mine, theirs = with_likelihoods(ours), with_likelihoods(run)
    shared = mine.loc[theirs.index]
    columns = ["choices", "gold", "chars", "bytes", "cluster"]
    pd.testing.assert_frame_equal(shared[columns], theirs[columns])
    # Both are float32 sums, of other batches
    np.testing.assert_allclose(theirs["ll_continuation"], shared["ll_continuation"], rtol=1e-5)
    assert {one.run.manifest["rule"] for one in map(benchmark_of(run).comparable, (run, ours))} == {"acc"}


def test_log_likelihoods_are_the_logs_to_the_last_digit(log: list[Path], imported: Importer) -> None:
    [run] = imported(log)
    table = with_likelihoods(run)["ll_continuation"]
    logged = {}
    for path in log:
        task = path.name.removeprefix("samples_").rsplit("_", 1)[0]
        above = "mmlu" if task.startswith("mmlu_") else task
        for line in lines(path):
            for number, (value, _) in enumerate(line["filtered_resps"]):
                logged[above, task, line["doc_id"], number] = value
    assert len(logged) == len(table) > 60
    assert {key: str(value) for key, value in table.items()} == logged


def test_accuracies_are_those_of_the_results_file(log: list[Path], imported: Importer) -> None:
    [run] = imported(log)
    [path] = log[0].parent.glob("results_*.json")
    results = json.loads(path.read_text(encoding="utf-8"))["results"]
    for task in TASKS:
        for rule in ("acc", "acc_norm"):
            if (expected := results[task].get(f"{rule},none")) is not None:
                [metric] = [one for one in benchmark_of(run).metrics(run, rule) if one.task == task]
                assert metric.value == pytest.approx(expected, abs=1e-12)
                assert metric.truncated is None


def test_what_a_log_does_not_say_is_unavailable(log: list[Path], imported: Importer) -> None:
    [run] = imported(log)
    assert run.scores[list(UNCOUNTED)].isna().all(axis=None)
    assert tuple(benchmark_of(run).comparable(run).rules) == RULES
    for rule in ("ppl", "ppl_continuation", "ppl_continuation_end", "acc_token", "pmi"):
        assert "imported log does not have" in (why_unusable(find_rule(rule), run.scores) or "")
        with pytest.raises(UsageError, match="imported log does not have"):
            row_scores(run.scores, find_rule(rule))


def test_some_of_mmlus_subjects_are_noted(log: list[Path], imported: Importer) -> None:
    """Else a log of one subject looks like MMLU."""
    subjects = sorted(path for path in log if "mmlu_" in path.name)
    for paths in (subjects[:1], subjects):
        names = ", ".join(path.name.removeprefix("samples_mmlu_").rsplit("_", 1)[0] for path in paths)
        [run] = imported(paths)
        [note] = origin_notes(run.manifest)
        assert f"; {len(paths)} of {len(SUBJECTS)} subjects of MMLU ({names})" in note
        assert any(note in plain(one) for table in benchmark_of(run).report(run).tables for one in table.notes)
    [run] = imported([path for path in log if path not in subjects])
    assert "subjects" not in origin_notes(run.manifest)[0]


def test_its_manifest_says_where_it_is_from(log: list[Path], checkpoint: Path, imported: Importer) -> None:
    [run] = imported(log)
    manifest = run.manifest
    assert manifest["model"] == str(checkpoint)
    assert manifest["template"]["name"] == "plain"
    assert manifest["specification"]["dtype"] == "float32"
    assert manifest["specification"]["num_fewshot"] == 0
    assert manifest["imported"]["origin"] == "a log of lm-eval 0.4.13"
    assert set(manifest["imported"]["files"]) == {path.name for path in log}
    assert manifest["loaded"]["parameters"] > 0


def test_the_same_log_is_the_same_run(log: list[Path], imported: Importer, tmp_path: Path) -> None:
    [first] = imported(log, output=tmp_path)
    before = {path: path.stat().st_mtime_ns for path in first.folder.rglob("*") if path.name not in (".lock", ".owner")}
    [again] = imported(log[::-1], output=tmp_path)
    assert again.folder == first.folder
    assert {path: path.stat().st_mtime_ns for path in before} == before
    [other] = imported(log, "another", tmp_path)
    assert other.folder != first.folder


def test_a_killed_import_is_repeated(log: list[Path], imported: Importer, tmp_path: Path) -> None:
    [run] = imported(log, output=tmp_path)
    (run.folder / "results.json").unlink()
    [again] = imported(log, output=tmp_path)
    assert again.complete and again.folder == run.folder


def test_documents_are_found_by_number_and_content(
    log: list[Path], ours: Run, imported: Importer, tmp_path: Path
) -> None:
    """In any order of lines, and with more fields, as in the hub's rows; under another number they are refused."""
    [path] = (path for path in log if "arc_easy" in path.name)
    content = lines(path)
    for line in content:
        line["doc"] |= {"split": "test"}
        rehash(line)
    rewrite(copy := tmp_path / path.name, content[::-1])
    [run] = imported([copy], "model")
    [straight] = imported([path])
    pd.testing.assert_frame_equal(run.scores, straight.scores)
    assert same(ours, run, "acc_norm") == len(content)
    [stored] = run.folder.glob("lm_eval/samples_*")
    assert stored.read_bytes() == copy.read_bytes()
    numbers = [line["doc_id"] for line in content]
    for changed in (numbers[::-1], [number + 1 for number in numbers], [number + 1000 for number in numbers]):
        rewrite(copy, [line | {"doc_id": number} for line, number in zip(content, changed, strict=True)])
        with pytest.raises(DataError, match="is not document"):
            imported([copy], "model")


def test_logs_of_other_versions_are_refused(log: list[Path], imported: Importer, tmp_path: Path) -> None:
    """Earlier versions wrote no hashes."""
    [path] = (path for path in log if "hellaswag" in path.name)
    content = lines(path)
    for line in content:
        del line["doc_hash"]
    rewrite(copy := tmp_path / path.name, content)
    with pytest.raises(DataError, match=r"line 1: .*doc_hash"):
        imported([copy], "model")


def test_two_files_of_the_same_documents(
    log: list[Path], checkpoint: Path, library: Library, imported: Importer, tmp_path: Path
) -> None:
    """Else a subject's documents count twice."""
    [pooled] = lm_eval_log(checkpoint, tmp_path / "log", ("mmlu_pooled",), 5, **own_tasks(library))
    subject = shutil.copy(next(path for path in log if "mmlu_" in path.name), pooled.parent)
    with pytest.raises(UsageError, match="same documents of mmlu"):
        imported([pooled, Path(subject)], "model")


def test_a_selection_of_documents_is_no_limit(log: list[Path], imported: Importer, tmp_path: Path) -> None:
    [path] = (path for path in log if "arc_easy" in path.name)
    content = lines(path)
    for folder, part in (("first", content[:2]), ("others", content[1:3])):
        (tmp_path / folder).mkdir()
        rewrite(tmp_path / folder / path.name, part)
    [run] = imported([tmp_path / "first" / path.name], "model")
    assert run.manifest["specification"]["limit"] == 2
    [run] = imported([tmp_path / "others" / path.name], "model")
    assert run.manifest["specification"]["limit"] is None and run.manifest["specification"]["selection"]
    views = list(benchmark_of(run).views(run, (), silent))
    assert all(content[1]["doc"]["question"] in view.texts["arc_easy", 1].common[0].text for view in views)


def test_evalkits_own_samples_come_back(ours: Run, imported: Importer, tmp_path: Path) -> None:
    paths = [path for path in export_run(ours, "lm_eval", output=tmp_path / "exported") if path.suffix == ".jsonl"]
    [run] = imported(paths)
    likelihoods = with_likelihoods(run)["ll_continuation"]
    pd.testing.assert_series_equal(likelihoods, with_likelihoods(ours)["ll_continuation"])
    assert [same(ours, run, rule) for rule in RULES] == [len(ours.scores.query("choice == 0"))] * 3
    assert run.manifest["template"]["name"] == "plain" and run.manifest["specification"]["limit"] is None
    assert "evalkit" in run.manifest["imported"]["origin"]
    # And what the imported run exports is what it was imported from
    again = export_run(run, "lm_eval", output=tmp_path / "again")
    for path in again:
        assert path.read_bytes() == (tmp_path / "exported" / path.name).read_bytes()
    [third] = imported([path for path in again if path.suffix == ".jsonl"])
    assert third.manifest["id"] == run.manifest["id"]


def test_a_random_sample_of_evalkits_is_known_as_one(
    checkpoint: Path, real_documents: Path, imported: Importer, tmp_path: Path
) -> None:
    """If the documents are those that size and seed draw."""
    run = evaluate(
        str(checkpoint), data_dir=real_documents, allow_unofficial_data=True, tasks=("arc_easy", "mmlu"), sample=3,
        seed=5, template="plain", log_samples=True, output=tmp_path / "runs", progress=Progress(live=False),
    )  # fmt: skip
    paths = [path for path in export_run(run, "lm_eval", output=tmp_path / "log") if path.suffix == ".jsonl"]
    [found] = imported(paths)
    assert traits(found)["limit"] == traits(run)["limit"]
    assert traits(found)["limit"].value == "3 random (seed 5)"
    [beside] = (tmp_path / "log").glob("results_*")
    beside.write_text(beside.read_text(encoding="utf-8").replace('"seed": 5', '"seed": 6'), encoding="utf-8")
    [found] = imported(paths)
    assert traits(found)["limit"].value.startswith("selection ")


def test_the_template_of_evalkits_samples_is_kept(finished: Run, tmp_path: Path, documents: Path) -> None:
    again = evaluate(
        finished.manifest["path"], data_dir=documents, allow_unofficial_data=True, tasks="piqa", log_samples=True,
        output=tmp_path / "runs", progress=Progress(live=False),
    )  # fmt: skip
    paths = [path for path in export_run(again, "lm_eval", output=tmp_path / "log") if path.suffix == ".jsonl"]
    library = Library(documents, allow_unofficial=True, say=silent)
    [run] = import_logs(paths, None, tmp_path / "imported", library, silent)
    assert run.manifest["template"]["name"] == "inst"
    assert same(again, run, "acc_norm") == 6
    # Without the results file the prompts are not known
    alone = Path(shutil.copy(paths[0], tmp_path))
    [run] = import_logs([alone], "model", tmp_path / "imported", library, silent)
    assert run.manifest["template"] == "logged"


@pytest.mark.parametrize("names", [("made_choice", "made_other"), ("made_answers",)])
def test_tasks_that_are_not_pinned(
    names: tuple[str, ...], checkpoint: Path, tasks: Path, imported: Importer, tmp_path: Path
) -> None:
    log = lm_eval_log(checkpoint, tmp_path / "log", names, include_path=str(tasks))
    run = evaluate(
        str(checkpoint), suite="lm_eval", tasks=names, include_path=tasks, dtype="float32", log_samples=True,
        output=tmp_path / "runs", progress=Progress(live=False),
    )  # fmt: skip
    [found] = imported(log)
    assert found.suite == "lm_eval"
    choices = "made_choice" in names
    rules = RULES if choices else (None,)
    expected = {"made_choice": 6, "made_other": 9, "made_answers": 6}
    assert [same(run, found, rule) for rule in rules] == [sum(expected[name] for name in names)] * len(rules)
    mine, theirs = ({one.task + one.name: one.value for one in benchmark_of(x).metrics(x)} for x in (run, found))
    assert mine == pytest.approx(theirs)
    # The same from evalkit's own samples, and in another order
    paths = [path for path in export_run(run, "lm_eval", output=tmp_path / "own") if path.suffix == ".jsonl"]
    for path in paths:
        content = lines(path)
        for line in content:
            line["doc_id"] = 50 - line["doc_id"]
        rewrite(path, content)
    for path in (tmp_path / "own").glob("results_*"):
        path.unlink()
    [shuffled] = imported(paths, "model")
    rules = ("acc",) if choices else (None,)
    assert [same(run, shuffled, rule) for rule in rules] == [sum(expected[name] for name in names)] * len(rules)


def test_documents_with_other_numbers_are_not_shown_side_by_side(
    checkpoint: Path, tasks: Path, imported: Importer, tmp_path: Path
) -> None:
    """Comparisons pair by content; `show` and pages pair by number, which is another document here."""
    [path] = lm_eval_log(checkpoint, tmp_path / "log", ("made_answers",), include_path=str(tasks))
    [run] = imported([path])
    content = lines(path)
    for line in content:
        line["doc_id"] = 5 - line["doc_id"]
    rewrite(path, content)
    [turned] = imported([path], "turned")
    check_same_documents(run, run, "made_answers")
    with pytest.raises(UsageError, match="content of document 0"):
        check_same_documents(run, turned, "made_answers")
    assert same(run, turned, None) == 6


def test_the_task_with_all_of_mmlus_subjects(
    checkpoint: Path, ours: Run, library: Library, imported: Importer, tmp_path: Path
) -> None:
    [path] = lm_eval_log(checkpoint, tmp_path / "log", ("mmlu_pooled",), 5, **own_tasks(library))
    [run] = imported([path])
    assert list(run.manifest["documents"]) == ["mmlu"] and run.manifest["specification"]["limit"] == 5
    assert len(set(run.scores["subtask"])) == 5
    assert same(ours, run, "acc") == 5
    [view] = benchmark_of(run).views(run, (), silent)
    assert len(view.texts) == 5 and not view.problem


def test_a_task_with_a_pinned_name_and_other_documents(
    checkpoint: Path, tasks: Path, imported: Importer, tmp_path: Path
) -> None:
    [path] = lm_eval_log(checkpoint, tmp_path / "log", ("made_choice",), include_path=str(tasks))
    copy = tmp_path / path.name.replace("made_choice", "arc_easy")
    shutil.copy(path, copy)
    [run] = imported([copy], "model")
    assert run.suite == "lm_eval" and [task["task"] for task in run.stored["tasks"]] == ["arc_easy"]


def test_other_prompts_are_not_plain(log: list[Path], ours: Run, imported: Importer, tmp_path: Path) -> None:
    [path] = (path for path in log if "arc_easy" in path.name)
    content: list[dict[str, Any]] = lines(path)
    for line in content:
        for pair in line["arguments"].values():
            pair["arg_0"] = "Answer the question.\n" + pair["arg_0"]
        rehash(line)
    rewrite(copy := tmp_path / path.name, content)
    [run] = imported([copy], "model")
    assert run.manifest["template"] == "logged"
    assert run.manifest["specification"]["num_fewshot"] is None
    [view] = benchmark_of(run).views(run, (), silent)
    assert view.texts["arc_easy", 0].common[0].text.startswith("Answer the question.\n")
    assert same(ours, run, "acc") == 5


def test_a_document_that_differs_is_counted(checkpoint: Path, tasks: Path, imported: Importer, tmp_path: Path) -> None:
    [path] = lm_eval_log(checkpoint, tmp_path / "log", ("made_answers",), include_path=str(tasks))
    [run] = imported([path])
    content = lines(path)
    for line in content:
        if line["doc_id"] == 2:
            line["exact_match"] = 1.0 - line["exact_match"]
    rewrite(copy := tmp_path / path.name, content)
    [changed] = imported([copy], "model")
    [found] = compare_sides([Side("a", (run,)), Side("b", (changed,))])
    assert [(task.name, task.n, task.won + task.lost) for task in found.tasks] == [("made_answers", 6, 1)]
    assert "exact_match,whole" in found.measure.words


def test_metrics_are_computed_from_the_documents(
    checkpoint: Path, tasks: Path, imported: Importer, tmp_path: Path
) -> None:
    """Means and perplexities, to lm-eval's own values; a results file with others is refused."""
    log = lm_eval_log(
        checkpoint, tmp_path / "log", ("made_last_word", "made_texts", "made_answers"), include_path=str(tasks)
    )
    [beside] = log[0].parent.glob("results_*")
    results = json.loads(beside.read_text(encoding="utf-8"))
    expected = {
        (task, *key.split(",")): value
        for task, found in results["results"].items()
        for key, value in found.items()
        if "," in key and "_stderr" not in key
    }
    [run] = imported(log)
    shown = {
        (task["task"], one["metric"], one["filter"]): one["value"]
        for task in run.stored["tasks"]
        for one in task["metrics"]
    }
    assert len(shown) == 7 and shown == pytest.approx(expected)
    for task, metric, rule in shown:
        changed = json.loads(json.dumps(results))
        changed["results"][task][f"{metric},{rule}"] = expected[task, metric, rule] * 1.01 + 0.01
        beside.write_text(json.dumps(changed), encoding="utf-8")
        with pytest.raises(DataError, match=f"{metric} .* for {task}"):
            imported(log)


def test_a_metric_that_does_not_follow_from_its_documents_is_left_out(
    checkpoint: Path, tasks: Path, library: Library, tmp_path: Path
) -> None:
    [path] = lm_eval_log(checkpoint, tmp_path / "log", ("made_answers",), include_path=str(tasks))
    [beside] = path.parent.glob("results_*")
    results = json.loads(beside.read_text(encoding="utf-8"))
    results["results"]["made_answers"] |= {"bleu,whole": 0.99, "exact_match,none": 0.99}
    beside.write_text(json.dumps(results), encoding="utf-8")
    said: list[str] = []
    [run] = import_logs([path], None, tmp_path / "imported", library, said.append)
    assert [one["metric"] for one in run.stored["tasks"][0]["metrics"]] == ["exact_match"] * 2
    assert any("bleu,whole" in line and "exact_match,none" in line and "left out" in line for line in said)
