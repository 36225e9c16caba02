"""What every run is asked, and what of it makes its specification.

In: a `Request`, as the command line or `evalkit.evaluate` makes it. Out: its checkpoint, what determines its numbers,
and what a manifest tells beside that. Nothing here needs torch, so a run that is already finished is found at once.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from evalkit import __version__
from evalkit.errors import UnknownNameError
from evalkit.inputs import values
from evalkit.models.context import Extension
from evalkit.models.context_settings import UNSTRETCHED, context_settings, extension_of
from evalkit.models.fingerprint import fingerprint
from evalkit.models.locate import Checkpoint, Say, locate, resolve_dtype, silent
from evalkit.reporting.escape import printable
from evalkit.runs.place import check_device

SCORING_VERSION = 3
"""Raised whenever a change of evalkit changes a score: part of every run's specification."""

_WHOLE = {"limit": 1, "num_fewshot": 0, "token_budget": 1, "context": 1, "context_original": 1}
"""Fields of a request that are whole numbers, and the least that each can be."""
_WORDS: dict[str, tuple[str, str | None]] = {"token_budget": ("auto", None), "context": (UNSTRETCHED, UNSTRETCHED)}
"""Of these, fields that may be a word instead, and what it means."""
_SWITCHES = ("allow_pickle", "trust_remote_code", "allow_unofficial_data", "log_samples")
_PATHS = ("data_dir", "include_path", "output")
_NAMES_OR_PATHS = ("model", "tokenizer", "template", "context_config")

_NUMERICS = ("lm-eval", "torch", "transformers", "tokenizers")
"""Libraries whose version can change a score."""


@dataclass(frozen=True)
class Request:
    """What a user can ask of an evaluation."""

    model: str
    """A checkpoint folder, a hub name, a GGUF file, or "demo"."""
    suite: str | None = None
    """A suite's name, or "lm_eval" for lm-eval's own tasks; None: zeroshot8 if it has all `tasks`, else lm_eval."""
    tasks: tuple[str, ...] = ()
    """Only these tasks of the suite, all where empty; of lm_eval its tasks, groups or tags."""
    include_path: Path | None = None
    """Folder of the user's own lm-eval task files, which may run Python code that lies beside them."""
    template: str | None = None
    """A template's name, or the path of a YAML file of the same form; None: inst, or plain for lm-eval's tasks."""
    rule: str | None = None
    """The rule of the result; None: `ppl` where the template scores whole sequences, else `acc`."""
    limit: int | None = None
    """Most documents of each task; None for all."""
    num_fewshot: int | None = None
    """How many solved examples stand before each question; None: none, or what an lm-eval task says itself."""
    data_dir: Path | None = None
    """Folder of `<task>.jsonl` files that comes before the hub."""
    output: Path = field(default_factory=lambda: Path("results/runs"))
    """Folder of run folders."""
    device: str = "auto"
    dtype: str = "auto"
    attention: str = "auto"
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    tokenizer: str | None = None
    """Another folder or hub name to take the tokenizer from."""
    context: int | Literal["none"] | None = None
    """Tokens that the model is to take at once, by stretching its context; "none": as many as it was trained on; None:
    the same, but for LongBench the paper's 8,192 where it was trained on fewer."""
    context_method: str | None = None
    """How: "yarn" (None), "dynamic-yarn", "linear", "ntk" or "none"."""
    context_original: int | None = None
    """Tokens of the window that it was trained on; None: what the checkpoint says."""
    context_config: str | None = None
    """All of this and more in a YAML file, or the name of one in `configs/context`."""
    token_budget: int | None = None
    """Most tokens in a batch; None: what fits."""
    allow_pickle: bool = False
    trust_remote_code: bool = False
    allow_unofficial_data: bool = False
    log_samples: bool = False
    """Also write lm-eval's per-document sample files."""


def circumstances(request: Request, checkpoint: Checkpoint) -> dict[str, Any]:
    """What every manifest tells beside the specification: by whom, when, where and with what it was made."""
    return {
        "model": named_model(request),
        "path": _path_of(checkpoint),
        "revision": checkpoint.revision,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(map(printable, sys.argv)),
        "hardware": {"machine": platform.machine(), "system": platform.platform()},
        "versions": {"evalkit": __version__}
        | {name: version(name) for name in (*_NUMERICS, "datasets", "numpy", "pandas", "pyarrow")}
        | {"python": platform.python_version()},
    }


def _path_of(checkpoint: Checkpoint) -> str | None:
    """Where a checkpoint of the user's own lies, from wherever it was named; None of one from the hub."""
    path = {"folder": checkpoint.folder, "gguf": checkpoint.gguf}.get(checkpoint.kind)
    return None if path is None else str(values.path("--model", path.resolve()))


def request_of(model: str | Path, options: dict[str, Any]) -> Request:
    """A request from keyword arguments, with paths, numbers and lists in the forms people write them.

    Raises:
        UsageError: an option that does not exist, or a value that is no number where one belongs.
    """
    known = Request.__dataclass_fields__
    for name in options:
        if name not in known:
            raise UnknownNameError("option", name, known)
    tidy = {name: checked(name, value) for name, value in options.items() if value is not None}
    if "device" in tidy:
        check_device(tidy["device"])
    return Request(model=checked("model", model), **tidy)


def checked(name: str, value: Any) -> Any:
    """A field's value in the form that the field has. Raises `UsageError` where it does not fit."""
    flag = f"--{name.replace('_', '-')}"
    if name in _WHOLE:
        word, meaning = _WORDS.get(name, ("", None))
        if word and value == word:
            return meaning
        return values.whole(flag, value, _WHOLE[name], word and f", or {word}")
    if name in _SWITCHES:
        return values.switch(flag, value)
    if name == "tasks":
        return values.names(flag, value)
    if name in _PATHS:
        return values.path(flag, value)
    return values.text(flag, str(value) if name in _NAMES_OR_PATHS and isinstance(value, Path) else value)


def named_model(request: Request) -> str:
    """The checkpoint as a request names it, with the revision that is asked for."""
    return f"{request.model}@{request.revision}" if request.revision else request.model


def locate_checkpoint(request: Request, say: Say) -> Checkpoint:
    """Find the checkpoint that a request names."""
    return locate(
        named_model(request),
        tokenizer=request.tokenizer,
        allow_pickle=request.allow_pickle,
        trust_remote_code=request.trust_remote_code,
        say=say,
    )


def context_extension(request: Request, checkpoint: Checkpoint, say: Say = silent) -> Extension | None:
    """How a request has its checkpoint's context stretched, if it has.

    Raises:
        UsageError, CheckpointError: it cannot be.
    """
    settings = context_settings(
        request.context, request.context_method, request.context_original, request.context_config
    )
    return extension_of(checkpoint, settings, say)


def numerics(request: Request, checkpoint: Checkpoint, say: Say = silent) -> dict[str, Any]:
    """What determines the numbers of any run, whatever its tasks are."""
    prints, extension = fingerprint(checkpoint), context_extension(request, checkpoint, say)
    return {
        "scoring": SCORING_VERSION,
        "versions": {name: version(name) for name in _NUMERICS},
        "checkpoint": {"weights": prints.weights, "config": prints.config, "tokenizer": prints.tokenizer},
        "dtype": resolve_dtype(checkpoint, request.dtype),
        "attention": request.attention,
        "context_extension": None if extension is None else extension.specification(),
        "limit": request.limit,
    }
