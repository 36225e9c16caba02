"""The plan of a run of lm-eval's tasks.

In: a `SuiteRequest`. Out: a `TaskPlan` with a manifest. Torch is not imported, so a finished run is found without it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

from evalkit.benchmarks.lm_eval.calls import RandomState, quiet_lm_eval, random_state, restrict
from evalkit.benchmarks.lm_eval.catalogue import SUPPORTED, TaskSet, load_tasks
from evalkit.benchmarks.lm_eval.requests import LMEvalRequest, group_by_task
from evalkit.benchmarks.multiple_choice.suites import refuse_duplicate_tasks
from evalkit.benchmarks.multiple_choice.templates import load_template
from evalkit.benchmarks.request import SuiteRequest, numerics, provenance, shared_library
from evalkit.data import Library
from evalkit.display import Say, doing
from evalkit.errors import DataError, EvalkitError, ScoringError, UsageError, first_line
from evalkit.inputs.reading import MOST_BYTES, Unreadable, read_bytes
from evalkit.models.context import Extension, refuse_generation
from evalkit.models.files import generation_settings
from evalkit.models.fingerprint import stable
from evalkit.models.locate import Checkpoint
from evalkit.runs.finding import run_folder
from evalkit.runs.folder import LM_EVAL, specification_id

SEEDS = {"random": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234}
"""lm-eval's default seeds."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""The memory address in the repr of a function, which differs in every process."""

_LONGEST_NAME = 200
"""Bytes of a task's name. File systems allow 255 for a file name; the rest is for the sample files' affixes."""


@dataclass(frozen=True)
class TaskPlan:
    """A resolved request: checkpoint, tasks and manifest."""

    request: SuiteRequest
    checkpoint: Checkpoint
    tasks: TaskSet
    manifest: dict[str, Any]
    randomness: RandomState

    @cached_property
    def requests(self) -> Sequence[Any]:
        """All of lm-eval's requests to the model."""
        self.randomness.restore()
        for task in self.tasks.tasks.values():
            _add_task_to_errors(task)
            # Again, since the sampler's state changes with every document
            task.set_fewshot_seed(SEEDS["fewshot"])
        with quiet_lm_eval(), doing("building requests"):
            for task in self.tasks.tasks.values():
                task.build_all_requests(limit=self.request.limit, rank=0, world_size=1)
                # lm-eval's `evaluate` would build them again
                task.build_all_requests = _already_built
        return [request for task in self.tasks.tasks.values() for request in task.instances]

    @cached_property
    def requests_by_task(self) -> dict[str, list[LMEvalRequest]]:
        """The distinct requests by the journal's task names, see `group_by_task`."""
        return group_by_task(self.requests)

    @property
    def folder(self) -> Path:
        """The run's folder, which may not exist yet."""
        names = "+".join(self.tasks.names)
        return run_folder(self.request.output, self.checkpoint, LM_EVAL, names, self.manifest)


def plan_tasks(request: SuiteRequest, say: Say) -> TaskPlan:
    """Validate a request and resolve it into a plan.

    Raises:
        EvalkitError: the request, a task, its documents or the checkpoint are not valid.
    """
    _check_request(request)
    library = shared_library(request, say)
    set_seeds()
    with doing("loading lm-eval's tasks"):
        tasks = load_tasks(request.tasks, request.include_path, request.num_fewshot, library, say)
    if request.data_dir is not None and not tasks.pinned:
        raise UsageError(
            f"--data-dir {request.data_dir}: is for evalkit's own tasks, and none of these is one "
            f"({', '.join(request.tasks)}); leave it out, since a task file names its own documents"
        )
    for task in tasks.tasks.values():
        _set_fewshot(task, request.num_fewshot)
        if request.sample is not None:
            restrict(task, request.selection.places(task.task_name, [task.task_name] * len(task.eval_docs)))
        check_first_request(task)
    if request.log_samples:
        _check_names_of_files(tasks)
    checkpoint = request.model.locate(say)
    with doing("hashing the tasks' documents"):
        specification = _specification(request, tasks, checkpoint, say)
    manifest = {
        "id": specification_id(specification),
        "kind": LM_EVAL,
        "specification": specification,
        "rule": "acc",
        # Set to the multiple-choice tasks when their score table is written
        "groups": {},
        "group_sizes": {},
        "documents": {name: source_of(task, name in tasks.pinned, library) for name, task in tasks.tasks.items()},
        "template": asdict(load_template("plain")),
        "include_path": str(request.include_path) if request.include_path else None,
        **provenance(request.model, checkpoint),
    }
    return TaskPlan(request, checkpoint, tasks, manifest, random_state())


def first_requests(task: Any, count: int, places: Collection[int] | None = None) -> list[Any]:
    """Return lm-eval's requests for the first documents of a task, or for those at some places among them.

    Raises:
        DataError: lm-eval cannot build them; names task and document.
    """
    task.set_fewshot_seed(SEEDS["fewshot"])
    found: list[Any] = []
    doc_id = 0
    try:
        for place, (doc_id, doc) in enumerate(task.doc_iterator(rank=0, limit=count, world_size=1)):
            if places is not None and place not in places:
                continue
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
    """Build the requests of one document, so that errors of a task occur before a model is loaded."""
    for request in first_requests(task, 1):
        if request.request_type not in SUPPORTED or len(request.args) > 2:
            raise ScoringError(
                f"task {task.task_name} has requests of type '{request.request_type}' with {len(request.args)} "
                f"arguments; evalkit supports {', '.join(SUPPORTED)} on text"
            )


def _check_request(request: SuiteRequest) -> None:
    if not request.tasks:
        raise UsageError("lm-eval's tasks must be named: --tasks lambada_openai,sciq, or a group such as mmlu")
    refuse_duplicate_tasks(request.tasks)
    if request.vary:
        raise UsageError("--vary: suite lm_eval has its tasks' own prompts; leave out --suite lm_eval, or --vary")


def set_seeds() -> None:
    """Set seeds as in `lm_eval.simple_evaluate`, before tasks are loaded; each text has its own seed (`texts.py`)."""
    import random

    import numpy as np

    random.seed(SEEDS["random"])
    np.random.seed(SEEDS["numpy"])


def _set_fewshot(task: Any, num_fewshot: int | None) -> None:
    """Set the number of few-shot examples as in `lm_eval.simple_evaluate`: a task's own 0 is not overridden."""
    own = task.get_config("num_fewshot")
    if num_fewshot is not None and own != 0:
        task.set_config(key="num_fewshot", value=num_fewshot)
    elif own is None:
        task.set_config(key="num_fewshot", value=0)


def _specification(request: SuiteRequest, tasks: TaskSet, checkpoint: Checkpoint, say: Say) -> dict[str, Any]:
    generating = [name for name, task in tasks.tasks.items() if task.OUTPUT_TYPE == "generate_until"]
    numerical = numerics(request.model, checkpoint, request.limit, say)
    if generating and numerical["context_extension"]:
        refuse_generation(Extension(**numerical["context_extension"]), generating[0])
    return {
        **numerical,
        **request.selection.specification,
        "suite": LM_EVAL,
        # A difference in the last bit may change a token and the rest of a text
        "generation": _generation(request, checkpoint) if generating else None,
        "groups": _group_specification(tasks),
        "names": list(tasks.names),
        "tasks": {name: task_specification(task, request.limit) for name, task in tasks.tasks.items()},
        "code": None if request.include_path is None else code_hash(request.include_path),
        "num_fewshot": request.num_fewshot,
        "seeds": SEEDS,
    }


def _generation(request: SuiteRequest, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the further settings that generated texts depend on; a GGUF file's are part of its content hash."""
    settings = None if checkpoint.gguf is not None else stable(generation_settings(checkpoint.folder))
    return {"device": request.model.device, "config": settings}


def _group_specification(tasks: TaskSet) -> dict[str, str]:
    """Return a hash of each group's aggregation and members."""
    return {
        name: _hash([group.aggregate_metric_list or [], sorted(group.child_names)])
        for name, group in tasks.groups.items()
    }


def task_specification(task: Any, limit: int | None) -> dict[str, Any]:
    """Return what determines a task's numbers: output type, version, and hashes of config, documents and examples."""
    with quiet_lm_eval():
        documents = [doc for _, doc in task.doc_iterator(rank=0, limit=limit, world_size=1)]
        config = task.dump_config()
    # The location of the task file does not matter
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
    """Return the SHA-256 of things as JSON; values without a JSON form enter as `str`, without memory addresses."""
    digest = hashlib.sha256()
    for thing in things:
        text = json.dumps(thing, sort_keys=True, ensure_ascii=False, default=str)
        digest.update(_ADDRESS.sub("", text).encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()


def code_hash(folder: Path) -> str:
    """Return a hash of the Python files in a folder of task files, whose imports a task's config does not show."""
    files = sorted(path for path in folder.rglob("*.py") if path.is_file())
    try:
        texts = {path: read_bytes(path, MOST_BYTES).decode("utf-8", "replace") for path in files}
        return _hash([path.relative_to(folder).as_posix(), _newlines(text)] for path, text in texts.items())
    except OSError as error:
        raise DataError(f"--include-path {folder}: {error.filename} cannot be read ({error.strerror})") from error
    except Unreadable as error:
        raise DataError(f"--include-path {folder}: a Python file in it {error}") from error


def _newlines(text: str) -> str:
    """Return a text with line feeds as line ends, as Python reads source files."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def source_of(task: Any, pinned: bool, library: Library) -> dict[str, Any]:
    """Return the provenance of a task's documents. Those not pinned by evalkit have the source in the task file."""
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


def _check_names_of_files(tasks: TaskSet) -> None:
    """Raise a `UsageError` if a task's name is too long for lm-eval's name of its sample file, or leaves the folder."""
    for name in tasks.tasks:
        if ".." in PurePath(name).parts:
            raise UsageError(
                f"task {name}: its name is a path out of the run's folder, and --log-samples needs it for a file; "
                "rename it in the task file"
            )
        if (size := len(os.fsencode(name))) > _LONGEST_NAME:
            raise UsageError(
                f"task {name[:60]}…: its name has {size} bytes, and --log-samples needs names of at most "
                f"{_LONGEST_NAME} for file names; shorten it in the task file"
            )


def _already_built(**_: Any) -> None:
    """Replacement of `build_all_requests` for a task whose requests are built."""


def _add_task_to_errors(task: Any) -> None:
    """Wrap the methods of a task so that their errors name it."""

    def wrapped(step: Callable[..., Any], what: str) -> Callable[..., Any]:
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

    task.build_all_requests = wrapped(task.build_all_requests, "build its requests")
    task.process_results = wrapped(task.process_results, "measure a document")
