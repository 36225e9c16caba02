"""Requests: the settings of a run, and the parts of its specification that all benchmarks share.

In: a model and settings, as the command line or `evalkit.evaluate` gives them. Out: a `Request`, which each benchmark
subclasses; the specification entries that determine a run's numbers; the provenance in its manifest. Nothing here needs
torch, so a finished run is found at once.
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
from evalkit.data.sampling import DocumentSample, DocumentSelection, FirstDocuments
from evalkit.errors import UsageError
from evalkit.inputs import values
from evalkit.inputs.fields import LEAST, WORD, check_field_names, fitted
from evalkit.models.fingerprint import fingerprint
from evalkit.models.locate import Checkpoint, Say, resolve_dtype, silent
from evalkit.models.spec import ModelSpec, model_spec
from evalkit.reporting.escape import printable
from evalkit.resources import RUNS

SCORING_VERSION = 3
"""Increased with every change of evalkit that changes a score; part of every run's specification."""

_NUMERICS = ("lm-eval", "torch", "transformers", "tokenizers")
"""Libraries whose version can change a score."""


@dataclass(frozen=True)
class Request:
    """Settings of every run; a benchmark adds its own settings in a subclass."""

    model: ModelSpec
    output: Path = RUNS
    """Parent folder of the run folders."""
    token_budget: int | None = field(default=None, metadata={WORD: "auto"})
    """Maximum number of tokens in a batch; None: as many as fit into memory."""


@dataclass(frozen=True)
class DocumentRequest(Request):
    """Settings of every run that reads tasks of many documents."""

    limit: int | None = None
    """Maximum number of documents of each task, the first ones; None: all."""
    sample: int | None = None
    """Number of random documents of each task, stratified over its subjects; None: no sample."""
    seed: int = field(default=0, metadata={LEAST: 0})
    """Seed of the sample; with the same seed a larger sample contains the smaller one."""

    def __post_init__(self) -> None:
        if self.sample is not None and self.limit is not None:
            raise UsageError("--limit takes the first documents of each task, --sample random ones; give one of them")
        if self.sample is None and self.seed:
            raise UsageError(f"--seed {self.seed} is the seed of a --sample; give its size too, or omit the seed")

    @property
    def selection(self) -> DocumentSelection:
        """Which documents of each task are read."""
        return FirstDocuments(self.limit) if self.sample is None else DocumentSample(self.sample, self.seed)


RequestType = TypeVar("RequestType", bound=Request)


def request_of(kind: type[RequestType], model: str | Path | ModelSpec, options: Mapping[str, Any]) -> RequestType:
    """Build a request from keyword arguments; paths, numbers and lists may be strings.

    Args:
        kind: the request type.
        model: a checkpoint folder, a hub name, a GGUF file, or "demo"; or a `ModelSpec`.
        options: the other fields of the request type and, unless `model` is a `ModelSpec`, of `ModelSpec`; None: the
            default.

    Raises:
        UsageError: an option does not exist, or its value is invalid.
    """
    if isinstance(model, ModelSpec):
        check_field_names(options, kind)
        return kind(model, **fitted(kind, options))
    check_field_names(options, ModelSpec, kind)
    of_model = {name: value for name, value in options.items() if name in ModelSpec.__dataclass_fields__}
    spec = model_spec(model, **of_model)
    return kind(spec, **fitted(kind, {name: value for name, value in options.items() if name not in of_model}))


def provenance(model: ModelSpec, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the provenance in every manifest: model, date, command, hardware and versions."""
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
    """Return the absolute path of a local checkpoint; None if it is from the hub or in memory."""
    path = {"folder": checkpoint.folder, "gguf": checkpoint.gguf}.get(checkpoint.kind)
    return None if path is None else str(values.path("--model", path.resolve()))


def numerics(model: ModelSpec, checkpoint: Checkpoint, limit: int | None, say: Say = silent) -> dict[str, Any]:
    """Return the specification entries that determine the numbers of every run.

    Args:
        model: the model and how it is loaded.
        checkpoint: its checkpoint.
        limit: maximum number of documents of each task.
        say: called with messages for the user.
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
