"""Detection of out-of-memory errors."""

from __future__ import annotations

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means out of memory, on a GPU or (by its message) on a CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return "not enough memory" in str(error) or ("alloc" in str(error).lower() and "memory" in str(error).lower())
