"""`evalkit longbench` and its commands."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

import click

from evalkit.cli import running
from evalkit.cli.parameters import Commands, argument, command, option, typed_option
from evalkit.cli.running import Printer

EditVariant = Literal["difflib", "rapidfuzz"]
EDIT_SIMILARITY = option("difflib", "Of the code tasks; published scores are difflib's.")


class RunGroup(Commands):
    """A group with the default command `run`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args:
            return super().parse_args(ctx, ["run", "--help"])
        if args[0] not in self.commands:
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(cls=RunGroup, add_help_option=False)
def longbench() -> None:
    """LongBench: answers over long documents, generated and scored."""


@command(
    longbench,
    "run",
    kind="longbench",
    order="ORIGIN suite tasks SELECTION CONTEXT ... output name data_dir COMPUTING token_budget TRUST dry "
    "edit_similarity plot printer",
)
def run_longbench(
    *,
    checkpoints: tuple[str, ...] = running.CHECKPOINTS,
    model: str | None = running.MODEL,
    dry: bool = running.DRY_RUN,
    edit_similarity: EditVariant = EDIT_SIMILARITY,
    plot: Path | None = running.PLOT,
    printer: Printer,
    **options: Any,
) -> int:
    """Generate answers over long documents and score them as LongBench's own code does; `run` may be omitted.

    The same command again resumes an interrupted run, or prints the finished result at once.

    \b
    evalkit longbench --model CKPT --data-dir DOCUMENTS                  stretched to 8,192 tokens by YaRN if shorter
    evalkit longbench --model CKPT --context none                        with its trained context window
    evalkit longbench --model CKPT --tasks qasper,trec --sample 20
    evalkit longbench CKPT_A CKPT_B --data-dir DOCUMENTS                 several checkpoints, a line each
    evalkit longbench rescore RUN --edit-similarity rapidfuzz            no model needed
    evalkit longbench score PREDICTIONS                                  of the official code
    """
    from evalkit.longcontext.longbench.results import GENERATIONS, draw_by_length, report_of

    draw = partial(draw_by_length, variant=edit_similarity)
    return running.evaluate(
        running.checkpoints_of(checkpoints, model),
        options,
        printer,
        dry,
        show=lambda run, _: report_of(run, edit_similarity),
        draw=lambda runs: running.draw_into(plot, draw, runs[0].table(GENERATIONS)),
        of_one={"plot": plot, "edit_similarity": edit_similarity != "difflib"},
    )


@command(longbench, "rescore")
def rescore_longbench(
    *,
    run: str = running.RUN,
    root: Path | None = running.RUNS_IN,
    edit_similarity: EditVariant = EDIT_SIMILARITY,
    plot: Path | None = running.PLOT,
    printer: Printer,
) -> None:
    """Score the predictions of a finished run again; no model is needed.

    RUN is a run folder, or the id, name or checkpoint of one in --in (evalkit ls runs).

    \b
    evalkit longbench rescore 1a2b3c4d --format latex
    """
    from evalkit.longcontext.longbench.protocol import LONGBENCH
    from evalkit.longcontext.longbench.results import GENERATIONS, draw_by_length, report_of

    opened = running.named_run(run, root, usable=lambda run: run.kind == LONGBENCH)
    printer.run(opened, report_of(opened, edit_similarity))
    running.draw_into(plot, partial(draw_by_length, variant=edit_similarity), opened.table(GENERATIONS))


@command(longbench)
def score(
    *,
    files: tuple[Path, ...] = argument(),
    is_e: bool = typed_option(False, "They are of LongBench-E: give the scores by length too.", option="--e"),
    edit_similarity: EditVariant = EDIT_SIMILARITY,
    plot: Path | None = running.PLOT,
    printer: Printer,
) -> None:
    """Score predictions that the benchmark's own code wrote: files <task>.jsonl, or folders of them.

    \b
    evalkit longbench score pred/llama2-7b-chat-4k
    evalkit longbench score --e pred_e/llama2-7b-chat-4k --format latex
    """
    from evalkit.longcontext.longbench.data import read_predictions
    from evalkit.longcontext.longbench.results import draw_by_length, longbench_report, score_generations

    suite: Literal["longbench", "longbench-e"] = "longbench-e" if is_e else "longbench"
    generations, notes = read_predictions(files, suite)
    printer(longbench_report(score_generations(generations, suite, edit_similarity), notes))
    running.draw_into(plot, partial(draw_by_length, variant=edit_similarity), generations)
