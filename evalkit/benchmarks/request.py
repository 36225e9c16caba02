"""What every run is asked, and what of it makes its specification.

In: a model and settings, as the command line or `evalkit.evaluate` gives them. Out: a `Request`, of which each
benchmark has its own kind; what determines the numbers of a run, and what its manifest tells beside that. Nothing here
needs torch, so a run that is already finished is found at once.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from evalkit import __version__
from evalkit.inputs import values
from evalkit.inputs.fields import WORD, check_field_names, fitted
from evalkit.models.fingerprint import fingerprint
from evalkit.models.locate import Checkpoint, Say, resolve_dtype, silent
from evalkit.models.spec import ModelSpec, model_spec
from evalkit.reporting.escape import printable
from evalkit.resources import RUNS

SCORING_VERSION = 3
"""Raised whenever a change of evalkit changes a score: part of every run's specification."""

_NUMERICS = ("lm-eval", "torch", "transformers", "tokenizers")
"""Libraries whose version can change a score."""


@dataclass(frozen=True)
class Request:
    """What every run is asked; a benchmark's own settings are fields of its own kind of request."""

    model: ModelSpec
    output: Path = RUNS
    """Folder of run folders."""
    token_budget: int | None = field(default=None, metadata={WORD: "auto"})
    """Most tokens of a batch; None: what fits."""


Asked = TypeVar("Asked", bound=Request)


def request_of(kind: type[Asked], model: str | Path | ModelSpec, options: Mapping[str, Any]) -> Asked:
    """A request from keyword arguments, with paths, numbers and lists in the forms people write them.

    Args:
        kind: of request.
        model: a checkpoint folder, a hub name, a GGUF file, or "demo"; or what says how it is loaded too.
        options: the other fields of this kind of request and, unless the model has them, of `ModelSpec`; None stands
            for the default.

    Raises:
        UsageError: an option that does not exist, or a value that it cannot have.
    """
    if isinstance(model, ModelSpec):
        check_field_names(options, kind)
        return kind(model, **fitted(kind, options))
    check_field_names(options, ModelSpec, kind)
    of_model = {name: value for name, value in options.items() if name in ModelSpec.__dataclass_fields__}
    spec = model_spec(model, **of_model)
    return kind(spec, **fitted(kind, {name: value for name, value in options.items() if name not in of_model}))


def circumstances(model: ModelSpec, checkpoint: Checkpoint) -> dict[str, Any]:
    """What every manifest tells beside the specification: by whom, when, where and with what it was made."""
    return {
        "model": model.named,
        "path": _path_of(checkpoint),
        "revision": checkpoint.revision,
        **({"live": True} if checkpoint.kind == "live" else {}),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(map(printable, sys.argv)),
        "hardware": {"machine": platform.machine(), "system": platform.platform()},
        "versions": {"evalkit": __version__}
        | {name: version(name) for name in (*_NUMERICS, "datasets", "numpy", "pandas", "pyarrow")}
        | {"python": platform.python_version()},
    }


def _path_of(checkpoint: Checkpoint) -> str | None:
    """Where a checkpoint of the user's own lies, from wherever it was named; None of one from the hub, or in memory."""
    path = {"folder": checkpoint.folder, "gguf": checkpoint.gguf}.get(checkpoint.kind)
    return None if path is None else str(values.path("--model", path.resolve()))


def numerics(model: ModelSpec, checkpoint: Checkpoint, limit: int | None, say: Say = silent) -> dict[str, Any]:
    """What determines the numbers of any run, whatever its tasks are.

    Args:
        limit: most documents of each task.
    """
    prints, extension = fingerprint(checkpoint), model.extension(checkpoint, say)
    return {
        "scoring": SCORING_VERSION,
        "versions": {name: version(name) for name in _NUMERICS},
        "checkpoint": {"weights": prints.weights, "config": prints.config, "tokenizer": prints.tokenizer},
        "dtype": resolve_dtype(checkpoint, model.dtype),
        "attention": model.attention,
        "context_extension": None if extension is None else extension.specification(),
        "limit": limit,
    }
