"""The hub: requested once, reported once; its cache is read offline."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evalkit.data import TASKS, HubSplit, hub
from evalkit.data.hub import Hub, cached_records, cached_split, reach
from tests.data.samples import sample

PIQA = TASKS["piqa"].hub


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)


@contextmanager
def endpoint(status: int, delay: float = 0.0) -> Iterator[str]:
    """A server on this machine that answers every request with one status."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            time.sleep(delay)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize(("status", "answers"), [(200, True), (404, True), (403, False), (503, False)])
def test_reach_distinguishes_an_answer_from_a_refusal(
    monkeypatch: pytest.MonkeyPatch, status: int, answers: bool
) -> None:
    with endpoint(status) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        trouble = reach()
    assert (trouble is None) == answers
    assert answers or str(status) in str(trouble)


@pytest.mark.usefixtures("online")
def test_reach_gives_up_within_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_REACH_SECONDS", 0.1)
    with endpoint(200, delay=0.5) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        assert "no answer within" in str(reach())


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "no url at all"])
def test_reach_reports_the_obstacle(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", url)
    trouble = reach()
    assert trouble is not None
    assert "\n" not in trouble


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_is_respected(online: None, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setattr(hub, "_ask", lambda _: pytest.fail("the hub was asked"))
    monkeypatch.setenv(variable, "true")
    assert reach() == f"{variable} is set"


def test_an_unreachable_hub_is_asked_once_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, said = list[int](), list[str]()

    def unreachable() -> str:
        asked.append(1)
        return "no route"

    monkeypatch.setattr(hub, "reach", unreachable)
    ours = Hub()
    assert [ours.records(TASKS[task].hub, said.append) for task in TASKS] == [None] * 8
    assert len(asked) == 1
    assert len(said) == 1
    assert "no route" in said[0]


def test_a_failing_load_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    loads, said = list[str](), list[str]()

    def load_dataset(path: str, *_: Any, **__: Any) -> Any:
        loads.append(path)
        raise ConnectionError("cut\noff")

    monkeypatch.setattr(hub, "reach", lambda: None)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    ours = Hub()
    assert ours.records(PIQA, said.append) is None
    assert ours.records(TASKS["mmlu"].hub, said.append) is None
    assert loads == ["baber/piqa"]
    assert said == ["the Hugging Face hub cannot be used (baber/piqa: ConnectionError, cut); continuing without it"]


def test_a_split_is_asked_for_by_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(path: str, config: str | None, *, split: str) -> Any:
        return SimpleNamespace(to_list=lambda: [{"path": path, "config": config, "split": split}])

    monkeypatch.setattr(hub, "reach", lambda: None)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    rows = Hub().records(TASKS["arc_easy"].hub, pytest.fail)
    assert rows == [{"path": "allenai/ai2_arc", "config": "ARC-Easy", "split": "test"}]


def _cache_like_the_library(folder: Path, split: HubSplit, records: list[dict[str, Any]]) -> None:
    """Fill the cache with the `datasets` library's own builder, as if the records had come from the hub."""
    import datasets

    class FromHub(datasets.GeneratorBasedBuilder):
        VERSION = datasets.Version("0.0.0")

        def _info(self) -> datasets.DatasetInfo:
            return datasets.DatasetInfo(features=datasets.Dataset.from_list(records).features)

        def _split_generators(self, _: Any) -> list[datasets.SplitGenerator]:
            return [datasets.SplitGenerator(name=name) for name in (split.split, "train")]

        def _generate_examples(self) -> Iterator[tuple[int, dict[str, Any]]]:
            yield from enumerate(records)

    FromHub(
        cache_dir=str(folder / "datasets"),
        dataset_name=split.path.split("/")[1],
        config_name=split.config or "default",
        repo_id=split.path,
        hash="0123abcd",
    ).download_and_prepare()


@pytest.mark.parametrize("task", ["piqa", "arc_easy"])
def test_the_cache_of_the_datasets_library_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str) -> None:
    records = [sample(task), sample(task)]
    assert cached_split(TASKS[task].hub) == []
    assert cached_records(TASKS[task].hub) is None
    _cache_like_the_library(tmp_path, TASKS[task].hub, records)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    assert cached_records(TASKS[task].hub) == records
    assert cached_split(HubSplit(PIQA.path, "other", PIQA.split)) == []


def test_a_damaged_cache_counts_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _cache_like_the_library(tmp_path, PIQA, [sample("piqa")])
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    file = cached_split(PIQA)[0]
    file.write_bytes(file.read_bytes()[:40])
    assert cached_records(PIQA) is None
