"""What was asked, made into what a run is: its specification.

In: a `Request`, as the command line or `evalkit.evaluate` makes it. Out: a `Prepared` run with its manifest. Nothing
here needs torch, so a run that is already finished is found at once.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from evalkit import __version__
from evalkit.benchmarks.multiple_choice.suites import Suite, choose_tasks, load_suite, with_fewshot
from evalkit.benchmarks.multiple_choice.templates import SEGMENTS, Template, load_template
from evalkit.data import Documents, Library
from evalkit.data.files import did_you_mean, find
from evalkit.errors import DataError, UnknownNameError, UsageError
from evalkit.inputs import values
from evalkit.models.context import Extension
from evalkit.models.context_settings import UNSTRETCHED, context_settings, extension_of
from evalkit.models.fingerprint import fingerprint
from evalkit.models.locate import ATTENTION, Checkpoint, Say, locate, resolve_dtype, silent
from evalkit.reporting.escape import printable
from evalkit.runs.finding import run_folder
from evalkit.runs.folder import LM_EVAL, specification_id
from evalkit.runs.place import check_device
from evalkit.scores.rules import Rule, find_rule

SCORING_VERSION = 3
"""Raised whenever a change of evalkit changes a score: part of every run's specification."""

_WHOLE = {"limit": 1, "num_fewshot": 0, "token_budget": 1, "context": 1, "context_original": 1}
"""Fields of a request that are whole numbers, and the least that each can be."""
_WORDS: dict[str, tuple[str, str | None]] = {"token_budget": ("auto", None), "context": (UNSTRETCHED, UNSTRETCHED)}
"""Of these, fields that may be a word instead, and what it means."""
_SWITCHES = ("allow_pickle", "trust_remote_code", "allow_unofficial_data", "log_samples")
_PATHS = ("data_dir", "include_path", "output")
_NAMES_OR_PATHS = ("model", "tokenizer", "template", "context_config")

DEFAULT_SUITE = "zeroshot8"

_NUMERICS = ("lm-eval", "torch", "transformers", "tokenizers")
"""Libraries whose version can change a score."""


@dataclass(frozen=True)
class Request:
    """What a user can ask of an evaluation."""

    model: str
    """A checkpoint folder, a hub name, a GGUF file, or "demo"."""
    suite: str | None = None
    """A suite's name, or "lm_eval" for lm-eval's own tasks; None: zeroshot8 if it has all `tasks`, else lm_eval."""
    tasks: tuple[str, ...] = ()
    """Only these tasks of the suite, all where empty; of lm_eval its tasks, groups or tags."""
    include_path: Path | None = None
    """Folder of the user's own lm-eval task files, which may run Python code that lies beside them."""
    template: str | None = None
    """A template's name, or the path of a YAML file of the same form; None: inst, or plain for lm-eval's tasks."""
    rule: str | None = None
    """The rule of the result; None: `ppl` where the template scores whole sequences, else `acc`."""
    limit: int | None = None
    """Most documents of each task; None for all."""
    num_fewshot: int | None = None
    """How many solved examples stand before each question; None: none, or what an lm-eval task says itself."""
    data_dir: Path | None = None
    """Folder of `<task>.jsonl` files that comes before the hub."""
    output: Path = field(default_factory=lambda: Path("results/runs"))
    """Folder of run folders."""
    device: str = "auto"
    dtype: str = "auto"
    attention: str = "auto"
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    tokenizer: str | None = None
    """Another folder or hub name to take the tokenizer from."""
    context: int | Literal["none"] | None = None
    """Tokens that the model is to take at once, by stretching its context; "none": as many as it was trained on; None:
    the same, but for LongBench the paper's 8,192 where it was trained on fewer."""
    context_method: str | None = None
    """How: "yarn" (None), "dynamic-yarn", "linear", "ntk" or "none"."""
    context_original: int | None = None
    """Tokens of the window that it was trained on; None: what the checkpoint says."""
    context_config: str | None = None
    """All of this and more in a YAML file, or the name of one in `configs/context`."""
    token_budget: int | None = None
    """Most tokens in a batch; None: what fits."""
    allow_pickle: bool = False
    trust_remote_code: bool = False
    allow_unofficial_data: bool = False
    log_samples: bool = False
    """Also write lm-eval's per-document sample files."""


@dataclass(frozen=True)
class Prepared:
    """A request with everything found that does not need torch."""

    request: Request
    suite: Suite
    template: Template
    rule: Rule
    checkpoint: Checkpoint
    library: Library
    manifest: dict[str, Any]

    @property
    def unconditional(self) -> bool:
        """Whether choices are also scored without their context."""
        return bool(self.manifest["specification"]["unconditional"])

    @property
    def folder(self) -> Path:
        """The run's folder, whether it exists yet or not."""
        return run_folder(self.request.output, self.checkpoint, self.suite.name, self.template.name, self.manifest)


def prepare(request: Request, say: Say) -> Prepared:
    """Find out what a run is, and refuse what cannot be.

    Raises:
        EvalkitError: whatever is wrong with the request, the checkpoint or the documents.
    """
    if request.attention not in ATTENTION:
        raise UnknownNameError("attention implementation", request.attention, ATTENTION)
    suite = with_fewshot(
        choose_tasks(load_suite(request.suite or DEFAULT_SUITE), request.tasks), request.num_fewshot or 0
    )
    template = load_template(request.template or "inst")
    rule = _rule_of(request, template)
    checkpoint = locate_checkpoint(request, say)
    library = Library(request.data_dir, request.allow_unofficial_data, say)
    _check_data_dir(request, suite, library)
    specification, found = _specification(request, suite, template, rule, checkpoint, library, say)
    manifest = {
        "id": specification_id(specification),
        "specification": specification,
        "rule": rule.name,
        "groups": {group: list(tasks) for group, tasks in suite.groups.items()},
        "group_sizes": {group: suite.sizes[group] for group in suite.groups},
        **found,
        "template": asdict(template),
        **circumstances(request, checkpoint),
    }
    return Prepared(request, suite, template, rule, checkpoint, library, manifest)


def asks_lm_eval(request: Request, say: Say) -> bool:
    """Whether a request is for lm-eval's tasks and not for a suite; says so where the user did not.

    Raises:
        UsageError: a folder of task files beside a suite, which has its own.
    """
    if request.suite == LM_EVAL:
        return True
    if request.suite is not None:
        if request.include_path is not None:
            raise UsageError(f"--include-path adds lm-eval tasks; suite {request.suite} has its own: leave out --suite")
        return False
    known = load_suite(DEFAULT_SUITE).tasks
    if others := [task for task in request.tasks if task not in known]:
        say(f"{', '.join(others)}: not in suite {DEFAULT_SUITE}, so this is a run of lm-eval's tasks, with its prompts")
    elif request.include_path is not None:
        say("--include-path: this is a run of lm-eval's tasks, with its prompts")
    return bool(others) or request.include_path is not None


def circumstances(request: Request, checkpoint: Checkpoint) -> dict[str, Any]:
    """What every manifest tells beside the specification: by whom, when, where and with what it was made."""
    return {
        "model": named_model(request),
        "path": _path_of(checkpoint),
        "revision": checkpoint.revision,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(map(printable, sys.argv)),
        "hardware": {"machine": platform.machine(), "system": platform.platform()},
        "versions": {"evalkit": __version__}
        | {name: version(name) for name in (*_NUMERICS, "datasets", "numpy", "pandas", "pyarrow")}
        | {"python": platform.python_version()},
    }


def _path_of(checkpoint: Checkpoint) -> str | None:
    """Where a checkpoint of the user's own lies, from wherever it was named; None of one from the hub."""
    path = {"folder": checkpoint.folder, "gguf": checkpoint.gguf}.get(checkpoint.kind)
    return None if path is None else str(values.path("--model", path.resolve()))


def request_of(model: str | Path, options: dict[str, Any]) -> Request:
    """A request from keyword arguments, with paths, numbers and lists in the forms people write them.

    Raises:
        UsageError: an option that does not exist, or a value that is no number where one belongs.
    """
    known = Request.__dataclass_fields__
    for name in options:
        if name not in known:
            raise UnknownNameError("option", name, known)
    tidy = {name: checked(name, value) for name, value in options.items() if value is not None}
    if "device" in tidy:
        check_device(tidy["device"])
    return Request(model=checked("model", model), **tidy)


def checked(name: str, value: Any) -> Any:
    """A field's value in the form that the field has. Raises `UsageError` where it does not fit."""
    flag = f"--{name.replace('_', '-')}"
    if name in _WHOLE:
        word, meaning = _WORDS.get(name, ("", None))
        if word and value == word:
            return meaning
        return values.whole(flag, value, _WHOLE[name], word and f", or {word}")
    if name in _SWITCHES:
        return values.switch(flag, value)
    if name == "tasks":
        return values.names(flag, value)
    if name in _PATHS:
        return values.path(flag, value)
    return values.text(flag, str(value) if name in _NAMES_OR_PATHS and isinstance(value, Path) else value)


def _check_data_dir(request: Request, suite: Suite, library: Library) -> None:
    """A folder that holds none of the documents was meant to hold some."""
    names = {suite.documents.get(task, task) for task in suite.tasks}
    if request.data_dir is not None and all(library.where(name).source != "data-dir" for name in names):
        hint = did_you_mean(
            request.data_dir.expanduser(), lambda folder: sum(find(folder, name) is not None for name in names)
        )
        raise DataError(
            f"--data-dir {request.data_dir} holds no documents of {', '.join(sorted(names))}; "
            f"expected files named <task>.jsonl{hint}"
        )


def _rule_of(request: Request, template: Template) -> Rule:
    """The rule asked for, or the template's: the paper's where whole sequences are scored, else lm-eval's."""
    whole = set(template.score) == set(SEGMENTS)
    rule = find_rule(request.rule or ("ppl" if whole else "acc"))
    absent = [s for s in rule.segments if s not in template.score and s != "unconditional"]
    # A template without an end token or an instruction has nothing to score there
    present = {part.segment for part in template.parts} | ({"end"} if template.eos or template.chat else set())
    if lacking := [s for s in absent if template.chat or s in present]:
        raise UsageError(
            f"rule {rule.name} needs the log-likelihood of {', '.join(lacking)}, "
            f"which template {template.name} does not score; use --template inst or another rule"
        )
    return rule


def named_model(request: Request) -> str:
    """The checkpoint as a request names it, with the revision that is asked for."""
    return f"{request.model}@{request.revision}" if request.revision else request.model


def locate_checkpoint(request: Request, say: Say) -> Checkpoint:
    """Find the checkpoint that a request names."""
    return locate(
        named_model(request),
        tokenizer=request.tokenizer,
        allow_pickle=request.allow_pickle,
        trust_remote_code=request.trust_remote_code,
        say=say,
    )


def context_extension(request: Request, checkpoint: Checkpoint, say: Say = silent) -> Extension | None:
    """How a request has its checkpoint's context stretched, if it has.

    Raises:
        UsageError, CheckpointError: it cannot be.
    """
    settings = context_settings(
        request.context, request.context_method, request.context_original, request.context_config
    )
    return extension_of(checkpoint, settings, say)


def numerics(request: Request, checkpoint: Checkpoint, say: Say = silent) -> dict[str, Any]:
    """What determines the numbers of any run, whatever its tasks are."""
    prints, extension = fingerprint(checkpoint), context_extension(request, checkpoint, say)
    return {
        "scoring": SCORING_VERSION,
        "versions": {name: version(name) for name in _NUMERICS},
        "checkpoint": {"weights": prints.weights, "config": prints.config, "tokenizer": prints.tokenizer},
        "dtype": resolve_dtype(checkpoint, request.dtype),
        "attention": request.attention,
        "context_extension": None if extension is None else extension.specification(),
        "limit": request.limit,
    }


def _specification(
    request: Request,
    suite: Suite,
    template: Template,
    rule: Rule,
    checkpoint: Checkpoint,
    library: Library,
    say: Say,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """All that determines the numbers, and where each task's documents and few-shot examples came from."""
    found = {"documents": {task: library.load(suite.documents.get(task, task)) for task in suite.tasks}}
    if suite.num_fewshot:
        found["examples"] = {task: library.load(suite.fewshot[task].documents) for task in suite.tasks}
    specification = {
        **numerics(request, checkpoint, say),
        "suite": suite.name,
        **{kind: {task: loaded.content_hash for task, loaded in sets.items()} for kind, sets in found.items()},
        "template": template.content_hash,
        "unconditional": "unconditional" in rule.segments,
        "num_fewshot": suite.num_fewshot,
    }
    sources = {kind: {task: _source_of(loaded) for task, loaded in sets.items()} for kind, sets in found.items()}
    return specification, sources


def _source_of(documents: Documents) -> dict[str, Any]:
    return {"source": documents.source, "official": documents.official, "count": len(documents.records)}
