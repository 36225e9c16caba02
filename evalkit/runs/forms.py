"""The form of a run's manifest and of its results: what is read anywhere, which both hold whoever wrote them.

A file with a digest of its own has the content that was written. That it was written as this version of evalkit
reads it is checked here, once, so that no reader meets a list where it looks for a name.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from evalkit.inputs.form import Each, Optional, misfit

_NUMBER = (float, None)

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

_SCORED = {"task": str, "n": int, "accuracy": float, "stderr": _NUMBER, "chance": float}
_AVERAGES = [{"name": str, "accuracy": float, "stderr": _NUMBER}]
_METRIC = {"filter": str, "metric": str, "value": object, "stderr": _NUMBER, "higher_is_better": (bool, None)}
_MEASURED = {
    "task": str,
    "n": int,
    "num_fewshot": (int, None),
    "metrics": [_METRIC],
    "seconds": Optional(float),
}

_SUITE = {
    "tasks": [_SCORED | {"seconds": float}],
    "averages": _AVERAGES,
    "rules": Each({"tasks": [_SCORED], "averages": _AVERAGES}),
    "samples": bool,
}
_LM_EVAL = {"tasks": [_MEASURED | {"seconds": float}], "groups": [_MEASURED], "averages": _AVERAGES, "samples": bool}
_LONGBENCH = {"tasks": [{"task": str, "all": {"n": int, "score": _NUMBER}}], "averages": _AVERAGES}
_NEEDLE = {
    "tasks": [{"task": str, "n": int, "found": int}],
    "averages": _AVERAGES,
    "depths": [float],
    "lengths": [int],
    "repeats": int,
    "found": [[float]],
}
_RESULTS = {"multiple_choice": _SUITE, "lm_eval": _LM_EVAL, "longbench": _LONGBENCH, "needle": _NEEDLE}
"""By benchmark; of others what is read of all."""
_ANY = {"tasks": [{"task": str}], "averages": _AVERAGES}


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


def results_trouble(content: Any, kind: str) -> str | None:
    """What is wrong with the form of the results of a benchmark's run, in words; None where nothing is."""
    return misfit(content, _RESULTS.get(kind, _ANY))
