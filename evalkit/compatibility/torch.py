"""Uses of torch's private API; works with torch 2.13.0."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from evalkit.compatibility.names import replaced

_COMPILED = "_orig_mod"
_WRAPPED = "_original_forward"
_ON_META = "_evalkit_on_meta"


def uncompiled(module: Any) -> Any:
    """Return the original module of one that `torch.compile` returned; any other module is returned as it is.

    torch documents no way to get it from the compiled module.
    """
    return dict(module.named_children()).get(_COMPILED, module)


def is_wrapped_by_accelerate(module: Any) -> bool:
    """Return whether accelerate has replaced a module's forward by one that runs under autocast."""
    return _WRAPPED in vars(module)


def unsaved_buffers(module: Any) -> Collection[str]:
    """Return the names of a module's own buffers that its state dict leaves out; torch has no public list."""
    names: Collection[str] = module._non_persistent_buffers_set
    return names


@contextmanager
def built_without_parameters() -> Iterator[None]:
    """Build modules on the CPU within the block, as their code does, but for the numbers of their parameters.

    Each parameter moves to the meta device as soon as a module has it. Memory that the code leaves uninitialised holds
    NaN. torch's own way, `torch.device("meta")`, builds buffers and other tensors without numbers too.
    """

    def on_meta(parameter: Any) -> Any:
        if type(parameter) is not torch.nn.Parameter or parameter.is_meta:
            return parameter
        # Modules may share the original parameter
        if (known := vars(parameter).get(_ON_META)) is None:
            known = torch.nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            vars(known).update(vars(parameter))
            setattr(parameter, _ON_META, known)
        return known

    def registering(original: Callable[..., None]) -> Callable[..., None]:
        return lambda module, name, parameter: original(module, name, on_meta(parameter))

    is_deterministic = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    # With deterministic algorithms, torch fills the memory of new tensors
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with replaced(torch.nn.Module, register_parameter=registering), torch.device("cpu"):
            yield
    finally:
        torch.use_deterministic_algorithms(is_deterministic, warn_only=only_warns)


def unwrap_forward(module: Any, keep_autocast: bool = False) -> None:
    """Remove a compiled call and, by default, accelerate's autocast from a module.

    `Module.compile` has no way back, and `accelerate.utils.extract_model_from_parallel` changes the outermost module
    only.
    """
    own = vars(module)
    own.pop("_compiled_call_impl", None)
    if (inner := uncompiled(module)) is not module:
        own["forward"] = inner.__call__
    if not keep_autocast and (original := own.pop(_WRAPPED, None)):
        own["forward"] = original
        if getattr(original, "__func__", None) is type(module).forward:
            del own["forward"]


def hooks_of(module: Any) -> list[Any]:
    """Return the functions that run before and after a module's forward pass, which a copy of its class does not have.

    Public methods register and remove hooks, but none lists them.
    """
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a distributed tensor that this process has; any other tensor is returned as it is."""
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def policies_of(module: Any) -> dict[str, str]:
    """Return the mixed precision of forward passes by name of the module that `fully_shard` has distributed.

    torch has no public way to read a policy.
    """
    parts = {name: part for name, part in module.named_modules() if isinstance(part, FSDPModule)}
    policies = {name: replace(part._get_fsdp_state()._mp_policy, reduce_dtype=None) for name, part in parts.items()}
    return {name: str(policy) for name, policy in policies.items() if policy != MixedPrecisionPolicy()}


def reshard(module: Any) -> None:
    """Give back the gathered weights of modules that `fully_shard` has distributed; others are not changed.

    Before, register what the first forward pass registers, which nobody may remove with the traces of an evaluation.
    """
    if isinstance(module, FSDPModule):
        module._get_fsdp_state()._lazy_init()
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def end_forward(module: Any) -> None:
    """Make distributed modules whose forward pass has raised an exception ready for the next one.

    Their hooks run only after a pass that returns, and torch has no public way to end another one.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            state = part._get_fsdp_state()
            for group in state._fsdp_param_groups:
                group.wait_for_unshard()
                group._training_state = TrainingState.IDLE
            state._training_state, state._state_ctx.iter_forward_root = TrainingState.IDLE, None
            state._modules_to_run_forward.clear()


def compile_for_any_size(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function once for all sizes of its tensors.

    `torch.compile(dynamic=True)` takes sizes that are equal in the first call to be equal in all calls, and compiles
    again when they are not. No public option turns this off.
    """
    from torch.fx.experimental import _config as settings

    function = torch.compile(function, dynamic=True)

    def run(*arguments: Any, **options: Any) -> Any:
        with settings.patch(use_duck_shape=False):  # type: ignore[attr-defined]
            return function(*arguments, **options)

    return run


@cache
def compiled_for(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """Return a function compiled for CUDA; for another type of device the function itself."""
    return compile_for_any_size(function) if device == "cuda" else function


def compilations() -> int:
    """Return how many graphs this process has compiled so far, those compiled again for other sizes included."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


class HeldBytes(TorchDispatchMode):
    """Bytes of tensors that operations inside the context make, at most at a time; no operation's own scratch space.

    A CPU's allocator does not count; the profiler shows the same, but prints on standard error unasked.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak, self._sizes = 0, dict[int, int]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given, made = map(_storages, ((args, kwargs), result))
        for address in made.keys() - given.keys() - self._sizes.keys():
            self._sizes[address] = made[address].nbytes()
            weakref.finalize(made[address], self._sizes.pop, address)
        self.peak = max(self.peak, sum(self._sizes.values()))
        return result


def _storages(values: Any) -> dict[int, torch.UntypedStorage]:
    storages = (value.untyped_storage() for value in tree_leaves(values) if isinstance(value, torch.Tensor))
    return {storage.data_ptr(): storage for storage in storages}
