"""`evalkit longbench` and its commands."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from evalkit.cli.options import (
    CHECKPOINT,
    COMPUTING,
    CONFIG,
    CONTEXT,
    ORIGIN,
    OUTPUT,
    PLOT,
    RUN,
    SELECTION,
    TRUST,
    BenchmarkCommand,
    checkpoint_of,
    named_run,
    settings,
)
from evalkit.cli.parameters import FOLDER, Commands, argument, option, typed_option
from evalkit.cli.running import DRY_RUN, PRINTING, Printer, evaluation_of, say
from evalkit.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.benchmarks.longbench.official import EditVariant
    from evalkit.benchmarks.longbench.protocol import SuiteName
    from evalkit.runs.folder import Run

EDIT_SIMILARITY = option("--edit-similarity", type=click.Choice(["difflib", "rapidfuzz"]), default="difflib",
                         help="Of the code tasks; published scores are difflib's.")  # fmt: skip


class _LongBenchGroup(Commands):
    """A group with the default command `run`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args:
            return super().parse_args(ctx, ["run", "--help"])
        if args[0] not in self.commands:
            # A name after an option is its value
            if later := [word for before, word in pairwise(args) if word in self.commands and before[0] != "-"]:
                raise UsageError(f"give the options of evalkit longbench {later[0]} after its name")
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_LongBenchGroup, add_help_option=False)
def longbench() -> None:
    """LongBench: answers over long documents, generated and scored."""


@longbench.command(cls=BenchmarkCommand, kind="longbench")
@click.pass_context
@CONFIG
@CHECKPOINT
@settings(
    *ORIGIN, "suite", "tasks", *SELECTION, *CONTEXT, ..., "output", "data_dir", *COMPUTING, "token_budget", *TRUST
)
@DRY_RUN
@EDIT_SIMILARITY
@PLOT
@PRINTING
def run(
    ctx: click.Context,
    /,
    checkpoint: str | None,
    model: str | None,
    edit_similarity: EditVariant,
    plot: Path | None,
    **options: Any,
) -> None:
    """Generate answers over long documents and score them as LongBench's own code does; `run` may be omitted.

    The same command again resumes an interrupted run, or prints the finished result at once.

    \b
    evalkit longbench --model CKPT --data-dir DOCUMENTS                  stretched to 8,192 tokens by YaRN if shorter
    evalkit longbench --model CKPT --context none                        with its trained context window
    evalkit longbench --model CKPT --tasks qasper,trec --sample 20
    evalkit longbench rescore RUN --edit-similarity rapidfuzz            no model needed
    evalkit longbench score PREDICTIONS                                  of the official code
    """
    from evalkit.benchmarks.longbench.results import report_of

    evaluation_of(options).run(
        checkpoint_of(ctx, checkpoint, model),
        lambda run, _: report_of(run, edit_similarity),
        lambda run: _draw_run(run, plot, edit_similarity),
    )


@longbench.command()
@RUN
@OUTPUT
@EDIT_SIMILARITY
@PLOT
@PRINTING
def rescore(run: str, output: Path, edit_similarity: EditVariant, plot: Path | None, printer: Printer) -> None:
    """Score the predictions of a finished run again; no model is needed.

    RUN is a run folder, or the id, name or checkpoint of one in --output (evalkit ls runs).

    \b
    evalkit longbench rescore 1a2b3c4d --format latex
    """
    from evalkit.benchmarks.longbench.results import report_of

    opened = named_run(run, output)
    printer.run(opened, report_of(opened, edit_similarity))
    _draw_run(opened, plot, edit_similarity)


@longbench.command()
@argument("files", nargs=-1, required=True, type=FOLDER)
@typed_option("--e", "is_e", is_flag=True, help="They are of LongBench-E: give the scores by length too.")
@EDIT_SIMILARITY
@PLOT
@PRINTING
def score(
    files: tuple[Path, ...], is_e: bool, edit_similarity: EditVariant, plot: Path | None, printer: Printer
) -> None:
    """Score predictions that the benchmark's own code wrote: files <task>.jsonl, or folders of them.

    \b
    evalkit longbench score pred/llama2-7b-chat-4k
    evalkit longbench score --e pred_e/llama2-7b-chat-4k --format latex
    """
    from evalkit.benchmarks.longbench.data import read_predictions
    from evalkit.benchmarks.longbench.results import longbench_report, score_generations

    suite: SuiteName = "longbench-e" if is_e else "longbench"
    generations, notes = read_predictions(files, suite)
    printer(longbench_report(score_generations(generations, suite, edit_similarity), notes))
    _draw(generations, plot, edit_similarity)


def _draw_run(run: Run, plot: Path | None, edit_similarity: EditVariant) -> None:
    from evalkit.benchmarks.longbench.results import load_generations

    if plot is not None:
        _draw(load_generations(run), plot, edit_similarity)


def _draw(generations: pd.DataFrame, plot: Path | None, edit_similarity: EditVariant) -> None:
    from evalkit.benchmarks.longbench.results import draw_by_length

    if plot is not None:
        draw_by_length(generations, plot, edit_similarity)
        say(f"{plot} has been written")
