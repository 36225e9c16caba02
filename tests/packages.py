"""Installed packages as pip leaves them: metadata with entry points, in a folder on the path."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def install(folder: Path, name: str, groups: Mapping[str, Mapping[str, str]]) -> None:
    """Write a package's metadata, or write it anew.

    Args:
        folder: where packages are installed.
        name: of the package.
        groups: group of entry points → name → object, as "module:object".
    """
    about = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in named.items()) for group, named in groups.items()]
    (about / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
