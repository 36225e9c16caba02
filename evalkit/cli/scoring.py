"""`evalkit run` and `evalkit rescore`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from evalkit.cli.options import (
    CHECKPOINTS,
    COMPUTING,
    CONFIG,
    CONTEXT,
    DATA_DIR,
    DETAIL,
    DRY_RUN,
    ORIGIN,
    OUTPUT,
    RUN,
    SELECTION,
    TOKEN_BUDGET,
    TRUST,
    checkpoints_of,
    named_run,
)
from evalkit.cli.parameters import FOLDER, SUITE, comma_separated, option, typed_option
from evalkit.cli.running import (
    PRINTING,
    WORKERS,
    dry_run,
    has_workers,
    print_report,
    print_run,
    run_and_print,
    run_several,
    runner_of,
    worker_options,
)
from evalkit.cli.watching import WATCH, watch, watched
from evalkit.display import doing
from evalkit.errors import UsageError

if TYPE_CHECKING:
    from evalkit.reporting.markup import Format
    from evalkit.runs.folder import Run


@click.command()
@click.pass_context
@CONFIG
@CHECKPOINTS
@ORIGIN
@option("--suite", type=SUITE, help="Which tasks and averages: a name (evalkit ls suites) or a YAML file.  [default: "
         "zeroshot8, or lm_eval if a task is not in it]")  # fmt: skip
@option("--tasks", callback=comma_separated, help="Only these of the suite, or any of lm-eval's, separated by commas.")
@option("--include-path", type=FOLDER, help="Folder of your own lm-eval task files; they can run code beside them.")
@option("--template", help="inst (the paper's), plain (lm-eval's), chat, or a YAML file.  [default: inst]")
@option("--rule", help="How the answer is chosen (evalkit ls rules).  [default: ppl; acc with plain]")
@SELECTION
@option(
    "--num-fewshot", type=int, help="Solved examples before each question.  [default: 0; a task's own with lm_eval]"
)
@option("--vary", callback=comma_separated, help="Also under other prompts: template, system_prompt, choice_order, "
        "separated by commas, or a YAML file. Prints the spread over prompts.")  # fmt: skip
@OUTPUT
@DATA_DIR
@COMPUTING
@CONTEXT
@TOKEN_BUDGET
@option("--show-prompts", type=click.IntRange(min=0), default=0, help="Print this many questions of each task as they "
         "are fed to the model, segments in colour, and score nothing.")  # fmt: skip
@option("--log-samples", is_flag=True, help="Also write lm-eval's per-document sample files.")
@TRUST
@option("--allow-unofficial-data", is_flag=True, help="Accept documents that are not the pinned ones; marked.")
@typed_option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="A setting of another benchmark's suite, "
              "such as max_prompt_tokens=3500 of longbench; again for each.")  # fmt: skip
@WATCH
@WORKERS
@DRY_RUN
@DETAIL
@PRINTING
def run(
    ctx: click.Context,
    /,
    checkpoints: tuple[str, ...],
    model: str | None,
    show_prompts: int,
    without_computing: bool,
    settings: tuple[str, ...],
    detail: bool,
    form: Format,
    standalone: bool,
    **options: Any,
) -> None:
    """Score a checkpoint on a suite and print the table.

    The same command again resumes an interrupted run, or prints the finished result at once.

    \b
    evalkit run demo --sample 50 --data-dir DOCUMENTS
    evalkit run --model org/name --revision step1000 --dtype float32
    evalkit run --model CKPT --template plain --rule acc_norm       as lm-eval scores
    evalkit run --model CKPT --show-prompts 1 --tasks mmlu          inspect prompts before scoring
    evalkit run --model CKPT --tasks sciq,lambada_openai            any of lm-eval's tasks, by its own metrics
    evalkit run CKPT --tasks sciq --template inst                   under the paper's prompt and every rule
    evalkit run CKPT --suite my_suite.yaml                          a suite of your own (docs/suites.md)
    evalkit run CKPT --vary template,choice_order,system_prompt     how much the prompt matters (docs/running.md)
    evalkit run CKPT --suite longbench --set max_prompt_tokens=3500    a suite of any benchmark (evalkit ls suites)
    evalkit run --model CKPT --context 8192                         stretched by YaRN
    evalkit run --model 'train/checkpoint-*'                        several checkpoints, a line each
    evalkit run CKPT --dry-run                                      how many tokens, how long, how much memory
    evalkit run CKPT --workers 8                                    by eight GPUs, or shares of the cores
    evalkit run --watch TRAINING --sample 200 --plot curve.png      each checkpoint of a training, as it appears
    """
    workers = worker_options(options)
    runner = runner_of(workers)
    if (watching := watched(ctx, options)) is not None:
        if has_workers(workers):
            raise UsageError("--watch evaluates in this process; leave out --workers and --ray")
        if without_computing:
            raise UsageError("--watch evaluates checkpoints that do not exist yet; leave it out, or --dry-run")
        watch(watching, _request_options(ctx, options, settings))
        return
    with doing("planning the run"):
        named, asked = checkpoints_of(ctx, checkpoints, model), _request_options(ctx, options, settings)
    if without_computing:
        if show_prompts:
            raise UsageError("--dry-run and --show-prompts both compute nothing; give one of them")
        print_report(dry_run(named, asked), form, standalone)
        return
    if len(named) > 1:
        if show_prompts or detail:
            option = "--show-prompts" if show_prompts else "--detail"
            raise UsageError(f"{option}: is for one checkpoint, and {len(named)} are given; name one of them")
        report, finished = run_several(named, asked, runner)
        print_report(report, form, standalone)
        ctx.exit(0 if finished else 1)
    if show_prompts:
        _print_prompts(named[0], asked, show_prompts)
    else:
        elsewhere = runner if has_workers(workers) else None
        run_and_print(named[0], asked, elsewhere, lambda found, rule: _print(found, form, standalone, rule, detail))


@click.command()
@RUN
@option("--rule", help="How the answer is chosen (evalkit ls rules).  [default: the run's own]")
@OUTPUT
@DETAIL
@PRINTING
def rescore(run: str, rule: str | None, output: Path, detail: bool, form: Format, standalone: bool) -> None:
    """Apply another rule to the scores of a finished run; no model is needed.

    RUN is a run folder, or a run in --output as `evalkit ls runs` lists it: its id or name, the beginning of either,
    or its checkpoint where no other run has it.

    \b
    evalkit rescore 1a2b3c4d --rule acc_norm
    evalkit rescore results/runs/demo-zeroshot8-inst-float32-1a2b3c4d5e6f --rule acc_norm
    """
    with doing("reading scores"):
        from evalkit.benchmarks.registry import benchmark_of

        opened = named_run(run, output)
        report = benchmark_of(opened).rescored(opened, rule, detail)
    print_run(opened, report, form, standalone)


def _print(run: Run, form: Format, standalone: bool, rule: str | None, detail: bool) -> None:
    from evalkit.benchmarks.registry import benchmark_of

    with doing("reading scores"):
        report = benchmark_of(run).report(run, rule, detail)
    print_run(run, report, form, standalone)


def _print_prompts(model: str, options: dict[str, Any], count: int) -> None:
    from evalkit.benchmarks.registry import benchmark
    from evalkit.benchmarks.run import planned
    from evalkit.display import Progress

    with Progress() as progress:
        with doing("planning the run"):
            plan = planned(model, options, progress.say)
        for text in benchmark(plan.manifest["kind"]).prompts(plan, count, progress.say):
            click.echo(text)


def _request_options(ctx: click.Context, options: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Return the options of the suite's benchmark, with its own settings.

    Raises:
        UsageError: an option that it does not have, unless it is from the environment, where other commands may need
        it.
    """
    from evalkit.benchmarks.registry import benchmark, kind_of_suite
    from evalkit.benchmarks.request import DEFAULT_SUITE
    from evalkit.benchmarks.run import check_setting, own_settings
    from evalkit.inputs.values import switched
    from evalkit.models.spec import ModelSpec

    suite = options["suite"] or DEFAULT_SUITE
    request = benchmark(kind_of_suite(suite)).request()
    fields = {*ModelSpec.__dataclass_fields__, *request.__dataclass_fields__, "suite"}
    own = own_settings(request)
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    for name in given.keys() - fields:
        if ctx.get_parameter_source(name) is not click.core.ParameterSource.ENVIRONMENT:
            more = f"; it has --set {', '.join(own)}" if own else ""
            raise UsageError(f"--{name.replace('_', '-')}: suite {suite} has no such setting{more}")
        del given[name]
    for setting in settings:
        name, equals, value = setting.partition("=")
        name = name.replace("-", "_")
        if not equals:
            raise UsageError(f"--set {setting}: write KEY=VALUE, such as max_prompt_tokens=3500")
        if name in options:
            raise UsageError(f"--set {setting}: that is an option; give --{name.replace('_', '-')} {value}")
        check_setting(f"--set {setting}", suite, name, own)
        if name in given:
            raise UsageError(f"--set {setting}: {name} is set twice; set it once")
        given[name] = value
    # A variable sets a setting of its name, as it does for the benchmark's own command
    variables = {name: os.environ[f"EVALKIT_{name.upper()}"] for name in own if f"EVALKIT_{name.upper()}" in os.environ}
    return switched(request, variables | given)
