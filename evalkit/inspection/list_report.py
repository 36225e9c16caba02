"""Report of a list of documents. In: selected documents. Out: a `Report` with one line for each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from evalkit.benchmarks.document_views import AnswerView
from evalkit.inspection.outcomes import TaskOutcomes, gold_of
from evalkit.inspection.records import document_record, flat_record
from evalkit.inspection.selection import SelectedDocument
from evalkit.inspection.texts import beginnings, option_text, shortened
from evalkit.reporting.decimals import fixed, signed_number
from evalkit.reporting.report import Report
from evalkit.reporting.table import Table, simple_table
from evalkit.scores.rules import find_rule

_TEXT, _OPTION = 60, 24
"""Most characters of the beginning of a text, and of an option or an answer."""


def list_report(
    tasks: Sequence[tuple[TaskOutcomes, ...]],
    selected: Sequence[SelectedDocument],
    searched: int,
    limit: int,
    names: Sequence[str],
) -> Report:
    """Return the list of the first selected documents.

    Args:
        tasks: the tasks that were searched, in one run or in two.
        selected: documents, see `select`.
        searched: number of documents that were searched.
        limit: most documents of the list.
        names: name of each run.
    """
    shown = selected[:limit]
    by_task = defaultdict(list)
    for one in shown:
        by_task[one.outcomes[0].view.task].append(one.places[0])
    texts = {of[0].view.task: beginnings(of[0], by_task[of[0].view.task], _TEXT) for of in tasks}
    begins = [texts[one.outcomes[0].view.task][one.places[0]] for one in shown]
    part = f"; the first {limit:,} of these" if len(shown) < len(selected) else ""
    facts = [f"{len(selected):,} of {searched:,} documents{part}"]
    if len(names) > 1:
        facts += [f"{letter}: {name}" for letter, name in zip("AB", names, strict=False)]
    rule = next((of[0].rule for of in tasks if of[0].rule), None)
    notes = list(_notes(tasks, rule, len(names)))
    content = {
        "runs": [one.run.manifest["id"] for one in tasks[0]],
        "rule": rule,
        "tasks": [of[0].view.task for of in tasks],
        "count": len(selected),
        "of": searched,
        "notes": notes,
        "documents": [document_record(one) for one in shown],
    }
    return Report(
        (_table(shown, begins, len(names)),),
        facts=tuple(facts),
        notes=tuple(notes),
        content=content,
        records=[flat_record(one, begin) for one, begin in zip(shown, begins, strict=True)],
    )


def _table(shown: Sequence[SelectedDocument], begins: Sequence[str], runs: int) -> Table:
    """Return a line for each document; columns that are empty are left out."""
    answers = bool(shown) and all(isinstance(one.outcomes[0].view, AnswerView) for one in shown)
    predicted, gold, value = ("answer", "reference", "score") if answers else ("predicted", "gold", "margin")
    letters = ["A ", "B "] if runs > 1 else [""]
    headers = ["document", *(f"{letter}{predicted}" for letter in letters), gold, "text"]
    texts = len(headers)
    headers += [f"{letter}{value}" for letter in letters]
    rows = [_row(one, begin) for one, begin in zip(shown, begins, strict=True)]
    kept = [place for place in range(len(headers)) if not place or any(row[place] for row in rows)]
    cells = [[row[place] for place in kept] for row in rows]
    return simple_table("documents", [headers[place] for place in kept], cells, texts=sum(p < texts for p in kept))


def _row(one: SelectedDocument, begin: str) -> list[str]:
    pairs = list(zip(one.outcomes, one.places, strict=True))
    predicted = [_predicted(found, place) for found, place in pairs]
    return [one.name, *predicted, _gold(*pairs[0]), begin, *(_value(found, place) for found, place in pairs)]


def _predicted(found: TaskOutcomes, place: int) -> str:
    if found.decided is None:
        assert isinstance(found.view, AnswerView)
        return shortened(found.view.documents[place].answer, _OPTION)
    mark = " (tie)" if found.tie[place] else ""
    return option_text(found, place, int(found.decided.prediction[place]), _OPTION) + mark


def _gold(found: TaskOutcomes, place: int) -> str:
    if isinstance(found.view, AnswerView):
        return shortened(" | ".join(found.view.documents[place].references), _OPTION)
    return option_text(found, place, gold_of(found, place), _OPTION)


def _value(found: TaskOutcomes, place: int) -> str:
    value = float(found.value[place])
    return fixed(value, 3) if found.decided is None else signed_number(value, 3)


def _notes(tasks: Sequence[tuple[TaskOutcomes, ...]], rule: str | None, runs: int) -> Iterator[str]:
    if rule is not None:
        yield f"rule {rule}: {find_rule(rule).description}"
        yield (
            "margin: score of the gold choice less the highest score of another choice, by the rule; "
            "log-likelihoods are in nats"
        )
    if metrics := {of[0].view.metric: None for of in tasks if isinstance(of[0].view, AnswerView)}:
        yield f"score: {', '.join(metrics)}"
    for problem in dict.fromkeys(of[0].view.problem for of in tasks if of[0].view.problem):
        yield f"texts: {problem}"
    if dropped := sum(len(one.keys) - _shared(of) for of in tasks for one in of if runs > 1):
        yield f"{dropped:,} documents are in one run only and are left out"


def _shared(of: Sequence[TaskOutcomes]) -> int:
    return len(set.intersection(*(set(one.keys) for one in of)))
