"""Report of a single document: its prompt, the scores of its choices, and what every rule chooses.

In: a document in one or two runs. Out: its prompt as coloured text, and a `Report`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from evalkit.benchmarks.document_views import AnswerView, ChoiceText, ChoiceView
from evalkit.inspection.decisions import decisions
from evalkit.inspection.outcomes import TaskOutcomes, gold_of
from evalkit.inspection.records import document_record, scored_choices
from evalkit.inspection.selection import SelectedDocument
from evalkit.inspection.texts import choice_text_of, option_text
from evalkit.reporting.decimals import fixed, signed_number
from evalkit.reporting.report import Report
from evalkit.reporting.segments import coloured
from evalkit.reporting.table import Table, simple_table

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
