"""Complete and incomplete checkpoint folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from evalkit.models.loading.files import file_states, is_begun, why_incomplete
from tests.tiny import tiny_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "tiny", max_shard_size="100KB")


def test_every_file_that_is_missing_or_cut(folder: Path, tmp_path: Path) -> None:
    assert why_incomplete(folder, allow_pickle=False) == ""
    needed = ["config.json", "model.safetensors.index.json", *(path.name for path in folder.glob("*.safetensors"))]
    assert len(needed) > 4
    for name in needed:
        content = (folder / name).read_bytes()
        for size in (0, 7, len(content) // 2, len(content.rstrip()) - 1):
            (folder / name).write_bytes(content[:size])
            assert why_incomplete(folder, allow_pickle=False), (name, size)
        (folder / name).unlink()
        assert why_incomplete(folder, allow_pickle=False), name
        (folder / name).write_bytes(content)
    assert why_incomplete(folder, allow_pickle=False) == ""


@pytest.mark.parametrize("legacy", [False, True])
def test_pickled_weights(folder: Path, legacy: bool) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    path = folder / "pytorch_model.bin"
    torch.save({"a": torch.arange(1000)}, path, _use_new_zipfile_serialization=not legacy)
    assert "--allow-pickle" in why_incomplete(folder, allow_pickle=False)
    assert why_incomplete(folder, allow_pickle=True) == ""
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    if not legacy:  # the older format has no end
        assert "ends before its end" in why_incomplete(folder, allow_pickle=True)
    path.write_bytes(b"")
    assert "ends before its end" in why_incomplete(folder, allow_pickle=True)


def test_states_change_with_the_files_that_are_evaluated(folder: Path, tmp_path: Path) -> None:
    before = file_states(folder)
    assert is_begun(before)
    (folder / "optimizer.pt").write_bytes(b"x")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 5}))
    (folder / "rng_state_0.pth").write_bytes(b"x")
    assert file_states(folder) == before
    (folder / "tokenizer.json").write_text("{}")
    assert file_states(folder) != before
    shutil.rmtree(folder)
    assert file_states(folder) == ()
    assert not is_begun(())
