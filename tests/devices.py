"""Devices of tests: the CPU in the fast suite, a CUDA device under the marker `gpu`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
# Inductor, which compiles for CUDA, imports parts of torch that are deprecated
compiles = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
CUDA = pytest.param("cuda", marks=(pytest.mark.gpu, needs_cuda, compiles))
DEVICES = ("cpu", CUDA)
KERNELS = {"cpu": "tiles", "cuda": "flex"}
"""How a tree is attended to where a run is free to choose: on a CUDA device by compiled FlexAttention."""


@contextmanager
def most_cuda_memory(more: int) -> Iterator[None]:
    """Limit this process to so many bytes on the CUDA device beyond those reserved now."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + more) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def cuda_memory_of(work: Callable[[], object]) -> int:
    """Return the peak bytes reserved by a call beyond those reserved before it."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    work()
    return torch.cuda.max_memory_reserved() - before
