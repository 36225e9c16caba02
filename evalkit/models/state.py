"""The digest of a model in memory: of everything that its numbers depend on beside its config.

In: a module. Out: a SHA-256 hex digest. The same classes with the same numbers under the same names give the same
digest on any device. Tensors are read one after the other, a piece at a time, so that no copy of the model is made.
Their numbers are hashed by xxh3 (128 bits), which takes a tenth of SHA-256's time, since a model that is being trained
is hashed in each evaluation: it tells states apart, and is no protection against somebody who looks for two alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
import xxhash

_PIECE = 2**24
"""Numbers of a tensor that are hashed at a time."""


def state_digest(model: torch.nn.Module) -> str:
    """The digest of a model's modules, parameters and buffers.

    The class of each module counts, since a module that was replaced computes something else with the same tensors.
    Buffers count whether or not they are saved with a checkpoint, and tied tensors under each of their names.
    """
    digest = hashlib.sha256()
    for name, module in sorted(model.named_modules()):
        kind = type(module)
        digest.update(f"module\t{name}\t{kind.__module__}.{kind.__qualname__}\n".encode())
    known: dict[tuple[object, ...], str] = {}
    for name, tensor in sorted(_tensors(model), key=lambda entry: entry[0]):
        # Tied tensors are one piece of memory
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if place not in known or not tensor.numel():
            known[place] = _content_digest(tensor)
        digest.update(f"tensor\t{name}\t{tensor.dtype}\t{tuple(tensor.shape)}\t{known[place]}\n".encode())
    return digest.hexdigest()


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _content_digest(tensor: torch.Tensor) -> str:
    """Of a tensor's numbers in row-major order, as bytes."""
    digest = xxhash.xxh3_128()
    # A view, unless the tensor is not contiguous
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), _PIECE):
        piece = flat[start : start + _PIECE].cpu().contiguous()
        digest.update(piece.view(torch.uint8).numpy().data)
    return digest.hexdigest()
