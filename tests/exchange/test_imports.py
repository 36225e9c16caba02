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

from evalkit.benchmarks.registry import results_of
from evalkit.benchmarks.run import evaluate
from evalkit.comparison.comparison import compare_sides
from evalkit.comparison.differences import Comparison
from evalkit.comparison.pairing import check_same_documents
from evalkit.comparison.sides import Side
from evalkit.data import Library
from evalkit.display import Progress
from evalkit.errors import DataError, UsageError
from evalkit.exchange.exports import export_run
from evalkit.exchange.metric_runs import import_logs
from evalkit.models.loading.locate import silent
from evalkit.reporting.table import plain
from evalkit.runs.folder import Run
from evalkit.runs.notes import run_notes
from evalkit.runs.rules import find_rule, why_unusable
from evalkit.runs.score_table import UNCOUNTED
from evalkit.runs.traits import traits
from tests.benchmarks.lm_eval.made import ANSWERS, CHOICE, made_tasks, write_task
from tests.documents import SUBJECTS
from tests.exchange.logged import lines, lm_eval_log, own_tasks, rehash, rewrite

RULES = ("acc", "acc_norm", "acc_bytes")
TASKS = ("arc_easy", "winogrande", "hellaswag")
pytestmark = [
    # lm-eval's own, all of them
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
CHOICES = [
    {"question": f"Which one is number {n}?", "choices": ["one", "another é", "the third"][: 2 + n % 2], "gold": n % 2}
    for n in range(8)
]
WORDS = [
    {"text": f"The word is {word}\n", "answer": word} for word in ("the", "of", "and", "a", "in", "to", "it", "is")
]
PAIRS = [document | {"choices": document["choices"][:2]} for document in CHOICES]
Importer = Callable[..., list[Run]]
Evaluate = Callable[..., Run]


@pytest.fixture(scope="module")
def library(real_documents: Path) -> Library:
    return Library(real_documents, allow_unofficial=True, say=silent)


@pytest.fixture
def imported(library: Library, tmp_path: Path) -> Importer:
    def run(paths: list[Path], model: str | None = None, output: str = "imported") -> list[Run]:
        return import_logs(paths, model, tmp_path / output, library, silent)

    return run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Task files that evalkit does not ship."""
    folder = made_tasks(tmp_path_factory.mktemp("tasks"))
    write_task(folder, CHOICE | {"task": "lined", "target_delimiter": "\n"}, CHOICES)
    write_task(folder, ANSWERS | {"task": "answered"}, WORDS)
    lower = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": False}]
    write_task(folder, ANSWERS | {"task": "lowered", "metric_list": lower}, WORDS)
    return folder


@pytest.fixture(scope="module")
def pinned_log(checkpoint: Path, library: Library, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """lm-eval's log of three tasks and two of MMLU's subjects."""
    tasks = (*TASKS, *(f"mmlu_{subject}" for subject in SUBJECTS[:2]))
    return lm_eval_log(checkpoint, tmp_path_factory.mktemp("log"), tasks, 5, **own_tasks(library))


@pytest.fixture(scope="module")
def made_log(checkpoint: Path, made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """lm-eval's log of tasks that are not pinned; copy it to change it."""
    tasks = ("made_choice", "made_answers", "made_last_word", "made_texts")
    return lm_eval_log(checkpoint, tmp_path_factory.mktemp("log"), tasks, include_path=str(made))[0].parent


@pytest.fixture
def copied(made_log: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made_log, tmp_path / "log"))


@pytest.fixture(scope="module")
def ours(checkpoint: Path, real_documents: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """evalkit's run with lm-eval's prompt."""
    return evaluate(
        str(checkpoint), data_dir=real_documents, allow_unofficial_data=True, tasks=(*TASKS, "mmlu"), template="plain",
        dtype="float32", log_samples=True, output=tmp_path_factory.mktemp("runs"), progress=Progress(live=False),
    )  # fmt: skip


@pytest.fixture(scope="module")
def evaluated(checkpoint: Path, made: Path, tmp_path_factory: pytest.TempPathFactory) -> Evaluate:
    """evalkit's own runs of tasks that are not pinned, each made once."""
    output = tmp_path_factory.mktemp("runs")

    def run(*names: str, **options: Any) -> Run:
        return evaluate(
            str(checkpoint), suite="lm_eval", tasks=names, include_path=made, dtype="float32", log_samples=True,
            output=output, progress=Progress(live=False), **options,
        )  # fmt: skip

    return run


def samples_in(folder: Path, task: str = "*") -> list[Path]:
    return sorted(folder.glob(f"samples_{task}_*"))


def log_of(run: Run, folder: Path, *, summary: bool = True) -> list[Path]:
    """Export a run's sample files, with the results file or without it."""
    export_run(run, "lm_eval", output=folder)
    if not summary:
        for path in folder.glob("results_*"):
            path.unlink()
    return samples_in(folder)


def change_results(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    [path] = folder.glob("results_*")
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def compared(a: Run, b: Run, rule: str | None = None) -> Comparison:
    [comparison] = compare_sides([Side("a", (a,)), Side("b", (b,))], rule)
    return comparison


def same(a: Run, b: Run, rule: str | None = None) -> int:
    """Check that every document has the same score in both runs; return the number of documents."""
    comparison = compared(a, b, rule)
    for task in comparison.tasks:
        assert (task.won, task.lost, task.difference) == (0, 0, 0.0), task.name
    return sum(task.n for task in comparison.tasks)


def indexed(run: Run) -> pd.DataFrame:
    return run.scores.set_index(["task", "subtask", "doc_id", "choice"])


def test_an_imported_log_equals_the_run(pinned_log: list[Path], ours: Run, imported: Importer) -> None:
    """Its log-likelihoods to the last digit, its accuracies, and what it does not say is unavailable."""
    [run] = imported(pinned_log)
    assert run.manifest["template"]["name"] == "plain" and run.manifest["specification"]["num_fewshot"] == 0
    assert [same(ours, run, rule) for rule in RULES] == [len(run.scores.query("choice == 0"))] * 3
    mine, theirs = indexed(ours), indexed(run)
    shared = mine.loc[theirs.index]
    columns = ["choices", "gold", "chars", "bytes", "cluster"]
    pd.testing.assert_frame_equal(shared[columns], theirs[columns])
    # Both are float32 sums, of other batches
    np.testing.assert_allclose(theirs["ll_continuation"], shared["ll_continuation"], rtol=1e-5)
    logged = {
        ("mmlu" if task.startswith("mmlu_") else task, task, line["doc_id"], number): value
        for path in pinned_log
        for task in [path.name.removeprefix("samples_").rsplit("_", 1)[0]]
        for line in lines(path)
        for number, (value, _) in enumerate(line["filtered_resps"])
    }
    assert {key: str(value) for key, value in theirs["ll_continuation"].items()} == logged
    [path] = pinned_log[0].parent.glob("results_*.json")
    results = json.loads(path.read_text(encoding="utf-8"))["results"]
    for rule in ("acc", "acc_norm"):
        metrics = {metric.task: metric.value for metric in results_of(run).metrics(rule)}
        for task in TASKS:
            assert metrics[task] == pytest.approx(results[task].get(f"{rule},none", metrics[task]), abs=1e-12)
    assert run.scores[list(UNCOUNTED)].isna().all(axis=None)
    assert tuple(results_of(run).comparable().rules) == RULES
    for rule in ("ppl", "acc_token", "pmi"):
        assert why_unusable(find_rule(rule), run.scores)


def test_the_same_log_is_the_same_run(pinned_log: list[Path], imported: Importer) -> None:
    """In any order of files; an import that was killed is repeated; some of MMLU's subjects do not look like all."""
    [first] = imported(pinned_log)
    before = {path: path.stat().st_mtime_ns for path in first.folder.rglob("*") if path.name not in (".lock", ".owner")}
    [again] = imported(pinned_log[::-1])
    [of_folder] = imported([pinned_log[0].parents[1]])
    assert of_folder.folder == first.folder
    with pytest.raises(UsageError, match="no samples_"):
        imported([Path(__file__).parent])
    assert again.folder == first.folder
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert imported(pinned_log, "another")[0].folder != first.folder
    (first.folder / "results.json").unlink()
    [again] = imported(pinned_log)
    assert again.complete and again.folder == first.folder
    note, *_ = run_notes(first.manifest)
    assert f"2 of {len(SUBJECTS)} subjects of MMLU" in note
    assert any(note in plain(text) for table in results_of(first).report().tables for text in table.notes)


def test_documents_are_found_by_content(pinned_log: list[Path], ours: Run, imported: Importer, tmp_path: Path) -> None:
    """In any order of lines, with more fields, as in the hub's rows, and under other numbers, as in shuffled splits."""
    [path] = (path for path in pinned_log if "arc_easy" in path.name)
    content = lines(path)
    for line in content:
        line["doc"] |= {"split": "test"}
        rehash(line)
    rewrite(copy := tmp_path / path.name, content[::-1])
    [run], [straight] = imported([copy], "model"), imported([path])
    pd.testing.assert_frame_equal(run.scores, straight.scores)
    assert same(ours, run, "acc_norm") == len(content)
    [stored] = run.folder.glob("lm_eval/samples_*")
    assert stored.read_bytes() == copy.read_bytes()
    numbers = [line["doc_id"] for line in content]
    for changed in (numbers[::-1], [number + 1000 for number in numbers]):
        rewrite(copy, [line | {"doc_id": number} for line, number in zip(content, changed, strict=True)])
        [other] = imported([copy], "model")
        pd.testing.assert_frame_equal(other.scores, straight.scores)
    # Documents that are not the first ones are no limit
    rewrite(copy, lines(path)[1:3])
    [run] = imported([copy], "model")
    assert run.manifest["specification"]["limit"] is None and run.manifest["specification"]["selection"]
    # Other prompts than evalkit's are no known template
    for line in content:
        for pair in line["arguments"].values():
            pair["arg_0"] = "Answer the question.\n" + pair["arg_0"]
        rehash(line)
    rewrite(copy, content)
    [run] = imported([copy], "model")
    assert run.manifest["template"] == "logged" and run.manifest["specification"]["num_fewshot"] is None
    assert same(ours, run, "acc") == 5


def _shuffled_log(checkpoint: Path, folder: Path, task: dict[str, Any], **evaluation: Any) -> list[Path]:
    """Return lm-eval's log of a task whose `process_docs` returns another order at each call."""
    (folder / "tasks").mkdir(parents=True)
    code = "def shuffled(documents):\n    return documents.shuffle()\n"
    (folder / "tasks" / "code.py").write_text(code, encoding="utf-8")
    path = write_task(folder / "tasks", task, PAIRS if task["output_type"] == "multiple_choice" else WORDS)
    path.write_text(f"{path.read_text(encoding='utf-8')}process_docs: !function code.shuffled\n", encoding="utf-8")
    return lm_eval_log(checkpoint, folder, (task["task"],), include_path=str(folder / "tasks"), **evaluation)


@pytest.mark.slow
def test_a_log_whose_documents_were_shuffled(
    checkpoint: Path, imported: Importer, library: Library, tmp_path: Path
) -> None:
    """Its answers are measured with the documents of their requests, whose hashes it has, unlike in lm-eval."""
    metrics = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in RULES]
    task = CHOICE | {"task": "shuffled", "metric_list": metrics}
    [path] = _shuffled_log(checkpoint, tmp_path / "log", task)
    [run] = imported([path])
    write_task(tmp_path / "straight", task, PAIRS)
    [straight] = imported(
        lm_eval_log(checkpoint, tmp_path / "other", ("shuffled",), include_path=str(tmp_path / "straight"))
    )
    for rule in RULES:
        assert same(straight, run, rule) == len(PAIRS)
        assert run.results(rule).average.value == straight.results(rule).average.value
    shown = [{m["metric"]: m["value"] for m in each.stored["tasks"][0]["metrics"]} for each in (run, straight)]
    assert shown[0] == shown[1]
    [caveat] = run.manifest["caveats"]["shuffled"]
    assert f"of {len(PAIRS)} documents against another" in caveat and "caveats" not in straight.manifest
    # Without the answered document, or without its accuracies, only lm-eval's numbers would be left
    for log, where in (
        (_shuffled_log(checkpoint, tmp_path / "part", task, limit=2), "document"),
        (_shuffled_log(checkpoint, tmp_path / "texts", ANSWERS | {"task": "answered"}), "document"),
    ):
        with pytest.raises(DataError, match=f"{where} .*doc_hash.*process_docs|{where} .*doc_hash.*computed"):
            imported(log)


def test_the_number_of_examples_fits_the_prompts(
    copied: Path, pinned_log: list[Path], made: Path, checkpoint: Path, imported: Importer, tmp_path: Path
) -> None:
    """A results file may not say that there are examples which no prompt has; of a text alone there are none."""
    change_results(copied, lambda content: content["n-shot"].update(made_choice=5, made_texts=5))
    with pytest.raises(DataError, match=r"made_choice.*document 0 has fewer solved examples.* 5 of made_choice"):
        imported(samples_in(copied, "made_choice"))
    [run] = imported(samples_in(copied, "made_texts"))
    assert run.manifest["specification"]["num_fewshot"] == 0
    [run] = imported(lm_eval_log(checkpoint, tmp_path / "shots", ("made_shots",), include_path=str(made)))
    assert run.manifest["specification"]["num_fewshot"] == 2
    folder = Path(shutil.copytree(pinned_log[0].parent, tmp_path / "pinned"))
    # As in evalkit's own logs, which do not say what follows each example
    change_results(folder, lambda content: content.update(configs={}))
    change_results(folder, lambda content: content["n-shot"].update(arc_easy=5))
    with pytest.raises(DataError, match="5 solved examples before each question of arc_easy"):
        imported(samples_in(folder, "arc_easy"))


def test_gold_answers_that_are_no_choice_are_marked(checkpoint: Path, imported: Importer, tmp_path: Path) -> None:
    documents = [*CHOICES[:3], CHOICES[3] | {"gold": 7}]
    write_task(tmp_path / "tasks", CHOICE | {"task": "beyond"}, documents)
    [run] = imported(lm_eval_log(checkpoint, tmp_path / "log", ("beyond",), include_path=str(tmp_path / "tasks")))
    [caveat] = run.stored["caveats"]["beyond"]
    assert caveat.startswith("1 of 4 documents, document 3") and "7" in caveat


def test_evalkits_own_samples_come_back(ours: Run, imported: Importer, tmp_path: Path) -> None:
    paths = log_of(ours, tmp_path / "exported")
    [run] = imported(paths)
    pd.testing.assert_series_equal(indexed(run)["ll_continuation"], indexed(ours)["ll_continuation"])
    assert [same(ours, run, rule) for rule in RULES] == [len(ours.scores.query("choice == 0"))] * 3
    assert run.manifest["template"]["name"] == "plain" and run.manifest["specification"]["limit"] is None
    assert "evalkit" in run.manifest["imported"]["origin"]
    # And what the imported run exports is what it was imported from
    again = log_of(run, tmp_path / "again")
    for path in (tmp_path / "again").iterdir():
        assert path.read_bytes() == (tmp_path / "exported" / path.name).read_bytes()
    assert imported(again)[0].manifest["id"] == run.manifest["id"]


def test_the_template_and_the_sample_of_evalkits_logs_are_kept(
    checkpoint: Path, real_documents: Path, imported: Importer, tmp_path: Path
) -> None:
    """The sample if the documents are those that size and seed draw; without the results file neither is known."""
    run = evaluate(
        str(checkpoint), data_dir=real_documents, allow_unofficial_data=True, tasks=("arc_easy", "mmlu"), sample=3,
        seed=5, log_samples=True, output=tmp_path / "runs", progress=Progress(live=False),
    )  # fmt: skip
    paths = log_of(run, tmp_path / "log")
    [kept] = imported(paths)
    assert kept.manifest["template"]["name"] == "inst"
    assert traits(kept)["limit"] == traits(run)["limit"] and traits(kept)["limit"].value == "3 random (seed 5)"
    change_results(tmp_path / "log", lambda content: content["evalkit"].update(seed=6))
    assert traits(imported(paths)[0])["limit"].value.startswith("selection ")
    next((tmp_path / "log").glob("results_*")).unlink()
    assert imported(paths, "model")[0].manifest["template"] == "logged"


@pytest.mark.slow
def test_the_task_with_all_of_mmlus_subjects(
    checkpoint: Path, ours: Run, library: Library, pinned_log: list[Path], imported: Importer, tmp_path: Path
) -> None:
    [path] = lm_eval_log(checkpoint, tmp_path / "log", ("mmlu_pooled",), 5, **own_tasks(library))
    [run] = imported([path])
    assert list(run.manifest["documents"]) == ["mmlu"] and run.manifest["specification"]["limit"] == 5
    assert len(set(run.scores["subtask"])) == same(ours, run, "acc") == 5
    [view] = results_of(run).views((), silent)
    assert len(view.texts) == 5 and not view.problem


def test_tasks_that_are_not_pinned(made_log: Path, evaluated: Evaluate, imported: Importer, tmp_path: Path) -> None:
    """Choices and other tasks are runs of their own; documents are paired by content, whatever their numbers are."""
    choices, others = imported(samples_in(made_log))
    for names, run, rules in ((("made_choice",), choices, RULES), (("made_answers",), others, (None,))):
        expected = evaluated(*names)
        assert run.suite == "lm_eval" and [same(expected, run, rule) for rule in rules] == [6] * len(rules)
        mine, theirs = (
            {metric.task + metric.name: metric.value for metric in results_of(each).metrics()}
            for each in (expected, run)
        )
        assert mine.items() <= {key: pytest.approx(value) for key, value in theirs.items()}.items()
        [path] = log_of(expected, tmp_path / names[0], summary=False)
        rewrite(path, [line | {"doc_id": 5 - line["doc_id"]} for line in lines(path)])
        [turned] = imported([path], "turned")
        assert same(run, turned, rules[0]) == 6
    with pytest.raises(UsageError, match="content of document"):  # `show` and pages pair by number
        check_same_documents(others, turned, "made_answers")


def test_metrics_are_computed_from_the_documents(copied: Path, imported: Importer, library: Library) -> None:
    """Means and perplexities, to lm-eval's own values; others are refused, and what does not follow is left out."""
    paths = [path for path in samples_in(copied) if "made_choice" not in path.name]
    [beside] = copied.glob("results_*")
    results = json.loads(beside.read_text(encoding="utf-8"))["results"]
    expected = {
        (task, *key.split(",")): value
        for task, metrics in results.items()
        for key, value in metrics.items()
        if "," in key and "_stderr" not in key and task != "made_choice"
    }
    [run] = imported(paths)
    shown = {
        (task["task"], metric["metric"], metric["filter"]): metric["value"]
        for task in run.stored["tasks"]
        for metric in task["metrics"]
    }
    assert len(shown) == 7 and shown == pytest.approx(expected)
    change_results(copied, lambda content: content["results"]["made_answers"].update({"bleu,whole": 0.99}))
    said: list[str] = []
    [run] = import_logs(samples_in(copied, "made_answers"), None, copied / "out", library, said.append)
    assert [metric["metric"] for metric in run.stored["tasks"][0]["metrics"]] == ["exact_match"] * 2
    assert any("bleu,whole" in line for line in said)


def test_lengths_are_those_without_the_delimiter(evaluated: Evaluate, imported: Importer, tmp_path: Path) -> None:
    """Without a results file they are unknown: a wrong delimiter often leads to the same argmax."""
    run = evaluated("lined")
    paths = log_of(run, tmp_path / "log")
    [known] = imported(paths)
    assert known.scores["chars"].tolist() == [len(option) for doc in CHOICES for option in doc["choices"]]
    assert known.scores["bytes"].tolist() == run.scores["bytes"].tolist() != run.scores["chars"].tolist()
    continuous = compared(run, known).continuous
    assert continuous is not None and continuous.average.difference == 0.0
    [path] = log_of(run, tmp_path / "alone", summary=False)
    [unknown] = imported([path], "model")
    assert unknown.scores[["chars", "bytes"]].isna().all(axis=None)
    comparable = results_of(unknown).comparable()
    assert list(comparable.rules) == ["acc"]
    with pytest.raises(UsageError, match="bits_per_byte"):
        comparable.by_rule("bits_per_byte")


def test_a_chat_template_replaces_the_delimiter(evaluated: Evaluate, imported: Importer, tmp_path: Path) -> None:
    """Without `gen_prefix`, lm-eval puts nothing between template and option. Chats for an API are lists of a text."""
    [path] = log_of(evaluated("lined"), tmp_path / "log")
    content = lines(path)
    for line in content:
        for pair in line["arguments"].values():
            pair["arg_0"], pair["arg_1"] = [pair["arg_0"]], " " + pair["arg_1"].removeprefix("\n")
        del line["acc_norm"]
        line["metrics"] = ["acc"]
    rewrite(path, content)
    for template, extra in (("{{ messages }}", 1), (None, 0)):
        about = {"chat_template": template, "task_hashes": {}}
        change_results(path.parent, lambda content, about=about: content.update(about))
        change_results(path.parent, lambda content: content["configs"]["lined"].update(target_delimiter=" "))
        [run] = imported([path], output=str(extra))
        assert run.scores["chars"].tolist() == [len(option) + extra for doc in CHOICES for option in doc["choices"]]


def test_the_direction_of_a_metric(evaluated: Evaluate, imported: Importer, tmp_path: Path) -> None:
    """Without a results file it is unknown, so neither is better, unless the other run knows it."""
    [path] = log_of(evaluated("lowered"), tmp_path / "log", summary=False)
    runs = []
    for value in (0.0, 1.0):
        rewrite(path, [line | {"exact_match": value} for line in lines(path)])
        runs += imported([path], f"model {value}")
    assert compared(*runs).measure.higher_is_better is None
    assert [compared(*pair).average.verdict for pair in (runs, runs[::-1])] == ["higher", "lower"]
    run = evaluated("answered")
    [path] = log_of(run, tmp_path / "known", summary=False)
    rewrite(path, [line | {"exact_match": 1.0} for line in lines(path)])
    [right] = imported([path], "model")
    assert [compared(*pair).average.verdict for pair in ((run, right), (right, run))] == ["better", "worse"]
