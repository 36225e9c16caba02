"""Requests: the settings of a run, and the parts of its specification that all benchmarks share.

In: a model and settings, as the command line or `evalkit.evaluate` gives them. Out: a `Request`, which each benchmark
subclasses; the specification entries that determine a run's numbers; the provenance in its manifest. Nothing here needs
torch, so a finished run is found at once.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from evalkit import __version__
from evalkit.cache import remembered
from evalkit.data import Library
from evalkit.data.sampling import DocumentSample, DocumentSelection, FirstDocuments
from evalkit.display import Say
from evalkit.errors import UsageError
from evalkit.escape import printable
from evalkit.inputs import values
from evalkit.inputs.settings import check_names, fitted, setting, settings_of
from evalkit.models.loading.fingerprint import fingerprint
from evalkit.models.loading.locate import Checkpoint, resolve_dtype, silent
from evalkit.models.loading.spec import ModelSpec, model_spec
from evalkit.paths import RUNS
from evalkit.runs.folder import specification_id

SCORING_VERSION = 5
"""Increased with every change of evalkit that changes a score; part of every run's specification."""

_NUMERICS = ("lm-eval", "torch", "transformers", "tokenizers")
"""Libraries whose version can change a score."""


@dataclass(frozen=True)
class Request:
    """Settings of every run; a benchmark adds its own settings in a subclass."""

    model: ModelSpec
    output: Path = setting(RUNS, "Folder of run folders.", short="-o")
    name: str | None = setting(
        None,
        "Name of the checkpoint in its run and in tables.",
        "that of its folder, or on the hub",
        has_variable=False,
    )
    token_budget: int | None = setting(
        None, "Maximum tokens of a batch, limited by memory.", "auto", metavar="TOKENS|auto", word="auto"
    )

    default_texts: ClassVar[Mapping[str, str]] = {}
    """Setting of the model → its printed default, if it is another one for this benchmark."""


@dataclass(frozen=True)
class DocumentRequest(Request):
    """Settings of every run that reads tasks of many documents."""

    sample: int | None = setting(
        None,
        "Random documents of each task, the same for every checkpoint; a larger sample contains the smaller one.",
        "all",
        metavar="N",
    )
    seed: int | None = setting(None, "Seed of the sample.", "0", metavar="N", least=0)
    limit: int | None = setting(None, "Only the first documents of each task, as in lm-eval.", metavar="N", short="-L")
    earlier: tuple[int, ...] | None = None
    """As of `DocumentSample`."""

    def __post_init__(self) -> None:
        if self.sample is not None and self.limit is not None:
            raise UsageError("--limit takes the first documents of each task, --sample random ones; give one of them")
        if self.sample is None and self.seed is not None:
            raise UsageError(f"--seed {self.seed} is the seed of a --sample; give its size too, or omit the seed")

    @property
    def selection(self) -> DocumentSelection:
        return (
            FirstDocuments(self.limit)
            if self.sample is None
            else DocumentSample(self.sample, self.seed or 0, self.earlier)
        )


RequestType = TypeVar("RequestType", bound=Request)


def request_of(kind: type[RequestType], model: str | Path | ModelSpec, options: Mapping[str, Any]) -> RequestType:
    """Build a request from keyword arguments; paths, numbers and lists may be strings, and None is the default.

    `options` are the other fields of the request type and, unless `model` is a `ModelSpec`, of `ModelSpec`. Raises a
    `UsageError` if an option does not exist, or its value is invalid.
    """
    of_model = {}
    if not isinstance(model, ModelSpec):
        check_names(options, ModelSpec, kind)
        of_model = {name: value for name, value in options.items() if name in settings_of(ModelSpec)}
        model = model_spec(model, **of_model)
    own = {name: value for name, value in options.items() if name not in of_model}
    check_names(own, kind)
    return kind(model, **fitted(kind, own))


def provenance(request: Request, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the provenance in every manifest: model, date, command, hardware and versions."""
    path = {"folder": checkpoint.folder, "gguf": checkpoint.gguf}.get(checkpoint.kind, checkpoint.saved_as)
    return {
        "model": request.model.named,
        **({} if request.name is None else {"name": request.name}),
        # None for a model of the hub, or in memory and not saved
        "path": None if path is None else str(values.path("--model", path.resolve())),
        "revision": checkpoint.revision,
        **({"live": True} if checkpoint.kind == "live" else {}),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(map(printable, sys.argv)),
        "hardware": {"machine": platform.machine(), "system": platform.platform()},
        "versions": {"evalkit": __version__}
        | {name: version(name) for name in (*_NUMERICS, "datasets", "numpy", "pandas", "pyarrow")}
        | {"python": platform.python_version()},
    }


def plain_manifest(
    kind: str, request: Request, checkpoint: Checkpoint, specification: Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    """Return the manifest of a run; `more` has further entries, and those of a benchmark with groups and rules."""
    return {
        "id": specification_id(specification),
        "kind": kind,
        "specification": specification,
        "rule": kind,
        "groups": {},
        "group_sizes": {},
        **more,
        **provenance(request, checkpoint),
    }


def numerics(model: ModelSpec, checkpoint: Checkpoint, limit: int | None, say: Say = silent) -> dict[str, Any]:
    """Return the specification entries that determine the numbers of every run."""
    prints, extension = fingerprint(checkpoint), model.extension(checkpoint, say)
    return {
        "scoring": SCORING_VERSION,
        "versions": {name: version(name) for name in _NUMERICS},
        "checkpoint": {"weights": prints.weights, "config": prints.config, "tokenizer": prints.tokenizer},
        "dtype": resolve_dtype(checkpoint, model.dtype),
        "attention": model.attention,
        **({} if model.quantise is None else {"quantise": model.quantise}),
        "context_extension": None if extension is None else extension.specification(),
        "limit": limit,
    }


@dataclass(frozen=True)
class UserSuiteRequest(DocumentRequest):
    """Settings of a run of a suite, or of a user's file of requests."""

    suite: str | None = setting(
        None,
        "Which tasks and averages: a name (evalkit ls suites) or a YAML file.",
        "zeroshot8, or lm_eval if a task is not in it",
        names="name or file",
    )
    tasks: tuple[str, ...] = setting((), "Only these of the suite, or any of lm-eval's, separated by commas.")
    requests: Path | None = setting(
        None,
        "Your own documents as JSON lines: context, continuation and label, or prompt and references (docs/suites.md).",
        names="file",
    )


@dataclass(frozen=True)
class SuiteRequest(UserSuiteRequest):
    """Settings of a run of a suite of choices or of lm-eval's tasks."""

    include_path: Path | None = setting(
        None, "Folder of your own lm-eval task files; they can run code beside them.", names="folder"
    )
    template: str | None = setting(
        None, "inst (the paper's), plain (lm-eval's), chat, or a YAML file.", "inst", names="file"
    )
    rule: str | None = setting(None, "How the answer is chosen (evalkit ls rules).", "ppl; acc with plain")
    num_fewshot: int | None = setting(
        None, "Solved examples before each question.", "0; a task's own with lm_eval", least=0
    )
    vary: tuple[str, ...] = setting(
        (),
        "Also under other prompts: template, system_prompt, choice_order, separated by commas, or a YAML file. Prints "
        "the spread over prompts.",
        names="name or file",
    )
    control: Literal["swap"] | None = setting(
        None,
        "swap: each document has another document's context, so that a model that reads loses accuracy; the drop is "
        "printed with its interval.",
    )
    data_dir: Path | None = setting(
        None, "Folder of <task>.jsonl files, searched before other sources.", names="folder"
    )
    log_samples: bool = setting(False, "Also write lm-eval's per-document sample files.")
    allow_unofficial_data: bool = setting(False, "Accept documents that are not the pinned ones; marked.")


def shared_library(request: SuiteRequest, say: Say) -> Library:
    """Return the library with a request's documents; within `remembering` each document is read once."""
    data_dir, unofficial = request.data_dir, request.allow_unofficial_data
    return remembered("library", (data_dir, unofficial), lambda: Library(data_dir, unofficial, say))
