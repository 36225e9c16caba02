"""The plan of a LongBench run.

In: a `LongBenchRequest`. Out: a `LongBenchPlan` with documents and manifest. Torch is not imported, so a finished run
is found at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from evalkit.benchmarks.generated import GeneratedPlan, context_of, generated_manifest
from evalkit.benchmarks.longbench.data import LongBenchRows, check_data_dir, load_rows
from evalkit.benchmarks.longbench.protocol import SuiteName, Task, suite_tasks
from evalkit.benchmarks.request import DocumentRequest, numerics
from evalkit.display import Say, doing
from evalkit.errors import CheckpointError, DataError, UnknownNameError, UsageError
from evalkit.inputs.settings import setting
from evalkit.models.context import configured_window
from evalkit.models.locate import Checkpoint
from evalkit.models.spec import ModelSpec, config_of, context_settings
from evalkit.runs.folder import LONGBENCH

DEFAULT: SuiteName = "longbench"
PAPER_CONTEXT = 8192
"""Context window in tokens to which the paper extends shorter ones by YaRN; its appendix "Long Context Evaluation"."""
_OFFICIAL = {4096: 3500, 8192: 7500, 16384: 15500, 32768: 31500}
"""Context window → most prompt tokens in the official `model2maxlen.json`."""
_MARGIN = 692
"""8192 − 7500, the tokens for the answer; used for other context windows too."""


@dataclass(frozen=True)
class LongBenchRequest(DocumentRequest):
    """The request for a LongBench run. For the default context window, see `_paper_context`."""

    suite: SuiteName = setting(DEFAULT, "16 tasks, or the 13 of LongBench-E with scores by length.")
    tasks: tuple[str, ...] = setting((), "Only these, separated by commas.", "all")
    data_dir: Path | None = setting(
        None, "Folder of <task>.jsonl files, searched before other sources.", names="folder"
    )
    max_prompt_tokens: int | None = setting(
        None, "Tokens above which a prompt loses its middle.", "7500 of a context of 8192"
    )
    chat: bool = setting(False, "Put prompts into the tokenizer's chat template, for models tuned to chat.")

    default_texts: ClassVar[Mapping[str, str]] = {"context": "8192, as in the paper, where it was trained on fewer"}


@dataclass(frozen=True)
class LongBenchPlan(GeneratedPlan):
    """A resolved request: checkpoint, documents and manifest."""

    request: LongBenchRequest
    checkpoint: Checkpoint
    rows: Mapping[Task, LongBenchRows]
    manifest: dict[str, Any]
    """Its optional "left_out" has a line for each reason why tasks cannot be evaluated."""


def plan_longbench(request: LongBenchRequest, say: Say) -> LongBenchPlan:
    """Validate a request and resolve it into a plan."""
    checkpoint = request.model.locate(say)
    tasks = _requested_tasks(request)
    check_data_dir(request.data_dir)
    rows: dict[Task, LongBenchRows] = {}
    errors: dict[str, DataError] = {}
    for task in tasks:
        try:
            with doing("reading documents"):
                rows[task] = load_rows(task, request.data_dir, request.selection, request.suite, say)
        except DataError as error:
            errors[task.name] = error
    left_out = _group_errors(errors)
    if not rows:
        raise DataError("; ".join(left_out))
    for line in left_out:
        say(f"left out: {line}")
    request = replace(request, model=_paper_context(request.model, checkpoint, say))
    context = context_of(request.model, checkpoint, LONGBENCH)
    most = max_prompt_tokens(request.max_prompt_tokens, context, max(task.max_new_tokens for task in rows))
    specification = {
        **numerics(request.model, checkpoint, request.limit, say),
        **request.selection.specification,
        "suite": request.suite,
        "documents": {task.name: loaded.sha for task, loaded in rows.items()},
        "max_prompt_tokens": most,
    }
    documents = {
        task.name: {"source": loaded.source, "official": loaded.official, "count": len(loaded.rows)}
        for task, loaded in rows.items()
    }
    manifest = generated_manifest(LONGBENCH, request.model, checkpoint, context, specification, request.chat, documents)
    return LongBenchPlan(request, checkpoint, rows, manifest | ({"left_out": left_out} if left_out else {}))


def _group_errors(errors: Mapping[str, DataError]) -> list[str]:
    """Return the messages of task → its error, one for all tasks with the same message."""
    tasks_by_message: dict[str, list[str]] = {}
    for task, error in errors.items():
        tasks_by_message.setdefault(str(error).replace(task, "<task>"), []).append(task)
    return [
        str(errors[tasks[0]]) if len(tasks) == 1 else f"{', '.join(tasks)}: {common}"
        for common, tasks in tasks_by_message.items()
    ]


def _paper_context(model: ModelSpec, checkpoint: Checkpoint, say: Say) -> ModelSpec:
    """Return the model with the paper's context window if the user gives none: a shorter window is extended by YaRN.

    The run is the same as one with that context given explicitly. A checkpoint whose own window is at least as long, or
    not in its config, is not changed. One whose window cannot be extended is a `CheckpointError`: unchanged, its scores
    would not be comparable with others'.
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
    extended = replace(model, context=settings.target)
    if model.context_config is not None:  # which sets the context itself, or was written for this one
        return extended
    default = (
        f"--context {PAPER_CONTEXT} is LongBench's default, as in the paper; --context none leaves the model as it is"
    )
    try:
        extension = extended.extension(checkpoint)
    except CheckpointError as error:
        raise CheckpointError(f"{error} ({default})") from error
    if extension is not None:
        say(f"{extension.describe()} ({default})")
    return extended


def max_prompt_tokens(given: int | None, context: int, most_new: int) -> int:
    """Return the most tokens of a prompt in a context window, with room for an answer of `most_new` tokens.

    By default the official number. A window without one has the same margin for the answer, or half of a short window.

    Raises:
        UsageError: the longest answer does not fit after such a prompt.
    """
    least, most = 2, context - most_new
    if most < least:
        raise UsageError(f"answers have up to {most_new} tokens and the model takes {context}; give a longer --context")
    if given is None:
        # The margin would leave almost nothing of a short window
        return _OFFICIAL.get(context, max(context - _MARGIN, min(context // 2, most)))
    if not least <= given <= most:
        raise UsageError(
            f"--max-prompt-tokens {given}: the model takes {context} tokens, of which an answer may need {most_new}; "
            f"give a --max-prompt-tokens of {least} to {most}, or another --context"
        )
    return given


def _requested_tasks(request: LongBenchRequest) -> list[Task]:
    known = {task.name: task for task in suite_tasks(request.suite)}
    for name in request.tasks:
        if name not in known:
            raise UnknownNameError(f"{request.suite} task", name, known)
    return [task for name, task in known.items() if not request.tasks or name in request.tasks]
