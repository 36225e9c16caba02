"""`evalkit show`, `rescore` and `report`: finished runs by document, under another rule, and as a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from evalkit.cli.options import DETAIL, OUTCOME, OUTPUT, RUN, Source, named_run, source
from evalkit.cli.parameters import FOLDER, argument, comma_separated, exclude, option, typed_option
from evalkit.cli.running import PRINTING, Printer, say
from evalkit.display import doing, news
from evalkit.errors import UsageError
from evalkit.escape import printable

if TYPE_CHECKING:
    from evalkit.pages.report import PageContents


@click.command()
@argument("runs", nargs=-1)
@typed_option("--task", metavar="TASK", help="Only this task, or this subject of MMLU.")
@typed_option("--document", metavar="TASK/DOCUMENT", help="One document: arc_easy/17, mmlu/mmlu_astronomy/3.")
@typed_option("--wrong", is_flag=True, help="Documents with a wrong prediction, or an answer below the best score.")
@typed_option("--right", is_flag=True, help="Documents with a right prediction, or an answer of the best score.")
@typed_option("--tie", is_flag=True, help="Documents with several best choices.")
@typed_option("--truncated", is_flag=True, help="Documents that were cut to fit the context window.")
@typed_option("--won", is_flag=True, help="Of two runs: documents that B has right and A has wrong.")
@typed_option("--lost", is_flag=True, help="Of two runs: documents that A has right and B has wrong.")
@typed_option("--text", metavar="WORDS", help="Documents whose text has each of these words.")
@option("--rule", help="How the answer is chosen (evalkit ls rules).  [default: the run's own]")
@typed_option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Documents in the list.")
@PRINTING
@OUTPUT
def show(
    runs: tuple[str, ...],
    task: str | None,
    document: str | None,
    text: str | None,
    rule: str | None,
    limit: int,
    printer: Printer,
    output: Path,
    **flags: Any,
) -> int:
    """Show documents of a run: a list, the surest mistakes first, or one document with its prompt and scores.

    RUNS are one or two run folders, or ids, names or checkpoints of runs in --output (evalkit ls runs); of two, the
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
    for name, value in {"task": task, "text": text, **flags}.items():
        exclude(document=document, **{name: value})
    exclude(wrong=flags["wrong"], right=flags["right"])
    exclude(won=flags["won"], lost=flags["lost"])
    with doing("reading runs"):
        from evalkit.comparison.sides import names
        from evalkit.inspection.reports import document_report, list_report, prompt_text
        from evalkit.inspection.selection import Criteria, show_document, show_list
        from evalkit.runs.finding import find_run

        opened = [find_run(run, output) for run in runs]
        if document is None:
            criteria = Criteria(words=tuple((text or "").split()), **flags)
            report = list_report(show_list(opened, task, rule, criteria, news), limit, names(opened))
        else:
            shown = show_document(opened, document, rule, news)
            report = document_report(shown, names(opened), with_prompt=printer.form != "terminal")
    if document is not None and printer.form == "terminal" and (prompt := prompt_text(shown)):
        click.echo(f"{prompt}\n")
    printer(report)
    return 0


@click.command()
@RUN
@option("--rule", help="How the answer is chosen (evalkit ls rules).  [default: the run's own]")
@OUTPUT
@DETAIL
@PRINTING
def rescore(run: str, rule: str | None, output: Path, detail: bool, printer: Printer) -> None:
    """Apply another rule to the scores of a finished run; no model is needed.

    RUN is a run folder, or a run in --output as `evalkit ls runs` lists it: its id or name, the beginning of either,
    or its checkpoint where no other run has it.

    \b
    evalkit rescore 1a2b3c4d --rule acc_norm
    evalkit rescore results/runs/demo-zeroshot8-inst-float32-1a2b3c4d5e6f --rule acc_norm
    """
    with doing("reading scores"):
        from evalkit.benchmarks.registry import benchmark_of

        opened = named_run(run, output)
        report = benchmark_of(opened).rescored(opened, rule, detail)
    printer.run(opened, report)


@click.command()
@argument("runs", nargs=-1)
@source(groups=True, benchmark="Benchmark of the study.  [default: all]")
@option("--rule", help="How answers are chosen in comparisons (evalkit ls rules).  [default: the runs' own]")
@OUTCOME
@typed_option("--names", callback=comma_separated, help="Names of RUNS in the page, separated by commas.  [default: "
              "their models]")  # fmt: skip
@typed_option("--title", help="Title of the page.  [default: the names of the runs]")
@typed_option("--without-documents", is_flag=True, help="Leave out the documents: a page of some 100 kB.")
@typed_option("--sample", type=click.IntRange(min=1), help="At most this many random documents of each task.  "
              "[default: all]")  # fmt: skip
@typed_option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the sample; a larger sample "
              "contains the smaller one.")  # fmt: skip
@typed_option("--output", "-o", type=FOLDER, default=Path("report.html"), show_default=True, help="File to write.")
def report(
    runs: tuple[str, ...],
    source: Source,
    rule: str | None,
    outcome: str | None,
    names: tuple[str, ...] | None,
    title: str | None,
    without_documents: bool,
    sample: int | None,
    seed: int,
    output: Path,
) -> None:
    """Write one HTML page of finished runs: results, comparisons, figures, and every document with its scores.

    The page is one file. It opens from disk in a browser, without a network, so it can be sent to anyone. The first run
    is the baseline; runs of several suites can share a page. RUNS are run folders, or ids, names or checkpoints of runs
    in results/runs or EVALKIT_OUTPUT (evalkit ls runs). With --study they are names of its checkpoints, NAME or
    NAME@STEP; without any, all that are finished.

    \b
    evalkit report RUN -o report.html
    evalkit report RUN_A RUN_B RUN_C -o report.html                   with comparisons
    evalkit report --study study.yaml --sample 200 -o report.html
    evalkit report RUN --without-documents -o summary.html            some 100 kB
    """
    exclude(study=source.study, names=names)
    exclude(without_documents=without_documents, sample=sample)
    if output.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--output {output}: the report is an HTML page; give a file name that ends in .html")
    with doing("reading runs"):
        from evalkit.runs.score_table import outcome_key

        contents = _contents(runs, source, outcome_key(outcome, rule), names or ())
    for note in contents.notes:
        say(note)
    from evalkit.data.sampling import DocumentSample
    from evalkit.pages.report import write_report

    chosen = None if sample is None else DocumentSample(sample, seed)
    size = write_report(contents, output, say, title=title, with_documents=not without_documents, sample=chosen)
    click.echo(printable(f"{output} ({size / 1e6:,.1f} MB)"))


def _contents(runs: tuple[str, ...], source: Source, rule: str | None, names: tuple[str, ...]) -> PageContents:
    from evalkit.comparison.sides import read_group
    from evalkit.pages.report import contents_of_runs, contents_of_study

    if source.results is not None:
        return contents_of_study(source.results, runs, source.benchmark, rule)
    groups = [(name, [named_run(run) for run in members]) for name, members in map(read_group, source.groups)]
    return contents_of_runs([named_run(run) for run in runs], groups, rule, names)
