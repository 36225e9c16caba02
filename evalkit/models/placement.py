"""Put a loaded model on its device, or spread it over several by accelerate.

In: a model in the CPU's memory, after all of its checks. Out: the same model on its devices. accelerate's hooks around
each layer's forward pass move the layer's inputs to its device, and copy stored weights there while the layer runs.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from evalkit.compatibility.transformers import quiet
from evalkit.display import Say
from evalkit.errors import CheckpointError, UsageError
from evalkit.models.memory import device_bytes
from evalkit.models.parts import AUTO, NONE, STORED, LayerCounts, layer_counts, layers_of
from evalkit.paths import temporary_folder

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


_CACHES = ("past_key_values", "cache")
"""Arguments of layers with keys and values, which are already on each layer's device."""


def resolve_device(device: str) -> str:
    """Return the torch device for a value of `--device`.

    Raises:
        UsageError: the value is no device, or this machine does not have the device.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind, index = torch.device(device).type, torch.device(device).index
    except RuntimeError as error:
        raise UsageError(f"--device {device}: not a device; expected auto, cpu, cuda, cuda:N or mps") from error
    count = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if kind not in count:
        raise UsageError(f"--device {device}: expected auto, cpu, cuda, cuda:N or mps")
    if (index or 0) >= count[kind]:
        raise UsageError(f"--device {device}: this machine has {count[kind] or 'no'} {kind} device(s) for torch")
    return device


def check_devices(device_map: str) -> None:
    """Raise a `UsageError` if this machine lacks a device that `--device-map` names."""
    counts = layer_counts(device_map)
    for device, _ in () if counts is None else counts.parts:
        index, count = int(device.partition(":")[2] or 0), torch.cuda.device_count()
        if device.startswith("cuda") and index >= count:
            raise UsageError(
                f"--device-map {device_map}: {device}: this machine has {count or 'no'} cuda device(s) for torch"
            )


def place_model(given: str, model: Any, device: str, device_map: str, say: Say) -> Placement | None:
    """Move a model to its device, or spread it over devices.

    Args:
        given: the checkpoint's name for messages.
        model: with its weights in the CPU's memory.
        device: from `resolve_device`; used where `device_map` is "none".
        device_map: "none", "auto", or numbers of layers by device.
        say: called with what is where.

    Returns:
        The placement; None if one device, `device`, holds the model.

    Raises:
        UsageError: the model has another number of layers than `device_map`.
        CheckpointError: memory is too small, or the model cannot be spread.
    """
    if device_map == NONE:
        _move(given, model, device)
        return None
    counts = layer_counts(device_map)
    if counts is None:
        cuda = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        placement = automatic_placement(given, model, cuda)
    else:
        placement = counted_placement(given, model, counts)
    if placement.is_single:
        say(f"--device-map {device_map}: {placement.main} holds the whole model")
        # The device's name as without the option
        _move(given, model, device if device_map == AUTO else placement.main)
        return None if device_map == AUTO else placement
    say(f"--device-map {device_map}: {placement.describe()}")
    dispatch(given, model, placement)
    return placement


def dispatch(given: str, model: Any, placement: Placement) -> None:
    """Spread a model over devices by accelerate; weights on the disk are removed with the model.

    Raises:
        CheckpointError: memory is too small, or the model cannot be spread.
    """
    from accelerate import dispatch_model

    _check_spreadable(given, model, placement)
    for buffer_owner in _ancestors_of_layers(model):
        for name, buffer in list(buffer_owner.named_buffers(recurse=False)):
            setattr(buffer_owner, name, buffer.to(placement.main))
    # accelerate recognises a shared weight by its address before it was moved: if that memory were freed, a stored
    # weight could be read to the same address, and would be replaced by the shared one
    addresses = [weight.data for weight in _shared_weights(model)]
    with ExitStack() as stack:
        stack.callback(addresses.clear)
        folder = stack.enter_context(temporary_folder()) if "disk" in placement.layers else None
        try:
            with quiet(), _silent_accelerate():
                dispatch_model(
                    model, device_map_of(model, placement), placement.main, offload_dir=folder, skip_keys=list(_CACHES)
                )
        except torch.OutOfMemoryError as error:
            shown = " and ".join(placement.devices)
            raise CheckpointError(
                f"{given}: does not fit into the memory of {shown} beside what other processes use; free some, or give "
                "--device-map fewer layers there"
            ) from error
        weakref.finalize(model, stack.pop_all().close)


def device_map_of(model: Any, placement: Placement) -> dict[str, str]:
    """Return accelerate's device map: module → device, for each layer and each module that contains no layer."""
    device_of = {id(layer): device for layer, device in zip(layers_of(model), placement.layers, strict=True)}
    containers = {id(module) for module in _ancestors_of_layers(model)}
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{mapped}.") for mapped in found)
        if id(module) not in containers and not inside:
            found[name] = device_of.get(id(module), placement.main)
    return found


def _check_spreadable(given: str, model: Any, placement: Placement) -> None:
    """Raise a `CheckpointError` for a model whose parts cannot be on different devices."""
    if getattr(model, "is_quantized", False):
        raise CheckpointError(f"{given}: is quantised, which --device-map does not support; leave it out")
    for module in _ancestors_of_layers(model):
        if own := [name for name, _ in module.named_parameters(recurse=False)]:
            raise CheckpointError(
                f"{given}: {type(module).__name__} has weights beside its layers ({own[0]}), which --device-map does "
                "not support; leave it out"
            )
    owner: dict[int, tuple[str, str]] = {}
    for prefix, device in device_map_of(model, placement).items():
        for name, weight in model.get_submodule(prefix).named_parameters():
            full, stored = f"{prefix}.{name}", device not in placement.devices
            other, place = owner.setdefault(id(weight), (full, device))
            if other != full and (place != device or stored):
                raise CheckpointError(
                    f"{given}: {other} and {full} are one weight, and --device-map would place it on {place} and "
                    f"{device}; leave it out, or give both one device"
                )


def _shared_weights(model: Any) -> list[Any]:
    """Return the parameters that have several names, such as an embedding that is also the output head."""
    names = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    return [weight for weight in model.parameters() if names[id(weight)] > 1]


def _ancestors_of_layers(model: Any) -> list[Any]:
    """Return the modules that contain the layers: the model, its base model, the list of layers."""
    layers = {id(layer) for layer in layers_of(model)}
    return [
        module
        for module in model.modules()
        if id(module) not in layers and any(id(part) in layers for part in module.modules())
    ]


def _move(given: str, model: Any, device: str) -> None:
    try:
        model.to(device)
    except torch.OutOfMemoryError as error:
        raise CheckpointError(
            f"{given}: does not fit into the memory of {device}; with several GPUs, or with enough memory beside one, "
            "give --device-map auto"
        ) from error


@contextmanager
def _silent_accelerate() -> Iterator[None]:
    """Suppress accelerate's log lines below errors."""
    log = logging.getLogger("accelerate")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
