"""Settings of a run over tasks: a multiple-choice suite, or lm-eval's tasks with their own prompts and metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from evalkit.benchmarks.request import DocumentRequest
from evalkit.inputs.fields import LEAST

DEFAULT_SUITE = "zeroshot8"


@dataclass(frozen=True)
class SuiteRequest(DocumentRequest):
    """Settings of a run of a suite or of lm-eval's tasks."""

    suite: str | None = None
    """A suite's name or YAML file, or "lm_eval" for lm-eval's tasks; None: zeroshot8 if it has all `tasks`, else
    lm_eval."""
    tasks: tuple[str, ...] = ()
    """Tasks of the suite; empty: all. For lm_eval: tasks, groups or tags."""
    include_path: Path | None = None
    """Folder of the user's lm-eval task files, which can run Python code next to them."""
    template: str | None = None
    """A template's name, or the path of a template file; None: inst, or plain for lm-eval's tasks."""
    rule: str | None = None
    """The scoring rule; None: `ppl` if the template scores whole sequences, else `acc`."""
    num_fewshot: int | None = field(default=None, metadata={LEAST: 0})
    """Number of solved examples before each question; None: 0, or an lm-eval task's default."""
    vary: tuple[str, ...] = ()
    """Factors of the prompt to vary (template, choice_order, system_prompt), or a YAML file of prompts; empty: one
    prompt."""
    data_dir: Path | None = None
    """Folder of `<task>.jsonl` files, searched before all other sources."""
    allow_unofficial_data: bool = False
    """Whether to accept documents that are not the pinned ones; their results are marked."""
    log_samples: bool = False
    """Whether to write lm-eval's per-document sample files."""
