"""An exported folder gives the same numbers in a process without evalkit, and in evalkit without the folder's code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from evalkit.errors import CheckpointError, UsageError
from evalkit.models.loading.locate import locate
from evalkit.models.zoo.convert import export
from evalkit.models.zoo.named import write_random
from tests.models.loading import load_folder
from tests.models.small import small
from tests.tiny import tiny_checkpoint, tiny_tokenizer

STRANGER = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "evalkit":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse())
try:
    import evalkit
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("evalkit is there")
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    model.save_pretrained(folder + "-again")  # transformers writes the names of the code anew
    again = AutoModelForCausalLM.from_pretrained(folder + "-again", trust_remote_code=True).eval()
    assert AutoTokenizer.from_pretrained(folder, trust_remote_code=True)("the river")["input_ids"]
    with torch.no_grad():
        logits, of_again = (each(torch.arange(2, 60)[None]).logits for each in (model, again))
    save_file({"logits": logits, "again": of_again}, folder + "/logits")
"""


@pytest.fixture
def words(tmp_path: Path) -> str:
    return str(tiny_tokenizer(tmp_path / "words"))


def test_a_process_without_evalkit_gives_the_same_logits(tmp_path: Path, words: str) -> None:
    folders = []
    for attention, backbone in (("integral", "gpt_neox"), ("differential", "qwen2"), ("cog", "llama")):
        own, folder = tmp_path / f"own-{backbone}", tmp_path / backbone
        write_random(small(tmp_path, attention, backbone), own, seed=0, tokenizer=words)
        export(locate(str(own)), folder)
        folders.append((own, folder))
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    # Isolated (-I): neither this folder nor the user's packages are on the path
    done = subprocess.run(
        [sys.executable, "-I", "-c", STRANGER, *(str(folder) for _, folder in folders)],
        env=clean | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    ids = torch.arange(2, 60)[None]
    for own, folder in folders:
        expected = load_folder(own).model(ids).logits
        found = load_file(folder / "logits")
        assert torch.equal(found["logits"], expected)
        assert torch.equal(found["again"], expected)
        # And evalkit, which trusts no code by default
        loaded = load_folder(folder)
        assert type(loaded.model).__module__ == "evalkit.models.variants.modeling"
        assert torch.equal(loaded.model(ids).logits, expected)


def test_everything_else_stays(tmp_path: Path, words: str) -> None:
    write_random(small(tmp_path, "integral"), tmp_path / "own", seed=0, tokenizer=words)
    export(locate(str(tmp_path / "own")), tmp_path / "out")
    for path in (tmp_path / "own").iterdir():
        if path.name != "config.json":
            assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("own", "out"))
    assert after.pop("auto_map").keys() == {"AutoConfig", "AutoModelForCausalLM"}
    assert after == before


def test_runs_that_are_not_exportable(tmp_path: Path, words: str) -> None:
    with pytest.raises(CheckpointError, match="model type 'llama' is none of evalkit's"):
        export(locate(str(tiny_checkpoint(tmp_path / "llama"))), tmp_path / "out")
    own = tmp_path / "own"
    write_random(small(tmp_path, "integral"), own, seed=0, tokenizer=words)
    with pytest.raises(UsageError, match="already exists; choose another folder"):
        export(locate(str(own)), own)
    lacking, config = tmp_path / "lacking", json.loads((own / "config.json").read_text())
    shutil.copytree(own, lacking)
    (lacking / "config.json").write_text(json.dumps({key: config[key] for key in config if key != "signal_rope"}))
    with pytest.raises(CheckpointError, match="lacks 'signal_rope'"):
        export(locate(str(lacking)), tmp_path / "out")
    torch.save(load_file(own / "model.safetensors"), own / "pytorch_model.bin")
    (own / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="--allow-pickle"):
        export(locate(str(own)), tmp_path / "out")
    export(locate(str(own), allow_pickle=True), tmp_path / "out")
    assert (tmp_path / "out" / "pytorch_model.bin").is_file()


def test_shards(tmp_path: Path, words: str) -> None:
    own = tmp_path / "own"
    write_random(small(tmp_path, "integral"), own, seed=0, tokenizer=words)
    stored = load_file(own / "model.safetensors")
    names = sorted(stored)
    parts = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for name, inside in parts.items():
        save_file({key: stored[key] for key in inside}, own / name, metadata={"format": "pt"})
    weight_map = {key: name for name, inside in parts.items() for key in inside}
    (own / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (own / "model.safetensors").unlink()
    export(locate(str(own)), tmp_path / "out")
    ids = torch.arange(9)[None]
    assert torch.equal(load_folder(tmp_path / "out").model(ids).logits, load_folder(own).model(ids).logits)
