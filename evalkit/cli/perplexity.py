"""`evalkit perplexity`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from evalkit.cli.options import (
    CHECKPOINT,
    COMPUTING,
    CONFIG,
    CONTEXT,
    DRY_RUN,
    ORIGIN,
    OUTPUT,
    PLOT,
    SELECTION,
    TOKEN_BUDGET,
    TRUST,
    checkpoint_of,
)
from evalkit.cli.parameters import FOLDER, comma_separated, option, typed_option
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
from evalkit.display import doing
from evalkit.errors import RunError, UnknownNameError, UsageError
from evalkit.escape import printable

if TYPE_CHECKING:
    from evalkit.reporting.markup import Format
    from evalkit.runs.folder import Run
    from evalkit.studies.running import JobRunner


@click.command()
@click.pass_context
@CONFIG
@CHECKPOINT
@ORIGIN
@typed_option("--text", type=FOLDER, multiple=True, metavar="FILE", help="A .txt file (one document), a .jsonl file "
              "(one on each line), or a folder of them; repeat for several tasks.")  # fmt: skip
@typed_option("--key", default="text", show_default=True, help="Key of the text in .jsonl files.")
@SELECTION
@CONTEXT
@typed_option("--methods", callback=comma_separated, metavar="NAMES", help="Several methods of context extension, "
              "separated by commas: a run each, in one table and one picture.")  # fmt: skip
@option("--stride", type=int, metavar="TOKENS", help="Tokens that each window after the first scores; fewer give each "
        "token more context, and take longer.  [default: the window]")  # fmt: skip
@OUTPUT
@COMPUTING
@TOKEN_BUDGET
@TRUST
@DRY_RUN
@WORKERS
@PLOT
@PRINTING
def perplexity(
    ctx: click.Context,
    /,
    checkpoint: str | None,
    model: str | None,
    text: tuple[Path, ...],
    methods: tuple[str, ...] | None,
    plot: Path | None,
    without_computing: bool,
    form: Format,
    standalone: bool,
    **options: Any,
) -> None:
    """Perplexity of any text: bits per byte by document and by position in the context window.

    A longer document is scored in windows, each token once: those of lm-eval's rolling log-likelihood, or overlapping
    ones by --stride. Bits per byte can be compared between tokenizers. Compare runs with evalkit compare. The same
    command again resumes an interrupted run.

    \b
    evalkit perplexity --model CKPT --text book.txt
    evalkit perplexity --model CKPT --text articles.jsonl --text books/ --sample 50
    evalkit perplexity --model CKPT --text book.txt --stride 512              at least window - 512 tokens of context
    evalkit perplexity --model CKPT --text book.txt --context 8192            stretched to 8,192 tokens by YaRN
    evalkit perplexity --model CKPT --text book.txt --context 8192 --methods none,linear,ntk,yarn --plot curves.png
    """
    workers = worker_options(options)
    runner = runner_of(workers)
    asked = options | {"suite": "perplexity", "text": text}
    named = checkpoint_of(ctx, checkpoint, model)
    if without_computing:
        if methods is not None:
            raise UsageError("--dry-run is of one method, and the others take as much; leave out --methods")
        print_report(dry_run([named], asked), form, standalone)
        return
    if methods is not None:
        _check_methods(methods, options)
        _print_methods(_run_methods(named, asked, methods, runner), plot, form, standalone)
        return

    def output(run: Run, _: str) -> None:
        from evalkit.benchmarks.perplexity.results_report import perplexity_report

        print_run(run, perplexity_report(run), form, standalone)
        _draw({str(run.manifest["model"]): run}, plot)

    run_and_print(named, asked, runner if has_workers(workers) else None, output)


def _check_methods(methods: tuple[str, ...], options: dict[str, Any]) -> None:
    """Validate `--methods` before anything is read."""
    from evalkit.models.context import METHODS

    for one in methods:
        if one not in METHODS:
            raise UnknownNameError("context method", one, METHODS)
        if methods.count(one) > 1:
            raise UsageError(f"--methods {','.join(methods)}: {one} occurs twice; name each method once")
    if options.get("context_method") is not None:
        raise UsageError("--methods names the methods already; leave out --context-method")
    if options.get("context") in (None, "none") and options.get("context_config") is None:
        raise UsageError("--methods: name the longer context window too, such as --context 8192")


def _run_methods(model: str, options: dict[str, Any], methods: tuple[str, ...], runner: JobRunner) -> dict[str, Run]:
    """Return method → its finished run; all are planned before the first is computed.

    Raises:
        EvalkitError: a run cannot be planned, nothing is stretched, or a run is not finished.
    """
    from evalkit.benchmarks.run import planned
    from evalkit.display import Progress
    from evalkit.runs.folder import load_run
    from evalkit.studies.planning import Job

    with Progress() as progress:
        with doing("planning the runs"):
            plans = {one: planned(model, options | {"context_method": one}, progress.say) for one in methods}
        if len(plans) > 1 and len({plan.folder for plan in plans.values()}) == 1:
            raise UsageError(
                f"--methods {','.join(methods)}: --context {options.get('context')} is no longer than the window of "
                "training, so no method changes anything; give a longer --context, or --context-original"
            )
        outcomes = runner([Job(f"{model}, {one}", plan) for one, plan in plans.items()], progress)
    if failed := [one for one in outcomes if one.state != "finished"]:
        raise RunError(f"{failed[0].job.label}: {failed[0].message}")
    return {one: load_run(plan.folder) for one, plan in plans.items()}


def _print_methods(runs: dict[str, Run], plot: Path | None, form: Format, standalone: bool) -> None:
    from evalkit.benchmarks.perplexity.results_report import methods_report

    print_report(methods_report(runs), form, standalone)
    _draw(runs, plot)


def _draw(runs: dict[str, Run], plot: Path | None) -> None:
    if plot is None:
        return
    from evalkit.benchmarks.perplexity.results_report import draw_positions

    draw_positions(list(runs.values()), list(runs), plot)
    click.echo(printable(f"{plot} has been written"), err=True)
