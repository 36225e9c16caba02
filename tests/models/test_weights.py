"""Weights as read: the numbers of safetensors and torch, hashed, in this process's memory."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from evalkit.errors import CheckpointError
from evalkit.models.loading import fingerprint
from evalkit.models.loading import snapshot as weights
from evalkit.models.loading.files import safetensors_header
from evalkit.models.loading.snapshot import read_weights

Tensors = dict[str, torch.Tensor]
DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn,
    torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
)  # fmt: skip


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == tensor.dtype
        and one[name].shape == tensor.shape
        and torch.equal(one[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
        for name, tensor in other.items()
    )


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a tensor of random bits, except booleans, which have two values."""
    count = torch.Size(shape).numel() * dtype.itemsize
    draw = torch.Generator().manual_seed(seed)
    content = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), generator=draw).to(torch.uint8)
    return content.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


@settings(max_examples=60)
@given(
    parts=st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(DTYPES)), min_size=1, max_size=6)
)
def test_the_numbers_are_those_of_safetensors(
    tmp_path_factory: Any, parts: list[tuple[list[int], torch.dtype]]
) -> None:
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    written = {f"t{place}": random(tuple(shape), dtype, place) for place, (shape, dtype) in enumerate(parts)}
    save_file(written, path, metadata={"format": "pt"})
    found = read_weights([path])
    assert same(found.tensors, written)
    assert found.digests == [(path.name, hashlib.sha256(path.read_bytes()).hexdigest())]


def test_several_files(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.safetensors" for number in range(2)]
    for number, path in enumerate(paths):
        save_file({"both": torch.full((2,), float(number)), f"own{number}": torch.ones(number)}, path)
    found = read_weights(paths)
    assert same(found.tensors, load_file(paths[0]) | load_file(paths[1]))
    assert [name for name, _ in found.digests] == ["0.safetensors", "1.safetensors"]


def test_pickles(tmp_path: Path) -> None:
    """In torch's form of today, a zip archive, and in that of before 1.6."""
    written = {"one": torch.randn(3, 4), "two": torch.ones(2, dtype=torch.bfloat16)}
    for zipped in (True, False):
        path = tmp_path / "pytorch_model.bin"
        torch.save(written, path, _use_new_zipfile_serialization=zipped)
        found = read_weights([path])
        assert same(found.tensors, written)
        assert found.digests[0][1] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_what_a_pickle_may_not_hold(tmp_path: Path) -> None:
    torch.save([torch.ones(1)], tmp_path / "list.bin")
    with pytest.raises(CheckpointError, match=r"list\.bin: cannot be read"):
        read_weights([tmp_path / "list.bin"])
    (tmp_path / "no.bin").write_bytes(b"no pickle")
    with pytest.raises(CheckpointError, match=r"no\.bin: cannot be read"):
        read_weights([tmp_path / "no.bin"])


def test_what_happens_to_the_file_afterwards_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"one": torch.ones(100_000)}, path)
    found = read_weights([path]).tensors["one"]
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert found.eq(1).all()
    path.write_bytes(b"")  # the next access of a process that maps it would crash
    assert found.eq(1).all()


def test_a_file_that_becomes_shorter_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"one": torch.ones(100_000), "two": torch.ones(100_000)}, path)
    opened = weights.safe_open

    def shortened(*given: Any, **options: Any) -> Any:
        shard = opened(*given, **options)
        path.write_bytes(b"")
        return shard

    monkeypatch.setattr(weights, "safe_open", shortened)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*damaged"):
        read_weights([path])


def write_raw(path: Path, header: dict[str, Any], content: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content)
    return path


def entry(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "header",
    [
        {"a": entry(0, 8, [2]), "b": entry(4, 12, [2])},
        {"a": entry(4, 12, [2])},
        {"a": entry(0, 12, [2])},
        {"a": entry(0, 12, [3], "F5")},
        {"a": entry(0, 12, [3], 3)},  # type: ignore[arg-type]
        {"a": entry(-4, 12, [4])},
        {"a": entry(0, 12, [True, 3])},
        {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 4, 12]}},
        {"a": {"dtype": "F32", "shape": [3]}},
        {"a": []},
    ],
)
def test_headers_that_are_wrong(tmp_path: Path, header: dict[str, Any]) -> None:
    path = write_raw(tmp_path / "model.safetensors", header, bytes(12))
    for read in (lambda: read_weights([path]), lambda: safetensors_header(path)):
        with pytest.raises(CheckpointError, match=r"model\.safetensors: .*damaged") as caught:
            read()
        assert "\n" not in str(caught.value)


def test_a_known_digest_is_taken_by_content_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's times do not change here: a quick digest of the bytes read detects the change."""
    path = tmp_path / "model.safetensors"
    save_file({"one": torch.ones(100)}, path)
    digest = fingerprint.file_sha256(path)
    slow: list[str] = []
    sha256 = hashlib.sha256
    # With content, it is that of a key in the cache
    monkeypatch.setattr(fingerprint.hashlib, "sha256", lambda *of: sha256(*of) if of else slow.append("") or sha256())
    assert read_weights([path]).digests == [(path.name, digest)]
    assert slow == []
    save_file({"one": torch.full((100,), 2.0)}, path)
    assert read_weights([path]).digests == [(path.name, sha256(path.read_bytes()).hexdigest())]
    assert len(slow) == 1


def test_a_remembered_digest_of_other_content_is_corrected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file system shows no change, the next load does, and the next fingerprint is right."""
    path = tmp_path / "model.safetensors"
    save_file({"one": torch.ones(100)}, path)
    monkeypatch.setattr(fingerprint, "_state", lambda status: [1, 0, 0, 1])
    old = fingerprint.file_sha256(path)
    save_file({"one": torch.full((100,), 2.0)}, path)
    assert fingerprint.file_sha256(path) == old
    [(_, new)] = read_weights([path]).digests
    assert new == hashlib.sha256(path.read_bytes()).hexdigest() != old
    assert fingerprint.file_sha256(path) == new
