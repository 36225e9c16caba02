"""`evalkit import`: other programs' logs as runs."""

from __future__ import annotations

from pathlib import Path

import click

from evalkit.activity import doing, news
from evalkit.cli.options import OUTPUT
from evalkit.cli.parameters import FOLDER, argument, option, typed_option
from evalkit.reporting.escape import printable


@click.command("import")
@argument("files", nargs=-1, metavar="FILE…", type=FOLDER)
@typed_option("--model", metavar="NAME", help="Name of the evaluated model.  [default: the one in the results file]")
@option("--data-dir", type=FOLDER, help="Folder of <task>.jsonl files with documents, searched first.")
@typed_option("--allow-unofficial-data", is_flag=True, help="Accept documents that are not the pinned ones; marked.")
@OUTPUT
def import_(
    files: tuple[Path, ...], model: str | None, data_dir: Path | None, allow_unofficial_data: bool, output: Path
) -> None:
    """Import lm-eval's logs as finished runs, so that a published log can be a row; prints the run folders.

    FILE… are the samples_<task>_<time>.jsonl of one model, which `lm_eval --log_samples` writes, and `evalkit run
    --log-samples` too. results_<time>.json beside them has model, dtype and versions. Documents are matched by content.

    \b
    evalkit import log/samples_*.jsonl
    evalkit import log/samples_arc_easy_2026-01-31T10-00-00.000000.jsonl --model org/name
    evalkit compare MY_RUN IMPORTED_RUN --rule acc_norm

    The tasks of suite zeroshot8 become a run of it with the log's log-likelihoods. evalkit's own runs on them with
    --template plain have the same prompts. All other tasks become runs of suite lm_eval, with the log's metrics. A log
    has no token counts, so acc, acc_norm and acc_bytes apply to it, and ppl does not. Imported runs are marked.
    """
    from evalkit.data import Library
    from evalkit.importing.logs import import_logs

    with doing("reading logs"):
        runs = import_logs(files, model, output, Library(data_dir, allow_unofficial_data, news), news)
    for run in runs:
        click.echo(printable(str(run.folder)))
