"""evalkit's uses of lm-eval's internals, compared with lm-eval on the same files and texts."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import lm_eval.api.metrics
import lm_eval.api.task
import lm_eval.evaluator
import lm_eval.utils
import numpy as np
import pytest
from lm_eval.tasks import TaskManager

from evalkit.compatibility.lm_eval import (
    as_texts,
    compiled_once,
    fewshot_seed,
    generation_arguments,
    hash_of,
    index_of,
    index_tasks,
    json_value,
    processed_once,
    replace_index,
    rolling_windows,
    task_configs,
    without_bars,
)

BASE = """
output_type: multiple_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {documents}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["yes", "no"]
doc_to_target: gold
process_docs: !function code.process
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks with a tag, and a group of them."""
    folder = tmp_path_factory.mktemp("tasks")
    documents = folder / "documents.jsonl"
    documents.write_text('{"question": "Is it?", "gold": 0}\n', encoding="utf-8")
    (folder / "code.py").write_text("def process(dataset):\n    return dataset\n", encoding="utf-8")
    (folder / "base").write_text(BASE.format(documents=documents), encoding="utf-8")
    for name in ("one", "two"):
        (folder / f"{name}.yaml").write_text(f"include: base\ntask: made_{name}\ntag: made_tag\n", encoding="utf-8")
    (folder / "group.yaml").write_text("group: made_group\ntask: [made_one, made_two]\n", encoding="utf-8")
    return folder


def manager(folder: Path | None) -> TaskManager:
    return TaskManager(include_path=None if folder is None else str(folder), include_defaults=False)


def test_configurations_without_the_tasks_code(folder: Path) -> None:
    """Of tasks in nested groups, of a group's own tasks, and of tasks that are Python classes."""
    (folder / "bomb.py").write_text("raise SystemExit('imported')", encoding="utf-8")
    (folder / "class.yaml").write_text("task: made_class\nclass: !function bomb.Task\n", encoding="utf-8")
    inline = "{task: inner, process_docs: !function bomb.process}"
    (folder / "outer.yaml").write_text(
        f"group: made_outer\nnum_fewshot: 3\ntask: [made_tag, made_class, {{group: own, task: [{inline}]}}]\n",
        encoding="utf-8",
    )
    configs = task_configs(manager(folder), "made_outer")
    assert list(configs) == ["made_one", "made_two", "made_class", "made_outer::own::inner"]
    assert configs["made_one"]["output_type"] == "multiple_choice" and configs["made_one"]["num_fewshot"] == 3
    # The name of a function, which is not imported
    assert str(configs["made_one"]["process_docs"]).endswith("code.process")
    for path in ("bomb.py", "class.yaml", "outer.yaml"):
        (folder / path).unlink()


def test_a_stored_index_is_lm_evals(folder: Path) -> None:
    expected = manager(folder).task_index
    index = index_of(json.loads(json.dumps(index_tasks(folder))), folder)
    assert index.keys() == {"made_one", "made_two", "made_tag", "made_group"} == expected.keys()
    for name, entry in index.items():
        assert (entry.kind, entry.yaml_path, entry.tags) == (
            expected[name].kind, expected[name].yaml_path, expected[name].tags,
        )  # fmt: skip
    other = manager(None)
    replace_index(other, index)
    for name in ("made_group", "made_tag"):
        assert set(other.load([name])["tasks"]) == {"made_one", "made_two"}


def test_a_template_is_compiled_once() -> None:
    environment = lm_eval.utils.env
    before = environment.from_string
    with compiled_once():
        assert environment.from_string("{{a}}") is environment.from_string("{{a}}")
        assert lm_eval.utils.apply_template("{{a}}!", {"a": 1}) == "1!"
    assert environment.from_string == before


def test_documents_are_processed_once_for_each_task(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    with processed_once():
        for name in ("made_one", "made_two"):
            [task] = manager(folder).load([name])["tasks"].values()
            process = task.config.process_docs
            monkeypatch.setattr(task.config, "process_docs", lambda docs, do=process: calls.append(1) or do(docs))
            first = list(task.eval_docs)
            # Read when the task was made
            assert (first, list(task.eval_docs), calls) == ([{"question": "Is it?", "gold": 0}], first, [])
    [task] = manager(folder).load(["made_one"])["tasks"].values()
    monkeypatch.setattr(task.config, "process_docs", lambda docs: calls.append(1) or docs)
    assert list(task.eval_docs) == list(task.eval_docs) and calls == [1, 1]


def test_no_bars_inside(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    monkeypatch.setattr(lm_eval.api.metrics, "DISABLE_MULTIPROC", True, raising=False)
    said = []
    values = [0.0, 1.0] * 5
    with without_bars(lambda name, samples: said.append((name, samples))):
        list(lm_eval.api.task.tqdm(range(2)))
        lm_eval.api.metrics.bootstrap_stderr(lm_eval.api.metrics.mean, values, iters=1000)
    assert said == [("mean", 1000)]
    assert capsys.readouterr().err == ""
    list(lm_eval.api.task.tqdm(range(2)))
    assert "2/2" in capsys.readouterr().err


def test_seed_generation_arguments_and_rolling_windows() -> None:
    default = inspect.signature(lm_eval.evaluator.simple_evaluate).parameters["fewshot_random_seed"].default
    assert fewshot_seed() == default
    arguments = generation_arguments({"until": "\n", "max_new_tokens": 7}, 256)
    assert (arguments["until"], arguments["max_gen_toks"], arguments["do_sample"]) == (["\n"], 7, False)
    assert generation_arguments({"until": []}, 256)["max_gen_toks"] == 256
    windows = rolling_windows(list(range(10, 21)), 1, 4)
    assert [token for _, continuation in windows for token in continuation] == list(range(10, 21))
    assert windows[0] == ([1], [10, 11, 12, 13])
    assert all(len(context) + len(continuation) <= 5 for context, continuation in windows)


def test_values_as_lm_eval_writes_them() -> None:
    assert json.dumps([np.int64(3), np.float64(0.5), np.bool_(True)], default=json_value) == "[3, 0.5, true]"
    assert as_texts([[(1.5, True)], "a"]) == [[("1.5", "True")], "a"]
    assert hash_of("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
