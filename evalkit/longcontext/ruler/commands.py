"""`evalkit ruler` and its commands, and `evalkit needle`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

import click

from evalkit.cli import running
from evalkit.cli.parameters import argument, command, option
from evalkit.cli.running import Printer
from evalkit.display import doing
from evalkit.errors import UsageError
from evalkit.longcontext.longbench.commands import RunGroup


@click.group(cls=RunGroup, add_help_option=False)
def ruler() -> None:
    """RULER: retrieval, tracking, counting and questions in texts of each length."""


@command(
    ruler,
    "run",
    kind="ruler",
    order="ORIGIN lengths tasks samples CONTEXT ... output name COMPUTING token_budget TRUST dry plot printer",
)
def run_ruler(
    *,
    checkpoints: tuple[str, ...] = running.CHECKPOINTS,
    model: str | None = running.MODEL,
    dry: bool = running.DRY_RUN,
    plot: Path | None = running.PLOT,
    printer: Printer,
    **options: Any,
) -> int:
    """Generate and score answers of RULER's 13 tasks, made for the checkpoint's tokenizer; `run` may be omitted.

    Two scores from one pass over the text: RULER's own of the generated answer, and the likelihood of the right answer,
    which also tells apart models that generate nothing right. The same command again resumes an interrupted run.

    \b
    evalkit ruler CKPT --lengths 1k,2k,4k,8k
    evalkit ruler CKPT_A CKPT_B --lengths 1k,2k --plot lengths.pdf       several checkpoints, a line each
    evalkit ruler CKPT --lengths 4k,8k --context 8192                    stretched to 8,192 tokens by YaRN
    evalkit ruler CKPT --tasks niah_multikey_1,vt --samples 200 --plot lengths.pdf
    evalkit ruler show RUN_A RUN_B --format latex                        a line for each model
    """
    from evalkit.longcontext.ruler.results import draw_lengths

    models = running.checkpoints_of(checkpoints, model)
    draw = partial(running.draw_runs, plot, draw_lengths)
    return running.evaluate(models, options | {"suite": "ruler"}, printer, dry, draw=draw)


@command(kind="needle", order="ORIGIN CONTEXT ... output name COMPUTING token_budget TRUST dry plot printer")
def needle(
    *,
    checkpoints: tuple[str, ...] = running.CHECKPOINTS,
    model: str | None = running.MODEL,
    dry: bool = running.DRY_RUN,
    plot: Path | None = running.PLOT,
    printer: Printer,
    **options: Any,
) -> int:
    """Needle in a haystack: test whether the model finds a number at any position of a long text.

    It has the scores of evalkit ruler. The same command again resumes an interrupted run.

    \b
    evalkit needle --model CKPT --context 8192 --plot heatmap.pdf        stretched to 8,192 tokens by YaRN
    evalkit needle --model CKPT --lengths 500,1k --depths 10,50,90 --repeats 10 --text book.txt
    """
    from evalkit.longcontext.ruler.results import draw_depths

    return running.evaluate(
        running.checkpoints_of(checkpoints, model),
        options | {"suite": "needle"},
        printer,
        dry,
        draw=lambda runs: running.draw_into(plot, draw_depths, *runs),
        of_one={"plot": plot},
    )


@command(ruler, "show")
def show_ruler(
    *,
    runs: tuple[str, ...] = argument(),
    rule: Literal["ruler", "choice", "bits_per_byte"] = option("ruler", "Which score."),
    root: Path | None = running.RUNS_IN,
    plot: Path | None = running.PLOT,
    printer: Printer,
) -> None:
    """Print finished runs side by side: means at each length, weighted means, and the effective length of each.

    RUNS are run folders, or ids, names or checkpoints of runs in --in (evalkit ls runs). evalkit compare
    shows whether a difference is real.

    \b
    evalkit ruler show RUN_A RUN_B --plot lengths.pdf
    evalkit ruler show RUN_A RUN_B --rule choice --format latex
    """
    from evalkit.comparison.sides import names
    from evalkit.longcontext.ruler.needle import NEEDLE
    from evalkit.longcontext.ruler.results import RULER, draw_lengths, lengths_report

    with doing("reading runs"):
        of_runs = running.Source(None, None, root=root)
        opened, _ = of_runs.named(runs, lambda run: run.kind in (RULER, NEEDLE))
    if (kinds := {run.kind for run in opened}) not in ({RULER}, {NEEDLE}):
        raise UsageError(
            f"the runs are of {', '.join(sorted(kinds))}; name runs of evalkit ruler, or of evalkit needle"
        )
    printer(lengths_report(opened, names(opened), rule))
    running.draw_runs(plot, draw_lengths, opened)
