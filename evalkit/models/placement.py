"""Put a loaded model on its device, or spread it over several by accelerate.

In: a model in the CPU's memory, after all of its checks. Out: the same model on its devices. accelerate's hooks around
each layer's forward pass move the layer's inputs to its device, and copy stored weights there while the layer runs.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from evalkit.compatibility.transformers import quiet
from evalkit.display import Say
from evalkit.errors import CheckpointError, UsageError
from evalkit.models.memory import device_bytes
from evalkit.models.parts import layers_of

_WEIGHTS_SHARE = 0.75
"""Share of a GPU's memory for weights; the rest is for states, keys and values."""
_STEPS = 100
_STORED = "cpu"
"""Device that only stores layers beside GPUs."""
_CACHES = ("past_key_values", "cache")
"""Arguments of layers with keys and values, which are already on each layer's device."""


@dataclass(frozen=True)
class Placement:
    """The GPU, or "cpu" for a stored layer, of each layer."""

    main: str
    """GPU of everything outside of the layers."""
    layers: tuple[str, ...]

    @property
    def devices(self) -> tuple[str, ...]:
        """Return the devices that compute, the main one first."""
        return tuple(dict.fromkeys((self.main, *(device for device in self.layers if device != _STORED))))

    def summary(self) -> dict[str, str]:
        """Return device → its layers, from 0, such as {"cuda:0": "0-15", "cpu": "16-19"}."""
        spans: dict[str, list[str]] = {}
        for device, group in groupby(range(len(self.layers)), lambda layer: self.layers[layer]):
            members = list(group)
            span = f"{members[0]}-{members[-1]}" if len(members) > 1 else str(members[0])
            spans.setdefault(device, []).append(span)
        return {device: ",".join(found) for device, found in spans.items()}

    def describe(self) -> str:
        """Return a line that says what is where."""
        parts = [
            f"layers {layers} {'stored on' if device == _STORED else 'on'} {device}"
            for device, layers in self.summary().items()
        ]
        slow = f"; stored layers are copied to {self.main} each time they run, which is slow"
        return f"embedding and head on {self.main}, {', '.join(parts)}{slow if _STORED in self.layers else ''}"


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


def computing_devices(model: Any) -> tuple[torch.device, ...]:
    """Return the devices that hold a loaded model's weights, that of the embedding first; without stored weights."""
    own = model.get_input_embeddings().weight.device
    return tuple(dict.fromkeys((own, *(weight.device for weight in model.parameters() if not weight.is_meta))))


def place_model(given: str, model: Any, device: str, spread_over_gpus: bool, say: Say) -> Placement | None:
    """Move a model to its device, or spread it over all GPUs if the first one is too small.

    Args:
        given: the checkpoint's name for messages.
        model: with its weights in the CPU's memory.
        device: from `resolve_device`, for a model on one device.
        spread_over_gpus: whether it may be spread.
        say: called with what is where.

    Returns:
        The placement; None if one device holds the model.

    Raises:
        CheckpointError: memory is too small, or the model cannot be spread.
    """
    if spread_over_gpus:
        gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        if placement := automatic_placement(given, model, gpus):
            say(f"--device-map auto: {placement.describe()}")
            dispatch(given, model, placement)
            return placement
        say(f"--device-map auto: {(*gpus, 'cpu')[0]} holds the whole model")
    try:
        model.to(device)
    except torch.OutOfMemoryError as error:
        raise CheckpointError(
            f"{given}: does not fit into the memory of {device}; with several GPUs, or with enough memory beside one, "
            "give --device-map auto"
        ) from error
    return None


def automatic_placement(given: str, model: Any, gpus: Sequence[str]) -> Placement | None:
    """Return the placement over all GPUs, balanced, the rest on the CPU; None if the first GPU holds the model.

    Raises:
        CheckpointError: the embedding and the head do not fit on the first GPU, or the model's layers are not a list.
    """
    layers = layers_of(model)
    sizes = [tensor_bytes(layer) for layer in layers]
    rest = tensor_bytes(model) - sum(sizes)
    memory = [int(device_bytes(gpu) * _WEIGHTS_SHARE) for gpu in gpus]
    if not gpus or rest + sum(sizes) <= memory[0]:
        return None
    if not layers:
        raise CheckpointError(
            f"{given}: {type(model).__name__} does not fit into the memory of {gpus[0]}, and has no list of layers "
            "that could be spread over devices"
        )
    if rest + max(sizes) > memory[0]:
        raise CheckpointError(
            f"{given}: its embedding and head ({rest / 2**30:.1f} GiB) beside a layer do not fit into the memory of "
            f"{gpus[0]}; use a smaller dtype"
        )
    return Placement(gpus[0], tuple(_STORED if at is None else gpus[at] for at in spread(sizes, rest, memory)))


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
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())


def dispatch(given: str, model: Any, placement: Placement) -> None:
    """Spread a model over devices by accelerate.

    Raises:
        CheckpointError: memory is too small, or the model cannot be spread.
    """
    from accelerate import dispatch_model

    device_map = _device_map(model, placement)
    _check_spreadable(given, model, device_map)
    for container in _ancestors_of_layers(model):
        for name, buffer in list(container.named_buffers(recurse=False)):
            setattr(container, name, buffer.to(placement.main))
    # accelerate recognises a shared weight by its address before it was moved: if that memory were freed, a stored
    # weight could be read to the same address, and would be replaced by the shared one
    names = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    addresses = [weight.data for weight in model.parameters() if names[id(weight)] > 1]
    weakref.finalize(model, addresses.clear)
    try:
        with quiet(), _silent_accelerate():
            dispatch_model(model, device_map, placement.main, skip_keys=list(_CACHES))
    except torch.OutOfMemoryError as error:
        raise CheckpointError(
            f"{given}: does not fit into the memory of {' and '.join(placement.devices)} beside what other processes "
            "use; free some"
        ) from error


def _device_map(model: Any, placement: Placement) -> dict[str, str]:
    """Return accelerate's device map: module → device, for each layer and each module that contains no layer."""
    device_of = {id(layer): device for layer, device in zip(layers_of(model), placement.layers, strict=True)}
    containers = {id(module) for module in _ancestors_of_layers(model)}
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{mapped}.") for mapped in found)
        if id(module) not in containers and not inside:
            found[name] = device_of.get(id(module), placement.main)
    return found


def _check_spreadable(given: str, model: Any, device_map: dict[str, str]) -> None:
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
    for prefix, device in device_map.items():
        for name, weight in model.get_submodule(prefix).named_parameters():
            full = f"{prefix}.{name}"
            other, where = owner.setdefault(id(weight), (full, device))
            if other != full and (where != device or device == _STORED):
                raise CheckpointError(
                    f"{given}: {other} and {full} are one weight, and --device-map would place it on {where} and "
                    f"{device}; leave it out"
                )


def _ancestors_of_layers(model: Any) -> list[Any]:
    """Return the modules that contain the layers: the model, its base model, the list of layers."""
    layers = {id(layer) for layer in layers_of(model)}
    return [
        module
        for module in model.modules()
        if id(module) not in layers and any(id(part) in layers for part in module.modules())
    ]


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
