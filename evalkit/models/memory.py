"""Memory: out-of-memory errors, and how much of a device's memory a process may use.

Limits of batches follow from a device's whole memory, not from what happens to be free, so that a plan is the same
everywhere; where memory runs out, batches are split. On a CPU, memory of freed tensors is kept for the next ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import psutil
import torch

from evalkit.errors import OutOfMemoryError

_LARGEST_KEPT = 2**25 - 2**16
"""Bytes of a block just below the largest that glibc's thresholds adapt to, 32 MiB (`DEFAULT_MMAP_THRESHOLD_MAX`)."""
_KERNELS = "64"
"""Kernels that are kept: more than the shapes of a batch's products, which all layers share."""
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""Memory limit of a container, in bytes, or "max"."""

_shares = {"memory": 1.0}
"""Share of each device's memory that this process may use."""
_splits: ContextVar[bool] = ContextVar("splits", default=True)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means out of memory, on a GPU or (by its message) on a CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return "not enough memory" in str(error) or ("alloc" in str(error).lower() and "memory" in str(error).lower())


def device_bytes(device: Any) -> int:
    """Return the bytes of a device's memory that this process may use: its whole memory times `use_memory_share`'s."""
    kind = torch.device(device).type
    if kind == "cuda":
        return int(torch.cuda.mem_get_info(device)[1] * _shares["memory"])
    total = int(psutil.virtual_memory().total)
    with suppress(OSError, ValueError):
        total = min(total, int(_CGROUP_LIMIT.read_text()))
    return int(total * _shares["memory"])


def use_memory_share(share: float) -> None:
    """Set the share of each device's memory that this process may use, where several processes share a device."""
    _shares["memory"] = share


def check_room(device: Any, size: int) -> None:
    """Raise `MemoryError` if a CPU lacks free memory for an allocation, which the system would grant and then kill."""
    if torch.device(device).type == "cpu" and size > psutil.virtual_memory().available:
        raise MemoryError(f"not enough memory: {size:,} bytes")


def keep_freed_blocks() -> None:
    """Make the C library keep freed memory for the next tensors, instead of returning it to the system.

    glibc takes large blocks from the system, and each of their pages costs a page fault at its first use. The size from
    which it does so grows with the largest block of up to 32 MiB that was freed so far, and it keeps twice that size
    (mallopt(3), `M_MMAP_THRESHOLD`). Freeing one such block brings both to their limits, for this process until it
    ends: tensors of up to 32 MiB are reused, and up to 64 MiB of free memory are kept at the end of the heap. Scores
    do not change. With another C library, or with thresholds from its environment variables, nothing changes.
    """
    torch.empty(_LARGEST_KEPT, dtype=torch.uint8, device="cpu")


def keep_few_kernels() -> None:
    """Make the library of bfloat16 products on CPUs (oneDNN) keep fewer kernels, unless its variables are set.

    It compiles one for each shape of a product, and PyTorch and the library each keep 1,024 of them: 0.9 GiB after
    batches of as many lengths. This must come before the first product of the process.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, _KERNELS)


@contextmanager
def whole_batches() -> Iterator[None]:
    """Within the block, `refuse_to_split` raises: another process may have memory for the whole batch.

    A batch that is split is rounded differently in its last bits.
    """
    token = _splits.set(False)
    try:
        yield
    finally:
        _splits.reset(token)


def refuse_to_split(what: str) -> None:
    """Raise `OutOfMemoryError` within `whole_batches`."""
    if not _splits.get():
        raise OutOfMemoryError(f"out of memory on {what}")
