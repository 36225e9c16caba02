"""Validate modules for evaluation in memory, preserve and hash their state.

In: a module. Out: the transformers model in it, or an error that says what to do; whether the model is unmodified.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from typing import Any, TypeAlias

import numpy as np
import torch
import xxhash
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from evalkit.compatibility.torch import compiled, hooks_of, is_wrapped_by_accelerate
from evalkit.compatibility.transformers import is_of_gradients, quiet
from evalkit.errors import CheckpointError, UsageError
from evalkit.models.loading.locate import DTYPES

_DEVICES = ("cpu", "cuda", "mps")
_SHARDED = {"FullyShardedDataParallel", "DTensor", "ShardedTensor"}
"""Class names of modules and parameters that are sharded over processes."""
_ADAPTED = "peft."
"""Package of adapter modules; some of their settings are not in their tensors."""
_TRAINING = ("training", "gradient_checkpointing")
"""Attributes of modules that change training only."""
_CHUNK = 2**24
"""Numbers of a tensor that are hashed at a time."""
_Container: TypeAlias = dict[Any, Any] | list[Any] | set[Any]


def unwrapped(model: Any) -> Any:
    """Return the transformers model inside the wrappers of DDP, DataParallel and torch.compile, else raise."""
    if isinstance(model, PreTrainedModel):
        return model
    if isinstance(model, (DistributedDataParallel, DataParallel)):
        return unwrapped(model.module)
    if isinstance(model, torch.nn.Module) and (inner := compiled(model)) is not None:
        return unwrapped(inner)
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    expected = "expected a checkpoint folder, a hub name, a GGUF file, 'demo', or a transformers.PreTrainedModel"
    if kind.startswith(_ADAPTED):
        expected = "its adapter is not merged; evaluate copy.deepcopy(model).merge_and_unload()"
    raise UsageError(f"model is a {kind}; {expected}")


def check_module(name: str, module: Any) -> None:
    """Raise a `CheckpointError` unless a model is complete on one device, in one process, in a floating-point dtype."""
    if why := _why_unsupported(module):
        raise CheckpointError(f"{name}: {why}")


def _why_unsupported(module: Any) -> str:
    parts, parameters = list(module.modules()), list(module.parameters())
    kinds = {type(part).__name__ for part in (*parts, *parameters)}
    sharded = kinds & _SHARDED or {"DeepSpeed ZeRO-3" for parameter in parameters if hasattr(parameter, "ds_id")}
    if sharded:
        return f"is sharded over processes ({min(sharded)}); save the complete model and evaluate its folder"
    if any(type(part).__module__.startswith(_ADAPTED) for part in parts):
        return "has adapters (peft); evaluate a copy in which they are merged into the weights"
    if getattr(module, "is_quantized", False) or getattr(module.config, "quantization_config", None):
        return "is quantised; quantised models are evaluated from files only; give the checkpoint folder"
    tensors = [*parameters, *module.buffers()]
    hooked = {str(device) for device in getattr(module, "hf_device_map", {}).values()}
    devices = sorted(hooked if len(hooked) > 1 or hooked == {"disk"} else {str(tensor.device) for tensor in tensors})
    if not devices or "meta" in devices:
        return "has weights without data (device meta); load them first"
    if len(devices) > 1:
        return (
            f"is spread over several devices ({', '.join(devices)}); evaluate its checkpoint folder with "
            "device_map='auto', or move the model to one device"
        )
    if devices[0].partition(":")[0] not in _DEVICES:
        return f"is on {devices[0]}; expected {', '.join(_DEVICES)}"
    if str(module.dtype).removeprefix("torch.") not in DTYPES:
        return f"computes in {module.dtype}; expected {', '.join(DTYPES)}"
    if module.get_output_embeddings() is None:
        return f"{type(module).__name__} has no output head; give a causal language model"
    return ""


def is_stock(module: Any) -> bool:
    """Return whether a model computes what its class computes with its config and state.

    It has the modules that its class builds, with the same scalar attributes, no other `forward` (that of accelerate,
    which only adds autocast, is removed before scoring) and no hooks (but for that of activation checkpointing, which
    changes no number). What differs is not covered by a fingerprint.
    """
    for part in module.modules():
        if not all(map(is_of_gradients, hooks_of(part))) or (
            "forward" in vars(part) and not is_wrapped_by_accelerate(part)
        ):
            return False
    try:
        with quiet(), torch.device("meta"):
            built = type(module)(deepcopy(module.config))
    except Exception:  # a class that takes more than a config
        return False
    return _attributes(built) == _attributes(module)


def _attributes(module: Any) -> dict[str, tuple[type, dict[str, Any]]]:
    """Return each module's class and the scalar attributes that its computation may depend on."""

    def scalars(part: Any) -> dict[str, Any]:
        return {
            key: value
            for key, value in vars(part).items()
            if isinstance(value, (int, float, str, type(None))) and key not in _TRAINING and not key.startswith("_")
        }

    return {name: (type(part), scalars(part)) for name, part in module.named_modules()}


@contextmanager
def preserved(model: Any) -> Iterator[None]:
    """Compute without gradients and autocast; restore a model and every random number generator at the end.

    Restored are the attributes of every module (training mode, hooks, parameters, buffers and submodules by identity,
    a `forward` of its own), the numbers in its buffers, and its configs. The numbers in its parameters and their
    gradients are not: an evaluation does not change them.
    """
    containers = [(container, copy(container)) for container in _containers(model)]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    python, numpy = random.getstate(), np.random.get_state()
    mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    without_autocast = torch.autocast("cpu", enabled=False), torch.autocast(model.device.type, enabled=False)
    with torch.random.fork_rng(devices=list(devices)), torch.no_grad(), without_autocast[0], without_autocast[1]:
        try:
            yield
        finally:
            for container, before in containers:
                _restore(container, before)
            for buffer, number in buffers:
                if not torch.equal(buffer, number):
                    buffer.copy_(number)
            random.setstate(python)
            np.random.set_state(numpy)
            if mps is not None:
                torch.mps.set_rng_state(mps)


def _containers(model: Any) -> Iterator[_Container]:
    """Yield all dicts, lists and sets of a model's state, each once."""
    seen: set[int] = set()
    todo: list[Any] = [vars(module) for module in model.modules()]
    while todo:
        container = todo.pop()
        if id(container) in seen:
            continue
        seen.add(id(container))
        yield container
        for value in container.values() if isinstance(container, dict) else container:
            if isinstance(value, (PreTrainedConfig, GenerationConfig)):
                todo.append(vars(value))
            elif isinstance(value, (dict, list, set)):
                todo.append(value)


def _restore(container: Any, before: Any) -> None:
    """Restore a container's content in place, because handles of hooks refer to the container."""
    if isinstance(container, list):
        container[:] = before
    elif isinstance(container, dict) and list(container) == list(before):
        # Never empty meanwhile, should an interrupt come
        container.update(before)
    else:
        container.clear()
        container.update(before)


def state_digest(model: torch.nn.Module) -> str:
    """Hash a model's modules, parameters and buffers.

    The class of each module is included, because a replaced module computes something else with the same tensors.
    Buffers are included whether or not they are saved with a checkpoint, and tied tensors under each of their names.
    """
    digest = hashlib.sha256()
    for name, module in sorted(model.named_modules()):
        kind = type(module)
        digest.update(f"module\t{name}\t{kind.__module__}.{kind.__qualname__}\n".encode())
    known: dict[tuple[object, ...], str] = {}
    parameters, buffers = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    for name, tensor in sorted((*parameters, *buffers), key=lambda entry: entry[0]):
        # Tied tensors share memory
        memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if memory not in known or not tensor.numel():
            known[memory] = _content_digest(tensor)
        digest.update(f"tensor\t{name}\t{tensor.dtype}\t{tuple(tensor.shape)}\t{known[memory]}\n".encode())
    return digest.hexdigest()


def _content_digest(tensor: torch.Tensor) -> str:
    digest = xxhash.xxh3_128()
    # A view, unless the tensor is not contiguous
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        chunk = flat[start : start + _CHUNK].cpu().contiguous()
        digest.update(chunk.view(torch.uint8).numpy().data)
    return digest.hexdigest()
