"""Doubtful documents, prompts and examples of lm-eval's tasks: refused or counted, in lm-eval's runs and in suites."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from evalkit.benchmarks.registry import results_of
from evalkit.benchmarks.run import evaluate, planned
from evalkit.cli import main
from evalkit.errors import DataError
from evalkit.runs.folder import Run
from tests.benchmarks.kinds import Lines
from tests.benchmarks.lm_eval.made import ANSWERS, CHOICE, LAST_WORD, TEXTS, write_task
from tests.printed import printed
from tests.tiny import tiny_checkpoint

FRUITS = [
    {"question": f"Which fruit has the number {n}?", "choices": ["banana", "cherry", "plum"], "gold": n % 3}
    for n in range(4)
]
SENTENCES = [{"text": f"The fox jumps over dog number {n}", "answer": str(n)} for n in range(4)]
FIELD = {"doc_to_target": "gold"}
"""The field's value itself, which a template would turn into text."""
Evaluate = Callable[..., Run]


@pytest.fixture
def run(model: Path, tmp_path: Path) -> Evaluate:
    """Write a task and run it."""

    def evaluated(config: dict[str, Any], documents: list[dict[str, Any]], **options: Any) -> Run:
        task = {"task": "own"} | config
        write_task(tmp_path / "tasks", task | {"task": "own"}, documents)
        return run_tasks("own", **options)

    def run_tasks(*names: str, **options: Any) -> Run:
        output = tmp_path / "runs"
        return evaluate(
            str(model), tasks=names, include_path=tmp_path / "tasks", output=output, progress=Lines(), **options
        )

    evaluated.tasks = run_tasks  # type: ignore[attr-defined]
    return evaluated


def shown(run: Run) -> list[str]:
    """Return the lines that are printed of a finished run."""
    return printed(results_of(run).report()).splitlines()


def caveats_of(run: Run) -> list[str]:
    """Return the caveats of the task, which the results, the table and files in lm-eval's format have."""
    caveats: dict[str, list[str]] = run.stored.get("caveats", {})
    lines = shown(run)
    notes = [line for line in lines if line.startswith("own*: ")]
    assert notes == [f"own*: {text}" for text in caveats.get("own", ())]
    assert any(line.startswith("own* ") for line in lines) == bool(caveats)
    [path] = run.folder.glob("lm_eval/results_*.json")
    alias = json.loads(path.read_text(encoding="utf-8"))["results"]["own"]["alias"]
    assert all(text in alias for text in caveats.get("own", ()))
    return caveats.get("own", [])


@pytest.mark.parametrize(
    ("config", "change", "found"),
    [
        (CHOICE, {"gold": 3}, "gold answer 3 is not one of the 3 choices"),
        # lm-eval logs no warning of these
        (CHOICE, {"gold": -1}, "gold answer '-1'"),
        (CHOICE | FIELD, {"gold": -1}, "gold answer -1"),
        (CHOICE | {"doc_to_target": "{{(choices + [''])[gold]}}"}, {"gold": 3}, "gold answer ''"),
        (
            CHOICE | {"doc_to_target": "{{question[:6]}}", "doc_to_choice": ["Which ", "b"]},
            {"question": "which fruit"},
            "gold answer 'which '",
        ),
        (CHOICE, {"choices": ["banana", "", "plum"]}, "a choice is empty"),
        (CHOICE | {"doc_to_text": "{{question}}"}, {"question": " "}, "the prompt is empty"),
        (ANSWERS, {"answer": ""}, "the reference is ''"),
        (ANSWERS | {"doc_to_target": "answer"}, {"answer": None}, "the reference is None"),
        (ANSWERS, {"text": ""}, "the prompt is empty"),
        (TEXTS, {"text": ""}, "the text is empty"),
    ],
)
def test_some_documents_are_doubtful(run: Evaluate, config: dict[str, Any], change: dict[str, Any], found: str) -> None:
    documents = FRUITS if config["task"] == CHOICE["task"] else SENTENCES
    assert caveats_of(run(config, documents)) == []
    [caveat] = caveats_of(run(config, [*documents[:2], documents[2] | change, documents[3]]))
    assert caveat.startswith("1 of 4 documents, document 2 for one: ") and found in caveat


@pytest.mark.parametrize(
    "value", ["np.int64({})", "np.array([{}]).astype('uint8')[0]", "int({})", "[np.int32({}), -1]"]
)
def test_a_function_may_return_integers_of_numpy(run: Evaluate, tmp_path: Path, value: str) -> None:
    """As those of `np.argmax`; under lm-eval's metrics and under evalkit's rules."""
    code = "import numpy as np\n\n\ndef gold(doc):\n    return " + value.format("doc['gold']") + "\n"
    config = {name: setting for name, setting in CHOICE.items() if name != "doc_to_target"}
    path = write_task(tmp_path / "tasks", config | {"task": "own"}, FRUITS)
    (tmp_path / "tasks" / "golds.py").write_text(code, encoding="utf-8")
    path.write_text(path.read_text(encoding="utf-8") + "doc_to_target: !function golds.gold\n", encoding="utf-8")
    found: Run = run.tasks("own")  # type: ignore[attr-defined]
    assert caveats_of(found) == []
    if not value.startswith("["):
        of_suite: Run = run.tasks("own", template="plain")  # type: ignore[attr-defined]
        assert sorted(of_suite.scores.groupby("doc_id")["gold"].first()) == [0, 0, 1, 2]


@pytest.mark.parametrize("gold", [None, 1.5, [1]])
def test_a_gold_answer_that_lm_eval_fails_on(run: Evaluate, monkeypatch: pytest.MonkeyPatch, gold: Any) -> None:
    """Refused before a model is loaded, and not when the answers are measured."""
    monkeypatch.setattr("evalkit.models.loading.load.load", None)
    documents = [document | {"gold": float(document["gold"])} for document in FRUITS] if gold == 1.5 else FRUITS
    with pytest.raises(DataError, match="own"):
        run(CHOICE | FIELD, [*documents[:2], documents[2] | {"gold": gold}, documents[3]])


@pytest.mark.parametrize("gold", [5, -1, None, "A", "1", 1.5])
def test_under_evalkits_rules_every_document_has_a_gold_answer(
    run: Evaluate, monkeypatch: pytest.MonkeyPatch, gold: Any
) -> None:
    monkeypatch.setattr("evalkit.models.loading.load.load", None)
    before = {str: str, float: float}.get(type(gold), int)
    documents = [document | {"gold": before(document["gold"])} for document in FRUITS]
    with pytest.raises(DataError, match=r"own document \d+: gold answer"):
        run(CHOICE | FIELD, [*documents[:2], documents[2] | {"gold": gold}, documents[3]], template="plain")


def test_several_gold_answers(run: Evaluate) -> None:
    """A list is valid with one choice in it; a negative index fills lists of one length."""
    config = CHOICE | FIELD

    def of(*golds: list[int]) -> list[str]:
        return caveats_of(run(config, [doc | {"gold": gold} for doc, gold in zip(FRUITS, golds, strict=True)]))

    assert of([0], [1, 2], [2], [0, -1]) == []
    assert of([0], [1, 2], [3], [0, 9])[0].startswith("2 of 4 documents, document 2 for one: gold answer [3]")
    assert of([0], [], [1], [2])[0].startswith("1 of 4 documents, document 1 for one: gold answer []")


@pytest.mark.parametrize(
    ("config", "change"),
    [
        (CHOICE, {"gold": 5}),
        (CHOICE | FIELD, {"gold": -1}),
        (CHOICE | FIELD, {"gold": "A"}),
        (CHOICE | FIELD | {"doc_to_choice": ["A", "B", "C"]}, {"gold": "a"}),
        (CHOICE | FIELD, {"gold": -100}),
        (CHOICE | FIELD, {"gold": [7, 8]}),
        (ANSWERS, {"answer": ""}),
        (LAST_WORD | {"doc_to_target": "answer"}, {"answer": None}),
    ],
)
def test_no_document_has_a_reference(
    run: Evaluate, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], change: dict[str, Any]
) -> None:
    """Refused before a model is loaded, since the metric would be of nothing."""
    monkeypatch.setattr("evalkit.models.loading.load.load", None)
    documents = FRUITS if config["task"] == CHOICE["task"] else SENTENCES
    # lm-eval itself reads the first document's choice
    with pytest.raises(DataError, match="own"):
        run(config, [document | change for document in documents])


def test_a_tasks_own_metrics_may_need_no_reference(run: Evaluate, tmp_path: Path) -> None:
    code = "def measured(doc, results):\n    return {'acc': 1.0}\n"
    path = write_task(tmp_path / "tasks", CHOICE | FIELD | {"task": "own"}, [doc | {"gold": -1} for doc in FRUITS])
    (tmp_path / "tasks" / "code.py").write_text(code, encoding="utf-8")
    text = path.read_text(encoding="utf-8") + "process_results: !function code.measured\n"
    path.write_text(text, encoding="utf-8")
    assert caveats_of(run.tasks("own")) == []  # type: ignore[attr-defined]


def test_lm_evals_warnings_are_passed_on(run: Evaluate, tmp_path: Path) -> None:
    """Of a group's metric over one of two tasks, of metrics of fewer documents, and of values that are no numbers."""
    folder = tmp_path / "tasks"
    accuracy = CHOICE["metric_list"][:1]
    write_task(folder, CHOICE | {"task": "both"}, FRUITS)
    write_task(folder, CHOICE | {"task": "one", "metric_list": accuracy}, FRUITS)
    names = [{"metric": name, "aggregation": "mean"} for name in ("acc", "acc_norm")]
    group = {"group": "pair", "task": ["both", "one"], "aggregate_metric_list": names}
    (folder / "pair.yaml").write_text(yaml.safe_dump(group), encoding="utf-8")
    of_group: Run = run.tasks("pair")  # type: ignore[attr-defined]
    [(name, [text])] = of_group.stored["caveats"].items()
    assert name == "pair" and text.startswith(
        "lm-eval: metric 'acc_norm,none' is missing in 1/2 tasks. Missing in: one"
    )
    assert {"pair*", "both", "one"} <= {line.partition(" ")[0] for line in shown(of_group)}

    unknown = CHOICE["metric_list"] + [{"metric": "acc_nrom", "aggregation": "mean", "higher_is_better": True}]
    [text] = caveats_of(run(CHOICE | {"metric_list": unknown}, FRUITS))
    assert text.startswith("acc_nrom is in the task file")

    code = (
        "def measured(doc, results):\n"
        "    return {'acc': 1.0, **({'late': 1.0} if doc['gold'] else {}), 'odd': float('nan')}\n"
    )
    (folder / "code.py").write_text(code, encoding="utf-8")
    metrics = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "late", "odd")]
    path = write_task(folder, CHOICE | {"task": "own", "metric_list": metrics}, FRUITS)
    path.write_text(path.read_text(encoding="utf-8") + "process_results: !function code.measured\n", encoding="utf-8")
    found: Run = run.tasks("own")  # type: ignore[attr-defined]
    undefined, counts = caveats_of(found)
    assert undefined == "odd is not a finite number" and "late,none=2" in counts
    values = {metric["metric"]: metric["value"] for metric in found.stored["tasks"][0]["metrics"]}
    assert values == {"acc": 1.0, "late": 1.0, "odd": None}
    assert any(line.split()[:2] == ["odd", "–"] for line in shown(found))
    json.loads((found.folder / "results.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)


def _constant(**more: Any) -> dict[str, Any]:
    return CHOICE | {"doc_to_text": "Answer the question.\nAnswer:", "doc_to_choice": ["yes", "no", "both"]} | more


@pytest.mark.parametrize("options", [{}, {"template": "inst"}, {"template": "inst", "vary": ("template",)}])
def test_one_prompt_for_all_documents(run: Evaluate, options: dict[str, Any]) -> None:
    """A template that omits the question, in lm-eval's form and in the paper's."""
    found = run(_constant(), FRUITS, **options)
    assert found.stored["caveats"] == {"own": ["4 documents have one and the same prompt"]}
    assert shown(found).count("own*: 4 documents have one and the same prompt") == 1


def test_averages_over_a_doubtful_task_are_marked(run: Evaluate, tmp_path: Path) -> None:
    """A group's metric of lm-eval, and an average of a suite."""
    for name, config in (("good", CHOICE), ("own", _constant())):
        write_task(tmp_path / "tasks", config | {"task": name}, FRUITS)
    group = {"group": "pair", "task": ["good", "own"], "aggregate_metric_list": [{"metric": "acc"}]}
    (tmp_path / "tasks" / "pair.yaml").write_text(yaml.safe_dump(group), encoding="utf-8")
    of_group: Run = run.tasks("pair")  # type: ignore[attr-defined]
    assert {"pair*", "good", "own*"} <= {line.partition(" ")[0] for line in shown(of_group)}
    of_suite: Run = run.tasks("good", "own", template="plain")  # type: ignore[attr-defined]
    assert {"Average*", "good", "own*"} <= {line.partition(" ")[0] for line in shown(of_suite)}


def test_tables_of_several_runs_have_the_caveats(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Marks and notes of `run A B` and `compare`; a note of both runs is printed once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    for name, config in (("good", CHOICE), ("own", _constant())):
        write_task(tmp_path / "tasks", config | {"task": name}, FRUITS)
    other = tiny_checkpoint(tmp_path / "other", window=128, adds_bos=True, seed=1)

    def output(*arguments: str) -> str:
        with pytest.raises(SystemExit):
            main(arguments)
        return capsys.readouterr().out

    options = ["--tasks", "good,own", "--include_path", "tasks", "--template", "plain", "--output", "runs"]
    summary = output("run", str(model), str(other), *options)
    assert {"good", "own*", "Average*"} <= set(summary.split())
    note = "own*: 4 documents have one and the same prompt"
    assert summary.splitlines().count(note) == 1
    compared = output("compare", *(str(path) for path in Path("runs").iterdir() if path.is_dir()))
    assert {"good", "own*", "Average*"} <= {line.partition(" ")[0] for line in compared.splitlines()}
    assert compared.splitlines().count(note) == 1


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (_constant(doc_to_text="Topic: {{question[-2] == '0'}}\nAnswer:"),
         ["8 documents have 2 prompts, 7 of them the same one"]),
        # Only the choices differ, as in BLiMP
        (_constant(doc_to_text="", doc_to_choice="{{[question + ' No', question + ' Yes', question]}}"), []),
        # Only the contexts differ, as in WinoGrande
        (CHOICE | {"doc_to_text": "{{gold}}", "doc_to_choice": "{{[question + ' a', question + ' b', question]}}",
                   "doc_to_target": "is right"}, []),
        (CHOICE | {"doc_to_text": "Question {{question[-2]|int % 4}}:", "doc_to_choice": ["yes", "no", "both"]}, []),
    ],
)  # fmt: skip
def test_prompts_that_differ(run: Evaluate, config: dict[str, Any], expected: list[str]) -> None:
    documents = [FRUITS[n % 4] | {"question": f"Which fruit has the number {n}?"} for n in range(8)]
    assert run(config, documents).stored.get("caveats", {}).get("own", []) == expected


# Solved examples


@pytest.fixture
def prompts(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[list[str]]]:
    """Write a task and return the questions in each document's prompt, the document's own last."""

    def of_task(
        config: dict[str, Any], documents: list[dict[str, Any]], *options: str, **splits: Path
    ) -> list[list[str]]:
        write_task(tmp_path / "tasks", CHOICE | {"task": "own"} | config, documents, **splits)
        command = ["run", str(model), "--tasks", "own", "--include-path", str(tmp_path / "tasks"), *options]
        with pytest.raises(SystemExit) as left:
            main([*command, "--num-fewshot", "2", "--show-prompts", str(len(documents))])
        out, err = capsys.readouterr()
        if left.value.code:
            raise DataError(err)
        by_document = re.split(r"own document \d+.*\n", out)[1:]
        # Of a prompt's choices the last one
        return [re.findall(r"Question: (.*)", text)[-3:] for text in by_document]

    return of_task


PAPER = ("--template", "plain")
DUPLICATES = [
    *(fruit | {"number": 0} for fruit in FRUITS),
    *(fruit | {"number": 7, "choices": fruit["choices"][::-1]} for fruit in FRUITS[:2]),
]


@pytest.mark.parametrize("options", [(), PAPER])
@pytest.mark.parametrize(
    ("config", "documents"),
    [
        ({}, FRUITS),
        ({"fewshot_split": "test"}, FRUITS),
        ({"training_split": "test"}, FRUITS),
        ({"test_split": None, "validation_split": "test"}, FRUITS),
        ({"test_split": None, "validation_split": "test", "fewshot_split": "test"}, FRUITS),
        ({"fewshot_split": "examples"}, FRUITS),
        ({"fewshot_config": {"sampler": "first_n"}}, FRUITS),
        ({"fewshot_config": {"samples": FRUITS[:3]}}, FRUITS),
        ({}, DUPLICATES),
        ({"fewshot_split": "test"}, DUPLICATES),
    ],
)
def test_no_example_is_the_document(
    prompts: Callable[..., list[list[str]]], tmp_path: Path, options: tuple[str, ...], config: dict[str, Any],
    documents: list[dict[str, Any]],
) -> None:  # fmt: skip
    """Of one split, of two splits with the same documents, and of copies under another field and order of options."""
    examples = tmp_path / "examples.jsonl"
    examples.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
    found = prompts(config, documents, *options, examples=examples)
    assert len(found) >= len(documents)
    for *solved, asked in found:
        assert len(solved) == 2 and asked not in solved


def test_other_documents_have_lm_evals_examples(prompts: Callable[..., list[list[str]]], tmp_path: Path) -> None:
    """Only the examples of documents that lm-eval shows themselves are others."""
    from lm_eval.tasks import TaskManager

    mine = prompts({}, FRUITS)
    manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
    task = manager.load(["own"])["tasks"]["own"]
    task.set_config(key="num_fewshot", value=2)
    task.set_fewshot_seed(1234)
    task.build_all_requests()
    contexts = {instance.doc_id: instance.args[0] for instance in task.instances}
    theirs = [re.findall(r"Question: (.*)", context) for context in contexts.values()]
    leaking = [asked in solved for *solved, asked in theirs]
    assert any(leaking) and not all(leaking)
    by_question = {questions[-1]: questions for questions in mine}
    assert all(
        leaks or by_question[questions[-1]] == questions for questions, leaks in zip(theirs, leaking, strict=True)
    )


@pytest.mark.parametrize("options", [(), PAPER])
@pytest.mark.parametrize(
    ("change", "documents", "noun"),
    [
        ({}, FRUITS[:2], "expected 2, found 1 few-shot example apart from the document itself"),
        ({"fewshot_split": "examples"}, FRUITS, "gold answer -1"),
    ],
)
def test_too_few_examples_or_none_with_an_answer(
    prompts: Callable[..., list[list[str]]], tmp_path: Path, options: tuple[str, ...], change: dict[str, Any],
    documents: list[dict[str, Any]], noun: str,
) -> None:  # fmt: skip
    examples = tmp_path / "examples.jsonl"
    hidden = [{"question": f"Hidden {n}?", "choices": ["a", "b"], "gold": -1} for n in range(3)]
    examples.write_text("".join(json.dumps(doc) + "\n" for doc in hidden), encoding="utf-8")
    with pytest.raises(DataError, match=noun):
        prompts(change | {"doc_to_target": "gold"}, documents, *options, examples=examples)


def test_the_documents_are_the_same_at_each_access(run: Evaluate, tmp_path: Path) -> None:
    """lm-eval measures the answers of a task whose `process_docs` shuffles with the gold answers of other documents."""
    path = write_task(
        tmp_path / "tasks", CHOICE | {"task": "own"}, [fruit | {"gold": 0} for fruit in FRUITS] + FRUITS[1:]
    )
    straight: Run = run.tasks("own", template="plain")  # type: ignore[attr-defined]
    code = "def shuffled(documents):\n    return documents.shuffle()\n"
    (tmp_path / "tasks" / "code.py").write_text(code, encoding="utf-8")
    path.write_text(path.read_text(encoding="utf-8") + "process_docs: !function code.shuffled\n", encoding="utf-8")
    found: Run = run.tasks("own", log_samples=True)  # type: ignore[attr-defined]
    [samples] = found.folder.glob("lm_eval/samples_*")
    lines = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    assert all(line["doc"]["question"] in line["arguments"]["gen_args_0"]["arg_0"] for line in lines)
    metrics = {metric["metric"]: metric["value"] for metric in found.stored["tasks"][0]["metrics"]}
    for rule in ("acc", "acc_norm"):
        assert metrics[rule] == straight.results(rule).average.value


def test_the_number_of_examples_that_is_shown(model: Path, tmp_path: Path) -> None:
    """A task's own 0 stays; a text alone has none; and a run's number is that of its tasks, whatever was requested."""
    folder = tmp_path / "tasks"
    write_task(folder, CHOICE | {"task": "never", "num_fewshot": 0}, FRUITS)
    write_task(folder, TEXTS | {"task": "texts"}, SENTENCES)
    write_task(folder, CHOICE | {"task": "always", "num_fewshot": 2}, FRUITS)
    said: list[str] = []

    def shots(*names: str, **options: Any) -> int | None:
        options |= {"include_path": folder, "output": tmp_path / "runs"}
        specification = planned(str(model), {"tasks": names, **options}, said.append).manifest["specification"]
        number: int | None = specification["num_fewshot"]
        return number

    assert shots("never", "texts", num_fewshot=5) == 0
    assert any("--num-fewshot 5" in line and "never, texts" in line for line in said)
    assert (shots("always"), shots("always", num_fewshot=1), shots("always", "never")) == (2, 1, None)
