"""Exports to the hub's and Every Eval Ever's formats, validated by their own loader and schema."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import yaml
from huggingface_hub import ModelCard, parse_eval_result_entries

from evalkit.benchmarks.outcomes import Metric
from evalkit.data.wheels import Member, Wheel, fetch_wheel_member
from evalkit.errors import DataError, EvalkitError, RunError, UnknownNameError, UsageError
from evalkit.exchange.exports import FORMS, export_run
from evalkit.exchange.formats import Content, ExportedScore
from evalkit.runs.finding import find_run
from evalkit.runs.folder import LM_EVAL, RESULTS, Run, load_run
from tests.benchmarks.attention.made_ranks import made_ranks
from tests.sealed import read, reseal
from tests.tables.test_measured import altered

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


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    try:
        path = fetch_wheel_member(SCHEMA, "schemas", lambda _: None)
    except DataError as error:
        pytest.skip(f"the schema could not be downloaded: {error}")
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def accuracies(run: Run, rule: str) -> dict[str, float]:
    return {task.task: task.accuracy for task in run.results(rule).tasks}


@pytest.mark.parametrize("rule", [None, "acc_norm"])
def test_every_eval_ever(finished: Run, tmp_path: Path, schema: dict[str, Any], rule: str | None) -> None:
    [path] = export_run(finished, "every_eval_ever", rule, tmp_path)
    document = json.loads(path.read_text(encoding="utf-8"))
    jsonschema.Draft7Validator(schema).validate(document)
    assert document["schema_version"] == schema["version"]
    assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}\.json", path.name)
    found = {result["evaluation_name"]: result for result in document["evaluation_results"]}
    expected = accuracies(finished, rule or "ppl")
    assert {task: result["score_details"]["score"] for task, result in found.items()} == expected
    piqa = next(task for task in finished.results(rule).tasks if task.task == "piqa")
    assert found["piqa"]["score_details"]["uncertainty"] == {
        "num_samples": piqa.n,
        "standard_error": {"value": piqa.stderr, "method": "analytic"},
    }
    source = found["piqa"]["source_data"]
    assert (source["dataset_name"], source["source_type"]) == ("piqa (not the official documents)", "other")
    assert source["additional_details"]["official_documents"] == "no"
    assert "hf_repo" not in source


EXTENSION = {"method": "linear", "target": 8192, "original": 2048, "factor": 4.0}


@pytest.fixture
def stretched(finished: Run, tmp_path: Path) -> Run:
    """A run on some of the official documents, with unofficial examples and an extended context."""
    documents = {task: about | {"official": True} for task, about in finished.manifest["documents"].items()}
    documents["piqa"] |= {"count": 1838}
    examples = {task: about | {"official": task != "mmlu"} for task, about in documents.items()}
    more = {"documents": documents, "examples": examples}
    return load_run(altered(finished, tmp_path / "stretched", 0.0, more, limit=6, context_extension=EXTENSION))


def test_what_is_no_score_of_the_published_documents_is_named_so(
    stretched: Run, tmp_path: Path, schema: dict[str, Any]
) -> None:
    card, entries = export_run(stretched, "hub", None, tmp_path)
    by_name = {result.dataset_name: result for result in ModelCard.load(card).data.eval_results}
    assert {"piqa (6 of 1,838 documents)", "mmlu (not the official examples)", "arc_easy"} <= by_name.keys()
    arguments = by_name["arc_easy"].metric_args
    assert arguments["limit"] == "the first 6 documents of each task"
    assert arguments["context_extension"] == "context stretched from 2,048 to 8,192 tokens by linear: factor 4"
    notes = {
        entry.task_id: entry.notes or "" for entry in parse_eval_result_entries(yaml.safe_load(entries.read_text()))
    }
    assert notes["piqa"].startswith("6 of 1,838 documents; evalkit")
    assert notes["arc_easy"].startswith("evalkit")
    assert all("context stretched from 2,048" in note for note in notes.values())
    [path] = export_run(stretched, "every_eval_ever", None, tmp_path)
    document = json.loads(path.read_text(encoding="utf-8"))
    jsonschema.Draft7Validator(schema).validate(document)
    found = {result["evaluation_name"]: result for result in document["evaluation_results"]}
    assert found["mmlu"]["source_data"]["dataset_name"] == "mmlu (not the official examples)"
    assert found["piqa"]["source_data"]["hf_repo"]
    for result in found.values():
        assert "context stretched" in result["generation_config"]["additional_details"]["context_extension"]


def test_the_schema_would_refuse(finished: Run, tmp_path: Path, schema: dict[str, Any]) -> None:
    """So that passing it is meaningful."""
    [path] = export_run(finished, "every_eval_ever", None, tmp_path)
    for spoil in ("model_info", "evaluation_results"):
        document = json.loads(path.read_text(encoding="utf-8"))
        del document[spoil]
        assert not jsonschema.Draft7Validator(schema).is_valid(document)


def test_the_same_export_is_the_same_file(finished: Run, tmp_path: Path) -> None:
    first, again, other = (export_run(finished, "every_eval_ever", rule, tmp_path)[0] for rule in (None, "ppl", "acc"))
    assert first == again != other
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("rule", [None, "acc"])
def test_hub(finished: Run, tmp_path: Path, rule: str | None) -> None:
    card, entries = export_run(finished, "hub", rule, tmp_path)
    expected = {task: round(100 * value, 4) for task, value in accuracies(finished, rule or "ppl").items()}
    by_task = {
        result.dataset_name.removesuffix(" (not the official documents)"): result
        for result in ModelCard.load(card).data.eval_results
    }
    assert {task: result.metric_value for task, result in by_task.items()} == expected
    assert all(result.dataset_name.endswith(" (not the official documents)") for result in by_task.values())
    arc = by_task["arc_easy"]
    assert (arc.dataset_type, arc.dataset_config, arc.dataset_split) == ("allenai/ai2_arc", "ARC-Easy", "test")
    assert arc.metric_args["rule"] == (rule or "ppl")
    assert entries == tmp_path / ".eval_results" / "evalkit.yaml"
    parsed = parse_eval_result_entries(yaml.safe_load(entries.read_text(encoding="utf-8")))
    assert {entry.task_id: entry.value for entry in parsed} == expected
    assert {entry.dataset_id for entry in parsed} >= {"allenai/ai2_arc", "cais/mmlu"}
    assert all((entry.notes or "").startswith("not the official documents; ") for entry in parsed)


def test_a_hub_model_is_named_without_its_revision(finished: Run) -> None:
    """It is stored beside it, as the commit."""
    hub = Run(finished.folder, finished.manifest | {"model": "org/name@step1000", "path": None})
    assert Content(hub, "acc", (), {}).model == "org/name"
    own = Run(finished.folder, finished.manifest | {"model": "org/name@step1000", "path": "/org/name@step1000"})
    assert Content(own, "acc", (), {}).model == "org/name@step1000"


def test_lm_eval_is_what_the_run_wrote(finished: Run, tmp_path: Path) -> None:
    paths = export_run(finished, "lm_eval", None, tmp_path)
    own = sorted((finished.folder / "lm_eval").iterdir())
    assert [path.name for path in paths] == [path.name for path in own]
    assert [path.read_bytes() for path in paths] == [path.read_bytes() for path in own]
    [content] = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    assert {entry["alias"].partition(" (")[2] for entry in content["results"].values()} == {
        "not the official documents)"
    }
    assert content["evalkit"]["unofficial"] == {"documents": list(finished.manifest["documents"])}


def test_without_an_output_it_goes_into_the_run_folder(own_run: Path) -> None:
    run = load_run(own_run)
    for form in FORMS:
        for path in export_run(run, form):
            assert path.is_file()
            assert path.is_relative_to(own_run / form)
    assert load_run(own_run).complete


def test_invalid_exports_are_rejected(finished: Run, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="unknown export 'hob': did you mean 'hub'"):
        export_run(finished, "hob")
    with pytest.raises(UnknownNameError, match=r"unknown rule of run .*'ac'"):
        export_run(finished, "hub", "ac")
    with pytest.raises(UsageError, match="contains every rule"):
        export_run(finished, "lm_eval", "acc")
    theirs = Path(altered(finished, tmp_path / "theirs", manifest={"kind": LM_EVAL}))
    (theirs / RESULTS).write_text(json.dumps(read(theirs, RESULTS) | {"tasks": [], "groups": []}), encoding="utf-8")
    reseal(theirs)
    with pytest.raises(UsageError, match="--to lm_eval"):
        export_run(load_run(theirs), "hub")
    begun = Path(altered(finished, tmp_path / "begun"))
    (begun / RESULTS).unlink()
    with pytest.raises(RunError, match="begun is not finished"):
        export_run(find_run(str(begun), begun.parent), "hub")
    (tmp_path / "file").write_text("")
    with pytest.raises(EvalkitError, match=r"file.* cannot be written"):
        export_run(finished, "hub", None, tmp_path / "file" / "folder")


@pytest.mark.parametrize(
    ("bounds", "whole", "score"), [((0.0, 1.0), 1.0, 0.2), ((0.0, 100.0), 100.0, 0.002), ((-1.0, 1.0), None, 0.2),
                                   ((-2.0, 0.0), None, 0.2), (None, None, 0.2)],
)  # fmt: skip
def test_only_shares_are_scaled(bounds: tuple[float, float] | None, whole: float | None, score: float) -> None:
    """A number in its own unit is not converted, whatever its bounds."""
    metric = Metric("a", "m", 3, 0.2, 0.1, bounds=bounds)
    assert metric.whole == whole
    found = ExportedScore(metric, None, 3, (), "here")
    assert found.score == pytest.approx(score)
    assert found.stderr == pytest.approx(score / 2)


def test_measures_of_attention_are_not_scores_of_answers(tmp_path: Path, schema: dict[str, Any]) -> None:
    run = made_ranks(tmp_path, "llama-125m-vanilla", {19: np.ones((5, 3))})
    [path] = export_run(run, "every_eval_ever", None, tmp_path / "exported")
    document = json.loads(path.read_text(encoding="utf-8"))
    jsonschema.Draft7Validator(schema).validate(document)
    words = {result["metric_config"]["evaluation_description"] for result in document["evaluation_results"]}
    assert words == {"mean rank over documents; neither higher nor lower is better"}
