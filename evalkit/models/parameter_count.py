"""Number of parameters of a checkpoint, from its files and without loading it. No torch.

In: a `Checkpoint`. Out: the number of parameters, for estimates of time and memory.
"""

from __future__ import annotations

from math import prod

from evalkit.errors import CheckpointError
from evalkit.models.files import safetensors_header
from evalkit.models.locate import Checkpoint
from evalkit.models.shapes import BYTES, parameters, read_shape

_GGUF_BYTES = 1.1
"""Bytes of a parameter in a GGUF file of 8 bits, which most have."""
_PICKLED_BYTES = BYTES["float32"]


def parameter_count(checkpoint: Checkpoint) -> int | None:
    """Return the number of parameters; an estimate for GGUF and pickled files, None if the files are unreadable."""
    try:
        if checkpoint.gguf is not None:
            return int(checkpoint.gguf.stat().st_size / _GGUF_BYTES)
        try:
            return parameters(read_shape(checkpoint.config())).total
        except ValueError:
            return _stored(checkpoint)
    except (CheckpointError, OSError):
        return None


def _stored(checkpoint: Checkpoint) -> int:
    """Count the elements of the weight files."""
    total = 0
    for path in checkpoint.weights():
        if path.suffix == ".safetensors":
            total += sum(prod(tensor["shape"]) for tensor in safetensors_header(path).values())
        else:
            total += path.stat().st_size // _PICKLED_BYTES
    return total
