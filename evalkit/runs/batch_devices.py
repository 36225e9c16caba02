"""Where batches are computed: the device, what it is, how the model attends on it, and the machine.

A run's specification leaves the device out, since it changes the last bits only; so each batch in the journal and the
manifest say where it was computed, and a run that goes on elsewhere says so.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple


class BatchDevice(NamedTuple):
    """Where a batch was computed."""

    device: str
    """As torch names it: "cpu", "cuda:1"."""
    hardware: str
    """The accelerator's name, or the processor's architecture."""
    kernel: str
    """How the model attended: of scored batches one of `scoring.forward.KERNELS`, or "alone" where no prefixes were
    shared; of generated ones the model's own implementation."""
    host: str
    """The machine's name in its network."""

    @property
    def kind(self) -> tuple[str, str]:
        """What rounds alike, as far as the hardware goes: the kind of device, and what it is."""
        return self.device.partition(":")[0], self.hardware


@cache
def place_of(device: str, kernel: str) -> BatchDevice:
    """This machine's, for a torch device of it that is in use."""
    return BatchDevice(device, hardware_of(device), kernel, platform.node())


def hardware_of(device: str) -> str:
    """The accelerator's name, or the processor's architecture, for a torch device of this machine."""
    if not device.startswith("cuda"):
        return platform.machine()
    import torch

    return torch.cuda.get_device_name(device)


def devices(batches: Iterable[tuple[str, int, BatchDevice | None]]) -> list[dict[str, Any]]:
    """What a manifest says of where a run was computed: each place, with the numbers of its batches by task.

    Args:
        batches: (task, number, place) of each.
    """
    found: dict[BatchDevice, dict[str, list[int]]] = {}
    for task, number, place in batches:
        if place is not None:
            found.setdefault(place, {}).setdefault(task, []).append(number)
    return [
        place._asdict() | {"batches": {task: _ranges(numbers) for task, numbers in by_task.items()}}
        for place, by_task in found.items()
    ]


def _ranges(numbers: Iterable[int]) -> str:
    """0, 1, 2, 5 as "0-2,5"."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def places(manifest: Mapping[str, Any]) -> list[BatchDevice]:
    """Where a finished run was computed."""
    return [BatchDevice(*(one[name] for name in BatchDevice._fields)) for one in manifest.get("devices", [])]


def kinds(manifest: Mapping[str, Any]) -> list[str]:
    """The kinds of devices that a finished run was computed on, each once: "cpu x86_64", "cuda NVIDIA H100"."""
    return list(dict.fromkeys(" ".join(place.kind) for place in places(manifest)))


def mixture(manifest: Mapping[str, Any]) -> list[str]:
    """What to say, in lines, of a run that was computed on devices of several kinds."""
    several = kinds(manifest)
    if len(several) < 2:
        return []
    parts = " and in part on ".join(several)
    return [f"computed in part on {parts}, which round otherwise; manifest.json names the batches"]
