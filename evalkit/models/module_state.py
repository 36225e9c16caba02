"""The state of a module in memory: whether it is stock, its digests, and how an evaluation leaves it unchanged.

In: a `torch.nn.Module`, sharded or not. Out: a digest of its modules and tensors, or of the files that it would be
saved as; and a context at whose end the module and every random number generator are as before.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from copy import copy, deepcopy
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, TypeAlias

import numpy as np
import safetensors.torch
import torch
import xxhash
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from evalkit.compatibility.torch import (
    hooks_of,
    is_wrapped_by_accelerate,
    reshard,
    shard_of,
    uncompiled,
    unsaved_buffers,
)
from evalkit.compatibility.transformers import changes_no_number, quiet, saving_weights_with
from evalkit.models.loading.fingerprint import stable

_TRAINING = ("training", "gradient_checkpointing")
_STATE = ("_parameters", "_buffers", "_modules")
_KNOWN = ("torch.", "evalkit.")
"""Beginnings of the modules' names of classes whose code is not hashed."""
_LIBRARIES = sys.stdlib_module_names | {"torch", "transformers", "evalkit", "accelerate"}
"""Packages whose functions are classes' own or decorate them."""
_INTEGRATIONS = "transformers.integrations."
"""Beginning of the modules' names whose decorators add methods to classes."""
_MODELS = "transformers.models."
_NAMES = ("name_or_path",)
_Container: TypeAlias = dict[Any, Any] | list[Any] | set[Any]


def class_of(module: Any) -> type:
    """Return the class of a module that may be compiled, or sharded by a class that derives from it."""
    return next(kind for kind in type(uncompiled(module)).__mro__ if not issubclass(kind, FSDPModule))


def is_stock(module: Any) -> bool:
    """Return whether a model computes what its class computes with its config and state.

    It has the modules that its class builds, with the same scalar attributes, no other `forward` (that of accelerate,
    which only adds autocast, is removed before scoring) and no hooks (but for those of transformers that
    change no number). What differs is not covered by a fingerprint.
    """
    for part in module.modules():
        if not all(map(changes_no_number, hooks_of(part))) or (
            "forward" in vars(part) and not is_wrapped_by_accelerate(part)
        ):
            return False
    try:
        with quiet(), torch.device("meta"):
            built = type(module)(_config_when_built(module))
    except Exception:  # a class that takes more than a config
        return False
    return _attributes(built) == _attributes(module)


def _config_when_built(module: Any) -> Any:
    """Return a model's config with the padding token that it was built with.

    Trainer sets the tokenizer's in the config of the model. It changes no number of a causal model, but stands in the
    attributes of modules that are built later.
    """
    config = deepcopy(module.config)
    config.get_text_config().pad_token_id = getattr(module.get_input_embeddings(), "padding_idx", None)
    return config


def _attributes(module: Any) -> dict[str, tuple[type, dict[str, Any]]]:

    def scalars(part: Any) -> dict[str, Any]:
        return {
            key: value for key, value in _public(vars(part)).items() if isinstance(value, (int, float, str, type(None)))
        }

    return {name: (type(part), scalars(part)) for name, part in module.named_modules()}


def attributes_digest(module: Any) -> str:
    """Hash the public attributes of all modules: numbers, texts, tensors, and what contains these, such as configs."""
    return _digest_of({name: _public(vars(part), _NAMES) for name, part in module.named_modules()})


def _digest_of(content: Any) -> str:
    seen = set[int]()

    def text(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return content_digest(value)
        if isinstance(value, (np.ndarray, np.generic)):
            return f"{value.dtype} {value.shape} {hashlib.sha256(np.asarray(value).tobytes()).hexdigest()}"
        if isinstance(value, PreTrainedConfig):
            return text(stable(value.to_dict()))
        if isinstance(value, Mapping):
            return f"{{{', '.join(sorted(f'{text(key)}: {text(part)}' for key, part in value.items()))}}}"
        if isinstance(value, (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype)):
            return repr(value)
        if isinstance(value, Set):
            return f"{{{', '.join(sorted(map(text, value)))}}}"
        if isinstance(value, Sequence):
            return f"[{', '.join(map(text, value))}]"
        if isinstance(value, partial):
            return text([value.func, value.args, value.keywords])
        if isinstance(value, CodeType):
            return text([value.co_code, value.co_names, value.co_consts])
        if isinstance(value, FunctionType) and id(value) not in seen and _is_foreign(value):
            seen.add(id(value))
            return f"{value.__qualname__} {text(_parts_of(value))}"
        # An object may be the attribute of many modules, and refer to itself; modules are listed by themselves
        content = {} if isinstance(value, torch.nn.Module) or id(value) in seen else getattr(value, "__dict__", {})
        seen.add(id(value))
        name = getattr(value, "__qualname__", type(value).__qualname__)
        return name if isinstance(value, type) else f"{name} {text(_public(content, _NAMES))}"

    return hashlib.sha256(text(content).encode("utf-8", "surrogateescape")).hexdigest()


def _public(attributes: Mapping[str, Any], without: Sequence[str] = ()) -> dict[str, Any]:
    """Return the public attributes of a module or an object but those of its training."""
    hidden = (*_TRAINING, *without)
    return {key: value for key, value in attributes.items() if key not in hidden and not key.startswith("_")}


def unsaved_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return, by name, the tensors of a model that are not saved with it.

    These are buffers, and tensors in attributes of its modules: in containers, in modules that are no submodules, and
    in other objects of the model's own code. Tensors that a hook sets before each forward pass are left out, and those
    that are a parameter or a saved buffer.
    """
    package = _package(model)
    saved = model.state_dict(keep_vars=True)
    identities = {id(tensor) for tensor in saved.values()}
    tensors = dict[str, torch.Tensor]()
    seen = set[int]()

    def collect(value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        elif id(value) not in seen:
            seen.add(id(value))
            for key, part in parts_of(value):
                collect(part, name if key in _STATE else f"{name}.{key}".removeprefix("."))

    def parts_of(value: Any) -> list[tuple[Any, Any]]:
        if isinstance(value, Mapping):
            return list(value.items())
        if isinstance(value, (list, tuple)):
            return list(enumerate(value))
        if isinstance(value, torch.nn.Module):
            is_set = bool(hooks_of(value))
            attributes = vars(value).items()
            return [(key, part) for key, part in attributes if not (is_set and isinstance(part, torch.Tensor))]
        return list(vars(value).items()) if _package(value) == package and hasattr(value, "__dict__") else []

    collect(model, "")
    return {name: tensor for name, tensor in tensors.items() if name not in saved and id(tensor) not in identities}


def _package(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


@contextmanager
def preserved(model: Any, autocast: bool = False) -> Iterator[None]:
    """Compute without gradients and autocast; restore a model and every random number generator at the end.

    With `autocast`, it stays as it is, without its copies of weights, which may be those of an earlier step. Gathered
    weights of a sharded model are given back, before and at the end.

    Restored are the attributes of every module (training mode, hooks, parameters, buffers and submodules by identity,
    a `forward` of its own), the numbers in its buffers, and its configs. The numbers in its parameters and their
    gradients are not: an evaluation does not change them.
    """
    reshard(model)
    torch.clear_autocast_cache()
    containers: list[tuple[Any, Any]] = [(container, copy(container)) for container in _containers(model)]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    python, numpy = random.getstate(), np.random.get_state()
    mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=list(devices)), torch.no_grad(), ExitStack() as stack:
        for kind in () if autocast else ("cpu", next(model.parameters()).device.type):
            stack.enter_context(torch.autocast(kind, enabled=False))
        try:
            yield
        finally:
            reshard(model)
            torch.clear_autocast_cache()
            for container, before in containers:
                # In place, because handles of hooks refer to the container
                if isinstance(container, list):
                    container[:] = before
                else:
                    if list(container) != list(before):  # never empty meanwhile otherwise, should an interrupt come
                        container.clear()
                    container.update(before)
            for buffer, number in buffers:
                if not torch.equal(buffer, number):
                    buffer.copy_(number)
            random.setstate(python)
            np.random.set_state(numpy)
            if mps is not None:
                torch.mps.set_rng_state(mps)


def _containers(model: Any) -> Iterator[_Container]:
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


def saved_weights(module: Any, folder: Path) -> tuple[tuple[str, str], ...]:
    """Return the names and SHA-256 of the weight files that `save_pretrained` would write, without writing them.

    They identify a stock model as its saved checkpoint is identified. Empty if the checkpoint would not be loaded as
    this model, because of another class or changed buffers that are not saved; or if the model cannot be saved.
    """
    digests = dict[str, str]()

    def save(tensors: dict[str, torch.Tensor], path: str, metadata: dict[str, str]) -> None:
        digests[Path(path).name] = _safetensors_digest(tensors, metadata)

    try:
        with quiet(), torch.device("meta"):
            loaded = type(AutoModelForCausalLM.from_config(module.config, trust_remote_code=False))
        buffers = (
            (built, getattr(part, name))
            for part in module.modules()
            if (names := unsaved_buffers(part))
            for name, built in type(part)(part.config).named_buffers(recurse=False)
            if name in names
        )
        if loaded is not type(module) or not all(torch.equal(built, own.cpu()) for built, own in buffers):
            return ()
        with quiet(), saving_weights_with(save):
            module.save_pretrained(folder)
    except Exception:  # modules that take more than a config, settings that transformers does not save
        return ()
    return tuple(sorted(digests.items()))


def _safetensors_digest(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> str:
    """Return the SHA-256 of the safetensors file of some tensors.

    Its header, which determines the order of the tensors, is that of a file with one number of each, with other shapes.
    """
    small = safetensors.torch.save({name: tensors[name].new_empty(1, device="cpu") for name in tensors}, metadata)
    header, end = json.loads(small[8 : 8 + int.from_bytes(small[:8], "little")]), 0
    names = [name for name in header if name in tensors]
    for name in names:
        header[name] |= {"shape": list(tensors[name].shape), "data_offsets": [end, end + tensors[name].nbytes]}
        end += tensors[name].nbytes
    encoded = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    digest = hashlib.sha256(len(encoded).to_bytes(8, "little") + encoded)
    for name in names:
        digest.update(tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def state_digest(model: torch.nn.Module) -> str:
    """Hash a model's modules, parameters and buffers; of a sharded one, the shards of this process.

    The class and the code of each module are included: another one computes something else with the same tensors.
    Buffers are included whether or not they are saved with a checkpoint, and tied tensors under each of their names.
    """
    reshard(model)
    digest = hashlib.sha256()
    for name, module in sorted(model.named_modules()):
        kind = class_of(module)
        digest.update(f"module\t{name}\t{kind.__module__}.{kind.__qualname__}\n".encode())
        for base in kind.__mro__:
            digest.update(_source_of(base))
    if changed := changed_code(map(class_of, model.modules())):
        digest.update(f"code\t{_digest_of(changed)}\n".encode())
    parameters, buffers = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    for name, tensor in sorted((*parameters, *buffers), key=lambda entry: entry[0]):
        digest.update(f"tensor\t{name}\t{content_digest(tensor)}\n".encode())
    return digest.hexdigest()


def changed_code(kinds: Iterable[type]) -> dict[str, Any]:
    """Return, by name, the code with which modules of some classes compute that is not their library's.

    These are functions of classes outside of torch and transformers; and functions and classes that this process has
    put in place of a library's own: methods, functions of the modules that define models, attention functions.
    """
    bases = dict.fromkeys(base for kind in kinds for base in kind.__mro__ if base not in PreTrainedModel.__mro__)
    changed = dict[str, Any]()
    for base in bases:
        for name, value in vars(base).items():
            function = _function_of(value)
            if isinstance(function, FunctionType) and not _is_method_of(base, function):
                changed[f"{base.__module__}.{base.__qualname__}.{name}"] = function
    for module in dict.fromkeys(base.__module__ for base in bases):
        if module.startswith(_MODELS):
            for name, value in vars(sys.modules[module]).items():
                is_code = isinstance(value, (type, FunctionType))
                if is_code and (value.__name__ != name or _is_foreign(value)):
                    changed[f"{module}.{name}"] = value
    functions = dict(ALL_ATTENTION_FUNCTIONS) | vars(torch.nn.functional)
    for name in ("eager", "sdpa", "scaled_dot_product_attention", "softmax"):
        if callable(value := functions.get(name)) and _is_foreign(value):
            changed[name] = value
    return changed


def _function_of(attribute: Any) -> Any:
    """Return the function of a static or class method, of a property, or of part of a function's arguments."""
    for name in ("__func__", "fget", "func"):
        attribute = getattr(attribute, name, None) or attribute
    return attribute


def _wrapped(value: Any) -> Iterator[Any]:
    """Yield a decorated function, and each function inside."""
    while value is not None:
        yield value
        value = getattr(value, "__wrapped__", None)


def _is_foreign(value: Any) -> bool:
    """Return whether a function, one inside, or a class is defined outside of the libraries.

    The name of a function's module may be that of a function that it wraps; its globals are always its own.
    """
    modules = [getattr(part, "__globals__", {}).get("__name__", part.__module__) for part in _wrapped(value)]
    return any(str(module).partition(".")[0] not in _LIBRARIES for module in modules)


def _is_method_of(kind: type, function: Any) -> bool:
    *_, inner = _wrapped(function)
    if _is_foreign(function) or not isinstance(inner, FunctionType):
        return False
    module = str(inner.__globals__["__name__"])
    is_own = module == kind.__module__ and inner.__code__.co_qualname.startswith(f"{kind.__qualname__}.")
    return is_own or module.startswith(_INTEGRATIONS)


def _parts_of(function: FunctionType) -> list[Any]:
    """Return what a function computes with: its code, defaults, enclosed values and global numbers and functions."""
    enclosed = list[Any]()
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # not yet assigned
            enclosed.append(cell.cell_contents)
    known = function.__globals__
    names = (name for name in function.__code__.co_names if name in known)
    others = {name: known[name] for name in names if not isinstance(known[name], type)}
    modules = {name: value for name, value in others.items() if inspect.ismodule(value)}
    for name in modules:
        others[name] = name
    return [function.__code__, function.__defaults__, function.__kwdefaults__, enclosed, others]


@cache
def _source_of(kind: type) -> bytes:
    """Return the source of a class at the first evaluation: its file may be edited while a training runs."""
    with suppress(OSError, TypeError):  # a class that was made at a prompt
        return b"" if kind.__module__.startswith(_KNOWN) else inspect.getsource(kind).encode()
    return b""


def content_digest(tensor: torch.Tensor) -> str:
    # A copy: storage that numpy has seen cannot be resized, which sharding does
    own = shard_of(tensor.detach()).to("cpu", copy=True)
    content = xxhash.xxh3_128(own.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return f"{tensor.dtype}\t{tuple(tensor.shape)}\t{content.hexdigest()}"
