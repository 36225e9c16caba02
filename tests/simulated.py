"""Several devices on a machine without a GPU: tensors that name a device and keep their data on the CPU.

In: code that names devices "cuda:0", "cuda:1", … Out: its results, computed by the CPU's kernels; or `DevicesMixed`
where an operation gets tensors of different devices. Only copies cross devices. This shows where tensors are, and
nothing about a GPU's kernels or memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

MEMORY = 2**30
"""Bytes of each device, unless a test says otherwise."""
_COPIES = ("to", "cpu", "cuda", "copy_", "type_as", "__setitem__", "set_data", "__set__")
"""Functions that copy from one device to another. Assignment to an index only takes numbers from elsewhere."""


class DevicesMixed(RuntimeError):
    """An operation got tensors of different devices."""


class SimulatedTensor(torch.Tensor):
    """A tensor on a simulated device. torch's own code sees a tensor without data."""

    data_on_cpu: torch.Tensor
    place: torch.device

    @staticmethod
    def __new__(cls, data: torch.Tensor, place: torch.device | None = None, requires_grad: bool = False) -> Any:
        if place is None:  # a parameter's type, called with its data, as accelerate does
            return torch.nn.Parameter(data, requires_grad)
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype, device="meta")
        made.data_on_cpu, made.place = data, place
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was not simulated")


class _SimulatedDevices(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@contextmanager
def simulated_devices() -> Iterator[None]:
    """Make the devices "cuda:N" work inside the context."""
    with _SimulatedDevices():
        yield


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    given = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)]
    simulated = [one for one in given if isinstance(one, SimulatedTensor)]
    target = _target(func, args, kwargs)
    with torch._C.DisableTorchFunction():
        name = getattr(func, "__name__", "")
        if name == "__get__" and simulated:
            known = {"device": simulated[0].place, "is_meta": False, "is_cuda": True, "is_cpu": False}
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            if attribute in known:
                return known[attribute]
        if name == "_has_compatible_shallow_copy_type":
            return not places_differ(given)
        if name == "pin_memory":  # needs a real device
            return args[0]
        if name == "numpy" and simulated:
            raise TypeError(f"can't convert {simulated[0].place} device type tensor to numpy")
        places = {one.place for one in simulated}
        # A number without dimensions may be on the CPU, as with real devices; so may an index
        outside = [one for one in given if not isinstance(one, SimulatedTensor) and one.dim()]
        if name not in _COPIES and (len(places) > 1 or (places and outside and name != "__getitem__")):
            raise DevicesMixed(f"{name}: {sorted(map(str, {*places, *(one.device for one in outside)}))}")
        own_args, own_kwargs = tree_map(_data, (args, kwargs))
        if target is not None and target.type == "cuda":
            own_args, own_kwargs = tree_map(_on_cpu, (own_args, own_kwargs))
            if name == "cuda":
                func, own_args = torch.Tensor.to, (own_args[0], "cpu")
        if name == "histc":  # unlike a GPU's, the CPU's has no integers
            own_args = (own_args[0].float(), *own_args[1:])
        out = func(*own_args, **own_kwargs)
        first = args[0] if args else None
        # An operation in place returns its own tensor
        if isinstance(first, SimulatedTensor) and out is own_args[0] and target in (None, first.place):
            return first
        place = target if target is not None else next(iter(places), None)
        if place is None or place.type != "cuda":
            return out.clone() if name in ("to", "cpu") and simulated else out
        if name in ("to", "cuda") and given:
            out = out.clone()
        return tree_map(lambda one: SimulatedTensor(one, place) if isinstance(one, torch.Tensor) else one, out)


def places_differ(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors are of different kinds, so that one cannot take the other's data."""
    return len({type(one) is SimulatedTensor for one in tensors}) > 1


def _target(func: Any, args: Any, kwargs: Any) -> torch.device | None:
    """Return the device that a call names."""
    name = getattr(func, "__name__", "")
    if name == "cpu":
        return torch.device("cpu")
    if name == "cuda":
        return torch.device("cuda", args[1] if len(args) > 1 else 0)
    named = kwargs.get("device")
    if named is None and name == "to" and len(args) > 1:
        named = args[1] if not isinstance(args[1], torch.dtype) else None
        if isinstance(named, torch.Tensor):
            return named.device
    if named is None or name == "__set__":
        return None
    device = torch.device("cuda", named) if isinstance(named, int) else torch.device(named)
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _data(one: Any) -> Any:
    return one.data_on_cpu if isinstance(one, SimulatedTensor) else one


def _on_cpu(one: Any) -> Any:
    """Replace a simulated device."""
    if isinstance(one, torch.device) and one.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(one, str) and one.startswith("cuda") else one


def simulate(monkeypatch: pytest.MonkeyPatch, count: int, memory: Sequence[int] = ()) -> None:
    """Make torch report so many CUDA devices, with so many bytes of memory each."""
    sizes = [*memory, *[MEMORY] * count][:count]
    index = lambda device: torch.device(device).index or 0  # noqa: E731
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=0: (sizes[index(device)], sizes[index(device)]))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=0: "Simulated")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
