"""Plan of a perplexity run: a request → documents and a manifest, without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from evalkit.benchmarks.perplexity import PERPLEXITY
from evalkit.benchmarks.perplexity.texts import TextDocument, TextTask, read_texts, selected
from evalkit.benchmarks.request import DocumentRequest, numerics, provenance
from evalkit.models.locate import Checkpoint, Say
from evalkit.runs.finding import run_folder
from evalkit.runs.folder import specification_id

VERSION = 1
"""Increased with every change of evalkit that changes a number of this benchmark."""


@dataclass(frozen=True)
class PerplexityRequest(DocumentRequest):
    """Settings of a perplexity run."""

    text: tuple[Path, ...] = ()
    """Files and folders; see `texts.py`."""
    key: str = "text"
    """Key of the text in the objects of .jsonl files."""
    stride: int | None = field(default=None)
    """Tokens that each window after the first scores; None: the window, so that windows do not overlap."""


@dataclass(frozen=True)
class PerplexityPlan:
    """A validated request with its documents and manifest."""

    request: PerplexityRequest
    checkpoint: Checkpoint
    tasks: dict[str, TextTask]
    manifest: dict[str, Any]

    @cached_property
    def documents(self) -> dict[str, tuple[TextDocument, ...]]:
        """Task → the documents that are scored."""
        return selected(self.tasks, self.request.selection)

    @property
    def window(self) -> int | None:
        """Requested tokens of a window; None: the model's."""
        window: int | None = self.manifest["specification"]["windows"]["tokens"]
        return window

    @property
    def folder(self) -> Path:
        """The run folder, which may not exist yet."""
        return run_folder(self.request.output, self.checkpoint, PERPLEXITY, "text", self.manifest)


def plan_perplexity(request: PerplexityRequest, say: Say) -> PerplexityPlan:
    """Validate a request and make the plan of its run.

    Raises:
        EvalkitError: the request, the checkpoint or a document is invalid.
    """
    tasks = read_texts(request.text, request.key)
    checkpoint = request.model.locate(say)
    # Windows may be shorter than the model's, which no extension shortens
    context = request.model.context
    specification = {
        **numerics(request.model, checkpoint, request.limit, say),
        **request.selection.specification,
        "suite": PERPLEXITY,
        "documents": {name: task.digest for name, task in tasks.items()},
        "windows": {"tokens": None if context in (None, "none") else int(context), "stride": request.stride},
        "version": VERSION,
    }
    documents = {
        name: {"source": str(tasks[name].source), "official": None, "count": len(members)}
        for name, members in selected(tasks, request.selection).items()
    }
    manifest = {
        "id": specification_id(specification),
        "kind": PERPLEXITY,
        "specification": specification,
        "rule": PERPLEXITY,
        "groups": {},
        "group_sizes": {},
        "template": {"name": "text"},
        "documents": documents,
        **provenance(request.model, checkpoint),
    }
    return PerplexityPlan(request, checkpoint, tasks, manifest)
