"""Import of lm-eval's logs.

In: sample files of one model. Out: finished runs: one of the tasks with pinned documents, and of all others one of
those with choices and one of the rest. Nothing is written before all files are read and validated.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evalkit.data import Library
from evalkit.display import Say
from evalkit.errors import UsageError
from evalkit.exchange.imported_runs import Import
from evalkit.exchange.log_files import model_of, read_logs
from evalkit.exchange.metric_runs import check_results, import_metrics
from evalkit.exchange.pinned_runs import import_choices, match
from evalkit.runs.folder import Run


def import_logs(paths: Sequence[Path], model: str | None, output: Path, library: Library, say: Say) -> list[Run]:
    """Import sample files of one model as finished runs.

    Args:
        paths: lm-eval's sample files; the results file beside each is read too, if there is one.
        model: name of the model; None: the one in the results files.
        output: parent folder of the run folders.
        library: source of the pinned documents.
        say: called with messages for the user.

    Returns:
        The run of the tasks with pinned documents, then those of the others, where there are any.

    Raises:
        UsageError: the files are of several models or settings, or have no name that says their task.
        DataError: a file is invalid, or contradicts the pinned documents; names file and line.
        RunError: a run cannot be written.
    """
    if not paths:
        raise UsageError("name one or more sample files: evalkit import samples_*.jsonl")
    logs = read_logs(paths)
    request = Import(model_of(logs, model), output, say)
    matched, others = match(logs, library, say)
    for log in logs:
        check_results(log)
    runs = [import_choices(matched, request, library)] if matched else []
    return [*runs, *import_metrics(others, request)]
