"""`evalkit show`, `rescore`, `table`, `integrity` and `export`: a run's documents, tables and exports."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from evalkit.cli.parameters import argument, command, exclude, option, require, typed_option
from evalkit.cli.running import (
    BENCHMARK,
    DETAIL,
    OUTCOME,
    RUN,
    RUNS_IN,
    STUDY,
    STUDY_IN,
    Printer,
    Source,
    named_run,
    say,
)
from evalkit.display import doing, news
from evalkit.errors import EvalkitError, TableError, UsageError
from evalkit.escape import printable
from evalkit.reporting.table import SUFFIXES

if TYPE_CHECKING:
    from evalkit.studies.tables import FilledTable
    from evalkit.tables.request import TableRequest


@dataclass(frozen=True)
class Chosen:
    """Which documents are listed: those for which all of these are true."""

    wrong: bool = typed_option(False, "Documents with a wrong prediction, or an answer below the best score.")
    right: bool = typed_option(False, "Documents with a right prediction, or an answer of the best score.")
    tie: bool = typed_option(False, "Documents with several best choices.")
    truncated: bool = typed_option(False, "Documents that were cut to fit the context window.")
    won: bool = typed_option(False, "Of two runs: documents that B has right and A has wrong.")
    lost: bool = typed_option(False, "Of two runs: documents that A has right and B has wrong.")


@command()
def show(
    *,
    runs: tuple[str, ...] = argument(required=False),
    task: str | None = typed_option(None, "Only this task, or this subject of MMLU.", metavar="TASK"),
    document: str | None = typed_option(None, "One document: arc_easy/17, mmlu/mmlu_astronomy/3.",
                                        metavar="TASK/DOCUMENT"),
    chosen: Chosen,
    text: str | None = typed_option(None, "Documents whose text has each of these words.", metavar="WORDS"),
    rule: str | None = option(None, "How the answer is chosen (evalkit ls rules).", "the run's own"),
    limit: int = typed_option(20, "Documents in the list.", shows_least=True),
    printer: Printer,
    root: Path | None = RUNS_IN,
) -> None:  # fmt: skip
    """Show documents of a run: a list, the surest mistakes first, or one document with its prompt and scores.

    RUNS are one or two run folders, or ids, names or checkpoints of runs in --in (evalkit ls runs); of two, the
    first is A and the second B. Documents are sorted by margin: the score of the gold answer less that of the best
    other one.

    \b
    evalkit show RUN --task boolq --wrong
    evalkit show RUN --task mmlu_astronomy --text "star mass" --right
    evalkit show RUN_A RUN_B --won --rule acc_norm
    evalkit show RUN --document arc_easy/17
    evalkit show RUN --wrong --limit 100 --format json
    """
    if len(runs) not in (1, 2):
        raise UsageError("name one run, or two on the same documents: evalkit show RUN (evalkit ls runs lists them)")
    for name, value in {"task": task, "text": text, **vars(chosen)}.items():
        exclude(document=document, **{name: value})
    exclude(wrong=chosen.wrong, right=chosen.right)
    exclude(won=chosen.won, lost=chosen.lost)
    with doing("reading runs"):
        from evalkit.comparison.sides import names
        from evalkit.inspection.outcomes import show_document, show_list
        from evalkit.inspection.reports import document_report, list_report, prompt_text

        opened, _ = Source(None, None, root=root).named(runs)
        if document is None:
            criteria = [name for name, is_asked in vars(chosen).items() if is_asked]
            selection = show_list(opened, task, rule, criteria, (text or "").split(), news)
            report = list_report(selection, limit, names(opened))
        else:
            shown = show_document(opened, document, rule, news)
            report = document_report(shown, names(opened), with_prompt=printer.form != "terminal")
    if document is not None and printer.form == "terminal" and (prompt := prompt_text(shown)):
        click.echo(f"{prompt}\n")
    printer(report)


@command()
def rescore(
    *,
    run: str = RUN,
    rule: str | None = option(None, "How the answer is chosen (evalkit ls rules).", "the run's own"),
    root: Path | None = RUNS_IN,
    detail: bool = DETAIL,
    printer: Printer,
) -> None:
    """Apply another rule to the scores of a finished run; no model is needed.

    RUN is a run folder, or the id, name or checkpoint of one in --in (evalkit ls runs).

    \b
    evalkit rescore 1a2b3c4d --rule acc_norm
    evalkit rescore results/runs/demo-zeroshot8-inst-float32-1a2b3c4d5e6f --rule acc_norm
    """
    with doing("reading scores"):
        from evalkit.benchmarks.registry import results_of

        opened = named_run(run, root, usable=lambda run: run.rule is not None)
        opened.require_choices()
        report = results_of(opened).report(rule or opened.rule, detail)
    printer.run(opened, report)


@dataclass(frozen=True)
class TableOptions:
    """By the names of `TableRequest`."""

    rule: str | None = option(None, "How the runs' answers are chosen (evalkit ls rules).", "the runs' own")
    outcome: str | None = OUTCOME
    spreads: bool = option(False, "Print ±: standard error of a run, deviation over several.", option="--stderr")
    significance: bool = option(False, "Mark best numbers with a significant lead (as compare tests).")
    mixed: bool = option(False, "Mark runs with another protocol than the first; do not reject them.",
                         option="--allow-mixed")  # fmt: skip
    drop_empty: bool = option(False, "Leave out rows without a run, and sections without rows.")
    as_printed: bool = option(False, "The paper's own averages and marks, errors included.")


@command()
def table(
    *,
    name: str | None = argument(required=False),
    more: tuple[str, ...] = argument(metavar="", required=False),
    source: Literal["published", "runs", "both"] | None = option(
        None, "Source of numbers: the paper, runs, or runs with the difference to the paper.",
        "published; runs with --runs or --study"),
    runs: str | None = option(None, "Runs, assigned to rows by their models; or a YAML file that maps rows to runs.",
                              metavar="RUN RUN …|FILE.yaml"),
    study: Path | None = STUDY,
    benchmark: str | None = BENCHMARK,
    options: TableOptions,
    audit: bool = option(False, "Where the paper's tables and text contradict its numbers."),
    every: bool = typed_option(False, "Every table, a file each in the folder --output; with --study those that it has "
                               "runs for.", option="--all"),
    printer: Printer,
    root: Path | None = STUDY_IN,
    output: Path | None = typed_option(None, "File to write, with --all the folder.", "the terminal", short="-o"),
) -> int:  # fmt: skip
    """Print one of the paper's tables, filled from the paper or from your runs; NAME may be your own layout file.

    \b
    evalkit table main_res
    evalkit table main_res --format latex --standalone -o main_res.tex
    evalkit table sig_abl_main --source runs --runs RUN RUN RUN
    evalkit table main_res --source both --runs my_runs.yaml --stderr
    evalkit table my_table.yaml --source runs --runs my_runs.yaml --format markdown
    evalkit table --study study.yaml                                  its own table: models and their seeds by task
    evalkit table main_res --study study.yaml --drop-empty
    evalkit table main_res --study study.yaml --outcome bits_per_byte
    evalkit table --all --study study.yaml --format latex -o tables/
    evalkit table --audit
    """
    from evalkit.reporting.report import Report
    from evalkit.tables.layout import layout_names
    from evalkit.tables.request import TableRequest, make, requested_layout
    from evalkit.tables.rows import has_suite_of

    of_study = Source(study, benchmark, root=root)
    if more and runs is None:
        raise UsageError(f"{more[0]}: a table has one NAME; give runs after --runs")
    exclude(study=study, runs=runs)
    if study is not None and source == "published":
        raise UsageError("--study is for --source runs or both; omit --source published")
    require("--runs or --study", bool(runs or study), **{"in": root})
    default = "published" if study is None and runs is None else "runs"
    request = TableRequest(name or "", source or default, **vars(options))
    if every:
        if name is not None:
            raise UsageError(f"--all prints every table; omit {name}")
        exclude(all=True, audit=audit, runs=runs)
        require("--output FOLDER", output is not None, all=True)
        return _print_every(request, of_study, printer, output or Path())
    if audit:
        exclude(audit=True, runs=runs, study=study, as_printed=options.as_printed)
        from evalkit.tables.audit import audited

        printer(audited([name] if name else layout_names()), output)
        return 0
    if name is None and of_study.results is not None:
        from evalkit.studies.tables import own_tables

        others = {name: value for name, value in vars(options).items() if name not in ("rule", "spreads", "mixed")}
        require("the NAME of a table", False, source=source == "both", allow_mixed=options.mixed, **others)
        with doing("reading runs"):
            report = own_tables(of_study.results, benchmark, options.rule, options.spreads)
        printer(report, output)
        return 0
    elif name is None:
        raise UsageError(f"name a table, or a layout file: {', '.join(layout_names())}; or give --all or --audit")
    elif study is not None:
        with doing("reading runs"):
            filled = _filled(request, of_study)
        if filled.table is None:
            raise UsageError(f"study {study} cannot fill table {filled.name}: {filled.why}")
        made = filled.table
        for line in filled.without_row:
            click.echo(f"not in {made.name}: {line}", err=True)
    elif runs is None:
        made = make(request)
    else:
        given = (runs, *more)
        files = [text for text in given if text.endswith((".yaml", ".yml")) or Path(text).is_file()]
        if files and more:
            raise UsageError(f"--runs {' '.join(given)}: give one YAML file, or runs alone")
        with doing("reading runs"):
            if files:
                made = make(replace(request, mapping=Path(runs), root=root))
            else:
                layout = requested_layout(request)
                named, _ = of_study.named(given, lambda run: has_suite_of(layout, run), may_differ=True)
                made = make(replace(request, runs=tuple(str(run.folder) for run in named)))
    printer(Report((made,)), output)
    return 0


def _filled(request: TableRequest, source: Source) -> FilledTable:
    from evalkit.studies.tables import FilledTable, study_table
    from evalkit.tables.request import make

    if source.results is None:
        return FilledTable(request.name, make(request))
    return study_table(source.results, request, source.benchmark)


def _print_every(request: TableRequest, source: Source, printer: Printer, folder: Path) -> int:
    """Write every table into a folder; return the exit code. A table that fails does not stop the others."""
    from evalkit.reporting.report import Report
    from evalkit.studies.tables import study_layouts
    from evalkit.tables.layout import layout_names

    if source.results is not None and source.benchmark is not None:
        source.results.study.benchmark(source.benchmark)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output {folder} cannot be made: {error.strerror or error}") from error
    written: set[str] = set()
    left_out: dict[str, list[str]] = {}
    failed = False
    for name in layout_names() if source.results is None else study_layouts(source.results.study):
        try:
            with doing(f"table {name}"):
                filled = _filled(replace(request, name=name), source)
            if filled.table is None:
                why = "not finished" if filled.waits else "no benchmark or row of the study is theirs"
                left_out.setdefault(why, []).append(filled.name)
                continue
            table = filled.table
            if table.name in written:
                raise UsageError(f"another table is called {table.name}; rename the layout's file")
            written.add(table.name)
            printer(Report((table,)), folder / f"{table.name}{SUFFIXES[printer.form]}")
        except EvalkitError as error:
            say(f"evalkit: table {Path(name).stem}: {error}")
            failed = True
    for why, names in left_out.items():
        say(f"left out, {why}: {', '.join(names)}; evalkit table NAME --study {source.study} says more")
    if not (written or failed):
        raise TableError(f"study {source.study} has no finished run for any table")
    return int(failed)


@command()
def integrity(
    *,
    run: str = RUN,
    rule: str | None = option(None, "How the run's answers are chosen (evalkit ls rules).", "the run's own"),
    tokens: str | None = option(None, "Number of training tokens, printed as given: 128B."),
    root: Path | None = RUNS_IN,
    printer: Printer,
    output: Path | None = typed_option(None, "File to write.", "the terminal", short="-o"),
) -> None:
    """Print a run beside public models, as the paper's integrity check does, and how the protocols differ.

    RUN is a run folder, or the id, name or checkpoint of one in --in (evalkit ls runs).

    \b
    evalkit integrity 1a2b3c4d --tokens 128B
    """
    from evalkit.reporting.report import Report
    from evalkit.tables.integrity import check

    with doing("reading scores"):
        made = check(named_run(run, root), rule, tokens)
    printer(Report((made,)), output)


@command()
def export(
    *,
    run: str = RUN,
    form: str | None = option(None, "lm_eval: lm-eval's results file; hub: the Hugging Face hub's metadata; "
                              "every_eval_ever: the Every Eval Ever schema; run: the run folder, to publish, without "
                              "its journal and the machine's paths; or another's (evalkit ls exports).", option="--to"),
    rule: str | None = option(None, "How answers are chosen, for all but lm_eval and run.", "the run's own"),
    root: Path | None = RUNS_IN,
    output: Path | None = typed_option(None, "Folder to write into.", "one in the run folder", short="-o"),
) -> None:  # fmt: skip
    """Export a finished run to another tool's format; prints the files.

    RUN is a run folder, or the id, name or checkpoint of one in --in (evalkit ls runs).
    Tables for a paper, in LaTeX, are printed by evalkit table.

    \b
    evalkit export 1a2b3c4d --to hub
    evalkit export 1a2b3c4d --to run -o published
    """
    from evalkit.exchange.exports import export_run, form_names

    if form is None:
        raise UsageError(f"give a format: --to {' | '.join(form_names())}")
    with doing(f"exporting {run}"):
        written = export_run(named_run(run, root), form, rule, output)
    for path in written:
        click.echo(printable(str(path)))
