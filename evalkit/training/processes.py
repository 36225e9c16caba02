"""The processes of a distributed training: the main one computes, the others wait for its result.

In: a function. Out: its result in every process. The processes wait in a group of their own, whose timeout is longer
than any evaluation: the training's own group would end a training whose other processes wait longer than its timeout.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

Result = TypeVar("Result")

_TIMEOUT = timedelta(days=7)


class Processes:
    """All processes of this training; created by all of them at the same time. A single process needs no group."""

    def __init__(self) -> None:
        self._group: Any = None
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            self._group = distributed.new_group(backend="gloo", timeout=_TIMEOUT)

    @property
    def is_main(self) -> bool:
        """Return whether this is the process that computes."""
        return self._group is None or distributed.get_rank() == 0

    def from_main(self, compute: Callable[[], Result]) -> Result:
        """Compute in the main process and return the result, which is pickled, in all.

        An exception in the main process leaves the others waiting until that process ends.
        """
        found: list[Any] = [compute() if self.is_main else None]
        if self._group is not None:
            distributed.broadcast_object_list(found, src=0, group=self._group, device=torch.device("cpu"))
        result: Result = found[0]
        return result

    def close(self) -> None:
        """Free the group; called by all processes."""
        if self._group is not None and distributed.is_initialized():
            distributed.destroy_process_group(self._group)
        self._group = None
