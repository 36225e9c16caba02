"""What imported runs have in common: manifest, selection of documents, and folder with a copy of the log.

What a log does not say is "unknown". The run's id is a hash of the files' content, so that the same log gives the same
run.
"""

from __future__ import annotations

import hashlib
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from evalkit import __version__
from evalkit.data.sampling import (
    ALL_DOCUMENTS,
    DocumentSample,
    DocumentSelection,
    FirstDocuments,
    repeated_prompts,
)
from evalkit.display import Say
from evalkit.errors import DataError, UsageError, reading_as
from evalkit.escape import printable
from evalkit.exchange.logs import LoggedTask
from evalkit.inputs.reading import parse_json
from evalkit.inputs.values import text_digest
from evalkit.runs.finding import folder_name
from evalkit.runs.folder import Run, json_bytes, load_run, specification_id
from evalkit.runs.writing import RunWriter, find_finished, open_run

IMPORT_VERSION = 4
"""Increased with every change of the import that changes a number; part of every imported run's specification."""
UNKNOWN = "unknown"
_LONGEST_MODEL = 500
"""Characters of a model's name."""
_SHOWN = 40
"""Characters of a gold answer in a message."""

Value = TypeVar("Value")


class Import(NamedTuple):
    """Name of the evaluated model, parent folder of the run folders, and what is called with messages."""

    model: str
    output: Path
    say: Say


class LoggedPlaces(NamedTuple):
    """The documents of a task that are in a log: their places in the task, sorted."""

    task: str
    places: list[int]
    strata: Sequence[str]
    """[documents of the task] stratum of each."""


def model_of(logs: Sequence[LoggedTask], model: str | None) -> str:
    """Return the user's name for the evaluated model, otherwise the only name in the results files."""
    logged = shared_value(logs, "model", lambda log: log.results.model_name or None)
    if unnamed := [log for log in logs if not log.results.model_name and model is None]:
        raise UsageError(f"{unnamed[0].path}: no results file beside it names its model; give --model NAME")
    return str(model or logged)[:_LONGEST_MODEL]


def shared_value(logs: Sequence[LoggedTask], what: str, read: Callable[[LoggedTask], Value | None]) -> Value | None:
    """Return a setting that all sample files of a run have, named `what` in messages; None if no file says it."""
    known = [(log.task, value) for log in logs if (value := read(log)) is not None]
    if others := [pair for pair in known if pair[1] != known[0][1]]:
        first, other = (f"{task} has {printable(str(value))[:60]}" for task, value in (known[0], others[0]))
        raise UsageError(f"{what}: {first} and {other}; import the files of one model at a time, and of one setting")
    return known[0][1] if known else None


def import_run(
    request: Import,
    logs: Sequence[LoggedTask],
    names: tuple[str, str],
    specification: Mapping[str, Any],
    about: Mapping[str, Any],
    finish: Callable[[RunWriter], None],
) -> Run:
    """Write the run of some logs; return the existing run if the same logs were imported before.

    `names` are suite and template in the folder's name; `specification` and `about` are the benchmark's entries of the
    specification and of the manifest; `finish` writes the run's files, the results last.
    """
    manifest = _manifest(request.model, logs, specification, about)
    model = next((part for part in reversed(request.model.replace("\\", "/").split("/")) if part), "model")
    folder = request.output / folder_name(model, *names, manifest["specification"]["dtype"], manifest["id"])
    if run := find_finished(folder, manifest, lambda run: run.complete, request.say, "auto"):
        request.say(f"this log is imported already: {folder}")
        return run
    with open_run(request.output, folder.name, manifest, request.say) as writer:
        finish(writer)
        return load_run(folder)


def _manifest(
    model: str, logs: Sequence[LoggedTask], specification: Mapping[str, Any], about: Mapping[str, Any]
) -> dict[str, Any]:
    versions = {
        "lm-eval": shared_value(logs, "version of lm-eval", lambda log: log.results.lm_eval_version),
        "transformers": shared_value(logs, "version of transformers", lambda log: log.results.transformers_version),
    }
    known = {name: printable(version)[:40] for name, version in versions.items() if version}
    dtype = shared_value(logs, "dtype", lambda log: log.results.config.model_dtype)
    dtype = UNKNOWN if dtype is None else printable(dtype).removeprefix("torch.")[:20]
    parameters = shared_value(logs, "parameters", lambda log: log.results.config.model_num_parameters)
    window = shared_value(logs, "context window", lambda log: log.results.max_length)
    whole = {
        "import": IMPORT_VERSION,
        "imported": {log.task: log.digests for log in logs},
        "checkpoint": {"model's name in the log": model},
        "dtype": dtype,
        "context_extension": None,
        "versions": known,
        **specification,
    }
    harness = f"lm-eval {known.get('lm-eval', '')}".rstrip()
    by_evalkit = any(log.results.evalkit is not None for log in logs)
    imported = {
        "origin": f"a log of evalkit in the format of {harness}" if by_evalkit else f"a log of {harness}",
        "files": {log.path.name: log.digests[0] for log in logs},
    }
    return {
        "id": specification_id(whole),
        "kind": about["kind"],
        "specification": whole,
        **about,
        "imported": imported | about.get("imported", {}),
        "model": model,
        "path": None,
        "revision": None,
        "created": max(log.created for log in logs),
        "command": list(map(printable, sys.argv)),
        "versions": {"evalkit": __version__} | dict.fromkeys(versions, UNKNOWN) | known,
        "loaded": {"dtype": dtype, **({"parameters": parameters} if parameters else {}), "window": window},
    }


def selection_specification(logs: Sequence[LoggedTask], tasks: Sequence[LoggedPlaces]) -> dict[str, Any]:
    """Return the specification's entries about which documents of the tasks are in the logs of a run."""
    entry = shared_value(logs, "random sample", lambda log: log.results.evalkit)
    samples: list[DocumentSelection] = [DocumentSample(entry.sample, entry.seed)] if entry and entry.sample else []
    for selection in (*samples, ALL_DOCUMENTS, FirstDocuments(max(len(task.places) for task in tasks))):
        if all(task.places == selection.places(task.task, task.strata) for task in tasks):
            return selection.specification
    return selection_hash([(task.task, task.places) for task in tasks])


def selection_hash(documents: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the entries of any other documents, (task, what identifies its documents)."""
    return {"limit": None, "selection": text_digest(repr(documents))}


def log_caveats(logs: Mapping[str, Sequence[LoggedTask]]) -> dict[str, Any]:
    """Return the manifest's entry of what makes the metrics of tasks doubtful; empty if there is nothing.

    `logs` has the sample files of each task.
    """
    caveats: dict[str, list[str]] = {}
    for task, members in logs.items():
        texts = []
        count = sum(len(log.documents) for log in members)
        if mixed := sum(log.mixed for log in members):
            texts.append(
                f"lm-eval measured {mixed:,} of {count:,} documents against another one, since process_docs shuffles "
                "at each call; accuracies are computed from the log-likelihoods"
            )
        unanswerable = [sample for log in members for sample in log.documents if log.has_no_gold(sample)]
        if unanswerable:
            first = unanswerable[0]
            texts.append(
                f"{len(unanswerable):,} of {count:,} documents, document {first.doc_id} for one: gold answer "
                f"{printable(first.target)[:_SHOWN]} is not one of the {len(first.requests)} choices"
            )
        texts += repeated_prompts(sample.requests for log in members for sample in log.documents)
        if texts:
            caveats[task] = texts
    return {"caveats": caveats} if caveats else {}


def save_logs(writer: RunWriter, logs: Sequence[tuple[LoggedTask, Mapping[int, tuple[str, int]]]]) -> None:
    """Copy sample files, and the results files beside them, into the run folder's `lm_eval/`.

    With each file comes: number of a document in it → its leaf task and number in the run. A file that was changed
    since it was read is a `DataError`.
    """
    for log, names in logs:
        with reading_as(log.path, "a sample file", DataError):
            data = log.path.read_bytes()
        if hashlib.sha256(data).hexdigest() != log.digests[0]:
            raise DataError(f"{log.path} was changed while it was imported; import it again")
        lines: dict[str, list[bytes]] = defaultdict(list)
        for sample, line in zip(log.samples, data.removesuffix(b"\n").split(b"\n"), strict=True):
            task, number = names[sample.doc_id]
            is_same = number == sample.doc_id
            lines[task].append((line if is_same else json_bytes(parse_json(line) | {"doc_id": number})) + b"\n")
        for task, members in lines.items():
            writer.save_bytes(f"lm_eval/samples_{task}_{log.time}.jsonl", b"".join(members))
    for name, content in {log.results_path.name: log.results_data for log, _ in logs}.items():
        if content is not None:
            writer.save_bytes(f"lm_eval/{name}", content)
