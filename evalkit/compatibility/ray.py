"""Ray's private API: its start on this machine.

Ray gives its processes 30 seconds, and starts the server of its dashboard although none is asked for, for which it
waits a minute and then prints the server's log. On a busy machine both are too short.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from evalkit.compatibility.names import replaced

_PORT_SECONDS = "RAY_gcs_server_port_wait_time_s"
_PAUSE = 0.2


@contextmanager
def patient_start(seconds: float) -> Iterator[None]:
    """Let each step of Ray's start within the block take so many seconds, and start no dashboard."""
    from ray._private import services

    def without(_: Any) -> Callable[..., tuple[None, None]]:
        return lambda *_, **__: (None, None)

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

    given = os.environ.get(_PORT_SECONDS)
    os.environ[_PORT_SECONDS] = given or f"{seconds:.0f}"
    try:
        with replaced(services, start_api_server=without, get_node=patient):
            yield
    finally:
        if given is None:
            del os.environ[_PORT_SECONDS]
