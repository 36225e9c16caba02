"""Runs to publish: read as the original is, and without paths and names of the machine."""

from __future__ import annotations

import json
import platform
import shutil
from pathlib import Path

import pytest

from evalkit.errors import RunError, UsageError
from evalkit.exchange.exports import export_run
from evalkit.runs.folder import JOURNAL, MANIFEST, Run, load_run
from tests.sealed import read, reseal, write


@pytest.fixture
def published(finished: Run, tmp_path: Path) -> Run:
    """A finished run, exported."""
    written = export_run(finished, "run", output=tmp_path / "published")
    assert written
    return load_run(tmp_path / "published" / finished.folder.name)


def test_the_numbers_are_the_runs(finished: Run, published: Run) -> None:
    assert published.complete
    assert published.stored == finished.stored
    assert published.results("acc_norm") == finished.results("acc_norm")
    assert published.scores.equals(finished.scores)
    for key in ("id", "specification", "loaded", "created"):
        assert published.manifest[key] == finished.manifest[key]
    for name in published.files.keys() - {MANIFEST}:  # whose content was verified when it was opened
        published.read(name)


def test_no_journal_and_no_path_of_the_machine(finished: Run, published: Run, tmp_path: Path) -> None:
    assert not (published.folder / JOURNAL).exists()
    texts = [path.read_text(encoding="utf-8") for path in published.folder.rglob("*.json")]
    assert len(texts) >= 2
    for text in texts:
        assert platform.node() not in json.loads(text).get("devices", [{}])[0].values()
        for path in (str(tmp_path.parent), str(finished.folder.parent), platform.release()):
            assert path not in text
    assert published.manifest["command"][0] == "evalkit"


def test_absolute_paths_keep_their_last_part(finished: Run, tmp_path: Path) -> None:
    folder = tmp_path / finished.folder.name
    shutil.copytree(finished.folder, folder)
    manifest = read(folder, MANIFEST)
    command = [
        "/opt/bin/evalkit",
        "run",
        "/data/models/a",
        "--output=/data/runs",
        "--rule",
        "acc/norm",
        r"C:\models\b",
        "a.txt,/my texts/b.txt",
    ]
    documents = {task: {**about, "source": f"data-dir /my data/{task}.jsonl"}
                 for task, about in manifest["documents"].items()}  # fmt: skip
    model = "/data/my models/a/"
    changed = {"command": command, "model": model, "path": model[:-1], "documents": documents}
    write(folder, MANIFEST, manifest | changed)
    reseal(folder)
    export_run(load_run(folder), "run", output=tmp_path / "published")
    found = load_run(tmp_path / "published" / finished.folder.name).manifest
    assert found["command"] == ["evalkit", "run", "a", "--output=runs", "--rule", "acc/norm", "b", "a.txt,b.txt"]
    assert {task: about["source"] for task, about in found["documents"].items()} == {
        task: f"data-dir {task}.jsonl" for task in documents
    }
    assert (found["model"], found["path"]) == ("a", "a")


def test_a_relative_path_of_a_model_stays(finished: Run, tmp_path: Path) -> None:
    folder = tmp_path / finished.folder.name
    shutil.copytree(finished.folder, folder)
    write(
        folder, MANIFEST, read(folder, MANIFEST) | {"model": "trained/a/model", "path": "/home/alice/trained/a/model"}
    )
    reseal(folder)
    export_run(load_run(folder), "run", output=tmp_path / "published")
    found = load_run(tmp_path / "published" / finished.folder.name).manifest
    assert (found["model"], found["path"]) == ("trained/a/model", "trained/a/model")


def test_the_run_itself_is_not_replaced(finished: Run, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / finished.folder.name
    shutil.copytree(finished.folder, folder)
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for output in (tmp_path / "runs", folder / "..", tmp_path / "link"):
        with pytest.raises(UsageError, match="holds the run itself, which would be replaced; choose another folder"):
            export_run(load_run(folder), "run", output=output)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_it_has_every_rule(finished: Run, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="every rule"):
        export_run(finished, "run", "acc", tmp_path)


def test_a_damaged_run_is_not_published(finished: Run, tmp_path: Path) -> None:
    folder = tmp_path / finished.folder.name
    shutil.copytree(finished.folder, folder)
    (folder / "scores.parquet").write_bytes(b"")
    with pytest.raises(RunError, match="damaged"):
        export_run(load_run(folder), "run", output=tmp_path / "published")
    assert not (tmp_path / "published").exists()
