"""Copies between the CPU's memory and a device. In: arrays. Out: tensors on the device, and back.

A GPU computes while the CPU prepares what follows, unless a copy makes the CPU wait. Copies to a GPU go through pinned
memory and do not wait; a batch waits once, where its results are fetched.
"""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return an array as a tensor on a device, without waiting for a GPU."""
    states = torch.from_numpy(array)
    if device.type == "cuda" and torch.cuda.is_available():
        return states.pin_memory().to(device, non_blocking=True)
    return states.to(device)


def fetch(states: torch.Tensor) -> NDArray[Any]:
    """Return a tensor of a device as an array; waits until it is computed."""
    found: NDArray[Any] = states.cpu().numpy()
    return found
