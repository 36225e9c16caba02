"""The value of `--device-map`: which devices hold a model's layers.

In: "none", "auto", or numbers of layers by device. Out: a `LayerCounts`, or an error. Devices are looked for and layers
are counted when the model is loaded (`placement.py`); no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from evalkit.errors import UsageError

NONE, AUTO = "none", "auto"
STORED = ("cpu", "disk")
"""Places that only store weights beside a GPU; "cpu" computes where no GPU is named."""
_PART = re.compile(r"(cuda:\d{1,3}|cpu|disk)=(\d{1,4})")


@dataclass(frozen=True)
class LayerCounts:
    """Numbers of consecutive layers by device, such as those of "cuda:0=12,cuda:1=12,cpu=8"."""

    given: str
    """The option's value."""
    parts: tuple[tuple[str, int], ...]
    """(device, number of layers) in the layers' order."""

    @property
    def main(self) -> str:
        """Return the device with the embedding and the head: the first GPU, or the CPU."""
        return next((device for device, _ in self.parts if device not in STORED), "cpu")

    @property
    def layers(self) -> tuple[str, ...]:
        """Return the device of each layer."""
        return tuple(device for device, number in self.parts for _ in range(number))


def layer_counts(device_map: str) -> LayerCounts | None:
    """Return the numbers of layers by device; None for "none" and "auto".

    Raises:
        UsageError: the value is neither of them.
    """
    if device_map in (NONE, AUTO):
        return None
    found = [_PART.fullmatch(part) for part in device_map.split(",")]
    parts = tuple((part[1], int(part[2])) for part in found if part)
    if len(parts) < len(found) or not all(number for _, number in parts):
        raise UsageError(
            f"--device-map {device_map}: expected none, auto, or numbers of layers by device, such as "
            "cuda:0=12,cuda:1=12,cpu=8 (cuda:N, cpu or disk)"
        )
    devices = [device for device, _ in parts]
    if twice := [device for device in devices if devices.count(device) > 1]:
        raise UsageError(f"--device-map {device_map}: names {twice[0]} twice")
    if devices == ["disk"]:
        raise UsageError(f"--device-map {device_map}: a disk does not compute; name cuda:N or cpu too")
    return LayerCounts(device_map, parts)


def check_device_map(device: str, device_map: str) -> None:
    """Raise a `UsageError` for an invalid value of `--device-map`, or one beside another `--device` than "auto"."""
    layer_counts(device_map)
    if device_map != NONE and device != "auto":
        raise UsageError(
            f"--device {device} and --device-map {device_map} both choose the device; leave one of them out"
        )
