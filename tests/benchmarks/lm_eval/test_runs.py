"""Runs of lm-eval's tasks: lm-eval's own numbers, stored, resumed, sampled, read and paired like those of a suite."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lm_eval
import numpy as np
import pandas as pd
import pytest
import yaml
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from evalkit.benchmarks.document_views import AnswerView, ChoiceView
from evalkit.benchmarks.registry import results_of
from evalkit.benchmarks.run import evaluate, planned
from evalkit.cli import main
from evalkit.comparison.comparison import compare_pairing
from evalkit.comparison.pairing import Pairing, pair
from evalkit.comparison.sides import Side
from evalkit.data import Library
from evalkit.errors import UsageError
from evalkit.models.loading.locate import silent
from evalkit.paths import resource
from evalkit.requests.rows import ScoredRow
from evalkit.runs.folder import Run
from evalkit.runs.journal import Journal
from evalkit.stats.estimates import error_of_average, error_of_share
from tests.benchmarks.kinds import Lines
from tests.benchmarks.lm_eval.made import ALL, ANSWERS, CHOICE, TEXTS, made_tasks, same_metrics, write_task
from tests.journals import entries_of
from tests.tiny import tiny_checkpoint

BUDGET = 300
"""Small, so that there are several batches, and no document is too large for it."""
LIMIT = 57
"""Of MMLU a document of each subject."""

Evaluate = Callable[..., Run]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def whole(model: Path, tasks: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An uninterrupted run of all tasks. Do not modify."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISABLE_MULTIPROC", "1")
        output = tmp_path_factory.mktemp("runs")
        return evaluate(
            str(model), include_path=tasks, tasks=ALL, token_budget=BUDGET, log_samples=True, output=output,
            progress=Lines(),
        )  # fmt: skip


@pytest.fixture
def run(model: Path, tasks: Path, tmp_path: Path) -> Evaluate:
    def evaluated(**options: Any) -> Run:
        defaults = {"include_path": tasks, "tasks": ALL, "token_budget": BUDGET, "output": tmp_path / "runs"}
        return evaluate(str(model), progress=Lines(), **(defaults | options))

    return evaluated


def exported(run: Run) -> dict[str, Any]:
    [path] = run.folder.glob("lm_eval/results_*.json")
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def samples_of(run: Run) -> dict[str, list[dict[str, Any]]]:
    return {
        path.name.removeprefix("samples_").rpartition("_")[0]: [
            json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()
        ]
        for path in run.folder.glob("lm_eval/samples_*.jsonl")
    }


def test_the_numbers_are_lm_evals(whole: Run, model: Path, tasks: Path) -> None:
    """Every metric, standard error, group and sample of lm-eval's own run with its own model class."""
    expected = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(model), "dtype": "float32", "logits_cache": False},
        tasks=list(ALL),
        device="cpu",
        batch_size=8,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
    )
    same_metrics(exported(whole)["results"], expected["results"])
    for part in ("n-shot", "n-samples", "higher_is_better", "versions", "group_subtasks"):
        assert exported(whole)[part] == expected[part], part
    samples = samples_of(whole)
    assert samples.keys() == expected["samples"].keys() == whole.stored["task_hashes"].keys()
    for task, members in expected["samples"].items():
        for mine, theirs in zip(samples[task], members, strict=True):
            assert mine.keys() == theirs.keys()
            for key in ("doc_id", "doc", "filter", "metrics", "doc_hash", "prompt_hash", "target_hash"):
                assert mine[key] == theirs[key], (task, key)
    # evalkit's own rules, from the stored scores
    for rule in ("acc", "acc_norm"):
        for task in whole.results(rule).tasks:
            assert task.value == pytest.approx(expected["results"][task.task][f"{rule},none"])


@pytest.mark.slow
def test_the_average_of_zeroshot8_is_evalkits(checkpoint: Path, real_documents: Path, tmp_path: Path) -> None:
    """Under lm-eval: unweighted over eight tasks, of which MMLU is one."""
    library = Library(real_documents, allow_unofficial=True)
    manager = TaskManager(include_path=str(resource("tasks")), include_defaults=False, metadata={"library": library})
    theirs = lm_eval.simple_evaluate(
        HFLM(pretrained=str(checkpoint), device="cpu", batch_size=8),
        tasks=["zeroshot8"],
        limit=LIMIT,
        task_manager=manager,
        bootstrap_iters=2,
    )["results"]
    assert theirs["mmlu_pooled"]["sample_len"] == LIMIT
    ours = evaluate(
        str(checkpoint), data_dir=real_documents, allow_unofficial_data=True, template="plain", rule="acc", limit=LIMIT,
        dtype="float32", output=tmp_path, progress=Lines(),
    ).results("acc")  # fmt: skip
    for task in ours.tasks:
        name = "mmlu_pooled" if task.task == "mmlu" else task.task
        assert theirs[name]["acc,none"] == pytest.approx(task.value, abs=1e-12), name
    average = theirs["zeroshot8"]
    assert average["acc,none"] == pytest.approx(ours.average.value, abs=1e-12)
    # lm-eval's error is of documents that share no source, evalkit's counts what they share
    alone = error_of_average([error_of_share(task.value, task.n) for task in ours.tasks])
    assert average["acc_stderr,none"] == pytest.approx(alone, abs=1e-12)


def test_evalkits_own_tasks_keep_their_documents(checkpoint: Path, documents: Path, tmp_path: Path) -> None:
    names = ("winogrande", "arc_easy", "mmlu_anatomy")

    def scored(suite: str, tasks: tuple[str, ...], **options: str) -> Run:
        return evaluate(
            str(checkpoint), suite=suite, tasks=tasks, data_dir=documents, allow_unofficial_data=True, output=tmp_path,
            progress=Lines(), **options,
        )  # fmt: skip

    run, suite = scored("lm_eval", names), scored("zeroshot8", (*names[:2], "mmlu"), template="plain")
    assert not any(source["official"] for source in run.manifest["documents"].values())
    results = suite.results("acc_norm")
    expected = {task.task: task.value for task in (*results.tasks, *results.subtasks["mmlu"])}
    assert {task.task: task.value for task in run.results("acc_norm").tasks}.items() <= expected.items()
    merged = run.scores.merge(suite.scores, on=["subtask", "doc_id", "choice"], suffixes=("", "_suite"))
    assert len(merged) == len(run.scores)
    for column in ("n_continuation", "chars", "bytes", "gold", "choices", "truncated"):
        assert (merged[column] == merged[f"{column}_suite"]).all(), column
    assert merged["ll_continuation"].to_numpy() == pytest.approx(merged["ll_continuation_suite"].to_numpy(), rel=1e-4)


def test_the_same_command_prints_several_finished_runs_again(
    tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan's rule is of choices, which these tasks do not have."""
    models = [str(tiny_checkpoint(tmp_path / name, seed=seed)) for seed, name in enumerate("ab")]
    options = {"--include-path": tasks, "--tasks": "made_texts", "--output": tmp_path / "runs", "--device": "cpu"}
    command = ["run", *models, *(str(part) for option in options.items() for part in option)]
    printed = []
    for _ in range(2):
        with pytest.raises(SystemExit) as left:
            main(command)
        assert not left.value.code
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and "made_texts" in printed[0]


def test_mutual_information_fills_the_unconditional_column(run: Evaluate, tmp_path: Path) -> None:
    metrics = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_mutual_info")]
    documents = [{"question": "Why?", "choices": ["The river rose.", "Rice"], "gold": n % 2} for n in range(4)]
    write_task(tmp_path, CHOICE | {"task": "made_mutual", "metric_list": metrics}, documents)
    mutual = run(include_path=tmp_path, tasks=("made_mutual",))
    [task] = mutual.results("pmi").tasks
    assert task.value == exported(mutual)["results"]["made_mutual"]["acc_mutual_info,none"]


def test_what_changes_the_numbers_is_another_run(model: Path, tmp_path: Path) -> None:
    folder = made_tasks(tmp_path / "tasks", count=2)

    def named(**options: Any) -> Path:
        common = {"suite": "lm_eval", "tasks": ("made_pair",), "include_path": folder, "output": tmp_path}
        return planned(str(model), common | options, silent).folder

    names = [named(), named(limit=1), named(num_fewshot=1)]
    (folder / "code.py").write_text("VALUE = 1\n", encoding="utf-8")
    names.append(named())
    group = folder / "made_pair.yaml"
    group.write_text(group.read_text(encoding="utf-8").replace("weight_by_size: true", "weight_by_size: false"))
    assert len({*names, named()}) == 5


def test_an_answer_to_another_question_is_not_taken(run: Evaluate) -> None:
    first = run(tasks=("made_choice",))
    entries = entries_of(first)
    (first.folder / "journal.jsonl").unlink()
    (first.folder / "results.json").unlink()
    rows = entries[0][1]
    likelihoods = [None if value is None else value - 100 for value in rows[0].likelihoods]
    rows[0] = rows[0]._replace(texts="0" * 16, likelihoods=likelihoods)
    journal = Journal(first.folder / "journal.jsonl", first.manifest["id"], (ScoredRow,), pytest.fail)
    for entry, rows in entries:
        journal.append(entry, rows, ScoredRow)
    again = run(tasks=("made_choice",))
    pd.testing.assert_frame_equal(again.scores, first.scores, check_exact=True)


def test_an_empty_text_is_kept_too(tmp_path: Path) -> None:
    """It has no token unless the tokenizer adds one, so its log-likelihood is 0, as in lm-eval."""
    bare = str(tiny_checkpoint(tmp_path / "tiny", window=128))

    def measured(*texts: str) -> tuple[Run, dict[str, float]]:
        folder = tmp_path / str(len(texts))
        write_task(folder, TEXTS, [{"text": text} for text in texts])
        run = evaluate(bare, include_path=folder, tasks=("made_texts",), output=folder, progress=Lines())
        return run, {metric["metric"]: metric["value"] for metric in run.stored["tasks"][0]["metrics"]}

    run, with_empty = measured("", "The river rose.", "Rice")
    # The model is checked on the first text that has a token
    assert run.manifest["sharing"]["way"] == "tree" and run.manifest["sharing"]["checked"]["row"] > 0
    # Without bytes it adds nothing to a mean over bytes
    assert with_empty["bits_per_byte"] == pytest.approx(measured("The river rose.", "Rice")[1]["bits_per_byte"])


def test_sampled_texts_are_those_of_an_undisturbed_run(
    run: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an interruption and in batches of other sizes; each repeat is a different text."""
    sampling = {"until": ["\n"], "max_gen_toks": 8, "do_sample": True, "temperature": 1.0, "top_p": 0.9}
    documents = [{"text": f"The river {word}", "answer": "a"} for word in ("rose", "fell", "was", "is", "ran")]
    sampled = ANSWERS | {"task": "made_sampled", "repeats": 3, "generation_kwargs": sampling}
    write_task(tmp_path / "own", sampled, documents)
    options = {"tasks": ("made_sampled",), "include_path": tmp_path / "own"}

    def texts(run: Run) -> list[tuple[int, int, str]]:
        return sorted((int(row.document), row.part, row.text) for _, rows in entries_of(run) for row in rows)

    expected = texts(run(**options, output=tmp_path / "whole"))
    assert [key[:2] for key in expected] == [(doc, part) for doc in range(5) for part in range(3)]
    assert len({text for _, _, text in expected}) > 5
    append = Journal.append

    def interrupt(journal: Journal, entry: Any, *rows: Any) -> None:
        append(journal, entry, *rows)
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr(Journal, "append", interrupt)
        for name, budget in (("cut", 60), ("free", None)):
            with pytest.raises(KeyboardInterrupt):
                run(**options, output=tmp_path / name, token_budget=budget)
    # The first budget is kept, which is that of keys and values
    cut = run(**options, output=tmp_path / "cut")
    assert cut.manifest["token_budget"] == 60 and texts(cut) == expected
    begun = json.loads(next((tmp_path / "free").glob("*/manifest.json")).read_text(encoding="utf-8"))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=2**24, available=2**23))
    free = run(**options, output=tmp_path / "free", token_budget=None)
    assert free.manifest["token_budget"] == begun["token_budget"] > 60 and texts(free) == expected


def test_documents_are_read_as_people_read_them(whole: Run, tasks: Path) -> None:
    views = {view.task: view for view in results_of(whole).views((), silent)}
    assert list(views) == [task["task"] for task in whole.stored["tasks"]]
    choices, answers = views["made_choice"], views["made_answers"]
    assert isinstance(choices, ChoiceView) and choices.problem == ""
    documents = [json.loads(line) for line in (tasks / "made_choice.jsonl").read_text("utf-8").splitlines()]
    for number, document in enumerate(documents):
        text = choices.texts["made_choice", number]
        assert text.common == (("context", f"Question: {document['question']}\nAnswer:"),)
        assert text.choices == tuple(((("continuation", f" {choice}")),) for choice in document["choices"])
        assert text.options == tuple(document["choices"])
    assert choices.scores.equals(whole.scores.query("task == 'made_choice'").reset_index(drop=True))
    assert isinstance(answers, AnswerView) and answers.scale.name == "exact_match"
    documents = [json.loads(line) for line in (tasks / "made_answers.jsonl").read_text("utf-8").splitlines()]
    assert [answer.references for answer in answers.documents] == [(document["answer"],) for document in documents]
    assert [answer.prompt[0].text for answer in answers.documents] == [document["text"] for document in documents]
    assert {answer.score for answer in answers.documents} <= {0.0, 1.0}


def test_prompts_are_shown_as_they_are_fed(tmp_path: Path, tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the tokenizer's BOS, without its EOS; of a text longer than the window, each window."""
    folder = tiny_checkpoint(tmp_path / "tiny", window=128, adds_bos=True, adds_eos=True)
    with pytest.raises(SystemExit, match="0"):
        main(["run", str(folder), "--tasks", ",".join(ALL), "--include-path", str(tasks), "--show-prompts", "1"])
    shown = capsys.readouterr().out
    assert "\n<s>Question: " in shown and "</s>" not in shown
    assert "made_texts document 0, loglikelihood_rolling, window 1\n129 tokens: context 1, continuation 128" in shown
    [prompt] = [part for part in shown.split("\n\n") if part.startswith("made_answers document 0")]
    assert prompt.splitlines()[2].startswith("<s>") and "generated: " in prompt


def paired(a: Run, b: Run) -> Pairing:
    return pair(Side("a", (a,)), Side("b", (b,)), {})


def test_a_random_sample_has_the_whole_runs_prompts_and_scores(run: Evaluate, whole: Run) -> None:
    """Also where solved examples are drawn one document after the other; documents keep their numbers."""
    few, more = (run(sample=count, seed=2, log_samples=True) for count in (2, 4))
    hashes = [
        {
            (task, sample["doc_id"]): (sample["doc_hash"], sample["prompt_hash"])
            for task, members in samples_of(each).items()
            for sample in members
        }
        for each in (few, more, whole)
    ]
    assert hashes[0].items() <= hashes[1].items() <= hashes[2].items()
    assert {doc_id for _, doc_id in hashes[1]} != {0, 1, 2, 3}  # not the first ones
    assert all(entry["n"] == 4 for entry in more.stored["tasks"])
    both = more.scores.merge(whole.scores, on=["task", "doc_id", "choice"], suffixes=("", "_whole"))
    assert len(both) == len(more.scores)
    assert np.allclose(both["ll_continuation"], both["ll_continuation_whole"], rtol=1e-4)
    # The documents of the smaller sample are paired
    pairing = paired(more, few)
    assert [(len(task.rows[0]), task.dropped) for task in pairing.tasks] == [(2, 2)] * 3
    assert compare_pairing(pairing).average.difference == 0.0


def test_other_examples_are_another_prompt(run: Evaluate, tmp_path: Path) -> None:
    documents = [{"question": f"Which is {n}?", "choices": ["one", "two"], "gold": n % 2} for n in range(6)]
    examples = tmp_path / "examples.jsonl"
    shots = CHOICE | {"task": "shots", "num_fewshot": 1, "fewshot_split": "examples"}
    write_task(tmp_path / "tasks", shots, documents, examples=examples)
    runs = []
    for count, words in ((3, "these"), (4, "those")):
        example = {"question": f"Which of {words}?", "choices": ["one", "two"], "gold": 0}
        examples.write_text(f"{json.dumps(example)}\n" * 3, encoding="utf-8")
        runs.append(run(tasks=("shots",), include_path=tmp_path / "tasks", sample=count))
    with pytest.raises(UsageError, match="solved examples"):
        paired(*runs)


DOCUMENTS = [{"question": "Why?", "choices": ["a", "b"], "gold": 1, "text": "t", "answer": "a"}]

Refused = Callable[..., tuple[int, str]]


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], checkpoint: Path
) -> Refused:
    """Run a command that fails offline and without a model; return exit code and last line."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("evalkit.models.loading.load.load", None)

    def run(*arguments: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as left:
            main(["run", "--model", str(checkpoint), "--output", "runs", *map(str, arguments)])
        err = capsys.readouterr().err
        assert "Traceback" not in err
        assert not list(Path("runs").glob("*"))
        return int(left.value.code or 0), err.splitlines()[-1]

    return run


@pytest.mark.parametrize(
    ("change", "code", "noun"),
    [
        ({"doc_to_image": "picture"}, 2, "images"),
        ({"doc_to_text": "{{ question.nothing.here }}"}, 1, "made_bad"),
        ({"dataset_path": "nobody/nothing", "dataset_kwargs": None}, 1, "nobody/nothing"),
    ],
)
def test_an_unsupported_task(refused: Refused, tmp_path: Path, change: dict[str, Any], code: int, noun: str) -> None:
    write_task(tmp_path / "bad", CHOICE | {"task": "made_bad"} | change, DOCUMENTS)
    exit_code, line = refused("--include-path", tmp_path / "bad", "--tasks", "made_bad")
    assert exit_code == code and line.startswith("evalkit: task made_bad") and noun in line


def test_no_code_of_a_group_runs_if_one_of_its_tasks_is_unsupported(refused: Refused, tmp_path: Path) -> None:
    """Where a nested group defines the task itself."""
    folder = tmp_path / "bad"
    path = write_task(folder, CHOICE, DOCUMENTS)
    (folder / "code.py").write_text("open('sprung', 'w')\n\n\ndef process(docs):\n    return docs\n", encoding="utf-8")
    path.write_text(path.read_text(encoding="utf-8") + "process_docs: !function code.process\n", encoding="utf-8")
    inline = CHOICE | {"task": "inner", "unsafe_code": True, "dataset_path": "json"}
    group = {"group": "made_group", "task": ["made_choice", {"group": "deeper", "task": [inline]}]}
    (folder / "group.yaml").write_text(yaml.safe_dump(group), encoding="utf-8")
    code, line = refused("--include-path", folder, "--tasks", "made_group")
    assert code == 2 and "task made_group::deeper::inner " in line
    assert not Path("sprung").exists()


def test_invalid_requests(refused: Refused, tmp_path: Path) -> None:
    for arguments, noun in (
        (["made_choise"], "made_choice"),
        (["made_choice,made_pair"], "made_choice"),
        (["made_answers", "--template", "inst"], "generate_until"),
        *((["made_choice", "--suite", "lm_eval", option, value], option)
          for option, value in (("--rule", "acc_norm"), ("--vary", "template"))),
        *((["made_choice", "--include-path", tmp_path / name], tmp_path / name) for name in ("none", ".")),
    ):  # fmt: skip
        code, line = refused("--include-path", made_tasks(Path("tasks"), count=2), "--tasks", *arguments)
        assert code == 2 and str(noun) in line
