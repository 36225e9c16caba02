"""`evalkit perplexity`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalkit.cli import running
from evalkit.cli.parameters import command, exclude, typed_option
from evalkit.cli.running import Printer, Workers
from evalkit.display import Progress
from evalkit.errors import UsageError

if TYPE_CHECKING:
    from evalkit.runs.folder import Run
    from evalkit.studies.running import JobRunner


@command(
    kind="perplexity",
    order="ORIGIN text key SELECTION CONTEXT methods ... output name COMPUTING token_budget TRUST dry workers "
    "plot printer",
)
def perplexity(
    *,
    checkpoints: tuple[str, ...] = running.CHECKPOINTS,
    model: str | None = running.MODEL,
    methods: tuple[str, ...] | None = typed_option(None, "Several methods of context extension, separated by commas: a "
                                                   "run each, in one table and one picture.", metavar="NAMES"),
    dry: bool = running.DRY_RUN,
    workers: Workers,
    plot: Path | None = running.PLOT,
    printer: Printer,
    **options: Any,
) -> int:  # fmt: skip
    """Perplexity of any text: bits per byte by document and by position in the context window.

    A longer document is scored in windows, each token once: those of lm-eval's rolling log-likelihood, or overlapping
    ones by --stride. Bits per byte can be compared between tokenizers. Compare runs with evalkit compare. The same
    command again resumes an interrupted run.

    \b
    evalkit perplexity --model CKPT --text book.txt
    evalkit perplexity CKPT_A CKPT_B --text book.txt --plot curves.png        several checkpoints, a line each
    evalkit perplexity --model CKPT --text articles.jsonl --text books/ --sample 50
    evalkit perplexity --model CKPT --text book.txt --stride 512              at least window - 512 tokens of context
    evalkit perplexity --model CKPT --text book.txt --context 8192            stretched to 8,192 tokens by YaRN
    evalkit perplexity --model CKPT --text book.txt --context 8192 --methods none,linear,ntk,yarn --plot curves.png
    """
    from evalkit.longcontext.perplexity import results

    options["suite"] = "perplexity"
    models = running.checkpoints_of(checkpoints, model)
    exclude(methods=methods, dry_run=dry)
    exclude(methods=methods, context_method=options["context_method"])
    if methods is None:
        draw = partial(running.draw_runs, plot, results.draw_positions)
        return running.evaluate(models, options, printer, dry, workers, draw=draw)
    if len(models) > 1:
        raise UsageError("--methods: is for one checkpoint, not several")
    runs = _run_methods(models[0], options, methods, workers.runner)
    printer(results.methods_report(runs))
    running.draw_into(plot, results.draw_positions, list(runs.values()), list(runs))
    return 0


def _run_methods(model: str, options: dict[str, Any], methods: tuple[str, ...], runner: JobRunner) -> dict[str, Run]:
    """Return method → its finished run; all are planned before the first is computed."""
    from evalkit.studies.running import Job

    if len(set(methods)) < len(methods):
        raise UsageError(f"--methods {','.join(methods)}: name each method once")
    if options.get("context") in (None, "none") and options.get("context_config") is None:
        raise UsageError("--methods: name the longer context window too, such as --context 8192")
    with Progress() as progress:
        say, of_method = progress.say, {name: options | {"context_method": name} for name in methods}
        plans = {name: running.plan_of(model, own_options, say) for name, own_options in of_method.items()}
        if len(plans) > 1 and len({plan.folder for plan in plans.values()}) == 1:
            raise UsageError(
                f"--methods {','.join(methods)}: --context {options.get('context')} is no longer than the window of "
                "training, so no method changes anything; give a longer --context, or --context-original"
            )
        outcomes = runner([Job(f"{model}, {method}", plan) for method, plan in plans.items()], progress)
    return dict(zip(plans, running.finished_runs(outcomes), strict=True))
