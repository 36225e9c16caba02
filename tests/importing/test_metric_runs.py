"""Imported logs of tasks that are not pinned: what a log says, and what it does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evalkit.benchmarks.document_views import AnswerView
from evalkit.benchmarks.multiple_choice.results_report import outcomes_table
from evalkit.benchmarks.registry import benchmark_of
from evalkit.benchmarks.run import evaluate
from evalkit.comparison.comparison import compare_sides
from evalkit.comparison.differences import Comparison
from evalkit.comparison.sides import Side
from evalkit.data import Library
from evalkit.display import Progress
from evalkit.errors import DataError, UsageError
from evalkit.exchange.exports import export_run
from evalkit.exchange.metric_runs import import_logs
from evalkit.models.loading.locate import silent
from evalkit.reporting.table import plain
from evalkit.runs.folder import Run
from evalkit.runs.rules import find_rule, why_unusable
from evalkit.runs.traits import documents_read, traits
from tests.benchmarks.lm_eval.made import ANSWERS, CHOICE, write_task
from tests.benchmarks.lm_eval.made import TEXTS as ROLLING
from tests.importing.logged import lines, rewrite

RULES = ("acc", "acc_norm", "acc_bytes")
pytestmark = [
    # lm-eval's own, all of them
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
CHOICES = [
    {
        "question": f"Which one is number {place}?",
        "choices": ["one", "another é", "the third"][: 2 + place % 2],
        "gold": place % 2,
    }
    for place in range(8)
]
TEXTS = [
    {"text": f"The word is {word}\n", "answer": word} for word in ("the", "of", "and", "a", "in", "to", "it", "is")
]
NUMBERS = [
    {"question": f"What comes before {place + 1}?", "choices": ["3", "2", "1", "0"], "answer": str(place)}
    for place in range(4)
]
"""Texts of options that are also numbers of others."""

Evaluate = Callable[..., Run]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task whose options are on a line of their own, one of answers, and one whose lower values are better."""
    folder = tmp_path_factory.mktemp("tasks")
    write_task(folder, CHOICE | {"task": "lined", "target_delimiter": "\n"}, CHOICES)
    write_task(folder, ANSWERS | {"task": "answered"}, TEXTS)
    lower = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": False}]
    write_task(folder, ANSWERS | {"task": "lowered", "metric_list": lower}, TEXTS)
    names: list[Any] = [entry["metric"] for entry in ROLLING["metric_list"]]  # type: ignore[index]
    write_task(folder, ROLLING | {"task": "rolling", "metric_list": [{"metric": name} for name in names]}, TEXTS)
    write_task(folder, CHOICE | {"task": "texts_as_targets", "doc_to_target": "answer"}, NUMBERS)
    return folder


@pytest.fixture(scope="module")
def evaluated(checkpoint: Path, tasks: Path, tmp_path_factory: pytest.TempPathFactory) -> Evaluate:
    """evalkit's own run of some of the tasks."""

    def run(*names: str, **options: Any) -> Run:
        return evaluate(
            str(checkpoint), suite="lm_eval", tasks=names, include_path=tasks, dtype="float32", log_samples=True,
            output=tmp_path_factory.mktemp("runs"), progress=Progress(live=False), **options,
        )  # fmt: skip

    return run


def log_of(run: Run, folder: Path, *, summary: bool = True) -> list[Path]:
    """Export a run's sample files, with the results file or without it."""
    paths = export_run(run, "lm_eval", output=folder)
    if not summary:
        for path in folder.glob("results_*"):
            path.unlink()
    return [path for path in paths if path.suffix == ".jsonl"]


def imported(paths: list[Path], folder: Path, model: str | None = None) -> list[Run]:
    return import_logs(paths, model, folder / "imported", Library(say=silent), silent)


def compared(a: Run, b: Run, rule: str | None = None) -> Comparison:
    [found] = compare_sides([Side("a", (a,)), Side("b", (b,))], rule)
    return found


def test_lengths_are_those_without_the_delimiter(evaluated: Evaluate, tmp_path: Path) -> None:
    run = evaluated("lined")
    [found] = imported(log_of(run, tmp_path / "log"), tmp_path)
    assert found.scores["chars"].tolist() == [len(option) for one in CHOICES for option in one["choices"]]
    assert found.scores["bytes"].tolist() == run.scores["bytes"].tolist() != run.scores["chars"].tolist()
    continuous = compared(run, found).continuous
    assert continuous is not None and continuous.average.difference == 0.0


def test_lengths_without_a_results_file_are_unknown(evaluated: Evaluate, tmp_path: Path) -> None:
    """They cannot be guessed: a wrong delimiter often leads to the same argmax."""
    run = evaluated("lined")
    [found] = imported(log_of(run, tmp_path / "log", summary=False), tmp_path, "model")
    assert found.scores[["chars", "bytes"]].isna().all(axis=None)
    comparable = benchmark_of(found).comparable(found)
    assert list(comparable.rules) == ["acc"]
    for rule in ("acc_norm", "acc_bytes"):
        reason = why_unusable(find_rule(rule), found.scores)
        assert reason is not None and "lengths of the answer options" in reason and "lined lacks" in reason
    with pytest.raises(UsageError, match="outcome bits_per_byte needs the lengths of the answer options"):
        comparable.by_rule("bits_per_byte")
    for a, b in ((run, found), (found, run)):
        whole = compared(a, b, "acc")
        assert whole.continuous is None and whole.average.difference == 0.0
    assert compared(run, found, "log_loss").average.difference == 0.0
    table = outcomes_table(found, "acc")
    values = {plain(line.label): [cell.value for cell in line.cells] for line in table.lines}
    assert values["bits per byte"] == ["–", "–"] and "–" not in values["log loss"]
    assert "import it again with results_<time>.json" in plain(table.notes[0])


def test_a_chat_template_replaces_the_delimiter(evaluated: Evaluate, tmp_path: Path) -> None:
    """Without `gen_prefix`, lm-eval puts nothing between template and option."""
    [path] = log_of(evaluated("lined"), tmp_path / "log")
    content = lines(path)
    for line in content:
        for pair in line["arguments"].values():
            pair["arg_1"] = " " + pair["arg_1"].removeprefix("\n")
        del line["acc_norm"]
        line["metrics"] = ["acc"]
    rewrite(path, content)
    [beside] = path.parent.glob("results_*")
    results = json.loads(beside.read_text(encoding="utf-8"))
    results["configs"]["lined"]["target_delimiter"] = " "
    for template, extra in (("{{ messages }}", 1), (None, 0)):
        beside.write_text(json.dumps(results | {"chat_template": template, "task_hashes": {}}), encoding="utf-8")
        [found] = imported([path], tmp_path / str(extra))
        options = [len(option) + extra for one in CHOICES for option in one["choices"]]
        assert found.scores["chars"].tolist() == options


def test_choices_and_other_tasks_are_runs_of_their_own(evaluated: Evaluate, tmp_path: Path) -> None:
    """Else the documents of the others could not be compared."""
    paths = log_of(evaluated("lined", "answered"), tmp_path / "log")
    choices, others = imported(paths, tmp_path)
    assert [task["task"] for task in choices.stored["tasks"]] == ["lined"]
    assert [task["task"] for task in others.stored["tasks"]] == ["answered"]
    found = compared(others, imported(paths, tmp_path / "again", "another")[1])
    assert [(task.name, task.n, task.won + task.lost) for task in found.tasks] == [("answered", len(TEXTS), 0)]


def test_a_run_of_both_names_the_way_out(evaluated: Evaluate, tmp_path: Path) -> None:
    both = evaluated("lined", "answered")
    choices, others = imported(log_of(both, tmp_path / "log"), tmp_path)
    way_out = "run it without multiple-choice tasks to compare its own metric"
    assert way_out in compared(both, choices).left_out["answered"]
    for pair in ((both, others), (others, both)):
        with pytest.raises(UsageError, match=f"no task in common.*answered .*{way_out}"):
            compared(*pair)
    assert compared(evaluated("answered"), others).average.difference == 0.0


def test_an_unknown_direction_is_neither_better_nor_worse(evaluated: Evaluate, tmp_path: Path) -> None:
    """Without a results file: a metric may be an error, of which lower is better."""
    [path] = log_of(evaluated("lowered"), tmp_path / "log", summary=False)
    runs = []
    for value in (0.0, 1.0):
        rewrite(path, [line | {"exact_match": value} for line in lines(path)])
        runs += imported([path], tmp_path, f"model {value}")
    found = compared(*runs)
    assert found.measure.higher_is_better is None and "neither" in found.measure.words
    assert found.average.verdict == "higher" and found.tasks[0].verdict == "higher"
    assert compared(*runs[::-1]).average.verdict == "lower"


def test_a_known_direction_is_that_of_both(evaluated: Evaluate, tmp_path: Path) -> None:
    run = evaluated("answered")
    [path] = log_of(run, tmp_path / "log", summary=False)
    rewrite(path, [line | {"exact_match": 1.0} for line in lines(path)])
    [right] = imported([path], tmp_path, "model")
    assert compared(run, right).average.verdict == "better" and compared(right, run).average.verdict == "worse"


def test_which_documents_a_log_has(evaluated: Evaluate, tmp_path: Path) -> None:
    """All, the first ones and random ones are those of the run that wrote it; without a results file it is unknown."""
    selections = ({}, {"limit": 3}, {"sample": 3, "seed": 5}, {"sample": 100})
    for place, options in enumerate(selections):
        run = evaluated("answered", **options)
        [found] = imported(log_of(run, tmp_path / f"log {place}"), tmp_path / str(place))
        trait, own = (traits(one)["limit"] for one in (found, run))
        assert trait == own and documents_read(found.manifest["specification"]) == documents_read(
            run.manifest["specification"]
        )
        assert compared(run, found).average.difference == 0.0
        [unknown] = imported(log_of(run, tmp_path / f"alone {place}", summary=False), tmp_path / str(place), "model")
        assert traits(unknown)["limit"].words.startswith("an unknown part of each task's documents (")


def test_a_part_of_a_log_is_a_selection(evaluated: Evaluate, tmp_path: Path) -> None:
    """Also if evalkit's results file says that they are a random sample."""
    [path] = log_of(evaluated("answered", sample=4), tmp_path / "log")
    [beside] = path.parent.glob("results_*")
    results = json.loads(beside.read_text(encoding="utf-8"))
    content = lines(path)
    rewrite(path, [line for line in content if line["doc_id"] != content[0]["doc_id"]])
    results["n-samples"]["answered"]["effective"] = 3
    beside.write_text(json.dumps(results | {"task_hashes": {}}), encoding="utf-8")
    [found] = imported([path], tmp_path)
    assert traits(found)["limit"].value.startswith("selection ")
    results["evalkit"]["sample"] = -1
    beside.write_text(json.dumps(results), encoding="utf-8")
    with pytest.raises(DataError, match="sample"):
        imported([path], tmp_path)
    results["n-samples"]["answered"]["original"], results["evalkit"]["sample"] = 10**15, 3
    beside.write_text(json.dumps(results), encoding="utf-8")
    with pytest.raises(DataError, match="original"):
        imported([path], tmp_path)


def flip(content: list[dict[str, Any]], results: dict[str, Any]) -> None:
    for line in content:
        line["acc"] = 1.0 - line["acc"]
    results["results"]["lined"]["acc,none"] = 1.0 - results["results"]["lined"]["acc,none"]


def without_a_request(content: list[dict[str, Any]], results: dict[str, Any]) -> None:
    del content[1]["arguments"]["gen_args_2"]


def without_a_number(content: list[dict[str, Any]], results: dict[str, Any]) -> None:
    content[1]["filtered_resps"][0][0] = "none"


@pytest.mark.parametrize("change", [flip, without_a_request, without_a_number])
def test_choices_that_contradict_their_log_likelihoods(change: Any, evaluated: Evaluate, tmp_path: Path) -> None:
    """Whatever the results file says."""
    [path] = log_of(evaluated("lined"), tmp_path / "log")
    [beside] = path.parent.glob("results_*")
    content, results = lines(path), json.loads(beside.read_text(encoding="utf-8"))
    change(content, results)
    rewrite(path, content)
    beside.write_text(json.dumps(results), encoding="utf-8")
    with pytest.raises(DataError, match=rf"{path.name}, line [12]: .*log-likelihoods"):
        imported([path], tmp_path)


def test_perplexities_whose_aggregation_is_lm_evals_default(evaluated: Evaluate, tmp_path: Path) -> None:
    """The entries of `metric_list` name none, as in wikitext."""
    run = evaluated("rolling")
    [found] = imported(log_of(run, tmp_path / "log"), tmp_path)
    [own], [entry] = run.stored["tasks"], found.stored["tasks"]
    values, expected = ({one["metric"]: one["value"] for one in task["metrics"]} for task in (entry, own))
    assert len(values) == 3 and values == pytest.approx(expected, rel=1e-9)


def test_targets_that_are_texts_of_options(evaluated: Evaluate, tmp_path: Path) -> None:
    """lm-eval looks such a target up among the options; here it would be the number of another one."""
    run = evaluated("texts_as_targets")
    [found] = imported(log_of(run, tmp_path / "log"), tmp_path)
    values = [
        {one["metric"]: one["value"] for one in each.stored["tasks"][0]["metrics"]}["acc"] for each in (run, found)
    ]
    assert values[0] == values[1]


def test_a_chat_as_a_tuple(evaluated: Evaluate, tmp_path: Path) -> None:
    """lm-eval writes so the prompts of models behind an API."""
    [path] = log_of(evaluated("answered"), tmp_path / "log")
    content = lines(path)
    for line in content:
        for request in line["arguments"].values():
            request["arg_0"] = [request["arg_0"]]
    rewrite(path, content)
    [found] = imported([path], tmp_path)
    [view] = benchmark_of(found).views(found, (), silent)
    assert isinstance(view, AnswerView) and not view.problem and len(view.documents) == len(TEXTS)
