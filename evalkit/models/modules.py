"""Validate modules for evaluation in memory.

In: a module. Out: the transformers model in it, or an error that says what to do; whether the model is unmodified.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers import PreTrainedModel

from evalkit.compatibility.torch import compiled, hooks_of, is_wrapped_by_accelerate
from evalkit.compatibility.transformers import is_of_gradients
from evalkit.errors import CheckpointError, UsageError
from evalkit.models.locate import DTYPES
from evalkit.models.quiet import quiet

_DEVICES = ("cpu", "cuda", "mps")
_SHARDED = ("FullyShardedDataParallel", "DTensor", "ShardedTensor")
"""Class names of modules and parameters that are sharded over processes."""
_TRAINING = ("training", "gradient_checkpointing")
"""Attributes of modules that change training only."""
_ADAPTED = "peft."
"""Package of adapter modules; some of their settings are not in their tensors."""


def unwrapped(model: Any) -> Any:
    """Return the transformers model inside the wrappers of DDP, DataParallel and torch.compile.

    Raises:
        UsageError: there is no transformers model.
    """
    found = model
    while True:
        if isinstance(found, (DistributedDataParallel, DataParallel)):
            found = found.module
        elif isinstance(found, torch.nn.Module) and (inner := compiled(found)) is not None:
            found = inner
        else:
            break
    if isinstance(found, PreTrainedModel):
        return found
    kind = f"{type(found).__module__}.{type(found).__qualname__}"
    if kind.startswith(_ADAPTED):
        raise UsageError(
            f"model is a {kind}, whose adapter is not merged; evaluate copy.deepcopy(model).merge_and_unload()"
        )
    raise UsageError(
        f"model is a {kind}; expected a checkpoint folder, a hub name, a GGUF file, 'demo', or a "
        "transformers.PreTrainedModel"
    )


def check_module(name: str, module: Any) -> None:
    """Raise unless a model is complete on one device, in one process, in a floating-point dtype.

    Raises:
        CheckpointError: says what the model is instead.
    """
    parts = {type(part).__name__ for part in module.modules()} | {type(one).__name__ for one in module.parameters()}
    if sharded := [kind for kind in _SHARDED if kind in parts] or [
        "DeepSpeed ZeRO-3" for parameter in module.parameters() if hasattr(parameter, "ds_id")
    ]:
        raise CheckpointError(
            f"{name}: is sharded over processes ({sharded[0]}); save the complete model and evaluate its folder"
        )
    if any(type(part).__module__.startswith(_ADAPTED) for part in module.modules()):
        raise CheckpointError(f"{name}: has adapters (peft); evaluate a copy in which they are merged into the weights")
    if getattr(module, "is_quantized", False) or getattr(module.config, "quantization_config", None):
        raise CheckpointError(
            f"{name}: is quantised; quantised models are evaluated from files only; give the checkpoint folder"
        )
    places = list(dict.fromkeys(map(str, getattr(module, "hf_device_map", {}).values())))
    if len(places) > 1 or places == ["disk"]:
        raise CheckpointError(
            f"{name}: is spread over {', '.join(places)} by accelerate; evaluate its checkpoint folder with "
            "device_map='auto', or move the model to one device"
        )
    tensors = [*module.parameters(), *module.buffers()]
    if not tensors or any(tensor.is_meta for tensor in tensors):
        raise CheckpointError(f"{name}: has weights without data (device meta); load them first")
    if len(devices := sorted({str(tensor.device) for tensor in tensors})) > 1:
        raise CheckpointError(f"{name}: is spread over several devices ({', '.join(devices)}); move it to one device")
    if module.device.type not in _DEVICES:
        raise CheckpointError(f"{name}: is on {module.device}; expected {', '.join(_DEVICES)}")
    if str(module.dtype).removeprefix("torch.") not in DTYPES:
        raise CheckpointError(f"{name}: computes in {module.dtype}; expected {', '.join(DTYPES)}")
    if module.get_output_embeddings() is None:
        raise CheckpointError(f"{name}: {type(module).__name__} has no output head; give a causal language model")


def is_stock(module: Any) -> bool:
    """Return whether a model computes what its class computes with its config and state.

    It has the modules that its class builds, with the same scalar attributes, no other `forward` (that of accelerate,
    which only adds autocast, is removed before scoring) and no hooks (but for that of activation checkpointing, which
    changes no number). What differs is not covered by a fingerprint.
    """
    try:
        with quiet(), torch.device("meta"):
            built = type(module)(deepcopy(module.config))
    except Exception:  # a class that takes more than a config
        return False
    return _attributes(built) == _attributes(module) and not any(_is_changed(part) for part in module.modules())


def _is_changed(part: Any) -> bool:
    """Return whether a module has hooks that may change numbers, or another forward."""
    if any(not is_of_gradients(hook) for hook in hooks_of(part)):
        return True
    return "forward" in vars(part) and not is_wrapped_by_accelerate(part)


def _attributes(module: Any) -> dict[str, tuple[type, dict[str, Any]]]:
    """Return each module's class and the scalar attributes that its computation may depend on."""
    return {
        name: (
            type(part),
            {
                key: value
                for key, value in vars(part).items()
                if isinstance(value, (int, float, str, type(None))) and key not in _TRAINING and not key.startswith("_")
            },
        )
        for name, part in module.named_modules()
    }
