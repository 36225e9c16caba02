"""Loading of a run's model: a plan → a loaded model whose identity is checked."""

from __future__ import annotations

import json
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
        self._key: tuple[Any, ...] = ()
        self._loaded: LoadedModel | None = None

    def model_of(self, plan: Plan, say: Say) -> LoadedModel:
        """Return the loaded model of a run; see `load`."""
        return self.load(plan.request.model, plan.checkpoint, plan.manifest["specification"], say)

    def load(self, model: ModelSpec, checkpoint: Checkpoint, specification: Mapping[str, Any], say: Say) -> LoadedModel:
        """Load a model, or return the one that is kept if it is the same.

        Args:
            model: how it is loaded.
            checkpoint: its files.
            specification: of the run, which has the fingerprint that its files must have.
            say: called with messages, among them a description of the model.

        Raises:
            CheckpointError: it cannot be loaded, or its files have changed since the run's id was computed.
        """
        from evalkit.models.identity import check_identity

        key = (model, model_key(specification))
        if self._loaded is None or self._key != key:
            # Freed first, since two models may not fit into memory
            self._loaded = None
            self._loaded = model.load(checkpoint, say)
            self._key = key
            for line in self._loaded.describe().split("\n"):
                say(line)
        check_identity(checkpoint.given, specification, self._loaded)
        return self._loaded


def model_key(specification: Mapping[str, Any]) -> str:
    """Return the part of a specification that determines the loaded model: weights, dtype, attention and context."""
    names = ("checkpoint", "dtype", "attention", "context_extension")
    return json.dumps({name: specification[name] for name in names}, sort_keys=True)


def load_model(plan: Plan, say: Say) -> LoadedModel:
    """Load the model of a run and report what was loaded. Raises as `ModelHolder.load`."""
    return ModelHolder().model_of(plan, say)
