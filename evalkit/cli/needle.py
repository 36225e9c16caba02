"""`evalkit needle`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from evalkit.cli.options import (
    CHAT,
    CHECKPOINT,
    COMPUTING,
    CONFIG,
    CONTEXT,
    FOLDER,
    FORMAT,
    KEPT_TOKENS,
    ORIGIN,
    OUTPUT,
    TRUST,
    checkpoint_of,
    comma_separated,
    option,
)
from evalkit.errors import UsageError
from evalkit.reporting.escape import printable


@click.command()
@click.pass_context
@CONFIG
@CHECKPOINT
@ORIGIN
@CONTEXT
@option("--lengths", callback=comma_separated, help="Tokens of the prompts, separated by commas.  [default: 1000,2000,"
        "4000,… as far as the context goes]")  # fmt: skip
@option("--depths", callback=comma_separated, default="0,25,50,75,100", help="Where the needle lies, in percent of the "
        "text.")  # fmt: skip
@option("--repeats", type=int, default=3, help="Texts for each length and depth.")
@option("--text", type=FOLDER, help="Text file to hide needles in.  [default: sentences made by evalkit]")
@CHAT
@OUTPUT
@COMPUTING
@KEPT_TOKENS
@TRUST
@FORMAT
def needle(
    ctx: click.Context,
    /,
    checkpoint: str | None,
    model: str | None,
    lengths: tuple[str, ...],
    depths: tuple[str, ...],
    repeats: int,
    text: Path | None,
    chat: bool,
    form: str,
    **options: Any,
) -> None:
    """A needle in a haystack: is a number found wherever it lies in a long text?

    The run folder has a heatmap.png and .pdf, and each answer. The same command again resumes what was interrupted.

    \b
    evalkit needle --model CKPT --context 8192                           stretched to 8,192 tokens by YaRN
    evalkit needle --model CKPT --lengths 500,1000 --depths 10,50,90 --repeats 10 --text book.txt
    """
    import json

    from evalkit.benchmarks.needle.plan import NeedleRequest, plan_needle
    from evalkit.benchmarks.needle.view import needle_table
    from evalkit.benchmarks.request import request_of
    from evalkit.benchmarks.session import run_plan
    from evalkit.progress import Progress

    whole = tuple(int(length) for length in _numbers("--lengths", lengths, whole=True))
    named = checkpoint_of(ctx, checkpoint, model)
    asked = NeedleRequest(request_of(named, options), whole, _numbers("--depths", depths), repeats, text, chat)
    with Progress() as progress:
        finished = run_plan(plan_needle(asked, progress.say), progress)
    if form == "json":
        about = {"run": finished.manifest["id"], "folder": str(finished.folder)}
        click.echo(json.dumps(about | finished.stored, indent=2))
        return
    click.echo(needle_table(finished))
    click.echo(f"\n{printable(str(finished.folder))}")


def _numbers(flag: str, given: tuple[str, ...], whole: bool = False) -> tuple[float, ...]:
    try:
        return tuple(int(text) if whole else float(text) for text in given)
    except ValueError:
        kind = "whole numbers" if whole else "numbers"
        raise UsageError(f"{flag} {','.join(given)}: expected {kind}, separated by commas") from None
