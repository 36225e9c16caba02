"""Digest of a model in memory: classes, parameters and buffers.

In: a module. Out: a SHA-256 hex digest; with the config it determines the model's scores. Equal classes and equal
tensors under equal names give equal digests on any device. Tensors are read one at a time, in chunks, so that the model
is not copied. Their content is hashed by xxh3 (128 bits) in a tenth of SHA-256's time, because a model in training is
hashed in each evaluation. xxh3 distinguishes states, but does not resist deliberate collisions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
import xxhash

_CHUNK = 2**24
"""Numbers of a tensor that are hashed at a time."""


def state_digest(model: torch.nn.Module) -> str:
    """Hash a model's modules, parameters and buffers.

    The class of each module is included, because a replaced module computes something else with the same tensors.
    Buffers are included whether or not they are saved with a checkpoint, and tied tensors under each of their names.
    """
    digest = hashlib.sha256()
    for name, module in sorted(model.named_modules()):
        kind = type(module)
        digest.update(f"module\t{name}\t{kind.__module__}.{kind.__qualname__}\n".encode())
    known: dict[tuple[object, ...], str] = {}
    for name, tensor in sorted(_tensors(model), key=lambda entry: entry[0]):
        # Tied tensors share memory
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if place not in known or not tensor.numel():
            known[place] = _content_digest(tensor)
        digest.update(f"tensor\t{name}\t{tensor.dtype}\t{tuple(tensor.shape)}\t{known[place]}\n".encode())
    return digest.hexdigest()


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _content_digest(tensor: torch.Tensor) -> str:
    """Hash a tensor's bytes in row-major order."""
    digest = xxhash.xxh3_128()
    # A view, unless the tensor is not contiguous
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        chunk = flat[start : start + _CHUNK].cpu().contiguous()
        digest.update(chunk.view(torch.uint8).numpy().data)
    return digest.hexdigest()
