"""Reports of documents: a list of the selected ones, and one with its prompt, its scores and what every rule chooses.

In: documents in one or two runs. Out: `Report`s, with records of unrounded numbers for programs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from evalkit.benchmarks.document_views import AnswerView, ChoiceView, common_prefix
from evalkit.inspection.outcomes import TaskOutcomes, decisions, outcome_record, run_record
from evalkit.inspection.selection import InRuns, SelectedDocument
from evalkit.reporting.decimals import fixed, signed_number
from evalkit.reporting.report import Report
from evalkit.reporting.table import Table, simple_table
from evalkit.reporting.terminal import coloured
from evalkit.runs.rules import find_rule

_PARAGRAPH = "\n\n"
_OPTION = 40
"""Most characters of an option."""
_LISTED_TEXT, _LISTED_OPTION = 60, 24
"""In a list: most characters of the beginning of a text, and of an option or an answer."""


def prompt_text(document: SelectedDocument) -> str:
    """Return the prompt for a terminal, with segments in colour; empty if the run does not have it."""
    task, place = document.outcomes[0], document.places[0]
    if answer := task.answer(place):
        return coloured(answer.prompt)
    if (text := task.choice_text(place)) is None:
        return ""
    marks = {_gold(task, place): "*"}
    choices = [f"[{number}]{marks.get(number, ' ')} {coloured(pieces)}" for number, pieces in enumerate(text.choices)]
    return "\n".join([coloured(text.common), *choices])


def document_report(document: SelectedDocument, names: Sequence[str], with_prompt: bool) -> Report:
    """Return the report of a document in runs with `names`; with its prompt as a table, for formats without colours."""
    record = _document_record(document)
    tables = [_prompt_table(record)] if with_prompt else []
    notes: list[str] = []
    for number, (task, place) in enumerate(zip(document.outcomes, document.places, strict=True)):
        title = f"{'AB'[number]}: {names[number]}" if len(names) > 1 else ""
        if isinstance(task.view, AnswerView):
            tables.append(_answer_table(task, place, title))
            continue
        of_run = record["runs"][number]
        of_run["rules"] = list(_rules(task, place))
        tables += [_choices_table(task, place, of_run, title), _rules_table(task, place, of_run["rules"], title)]
        notes += _notes(task, place)
    first, place = document.outcomes[0], document.places[0]
    if first.view.problem:
        notes.append(f"texts: {first.view.problem}")
    gold = f": the gold answer is {_option(first, place, _gold(first, place), _OPTION)}" if first.decided else ""
    return Report(
        tuple(table for table in tables if any(table.lines)),
        verdict=(document.name + gold,),
        notes=tuple(dict.fromkeys(notes)),
        content=record,
        records=list(_segment_records(record)),
    )


def list_report(
    tasks: Sequence[InRuns], selected: Sequence[SelectedDocument], searched: int, limit: int, names: Sequence[str]
) -> Report:
    """Return the list of the first selected documents.

    Args:
        tasks: the tasks that were searched, in one run or in two.
        selected: documents, in order.
        searched: number of documents that were searched.
        limit: most documents of the list.
        names: name of each run.
    """
    shown = selected[:limit]
    by_task = defaultdict(list)
    for document in shown:
        by_task[document.outcomes[0].view.task].append(document.places[0])
    texts = {task: _beginnings(first, by_task[task]) for first, *_ in tasks if (task := first.view.task)}
    begins = [texts[document.outcomes[0].view.task][document.places[0]] for document in shown]
    part = f"; the first {limit:,} of these" if len(shown) < len(selected) else ""
    facts = [f"{len(selected):,} of {searched:,} documents{part}"]
    if len(names) > 1:
        facts += [f"{letter}: {name}" for letter, name in zip("AB", names, strict=False)]
    rule = next((first.rule for first, *_ in tasks if first.rule), None)
    notes = list(_list_notes(tasks, rule))
    content = {
        "runs": [of_run.run.manifest["id"] for of_run in tasks[0]],
        "rule": rule,
        "tasks": [first.view.task for first, *_ in tasks],
        "count": len(selected),
        "of": searched,
        "notes": notes,
        "documents": list(map(_document_record, shown)),
    }
    return Report(
        (_list_table(shown, begins, len(names)),),
        facts=tuple(facts),
        notes=tuple(notes),
        content=content,
        records=list(map(_flat_record, shown, begins)),
    )


def _gold(task: TaskOutcomes, place: int) -> int:
    assert task.decided is not None
    return int(task.decided.gold[place])


def _option(task: TaskOutcomes, place: int, choice: int, most: int) -> str:
    """Return the number of a choice, with at most `most` characters of its option where texts are known."""
    text = task.choice_text(place)
    return str(choice) if text is None else f"{choice} {_shortened(text.options[choice], most)}"


def _shortened(text: str, most: int) -> str:
    """Return the beginning of a text on one line, with … where it is cut."""
    line = " ".join(text[: 4 * most].split())
    return line if len(line) <= most and len(text) <= 4 * most else f"{line[: most - 1]}…"


def _beginnings(task: TaskOutcomes, places: Sequence[int]) -> dict[int, str]:
    """Return index → the beginning of a document's context, on one line.

    The paragraphs with which all contexts of its subtask begin are left out: MMLU's heading, solved examples.
    """
    subtasks = {task.keys[place][0] for place in places}
    contexts: dict[str, list[str]] = defaultdict(list)
    for place, (subtask, _) in enumerate(task.keys):
        if subtask in subtasks:
            contexts[subtask].append(_context(task, place))
    shared = {
        subtask: common_prefix(texts).rfind(_PARAGRAPH) + 1 if len(texts) > 1 else 0
        for subtask, texts in contexts.items()
    }
    return {place: _shortened(_context(task, place)[shared[task.keys[place][0]] :], _LISTED_TEXT) for place in places}


def _context(task: TaskOutcomes, place: int) -> str:
    """Return the context of a document, of its first choice if the choices have different ones."""
    if answer := task.answer(place):
        pieces = answer.prompt
    else:
        text = task.choice_text(place)
        pieces = () if text is None else (*text.common, *text.choices[0])
    return "".join(piece.text for piece in pieces if piece.segment == "context")


# Records


def _document_record(document: SelectedDocument) -> dict[str, Any]:
    """Return a document with its texts, and its outcome and scores in each run."""
    subtask, identity = document.key
    task, place = document.outcomes[0], document.places[0]
    record: dict[str, Any] = {"name": document.name, "task": task.view.task, "subtask": subtask, "document": identity}
    text, problem = task.choice_text(place), task.view.problem
    if answer := task.answer(place):
        record["prompt"] = [piece._asdict() for piece in answer.prompt]
    elif text is not None:
        record["options"] = list(text.options)
        record["prompt"] = [piece._asdict() for piece in text.common]
        record["continuations"] = [[piece._asdict() for piece in pieces] for pieces in text.choices]
    if not answer and (problem or text is None):
        record["problem"] = problem
    record["runs"] = list(map(run_record, document.outcomes, document.places))
    return record


def _flat_record(document: SelectedDocument, beginning: str) -> dict[str, Any]:
    """Return a row of a CSV: a document with the beginning of its text, and its outcome in each run."""
    subtask, identity = document.key
    row: dict[str, Any] = {"task": document.outcomes[0].view.task, "subtask": subtask, "document": identity}
    for number, outcome in enumerate(map(outcome_record, document.outcomes, document.places)):
        if number == 0 and "gold" in outcome:
            row["gold"] = outcome["gold"]
        suffix = "" if len(document.outcomes) == 1 else f" {'AB'[number]}"
        row |= {f"{name}{suffix}": value for name, value in outcome.items() if name not in ("gold", "references")}
    return row | {"text": beginning}


def _rules(task: TaskOutcomes, place: int) -> Iterator[dict[str, Any]]:
    """Yield what every rule chooses."""
    assert isinstance(task.view, ChoiceView)
    for rule in task.view.rules:
        made = decisions(task.view, rule)
        yield {
            "rule": rule,
            "prediction": int(made.prediction[place]),
            "right": bool(made.right[place]),
            "tie": bool(made.tie[place]),
            "margin": float(made.margin[place]),
        }


def _segment_records(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
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


# Tables


def _prompt_table(record: Mapping[str, Any]) -> Table:
    common = "all" if "continuations" in record else ""
    parts = [(common, record.get("prompt", [])), *enumerate(record.get("continuations", []))]
    rows = [[str(choice), piece["segment"], piece["text"]] for choice, pieces in parts for piece in pieces]
    return simple_table("prompt", ["choice", "segment", "text"], rows, texts=3)


def _choices_table(task: TaskOutcomes, place: int, record: Mapping[str, Any], title: str) -> Table:
    rows: list[list[str]] = []
    ruled = set()
    for choice, segments in enumerate(record["choices"]):
        ruled.add(len(rows))
        label = _option(task, place, choice, _OPTION) + ("*" if choice == record["gold"] else "")
        for segment, scores in segments.items():
            tokens = "–" if scores["tokens"] is None else f"{scores['tokens']:,}"
            rows.append([label, segment, fixed(scores["log_likelihood"], 3), tokens, fixed(scores["perplexity"], 2)])
            label = ""
    headers = ["choice", "segment", "log-likelihood", "tokens", "perplexity"]
    return simple_table("choices", headers, rows, texts=2, ruled=ruled, title=title)


def _rules_table(task: TaskOutcomes, place: int, by_rule: Sequence[dict[str, Any]], title: str) -> Table:
    rows = []
    for made in by_rule:
        mark = " <" if made["rule"] == task.rule else ""
        verdict = ("right" if made["right"] else "wrong") + (", a tie" if made["tie"] else "")
        option = _option(task, place, made["prediction"], _OPTION)
        rows.append([f"{made['rule']}{mark}", option, verdict, signed_number(made["margin"], 3)])
    return simple_table("rules", ["rule", "chooses", "verdict", "margin"], rows, texts=3, title=title)


def _answer_table(task: TaskOutcomes, place: int, title: str) -> Table:
    assert isinstance(task.view, AnswerView)
    document = task.view.documents[place]
    rows = [["answer", document.answer], *(["reference", text] for text in document.references)]
    rows += [[f"score ({task.view.metric})", fixed(document.score, 3)], *map(list, document.facts.items())]
    return simple_table("answer", ["", ""], rows, texts=2, title=title)


def _notes(task: TaskOutcomes, place: int) -> Iterator[str]:
    yield "*: the gold answer; <: the rule of the list"
    yield "log-likelihoods are natural logarithms; perplexity: exp(-log-likelihood / tokens); –: not scored"
    if task.truncated[place]:
        cut = [f"{int(row['truncated']):,} tokens of choice {choice}" for choice, row in enumerate(task.rows(place))]
        yield f"the context was truncated on the left to fit the context window: {', '.join(cut)}"


def _list_table(shown: Sequence[SelectedDocument], begins: Sequence[str], runs: int) -> Table:
    """Return a line for each document; columns that are empty are left out."""
    answers = bool(shown) and all(isinstance(document.outcomes[0].view, AnswerView) for document in shown)
    predicted, gold, value = ("answer", "reference", "score") if answers else ("predicted", "gold", "margin")
    letters = ["A ", "B "] if runs > 1 else [""]
    headers = ["document", *(f"{letter}{predicted}" for letter in letters), gold, "text"]
    texts = len(headers)
    headers += [f"{letter}{value}" for letter in letters]
    rows = list(map(_list_row, shown, begins))
    kept = [place for place in range(len(headers)) if not place or any(row[place] for row in rows)]
    cells = [[row[place] for place in kept] for row in rows]
    return simple_table("documents", [headers[place] for place in kept], cells, texts=sum(p < texts for p in kept))


def _list_row(document: SelectedDocument, begin: str) -> list[str]:
    predicted, gold, values = [], "", []
    for number, (task, place) in enumerate(zip(document.outcomes, document.places, strict=True)):
        value = float(task.value[place])
        if answer := task.answer(place):
            shown = _shortened(answer.answer, _LISTED_OPTION)
            right = _shortened(" | ".join(answer.references), _LISTED_OPTION)
            values.append(fixed(value, 3))
        else:
            assert task.decided is not None
            shown = _option(task, place, int(task.decided.prediction[place]), _LISTED_OPTION)
            shown += " (tie)" if task.tie[place] else ""
            right = _option(task, place, _gold(task, place), _LISTED_OPTION)
            values.append(signed_number(value, 3))
        predicted.append(shown)
        gold = gold if number else right
    return [document.name, *predicted, gold, begin, *values]


def _list_notes(tasks: Sequence[InRuns], rule: str | None) -> Iterator[str]:
    if rule is not None:
        yield f"rule {rule}: {find_rule(rule).description}"
        yield (
            "margin: score of the gold choice less the highest score of another choice, by the rule; "
            "log-likelihoods are in nats"
        )
    views = [first.view for first, *_ in tasks]
    if metrics := dict.fromkeys(view.metric for view in views if isinstance(view, AnswerView)):
        yield f"score: {', '.join(metrics)}"
    yield from (f"texts: {problem}" for problem in dict.fromkeys(view.problem for view in views if view.problem))
    if dropped := sum(len(set(first.keys) ^ set(second.keys)) for first, *others in tasks for second in others):
        yield f"{dropped:,} documents are in one run only and are left out"
