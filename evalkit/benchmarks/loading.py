"""Loading of a run's model: a plan → a loaded model whose identity is checked."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.base import Plan, Say

if TYPE_CHECKING:
    from collections.abc import Mapping

    from evalkit.models.load import LoadedModel
    from evalkit.models.locate import Checkpoint
    from evalkit.models.spec import ModelSpec


class ModelHolder:
    """Loads models, one at a time, and keeps the last one: runs of one checkpoint load it once."""

    def __init__(self) -> None:
        self._key: LoadingKey | None = None
        self._loaded: LoadedModel | None = None

    def model_of(self, plan: Plan, say: Say) -> LoadedModel:
        """Return the loaded model of a run, or the one that is kept if it is the same. Raises as `load_checked`."""
        specification = plan.manifest["specification"]
        key = loading_key(plan.request.model, specification)
        if self._loaded is None or self._key != key:
            # Freed first, since two models may not fit into memory
            self._loaded = None
            self._loaded = load_checked(plan.request.model, plan.checkpoint, specification, say)
            self._key = key
        else:
            check_loaded(plan.checkpoint.given, specification, self._loaded)
        return self._loaded


LoadingKey = tuple["ModelSpec", str]


def loading_key(model: ModelSpec, specification: Mapping[str, Any]) -> LoadingKey:
    """Return what determines the loaded model: where its files are, how it is loaded, weights, dtype and context.

    Args:
        model: how it is loaded. Its context and dtype count as they are in the specification.
        specification: of the run.
    """
    names = ("checkpoint", "dtype", "attention", "context_extension")
    about = json.dumps({name: specification[name] for name in names}, sort_keys=True)
    plain = replace(model, dtype="auto", context=None, context_method=None, context_original=None, context_config=None)
    return plain, about


def load_checked(model: ModelSpec, checkpoint: Checkpoint, specification: Mapping[str, Any], say: Say) -> LoadedModel:
    """Load a model and report what was loaded.

    Args:
        model: how it is loaded.
        checkpoint: its files.
        specification: of the run, which has the fingerprint that its files must have.
        say: called with messages, among them a description of the model.

    Raises:
        CheckpointError: it cannot be loaded, or its files have changed since the run's id was computed.
    """
    loaded = model.load(checkpoint, say)
    check_loaded(checkpoint.given, specification, loaded)
    for line in loaded.describe().split("\n"):
        say(line)
    return loaded


def check_loaded(given: str, specification: Mapping[str, Any], loaded: LoadedModel) -> None:
    """Raise a `CheckpointError` if a model is not the one of a run; see `check_identity`."""
    from evalkit.models.identity import check_identity

    check_identity(given, specification, loaded)


def load_model(plan: Plan, say: Say) -> LoadedModel:
    """Load the model of a run and report what was loaded. Raises as `load_checked`."""
    return load_checked(plan.request.model, plan.checkpoint, plan.manifest["specification"], say)
