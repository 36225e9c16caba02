"""A manifest of a run that nothing has computed, and a small run of two tasks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evalkit.benchmarks.run import evaluate
from evalkit.runs.folder import Run, specification_id
from tests.benchmarks.kinds import Lines

SPECIFICATION: dict[str, Any] = {"suite": "zeroshot8", "limit": 5, "dtype": "float32", "checkpoint": {"weights": "0"}}
MANIFEST = {
    "id": specification_id(SPECIFICATION),
    "kind": "longbench",
    "specification": SPECIFICATION,
    "rule": "longbench",
    "groups": {},
    "group_sizes": {},
    "documents": {},
    "template": {"name": "inst"},
    "created": "2026-01-01T00:00:00+00:00",
    "model": "org/name",
    "revision": None,
    "versions": {"evalkit": "0.1.0"},
}
AVERAGE = {"name": "Average", "metric": "accuracy", "unit": "fraction", "higher_is_better": True, "value": 0.5}
RESULT = {"tasks": [], "averages": [AVERAGE | {"stderr": None}]}
Small = Callable[..., Run]


@pytest.fixture
def small(checkpoint: Path, documents: Path, tmp_path: Path) -> Small:
    """Evaluate two tasks in a folder of the test's own; options change or complete the call."""

    def run(**options: Any) -> Run:
        usual: dict[str, Any] = {
            "tasks": ("piqa", "boolq"), "data_dir": documents, "allow_unofficial_data": True,
            "output": tmp_path / "runs", "progress": Lines(),
        }  # fmt: skip
        return evaluate(str(checkpoint), **(usual | options))

    return run
