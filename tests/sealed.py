"""Run folders edited by tests: edited files are sealed again, as if a run had written them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from evalkit.runs.folder import DIGEST, MANIFEST, RESULTS, digest, sealed, specification_id


def read(folder: Path, name: str) -> dict[str, Any]:
    """Return the content of a folder's JSON file, with or without a digest."""
    content = json.loads((folder / name).read_text(encoding="utf-8"))
    return {key: value for key, value in content.items() if key not in (DIGEST, "run", "files")}


def reseal(folder: Path) -> None:
    """Bind manifest, results and tables of a folder to each other, whatever was written into them by hand.

    The id is made from the specification. To be called after any change that is not to be taken for damage.
    """
    manifest = read(folder, MANIFEST)
    manifest["id"] = specification_id(manifest["specification"])
    write(folder, MANIFEST, sealed(manifest))
    if (folder / RESULTS).exists():
        read_back = [*folder.glob("*.parquet"), *folder.glob("lm_eval/*")]
        files = {str(path.relative_to(folder)): digest(path.read_bytes()) for path in read_back}
        files[MANIFEST] = sealed(manifest)[DIGEST]
        write(folder, RESULTS, sealed({"run": manifest["id"], "files": files, **read(folder, RESULTS)}))


def specification(model: str, **others: Any) -> dict[str, Any]:
    """What the specification of every run holds, with other entries; the model's name stands for its weights."""
    return {
        "scoring": 2,
        "versions": {"torch": "2"},
        "checkpoint": {"weights": model},
        "dtype": "float32",
        "attention": "auto",
        "context_extension": None,
        "limit": None,
    } | others


def write_run(
    root: Path, manifest: dict[str, Any], results: dict[str, Any], tables: Mapping[str, pd.DataFrame]
) -> Path:
    """The folder of a finished run with these contents, named after the run's model and id.

    Args:
        root: folder of runs.
        manifest: of the run; its id, kind, date and versions are filled in.
        results: of results.json.
        tables: name of the Parquet file → its content.
    """
    rule, suite = manifest["rule"], manifest["specification"]["suite"]
    scored = "lm_eval" if suite == "lm_eval" else "multiple_choice"
    content = {
        "id": specification_id(manifest["specification"]),
        "kind": rule if rule in ("longbench", "needle") else scored,
        "revision": None,
        "created": "2026-01-01T00:00:00+00:00",
        "versions": {"lm-eval": "0.4.13"},
    } | manifest
    folder = root / f"{content['model'].rpartition('/')[2]}-{content['id']}"
    folder.mkdir(parents=True)
    write(folder, MANIFEST, content)
    write(folder, RESULTS, results)
    for name, table in tables.items():
        table.to_parquet(folder / name, index=False)
    reseal(folder)
    return folder


def write(folder: Path, name: str, content: dict[str, Any]) -> None:
    """Write a JSON file into a folder verbatim."""
    (folder / name).write_text(json.dumps(content), encoding="utf-8")
