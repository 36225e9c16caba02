"""Parts of a loaded transformers model that evalkit runs separately, and the devices that they are on.

In: a causal language model. Out: its base model, its layers, and rotary modules whose state depends on past lengths; or
the model on its device, or spread over several by accelerate, whose hooks around each layer's forward pass move the
layer's inputs to its device, and copy stored weights there while the layer runs.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import torch

from evalkit.compatibility.transformers import quiet
from evalkit.display import Say
from evalkit.errors import CheckpointError, UsageError
from evalkit.models.memory import device_bytes

_WEIGHTS_SHARE = 0.75
"""Share of a GPU's memory for weights; the rest is for states, keys and values."""
_STORED = "cpu"
"""Device that only stores layers beside GPUs."""
_ORIGINAL = "original_inv_freq"
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


def base_of(model: Any) -> Any:
    """Return the base model of a causal language model, which computes hidden states: all but the output head.

    For a class that is its own base model (Llama 4's text model), return the submodule with the input embedding.
    """
    base = model.base_model
    if base is not model:
        return base
    embedding = model.get_input_embeddings()
    return next(child for child in model.children() if any(module is embedding for module in child.modules()))


def layers_of(model: Any) -> list[Any]:
    """Return the layers of a causal language model, in order; none where they are not a list of modules."""
    layers = model.config.get_text_config().num_hidden_layers
    lists = (module for module in base_of(model).modules() if isinstance(module, torch.nn.ModuleList))
    return next((list(found) for found in lists if len(found) == layers), [])


def dynamic_modules(model: Any) -> list[Any]:
    """Return the rotary modules of a loaded model that keep the length of the longest sequence."""

    def is_dynamic(kinds: Any) -> bool:
        return "dynamic" in (kinds.values() if isinstance(kinds, dict) else (kinds,))

    modules = (module for module in model.modules() if hasattr(module, "inv_freq"))
    return [module for module in modules if is_dynamic(getattr(module, "rope_type", None))]


def forget_lengths(modules: list[Any]) -> None:
    """Reset modules from `dynamic_modules` to their state after loading."""
    for module in modules:
        # One per layer type, with the type as prefix
        for name in [name for name in dir(module) if name.endswith(_ORIGINAL)]:
            prefix = name.removesuffix(_ORIGINAL)
            original = getattr(module, name).to(getattr(module, f"{prefix}inv_freq").device)
            module.register_buffer(f"{prefix}inv_freq", original, persistent=False)
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def cache_reset_lengths(model: Any, trained: Sequence[int | None]) -> frozenset[int]:
    """Return the sequence lengths at which transformers' `generate` drops its cache and recomputes all keys.

    Phi-3 does so one token past the window of training. The lengths are found by calling the model's own
    `prepare_inputs_for_generation`, for the windows of training of its length-dependent rotary embeddings, in tokens.
    """
    if not trained:
        return frozenset()
    own = getattr(model.config.get_text_config(), "original_max_position_embeddings", None)
    found = []
    for length in {int(length) for length in (own, *trained) if length}:
        ids = torch.zeros(1, length + 1, dtype=torch.long, device=model.device)
        step = model.prepare_inputs_for_generation(
            ids,
            past_key_values=SimpleNamespace(is_compileable=False, get_seq_length=lambda *_, length=length: length),
            attention_mask=torch.ones_like(ids),
            use_cache=True,
            next_sequence_length=1,
        )
        found += [length + 1] if step["input_ids"].shape[1] > 1 else []
    return frozenset(found)


def resolve_device(device: str) -> str:
    """Return the torch device for a `ModelSpec.device`. Raises `UsageError` if this machine has no such device."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = device.partition(":")
    count = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}[kind]
    if int(index or 0) >= count:
        raise UsageError(f"--device {device}: this machine has {count or 'no'} {kind} device(s) for torch")
    return device


def computing_devices(model: Any) -> tuple[torch.device, ...]:
    """Return the devices that hold a loaded model's weights, that of the embedding first; without stored weights."""
    own = model.get_input_embeddings().weight.device
    return tuple(dict.fromkeys((own, *(weight.device for weight in model.parameters() if not weight.is_meta))))


def place_model(given: str, model: Any, device: str, spread_over_gpus: bool, say: Say) -> Placement | None:
    """Move a model from the CPU to its device, or spread it over all GPUs if the first one is too small and it may be.

    Return the placement of a model that is spread.
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
    """Return the placement over all GPUs, balanced, the rest on the CPU; None if the first GPU holds the model."""
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
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    alone, kinds = torch.nn.ModuleList(layers), list({type(layer).__name__ for layer in layers})
    room: dict[int | str, int] = {**dict(enumerate((memory[0] - rest, *memory[1:]))), _STORED: 2 * sum(sizes)}
    found = infer_auto_device_map(alone, get_balanced_memory(alone, room, kinds), kinds, clean_result=False)
    places = (found[str(number)] for number in range(len(layers)))
    return Placement(gpus[0], tuple(_STORED if place == _STORED else gpus[place] for place in places))


def tensor_bytes(module: Any) -> int:
    """Return the bytes of a module's parameters and buffers; tied ones count once."""
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())


def dispatch(given: str, model: Any, placement: Placement) -> None:
    """Spread a model over devices by accelerate."""
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
    log = logging.getLogger("accelerate")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with quiet():
            dispatch_model(model, device_map, placement.main, skip_keys=list(_CACHES))
    except torch.OutOfMemoryError as error:
        raise CheckpointError(
            f"{given}: does not fit into the memory of {' and '.join(placement.devices)} beside what other processes "
            "use; free some"
        ) from error
    finally:
        log.setLevel(level)


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
