"""Device provenance of batches: device, hardware, attention kernel, host and threads.

In: the device and kernel in use, or a manifest. Out: `BatchDevice`s, the manifest's list of them, and notes. The device
is not in a run's specification, since it changes the last bits only. Each batch in the journal and the manifest record
it instead, and a run that is resumed on other hardware warns.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class BatchDevice(NamedTuple):
    """Device, hardware, kernel, host and threads of a batch."""

    device: str
    """Torch's name of the device: "cpu", "cuda:1"; "cuda:0+cuda:1" of a model that is spread over both."""
    hardware: str
    """The accelerator's name, or the processor's architecture; several names are joined by "+"."""
    kernel: str
    """Attention kernel. Scored batches: one of `scoring.forward.KERNELS`, or "alone" without shared prefixes. Generated
    batches: the model's own implementation."""
    host: str
    """Network name of the machine."""
    threads: int = 0
    """Threads of a CPU, whose number changes the last bits; 0 for other devices, and where it is unknown."""

    @property
    def kind(self) -> tuple[str, str]:
        """Kind of device and its hardware. Batches of the same kind round alike, as far as the hardware decides."""
        return self.device.partition(":")[0], self.hardware


def place_of(device: str, kernel: str) -> BatchDevice:
    """Return the `BatchDevice` for a torch device of this machine."""
    import torch

    threads = torch.get_num_threads() if device == "cpu" else 0
    return BatchDevice(device, hardware_of(device), kernel, platform.node(), threads)


def hardware_of(device: str) -> str:
    """Return the accelerator's name, or the processor's architecture; several devices are joined by "+"."""
    if "+" in device:
        return "+".join(dict.fromkeys(map(hardware_of, device.split("+"))))
    if not device.startswith("cuda"):
        return platform.machine()
    import torch

    return torch.cuda.get_device_name(device)


def devices(batches: Iterable[tuple[str, int, BatchDevice | None]]) -> list[dict[str, Any]]:
    """Return the manifest's list of devices from (task, batch number, device) of each batch."""
    found: dict[BatchDevice, dict[str, list[int]]] = {}
    for task, number, place in batches:
        if place is not None:
            found.setdefault(place, {}).setdefault(task, []).append(number)
    return [
        place._asdict() | {"batches": {task: _ranges(numbers) for task, numbers in by_task.items()}}
        for place, by_task in found.items()
    ]


def _ranges(numbers: Iterable[int]) -> str:
    """Format numbers as ranges: 0, 1, 2, 5 as "0-2,5"."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def places(manifest: Mapping[str, Any]) -> list[BatchDevice]:
    """Return the devices that a finished run was computed on."""
    stored = manifest.get("devices", [])
    return [BatchDevice(*(device[name] for name in BatchDevice._fields)) for device in stored]


def kinds(manifest: Mapping[str, Any]) -> list[str]:
    """Return the distinct kinds of devices of a finished run: "cpu x86_64", "cuda NVIDIA H100"."""
    return list(dict.fromkeys(" ".join(place.kind) for place in places(manifest)))


def mixture(manifest: Mapping[str, Any]) -> list[str]:
    """Return notes about a run that was computed on several kinds of devices; none for a single kind."""
    several = kinds(manifest)
    if len(several) < 2:
        return []
    parts = " and in part on ".join(several)
    return [f"computed in part on {parts}, which round differently; manifest.json lists the batches"]
