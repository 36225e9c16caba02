"""The form of a run's manifest, and what the results of every benchmark have.

A file with a digest of its own has the content that was written. That it was written as this version of evalkit
reads it is checked here, once, so that no reader meets a list where it looks for a name.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from evalkit.inputs.validated import Stored


class StoredTask(Stored):
    """A task in results.json; a benchmark's own have more."""

    task: str


class StoredAverage(Stored):
    """A mean over tasks."""

    name: str
    accuracy: float
    stderr: float | None


class StoredResults(Stored):
    """Of every results.json; a benchmark says what else its own have (`Benchmark.results_form`)."""

    tasks: list[StoredTask]
    averages: list[StoredAverage]


class _TimedTask(StoredTask):
    seconds: float


class TimedResults(Stored):
    """Of results.json where seconds are kept."""

    tasks: list[_TimedTask]


class _Specification(Stored):
    suite: str
    dtype: str
    limit: int | None
    checkpoint: dict[str, Any]
    documents: dict[str, Any] = Field(default_factory=dict)
    num_fewshot: int | None = None
    context_extension: dict[str, Any] | None = None


class _Source(Stored):
    """Where documents, or solved examples, come from."""

    source: str
    official: bool | None
    count: int


class _TemplateName(Stored):
    name: str


class _Shape(Stored):
    """What is shown of a model's shape (`models.shapes.shape_facts`); the rest is only compared."""

    backbone: str
    num_hidden_layers: int
    num_attention_heads: int
    attention_variant: str
    variant_layers: list[int]


class _Loaded(Stored):
    parameters: int | None = None
    shape: _Shape | None = None


class _Device(Stored):
    """Where a part of a run was computed (`batch_devices.py`)."""

    device: str
    hardware: str
    kernel: str
    host: str
    batches: dict[str, str]


def _date(text: str) -> str:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text[:40]!r} is no date and time") from None
    return text


class StoredManifest(Stored):
    """What manifest.json must hold."""

    id: str
    kind: str = ""
    specification: _Specification
    rule: str
    groups: dict[str, list[str]]
    group_sizes: dict[str, int]
    documents: dict[str, _Source]
    examples: dict[str, _Source] = Field(default_factory=dict)
    template: str | _TemplateName
    created: Annotated[str, AfterValidator(_date)]
    model: str
    path: str | None = None
    revision: str | None
    versions: dict[str, str]
    loaded: _Loaded = Field(default_factory=_Loaded)
    devices: list[_Device] = Field(default_factory=list)

    @model_validator(mode="after")
    def _sizes_are_of_the_groups(self) -> Self:
        if self.groups.keys() != self.group_sizes.keys():
            raise ValueError("'groups' and 'group_sizes' name other groups")
        return self
