"""The start of Ray on a busy machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from evalkit.compatibility.ray import patient_start
from evalkit.errors import EvalkitError
from evalkit.studies.cluster.connection import connected

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore")
SLOW = "The current node timed out during startup.\nThis could happen because the GCS has become overloaded."
"""What Ray raises as a plain exception."""


def test_a_slow_start_is_waited_for_without_a_dashboard(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import services

    def answers() -> Iterator[dict[str, int]]:
        yield {}
        yield {}
        yield {"node_manager_port": 1}

    coming = answers()

    def get_node(*_: Any) -> dict[str, int]:
        if not (node := next(coming, {})):
            raise RuntimeError("not registered")
        return node

    monkeypatch.setattr(services, "get_node", get_node)
    with patient_start(5.0):
        assert services.get_node("address", "id") == {"node_manager_port": 1}
        assert services.start_api_server(False, False, "host") == (None, None)
    with patient_start(0.1), pytest.raises(RuntimeError):
        services.get_node("address", "id")
    assert services.get_node is get_node


@pytest.mark.parametrize("error", [Exception(SLOW), RuntimeError("no port"), AssertionError(), OSError(28, "full")])
def test_a_start_that_fails_is_one_line_with_the_way_without_ray(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, during = dict(os.environ), dict[str, str]()

    def init(**_: Any) -> None:
        during.update(os.environ)
        raise error

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(EvalkitError, match="--wait") as raised, connected(None):
        pass
    assert "\n" not in str(raised.value)
    assert "300" in {during[name] for name in during.keys() - before.keys()}
