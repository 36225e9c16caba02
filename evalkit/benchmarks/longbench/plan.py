"""What was asked of a LongBench run, made into what the run is.

In: a `LongBenchRequest`. Out: a `LongBenchPlan` with documents and manifest. Nothing here needs torch, so a run
that is already finished is found at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evalkit.activity import doing
from evalkit.benchmarks.generated_plan import GeneratedPlan, context_of, generated_manifest
from evalkit.benchmarks.longbench.data import Rows, check_data_dir, load_rows
from evalkit.benchmarks.longbench.protocol import SUITES, SuiteName, Task, suite_tasks
from evalkit.benchmarks.request import Request, numerics
from evalkit.errors import CheckpointError, DataError, UnknownNameError, UsageError
from evalkit.models.context import configured_window
from evalkit.models.context_settings import config_of, context_settings
from evalkit.models.locate import Checkpoint, Say
from evalkit.models.spec import ModelSpec
from evalkit.runs.folder import LONGBENCH

DEFAULT: SuiteName = "longbench"
PAPER_CONTEXT = 8192
"""Tokens to which the paper stretches what was trained on fewer, by YaRN; its appendix "Long Context Evaluation"."""
_OFFICIAL = {4096: 3500, 8192: 7500, 16384: 15500, 32768: 31500}
"""Context → tokens of a prompt in the official `model2maxlen.json`."""
_MARGIN = 692
"""What 8192 − 7500 leaves for the answer; taken for other contexts too."""


@dataclass(frozen=True)
class LongBenchRequest(Request):
    """What a user can ask of a LongBench run; of a model without a context, see `paper_context`."""

    suite: SuiteName = DEFAULT
    tasks: tuple[str, ...] = ()
    """Only these; all where empty."""
    limit: int | None = None
    """Most documents of each task; None for all."""
    data_dir: Path | None = None
    """Folder of `<task>.jsonl` files that comes before the hub."""
    max_prompt_tokens: int | None = None
    """Tokens above which a prompt loses its middle; None: the official 7500 for a context of 8192."""
    chat: bool = False
    """Whether prompts go into the tokenizer's chat template; those of five tasks never do, as in the official code."""


@dataclass(frozen=True)
class LongBenchPlan(GeneratedPlan):
    """A request with everything found that does not need torch."""

    request: LongBenchRequest
    checkpoint: Checkpoint
    rows: Mapping[Task, Rows]
    manifest: dict[str, Any]
    """Its "left_out", where there is one: why some tasks cannot be evaluated, in a line for each reason."""


def plan_longbench(request: LongBenchRequest, say: Say) -> LongBenchPlan:
    """Find out what a run is, and refuse what cannot be.

    Raises:
        EvalkitError: whatever is wrong with the request, the checkpoint, or the documents of every task.
    """
    checkpoint = request.model.locate(say)
    tasks = _chosen(request)
    check_data_dir(request.data_dir)
    rows: dict[Task, Rows] = {}
    trouble: dict[str, DataError] = {}
    for task in tasks:
        try:
            with doing("reading documents"):
                rows[task] = load_rows(task, request.data_dir, request.limit, request.suite, say)
        except DataError as error:
            trouble[task.name] = error
    left_out = together(trouble)
    if not rows:
        raise DataError("; ".join(left_out))
    for line in left_out:
        say(f"left out: {line}")
    request = replace(request, model=paper_context(request.model, checkpoint, say))
    context = context_of(request.model, checkpoint, LONGBENCH)
    most = max_prompt_tokens(request.max_prompt_tokens, context, max(task.max_new_tokens for task in rows))
    specification = {
        **numerics(request.model, checkpoint, request.limit, say),
        "suite": request.suite,
        "documents": {task.name: found.sha for task, found in rows.items()},
        "max_prompt_tokens": most,
    }
    documents = {
        task.name: {"source": found.source, "official": found.official, "count": len(found.rows)}
        for task, found in rows.items()
    }
    manifest = generated_manifest(LONGBENCH, request.model, checkpoint, context, specification, request.chat, documents)
    return LongBenchPlan(request, checkpoint, rows, manifest | ({"left_out": left_out} if left_out else {}))


def together(trouble: Mapping[str, DataError]) -> list[str]:
    """What is wrong with tasks, those together of which the same is to be said.

    Args:
        trouble: task → its error.
    """
    alike: dict[str, list[str]] = {}
    for task, error in trouble.items():
        alike.setdefault(str(error).replace(task, "<task>"), []).append(task)
    return [
        str(trouble[tasks[0]]) if len(tasks) == 1 else f"{', '.join(tasks)}: {common}"
        for common, tasks in alike.items()
    ]


def paper_context(model: ModelSpec, checkpoint: Checkpoint, say: Say) -> ModelSpec:
    """The model with the paper's context where the user gives none: a shorter window is stretched to it, by YaRN.

    The run is then the same as one that was asked for that context in so many words. A checkpoint whose own window is
    as long, or not in its config, is left alone.

    Raises:
        UsageError: see `context_settings`.
        CheckpointError: the checkpoint cannot be stretched. It is not taken as it is then, since its scores would
            stand beside others' under another protocol.
    """
    if model.context is not None:
        return model
    given = model.context_method, model.context_original, model.context_config
    if given == (None, None, None):
        _, window = configured_window(config_of(checkpoint, say))
        if window is None or window >= PAPER_CONTEXT:
            return model
    settings = context_settings(None, *given, default=PAPER_CONTEXT)
    assert settings is not None
    stretched = replace(model, context=settings.target)
    if model.context_config is not None:  # which names the context itself, or was written for this one
        return stretched
    default = (
        f"--context {PAPER_CONTEXT} is LongBench's default, as in the paper; --context none leaves the model as it is"
    )
    try:
        extension = stretched.extension(checkpoint)
    except CheckpointError as error:
        raise CheckpointError(f"{error} ({default})") from error
    if extension is not None:
        say(f"{extension.describe()} ({default})")
    return stretched


def max_prompt_tokens(asked: int | None, context: int, most_new: int) -> int:
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
        return _OFFICIAL.get(context, max(context - _MARGIN, min(context // 2, most)))
    if not least <= asked <= most:
        raise UsageError(
            f"--max-prompt-tokens {asked}: the model takes {context} tokens, of which an answer may need {most_new}; "
            f"give a --max-prompt-tokens of {least} to {most}, or another --context"
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
