"""Report of a single document: its prompt, the scores of its choices, and what every rule chooses.

In: a document in one or two runs. Out: its prompt as coloured text, and a `Report`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from evalkit.benchmarks.document_views import AnswerView, ChoiceText, ChoiceView
from evalkit.inspection.outcomes import TaskOutcomes, decisions, gold_of
from evalkit.inspection.records import document_record, flat_record, scored_choices
from evalkit.inspection.selection import SelectedDocument, beginnings, choice_text_of, option_text, shortened
from evalkit.reporting.decimals import fixed, signed_number
from evalkit.reporting.report import Report
from evalkit.reporting.table import Table, simple_table
from evalkit.reporting.terminal import coloured
from evalkit.runs.rules import find_rule

_OPTION = 40
"""Most characters of an option."""


def prompt_text(one: SelectedDocument) -> str:
    """Return the prompt for a terminal, with segments in colour; empty if the run does not have it."""
    found, place = one.outcomes[0], one.places[0]
    if isinstance(found.view, AnswerView):
        return coloured(found.view.documents[place].prompt)
    if (text := choice_text_of(found, place)) is None:
        return ""
    gold = gold_of(found, place)
    choices = [
        f"[{number}]{'*' if number == gold else ' '} {coloured(pieces)}" for number, pieces in enumerate(text.choices)
    ]
    return "\n".join([coloured(text.common), *choices])


def document_report(one: SelectedDocument, names: Sequence[str], with_prompt: bool) -> Report:
    """Return the report of a document.

    Args:
        one: the document in each run.
        names: name of each run.
        with_prompt: whether to include the prompt as a table, for formats without colours.
    """
    tables = [_prompt_table(one)] if with_prompt else []
    notes: list[str] = []
    record = document_record(one)
    for number, (found, place) in enumerate(zip(one.outcomes, one.places, strict=True)):
        title = f"{'AB'[number]}: {names[number]}" if len(names) > 1 else ""
        if isinstance(found.view, AnswerView):
            tables.append(_answer_table(found, place, title))
            continue
        by_rule = list(_rules(found, place))
        record["runs"][number]["rules"] = by_rule
        tables += [_choices_table(found, place, title), _rules_table(found, place, by_rule, title)]
        notes += _notes(found, place)
    if one.outcomes[0].view.problem:
        notes.append(f"texts: {one.outcomes[0].view.problem}")
    lines = list(_records(record))
    return Report(
        tuple(table for table in tables if any(table.lines)),
        verdict=(_verdict(one),),
        notes=tuple(dict.fromkeys(notes)),
        content=record,
        records=lines,
    )


def _verdict(one: SelectedDocument) -> str:
    found, place = one.outcomes[0], one.places[0]
    return (
        one.name
        if found.decided is None
        else f"{one.name}: the gold answer is {option_text(found, place, gold_of(found, place), _OPTION)}"
    )


def _prompt_table(one: SelectedDocument) -> Table:
    found, place = one.outcomes[0], one.places[0]
    if isinstance(found.view, AnswerView):
        rows = [["", piece.segment, piece.text] for piece in found.view.documents[place].prompt]
    else:
        rows = list(_pieces(choice_text_of(found, place)))
    return simple_table("prompt", ["choice", "segment", "text"], rows, texts=3)


def _pieces(text: ChoiceText | None) -> Iterator[list[str]]:
    if text is not None:
        yield from (["all", piece.segment, piece.text] for piece in text.common)
        for number, pieces in enumerate(text.choices):
            yield from ([str(number), piece.segment, piece.text] for piece in pieces)


def _choices_table(found: TaskOutcomes, place: int, title: str) -> Table:
    rows: list[list[str]] = []
    ruled = set()
    for choice, segments in enumerate(scored_choices(found, place)):
        ruled.add(len(rows))
        mark = "*" if choice == gold_of(found, place) else ""
        for number, (segment, scores) in enumerate(segments.items()):
            label = f"{option_text(found, place, choice, _OPTION)}{mark}" if number == 0 else ""
            rows.append([label, segment, *_numbers(scores)])
    headers = ["choice", "segment", "log-likelihood", "tokens", "perplexity"]
    return simple_table("choices", headers, rows, texts=2, ruled=ruled, title=title)


def _numbers(scores: dict[str, float | None]) -> list[str]:
    return [
        fixed(scores["log_likelihood"], 3),
        "–" if (tokens := scores["tokens"]) is None else f"{tokens:,}",
        fixed(scores["perplexity"], 2),
    ]


def _rules_table(found: TaskOutcomes, place: int, by_rule: Sequence[dict[str, Any]], title: str) -> Table:
    rows = []
    for one in by_rule:
        mark = " <" if one["rule"] == found.rule else ""
        verdict = ("right" if one["right"] else "wrong") + (", a tie" if one["tie"] else "")
        option = option_text(found, place, one["prediction"], _OPTION)
        rows.append([f"{one['rule']}{mark}", option, verdict, signed_number(one["margin"], 3)])
    return simple_table("rules", ["rule", "chooses", "verdict", "margin"], rows, texts=3, title=title)


def _rules(found: TaskOutcomes, place: int) -> Iterator[dict[str, Any]]:
    """Yield what every rule chooses."""
    view = found.view
    assert isinstance(view, ChoiceView)
    for rule in view.rules:
        made = decisions(view, rule)
        yield {
            "rule": rule,
            "prediction": int(made.prediction[place]),
            "right": bool(made.right[place]),
            "tie": bool(made.tie[place]),
            "margin": float(made.margin[place]),
        }


def _answer_table(found: TaskOutcomes, place: int, title: str) -> Table:
    assert isinstance(found.view, AnswerView)
    document = found.view.documents[place]
    score = "–" if document.score is None else fixed(document.score, 3)
    rows = [["answer", document.answer], *(["reference", one] for one in document.references)]
    rows += [[f"score ({found.view.metric})", score], *([name, value] for name, value in document.facts.items())]
    return simple_table("answer", ["", ""], rows, texts=2, title=title)


def _notes(found: TaskOutcomes, place: int) -> Iterator[str]:
    yield "*: the gold answer; <: the rule of the list"
    yield "log-likelihoods are natural logarithms; perplexity: exp(-log-likelihood / tokens); –: not scored"
    if found.truncated[place]:
        yield "the context was truncated on the left to fit the context window: " + ", ".join(
            _truncations(found, place)
        )


def _truncations(found: TaskOutcomes, place: int) -> Iterator[str]:
    assert isinstance(found.view, ChoiceView) and found.decided is not None
    start = int(found.decided.starts[place])
    rows = found.view.scores.iloc[start : start + len(scored_choices(found, place))]
    for choice, tokens in enumerate(np.asarray(rows["truncated"]).tolist()):
        yield f"{tokens:,} tokens of choice {choice}"


def _records(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row of a CSV for each run, choice and segment; for answers, one for each run."""
    about = {name: record[name] for name in ("task", "subtask", "document")}
    for run in record["runs"]:
        if "choices" not in run:
            yield about | {name: value for name, value in run.items() if not isinstance(value, list)}
            continue
        for choice, segments in enumerate(run["choices"]):
            for segment, scores in segments.items():
                named = {"run": run["run"], "choice": choice, "gold": choice == run["gold"], "segment": segment}
                yield about | named | scores


_TEXT, _list_report_OPTION = 60, 24
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
    notes = list(_list_report_notes(tasks, rule, len(names)))
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
        return shortened(found.view.documents[place].answer, _list_report_OPTION)
    mark = " (tie)" if found.tie[place] else ""
    return option_text(found, place, int(found.decided.prediction[place]), _list_report_OPTION) + mark


def _gold(found: TaskOutcomes, place: int) -> str:
    if isinstance(found.view, AnswerView):
        return shortened(" | ".join(found.view.documents[place].references), _list_report_OPTION)
    return option_text(found, place, gold_of(found, place), _list_report_OPTION)


def _value(found: TaskOutcomes, place: int) -> str:
    value = float(found.value[place])
    return fixed(value, 3) if found.decided is None else signed_number(value, 3)


def _list_report_notes(tasks: Sequence[tuple[TaskOutcomes, ...]], rule: str | None, runs: int) -> Iterator[str]:
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
