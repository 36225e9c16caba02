"""What was asked of a LongBench run, made into what the run is.

In: a `LongBenchRequest`. Out: a `PreparedLongBench` with documents and manifest. Nothing here needs torch, so a run
that is already finished is found at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evalkit.errors import DataError, UnknownNameError, UsageError
from evalkit.generation.run import context_of, generated_folder, generated_manifest
from evalkit.longbench.data import Rows, check_data_dir, load_rows
from evalkit.longbench.protocol import SUITES, SuiteName, Task, suite_tasks
from evalkit.models.locate import Checkpoint, Say
from evalkit.request import Request, locate_checkpoint, numerics
from evalkit.runs import LONGBENCH

DEFAULT: SuiteName = "longbench"
_OFFICIAL_WINDOWS = {4096: 3500, 8192: 7500, 16384: 15500, 32768: 31500}
"""Context → tokens of a prompt in the official `model2maxlen.json`."""
_MARGIN = 692
"""What 8192 − 7500 leaves for the answer; taken for other contexts too."""


@dataclass(frozen=True)
class LongBenchRequest:
    """What a user can ask of a LongBench run."""

    common: Request
    """Checkpoint, context, device, limit, folders: what every run is asked."""
    suite: SuiteName = DEFAULT
    tasks: tuple[str, ...] = ()
    """Only these; all where empty."""
    window: int | None = None
    """Tokens above which a prompt is cut; None: the official 7500 for a context of 8192."""
    chat: bool = False
    """Whether prompts go into the tokenizer's chat template; those of five tasks never do, as in the official code."""


@dataclass(frozen=True)
class PreparedLongBench:
    """A request with everything found that does not need torch."""

    request: LongBenchRequest
    checkpoint: Checkpoint
    rows: Mapping[Task, Rows]
    trouble: Mapping[str, DataError] = field(default_factory=dict)
    """Tasks whose documents cannot be evaluated, and why; the others go on."""
    manifest: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """The run's folder, whether it exists yet or not."""
        return generated_folder(self.request.common.output, self.checkpoint, self.manifest)


def prepare_longbench(request: LongBenchRequest, say: Say) -> PreparedLongBench:
    """Find out what a run is, and refuse what cannot be.

    Raises:
        EvalkitError: whatever is wrong with the request, the checkpoint, or the documents of every task.
    """
    common = request.common
    checkpoint = locate_checkpoint(common, say)
    tasks = _chosen(request)
    context = context_of(common, checkpoint, LONGBENCH)
    check_data_dir(common.data_dir)
    rows: dict[Task, Rows] = {}
    trouble: dict[str, DataError] = {}
    for task in tasks:
        try:
            rows[task] = load_rows(task, common.data_dir, common.limit, request.suite, say)
        except DataError as error:
            trouble[task.name] = error
            say(f"{task.name} is left out: {error}")
    if not rows:
        raise next(iter(trouble.values()))
    window = window_of(request.window, context, max(task.max_new_tokens for task in rows))
    specification = {
        **numerics(common, checkpoint, say),
        "suite": request.suite,
        "documents": {task.name: found.sha for task, found in rows.items()},
        "window": window,
    }
    documents = {
        task.name: {"source": found.source, "official": found.official, "count": len(found.rows)}
        for task, found in rows.items()
    }
    manifest = generated_manifest(LONGBENCH, common, checkpoint, specification, request.chat, documents)
    manifest["context"] = context
    return PreparedLongBench(request, checkpoint, rows, trouble, manifest)


def window_of(asked: int | None, context: int, most_new: int) -> int:
    """Tokens above which a prompt is cut.

    Args:
        asked: by the user; None: the official number, for contexts that have none by the same margin,
            but half of a short one.
        context: tokens that the model takes at once.
        most_new: most tokens that any task generates.

    Raises:
        UsageError: the longest answer would not fit behind such a prompt.
    """
    least, most = 2, context - most_new
    if most < least:
        raise UsageError(f"answers have up to {most_new} tokens and the model takes {context}; give a longer --context")
    if asked is None:
        # The margin would leave a short context next to nothing
        return _OFFICIAL_WINDOWS.get(context, max(context - _MARGIN, min(context // 2, most)))
    if not least <= asked <= most:
        raise UsageError(
            f"--window {asked}: the model takes {context} tokens, of which an answer may need {most_new}; "
            f"give a --window of {least} to {most}, or another --context"
        )
    return asked


def _chosen(request: LongBenchRequest) -> list[Task]:
    if request.suite not in SUITES:
        raise UnknownNameError("LongBench suite", request.suite, SUITES)
    known = {task.name: task for task in suite_tasks(request.suite)}
    for name in request.tasks:
        if name not in known:
            raise UnknownNameError(f"{request.suite} task", name, known)
    return [task for name, task in known.items() if not request.tasks or name in request.tasks]
