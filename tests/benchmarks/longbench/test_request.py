"""Requests and plans of LongBench runs; invalid requests are rejected before a model is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from evalkit.benchmarks.generated import DocumentPlan
from evalkit.benchmarks.longbench.benchmark import LongBench, LongBenchRequest, max_prompt_tokens
from evalkit.benchmarks.longbench.protocol import suite_tasks
from evalkit.benchmarks.request import request_of
from evalkit.errors import CheckpointError, DataError, UnknownNameError, UsageError
from evalkit.models.loading.locate import silent
from tests.benchmarks.longbench.made import record, write
from tests.models.loading import edit_config
from tests.tiny import tiny_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny", window=1024)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    for task in ("qasper", "trec"):
        write(tmp_path / "rows" / f"{task}.jsonl", [record(task, number) for number in range(3)])
    return tmp_path / "rows"


def prepared(model: Path, rows: Path, tasks: tuple[str, ...] = ("qasper", "trec"), **asked: Any) -> DocumentPlan:
    say = asked.pop("say", silent)
    # Without extension, so that numbers are this checkpoint's, unless a test is about the context
    common = {"data_dir": rows, "context": "none", "tasks": tasks}
    return LongBench().plan(request_of(LongBenchRequest, model, common | asked), say)


@pytest.mark.parametrize(
    ("asked", "context", "most_new", "window"),
    [(None, 8192, 512, 7500), (None, 4096, 512, 3500), (None, 2048, 512, 1356), (None, 16384, 512, 15500),
     (None, 32768, 512, 31500), (None, 12000, 512, 11308), (None, 1000, 128, 500), (None, 700, 512, 188),
     (7680, 8192, 512, 7680), (2, 8192, 512, 2)],
)  # fmt: skip
def test_windows(asked: int | None, context: int, most_new: int, window: int) -> None:
    assert max_prompt_tokens(asked, context, most_new) == window


@pytest.mark.parametrize(
    ("asked", "context", "most_new", "words"),
    [(7681, 8192, 512, "--max-prompt-tokens 7681: the model takes 8192 tokens, of which an answer may need 512; give "
      "a --max-prompt-tokens of 2 to 7680, or another --context"),
     (0, 8192, 512, "--max-prompt-tokens 0: .*give a --max-prompt-tokens of 2 to 7680"),
     (1, 8192, 512, "--max-prompt-tokens 1: "),
     (-5, 8192, 512, "--max-prompt-tokens -5: "),
     (None, 512, 512, "answers have up to 512 tokens and the model takes 512; give a longer --context")],
)  # fmt: skip
def test_invalid_windows(asked: int | None, context: int, most_new: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        max_prompt_tokens(asked, context, most_new)


def test_what_a_run_is(model: Path, rows: Path) -> None:
    plain = prepared(model, rows)
    assert plain.manifest["specification"]["max_prompt_tokens"] == 512
    assert plain.manifest["context"] == 1024
    assert plain.manifest["documents"]["qasper"] == {
        "source": f"data-dir {rows / 'qasper.jsonl'}",
        "official": False,
        "count": 3,
    }
    others = [
        prepared(model, rows, max_prompt_tokens=300),
        prepared(model, rows, chat=True),
        prepared(model, rows, tasks=("qasper",)),
        prepared(model, rows, limit=2),
        prepared(model, rows, context=4096),
        prepared(model, rows, device="cuda"),
    ]
    assert len({one.manifest["id"] for one in (plain, *others)}) == 7
    assert others[1].folder.name.startswith("tiny-longbench-chat-")
    assert others[4].manifest["specification"]["max_prompt_tokens"] == 3500
    assert prepared(model, rows, token_budget=64).manifest["id"] == plain.manifest["id"]


def test_other_documents_are_another_run(model: Path, rows: Path) -> None:
    before = prepared(model, rows).manifest["id"]
    write(rows / "qasper.jsonl", [record("qasper", number, context="Changed.") for number in range(3)])
    assert prepared(model, rows).manifest["id"] != before


def test_damaged_tasks_are_left_out(model: Path, rows: Path) -> None:
    path = write(rows / "qasper.jsonl", [record("qasper"), b'{"broken'])
    found = prepared(model, rows)
    assert list(found.tasks) == ["trec"]
    [reason] = found.manifest["left_out"]
    assert reason.startswith(f"data-dir {path}, line 2 (qasper): expected one JSON object")
    # The window is that of the remaining tasks
    assert prepared(model, rows, max_prompt_tokens=1024 - 64).manifest["specification"]["max_prompt_tokens"] == 960


def test_nothing_left(model: Path, rows: Path) -> None:
    with pytest.raises(
        DataError, match=r"no documents for lcc: no lcc.jsonl in .*data.zip.*give its folder with --data"
    ):
        prepared(model, rows, tasks=("lcc",))


def test_what_is_wrong_with_many_tasks_is_said_once(model: Path, tmp_path: Path) -> None:
    """In the error if there are no documents; in a message if there are some."""
    said: list[str] = []
    everything = tuple(task.name for task in suite_tasks("longbench-e"))
    with pytest.raises(DataError) as caught:
        prepared(model, tmp_path, everything, suite="longbench-e", say=said.append)
    assert str(caught.value).startswith(f"{', '.join(everything)}: no documents for <task>_e: no <task>_e.jsonl in ")
    assert str(caught.value).count("the hub cannot be used") == 1
    assert [line for line in said if "no documents" in line] == []
    write(tmp_path / "lcc_e.jsonl", [record("lcc")])
    write(tmp_path / "trec_e.jsonl", [b"{"])
    found = prepared(model, tmp_path, everything, suite="longbench-e", say=said.append)
    left_out = found.manifest["left_out"]
    assert [line for line in said if line.startswith("left out: ")] == [f"left out: {line}" for line in left_out]
    assert [("line 1 (trec)" in line, "no documents for <task>_e" in line) for line in left_out] == [
        (False, True), (True, False)]  # fmt: skip


def test_a_folder_that_holds_the_folder(model: Path, rows: Path) -> None:
    """Files of the same names with predictions are not documents."""
    for task in ("qasper", "trec"):
        write(rows.parent / "a_predictions" / f"{task}.jsonl", [{"pred": "", "answers": [""], "all_classes": None}])
    with pytest.raises(DataError, match=rf"no <task>\.jsonl in {rows.parent} \(did you mean {rows}\?\); the hub"):
        prepared(model, rows.parent)
    assert "left_out" not in prepared(model, rows).manifest


def test_no_hub_and_no_folder(model: Path) -> None:
    asked = request_of(LongBenchRequest, model, {"tasks": "qasper"})
    with pytest.raises(
        DataError, match=r"no documents for qasper: the hub cannot be used .*give its folder with --data"
    ):
        LongBench().plan(asked, silent)


def test_unknown_names(model: Path, rows: Path) -> None:
    with pytest.raises(UnknownNameError, match="unknown longbench task 'qaspr': did you mean 'qasper'"):
        prepared(model, rows, tasks=("qaspr",))
    with pytest.raises(UnknownNameError, match="unknown longbench-e task 'musique'"):
        prepared(model, rows, tasks=("musique",), suite="longbench-e")


def test_a_model_without_a_window(rows: Path, tmp_path: Path) -> None:
    silent_model = tiny_checkpoint(tmp_path / "tiny")
    edit_config(silent_model, "max_position_embeddings")
    with pytest.raises(UsageError, match="has no context window; give --context with --context-original"):
        prepared(silent_model, rows)
    assert prepared(silent_model, rows, context=1024, context_original=1024).manifest["context"] == 1024


def test_an_invalid_folder_is_reported_once(model: Path, tmp_path: Path) -> None:
    said: list[str] = []
    asked = request_of(LongBenchRequest, model, {"data_dir": tmp_path / "none"})
    with pytest.raises(DataError, match=r"--data-dir .*none: expected a folder with <task>.jsonl files, found nothing"):
        LongBench().plan(asked, said.append)
    assert said == []


def test_other_end_tokens_are_another_run(model: Path, rows: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(model, tmp_path / model.name))
    before = prepared(copied, rows).folder
    (copied / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    assert prepared(copied, rows).folder != before


def test_dynamic_yarn_cannot_generate(model: Path, rows: Path) -> None:
    with pytest.raises(
        UsageError, match=r"longbench generates text, and under --context-method dynamic-yarn .* use yarn"
    ):
        prepared(model, rows, context=4096, context_method="dynamic-yarn")
    # Within the window nothing is extended, whatever the method
    assert prepared(model, rows, context=1024, context_method="dynamic-yarn").manifest["context"] == 1024


def test_a_manifest_is_plain_data(model: Path, rows: Path) -> None:
    manifest = prepared(model, rows).manifest
    assert json.loads(json.dumps(manifest)) == manifest


def test_the_papers_context_is_the_default(model: Path, rows: Path) -> None:
    """The same run as with --context 8192, announced in one line that says how to disable it."""
    said: list[str] = []
    bare = prepared(model, rows, context=None, say=said.append)
    assert [line for line in said if "stretched" in line] == [
        "context stretched from 1,024 to 8,192 tokens by yarn: factor 8, beta 32/1, attention factor 1.20794 "
        "(--context 8192 is LongBench's default, as in the paper; --context none leaves the model as it is)"
    ]
    assert bare.manifest["id"] == prepared(model, rows, context=8192).manifest["id"]
    assert bare.request.model.context == 8192  # the model is loaded with it
    assert (bare.manifest["context"], bare.manifest["specification"]["max_prompt_tokens"]) == (8192, 7500)
    left = prepared(model, rows, say=said.append)
    assert left.manifest["specification"]["context_extension"] is None
    assert len(said) == 2  # the other is the detected window


@pytest.mark.parametrize("window", [8192, 32768])
def test_a_window_that_is_long_enough_is_left_alone(rows: Path, tmp_path: Path, window: int) -> None:
    model, said = tiny_checkpoint(tmp_path / "tiny", window=window), list[str]()
    bare = prepared(model, rows, context=None, say=said.append)
    assert bare.manifest["id"] == prepared(model, rows).manifest["id"]
    assert bare.manifest["context"] == window
    assert said == []


def test_how_to_stretch_without_how_far(model: Path, rows: Path, tmp_path: Path) -> None:
    def stretched(**asked: Any) -> dict[str, Any]:
        return dict(prepared(model, rows, **({"context": None} | asked)).manifest["specification"]["context_extension"])

    assert stretched(context_method="linear") == stretched(context_method="linear", context=8192)
    assert stretched(context_original=512)["factor"] == 16
    path = tmp_path / "own.yaml"
    path.write_text("beta_fast: 20\n", encoding="utf-8")
    assert (stretched(context_config=path)["target"], stretched(context_config=path)["beta_fast"]) == (8192, 20)
    path.write_text("context: 2048\n", encoding="utf-8")
    assert stretched(context_config=path)["target"] == 2048
    assert prepared(model, rows, context_config=path).manifest["specification"]["context_extension"] is None
    with pytest.raises(UsageError, match="--context none leaves the model as it is; leave out --context-method"):
        prepared(model, rows, context_method="linear")
    with pytest.raises(UsageError, match="dynamic-yarn"):
        prepared(model, rows, context=None, context_method="dynamic-yarn")


def test_a_checkpoint_that_stretches_itself(rows: Path, tmp_path: Path) -> None:
    """Its own window is not used as the paper's context; the option is required."""
    model = tiny_checkpoint(tmp_path / "tiny", window=2048)
    edit_config(model, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(
        CheckpointError, match=r"config.json stretches the context itself .*give --context none"
    ) as caught:
        prepared(model, rows, context=None)
    assert "--context 8192 is LongBench's default" in str(caught.value)
    assert prepared(model, rows).manifest["context"] == 2048
    edit_config(model, max_position_embeddings=8192)
    assert prepared(model, rows, context=None).manifest["context"] == 8192
