"""A run folder to publish: without its journal, and without the paths and names of the machine that computed it.

In: a finished run. Out: its verified files and figures, under the name of its folder. The numbers, and what determines
them, are the same, and so is the run's id. The manifest keeps the last part of a path (`paths.py`), and its digest is
renewed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from evalkit.export.paths import without_folders
from evalkit.runs.folder import MANIFEST, RESULTS, Run
from evalkit.runs.seal import content_digest, digest, json_bytes, sealed

_AS_IT_IS = ("specification", "template")
"""Parts of the manifest that determine the numbers, or what they mean."""
_FIGURES = (".png", ".pdf", ".svg")


def published_files(run: Run) -> dict[str, bytes]:
    """Return the files of a run to publish: name, with the run's folder → content.

    Raises:
        RunError: the run is not finished, or a file is missing or damaged.
    """
    manifest = _manifest(run.manifest)
    found = {name: _content(run, name) for name in sorted(run.files) if name != MANIFEST}
    digests = {name: digest(content) for name, content in found.items()} | {MANIFEST: content_digest(manifest)}
    found |= {path.name: path.read_bytes() for path in sorted(run.folder.iterdir()) if path.suffix in _FIGURES}
    found |= {MANIFEST: _sealed_text(manifest)}
    found |= {RESULTS: _sealed_text({"run": run.manifest["id"], "files": digests, **run.stored})}
    return {f"{run.folder.name}/{name}": content for name, content in found.items()}


def _content(run: Run, name: str) -> bytes:
    """Return a verified file; lm-eval's results, which name the checkpoint, without paths."""
    content = run.read(name)
    return json_bytes(without_folders(json.loads(content)), indent=2) + b"\n" if name.endswith(".json") else content


def _sealed_text(content: Mapping[str, Any]) -> bytes:
    return json_bytes(sealed(content), indent=2) + b"\n"


def _manifest(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest without paths and names of the machine, as plain data."""
    plain: dict[str, Any] = json.loads(json_bytes(manifest))
    found: dict[str, Any] = without_folders(plain) | {name: plain[name] for name in _AS_IT_IS if name in plain}
    if isinstance(hardware := found.get("hardware"), dict) and "system" in hardware:
        hardware["system"] = str(hardware["system"]).partition("-")[0]
    for device in found.get("devices", ()):
        device["host"] = ""
    if found.get("path") is not None:
        found["path"] = found["model"]  # as it was given, from which several checkpoints of one name are distinguished
    if isinstance(command := found.get("command"), list) and command:
        found["command"] = ["evalkit", *command[1:]]
    return found
