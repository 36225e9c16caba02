"""Ray's private API: its start on this machine.

Ray gives its processes 30 seconds, and starts the server of its dashboard although none is asked for, for which it
waits a minute and then prints the server's log. On a busy machine both are too short.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from evalkit.compatibility.names import replaced

_PAUSE = 0.2


@contextmanager
def patient_start(seconds: float) -> Iterator[None]:
    """Wait so many seconds for this machine's process if Ray starts it within the block; start no dashboard."""
    from ray._private import services

    def patient(get_node: Callable[..., Any]) -> Callable[..., Any]:
        """Return `get_node`, which raises a `RuntimeError` until this machine's process is there, with patience."""

        def found(*arguments: Any) -> Any:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                try:
                    return get_node(*arguments)
                except RuntimeError:
                    time.sleep(_PAUSE)
            return get_node(*arguments)

        return found

    with replaced(services, start_api_server=lambda _: lambda *_, **__: (None, None), get_node=patient):
        yield
