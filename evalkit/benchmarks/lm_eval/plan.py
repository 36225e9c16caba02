"""What was asked of lm-eval's tasks, made into what a run is: its specification.

In: a `SuiteRequest`. Out: `TaskPlan` with a manifest. Nothing here needs torch, so a finished run is found without it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from evalkit.activity import doing
from evalkit.benchmarks.lm_eval.catalogue import SERVED, TaskSet, load_tasks
from evalkit.benchmarks.lm_eval.quiet import quiet_lm_eval
from evalkit.benchmarks.lm_eval.requests import LMEvalRequest, asked_of
from evalkit.benchmarks.multiple_choice.suites import refuse_duplicate_tasks
from evalkit.benchmarks.multiple_choice.templates import load_template
from evalkit.benchmarks.request import numerics, provenance
from evalkit.benchmarks.suite_request import SuiteRequest
from evalkit.data import Library
from evalkit.errors import DataError, EvalkitError, ScoringError, UsageError, first_line
from evalkit.inputs.reading import MOST_BYTES, Unreadable, read_bytes
from evalkit.models.context import Extension, refuse_generation
from evalkit.models.files import generation_settings
from evalkit.models.fingerprint import stable
from evalkit.models.locate import Checkpoint, Say
from evalkit.runs.finding import run_folder
from evalkit.runs.folder import LM_EVAL, specification_id

SEEDS = {"random": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234}
"""lm-eval's defaults."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Where Python says in which place of memory a function lies, which is another one every time."""

_LONGEST_NAME = 200
"""Bytes of a task's name: file systems take 255, of which the rest of a sample file's name needs some."""


@dataclass(frozen=True)
class TaskPlan:
    """A request with everything found that does not need torch."""

    request: SuiteRequest
    checkpoint: Checkpoint
    tasks: TaskSet
    manifest: dict[str, Any]

    @cached_property
    def requests(self) -> Sequence[Any]:
        """All that lm-eval asks of a model."""
        for task in self.tasks.tasks.values():
            _name_errors(task)
            # Anew, since the sampler moves with every document that is asked for
            task.set_fewshot_seed(SEEDS["fewshot"])
        with quiet_lm_eval(), doing("building requests"):
            for task in self.tasks.tasks.values():
                task.build_all_requests(limit=self.request.limit, rank=0, world_size=1)
                # lm-eval's `evaluate` would build them anew
                task.build_all_requests = _already_built
        return [request for task in self.tasks.tasks.values() for request in task.instances]

    @cached_property
    def asked(self) -> dict[str, list[LMEvalRequest]]:
        """The same as the journal has them, see `asked_of`."""
        return asked_of(self.requests)

    @property
    def folder(self) -> Path:
        """The run's folder, whether it exists yet or not."""
        named = "+".join(self.tasks.names)
        return run_folder(self.request.output, self.checkpoint, LM_EVAL, named, self.manifest)


def plan_tasks(request: SuiteRequest, say: Say) -> TaskPlan:
    """Find out what a run is, and refuse what cannot be.

    Raises:
        EvalkitError: whatever is wrong with the request, the tasks, their documents or the checkpoint.
    """
    _check_request(request)
    library = Library(request.data_dir, request.allow_unofficial_data, say)
    set_seeds()
    with doing("loading lm-eval's tasks"):
        tasks = load_tasks(request.tasks, request.include_path, request.num_fewshot, library, say)
    if request.data_dir is not None and not tasks.pinned:
        raise UsageError(
            f"--data-dir {request.data_dir}: serves evalkit's own tasks, and none of these is one "
            f"({', '.join(request.tasks)}); a task file names its documents itself"
        )
    for task in tasks.tasks.values():
        _set_fewshot(task, request.num_fewshot)
        check_first_request(task)
    if request.log_samples:
        _refuse_long_names(tasks)
    checkpoint = request.model.locate(say)
    with doing("hashing the tasks' documents"):
        specification = _specification(request, tasks, checkpoint, say)
    manifest = {
        "id": specification_id(specification),
        "kind": LM_EVAL,
        "specification": specification,
        "rule": "acc",
        # Filled with the multiple-choice tasks when their score table is written
        "groups": {},
        "group_sizes": {},
        "documents": {name: source_of(task, name in tasks.pinned, library) for name, task in tasks.tasks.items()},
        "template": asdict(load_template("plain")),
        "include_path": str(request.include_path) if request.include_path else None,
        **provenance(request.model, checkpoint),
    }
    return TaskPlan(request, checkpoint, tasks, manifest)


def first_requests(task: Any, count: int) -> list[Any]:
    """What lm-eval asks of a model for a task's first documents.

    Raises:
        DataError: lm-eval cannot build them; names the task and the document.
    """
    task.set_fewshot_seed(SEEDS["fewshot"])
    found: list[Any] = []
    doc_id = 0
    try:
        for doc_id, doc in task.doc_iterator(rank=0, limit=count, world_size=1):
            context = task.fewshot_context(
                doc, num_fewshot=task.config.num_fewshot or 0, gen_prefix=task.doc_to_prefix(doc)
            )
            built = task.construct_requests(doc=doc, ctx=context, metadata=(task.task_name, doc_id, 1))
            found += built if isinstance(built, list) else [built]
    except EvalkitError:
        raise
    except Exception as error:
        raise DataError(
            f"task {task.task_name}: lm-eval cannot build the request of document {doc_id} "
            f"({type(error).__name__}: {first_line(error)})"
        ) from error
    return found


def check_first_request(task: Any) -> None:
    """Build one document's requests, so that a task that cannot be run is told before a model is loaded.

    Raises:
        DataError: lm-eval cannot build them.
        ScoringError: they are of a kind that evalkit does not serve.
    """
    for request in first_requests(task, 1):
        if request.request_type not in SERVED or len(request.args) > 2:
            raise ScoringError(
                f"task {task.task_name} asks for '{request.request_type}' with {len(request.args)} arguments; "
                f"evalkit serves {', '.join(SERVED)} on text"
            )


def _check_request(request: SuiteRequest) -> None:
    if not request.tasks:
        raise UsageError("lm-eval's tasks must be named: --tasks lambada_openai,sciq, or a group such as mmlu")
    refuse_duplicate_tasks(request.tasks)


def set_seeds() -> None:
    """As `lm_eval.simple_evaluate` does, before tasks are loaded; each text has a seed of its own (`texts.py`)."""
    import random

    import numpy as np

    random.seed(SEEDS["random"])
    np.random.seed(SEEDS["numpy"])


def _set_fewshot(task: Any, asked: int | None) -> None:
    """As `lm_eval.simple_evaluate` does: a task that says 0 itself keeps to it."""
    own = task.get_config("num_fewshot")
    if asked is not None and own != 0:
        task.set_config(key="num_fewshot", value=asked)
    elif own is None:
        task.set_config(key="num_fewshot", value=0)


def _specification(request: SuiteRequest, tasks: TaskSet, checkpoint: Checkpoint, say: Say) -> dict[str, Any]:
    generating = [name for name, task in tasks.tasks.items() if task.OUTPUT_TYPE == "generate_until"]
    found = numerics(request.model, checkpoint, request.limit, say)
    if generating and found["context_extension"]:
        refuse_generation(Extension(**found["context_extension"]), generating[0])
    return {
        **found,
        "suite": LM_EVAL,
        # A last bit may change a text, and with it all that follows
        "generation": _generation(request, checkpoint) if generating else None,
        "groups": _group_specification(tasks),
        "names": list(tasks.names),
        "tasks": {name: task_specification(task, request.limit) for name, task in tasks.tasks.items()},
        "code": None if request.include_path is None else code_hash(request.include_path),
        "num_fewshot": request.num_fewshot,
        "seeds": SEEDS,
    }


def _generation(request: SuiteRequest, checkpoint: Checkpoint) -> dict[str, Any]:
    """What generated texts depend on beside the rest; of a GGUF file, whose content counts, no settings."""
    settings = None if checkpoint.gguf is not None else stable(generation_settings(checkpoint.folder))
    return {"device": request.model.device, "config": settings}


def _group_specification(tasks: TaskSet) -> dict[str, str]:
    """How each group aggregates what."""
    return {
        name: _hash([group.aggregate_metric_list or [], sorted(group.child_names)])
        for name, group in tasks.groups.items()
    }


def task_specification(task: Any, limit: int | None) -> dict[str, Any]:
    with quiet_lm_eval():
        documents = [doc for _, doc in task.doc_iterator(rank=0, limit=limit, world_size=1)]
        config = task.dump_config()
    # Where the task's file lies is not what it says
    config["metadata"] = {k: v for k, v in (config.get("metadata") or {}).items() if k != "config_source"}
    shots = task.config.num_fewshot or 0
    return {
        "output_type": task.OUTPUT_TYPE,
        "version": task.VERSION,
        "num_fewshot": shots,
        "config": _hash([config]),
        "documents": _hash(documents),
        "examples": _hash(task.sampler.df) if shots and hasattr(task, "sampler") else None,
    }


def _hash(things: Any) -> str:
    """SHA-256 over JSON, with whatever JSON has no form for as Python writes it, less its place in memory."""
    digest = hashlib.sha256()
    for thing in things:
        text = json.dumps(thing, sort_keys=True, ensure_ascii=False, default=str)
        digest.update(_ADDRESS.sub("", text).encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()


def code_hash(folder: Path) -> str:
    """Of the Python files beside the task files, of which a task's configuration shows only what it names itself."""
    files = sorted(path for path in folder.rglob("*.py") if path.is_file())
    try:
        texts = {path: read_bytes(path, MOST_BYTES).decode("utf-8", "replace") for path in files}
        return _hash([path.relative_to(folder).as_posix(), _newlines(text)] for path, text in texts.items())
    except OSError as error:
        raise DataError(f"--include-path {folder}: {error.filename} cannot be read ({error.strerror})") from error
    except Unreadable as error:
        raise DataError(f"--include-path {folder}: a Python file in it {error}") from error


def _newlines(text: str) -> str:
    """With the ends of lines that Python reads."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def source_of(task: Any, pinned: bool, library: Library) -> dict[str, Any]:
    """Where a task's documents came from. Those that evalkit has not pinned are what the task's file names."""
    count = len(task.eval_docs)
    if pinned:
        documents = library.load(task.config.dataset_kwargs["documents"])
        return {"source": documents.source, "official": documents.official, "count": count}
    config = task.config
    files = (config.dataset_kwargs or {}).get("data_files")
    place = " ".join(str(part) for part in (config.dataset_path or "its own code", config.dataset_name) if part)
    return {"source": f"{place} {_file_names(files)}".strip(), "official": True, "count": count}


def _file_names(files: Any) -> str:
    values = files.values() if isinstance(files, dict) else [files] if files else []
    return ", ".join(str(value) for value in values)


def _refuse_long_names(tasks: TaskSet) -> None:
    """Raise a `UsageError` where a sample file could not be named after its task, as lm-eval names it."""
    for name in tasks.tasks:
        if (size := len(os.fsencode(name))) > _LONGEST_NAME:
            raise UsageError(
                f"task {name[:60]}…: its name has {size} bytes, and --log-samples needs names of at most "
                f"{_LONGEST_NAME} to name files after; give it a shorter one in its task file"
            )


def _already_built(**_: Any) -> None:
    """In place of a task's `build_all_requests`."""


def _name_errors(task: Any) -> None:
    """Let what goes wrong inside a task name it."""

    def named(step: Callable[..., Any], what: str) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            try:
                return step(*arguments, **options)
            except EvalkitError:
                raise
            except Exception as error:
                raise DataError(
                    f"task {task.task_name}: lm-eval cannot {what} ({type(error).__name__}: {first_line(error)})"
                ) from error

        return run

    task.build_all_requests = named(task.build_all_requests, "build its requests")
    task.process_results = named(task.process_results, "measure a document")
