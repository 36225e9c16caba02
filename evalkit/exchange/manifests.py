"""Manifests of imported runs.

In: the sample files of a run. Out: what its manifest says: specification, origin, versions. What a log does not say is
"unknown". The run's id is a hash of the files' content, so that the same log gives the same run.
"""

from __future__ import annotations

import hashlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from evalkit import __version__
from evalkit.data.sampling import ALL_DOCUMENTS, DocumentSample, DocumentSelection, FirstDocuments
from evalkit.display import Say
from evalkit.errors import UsageError
from evalkit.escape import printable
from evalkit.exchange.log_files import LoggedTask, ResultsFile, lines_of
from evalkit.exchange.log_lines import LoggedSample, part_of_request
from evalkit.inputs.reading import parse_json
from evalkit.runs.folder import Run, folder_name, load_run, specification_id
from evalkit.runs.forms import json_bytes
from evalkit.runs.writing import RunWriter, find_finished, open_run

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


PARTLY_UNKNOWN = {"complete": "unknown"}
"""Further entry if the log does not say how many documents its tasks have."""


@dataclass(frozen=True)
class LoggedPlaces:
    """The documents of a task that are in a log."""

    task: str
    """Name that a random sample of the task depends on."""
    places: Sequence[int]
    """Their places in the task, sorted."""
    strata: Sequence[str]
    """[documents of the task] stratum of each."""


def selection_specification(tasks: Sequence[LoggedPlaces], sample: DocumentSample | None) -> dict[str, Any]:
    """Return the specification's entries.

    Args:
        tasks: the tasks of a run.
        sample: the random sample that the log claims to be; it is verified.
    """
    limit = FirstDocuments(max(len(one.places) for one in tasks))
    candidates: list[DocumentSelection] = [*([sample] if sample else []), ALL_DOCUMENTS, limit]
    for selection in candidates:
        if all(_is_selected(one, selection) for one in tasks):
            return selection.specification
    return selection_hash([(one.task, list(one.places)) for one in tasks])


def selection_hash(documents: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the entries of any other documents, (task, what identifies its documents)."""
    return {"limit": None, "selection": hashlib.sha256(repr(documents).encode()).hexdigest()}


def logged_sample(logs: Sequence[LoggedTask]) -> DocumentSample | None:
    """Return the random sample that evalkit's results files name; None if they name none.

    Raises:
        UsageError: two files have different ones.
    """
    found = shared_result(logs, "random sample", lambda one: None if one.evalkit is None else one.evalkit.selection)
    return found if isinstance(found, DocumentSample) else None


def _is_selected(one: LoggedPlaces, selection: DocumentSelection) -> bool:
    size = len(one.strata) if selection.count is None else min(selection.count, len(one.strata))
    if len(one.places) != size:
        return False
    return size == len(one.strata) or list(one.places) == selection.places(one.task, one.strata)


@dataclass(frozen=True)
class Import:
    """Settings of an import."""

    model: str
    """Name of the evaluated model."""
    output: Path
    """Parent folder of the run folders."""


def written_once(
    request: Import,
    names: tuple[str, str],
    manifest: dict[str, Any],
    finish: Callable[[RunWriter], None],
    say: Say,
) -> Run:
    """Return the run of a manifest; write it if it does not exist.

    Args:
        request: the import.
        names: suite and template, for the folder's name.
        manifest: the run's manifest.
        finish: writes its files, the results last.
        say: called with messages for the user.

    Raises:
        RunError: the folder cannot be written, or it is damaged.
    """
    name = folder_name(short_name(request.model), *names, manifest["specification"]["dtype"], manifest["id"])

    def imported() -> Run | None:
        return find_finished(request.output / name, manifest, lambda run: run.complete, say, "auto")

    if (run := imported()) is None:
        with open_run(request.output, name, manifest, say) as writer:
            # Another process may have imported it before this one had the lock
            if (run := imported()) is None:
                finish(writer)
                return load_run(request.output / name)
    say(f"this log is imported already: {run.folder}")
    return run


def save_logs(writer: RunWriter, logs: Sequence[tuple[LoggedTask, Mapping[int, tuple[str, int]]]]) -> None:
    """Copy sample files, and the results files beside them, into the run folder's `lm_eval/`.

    Args:
        writer: the run folder.
        logs: each file, and number of a document in it → its leaf task and number in the run. Lines of other numbers
            or of earlier versions of lm-eval are written anew.

    Raises:
        DataError: a file was changed since it was read.
    """
    for log, names in logs:
        lines: dict[str, list[bytes]] = defaultdict(list)
        for task, line in _lines(log, names):
            lines[task].append(line)
        for task, members in lines.items():
            writer.save_bytes(f"lm_eval/samples_{task}_{log.time}.jsonl", b"".join(members))
    for time, summary in {log.time: log.summary for log, _ in logs}.items():
        if summary is not None:
            writer.save_bytes(f"lm_eval/results_{time}.json", summary.data)


def _lines(log: LoggedTask, names: Mapping[int, tuple[str, int]]) -> Iterator[tuple[str, bytes]]:
    for sample, data in lines_of(log):
        task, number = names[sample.doc_id]
        content = parse_json(data)
        current = _in_current_form(content, sample, number)
        line = data.removesuffix(b"\n") if current == content else json_bytes(current)
        yield task, line + b"\n"


def _in_current_form(content: dict[str, Any], sample: LoggedSample, number: int) -> dict[str, Any]:
    """Return a line as the present version of lm-eval writes it, with the number of its document in the run."""
    given = content["arguments"]
    requests = given.values() if isinstance(given, dict) else given
    arguments = {
        f"gen_args_{place}": {
            f"arg_{index}": part_of_request(part)
            for index, part in enumerate(one.values() if isinstance(one, dict) else one)
        }
        for place, one in enumerate(requests)
    }
    return content | {
        "doc_id": number,
        "arguments": arguments,
        "filter": sample.filter,
        "target": sample.target,
    }
