"""`evalkit run` and `decide`: their options and what is special to each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import isfinite
from typing import Any

import click

from evalkit.cli import running
from evalkit.cli.parameters import argument, command, exclude, flag, option, typed_option
from evalkit.cli.running import Printer, Workers
from evalkit.cli.study import WatchOptions, watch
from evalkit.display import Progress, doing
from evalkit.errors import UsageError


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
    from evalkit.cli.lm_eval import with_model_args, with_task_files
    from evalkit.suites.suites import DEFAULT_SUITE, load_suite

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
            for text in plan.shown_prompts(show_prompts, progress.say):
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
    from evalkit.runs.continuous import outcome_key
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
