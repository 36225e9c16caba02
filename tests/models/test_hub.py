"""The hub, without one: which files are needed, and the message for each of its errors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from evalkit.errors import CheckpointError
from evalkit.models.loading import locate as hub
from evalkit.models.loading.locate import silent

LISTING = [
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "modeling_own.py",
    "onnx/model.onnx",
    "original/consolidated.safetensors",
    "pytorch_model.bin",
    "tokenizer.json",
    "tokenizer.model",
    "merges.txt",
    "chat_template.jinja",
    "additional_chat_templates/tools.jinja",
    "additional_chat_templates/notes/other.jinja",
    "onnx/tokenizer.model",
]
NEEDED = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "merges.txt",
    "chat_template.jinja",
    "additional_chat_templates/tools.jinja",
}


def test_only_needed_files_are_fetched() -> None:
    plain = set(hub.needed_files(LISTING, pickles=False, code=False, weights=True))
    assert plain == NEEDED | {"model.safetensors"}


def test_pickles_come_only_if_allowed_and_there_is_nothing_better() -> None:
    without = [name for name in LISTING if name != "model.safetensors"]
    assert set(hub.needed_files(LISTING, pickles=True, code=False, weights=True)) == NEEDED | {"model.safetensors"}
    assert set(hub.needed_files(without, pickles=True, code=False, weights=True)) == NEEDED | {"pytorch_model.bin"}
    assert set(hub.needed_files(without, pickles=False, code=False, weights=True)) == NEEDED


def test_code_comes_only_if_trusted() -> None:
    assert "modeling_own.py" in hub.needed_files(LISTING, pickles=False, code=True, weights=True)


def test_tokenizer_alone_brings_no_weights() -> None:
    assert set(hub.needed_files(LISTING, pickles=True, code=True, weights=False)) == NEEDED - {"generation_config.json"}


def answer_with(monkeypatch: pytest.MonkeyPatch, outcome: object, local: Path | None = None) -> list[dict[str, Any]]:
    """Mock the hub with an error or a listing, and a cache with `local`; return the downloads."""
    downloads: list[dict[str, Any]] = []

    def model_info(self: object, name: str, *, revision: str | None, timeout: float) -> object:
        assert timeout <= 3
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def snapshot_download(name: str, **options: Any) -> str:
        downloads.append({"name": name, **options})
        if local is None:
            raise errors.LocalEntryNotFoundError("not in the cache")
        return str(local)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return downloads


def refusal(kind: type[errors.HfHubHTTPError]) -> Exception:
    error = kind.__new__(kind)  # its constructor's signature differs between versions of the hub's client
    Exception.__init__(error, "refused")
    return error


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (refusal(errors.RepositoryNotFoundError), r"not found, neither as a folder nor on the hub"),
        (refusal(errors.RevisionNotFoundError), r"revision 'step7' not found on the hub"),
        (refusal(errors.GatedRepoError), r"gated on the hub; accept its terms"),
        (TimeoutError("slow"), r"as a hub model: it cannot be reached \(TimeoutError\)"),
        (errors.OfflineModeIsEnabled("off"), r"HF_HUB_OFFLINE is set and the model is not in its cache"),
        (SimpleNamespace(siblings=[], sha="1"), r"has no config\.json"),
    ],
)
def test_refusals(monkeypatch: pytest.MonkeyPatch, outcome: object, words: str) -> None:
    answer_with(monkeypatch, outcome)
    with pytest.raises(CheckpointError, match=words) as caught:
        hub.fetch("org/name@step7", pickles=False, code=False, say=silent)
    assert "\n" not in str(caught.value)


def test_cache_serves_when_the_hub_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    downloads = answer_with(monkeypatch, ConnectionError("no route"), local=tmp_path / "0a1b")
    found = hub.fetch("org/name@step7", pickles=False, code=False, say=silent)
    assert found == (tmp_path / "0a1b", "0a1b")
    assert downloads == [{"name": "org/name", "revision": "step7", "local_files_only": True}]


def test_download_is_of_the_commit_that_was_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    listing = [SimpleNamespace(rfilename=name) for name in LISTING]
    downloads = answer_with(monkeypatch, SimpleNamespace(siblings=listing, sha="0a1b"), local=tmp_path)
    said: list[str] = []
    assert hub.fetch("org/name", pickles=False, code=False, say=said.append) == (tmp_path, "0a1b")
    assert downloads[0]["revision"] == "0a1b"
    assert set(downloads[0]["allow_patterns"]) == NEEDED | {"model.safetensors"}
    assert len(said) == 1
