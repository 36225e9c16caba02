"""Whether a loaded model is the one that a run's id was made of: files can change between the two.

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
    """Refuse a model that was loaded from other files than its run's id says.

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
    named: dict[str, Any] = {
        **specification["checkpoint"],
        "dtype": specification["dtype"],
        "context": specification["context_extension"],
    }
    settings = stable(loaded.generation)
    if "end" in specification:
        found["generation_config.json"] = (settings or {}).get("eos_token_id")
        named["generation_config.json"] = specification["end"]
    elif specification.get("generation"):
        found["generation_config.json"], named["generation_config.json"] = (
            settings,
            specification["generation"]["config"],
        )
    if changed := [what for what, value in named.items() if found[what] != value]:
        raise CheckpointError(
            f"{given}: changed since this run was begun ({', '.join(changed)}), so its numbers would stand under "
            "another model's id; run the command again"
        )
