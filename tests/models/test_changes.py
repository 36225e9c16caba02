"""Files that change while they are read; every file that loading opens is in the fingerprint (others: tests/guards)."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import evalkit
from evalkit.display import Progress
from evalkit.errors import CheckpointError
from evalkit.models.loading import build
from evalkit.models.loading import fingerprint as hashing
from evalkit.models.loading import load as loading
from evalkit.models.loading.build import read_weights
from evalkit.models.loading.fingerprint import file_sha256, fingerprint
from evalkit.models.loading.locate import Checkpoint, locate
from evalkit.models.zoo.convert import convert, export
from tests.models.test_gguf import write_gguf
from tests.models.variants.building import DIFFERENTIAL, model_of
from tests.tiny import VOCABULARY, tiny_checkpoint, tiny_tokenizer


@pytest.fixture(scope="module")
def gguf_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two of the same shapes, and other weights."""
    folder = tmp_path_factory.mktemp("gguf")
    sources = [tiny_checkpoint(folder / str(seed), seed=seed, window=192) for seed in (0, 1)]
    return [write_gguf(source, folder / f"{source.name}.gguf") for source in sources]


def test_a_gguf_file_or_its_dequantised_copy_that_changes(
    gguf_files: list[Path], documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    """A changed file is not scored under the old hash; a modified copy is created again."""

    def scored(model: Path, runs: str) -> Any:
        options = {"data_dir": documents, "tasks": "boolq", "limit": 1, "allow_unofficial_data": True}
        run = evalkit.evaluate(str(model), output=tmp_path / runs, progress=Progress(live=False), **options)
        return run.scores.fillna(0.0).to_dict("list")

    load = loading.load

    def replacing(target: Path, source: Path) -> Callable[..., Any]:
        def changed(*given: Any, **options: Any) -> Any:
            shutil.copyfile(source, target)
            return load(*given, **options)

        return changed

    model = Path(shutil.copy(gguf_files[0], tmp_path / "tiny.gguf"))
    expected = scored(model, "before")
    [copy] = (cache / "gguf").glob("*/model.safetensors")
    assert scored(gguf_files[1], "other") != expected
    [other] = set((cache / "gguf").glob("*/model.safetensors")) - {copy}
    with monkeypatch.context() as once:
        once.setattr(loading, "load", replacing(copy, other))
        assert scored(model, "copy") == expected
    monkeypatch.setattr(loading, "load", replacing(model, gguf_files[1]))
    with pytest.raises(CheckpointError, match="changed since this run was started"):
        scored(model, "refused")
    assert not list((tmp_path / "refused").glob("*"))


# The files that loading opens are those in the fingerprint

LEFT_OUT = {"generation_config.json", "model.safetensors.index.json"}
"""What bears on generated texts alone, which runs that generate name themselves; and names of files that are hashed."""
BESIDE = ("additional_chat_templates/tools.jinja", "chat_template.jinja", "chat_template.json", "modeling_own.py",
          "custom_generate/generate.py", "special_tokens_map.json", "added_tokens.json", "processor_config.json",
          "README.md", "trainer_state.json", "optimizer.pt", "pytorch_model.bin", "tokenizer.model.v3")  # fmt: skip

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
    for name in BESIDE:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}" if name.endswith("json") else "raise SystemExit")
    return folder


def opened_in(folder: Path, checkpoint: Checkpoint) -> set[str]:
    """Files of a folder that loading opens."""
    _watched.append((os.path.realpath(folder), set()))
    try:
        assert loading.load(checkpoint, device="cpu").fingerprint == fingerprint(checkpoint)
    finally:
        _, names = _watched.pop()
    return names


def counted(checkpoint: Checkpoint, folder: Path) -> set[str]:
    """Files of a folder without which, or with another end of which, the fingerprint is another one."""
    before, names = fingerprint(checkpoint), set()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        path.write_bytes(content + b" x")
        try:
            same = fingerprint(checkpoint) == before
        except CheckpointError:
            same = False  # no JSON any more
        path.write_bytes(content)
        names |= set() if same else {path.relative_to(folder).as_posix()}
    return names


def test_every_file_that_loading_opens_counts(full: Path, tmp_path: Path) -> None:
    opened = opened_in(full, locate(str(full)))
    assert opened - LEFT_OUT == counted(locate(str(full)), full) - LEFT_OUT
    assert opened >= {"config.json", "tokenizer.json", "chat_template.jinja", "additional_chat_templates/tools.jinja"}
    assert len([name for name in opened if name.endswith(".safetensors")]) == 6
    other = tiny_tokenizer(tmp_path / "other")
    shutil.copy(full / "config.json", other)
    checkpoint = locate(str(full), tokenizer=str(other))
    assert opened_in(other, checkpoint) == counted(checkpoint, other)
    assert not opened_in(full, checkpoint) & {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


def test_neither_export_nor_convert_writes_parts_of_two_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

    own, foreign = tiny_tokenizer(tmp_path / "own"), tiny_tokenizer(tmp_path / "foreign")
    model_of("llama", DIFFERENTIAL, vocab_size=VOCABULARY).save_pretrained(own)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = DiffLlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=4, **sizes)
    DiffLlamaForCausalLM(config).save_pretrained(foreign)

    def edited(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:-1] + b" ")

    copying, reading = shutil.copyfile, read_weights
    with monkeypatch.context() as once:
        change = {"tokenizer.json": lambda: edited(own / "model.safetensors")}
        once.setattr(shutil, "copyfile", lambda *paths: change.pop(paths[0].name, int)() or copying(*paths))
        with pytest.raises(CheckpointError, match="changed while it was read"):
            export(locate(str(own)), tmp_path / "out")
    monkeypatch.setattr(build, "read_weights", lambda *given: edited(foreign / "tokenizer.json") or reading(*given))
    with pytest.raises(CheckpointError, match="changed while it was read"):
        convert(locate(str(foreign)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Weights as read

Tensors = dict[str, torch.Tensor]
DTYPES = (torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)


def same(tensors: Tensors, others: Tensors) -> bool:
    return tensors.keys() == others.keys() and all(
        tensors[name].dtype == tensor.dtype
        and tensors[name].shape == tensor.shape
        and torch.equal(tensors[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
        for name, tensor in others.items()
    )


def random(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a tensor of random bits, except booleans, which have two values."""
    count = torch.Size(shape).numel() * dtype.itemsize
    draw = torch.Generator().manual_seed(seed)
    content = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), generator=draw).to(torch.uint8)
    return content.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


@settings(max_examples=25)
@given(
    parts=st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(DTYPES)), min_size=1, max_size=6)
)
def test_the_numbers_are_those_of_safetensors(
    tmp_path_factory: Any, parts: list[tuple[list[int], torch.dtype]]
) -> None:
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    written = {f"t{number}": random(shape, dtype, number) for number, (shape, dtype) in enumerate(parts)}
    save_file(written, path, metadata={"format": "pt"})
    weights = read_weights([path])
    assert same(weights.tensors, written)
    assert weights.digests == [(path.name, hashlib.sha256(path.read_bytes()).hexdigest())]


def test_several_files_and_pickles(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.safetensors" for number in range(2)]
    for number, path in enumerate(paths):
        save_file({"both": torch.full((2,), float(number)), f"own{number}": torch.ones(2)}, path)
    assert same(read_weights(paths).tensors, load_file(paths[0]) | load_file(paths[1]))
    written = {"one": torch.randn(3, 4), "two": torch.ones(2, dtype=torch.bfloat16)}
    path = tmp_path / "pytorch_model.bin"
    for zipped in (True, False):  # torch's form of today, a ZIP archive, and that of before 1.6
        torch.save(written, path, _use_new_zipfile_serialization=zipped)
        weights = read_weights([path])
        assert same(weights.tensors, written)
        assert weights.digests[0][1] == hashlib.sha256(path.read_bytes()).hexdigest()
    path.write_bytes(b"no pickle")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        read_weights([path])


def test_a_file_that_becomes_shorter_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"one": torch.ones(100_000), "two": torch.ones(100_000)}, path)
    opened = build.safe_open

    def shortened(*given: Any, **options: Any) -> Any:
        shard = opened(*given, **options)
        path.write_bytes(b"")
        return shard

    monkeypatch.setattr(build, "safe_open", shortened)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*damaged"):
        read_weights([path])


def test_a_remembered_digest_of_other_content_is_corrected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file system shows no change, the next load does, and the next fingerprint is right."""
    path = tmp_path / "model.safetensors"
    save_file({"one": torch.ones(100)}, path)
    monkeypatch.setattr(hashing, "state_of", lambda _: [1, 0, 0, 1])
    old = file_sha256(path)
    assert read_weights([path]).digests == [(path.name, old)]
    save_file({"one": torch.full((100,), 2.0)}, path)
    assert file_sha256(path) == old
    [(_, new)] = read_weights([path]).digests
    assert new == hashlib.sha256(path.read_bytes()).hexdigest() != old
    assert file_sha256(path) == new
