"""The files read from a checkpoint's folder are those in its fingerprint, each read once."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from evalkit.errors import CheckpointError
from evalkit.models.loading import load as loading
from evalkit.models.loading import snapshot as snapshots
from evalkit.models.loading.fingerprint import fingerprint
from evalkit.models.loading.locate import Checkpoint, locate
from evalkit.models.loading.snapshot import snapshot
from evalkit.models.zoo.convert import convert, export
from tests.models.loading import load_folder
from tests.models.variants.building import DIFFERENTIAL, model_of
from tests.tiny import VOCABULARY, tiny_checkpoint, tiny_tokenizer

LEFT_OUT = {"generation_config.json", "model.safetensors.index.json"}
"""What bears on generated texts alone, which runs that generate name themselves; and names of files that are hashed."""
BESIDE = {
    "additional_chat_templates/tools.jinja": "{{ messages }}",
    "chat_template.jinja": "{{ messages }}",
    "chat_template.json": "{}",
    "custom_generate/generate.py": "raise SystemExit",
    "modeling_own.py": "raise SystemExit",
    "special_tokens_map.json": "{}",
    "added_tokens.json": "{}",
    "processor_config.json": "{}",
    "preprocessor_config.json": "{}",
    "README.md": "",
    "trainer_state.json": "{}",
    "optimizer.pt": "",
    "pytorch_model.bin": "",
    "tokenizer.model.v3": "",
}
"""What folders of checkpoints hold beside weights, config and tokenizer."""

_watched: list[tuple[str, set[str]]] = []


def _note(event: str, details: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(details[0], (str, os.PathLike)):
        for folder, names in _watched:
            path = os.path.realpath(os.fspath(details[0]))
            if path.startswith(folder + os.sep):
                names.add(os.path.relpath(path, folder))


sys.addaudithook(_note)


@pytest.fixture
def full(tmp_path: Path) -> Path:
    folder = tiny_checkpoint(tmp_path / "full", max_shard_size="100KB")
    for name, content in BESIDE.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    return folder


def opened_in(folder: Path, checkpoint: Checkpoint) -> set[str]:
    """Files of a folder that loading opens."""
    _watched.append((os.path.realpath(folder), set()))
    try:
        loading.load(checkpoint, device="cpu")
    finally:
        _, names = _watched.pop()
    return names


def counted(checkpoint: Checkpoint, folder: Path) -> set[str]:
    """Files of a folder without which, or with another end of which, the fingerprint is another one."""
    before, found = fingerprint(checkpoint), set()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        path.write_bytes(content + b" x")
        try:
            same = fingerprint(checkpoint) == before
        except CheckpointError:
            same = False  # no JSON any more
        path.write_bytes(content)
        found |= set() if same else {path.relative_to(folder).as_posix()}
    return found


def test_every_file_that_loading_opens_counts(full: Path) -> None:
    opened = opened_in(full, locate(str(full)))
    assert opened - LEFT_OUT == counted(locate(str(full)), full) - {"model.safetensors.index.json"}
    assert opened >= {"config.json", "tokenizer.json", "chat_template.jinja", "additional_chat_templates/tools.jinja"}
    assert len([name for name in opened if name.endswith(".safetensors")]) == 6


def test_every_file_of_another_tokenizer_counts(full: Path, tmp_path: Path) -> None:
    other = tiny_tokenizer(tmp_path / "other")
    shutil.copy(full / "config.json", other)
    (other / "README.md").write_text("")
    checkpoint = locate(str(full), tokenizer=str(other))
    assert opened_in(other, checkpoint) == counted(checkpoint, other)
    assert not opened_in(full, checkpoint) & {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


def test_nothing_is_read_once_the_model_is_built(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every case the folder is removed."""
    expected = load_folder(full)
    model = loading._built

    def moving(*given: Any) -> Any:
        full.rename(full.with_name("gone"))
        return model(*given)

    monkeypatch.setattr(loading, "_built", moving)
    found = load_folder(full)
    ids = torch.arange(9)[None]
    assert torch.equal(found.model(ids).logits, expected.model(ids).logits)
    assert found.tokenizer("The river rose.") == expected.tokenizer("The river rose.")
    assert found.fingerprint == expected.fingerprint


def test_the_fingerprint_of_what_is_loaded_is_that_of_the_files(full: Path, tmp_path: Path) -> None:
    assert load_folder(full).fingerprint == fingerprint(locate(str(full)))
    other = tiny_tokenizer(tmp_path / "other")
    checkpoint = locate(str(full), tokenizer=str(other))
    assert loading.load(checkpoint, device="cpu").fingerprint == fingerprint(checkpoint)


def test_a_file_that_changes_meanwhile_is_named(full: Path) -> None:
    with snapshot(locate(str(full))) as copies:
        (full / "tokenizer.json").write_text("{}")
        with pytest.raises(CheckpointError, match=r"full: tokenizer\.json changed while it was read; run the command"):
            copies.read()
        assert (copies.checkpoint.folder / "tokenizer.json").stat().st_size > 1000


def test_weights_that_are_read_by_another_thread(full: Path) -> None:
    """The same tensors and digests, and the same errors."""
    with snapshot(locate(str(full))) as first, snapshot(locate(str(full))) as second:
        second.start()
        one, two = first.read(), second.read()
    assert one.fingerprint == two.fingerprint == fingerprint(locate(str(full)))
    assert one.weights.tensors.keys() == two.weights.tensors.keys()
    assert all(torch.equal(tensor, two.weights.tensors[name]) for name, tensor in one.weights.tensors.items())
    weights = locate(str(full)).weights()[-1]
    with snapshot(locate(str(full))) as copies:
        weights.write_bytes(weights.read_bytes()[:-5])
        copies.start()
        with pytest.raises(CheckpointError, match=rf"{weights.name}: .*damaged"):
            copies.read()


def test_reading_stops_when_a_checkpoint_is_rejected(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, ended = snapshots.read_weights, []

    def slowly(paths: Any, stop: Event, _: Any) -> Any:
        assert stop.wait(60)
        try:
            return real(paths, stop)
        except CheckpointError:
            ended.append(True)
            raise

    monkeypatch.setattr(snapshots, "read_weights", slowly)
    with pytest.raises(CheckpointError, match="rejected"), snapshot(locate(str(full))) as copies:
        copies.start()
        raise CheckpointError("rejected")
    assert ended


def test_a_file_that_vanishes_meanwhile_is_named(full: Path) -> None:
    with snapshot(locate(str(full))) as copies:
        (full / "config.json").unlink()
        with pytest.raises(CheckpointError, match=r"full/config\.json: cannot be read"):
            copies.read()


def test_no_place_for_copies(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(full / "README.md"))
    with pytest.raises(
        CheckpointError, match=r"no temporary folder can be created in .* \(Not a directory\); set TMPDIR"
    ):
        load_folder(full)


class TestConverted:
    """Neither command writes a folder of parts that were not one checkpoint."""

    @pytest.fixture
    def differential(self, tmp_path: Path) -> Path:
        folder = tiny_tokenizer(tmp_path / "differential")
        model_of("llama", DIFFERENTIAL, vocab_size=VOCABULARY).save_pretrained(folder)
        return folder

    def test_export(self, differential: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        copying = shutil.copyfile

        def changing(source: Path, target: Path) -> Any:
            if source.name == "tokenizer.json":
                (differential / "model.safetensors").touch()
            return copying(source, target)

        monkeypatch.setattr(shutil, "copyfile", changing)
        with pytest.raises(CheckpointError, match=r"model\.safetensors changed while it was read"):
            export(locate(str(differential)), tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_convert(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

        folder = tiny_tokenizer(tmp_path / "diffllama")
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
        DiffLlamaForCausalLM(DiffLlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=4, **sizes)).save_pretrained(
            folder
        )
        with monkeypatch.context() as patched:
            patched.setattr("evalkit.models.loading.snapshot.read_weights", _touching(folder / "config.json"))
            with pytest.raises(CheckpointError, match=r"config\.json changed while it was read"):
                convert(locate(str(folder)), tmp_path / "out")
        assert not (tmp_path / "out").exists()
        convert(locate(str(folder)), tmp_path / "out")
        assert load_folder(tmp_path / "out").architecture == "EvalkitLlamaForCausalLM"


def _touching(path: Path) -> Any:
    read_weights = snapshots.read_weights

    def read(paths: Any) -> Any:
        path.touch()
        return read_weights(paths)

    return read
