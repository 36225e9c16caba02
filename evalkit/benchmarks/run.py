"""Evaluation: a model, a suite and settings → a finished run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from evalkit.benchmarks.base import Benchmark, Plan
from evalkit.benchmarks.registry import benchmark, kind_of_suite
from evalkit.benchmarks.request import DEFAULT_SUITE, Request, SuiteRequest, request_of
from evalkit.benchmarks.session import run_plan
from evalkit.display import Progress, Say
from evalkit.errors import UnknownNameError, UsageError
from evalkit.inputs import values
from evalkit.models.spec import ModelSpec
from evalkit.paths import RUNS
from evalkit.runs.folder import Run

if TYPE_CHECKING:
    from torch.nn import Module
    from transformers import PreTrainedTokenizerBase

_SWITCHES = ("log_samples", "allow_unofficial_data")
_LISTS = ("tasks", "vary")
_SHARED = {*ModelSpec.__dataclass_fields__, *SuiteRequest.__dataclass_fields__}
"""Settings that are parameters of `evaluate` and options on the command line."""


def evaluate(
    model: str | Path | Module,
    *,
    suite: str | Path | None = None,
    tasks: str | Sequence[str] = (),
    include_path: str | Path | None = None,
    template: str | Path | None = None,
    rule: str | None = None,
    limit: int | None = None,
    sample: int | None = None,
    seed: int | None = None,
    num_fewshot: int | None = None,
    vary: str | Path | Sequence[str] = (),
    data_dir: str | Path | None = None,
    log_samples: bool = False,
    allow_unofficial_data: bool = False,
    settings: Mapping[str, Any] | None = None,
    output: str | Path = RUNS,
    token_budget: int | Literal["auto"] | None = None,
    name: str | None = None,
    revision: str | None = None,
    tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
    device: str = "auto",
    device_map: str = "none",
    dtype: str = "auto",
    attention: str = "auto",
    context: int | Literal["none"] | None = None,
    context_method: str | None = None,
    context_original: int | None = None,
    context_config: str | Path | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Run:
    """Evaluate a checkpoint or a model in memory; resume an interrupted run, and open a finished one.

    Args:
        model: a checkpoint folder, a hub name, a GGUF file, or "demo"; or a `transformers.PreTrainedModel`, which is
            evaluated in place and left unchanged.
        suite: a suite's name (`evalkit ls suites`), or a YAML file; None: zeroshot8, or lm_eval if a task is not in
            zeroshot8.
        tasks: tasks of the suite, a list or comma-separated; empty: all. For suite lm_eval: tasks, groups or tags.
        include_path: folder of your own lm-eval task files, which can run Python code next to them.
        template: how prompts are written: "inst", "plain", "chat", or a YAML file; None: inst, or lm-eval's
            prompts for suite lm_eval.
        rule: how an answer is chosen (`evalkit ls rules`); None: "ppl" if the template scores whole sequences, else
            "acc".
        limit: maximum number of documents of each task, the first ones; None: all.
        sample: number of random documents of each task, stratified over its subjects and the same for every model; a
            larger sample contains the smaller one; None: no sample.
        seed: seed of the sample; None: 0.
        num_fewshot: solved examples before each question; None: 0, or an lm-eval task's default.
        vary: factors of the prompt to vary, of "template", "system_prompt" and "choice_order" (a list or
            comma-separated), or a YAML file of prompts; empty: one prompt.
        data_dir: folder of <task>.jsonl files, searched before all other sources of documents.
        log_samples: whether to write lm-eval's per-document sample files.
        allow_unofficial_data: whether to accept documents that are not the pinned ones; their results are marked.
        settings: further settings of the suite's benchmark, such as {"lengths": [1000, 2000]} for suite needle; on the
            command line --set KEY=VALUE.
        output: parent folder of the run folders.
        token_budget: maximum number of tokens in a batch; None or "auto": as many as fit into memory. Scores do not
            depend on it.
        name: name of a model in memory in its run and in tables, such as "step 1000"; None: its class.
        revision: branch, tag or commit of a hub model.
        tokenizer: folder or hub name of another tokenizer; for a model in memory its tokenizer, which is not
            changed.
        device: "auto" (a CUDA device if there is one, else the CPU), "cpu", "cuda", "cuda:1", …
        device_map: for a model larger than one GPU: "auto" spreads its layers over all GPUs and the CPU's memory;
            "none": one device.
        dtype: "auto" (the checkpoint's own), "float32", "bfloat16" or "float16".
        attention: the implementation: "auto" (sdpa, or eager for an architecture without it), "sdpa" or "eager".
        context: context window in tokens, by context extension; "none": the window that the model was trained on;
            None: the same, except for LongBench: the paper's 8,192 if the model was trained on fewer.
        context_method: "yarn" (None), "dynamic-yarn", "linear", "ntk" or "none".
        context_original: context window that the model was trained on, in tokens; None: the checkpoint's.
        context_config: YAML file with all context settings, or the name of one that evalkit ships.
        allow_pickle: whether to read pickled weights, which can run code.
        trust_remote_code: whether to run the checkpoint's own Python files.
        progress: receives messages and progress; None: standard error.

    Returns:
        The finished run.

    Raises:
        EvalkitError: the evaluation is impossible or fails; the message is one line.
    """
    arguments = {
        "suite": suite,
        "tasks": tasks,
        "include_path": include_path,
        "template": template,
        "rule": rule,
        "limit": limit,
        "sample": sample,
        "seed": seed,
        "num_fewshot": num_fewshot,
        "vary": str(vary) if isinstance(vary, Path) else vary,
        "data_dir": data_dir,
        "log_samples": log_samples,
        "allow_unofficial_data": allow_unofficial_data,
        "output": output,
        "token_budget": token_budget,
    }
    loading: dict[str, Any] = {
        "revision": revision,
        "tokenizer": tokenizer,
        "device": device,
        "device_map": device_map,
        "dtype": dtype,
        "attention": attention,
        "context": context,
        "context_method": context_method,
        "context_original": context_original,
        "context_config": context_config,
        "allow_pickle": allow_pickle,
        "trust_remote_code": trust_remote_code,
    }
    options = given_options(arguments, settings or {})
    with progress or Progress() as shown:
        if isinstance(model, (str, Path)):
            if name is not None:
                raise UsageError(f"name {name}: names a model in memory; a checkpoint is named by its path or hub name")
            return run_plan(planned(model, options | loading, shown.say), shown)
        # Imported here: a model in memory needs torch anyway, a finished run of a checkpoint does not
        from evalkit.models.live import live_model

        with live_model(model, name, **loading) as spec:
            return run_plan(planned(spec, options, shown.say), shown)


def planned(model: str | Path | ModelSpec, options: Mapping[str, Any], say: Say) -> Plan:
    """Plan a run with the benchmark that has the suite.

    Args:
        model: see `request_of`.
        options: the fields of the benchmark's request and, unless `model` is a `ModelSpec`, of `ModelSpec`.
        say: called with messages for the user.

    Raises:
        EvalkitError: the options, the checkpoint or the documents are invalid.
    """
    chosen = _benchmark_of(options.get("suite"))
    kind = chosen.request()
    given = {name: value for name, value in options.items() if name != "suite" or name in kind.__dataclass_fields__}
    return chosen.plan(request_of(kind, model, given), say)


def _benchmark_of(suite: str | Path | None) -> Benchmark:
    return benchmark(kind_of_suite(None if suite is None else values.name_or_path("--suite", suite)))


def given_options(arguments: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that differ from their defaults, merged with the benchmark's settings.

    Raises:
        UsageError: the benchmark has no such argument or setting, or an argument of `evaluate` is given as a setting.
    """
    suite = arguments["suite"]
    known = _benchmark_of(suite).request().__dataclass_fields__.keys() | {"suite"}
    given = {
        name: value
        for name, value in arguments.items()
        # An empty list of tasks is all of them; False is a value of switches only
        if value is not None and not (value is False and name in _SWITCHES) and not (name in _LISTS and not value)
    }
    own = own_settings(_benchmark_of(suite).request())
    if foreign := sorted(given.keys() - known):
        more = f"; its settings are {', '.join(own)}" if own else ""
        raise UsageError(f"{foreign[0]}: suite {suite} has no such argument{more}")
    for name in settings:
        if name in _SHARED:
            raise UsageError(f"settings: {name} is an argument of evaluate; pass {name}=…, not in settings")
        check_setting(f"settings: {name}", suite or DEFAULT_SUITE, name, own)
    return given | dict(settings)


def own_settings(request: type[Request]) -> list[str]:
    """Return the settings that a kind of request has in addition to the shared ones."""
    return sorted(request.__dataclass_fields__.keys() - _SHARED)


def check_setting(where: str, suite: str | Path, name: str, own: Collection[str]) -> None:
    """Raise if a benchmark has no such setting.

    Args:
        where: beginning of the message.
        suite: the suite, for the message.
        name: the setting.
        own: from `own_settings`.

    Raises:
        UsageError: it has no settings of its own.
        UnknownNameError: it has others.
    """
    if not own:
        raise UsageError(f"{where}: suite {suite} has no settings of its own")
    if name not in own:
        raise UnknownNameError(f"setting of suite {suite}", name, own)
