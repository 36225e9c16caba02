"""The form of a run's manifest, and what the results of every benchmark have.

A file with a digest of its own has the content that was written. That it was written as this version of evalkit
reads it is checked here, once, so that no reader meets a list where it looks for a name.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from evalkit.inputs.form import Each, Optional, misfit

NUMBER = (float, None)
"""Or none, where there is nothing to measure."""

PLACE = {"device": str, "hardware": str, "kernel": str, "host": str, "batches": Each(str)}
"""Where a part of a run was computed (`place.py`)."""

_SHAPE = {
    "backbone": str,
    "num_hidden_layers": int,
    "num_attention_heads": int,
    "attention_variant": str,
    "variant_layers": [int],
}
"""What is shown of a model's shape (`models.shapes.shape_facts`); the rest is only compared."""

_MANIFEST = {
    "id": str,
    "kind": Optional(str),
    "specification": {
        "suite": str,
        "dtype": str,
        "limit": (int, None),
        "checkpoint": dict,
        "documents": Optional(dict),
        "num_fewshot": Optional((int, None)),
        "context_extension": Optional((dict, None)),
    },
    "rule": str,
    "groups": Each([str]),
    "group_sizes": Each(int),
    "documents": Each({"source": str, "official": (bool, None), "count": int}),
    "examples": Optional(Each({"source": str, "official": (bool, None), "count": int})),
    "template": (str, {"name": str}),
    "created": str,
    "model": str,
    "path": Optional((str, None)),
    "revision": (str, None),
    "versions": Each(str),
    "loaded": Optional({"parameters": Optional((int, None)), "shape": Optional((_SHAPE, None))}),
    "devices": Optional([PLACE]),
}

AVERAGES = [{"name": str, "accuracy": float, "stderr": NUMBER}]
RESULTS_FORM = {"tasks": [{"task": str}], "averages": AVERAGES}
"""Of every results.json; a benchmark says what else its own have (`Benchmark.results_form`)."""


def manifest_trouble(content: Any) -> str | None:
    """What is wrong with the form of a manifest, in words; None where nothing is."""
    if trouble := misfit(content, _MANIFEST):
        return trouble
    if content["groups"].keys() != content["group_sizes"].keys():
        return "'groups' and 'group_sizes' name other groups"
    try:
        datetime.fromisoformat(content["created"])
    except ValueError:
        return f"'created' is {content['created'][:40]!r}; expected a date and time"
    return None
