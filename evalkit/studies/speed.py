"""Speed of a device, from a matrix product and a matrix-vector product timed now."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import fmean
from typing import Any

EFFICIENCY = 0.5
"""Share of the matrix product's speed that scoring is assumed to reach."""
_SIZE = {"cpu": 1024, "cuda": 8192}
"""Rows of the square matrices: as large as a batch's, and timed in milliseconds."""
_LONGEST = 0.3
"""Seconds of timing for each of the two products."""


@dataclass(frozen=True)
class Speed:
    """Speed of a device in a dtype."""

    operations: float
    """Floating-point operations per second of a matrix product."""
    bytes: float
    """Bytes of weights read per second, by a matrix-vector product."""


def measured_speed(device: str, dtype: str) -> Speed:
    """Time both products on a device.

    Args:
        device: of torch, such as "cpu" or "cuda:0".
        dtype: "float32", "bfloat16" or "float16".
    """
    import torch

    size = _SIZE.get(device.partition(":")[0], _SIZE["cpu"])
    matrix = torch.ones(size, size, device=device, dtype=getattr(torch, dtype))
    large = torch.ones(4 * size, 4 * size, device=device, dtype=matrix.dtype)
    seconds = _seconds(lambda: matrix @ matrix, device)
    reading = _seconds(lambda: large @ large[0], device)
    return Speed(2 * size**3 / seconds, large.numel() * large.element_size() / reading)


def _seconds(product: Any, device: str) -> float:
    """Return the mean time of a product, which includes what other processes take of the device."""
    import torch

    def timed() -> float:
        started = time.perf_counter()
        product()
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    timed()
    times = [timed()]
    while sum(times) < _LONGEST:
        times.append(timed())
    return max(fmean(times), 1e-9)
