"""Manifests of imported runs.

In: the sample files of a run. Out: what its manifest says: specification, origin, versions. What a log does not say is
"unknown". The run's id is a hash of the files' content, so that the same log gives the same run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from evalkit import __version__
from evalkit.errors import UsageError
from evalkit.importing.log_files import LoggedTask, ResultsFile
from evalkit.reporting.escape import printable
from evalkit.runs.folder import specification_id

IMPORT_VERSION = 3
"""Increased with every change of the import that changes a number; part of every imported run's specification."""
UNKNOWN = "unknown"

Value = TypeVar("Value")


def shared_value(logs: Sequence[LoggedTask], what: str, read: Callable[[LoggedTask], Value | None]) -> Value | None:
    """Return a setting that all sample files have; None if none of them says it.

    Args:
        logs: the sample files of one run.
        what: the setting, for messages.
        read: returns the setting of a file, None if it is unknown.

    Raises:
        UsageError: two files have different values.
    """
    found = [(log, value) for log in logs if (value := read(log)) is not None]
    for log, value in found[1:]:
        if value != found[0][1]:
            first, other = (f"{one.task} has {printable(str(given))[:60]}" for one, given in (found[0], (log, value)))
            raise UsageError(f"{what}: {first} and {other}; import tasks with the same settings together")
    return found[0][1] if found else None


def shared_result(logs: Sequence[LoggedTask], what: str, read: Callable[[ResultsFile], Value | None]) -> Value | None:
    """Return a setting that all results files have; arguments and errors: see `shared_value`."""
    return shared_value(logs, what, lambda log: None if log.results is None else read(log.results))


def dtype_of(logs: Sequence[LoggedTask]) -> str:
    """Return the dtype of the evaluated model, as far as the log says."""
    found = shared_result(logs, "dtype", lambda found: found.config.model_dtype)
    return UNKNOWN if found is None else printable(found).removeprefix("torch.")[:20]


def manifest_of(
    kind: str, logs: Sequence[LoggedTask], model: str, specification: Mapping[str, Any], about: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the manifest of an imported run.

    Args:
        kind: benchmark of the run.
        logs: its sample files.
        model: name of the evaluated model.
        specification: entries of the specification that belong to the benchmark.
        about: entries of the manifest that belong to the benchmark.
    """
    versions = {
        "lm-eval": shared_result(logs, "version of lm-eval", lambda found: found.lm_eval_version),
        "transformers": shared_result(logs, "version of transformers", lambda found: found.transformers_version),
    }
    known = {name: printable(version)[:40] for name, version in versions.items() if version}
    whole = {
        "import": IMPORT_VERSION,
        "imported": {log.task: _digests(log) for log in logs},
        "checkpoint": {"model's name in the log": model},
        "dtype": dtype_of(logs),
        "context_extension": None,
        "versions": known,
        **specification,
    }
    parameters = shared_result(logs, "parameters", lambda found: _count(found.config.model_num_parameters))
    return {
        "id": specification_id(whole),
        "kind": kind,
        "specification": whole,
        **about,
        "imported": {"origin": _origin(logs, known), "files": {log.path.name: log.digest for log in logs}},
        "model": model,
        "path": None,
        "revision": None,
        "created": max(log.created for log in logs),
        "command": list(map(printable, sys.argv)),
        "versions": {"evalkit": __version__} | dict.fromkeys(versions, UNKNOWN) | known,
        "loaded": {
            "dtype": dtype_of(logs),
            **({"parameters": parameters} if parameters else {}),
            "window": shared_result(logs, "context window", lambda found: _count(found.max_length)),
        },
    }


def short_name(model: str) -> str:
    """Return the last part of a model's name or path, for the run's folder."""
    return next((part for part in reversed(model.replace("\\", "/").split("/")) if part), "model")


def _digests(log: LoggedTask) -> list[str]:
    return [log.digest, *([] if log.summary is None else [log.summary.digest])]


def _origin(logs: Sequence[LoggedTask], versions: Mapping[str, str]) -> str:
    harness = " ".join(["lm-eval", *([versions["lm-eval"]] if "lm-eval" in versions else [])])
    by_evalkit = any(log.results is not None and log.results.evalkit is not None for log in logs)
    return f"a log of evalkit in the format of {harness}" if by_evalkit else f"a log of {harness}"


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
