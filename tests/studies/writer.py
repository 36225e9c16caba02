"""A process that writes a checkpoint slowly: `python writer.py SOURCE TARGET HOW SECONDS`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

CHUNK = 1 << 15


def main(source: Path, target: Path, how: str, seconds: float) -> None:
    """Copy a checkpoint's files in pieces.

    Args:
        source: a complete checkpoint.
        target: the folder that is watched for.
        how: "saved" (config, weights, index, tokenizer), "copied" (by name), "reserved" (each file has its full size
            before its content), "renamed" (under a temporary name), or "backwards" (the config last).
        seconds: between two pieces.
    """
    folder = target.with_name(f"tmp-{target.name}") if how == "renamed" else target
    folder.mkdir()
    files = sorted(source.iterdir())
    if how == "saved":
        files.sort(key=lambda path: (path.name != "config.json", "index" in path.name, path.name.startswith("tok")))
    if how == "backwards":
        files.reverse()
    for path in files:
        content = path.read_bytes()
        with (folder / path.name).open("wb") as file:
            if how == "reserved":
                file.truncate(len(content))
            for start in range(0, len(content), CHUNK):
                file.write(content[start : start + CHUNK])
                file.flush()
                print(path.name, flush=True)
                time.sleep(seconds)
    if how == "renamed":
        folder.rename(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
