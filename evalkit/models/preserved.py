"""A model of somebody else's during an evaluation, and as it was after it.

In: a model that somebody else goes on with, such as a trainer. While the context lasts it may be put into evaluation
mode, run, and given another attention implementation; at the end all of its modules, its configs and the generators of
random numbers are in the state that they were in.
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
    """Restore a model, and every generator of random numbers, at the end.

    Restored are the attributes of every module (training mode, hooks, parameters, buffers and submodules by identity,
    a `forward` of its own), the numbers in its buffers, and its configs. The numbers in its parameters and their
    gradients are not: an evaluation does not change them.

    Args:
        model: a transformers model.
    """
    containers = [(one, copy(one)) for one in _containers(model)]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with _same_random_numbers():
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
def computing_plainly(device: str) -> Iterator[None]:
    """Compute without gradients and in the dtype of the weights, whatever the caller's context."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for kind in {"cpu", torch.device(device).type}:
            if torch.amp.is_autocast_available(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _containers(model: Any) -> Iterator[_Container]:
    """All dicts, lists and sets that a model's state consists of, each once."""
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
    """Give a container its content back; itself, since handles of hooks refer to it."""
    container.clear()
    if isinstance(container, list):
        container.extend(before)
    else:
        container.update(before)


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Have Python, NumPy and torch go on with the random numbers that they would have drawn."""
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
