"""What is asked, made into what the run is; what cannot be is refused before a model is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from evalkit.errors import DataError, UnknownNameError, UsageError
from evalkit.longbench.request import LongBenchRequest, PreparedLongBench, prepare_longbench, window_of
from evalkit.models.locate import silent
from evalkit.request import request_of
from tests.longbench.made import record, write
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


def prepared(model: Path, rows: Path, tasks: tuple[str, ...] = ("qasper", "trec"), **asked: Any) -> PreparedLongBench:
    own = {name: asked.pop(name) for name in ("window", "chat", "suite") if name in asked}
    common = request_of(model, {"data_dir": rows} | asked)
    return prepare_longbench(LongBenchRequest(common, tasks=tasks, **own), silent)


@pytest.mark.parametrize(
    ("asked", "context", "most_new", "window"),
    [(None, 8192, 512, 7500), (None, 4096, 512, 3500), (None, 2048, 512, 1356), (None, 16384, 512, 15500),
     (None, 32768, 512, 31500), (None, 12000, 512, 11308), (None, 1000, 128, 500), (None, 700, 512, 188),
     (7680, 8192, 512, 7680), (2, 8192, 512, 2)],
)  # fmt: skip
def test_windows(asked: int | None, context: int, most_new: int, window: int) -> None:
    assert window_of(asked, context, most_new) == window


@pytest.mark.parametrize(
    ("asked", "context", "most_new", "words"),
    [(7681, 8192, 512, "--window 7681: the model takes 8192 tokens, of which an answer may need 512; give a --window "
      "of 2 to 7680, or another --context"),
     (0, 8192, 512, "--window 0: .*give a --window of 2 to 7680"),
     (1, 8192, 512, "--window 1: "),
     (-5, 8192, 512, "--window -5: "),
     (None, 512, 512, "answers have up to 512 tokens and the model takes 512; give a longer --context")],
)  # fmt: skip
def test_windows_that_cannot_be(asked: int | None, context: int, most_new: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        window_of(asked, context, most_new)


def test_what_a_run_is(model: Path, rows: Path) -> None:
    plain = prepared(model, rows)
    assert plain.manifest["specification"]["window"] == 512
    assert plain.manifest["context"] == 1024
    assert plain.manifest["documents"]["qasper"] == {
        "source": f"data-dir {rows / 'qasper.jsonl'}",
        "official": False,
        "count": 3,
    }
    others = [
        prepared(model, rows, window=300),
        prepared(model, rows, chat=True),
        prepared(model, rows, tasks=("qasper",)),
        prepared(model, rows, limit=2),
        prepared(model, rows, context=4096),
        prepared(model, rows, device="cuda"),
    ]
    assert len({one.manifest["id"] for one in (plain, *others)}) == 7
    assert others[1].folder.name.startswith("tiny-longbench-chat-")
    assert others[4].manifest["specification"]["window"] == 3500
    assert prepared(model, rows, token_budget=64).manifest["id"] == plain.manifest["id"]


def test_other_documents_are_another_run(model: Path, rows: Path) -> None:
    before = prepared(model, rows).manifest["id"]
    write(rows / "qasper.jsonl", [record("qasper", number, context="Changed.") for number in range(3)])
    assert prepared(model, rows).manifest["id"] != before


def test_damaged_tasks_are_left_out(model: Path, rows: Path) -> None:
    path = write(rows / "qasper.jsonl", [record("qasper"), b'{"broken'])
    found = prepared(model, rows)
    assert [task.name for task in found.rows] == ["trec"]
    assert str(found.trouble["qasper"]).startswith(f"data-dir {path}, line 2 (qasper): expected one JSON object")
    # The window is that of the tasks that are left
    assert prepared(model, rows, window=1024 - 64).manifest["specification"]["window"] == 960


def test_nothing_left(model: Path, rows: Path) -> None:
    with pytest.raises(
        DataError, match=r"no documents for lcc: no lcc.jsonl in .*data.zip.*give its folder with --data"
    ):
        prepared(model, rows, tasks=("lcc",))


def test_no_hub_and_no_folder(model: Path) -> None:
    common = request_of(model, {})
    with pytest.raises(
        DataError, match=r"no documents for qasper: the hub does not serve .*give its folder with --data"
    ):
        prepare_longbench(LongBenchRequest(common, tasks=("qasper",)), silent)


def test_unknown_names(model: Path, rows: Path) -> None:
    with pytest.raises(UnknownNameError, match="unknown longbench task 'qaspr': did you mean 'qasper'"):
        prepared(model, rows, tasks=("qaspr",))
    with pytest.raises(UnknownNameError, match="unknown longbench-e task 'musique'"):
        prepared(model, rows, tasks=("musique",), suite="longbench-e")


def test_a_model_that_tells_no_window(rows: Path, tmp_path: Path) -> None:
    silent_model = tiny_checkpoint(tmp_path / "tiny")
    edit_config(silent_model, "max_position_embeddings")
    with pytest.raises(UsageError, match="tells no context window; give --context with --context-original"):
        prepared(silent_model, rows)
    assert prepared(silent_model, rows, context=1024, context_original=1024).manifest["context"] == 1024


def test_a_folder_that_is_none_is_told_once(model: Path, tmp_path: Path) -> None:
    said: list[str] = []
    common = request_of(model, {"data_dir": tmp_path / "none"})
    with pytest.raises(DataError, match=r"--data-dir .*none: expected a folder with <task>.jsonl files, found nothing"):
        prepare_longbench(LongBenchRequest(common), said.append)
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
    # Within the window nothing is stretched, whatever the method
    assert prepared(model, rows, context=1024, context_method="dynamic-yarn").manifest["context"] == 1024


def test_a_manifest_is_plain_data(model: Path, rows: Path) -> None:
    manifest = prepared(model, rows).manifest
    assert json.loads(json.dumps(manifest)) == manifest
