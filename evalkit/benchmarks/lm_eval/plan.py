"""The plan of a run of lm-eval's tasks.

In: a `SuiteRequest`. Out: a `TaskPlan` with a manifest, whose requests lm-eval builds. Torch is not imported, so a
finished run is found without it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path, PurePath
from typing import Any

from evalkit.benchmarks.base import RequestPlan
from evalkit.benchmarks.lm_eval.encoding import TaskModelRequests
from evalkit.benchmarks.lm_eval.requests import (
    GENERATED,
    ROLLING,
    ModelRequest,
    build_requests,
    group_by_task,
    requests_of,
)
from evalkit.benchmarks.request import SuiteRequest, numerics, plain_manifest, shared_library
from evalkit.data.sampling import number_of, spread
from evalkit.display import Say, doing
from evalkit.errors import DataError, UsageError, reading_as
from evalkit.models.context.extension import Extension, refuse_generation
from evalkit.models.loading.files import generation_settings
from evalkit.models.loading.fingerprint import stable
from evalkit.models.loading.locate import Checkpoint
from evalkit.requests.requests import RunRequests
from evalkit.runs.finding import run_folder
from evalkit.runs.folder import LM_EVAL
from evalkit.suites.lm_eval_tasks import (
    RandomState,
    TaskSet,
    load_tasks,
    matching_tasks,
    quiet_lm_eval,
    random_state,
)
from evalkit.suites.suites import refuse_duplicate_tasks
from evalkit.suites.task_checks import task_caveats
from evalkit.suites.task_identity import SEEDS, code_hash, digest_of, set_seeds, source_of, task_specification
from evalkit.suites.templates import load_template

_BLOCK = 4
"""Documents next to each other in a sample for estimates."""


@dataclass(frozen=True)
class TaskPlan(RequestPlan):
    """A resolved request: checkpoint, tasks and manifest."""

    request: SuiteRequest
    checkpoint: Checkpoint
    tasks: TaskSet
    manifest: dict[str, Any]
    randomness: RandomState

    @cached_property
    def model_requests(self) -> dict[str, list[ModelRequest]]:
        """The distinct requests by the journal's task names, which lm-eval builds and keeps as `task.instances`."""
        self.randomness.restore()
        with doing("building requests"):
            tasks = self.tasks.tasks.values()
            return group_by_task(instance for task in tasks for instance in build_requests(task, self.request.limit))

    @cached_property
    def requests(self) -> RunRequests:
        _ = self.caveats  # a task that cannot be measured is refused before a model is loaded
        tasks = [TaskModelRequests(str(members[0].task), members) for members in self.model_requests.values()]
        return RunRequests(tasks, budget=self.request.token_budget)

    def sampled(self, sample: int) -> RunRequests:
        sampled = []
        self.randomness.restore()
        for name, task in self.tasks.tasks.items():
            documents = len(self.request.selection.places(name, [name] * len(task.eval_docs)))
            numbers = spread(documents, sample, _BLOCK)
            for requests in group_by_task(build_requests(task, documents, set(numbers))).values():
                sampled.append(TaskModelRequests(name, requests, sizes={name: documents}))
        return RunRequests(sampled)

    def shown_prompts(self, count: int, say: Say) -> Iterator[str]:
        from evalkit.benchmarks.lm_eval.views import shown_requests

        return shown_requests(self, count, say)

    @cached_property
    def caveats(self) -> dict[str, list[str]]:
        """Task → what makes its metrics doubtful; `task_checks.task_caveats` says what raises an error."""
        _ = self.model_requests
        caveats = {}
        with quiet_lm_eval():
            for name, task in self.tasks.tasks.items():
                with reading_as(f"task {name}", "documents to measure", DataError):
                    caveats[name] = task_caveats(task)
        return caveats

    @property
    def folder(self) -> Path:
        names = "+".join(self.tasks.names)
        return run_folder(self.request.output, self.checkpoint, LM_EVAL, names, self.manifest)


def plan_tasks(request: SuiteRequest, say: Say) -> TaskPlan:
    if not request.tasks:
        raise UsageError("lm-eval's tasks must be named: --tasks lambada_openai,sciq, or a group such as mmlu")
    request = replace(request, tasks=matching_tasks(request.tasks, request.suite, request.include_path, say))
    refuse_duplicate_tasks(request.tasks)
    # Template plain has lm-eval's prompts
    given: dict[str, object] = {name: getattr(request, name) for name in ("rule", "vary", "control", "requests")}
    given["template"] = request.template not in (None, "plain")
    if names := [name for name, value in given.items() if value]:
        raise UsageError(f"suite lm_eval has its tasks' own prompts and rules; leave it out, or --{names[0]}")
    library = shared_library(request, say)
    set_seeds()
    with doing("loading lm-eval's tasks"):
        tasks = load_tasks(request.tasks, request.include_path, request.num_fewshot, library, say)
    if request.data_dir is not None and not tasks.pinned:
        raise UsageError(
            f"--data-dir {request.data_dir}: is for evalkit's own tasks, and none of these is one "
            f"({', '.join(request.tasks)}); leave it out, since a task file names its own documents"
        )
    zero_shot = _set_fewshot(tasks, request.num_fewshot)
    if request.num_fewshot and zero_shot:
        say(f"--num-fewshot {request.num_fewshot} is not for {', '.join(zero_shot)}: zero-shot by definition")
    for name, task in tasks.tasks.items():
        if request.sample is not None:
            _restrict(task, request.selection.places(name, [name] * len(task.eval_docs)))
        # Errors of a task occur before a model is loaded
        requests_of(build_requests(task, 1))
        if request.log_samples:
            _check_name_of_file(name)
    checkpoint = request.model.locate(say)
    documents = {}
    for name, task in tasks.tasks.items():
        source = source_of(task, name in tasks.pinned, library)
        documents[name] = source | {"count": number_of(request.selection, source["total"])}
    with doing("hashing the tasks' documents"):
        specification = _specification(request, tasks, checkpoint, say)
    manifest = plain_manifest(
        *(LM_EVAL, request, checkpoint, specification),
        # The rule of the multiple-choice tasks, which become a group when their score table is written
        rule="acc",
        documents=documents,
        template=asdict(load_template("plain")),
        include_path=str(request.include_path) if request.include_path else None,
    )
    return TaskPlan(request, checkpoint, tasks, manifest, random_state())


def _set_fewshot(tasks: TaskSet, number: int | None) -> list[str]:
    """Set the tasks' numbers of solved examples, by default their own, otherwise 0; return the zero-shot tasks.

    As in `lm_eval.simple_evaluate`, a task's own 0 is not overridden; and a text that is scored alone has no examples.
    """
    zero_shot = []
    for name, task in tasks.tasks.items():
        own = task.get_config("num_fewshot")
        if own == 0 or task.OUTPUT_TYPE == ROLLING:
            zero_shot.append(name)
            task.set_config(key="num_fewshot", value=0)
        elif own is None or number is not None:
            task.set_config(key="num_fewshot", value=number or 0)
    return zero_shot


def _restrict(task: Any, numbers: Collection[int]) -> None:
    """Make a task iterate over some of its documents, in order; lm-eval's `samples` would renumber them."""
    every, chosen = task.doc_iterator, frozenset(numbers)

    def restricted(*, limit: int | None = None, **_: Any) -> Iterator[tuple[int, Any]]:
        return islice(((number, doc) for number, doc in every(rank=0, world_size=1) if number in chosen), limit)

    task.doc_iterator = restricted


def _check_name_of_file(name: str) -> None:
    # File systems allow 255 bytes for a name; the rest is for the affixes of lm-eval's sample files
    if ".." in PurePath(name).parts or len(os.fsencode(name)) > 200:
        raise UsageError(
            f"task {name[:60]}: --log-samples names a file in the run's folder after the task, whose name is "
            "a path out of it, or has more than 200 bytes; rename the task in its file"
        )


def _specification(request: SuiteRequest, tasks: TaskSet, checkpoint: Checkpoint, say: Say) -> dict[str, Any]:
    generating = [name for name, task in tasks.tasks.items() if task.OUTPUT_TYPE == GENERATED]
    numerical = numerics(request.model, checkpoint, request.limit, say)
    generation = None
    if generating:
        if numerical["context_extension"]:
            refuse_generation(Extension(**numerical["context_extension"]), generating[0])
        # A GGUF file's settings are part of its content hash. A difference in the last bit, of another device, may
        # change a token and the rest of a text
        settings = None if checkpoint.gguf is not None else stable(generation_settings(checkpoint.folder))
        generation = {"device": request.model.device, "config": settings}
    shots = {task.get_config("num_fewshot") for task in tasks.tasks.values()}
    return {
        **numerical,
        **request.selection.specification,
        "suite": LM_EVAL,
        "generation": generation,
        "groups": {
            name: digest_of([group.aggregate_metric_list or [], sorted(group.child_names)])
            for name, group in tasks.groups.items()
        },
        "names": list(tasks.names),
        "tasks": {name: task_specification(task, request.limit) for name, task in tasks.tasks.items()},
        "code": None if request.include_path is None else code_hash(request.include_path),
        "num_fewshot": shots.pop() if len(shots) == 1 else None,
        "seeds": SEEDS,
    }
