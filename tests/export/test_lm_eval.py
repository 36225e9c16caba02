"""The export in lm-eval's format, compared with lm-eval's own output on the same model and documents."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from evalkit.benchmarks.run import evaluate
from evalkit.data import Library
from evalkit.display import Progress
from evalkit.paths import resource
from evalkit.runs.folder import Run
from tests.documents import SUBJECTS
from tests.marks import fast

LIMIT = 5
PARTS: dict[str, dict[str, Any]] = {
    "others": {
        "tasks": ("arc_easy", "arc_challenge", "boolq", "hellaswag", "openbookqa", "piqa", "winogrande"),
        "limit": LIMIT,
    },
    "mmlu": {"tasks": ("mmlu",)},
    "few-shot": {"tasks": ("mmlu",), "num_fewshot": 5},
}
"""What is evaluated twice, with evalkit and with lm-eval: MMLU on all of its documents, the other tasks on a few."""
each_part = pytest.mark.parametrize(
    "part",
    fast(["others"], ["others", "mmlu", "few-shot"]),  # 57 subjects, twice
)
pytestmark = [
    # lm-eval's own, all of them
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def exported(run: Run) -> dict[str, Any]:
    [path] = run.folder.glob("lm_eval/results_*.json")
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


@pytest.fixture(scope="module")
def ours(checkpoint: Path, real_documents: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """A part's finished run with lm-eval's prompt."""
    output = tmp_path_factory.mktemp("runs")

    @cache
    def run(part: str) -> Run:
        return evaluate(
            str(checkpoint), data_dir=real_documents, allow_unofficial_data=True, output=output, template="plain",
            log_samples=True, progress=Progress(live=False), **PARTS[part],
        )  # fmt: skip

    return run


@pytest.fixture(scope="module")
def theirs(checkpoint: Path, real_documents: Path) -> Callable[[str], dict[str, Any]]:
    """lm-eval's output on a part's tasks, from the same task files and documents."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    library = Library(real_documents, allow_unofficial=True)
    manager = TaskManager(include_path=str(resource("tasks")), include_defaults=False, metadata={"library": library})
    model = HFLM(pretrained=str(checkpoint), device="cpu", batch_size=8)

    @cache
    def output(part: str) -> dict[str, Any]:
        options = PARTS[part] | {"tasks": list(PARTS[part]["tasks"])}
        found: dict[str, Any] = simple_evaluate(model, task_manager=manager, bootstrap_iters=2, **options)
        return found

    return output


@each_part
def test_accuracies_and_errors_are_lm_evals(ours: Any, theirs: Any, part: str) -> None:
    found, expected = exported(ours(part))["results"], theirs(part)["results"]
    assert found.keys() == expected.keys()
    for task, metrics in expected.items():
        for key, value in metrics.items():
            if key.endswith(",none"):
                assert found[task][key] == pytest.approx(value, abs=1e-12), (task, key)
        assert found[task]["sample_len"] == metrics["sample_len"]
        assert found[task]["name"] == task


@pytest.mark.slow
def test_groups_are_pooled_as_lm_eval_pools_them(ours: Any, theirs: Any) -> None:
    found, expected = exported(ours("mmlu")), theirs("mmlu")
    assert found["groups"].keys() == expected["groups"].keys() == {"mmlu"}
    for key in ("acc,none", "acc_stderr,none"):
        assert found["groups"]["mmlu"][key] == pytest.approx(expected["groups"]["mmlu"][key], abs=1e-12)
    assert 0 < found["groups"]["mmlu"]["acc_stderr,none"] < 0.1
    assert found["group_subtasks"] == expected["group_subtasks"] == {"mmlu": [f"mmlu_{name}" for name in SUBJECTS]}


@each_part
def test_what_describes_the_results_is_lm_evals(ours: Any, theirs: Any, part: str) -> None:
    found, expected = exported(ours(part)), json.loads(json.dumps(theirs(part), default=str))
    assert found["n-shot"] == expected["n-shot"]
    assert found["n-samples"] == expected["n-samples"]
    assert found["versions"].items() <= expected["versions"].items()  # without the group's
    # Of these documents, which are some of the official ones, lm-eval knows nothing
    assert {k: v["alias"] for k, v in found["results"].items()} == {
        k: v["alias"] + " (not the official documents)" for k, v in expected["results"].items()
    }
    for task, metrics in expected["higher_is_better"].items():
        assert metrics.items() <= found["higher_is_better"][task].items()
    for task in expected["configs"]:
        for key, value in found["configs"][task].items():
            assert expected["configs"][task][key] == value, (task, key)
    described = {
        "results",
        "group_subtasks",
        "configs",
        "versions",
        "n-shot",
        "higher_is_better",
        "n-samples",
        "config",
    }
    described |= {"date", "transformers_version", "lm_eval_version"}
    assert described <= found.keys() & expected.keys()
    assert found["config"].keys() - expected["config"].keys() == set()


def test_samples_are_lm_evals(ours: Any, theirs: Any) -> None:
    for task, expected in theirs("others")["samples"].items():
        [path] = ours("others").folder.glob(f"lm_eval/samples_{task}_*.jsonl")
        found = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
        assert len(found) == len(expected) == LIMIT
        for mine, other in zip(found, expected, strict=True):
            assert mine.keys() >= other.keys()
            for key in ("doc_id", "doc", "filter", "prompt_hash", "doc_hash", "target_hash", *other["metrics"]):
                assert mine[key] == other[key], (task, key)
            assert mine["target"] == str(other["target"])
            assert set(other["metrics"]) <= set(mine["metrics"])
            arguments = [(given["arg_0"], given["arg_1"]) for given in mine["arguments"].values()]
            assert arguments == [tuple(pair) for pair in other["arguments"]]
            likelihoods = [float(value) for value, _ in mine["filtered_resps"]]
            assert likelihoods == pytest.approx([value for value, _ in other["filtered_resps"]], rel=1e-4)


def test_other_rules_stand_beside_under_names_of_their_own(finished: Run) -> None:
    found = exported(finished)["results"]["piqa"]
    for rule, name in (("ppl", "acc_ppl"), ("ppl_continuation", "acc_ppl_continuation"), ("acc_token", "acc_token")):
        piqa = next(task for task in finished.results(rule).tasks if task.task == "piqa")
        assert (found[f"{name},none"], found[f"{name}_stderr,none"]) == (piqa.accuracy, piqa.stderr)


def test_one_subject_is_still_a_subject(checkpoint: Path, documents: Path, tmp_path: Path) -> None:
    """A limit of one document leaves MMLU with its first subject only."""
    run = evaluate(
        str(checkpoint),
        data_dir=documents,
        allow_unofficial_data=True,
        output=tmp_path,
        limit=1,
        tasks="mmlu",
        progress=Progress(live=False),
    )
    found = exported(run)
    assert found["group_subtasks"] == {"mmlu": ["mmlu_abstract_algebra"]}
    assert found["n-samples"] == {"mmlu_abstract_algebra": {"original": 1, "effective": 1}}
    assert found["results"]["mmlu"]["acc,none"] == found["results"]["mmlu_abstract_algebra"]["acc,none"]
    assert found["groups"]["mmlu"]["acc_stderr,none"] is None


def test_pmi_is_lm_evals_mutual_information(checkpoint: Path, real_documents: Path, tmp_path: Path) -> None:
    """On a task in lm-eval's own format with that metric, and our run with the rule `pmi`."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    run = evaluate(
        str(checkpoint),
        data_dir=real_documents,
        allow_unofficial_data=True,
        output=tmp_path,
        template="plain",
        rule="pmi",
        tasks="arc_easy",
        progress=Progress(live=False),
    )
    task = {
        "task": "arc_easy_pmi",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(real_documents / "arc_easy.jsonl")}, "cache_dir": str(tmp_path)},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{choices.label.index(answerKey)}}",
        "doc_to_choice": "{{choices.text}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_mutual_info"}],
    }
    expected = simple_evaluate(
        HFLM(pretrained=str(checkpoint), device="cpu", batch_size=8),
        tasks=[task],
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=2,
    )["results"]["arc_easy_pmi"]
    found = exported(run)["results"]["arc_easy"]
    for name in ("acc", "acc_mutual_info", "acc_mutual_info_stderr"):
        assert found[f"{name},none"] == pytest.approx(expected[f"{name},none"], abs=1e-12)
