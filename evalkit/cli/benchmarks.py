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
    DRY_RUN,
    ORIGIN,
    PLOT,
    SELECTION,
    TRUST,
    BenchmarkCommand,
    checkpoint_of,
    checkpoints_of,
    settings,
)
from evalkit.cli.parameters import comma_separated, option, typed_option
from evalkit.cli.running import PRINTING, WORKERS, dry_run, evaluation_of, finished, run_several, say
from evalkit.cli.study import WATCH, watch, watched
from evalkit.display import doing
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

    asked = evaluation_of(options)
    if (watching := watched(ctx, options)) is not None:
        if asked.workers.given:
            raise UsageError("--watch evaluates in this process; leave out --workers and --ray")
        if asked.is_dry:
            raise UsageError("--watch evaluates checkpoints that do not exist yet; leave it out, or --dry-run")
        watch(watching, _request_options(ctx, options, own))
        return
    with doing("planning the run"):
        named = checkpoints_of(ctx, checkpoints, model)
        asked = replace(asked, options=_request_options(ctx, options, own))
    if asked.is_dry and show_prompts:
        raise UsageError("--dry-run and --show-prompts both compute nothing; give one of them")
    if asked.is_dry:
        asked.print(dry_run(named, asked.options))
        return
    if len(named) > 1:
        if show_prompts or detail:
            option = "--show-prompts" if show_prompts else "--detail"
            raise UsageError(f"{option}: is for one checkpoint, and {len(named)} are given; name one of them")
        report, finished = run_several(named, asked.options, asked.workers.runner)
        asked.print(report)
        ctx.exit(0 if finished else 1)
    if show_prompts:
        _print_prompts(named[0], asked.options, show_prompts)
    else:
        asked.run(named[0], lambda found, rule: benchmark_of(found).report(found, rule, detail))


def _print_prompts(model: str, options: dict[str, Any], count: int) -> None:
    from evalkit.benchmarks.registry import benchmark
    from evalkit.benchmarks.run import planned
    from evalkit.display import Progress

    with Progress() as progress:
        with doing("planning the run"):
            plan = planned(model, options, progress.say)
        for text in benchmark(plan.manifest["kind"]).prompts(plan, count, progress.say):
            click.echo(text)


def _request_options(ctx: click.Context, options: dict[str, Any], own: Sequence[str]) -> dict[str, Any]:
    """Return the options of the suite's benchmark, with its own settings.

    Raises:
        UsageError: an option that it does not have, unless it is from the environment, where other commands may need
        it.
    """
    from evalkit.benchmarks.registry import benchmark, kind_of_suite
    from evalkit.benchmarks.request import DEFAULT_SUITE
    from evalkit.benchmarks.run import check_setting, own_settings
    from evalkit.inputs.settings import settings_of, switched
    from evalkit.models.spec import ModelSpec

    suite = options["suite"] or DEFAULT_SUITE
    request = benchmark(kind_of_suite(suite)).request()
    known, further = settings_of(ModelSpec, request).keys() | {"suite"}, own_settings(request)
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    for name in given.keys() - known:
        if ctx.get_parameter_source(name) is not click.core.ParameterSource.ENVIRONMENT:
            more = f"; it has --set {', '.join(further)}" if further else ""
            raise UsageError(f"--{name.replace('_', '-')}: suite {suite} has no such setting{more}")
        del given[name]
    for text in own:
        name, equals, value = text.partition("=")
        name = name.replace("-", "_")
        if not equals:
            raise UsageError(f"--set {text}: write KEY=VALUE, such as max_prompt_tokens=3500")
        if name in options:
            raise UsageError(f"--set {text}: that is an option; give --{name.replace('_', '-')} {value}")
        check_setting(f"--set {text}", suite, name, further)
        if name in given:
            raise UsageError(f"--set {text}: {name} is set twice; set it once")
        given[name] = value
    # A variable sets a setting of its name, as it does for the benchmark's own command
    variables = {
        name: os.environ[f"EVALKIT_{name.upper()}"] for name in further if f"EVALKIT_{name.upper()}" in os.environ
    }
    return switched(request, variables | given)


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
    asked = evaluation_of(options | {"suite": "needle"})
    asked.run(checkpoint_of(ctx, checkpoint, model))


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
    asked = evaluation_of(options | {"suite": "attention"})
    asked.run(checkpoint_of(ctx, checkpoint, model))


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
    asked = evaluation_of(options | {"suite": "perplexity"})
    named = checkpoint_of(ctx, checkpoint, model)
    if methods is None:
        asked.run(named, draw=lambda found: _draw({str(found.manifest["model"]): found}, plot))
        return
    if asked.is_dry:
        raise UsageError("--dry-run is of one method, and the others take as much; leave out --methods")
    from evalkit.benchmarks.perplexity.results_report import methods_report

    _check_methods(methods, asked.options)
    runs = _run_methods(named, asked.options, methods, asked.workers.runner)
    asked.print(methods_report(runs))
    _draw(runs, plot)


def _check_methods(methods: tuple[str, ...], options: dict[str, Any]) -> None:
    """Validate `--methods` before anything is read."""
    from evalkit.models.context import METHODS

    for method in methods:
        if method not in METHODS:
            raise UnknownNameError("context method", method, METHODS)
        if methods.count(method) > 1:
            raise UsageError(f"--methods {','.join(methods)}: {method} occurs twice; name each method once")
    if options.get("context_method") is not None:
        raise UsageError("--methods names the methods already; leave out --context-method")
    if options.get("context") in (None, "none") and options.get("context_config") is None:
        raise UsageError("--methods: name the longer context window too, such as --context 8192")


def _run_methods(model: str, options: dict[str, Any], methods: tuple[str, ...], runner: JobRunner) -> dict[str, Run]:
    """Return method → its finished run; all are planned before the first is computed.

    Raises:
        EvalkitError: a run cannot be planned, nothing is stretched, or a run is not finished.
    """
    from evalkit.benchmarks.run import planned
    from evalkit.display import Progress
    from evalkit.runs.folder import load_run
    from evalkit.studies.running import Job

    with Progress() as progress:
        with doing("planning the runs"):
            plans = {method: planned(model, options | {"context_method": method}, progress.say) for method in methods}
        if len(plans) > 1 and len({plan.folder for plan in plans.values()}) == 1:
            raise UsageError(
                f"--methods {','.join(methods)}: --context {options.get('context')} is no longer than the window of "
                "training, so no method changes anything; give a longer --context, or --context-original"
            )
        outcomes = runner([Job(f"{model}, {method}", plan) for method, plan in plans.items()], progress)
    finished(outcomes)
    return {method: load_run(plan.folder) for method, plan in plans.items()}


def _draw(runs: dict[str, Run], plot: Path | None) -> None:
    if plot is None:
        return
    from evalkit.benchmarks.perplexity.results_report import draw_positions

    draw_positions(list(runs.values()), list(runs), plot)
    say(f"{plot} has been written")
