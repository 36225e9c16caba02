"""Check that a loaded model matches a run's id, because files can change after the id is computed.

In: a run's specification and a `LoadedModel`. Out: nothing, or a `CheckpointError` that says what changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from evalkit.errors import CheckpointError
from evalkit.models.fingerprint import stable

if TYPE_CHECKING:
    from evalkit.models.load import LoadedModel


def check_identity(given: str, specification: Mapping[str, Any], loaded: LoadedModel) -> None:
    """Raise if a model was loaded from other files than its run's id was computed from.

    Args:
        given: the checkpoint's name for messages.
        specification: of the run.
        loaded: by `load`.

    Raises:
        CheckpointError: names what changed.
    """
    if loaded.fingerprint is None:
        raise ValueError("a model without a fingerprint belongs to no run")
    extension = None if loaded.extension is None else loaded.extension.specification()
    found: dict[str, Any] = {**asdict(loaded.fingerprint), "dtype": loaded.dtype, "context": extension}
    recorded: dict[str, Any] = {
        **specification["checkpoint"],
        "dtype": specification["dtype"],
        "context": specification["context_extension"],
    }
    settings = stable(loaded.generation)
    if "end" in specification:
        found["generation_config.json"] = (settings or {}).get("eos_token_id")
        recorded["generation_config.json"] = specification["end"]
    elif specification.get("generation"):
        found["generation_config.json"], recorded["generation_config.json"] = (
            settings,
            specification["generation"]["config"],
        )
    if changed := [what for what, value in recorded.items() if found[what] != value]:
        raise CheckpointError(
            f"{given}: changed since this run was started ({', '.join(changed)}), so its scores would be stored under "
            "another model's id; run the command again"
        )
