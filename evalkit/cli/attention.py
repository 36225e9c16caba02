"""`evalkit attention`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from evalkit.benchmarks.attention.groups import GROUPS
from evalkit.cli.options import (
    CHECKPOINT,
    COMPUTING,
    CONFIG,
    CONTEXT,
    DATA_DIR,
    DRY_RUN,
    ORIGIN,
    OUTPUT,
    TRUST,
    checkpoint_of,
)
from evalkit.cli.parameters import FOLDER, comma_separated, option
from evalkit.cli.running import (
    PRINTING,
    WORKERS,
    dry_run,
    has_workers,
    print_report,
    print_run,
    run_and_print,
    runner_of,
    worker_options,
)

if TYPE_CHECKING:
    from evalkit.reporting.markup import Format
    from evalkit.runs.folder import Run


@click.command()
@click.pass_context
@CONFIG
@CHECKPOINT
@ORIGIN
@CONTEXT
@option("--measures", callback=comma_separated, metavar="NAMES", help=f"Of {', '.join(GROUPS)}.  [default: all]")
@option("--layers", callback=comma_separated, metavar="NUMBERS", help="From 0, or from -1 for the last one backwards.  "
        "[default: all; for the rank the last four]")  # fmt: skip
@option("--sample", type=click.IntRange(min=1), default=200, metavar="N", help="Random documents of each task, or "
        "windows of a text.")  # fmt: skip
@option("--seed", type=click.IntRange(min=0), default=0, metavar="N", help="Seed of the random sample.")
@option("--continuation", type=click.Choice(("gold", "all")), default="gold", help="Continuation that is read: the "
        "gold answer's, or every choice's.")  # fmt: skip
@option("--questions", metavar="SUITE", help="Suite whose documents are read.  [default: zeroshot8]")
@option("--tasks", callback=comma_separated, metavar="NAMES", help="Tasks of that suite.  [default: all]")
@option("--template", help="How prompts are written (evalkit ls templates), or a YAML file.  [default: inst]")
@option("--num-fewshot", type=int, help="Solved examples before each question.  [default: 0]")
@DATA_DIR
@option("--allow-unofficial-data", is_flag=True, help="Accept documents that are not the pinned ones; results are "
        "marked.")  # fmt: skip
@option("--text", type=FOLDER, help="Text file to read in windows of the context, in place of the tasks' documents.")
@OUTPUT
@COMPUTING
@TRUST
@DRY_RUN
@WORKERS
@PRINTING
def attention(
    ctx: click.Context,
    /,
    checkpoint: str | None,
    model: str | None,
    without_computing: bool,
    form: Format,
    standalone: bool,
    **options: Any,
) -> None:
    """Attention maps: measure what each head attends to, on a sample of the tasks' documents.

    Shares on BOS and on kinds of words, entropy, negative weights, sinks, distance, similarity of heads, effective
    rank; each as the paper defines it and in a form that also holds for signed maps (docs/attention.md). Draw them with
    evalkit figure, compare runs with evalkit compare. The same command again resumes an interrupted run.

    \b
    evalkit attention --model CKPT                                       200 documents of each of the eight tasks
    evalkit attention --model CKPT --measures bos,entropy --layers -1 --sample 50 --seed 1
    evalkit attention --model CKPT --text book.txt --context 8192 --measures bos,mass
    """
    workers = worker_options(options)
    runner = runner_of(workers)
    asked = options | {"suite": "attention"}

    def output(run: Run, _: str) -> None:
        from evalkit.benchmarks.attention.results import attention_report

        print_run(run, attention_report(run), form, standalone)

    named = checkpoint_of(ctx, checkpoint, model)
    if without_computing:
        print_report(dry_run([named], asked), form, standalone)
        return
    run_and_print(named, asked, runner if has_workers(workers) else None, output)
