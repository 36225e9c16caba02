"""Finished runs as if of other models or settings, and files of layouts and mappings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from evalkit.models.zoo.named import named_model
from evalkit.models.zoo.shapes import parameters, shape_facts
from evalkit.reporting.table import Table
from evalkit.runs.folder import RESULTS, Run, specification_id
from tests.sealed import reseal


def written(path: Path, **content: Any) -> str:
    """A YAML file."""
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return str(path)


def mapped(folder: Path, **content: Any) -> Path:
    """A mapping of rows to runs."""
    return Path(written(folder / "mapping.yaml", **content))


def altered(
    run: Run, folder: Path, shift: float = 0.0, manifest: dict[str, Any] | None = None, **specification: Any
) -> str:
    """A copy of a run of another specification, its accuracies higher by `shift`; the path as a user writes it."""
    shutil.copytree(run.folder, folder)
    content = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    content["specification"] |= {"checkpoint": {"weights": folder.name}} | specification
    content |= {"id": specification_id(content["specification"])} | (manifest or {})
    (folder / "manifest.json").write_text(json.dumps(content), encoding="utf-8")
    results = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    for scored in results["rules"].values():
        for task in scored["tasks"]:
            task["value"] = min(1.0, task["value"] + shift)
    (folder / RESULTS).write_text(json.dumps(results), encoding="utf-8")
    reseal(folder)
    return str(folder)


def loaded(name: str, **changes: object) -> dict[str, Any]:
    """A manifest's entry of a named model with changed sizes."""
    model = named_model(name)
    facts = shape_facts(model.config) or {}
    return {"parameters": parameters(model.shape).total, "architecture": "Some", "shape": facts | changes}


def lines(table: Table) -> dict[str, list[str]]:
    return {line.key: [cell.value for cell in line.cells] for line in table.lines}
