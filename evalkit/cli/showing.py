"""`evalkit show`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from evalkit.cli.options import OUTPUT
from evalkit.cli.parameters import argument, option, typed_option
from evalkit.cli.running import PRINTING, print_report
from evalkit.display import doing, news
from evalkit.errors import UsageError

if TYPE_CHECKING:
    from evalkit.reporting.markup import Format

_MOST_RUNS = 2


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
    form: Format,
    standalone: bool,
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
    if not 1 <= len(runs) <= _MOST_RUNS:
        raise UsageError(
            "name one run, or two on the same documents: evalkit show RUN --wrong (evalkit ls runs lists them)"
        )
    given = [f"--{name}" for name, value in {"task": task, "text": text, **flags}.items() if value]
    if document is not None and given:
        raise UsageError(f"--document shows one document; omit {', '.join(given)}")
    for first, second in (("wrong", "right"), ("won", "lost")):
        if flags[first] and flags[second]:
            raise UsageError(f"--{first} and --{second}: no document is both; give one of them")
    with doing("reading runs"):
        from evalkit.comparison.sides import names
        from evalkit.inspection.reports import document_report, list_report, prompt_text
        from evalkit.inspection.selection import Criteria, show_document, show_list
        from evalkit.runs.finding import find_run

        found = [find_run(one, output) for one in runs]
        if document is None:
            criteria = Criteria(words=tuple((text or "").split()), **flags)
            report = list_report(*show_list(found, task, rule, criteria, news), limit, names(found))
        else:
            one = show_document(found, document, rule, news)
            report = document_report(one, names(found), with_prompt=form != "terminal")
    if document is not None and form == "terminal" and (prompt := prompt_text(one)):
        click.echo(f"{prompt}\n")
    print_report(report, form, standalone)
    return 0
