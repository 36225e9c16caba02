"""`evalkit run`, `attention` and `perplexity`: their options and what is special to each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from evalkit.cli import running
from evalkit.cli.parameters import argument, command, exclude, flag, option, typed_option
from evalkit.cli.running import Printer, Workers
from evalkit.cli.study import WatchOptions, watch
from evalkit.display import Progress, doing
from evalkit.errors import UsageError

if TYPE_CHECKING:
    from evalkit.runs.folder import Run
    from evalkit.studies.running import JobRunner


@command(
    kind="multiple_choice",
    order="ORIGIN suite tasks include_path template rule SELECTION ... output name data_dir COMPUTING CONTEXT "
    "token_budget model_args show_prompts log_samples TRUST allow_unofficial_data own watching workers dry detail "
    "printer",
    as_lm_eval=True,
)
def run(
    *,
    checkpoints: tuple[str, ...] = running.CHECKPOINTS,
    model: str | None = running.MODEL,
    model_args: str | None = typed_option(None, "As lm-eval's: pretrained=CKPT,revision=main,dtype=float32.",
                                          metavar="KEY=VALUE,…"),
    show_prompts: int = option(0, "Print this many questions of each task as they are fed to the model, segments in "
                               "colour, and score nothing.", least=0, shows_least=True),
    own: tuple[str, ...] = typed_option((), "A setting of another benchmark's suite, such as max_prompt_tokens=3500 of "
                                        "longbench; again for each.", option="--set", metavar="KEY=VALUE",
                                        repeated=True),
    watching: WatchOptions,
    workers: Workers,
    dry: bool = running.DRY_RUN,
    detail: bool = running.DETAIL,
    printer: Printer,
    **options: Any,
) -> int:  # fmt: skip
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
    from evalkit.benchmarks.multiple_choice.suites import load_suite
    from evalkit.benchmarks.registry import benchmark
    from evalkit.benchmarks.request import DEFAULT_SUITE
    from evalkit.cli.lm_eval import with_model_args, with_task_files

    if options["tasks"] == ("list",):
        from evalkit.cli import listing

        printer(listing.tasks())
        return 0
    if model_args and checkpoints:
        raise UsageError(f"--model-args {model_args} and {checkpoints[0]} both name a checkpoint; give one")
    model, options = with_model_args(model, model_args, with_task_files(options))
    in_suite = model_args and not any(options[name] for name in ("template", "rule", "suite", "include_path"))
    if in_suite and {*options["tasks"]} <= {*load_suite(DEFAULT_SUITE).tasks}:
        own_rule = "has the paper's prompt and rule; lm-eval's are --template plain --rule acc_norm"
        running.say(f"suite {DEFAULT_SUITE} {own_rule}")
    exclude(watch=watching.watch, dry_run=dry, show_prompts=show_prompts or None)
    exclude(watch=watching.watch, name=options["name"])
    if watching.watch is not None:
        if workers.option:
            raise UsageError(f"{workers.option}: --watch evaluates in this process; leave out one of them")
        watch(watching, _request_options(options, own))
        return 0
    with doing("reading the options"):
        models = running.checkpoints_of(checkpoints, model)
        options = _request_options(options, own)
    if show_prompts and len(models) == 1:
        with Progress() as progress:
            plan = running.plan_of(models[0], options, progress.say)
            for text in benchmark(plan.manifest["kind"]).prompts(plan, show_prompts, progress.say):
                click.echo(text)
        return 0
    of_one = {"show_prompts": show_prompts}
    return running.evaluate(models, options, printer, dry, workers, of_one=of_one, detail=detail)


@command(
    kind="multiple_choice",
    order="margin max_sample ORIGIN suite tasks include_path template rule outcome seed ... output data_dir COMPUTING "
    "CONTEXT token_budget TRUST allow_unofficial_data fail printer",
    without=("sample", "limit", "name", "log_samples", "vary", "control"),
)
def decide(
    *,
    checkpoints: tuple[str, ...] = argument(metavar="CKPT_A CKPT_B"),
    margin: float = option(None, "Equivalent is a difference within this on both sides, in points or the outcome's "
                           "unit.", required=True),
    max_sample: int | None = option(None, "Documents of each task after which it ends undecided.", "all", metavar="N",
                                    least=1, shows_least=True),
    outcome: str | None = running.OUTCOME,
    fail: bool = option(False, "Exit with 3 if B is worse, with 4 if it is undecided.", option="--fail-if-worse"),
    printer: Printer,
    **options: Any,
) -> int:  # fmt: skip
    """Score growing samples of two checkpoints until one is shown to be better, or both to be equivalent.

    Samples grow by √2 from some 200 documents of each task, and each look scores only what is new. The intervals
    hold at all looks together, so it ends at the first verdict. The same command again resumes.

    \b
    evalkit decide CKPT_A CKPT_B --margin 1 --max-sample 3200
    evalkit decide CKPT_A CKPT_B --outcome bits_per_byte --margin 0.01
    """
    from evalkit.runs.score_table import outcome_key
    from evalkit.studies.deciding import decide as decided
    from evalkit.studies.deciding import decision_report

    if len(checkpoints) != 2:
        raise UsageError(f"decide is about two checkpoints, and {len(checkpoints)} are given")
    if not (isfinite(margin) and margin >= 0):
        raise UsageError(f"--margin {margin}: expected a finite number, 0 or more")
    given = _request_options(options, ())
    with Progress() as progress:
        key = outcome_key(outcome, options["rule"])
        decision = decided(checkpoints, given, margin, max_sample, key, progress)
    printer(decision_report(decision))
    return decision.exit_code if fail else 0


def _request_options(options: dict[str, Any], own: Sequence[str]) -> dict[str, Any]:
    """Return the options of the suite's benchmark, with its own settings.

    Options from the environment that it does not have are left out, since other commands may need them.
    """
    from evalkit.benchmarks.run import given_options, own_settings, request_type
    from evalkit.inputs.settings import settings_of, switched
    from evalkit.models.loading.spec import ModelSpec

    request = request_type(options)
    known = settings_of(ModelSpec, request).keys() | {"suite"}
    source_of, environment = click.get_current_context().get_parameter_source, click.core.ParameterSource.ENVIRONMENT
    options = {name: value for name, value in options.items() if name in known or source_of(name) is not environment}
    # A variable sets a setting of its name, as it does for the benchmark's own command
    variables = {name: os.environ.get(f"EVALKIT_{name.upper()}") for name in own_settings(request)}
    given = {name: value for name, value in variables.items() if value is not None}
    typed: dict[str, str] = {}
    for text in own:
        key, value = running.key_value(text, "max_prompt_tokens=3500")
        if (name := key.replace("-", "_")) in typed:
            raise UsageError(f"--set {text}: {name} is set twice; set it once")
        typed[name] = value
    return given_options(options, switched(request, given | typed), flag, "--set")


@command(
    kind="attention",
    order="ORIGIN CONTEXT ... output name COMPUTING TRUST dry workers detail printer",
    without=("token_budget",),
)
def attention(
    *,
    checkpoints: tuple[str, ...] = running.CHECKPOINTS,
    model: str | None = running.MODEL,
    dry: bool = running.DRY_RUN,
    workers: Workers,
    detail: bool = typed_option(False, "Print all layers and measures."),
    printer: Printer,
    **options: Any,
) -> int:
    """Attention maps: measure what each head attends to, on a sample of the tasks' documents.

    Shares on BOS and on kinds of words, entropy, negative weights, sinks, distance, similarity of heads, effective
    rank; each as the paper defines it and in a form that also holds for signed maps (docs/attention.md). Draw them with
    evalkit figure, compare runs with evalkit compare. The same command again resumes an interrupted run.

    \b
    evalkit attention --model CKPT                                       200 documents of each of the eight tasks
    evalkit attention --model CKPT --measures bos,entropy --layers -1 --sample 50 --seed 1
    evalkit attention --model CKPT --text book.txt --context 8192 --measures bos,mass
    evalkit attention CKPT_A CKPT_B                                      several checkpoints, a line each
    """
    models = running.checkpoints_of(checkpoints, model)
    return running.evaluate(models, options | {"suite": "attention"}, printer, dry, workers, detail=detail)


@command(
    kind="perplexity",
    order="ORIGIN text key SELECTION CONTEXT methods ... output name COMPUTING token_budget TRUST dry workers "
    "plot printer",
)
def perplexity(
    *,
    checkpoints: tuple[str, ...] = running.CHECKPOINTS,
    model: str | None = running.MODEL,
    methods: tuple[str, ...] | None = typed_option(None, "Several methods of context extension, separated by commas: a "
                                                   "run each, in one table and one picture.", metavar="NAMES"),
    dry: bool = running.DRY_RUN,
    workers: Workers,
    plot: Path | None = running.PLOT,
    printer: Printer,
    **options: Any,
) -> int:  # fmt: skip
    """Perplexity of any text: bits per byte by document and by position in the context window.

    A longer document is scored in windows, each token once: those of lm-eval's rolling log-likelihood, or overlapping
    ones by --stride. Bits per byte can be compared between tokenizers. Compare runs with evalkit compare. The same
    command again resumes an interrupted run.

    \b
    evalkit perplexity --model CKPT --text book.txt
    evalkit perplexity CKPT_A CKPT_B --text book.txt --plot curves.png        several checkpoints, a line each
    evalkit perplexity --model CKPT --text articles.jsonl --text books/ --sample 50
    evalkit perplexity --model CKPT --text book.txt --stride 512              at least window - 512 tokens of context
    evalkit perplexity --model CKPT --text book.txt --context 8192            stretched to 8,192 tokens by YaRN
    evalkit perplexity --model CKPT --text book.txt --context 8192 --methods none,linear,ntk,yarn --plot curves.png
    """
    from evalkit.benchmarks.perplexity import results

    options["suite"] = "perplexity"
    models = running.checkpoints_of(checkpoints, model)
    exclude(methods=methods, dry_run=dry)
    exclude(methods=methods, context_method=options["context_method"])
    if methods is None:
        draw = partial(running.draw_runs, plot, results.draw_positions)
        return running.evaluate(models, options, printer, dry, workers, draw=draw)
    if len(models) > 1:
        raise UsageError("--methods: is for one checkpoint, not several")
    runs = _run_methods(models[0], options, methods, workers.runner)
    printer(results.methods_report(runs))
    running.draw_into(plot, results.draw_positions, list(runs.values()), list(runs))
    return 0


def _run_methods(model: str, options: dict[str, Any], methods: tuple[str, ...], runner: JobRunner) -> dict[str, Run]:
    """Return method → its finished run; all are planned before the first is computed."""
    from evalkit.studies.running import Job

    if len(set(methods)) < len(methods):
        raise UsageError(f"--methods {','.join(methods)}: name each method once")
    if options.get("context") in (None, "none") and options.get("context_config") is None:
        raise UsageError("--methods: name the longer context window too, such as --context 8192")
    with Progress() as progress:
        say, of_method = progress.say, {name: options | {"context_method": name} for name in methods}
        plans = {name: running.plan_of(model, own_options, say) for name, own_options in of_method.items()}
        if len(plans) > 1 and len({plan.folder for plan in plans.values()}) == 1:
            raise UsageError(
                f"--methods {','.join(methods)}: --context {options.get('context')} is no longer than the window of "
                "training, so no method changes anything; give a longer --context, or --context-original"
            )
        outcomes = runner([Job(f"{model}, {method}", plan) for method, plan in plans.items()], progress)
    return dict(zip(plans, running.finished_runs(outcomes), strict=True))
