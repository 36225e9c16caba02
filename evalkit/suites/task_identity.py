"""Identity and provenance of lm-eval's tasks: hashes of what determines a task's numbers, and lm-eval's seeds."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from evalkit.data import Library
from evalkit.errors import DataError, reading_as
from evalkit.inputs.reading import MOST_BYTES, read_bytes
from evalkit.suites.lm_eval_tasks import quiet_lm_eval

SEEDS = {"random": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234}
"""lm-eval's default seeds."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""The memory address in the repr of a function, which differs in every process."""


def set_seeds() -> None:
    """Set seeds as in `lm_eval.simple_evaluate`, before tasks are loaded; each generated text has its own seed."""
    import numpy as np

    random.seed(SEEDS["random"])
    np.random.seed(SEEDS["numpy"])


def task_specification(task: Any, limit: int | None) -> dict[str, Any]:
    """Return what determines a task's numbers: output type, version, and hashes of config, documents and examples."""
    with quiet_lm_eval():
        documents = [doc for _, doc in task.doc_iterator(rank=0, limit=limit, world_size=1)]
        config = task.dump_config()
    # The location of the task file does not matter
    config["metadata"] = {k: v for k, v in (config.get("metadata") or {}).items() if k != "config_source"}
    shots = task.config.num_fewshot or 0
    return {
        "output_type": task.OUTPUT_TYPE,
        "version": task.VERSION,
        "num_fewshot": shots,
        "config": digest_of([config]),
        "documents": digest_of(documents),
        "examples": digest_of(task.sampler.df) if shots and hasattr(task, "sampler") else None,
    }


def digest_of(things: Iterable[Any]) -> str:
    """Return the SHA-256 of things as JSON; values without a JSON form enter as `str`, without memory addresses."""
    digest = hashlib.sha256()
    for thing in things:
        text = json.dumps(thing, sort_keys=True, ensure_ascii=False, default=str)
        digest.update(_ADDRESS.sub("", text).encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()


def code_hash(folder: Path) -> str:
    """Return a hash of the Python files in a folder of task files, whose imports a task's config does not show."""
    hashed: list[Sequence[str]] = []
    for path in sorted(path for path in folder.rglob("*.py") if path.is_file()):
        with reading_as(path, "Python code", DataError):
            text = read_bytes(path, MOST_BYTES).decode("utf-8", "replace")
        # Line ends as Python reads source files
        hashed.append([path.relative_to(folder).as_posix(), text.replace("\r\n", "\n").replace("\r", "\n")])
    return digest_of(hashed)


def source_of(task: Any, pinned: bool, library: Library) -> dict[str, Any]:
    """Return the provenance of a task's documents. Those not pinned by evalkit have the source in the task file."""
    config, total = task.config, len(task.eval_docs)
    if pinned:
        documents = library.load(config.dataset_kwargs["documents"])
        return {"source": documents.source, "official": documents.official, "total": total}
    files = (config.dataset_kwargs or {}).get("data_files")
    listed = files.values() if isinstance(files, dict) else [files] if files else []
    origin = " ".join(str(part) for part in (config.dataset_path or "its own code", config.dataset_name) if part)
    return {"source": f"{origin} {', '.join(map(str, listed))}".strip(), "official": True, "total": total}
