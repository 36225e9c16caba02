"""Loading of a run's model: a plan → a loaded model whose identity is checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evalkit.benchmarks.base import Plan, Say

if TYPE_CHECKING:
    from evalkit.models.load import LoadedModel


def load_model(plan: Plan, say: Say) -> LoadedModel:
    """Load the model of a run and report what was loaded.

    Raises:
        CheckpointError: it cannot be loaded, or its files have changed since the run's id was computed.
    """
    from evalkit.models.identity import check_identity

    loaded = plan.request.model.load(plan.checkpoint, say)
    check_identity(plan.checkpoint.given, plan.manifest["specification"], loaded)
    for line in loaded.describe().split("\n"):
        say(line)
    return loaded
