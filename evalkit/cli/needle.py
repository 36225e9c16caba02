"""`evalkit needle`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from evalkit.cli.options import (
    CHAT,
    CHECKPOINT,
    COMPUTING,
    CONFIG,
    CONTEXT,
    DRY_RUN,
    ORIGIN,
    OUTPUT,
    TOKEN_BUDGET,
    TRUST,
    checkpoint_of,
)
from evalkit.cli.parameters import FOLDER, comma_separated, option
from evalkit.cli.running import PRINTING, dry_run, print_report, print_run, run_and_print

if TYPE_CHECKING:
    from evalkit.reporting.markup import Format
    from evalkit.runs.folder import Run


@click.command()
@click.pass_context
@CONFIG
@CHECKPOINT
@ORIGIN
@CONTEXT
@option("--lengths", callback=comma_separated, help="Tokens of the prompts, separated by commas.  [default: 1000,2000,"
        "4000,… up to the context window]")  # fmt: skip
@option("--depths", callback=comma_separated, default="0,25,50,75,100", help="Positions of the needle, in percent "
        "of the text.")  # fmt: skip
@option("--repeats", type=int, default=3, help="Texts for each length and depth.")
@option("--text", type=FOLDER, help="Text file to hide needles in.  [default: sentences made by evalkit]")
@CHAT
@OUTPUT
@COMPUTING
@TOKEN_BUDGET
@TRUST
@DRY_RUN
@PRINTING
def needle(
    ctx: click.Context,
    /,
    checkpoint: str | None,
    model: str | None,
    without_computing: bool,
    form: Format,
    standalone: bool,
    **options: Any,
) -> None:
    """Needle in a haystack: test whether the model finds a number at any position of a long text.

    The run folder has a heatmap.png and .pdf, and each answer. The same command again resumes an interrupted run.

    \b
    evalkit needle --model CKPT --context 8192                           stretched to 8,192 tokens by YaRN
    evalkit needle --model CKPT --lengths 500,1000 --depths 10,50,90 --repeats 10 --text book.txt
    """
    asked = options | {"suite": "needle"}

    def output(run: Run, _: str) -> None:
        from evalkit.benchmarks.needle.results import needle_report

        print_run(run, needle_report(run), form, standalone)

    named = checkpoint_of(ctx, checkpoint, model)
    if without_computing:
        print_report(dry_run([named], asked), form, standalone)
        return
    run_and_print(named, asked, None, output)
