"""Which device holds which layer of a model that is larger than one GPU.

In: a model in the CPU's memory and the value of `--device-map`. Out: a `Placement`. Layers stay in order: those of a
GPU are consecutive. The embedding, the head and everything else outside of the layers is on the first GPU, the main
device, which also gets token ids and computes scores. The plan follows from whole memories, not from what is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from evalkit.errors import CheckpointError, UsageError
from evalkit.models.device_map import STORED, LayerCounts
from evalkit.models.parts import layers_of
from evalkit.scoring.memory import device_bytes

_WEIGHTS_SHARE = 0.75
"""Share of a GPU's memory for weights; the rest is for states, keys and values."""
_STEPS = 100


@dataclass(frozen=True)
class Placement:
    """The device of each layer."""

    main: str
    """Device of everything outside of the layers."""
    layers: tuple[str, ...]
    """Device of each layer; "cpu" and "disk" only store a layer, unless "cpu" is the main device."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Return the devices that compute, the main one first."""
        stored = {"disk"} if self.main == "cpu" else set(STORED)
        return tuple(dict.fromkeys((self.main, *(device for device in self.layers if device not in stored))))

    @property
    def is_single(self) -> bool:
        """Return whether one device holds the whole model."""
        return set(self.layers) <= {self.main}

    def summary(self) -> dict[str, str]:
        """Return device → its layers, from 0, such as {"cuda:0": "0-15", "cpu": "16-19"}."""
        found: dict[str, list[str]] = {}
        for device, group in groupby(range(len(self.layers)), lambda layer: self.layers[layer]):
            members = list(group)
            span = f"{members[0]}-{members[-1]}" if len(members) > 1 else str(members[0])
            found.setdefault(device, []).append(span)
        return {device: ",".join(spans) for device, spans in found.items()}

    def describe(self) -> str:
        """Return a line that says what is where."""
        parts = []
        for device, layers in self.summary().items():
            verb = "on" if device in self.devices else "stored on"
            parts.append(f"layers {layers} {verb} {'the disk' if device == 'disk' else device}")
        stored = any(device not in self.devices for device in self.layers)
        loaded = f"; stored layers are copied to {self.main} each time they run, which is slow" if stored else ""
        return f"embedding and head on {self.main}, {', '.join(parts)}{loaded}"


def counted_placement(given: str, model: Any, counts: LayerCounts) -> Placement:
    """Return the placement by given numbers of layers.

    Raises:
        UsageError: the model has another number of layers.
    """
    if (most := len(layers_of(model))) != len(counts.layers):
        own = most or "no list of layers"
        raise UsageError(f"--device-map {counts.given}: places {len(counts.layers)} layers; {given} has {own}")
    return Placement(counts.main, counts.layers)


def automatic_placement(given: str, model: Any, devices: Sequence[str]) -> Placement:
    """Return the placement over all GPUs, balanced; over the first alone if it holds the model; the rest on the CPU.

    Args:
        given: the checkpoint's name for messages.
        model: with its weights in the CPU's memory.
        devices: the GPUs; empty: the CPU holds the model.

    Raises:
        CheckpointError: the embedding and the head do not fit on the first GPU, or the model's layers are not a list.
    """
    layers = layers_of(model)
    if not devices:
        return Placement("cpu", ("cpu",) * len(layers))
    sizes = [tensor_bytes(layer) for layer in layers]
    rest = tensor_bytes(model) - sum(sizes)
    memory = [int(device_bytes(device) * _WEIGHTS_SHARE) for device in devices]
    if rest + sum(sizes) <= memory[0]:
        return Placement(devices[0], (devices[0],) * len(layers))
    if not layers:
        raise CheckpointError(
            f"{given}: {type(model).__name__} does not fit into the memory of {devices[0]}, and has no list of layers "
            "that could be spread over devices"
        )
    if rest + max(sizes) > memory[0]:
        raise CheckpointError(
            f"{given}: its embedding and head ({rest / 2**30:.1f} GiB) beside a layer do not fit into the memory of "
            f"{devices[0]}; use a smaller dtype"
        )
    return Placement(devices[0], tuple("cpu" if at is None else devices[at] for at in spread(sizes, rest, memory)))


def spread(sizes: Sequence[int], rest: int, memory: Sequence[int]) -> list[int | None]:
    """Return the index of each layer's device, in order and balanced by memory; None: no device has room for it.

    Args:
        sizes: bytes of each layer.
        rest: bytes of everything else, on the first device.
        memory: bytes of each device.
    """
    for step in range(1, _STEPS + 1):
        found = _filled(sizes, [size * step // _STEPS for size in memory], rest)
        if None not in found:
            return found
    # Room for one stored layer at a time, since such layers run on the first device
    return _filled(sizes, memory, rest + max(sizes))


def _filled(sizes: Sequence[int], memory: Sequence[int], rest: int) -> list[int | None]:
    """Fill the devices one after the other, in the layers' order."""
    found: list[int | None] = []
    device, used = 0, rest
    for size in sizes:
        while device < len(memory) and used + size > memory[device]:
            device, used = device + 1, 0
        used += size
        found.append(device if device < len(memory) else None)
    return found


def tensor_bytes(module: Any) -> int:
    """Return the bytes of a module's parameters and buffers; tied ones count once."""
    tensors = {id(one): one for one in (*module.parameters(), *module.buffers())}
    return sum(one.numel() * one.element_size() for one in tensors.values())


def computing_devices(model: Any) -> tuple[torch.device, ...]:
    """Return the devices that hold a loaded model's weights, that of the embedding first; without stored weights."""
    own = model.get_input_embeddings().weight.device
    return tuple(dict.fromkeys((own, *(one.device for one in model.parameters() if not one.is_meta))))
