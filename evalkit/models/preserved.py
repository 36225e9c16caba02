"""Restore the state of a user's model after an evaluation.

In: a model that is used afterwards, for example by a trainer. Within the context it may be set to evaluation mode, run,
and given another attention implementation. Out: at the end, its modules, its configs and all random number generators
have their earlier state.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import Any, TypeAlias

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedConfig

_Container: TypeAlias = dict[Any, Any] | list[Any] | set[Any]


@contextmanager
def preserved(model: Any) -> Iterator[None]:
    """Restore a model and every random number generator at the end.

    Restored are the attributes of every module (training mode, hooks, parameters, buffers and submodules by identity,
    a `forward` of its own), the numbers in its buffers, and its configs. The numbers in its parameters and their
    gradients are not: an evaluation does not change them.

    Args:
        model: a transformers model.
    """
    containers = [(one, copy(one)) for one in _containers(model)]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with _preserved_random_state():
        try:
            yield
        finally:
            for container, before in containers:
                _restore(container, before)
            with torch.no_grad():
                for buffer, number in buffers:
                    if not torch.equal(buffer, number):
                        buffer.copy_(number)


@contextmanager
def without_grad_or_autocast(device: str) -> Iterator[None]:
    """Disable gradients and autocast, whatever the caller's context."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for kind in {"cpu", torch.device(device).type}:
            if torch.amp.is_autocast_available(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _containers(model: Any) -> Iterator[_Container]:
    """Yield all dicts, lists and sets of a model's state, each once."""
    seen: set[int] = set()
    todo: list[Any] = [vars(module) for module in model.modules()]
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        for value in one.values() if isinstance(one, dict) else one:
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


@contextmanager
def _preserved_random_state() -> Iterator[None]:
    """Restore the random number generators of Python, NumPy and torch at the end."""
    python, numpy = random.getstate(), np.random.get_state()
    mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            if mps is not None:
                torch.mps.set_rng_state(mps)
