"""Where a test's body runs: on the processor in the fast suite, on a CUDA device under the marker `gpu`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
CUDA = pytest.param("cuda", marks=(pytest.mark.gpu, needs_cuda))
DEVICES = ("cpu", CUDA)
KERNELS = {"cpu": "tiles", "cuda": "flex"}
"""How a tree is attended to where a run is free to choose: on a CUDA device by compiled FlexAttention."""


@contextmanager
def most_cuda_memory(more: int) -> Iterator[None]:
    """Let this process take so many bytes more on the CUDA device than it holds now."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + more) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def cuda_memory_of(work: Callable[[], object]) -> int:
    """The most bytes that a call takes beyond what is held now."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    work()
    return torch.cuda.max_memory_reserved() - before
