"""Faults of workers, on nodes whose PYTHONPATH has this folder; what happens is in the files of FAULTS.

poison    "task number" of a batch whose computation kills the process
error     "task number" of a batch whose computation raises a ValueError
abort     what is killed aborts instead, which is said in its log
memory    the next tree that a process scores runs out of memory, once in all
slow      seconds that every batch takes longer
"""

import os
import signal
import time
from pathlib import Path
from types import ModuleType

import wrapt

FAULTS = Path(os.environ.get("FAULTS", "/nowhere"))


def text(name: str) -> str:
    """Return what a fault's file contains; empty if there is none."""
    file = FAULTS / name
    return file.read_text(encoding="utf-8").strip() if file.is_file() else ""


@wrapt.when_imported("evalkit.studies.cluster.worker")
def _poison(module: ModuleType) -> None:
    compute = module.BatchWorker.compute

    def faulty(self: object, job: str, batch: object, split: bool) -> object:
        time.sleep(float(text("slow") or 0))
        if f"{batch.task} {batch.number}" == text("poison"):  # type: ignore[attr-defined]
            if (FAULTS / "abort").exists():
                os.abort()
            os.kill(os.getpid(), signal.SIGKILL)
        return compute(self, job, batch, split)

    module.BatchWorker.compute = faulty
    rows = module.BatchWorker._compute

    def wrong(self: object, job: str, batch: object, split: bool) -> object:
        if f"{batch.task} {batch.number}" == text("error"):  # type: ignore[attr-defined]
            raise ValueError("injected")
        return rows(self, job, batch, split)

    module.BatchWorker._compute = wrong


@wrapt.when_imported("evalkit.scoring.forward")
def _memory(module: ModuleType) -> None:
    score = module.Forward.score

    def faulty(self: object, *arguments: object) -> object:
        import torch

        try:
            (FAULTS / "memory").rename(FAULTS / "memory happened")
        except OSError:
            return score(self, *arguments)
        raise torch.OutOfMemoryError("injected")

    module.Forward.score = faulty
