"""Memory of devices: how much a process may use, running out of it, and which device holds which layers of a model.

Limits of batches follow from a device's whole memory, not from what happens to be free, so that a plan is the same
everywhere (but beside a training, which takes an unknown part); where memory runs out, batches are split. On a CPU,
memory of freed tensors is kept for the next ones. A model that no GPU holds is spread by accelerate: its hooks around
each layer's forward pass move the layer's inputs to its device, and copy stored weights there while the layer runs.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import psutil
import torch

from evalkit.compatibility.transformers import quiet
from evalkit.display import Say
from evalkit.errors import CheckpointError, OutOfMemoryError
from evalkit.models.parts import layers_of

_LARGEST_KEPT = 2**25 - 2**16
"""Bytes of a block just below the largest that glibc's thresholds adapt to, 32 MiB (`DEFAULT_MMAP_THRESHOLD_MAX`)."""
_KERNELS = "64"
"""Kernels that are kept: more than the shapes of a batch's products, which all layers share."""
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")

_WEIGHTS_SHARE = 0.75
"""Share of a GPU's memory for weights; the rest is for states, keys and values."""
_LOGIT_SHARE = 0.25
_LOGIT_COPIES = 4
"""Copies of a batch's float32 logits that exist at a time."""
_STORED = "cpu"
_CACHES = ("past_key_values", "cache")

_shares = {"memory": 1.0}
_splits: ContextVar[bool] = ContextVar("splits", default=True)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means out of memory, on a GPU or (by its message) on a CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return "not enough memory" in str(error) or ("alloc" in str(error).lower() and "memory" in str(error).lower())


def device_bytes(device: Any) -> int:
    """Return the bytes of a device's memory that this process may use: its whole memory times `use_memory_share`'s."""
    kind = torch.device(device).type
    if kind == "cuda":
        return int(torch.cuda.mem_get_info(device)[1] * _shares["memory"])
    total = int(psutil.virtual_memory().total)
    with suppress(OSError, ValueError):
        total = min(total, int(_CGROUP_LIMIT.read_text()))
    return int(total * _shares["memory"])


def free_bytes(device: Any) -> int:
    """Return the bytes of a device's memory that are free now; of a CPU, for all its processes together."""
    if torch.device(device).type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        # Its allocator keeps memory of freed tensors
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return min(device_bytes(device), int(psutil.virtual_memory().available))


def logit_tokens(room: float, vocabulary: int) -> int:
    """Return the tokens whose float32 logits fit into a share of so many bytes."""
    return max(128, int(room * _LOGIT_SHARE / (4 * _LOGIT_COPIES * vocabulary)))


def use_memory_share(share: float) -> None:
    _shares["memory"] = share


def check_room(device: Any, size: int) -> None:
    """Raise `MemoryError` if a CPU lacks free memory for an allocation, which the system would grant and then kill."""
    if torch.device(device).type == "cpu" and size > psutil.virtual_memory().available:
        raise MemoryError(f"not enough memory: {size:,} bytes")


def keep_freed_blocks() -> None:
    """Make the C library keep freed memory for the next tensors, instead of returning it to the system.

    glibc takes large blocks from the system, and each of their pages costs a page fault at its first use. The size from
    which it does so grows with the largest block of up to 32 MiB that was freed so far, and it keeps twice that size
    (mallopt(3), `M_MMAP_THRESHOLD`). Freeing one such block brings both to their limits, for this process until it
    ends: tensors of up to 32 MiB are reused, and up to 64 MiB of free memory are kept at the end of the heap. Scores
    do not change. With another C library, or with thresholds from its environment variables, nothing changes.
    """
    torch.empty(_LARGEST_KEPT, dtype=torch.uint8, device="cpu")


def keep_few_kernels() -> None:
    """Make the library of bfloat16 products on CPUs (oneDNN) keep fewer kernels, unless its variables are set.

    It compiles one for each shape of a product, and PyTorch and the library each keep 1,024 of them: 0.9 GiB after
    batches of as many lengths. This must come before the first product of the process.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, _KERNELS)


@contextmanager
def whole_batches() -> Iterator[None]:
    """Within the block, `refuse_to_split` raises: another process may have memory for the whole batch.

    A batch that is split is rounded differently in its last bits.
    """
    token = _splits.set(False)
    try:
        yield
    finally:
        _splits.reset(token)


def refuse_to_split(what: str) -> None:
    """Raise `OutOfMemoryError` within `whole_batches`."""
    if not _splits.get():
        raise OutOfMemoryError(f"out of memory on {what}")


# Layers on several devices


@dataclass(frozen=True)
class Placement:
    """The GPU, or "cpu" for a stored layer, of each layer."""

    main: str
    layers: tuple[str, ...]

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.main, *(device for device in self.layers if device != _STORED))))

    def summary(self) -> dict[str, str]:
        """Return device → its layers, from 0, such as {"cuda:0": "0-15", "cpu": "16-19"}."""
        spans: dict[str, list[str]] = {}
        for device, group in groupby(range(len(self.layers)), lambda layer: self.layers[layer]):
            first, *others = group
            spans.setdefault(device, []).append(f"{first}-{others[-1]}" if others else str(first))
        return {device: ",".join(layers) for device, layers in spans.items()}

    def describe(self) -> str:
        parts = [
            f"layers {layers} {'stored on' if device == _STORED else 'on'} {device}"
            for device, layers in self.summary().items()
        ]
        slow = f"; stored layers are copied to {self.main} each time they run, which is slow"
        return f"embedding and head on {self.main}, {', '.join(parts)}{slow if _STORED in self.layers else ''}"


def place_model(given: str, model: Any, device: str, spread_over_gpus: bool, say: Say) -> Placement | None:
    """Move a model from the CPU to its device, or spread it over all GPUs if the first one is too small and it may be.

    Return the placement of a model that is spread.
    """
    placement = None
    if spread_over_gpus:
        gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        placement = automatic_placement(given, model, gpus)
        whole = f"{(*gpus, _STORED)[0]} holds the whole model"
        say(f"--device-map auto: {whole if placement is None else placement.describe()}")
    if placement is None:
        model.to(device)
    else:
        dispatch(given, model, placement)
    return placement


def automatic_placement(given: str, model: Any, gpus: Sequence[str]) -> Placement | None:
    """Return the placement over all GPUs, balanced, the rest on the CPU; None if the first GPU holds the model."""
    layers = layers_of(model)
    sizes = [tensor_bytes(layer) for layer in layers]
    rest = tensor_bytes(model) - sum(sizes)
    memory = [int(device_bytes(gpu) * _WEIGHTS_SHARE) for gpu in gpus]
    if not gpus or rest + sum(sizes) <= memory[0]:
        return None
    if not layers or rest + max(sizes) > memory[0]:
        raise CheckpointError(
            f"{given}: cannot be spread over devices: the embedding and head ({rest / 2**30:.1f} GiB) beside one of "
            f"{len(layers)} layers do not fit into the memory of {gpus[0]}; use a smaller dtype"
        )
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    alone, kinds = torch.nn.ModuleList(layers), list({type(layer).__name__ for layer in layers})
    room: dict[int | str, int] = {**dict(enumerate((memory[0] - rest, *memory[1:]))), _STORED: 2 * sum(sizes)}
    device_map = infer_auto_device_map(alone, get_balanced_memory(alone, room, kinds), kinds, clean_result=False)
    devices = (device_map[str(number)] for number in range(len(layers)))
    return Placement(gpus[0], tuple(_STORED if device == _STORED else gpus[device] for device in devices))


def tensor_bytes(module: Any) -> int:
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())


def dispatch(given: str, model: Any, placement: Placement) -> None:
    from accelerate import dispatch_model

    if getattr(model, "is_quantized", False):
        raise CheckpointError(f"{given}: is quantised, which --device-map does not support; leave it out")
    modules = dict(model.named_modules())
    devices = {id(layer): device for layer, device in zip(layers_of(model), placement.layers, strict=True)}
    layers = [name for name, module in modules.items() if id(module) in devices]
    # The model, its base model, the list of layers
    containers = [name for name in modules if any(layer.startswith(f"{name}." if name else "") for layer in layers)]
    device_map = {
        name: devices.get(id(module), placement.main)
        for name, module in modules.items()
        if name not in containers and name.rpartition(".")[0] in containers
    }
    _check_shared(given, modules, device_map)
    for container in containers:
        for name, buffer in list(modules[container].named_buffers(recurse=False)):
            setattr(modules[container], name, buffer.to(placement.main))
    # accelerate recognises a shared weight by its address before it was moved: if that memory were freed, a stored
    # weight could be read to the same address, and would be replaced by the shared one
    names = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    addresses = [weight.data for weight in model.parameters() if names[id(weight)] > 1]
    weakref.finalize(model, addresses.clear)
    with quiet():
        dispatch_model(model, device_map, placement.main, skip_keys=list(_CACHES))


def _check_shared(given: str, modules: Mapping[str, Any], device_map: Mapping[str, str]) -> None:
    """Raise if modules share a weight without being on one GPU: accelerate would move or store it twice."""
    owner: dict[int, str] = {}
    for name, device in device_map.items():
        for weight in modules[name].parameters():
            other = owner.setdefault(id(weight), name)
            if other != name and (device_map[other] != device or device == _STORED):
                raise CheckpointError(
                    f"{given}: {other} and {name} have one weight, which --device-map would place twice; leave it out"
                )
