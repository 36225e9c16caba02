"""`evalkit run` and `evalkit rescore`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from evalkit.cli.options import (
    CHECKPOINT,
    COMPUTING,
    CONFIG,
    CONTEXT,
    DATA_DIR,
    DETAIL,
    FOLDER,
    FORMAT,
    ORIGIN,
    OUTPUT,
    RUN,
    TRUST,
    checkpoint_of,
    comma_separated,
    option,
)
from evalkit.reporting.escape import printable
from evalkit.runs.finding import find_run

if TYPE_CHECKING:
    from evalkit.benchmarks.lm_eval.plan import TaskPlan
    from evalkit.benchmarks.multiple_choice.plan import ChoicePlan
    from evalkit.progress import Progress
    from evalkit.runs.folder import Run


@click.command()
@click.pass_context
@CONFIG
@CHECKPOINT
@ORIGIN
@option("--suite", help="Which tasks and averages: a name or a YAML file; or lm_eval.  [default: zeroshot8, or lm_eval "
         "if a task is not in it]")  # fmt: skip
@option("--tasks", callback=comma_separated, help="Only these of the suite, or any of lm-eval's, separated by commas.")
@option("--include-path", type=FOLDER, help="Folder of your own lm-eval task files; they can run code beside them.")
@option("--template", help="inst (the paper's), plain (lm-eval's), chat, or a YAML file.  [default: inst]")
@option("--rule", help="How the answer is chosen (evalkit ls rules).  [default: ppl; acc with plain]")
@option("--limit", "-L", type=int, help="Most documents of each task.  [default: all]")
@option(
    "--num-fewshot", type=int, help="Solved examples before each question.  [default: 0; a task's own with lm_eval]"
)
@OUTPUT
@DATA_DIR
@COMPUTING
@CONTEXT
@option("--token-budget", default="auto", help="Most tokens in a batch.")
@option("--show-prompts", type=click.IntRange(min=0), default=0, help="Print this many questions of each task as they "
         "are fed to the model, segments in colour, and score nothing.")  # fmt: skip
@option("--log-samples", is_flag=True, help="Also write lm-eval's per-document sample files.")
@TRUST
@option("--allow-unofficial-data", is_flag=True, help="Accept documents that are not the pinned ones; marked.")
@DETAIL
@FORMAT
def run(
    ctx: click.Context,
    /,
    checkpoint: str | None,
    model: str | None,
    show_prompts: int,
    detail: bool,
    form: str,
    **options: Any,
) -> None:
    """Score a checkpoint on a suite and print the table.

    The same command again resumes what was interrupted, or prints the finished result at once.

    \b
    evalkit run demo --limit 50 --data-dir DOCUMENTS
    evalkit run --model org/name --revision step1000 --dtype float32
    evalkit run --model CKPT --template plain --rule acc_norm       as lm-eval scores
    evalkit run --model CKPT --show-prompts 1 --tasks mmlu          look before you score
    evalkit run --model CKPT --tasks sciq,lambada_openai            any of lm-eval's tasks, by its own metrics
    evalkit run CKPT --tasks sciq --template inst                   under the paper's prompt and every rule
    evalkit run CKPT --suite my_suite.yaml                          a suite of your own (docs/protocol.md)
    evalkit run --model CKPT --context 8192                         stretched by YaRN
    """
    named = checkpoint_of(ctx, checkpoint, model)
    from evalkit.benchmarks.multiple_choice.plan import ChoicePlan
    from evalkit.benchmarks.request import request_of
    from evalkit.benchmarks.run import planned
    from evalkit.benchmarks.session import run_plan
    from evalkit.progress import Progress

    with Progress() as progress:
        request = request_of(named, options | {"tasks": options["tasks"] or None})
        plan = planned(request, progress.say)
        if show_prompts:
            if isinstance(plan, ChoicePlan):
                _print_prompts(plan, show_prompts, progress)
            else:
                _print_requests(plan, show_prompts)
            return
        finished = run_plan(plan, progress)
    if isinstance(plan, ChoicePlan):
        _print_results(finished, plan.rule.name, detail, form)
    else:
        _print_metrics(finished, form)


@click.command()
@RUN
@option("--rule", help="How the answer is chosen (evalkit ls rules).  [default: the run's own]")
@OUTPUT
@DETAIL
@FORMAT
def rescore(run: str, rule: str | None, output: Path, detail: bool, form: str) -> None:
    """Apply another rule to the scores of a finished run; no model is needed.

    RUN is a run folder, or what `evalkit ls runs` lists of one in --output: its id or name, the beginning of either,
    or its checkpoint where no other run has it.

    \b
    evalkit rescore 1a2b3c4d --rule acc_norm
    evalkit rescore results/runs/demo-zeroshot8-inst-float32-1a2b3c4d5e6f --rule acc_norm
    """
    opened = find_run(run, output)
    _print_results(opened, rule or opened.manifest["rule"], detail, form)


def _print_prompts(plan: ChoicePlan, count: int, progress: Progress) -> None:
    from evalkit.benchmarks.multiple_choice.prompts import Prompter
    from evalkit.benchmarks.multiple_choice.tasks import load_questions
    from evalkit.benchmarks.multiple_choice.view import prompt_text
    from evalkit.benchmarks.session import load_model

    loaded = load_model(plan.checkpoint, plan.common, plan.manifest["specification"], progress)
    prompter = Prompter(plan.template, loaded.tokenizer, loaded.window, progress.say)
    for questions in load_questions(plan.suite, plan.library, count, plan.others).values():
        for encoded in prompter.encode(questions, plan.unconditional):
            click.echo(prompt_text(encoded, loaded.tokenizer))


def _print_requests(plan: TaskPlan, count: int) -> None:
    from evalkit.benchmarks.lm_eval.plan import first_requests
    from evalkit.benchmarks.lm_eval.view import requests_text

    for task in plan.tasks.tasks.values():
        click.echo(requests_text(first_requests(task, count)))


def _print_metrics(finished: Run, form: str) -> None:
    import json

    from evalkit.benchmarks.lm_eval.view import metric_table

    if form == "json":
        about = {"run": finished.manifest["id"], "folder": str(finished.folder)}
        click.echo(json.dumps(about | {"documents": finished.manifest["documents"]} | finished.stored, indent=2))
        return
    click.echo(metric_table(finished.stored, finished.manifest))
    click.echo(f"\n{printable(str(finished.folder))}")


def _print_results(finished: Run, rule: str, detail: bool, form: str) -> None:
    import json

    from evalkit.benchmarks.multiple_choice.view import result_table, rules_table, subtask_table

    results = finished.results(rule)
    if form == "json":
        about = {"run": finished.manifest["id"], "folder": str(finished.folder), "seconds": finished.seconds}
        sources = {kind: finished.manifest[kind] for kind in ("documents", "examples") if kind in finished.manifest}
        click.echo(json.dumps(about | sources | results.to_json(), indent=2))
        return
    click.echo(result_table(results, finished.manifest, finished.seconds))
    if detail:
        for task in results.subtasks:
            click.echo("\n" + subtask_table(results, task))
    click.echo("\n" + rules_table(finished.scores, finished.manifest, rule))
    click.echo(f"\n{printable(str(finished.folder))}")
