"""What a user can ask of a run over tasks: of a suite, or of lm-eval's tasks by their own prompts and metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from evalkit.benchmarks.request import Request
from evalkit.inputs.fields import LEAST


@dataclass(frozen=True)
class SuiteRequest(Request):
    """What a user can ask of such a run."""

    suite: str | None = None
    """A suite's name or YAML file, or "lm_eval" for lm-eval's own tasks; None: zeroshot8 if it has all `tasks`, else
    lm_eval."""
    tasks: tuple[str, ...] = ()
    """Only these tasks of the suite, all where empty; of lm_eval its tasks, groups or tags."""
    include_path: Path | None = None
    """Folder of the user's own lm-eval task files, which may run Python code that lies beside them."""
    template: str | None = None
    """A template's name, or the path of a YAML file of the same form; None: inst, or plain for lm-eval's tasks."""
    rule: str | None = None
    """The rule of the result; None: `ppl` where the template scores whole sequences, else `acc`."""
    limit: int | None = None
    """Most documents of each task; None for all."""
    num_fewshot: int | None = field(default=None, metadata={LEAST: 0})
    """How many solved examples stand before each question; None: none, or what an lm-eval task says itself."""
    data_dir: Path | None = None
    """Folder of `<task>.jsonl` files that comes before the hub."""
    allow_unofficial_data: bool = False
    """Whether documents may be others than the pinned ones; marked then."""
    log_samples: bool = False
    """Whether lm-eval's per-document sample files are written too."""
