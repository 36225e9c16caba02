"""Whether an error means that memory ran out."""

from __future__ import annotations

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of torch means that memory ran out, on a GPU or (by its message) on a CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return "not enough memory" in str(error) or ("alloc" in str(error).lower() and "memory" in str(error).lower())
