"""`evalkit report`: finished runs as a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from evalkit.cli.parameters import command, exclude, option, typed_option
from evalkit.cli.running import GROUPS, OUTCOME, RUNS_GIVEN, STUDY, STUDY_IN, Source, say
from evalkit.display import doing
from evalkit.errors import UsageError
from evalkit.escape import printable


def _without_others(given: Sequence[str], root: Path | None) -> list[str]:
    """Leave out files and folders that are neither runs, checkpoints nor names of runs, as a pattern may match."""
    from evalkit.comparison.naming import matching_runs
    from evalkit.runs.finding import root_of_runs
    from evalkit.runs.folder import CHECKPOINT, is_run_folder

    kept = []
    for name in given:
        path = Path(name)
        is_checkpoint = any((path / file).is_file() for file in (CHECKPOINT, "adapter_config.json"))
        is_known = is_checkpoint or path.suffix == ".gguf" or is_run_folder(path)
        if is_known or not path.exists() or matching_runs(name, root or root_of_runs()):
            kept.append(name)
        else:
            inside = any(map(is_run_folder, path.iterdir())) if path.is_dir() else False
            say(f"left out: {name}: no run folder" + f"; for the runs in it give {name.rstrip('/')}/*" * inside)
    return kept


@command()
def report(
    *,
    runs: tuple[str, ...] = RUNS_GIVEN,
    groups: tuple[str, ...] = GROUPS,
    study: Path | None = STUDY,
    benchmark: str | None = typed_option(None, "Benchmark of the study.", "all"),
    rule: str | None = option(None, "How answers are chosen, in tables too (evalkit ls rules).", "the runs' own"),
    outcome: str | None = OUTCOME,
    names: tuple[str, ...] | None = typed_option(None, "Names of RUNS in the page, separated by commas.",
                                                 "their models"),
    title: str | None = typed_option(None, "Title of the page.", "the study's name, or those of the runs"),
    without_documents: bool = typed_option(False, "Leave out the documents: a page of some 100 kB."),
    sample: int | None = typed_option(None, "At most this many random documents of each task.", "all",
                                      shows_least=True),
    seed: int = typed_option(0, "Of the sample; a larger sample contains the smaller one.", least=0, shows_least=True),
    root: Path | None = STUDY_IN,
    output: Path = typed_option(Path("report.html"), "File to write.", short="-o"),
) -> None:  # fmt: skip
    """Write one HTML page of finished runs: results, comparisons, figures, and every document with its scores.

    The page is one file. It opens from disk in a browser, without a network, so it can be sent to anyone. The first run
    is the baseline; runs of several suites can share a page. RUNS are run folders, or ids, names or checkpoints of runs
    in --in (evalkit ls runs). With --study they are names of its checkpoints, NAME or
    NAME@STEP; without any, all that are finished.

    \b
    evalkit report RUN -o report.html
    evalkit report RUN_A RUN_B RUN_C -o report.html                   with comparisons
    evalkit report --study study.yaml --sample 200 -o report.html
    evalkit report RUN --without-documents -o summary.html            some 100 kB
    """
    exclude(study=study, names=names)
    exclude(without_documents=without_documents, sample=sample)
    if output.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--output {output}: the report is an HTML page; give a file name that ends in .html")
    source = Source(study, benchmark, groups, root)
    with doing("reading runs"):
        from evalkit.data.sampling import DocumentSample
        from evalkit.pages.report import contents_of_runs, contents_of_study, write_report
        from evalkit.runs.continuous import outcome_key

        key = outcome_key(outcome, rule)
        if source.results is not None:
            contents = contents_of_study(source.results, runs, source.benchmark, key)
        else:
            given = _without_others(runs, root)
            contents = contents_of_runs(*source.named(given, may_differ=True), key, names or ())
    for note in contents.notes:
        say(note)
    chosen = None if sample is None else DocumentSample(sample, seed)
    size = write_report(contents, output, say, title=title, with_documents=not without_documents, sample=chosen)
    click.echo(printable(f"{output} ({size / 1e6:,.1f} MB)"))
