"""`evalkit run`, `needle`, `attention` and `perplexity`: their options and what is special to each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from evalkit.cli.options import (
    CHECKPOINT,
    CHECKPOINTS,
    COMPUTING,
    CONFIG,
    CONTEXT,
    DETAIL,
    ORIGIN,
    PLOT,
    SELECTION,
    TRUST,
    BenchmarkCommand,
    checkpoint_of,
    checkpoints_of,
    settings,
)
from evalkit.cli.parameters import comma_separated, exclude, flag, option, typed_option
from evalkit.cli.running import (
    DRY_RUN,
    PRINTING,
    WORKERS,
    dry_run,
    evaluation_of,
    finished_runs,
    plan_of,
    run_several,
    say,
)
from evalkit.cli.study import WATCH, watch, watched
from evalkit.display import Progress, doing
from evalkit.errors import UnknownNameError, UsageError

if TYPE_CHECKING:
    from evalkit.runs.folder import Run
    from evalkit.studies.running import JobRunner


@click.command(cls=BenchmarkCommand, kind="multiple_choice")
@click.pass_context
@CONFIG
@CHECKPOINTS
@settings(*ORIGIN, "suite", "tasks", "include_path", "template", "rule", *SELECTION, ..., "output", "data_dir")
@settings(*COMPUTING, *CONTEXT, "token_budget")
@option("--show-prompts", type=click.IntRange(min=0), default=0, help="Print this many questions of each task as they "
         "are fed to the model, segments in colour, and score nothing.")  # fmt: skip
@settings("log_samples", *TRUST, "allow_unofficial_data")
@typed_option("--set", "own", multiple=True, metavar="KEY=VALUE", help="A setting of another benchmark's suite, "
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
    own: tuple[str, ...],
    detail: bool,
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
    evalkit run CKPT --dry-run                                      how many tokens, how long
    evalkit run CKPT --workers 8                                    by eight GPUs, or shares of the cores
    evalkit run --watch TRAINING --sample 200 --plot curve.png      each checkpoint of a training, as it appears
    """
    from evalkit.benchmarks.registry import benchmark_of

    evaluation = evaluation_of(options)
    watching = watched(ctx, options)
    exclude(watch=watching, dry_run=evaluation.is_dry, show_prompts=show_prompts or None)
    if watching is not None:
        if evaluation.workers.given:
            raise UsageError(f"{evaluation.workers.given}: --watch evaluates in this process; leave out one of them")
        watch(watching, _request_options(ctx, options, own))
        return
    with doing("reading the options"):
        models = checkpoints_of(ctx, checkpoints, model)
        evaluation = replace(evaluation, options=_request_options(ctx, options, own))
    if evaluation.is_dry:
        evaluation.print(dry_run(models, evaluation.options))
    elif len(models) > 1:
        if show_prompts or detail:
            raise UsageError(f"--{'show-prompts' if show_prompts else 'detail'}: is for one checkpoint, not several")
        report, finished = run_several(models, evaluation.options, evaluation.workers.runner)
        evaluation.print(report)
        ctx.exit(0 if finished else 1)
    elif show_prompts:
        _print_prompts(models[0], evaluation.options, show_prompts)
    else:
        evaluation.run(models[0], lambda run, rule: benchmark_of(run).report(run, rule, detail))


def _print_prompts(model: str, options: dict[str, Any], count: int) -> None:
    from evalkit.benchmarks.registry import benchmark

    with Progress() as progress:
        plan = plan_of(model, options, progress.say)
        for text in benchmark(plan.manifest["kind"]).prompts(plan, count, progress.say):
            click.echo(text)


def _request_options(ctx: click.Context, options: dict[str, Any], own: Sequence[str]) -> dict[str, Any]:
    """Return the options of the suite's benchmark, with its own settings.

    Options from the environment that it does not have are left out, since other commands may need them.
    """
    from evalkit.benchmarks.run import given_options, own_settings, request_type
    from evalkit.inputs.settings import settings_of, switched
    from evalkit.models.loading.spec import ModelSpec

    request = request_type(options["suite"])
    known = settings_of(ModelSpec, request).keys() | {"suite"}
    environment = click.core.ParameterSource.ENVIRONMENT
    options = {
        name: value
        for name, value in options.items()
        if name in known or ctx.get_parameter_source(name) is not environment
    }
    further: dict[str, Any] = {}
    for text in own:
        key, equals, value = text.partition("=")
        name = key.replace("-", "_")
        if not equals:
            raise UsageError(f"--set {text}: write KEY=VALUE, such as max_prompt_tokens=3500")
        if name in further:
            raise UsageError(f"--set {text}: {name} is set twice; set it once")
        further[name] = value
    # A variable sets a setting of its name, as it does for the benchmark's own command
    variables = {name: os.environ.get(f"EVALKIT_{name.upper()}") for name in own_settings(request)}
    given = {name: value for name, value in variables.items() if value is not None} | further
    return given_options(options, switched(request, given), flag, "--set")


@click.command(cls=BenchmarkCommand, kind="needle")
@click.pass_context
@CONFIG
@CHECKPOINT
@settings(*ORIGIN, *CONTEXT, ..., "output", *COMPUTING, "token_budget", *TRUST)
@DRY_RUN
@PRINTING
def needle(ctx: click.Context, /, checkpoint: str | None, model: str | None, **options: Any) -> None:
    """Needle in a haystack: test whether the model finds a number at any position of a long text.

    The run folder has a heatmap.png and .pdf, and each answer. The same command again resumes an interrupted run.

    \b
    evalkit needle --model CKPT --context 8192                           stretched to 8,192 tokens by YaRN
    evalkit needle --model CKPT --lengths 500,1000 --depths 10,50,90 --repeats 10 --text book.txt
    """
    evaluation_of(options | {"suite": "needle"}).run(checkpoint_of(ctx, checkpoint, model))


@click.command(cls=BenchmarkCommand, kind="attention", without=("token_budget",))
@click.pass_context
@CONFIG
@CHECKPOINT
@settings(*ORIGIN, *CONTEXT, ..., "output", *COMPUTING, *TRUST)
@DRY_RUN
@WORKERS
@PRINTING
def attention(ctx: click.Context, /, checkpoint: str | None, model: str | None, **options: Any) -> None:
    """Attention maps: measure what each head attends to, on a sample of the tasks' documents.

    Shares on BOS and on kinds of words, entropy, negative weights, sinks, distance, similarity of heads, effective
    rank; each as the paper defines it and in a form that also holds for signed maps (docs/attention.md). Draw them with
    evalkit figure, compare runs with evalkit compare. The same command again resumes an interrupted run.

    \b
    evalkit attention --model CKPT                                       200 documents of each of the eight tasks
    evalkit attention --model CKPT --measures bos,entropy --layers -1 --sample 50 --seed 1
    evalkit attention --model CKPT --text book.txt --context 8192 --measures bos,mass
    """
    evaluation_of(options | {"suite": "attention"}).run(checkpoint_of(ctx, checkpoint, model))


@click.command(cls=BenchmarkCommand, kind="perplexity")
@click.pass_context
@CONFIG
@CHECKPOINT
@settings(*ORIGIN, "text", "key", *SELECTION, *CONTEXT)
@typed_option("--methods", callback=comma_separated, metavar="NAMES", help="Several methods of context extension, "
              "separated by commas: a run each, in one table and one picture.")  # fmt: skip
@settings(..., "output", *COMPUTING, "token_budget", *TRUST)
@DRY_RUN
@WORKERS
@PLOT
@PRINTING
def perplexity(
    ctx: click.Context,
    /,
    checkpoint: str | None,
    model: str | None,
    methods: tuple[str, ...] | None,
    plot: Path | None,
    **options: Any,
) -> None:
    """Perplexity of any text: bits per byte by document and by position in the context window.

    A longer document is scored in windows, each token once: those of lm-eval's rolling log-likelihood, or overlapping
    ones by --stride. Bits per byte can be compared between tokenizers. Compare runs with evalkit compare. The same
    command again resumes an interrupted run.

    \b
    evalkit perplexity --model CKPT --text book.txt
    evalkit perplexity --model CKPT --text articles.jsonl --text books/ --sample 50
    evalkit perplexity --model CKPT --text book.txt --stride 512              at least window - 512 tokens of context
    evalkit perplexity --model CKPT --text book.txt --context 8192            stretched to 8,192 tokens by YaRN
    evalkit perplexity --model CKPT --text book.txt --context 8192 --methods none,linear,ntk,yarn --plot curves.png
    """
    evaluation = evaluation_of(options | {"suite": "perplexity"})
    checkpoint = checkpoint_of(ctx, checkpoint, model)
    exclude(methods=methods, dry_run=evaluation.is_dry)
    exclude(methods=methods, context_method=options["context_method"])
    if methods is None:
        evaluation.run(checkpoint, draw=lambda run: _draw({str(run.manifest["model"]): run}, plot))
        return
    from evalkit.benchmarks.perplexity.results import methods_report

    runs = _run_methods(checkpoint, evaluation.options, methods, evaluation.workers.runner)
    evaluation.print(methods_report(runs))
    _draw(runs, plot)


def _run_methods(model: str, options: dict[str, Any], methods: tuple[str, ...], runner: JobRunner) -> dict[str, Run]:
    """Return method → its finished run; all are planned before the first is computed.

    Raises:
        EvalkitError: a run cannot be planned, nothing is stretched, or a run is not finished.
    """
    from evalkit.models.context.extension import METHODS
    from evalkit.studies.running import Job

    for method in methods:
        if method not in METHODS:
            raise UnknownNameError("context method", method, METHODS)
    if len(set(methods)) < len(methods):
        raise UsageError(f"--methods {','.join(methods)}: name each method once")
    if options.get("context") in (None, "none") and options.get("context_config") is None:
        raise UsageError("--methods: name the longer context window too, such as --context 8192")
    with Progress() as progress:
        plans = {method: plan_of(model, options | {"context_method": method}, progress.say) for method in methods}
        if len(plans) > 1 and len({plan.folder for plan in plans.values()}) == 1:
            raise UsageError(
                f"--methods {','.join(methods)}: --context {options.get('context')} is no longer than the window of "
                "training, so no method changes anything; give a longer --context, or --context-original"
            )
        outcomes = runner([Job(f"{model}, {method}", plan) for method, plan in plans.items()], progress)
    return dict(zip(methods, finished_runs(outcomes), strict=True))


def _draw(runs: dict[str, Run], plot: Path | None) -> None:
    if plot is None:
        return
    from evalkit.benchmarks.perplexity.results import draw_positions

    draw_positions(list(runs.values()), list(runs), plot)
    say(f"{plot} has been written")
