"""From what a user asks to a finished run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from evalkit.benchmarks.base import Benchmark, Plan, Say
from evalkit.benchmarks.registry import benchmark, kind_of_suite
from evalkit.benchmarks.request import request_of
from evalkit.benchmarks.session import run_plan
from evalkit.benchmarks.suite_request import SuiteRequest
from evalkit.errors import UnknownNameError, UsageError
from evalkit.inputs import values
from evalkit.models.spec import ModelSpec
from evalkit.progress import Progress
from evalkit.resources import RUNS
from evalkit.runs.folder import Run

if TYPE_CHECKING:
    from torch.nn import Module
    from transformers import PreTrainedTokenizerBase

_SHARED = {*ModelSpec.__dataclass_fields__, *SuiteRequest.__dataclass_fields__}
"""Settings that have a parameter of their own in `evaluate`, an option on the command line."""


def evaluate(
    model: str | Path | Module,
    *,
    suite: str | Path | None = None,
    tasks: str | Sequence[str] = (),
    include_path: str | Path | None = None,
    template: str | Path | None = None,
    rule: str | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
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
    """Evaluate a checkpoint or a model in memory; resume, or just open the run, if it was begun or finished before.

    Args:
        model: a checkpoint folder, a hub name, a GGUF file, or "demo"; or a `transformers.PreTrainedModel`, which is
            evaluated where it is and as it is, and is left as it was.
        suite: of any benchmark (`evalkit ls suites`), or a YAML file; None: zeroshot8, or lm_eval if a task is not in
            it.
        tasks: only these tasks of the suite, in a list or with commas between them; all of them by default. Of suite
            lm_eval its tasks, groups or tags.
        include_path: folder of lm-eval task files of your own, which can run Python code beside them.
        template: how prompts are written: "inst", "plain", "chat", or a YAML file; None: inst, or lm-eval's own prompts
            for its tasks.
        rule: how the answer is chosen (`evalkit ls rules`); None: "ppl" where the template scores whole sequences, else
            "acc".
        limit: most documents of each task; None: all.
        num_fewshot: solved examples before each question; None: 0, or what an lm-eval task says.
        data_dir: folder of <task>.jsonl files, looked into before all other sources of documents.
        log_samples: whether lm-eval's per-document sample files are written too.
        allow_unofficial_data: whether documents are accepted that are not the pinned ones; such results are marked.
        settings: of the suite's benchmark alone, such as {"lengths": [1000, 2000]} of suite needle; on the command line
            --set KEY=VALUE.
        output: folder of run folders.
        token_budget: most tokens of a batch; None or "auto": what fits into memory. No score depends on it.
        name: what a model in memory is called in its run and in tables, such as "step 1000"; None: its class.
        revision: branch, tag or commit of a hub model.
        tokenizer: another folder or hub name to take the tokenizer from; of a model in memory its tokenizer, which is
            not changed.
        device: "auto" (a CUDA device if there is one, else the CPU), "cpu", "cuda", "cuda:1", …
        dtype: "auto" (the checkpoint's own), "float32", "bfloat16" or "float16".
        attention: the implementation: "auto" (sdpa, or eager for an architecture without it), "sdpa" or "eager".
        context: tokens that the model is to take at once, by stretching its context; "none": as many as it was trained
            on; None: the same, but for LongBench the paper's 8,192 where it was trained on fewer.
        context_method: "yarn" (None), "dynamic-yarn", "linear", "ntk" or "none".
        context_original: tokens of the window that it was trained on; None: what the checkpoint says.
        context_config: all of this and more in a YAML file, or the name of one that evalkit ships.
        allow_pickle: whether pickled weights are read, which can run code.
        trust_remote_code: whether the checkpoint's own Python files may run.
        progress: where news and progress go; None: standard error.

    Returns:
        The finished run.

    Raises:
        EvalkitError: whatever is wrong, in one line.
    """
    arguments = {
        "suite": suite,
        "tasks": tasks,
        "include_path": include_path,
        "template": template,
        "rule": rule,
        "limit": limit,
        "num_fewshot": num_fewshot,
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
        "dtype": dtype,
        "attention": attention,
        "context": context,
        "context_method": context_method,
        "context_original": context_original,
        "context_config": context_config,
        "allow_pickle": allow_pickle,
        "trust_remote_code": trust_remote_code,
    }
    options = _asked(arguments, settings or {})
    with progress or Progress() as shown:
        if isinstance(model, (str, Path)):
            if name is not None:
                raise UsageError(
                    f"name {name}: names a model in memory; a checkpoint is called by its path or hub name"
                )
            return run_plan(planned(model, options | loading, shown.say), shown)
        # Torch is needed by now, whatever is asked
        from evalkit.models.live import live_model

        with live_model(model, name, **loading) as spec:
            return run_plan(planned(spec, options, shown.say), shown)


def planned(model: str | Path | ModelSpec, options: Mapping[str, Any], say: Say) -> Plan:
    """The run that is asked for, of whatever benchmark has the suite.

    Args:
        model: as `request_of` takes it.
        options: the fields of the benchmark's request and, unless the model has them, of `ModelSpec`.
        say: called with what the user should know.

    Raises:
        EvalkitError: whatever is wrong with the options, the checkpoint or the documents.
    """
    served = _benchmark_of(options.get("suite"))
    asked = served.request()
    given = {name: value for name, value in options.items() if name != "suite" or name in asked.__dataclass_fields__}
    return served.plan(request_of(asked, model, given), say)


def _benchmark_of(suite: str | Path | None) -> Benchmark:
    return benchmark(kind_of_suite(None if suite is None else values.name_or_path("--suite", suite)))


def _asked(arguments: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are no defaults, with the settings of the suite's benchmark alone.

    Raises:
        UsageError: one that the benchmark does not have, or that stands in the wrong place.
    """
    suite = arguments["suite"]
    known = _benchmark_of(suite).request().__dataclass_fields__.keys() | {"suite"}
    given = {
        name: value for name, value in arguments.items() if value is not None and value is not False and value != ()
    }
    own = sorted(known - _SHARED)
    if foreign := sorted(given.keys() - known):
        more = f"; settings of its own are {', '.join(own)}" if own else ""
        raise UsageError(f"{foreign[0]}: suite {suite} has no such argument{more}")
    for name in settings:
        if name in _SHARED:
            raise UsageError(f"settings: {name} is an argument of evaluate itself: give {name}=… beside settings")
        if not own:
            raise UsageError(f"settings: {name}: suite {suite or 'zeroshot8'} has no settings of its own")
        if name not in own:
            raise UnknownNameError(f"setting of suite {suite}", name, own)
    return given | dict(settings)
