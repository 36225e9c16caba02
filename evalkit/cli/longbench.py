"""`evalkit longbench` and its commands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from evalkit.cli.options import FOLDER, Commands, option

if TYPE_CHECKING:
    from evalkit.longbench.metrics import EditVariant
    from evalkit.longbench.view import Form

EDIT_SIMILARITY = option("--edit-similarity", type=click.Choice(["difflib", "rapidfuzz"]), default="difflib",
                         help="Of the code tasks; published scores are difflib's.")  # fmt: skip
LONGBENCH_FORMAT = option("--format", "form", type=click.Choice(["table", "markdown", "latex", "json", "csv"]),
                          default="table", help="Of the result.")  # fmt: skip
PLOT = option("--plot", type=FOLDER, help="Also draw the scores by input length, into a .png or .pdf file.")


@click.group(cls=Commands, invoke_without_command=True)
@click.pass_context
def longbench(ctx: click.Context) -> None:
    """LongBench: generate answers over long documents and score them as the benchmark's own code does."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@longbench.command()
@click.argument("files", nargs=-1, required=True, type=FOLDER)
@click.option("--e", "is_e", is_flag=True, help="They are of LongBench-E: give the scores by length too.")
@EDIT_SIMILARITY
@PLOT
@LONGBENCH_FORMAT
def score(files: tuple[Path, ...], is_e: bool, edit_similarity: EditVariant, plot: Path | None, form: Form) -> None:
    """Score predictions that the benchmark's own code wrote: files <task>.jsonl, or folders of them.

    \b
    evalkit longbench score pred/llama2-7b-chat-4k
    evalkit longbench score --e pred_e/llama2-7b-chat-4k --format latex
    """
    from evalkit.longbench.official_format import read_predictions
    from evalkit.longbench.scores import score_generations
    from evalkit.longbench.view import render

    predictions = read_predictions(files, "longbench-e" if is_e else "longbench")
    results = score_generations(predictions.generations, "longbench-e" if is_e else "longbench", edit_similarity)
    click.echo(render(results, form, predictions.notes))
    if form in ("latex", "csv"):
        for note in predictions.notes:
            click.echo(note, err=True)
    if plot is not None:
        from evalkit.longbench.plots import draw_by_length

        draw_by_length(predictions.generations, plot, edit_similarity)
        click.echo(f"{plot} is drawn", err=True)
