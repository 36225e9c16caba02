"""Put a loaded model on its device, or spread it over several by accelerate.

In: a model in the CPU's memory, after all of its checks. Out: the same model on its devices. accelerate's hooks around
each layer's forward pass move the layer's inputs to its device, and copy stored weights there while the layer runs.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from evalkit.errors import CheckpointError, UsageError
from evalkit.models.device_map import AUTO, NONE, layer_counts
from evalkit.models.locate import Say
from evalkit.models.parts import layers_of
from evalkit.models.placement import Placement, automatic_placement, counted_placement
from evalkit.models.quiet import quiet
from evalkit.models.temporary import temporary_folder

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
