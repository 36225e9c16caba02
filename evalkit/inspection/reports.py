"""Reports of documents: a list of the selected ones, and one with its prompt, its scores and what every rule chooses.

In: documents in one or two runs. Out: `Report`s, with records of unrounded numbers for programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from evalkit.benchmarks.document_views import AnswerView, ChoiceView, common_prefix
from evalkit.inspection.outcomes import DocumentOutcome, SelectedDocument, Selection, decisions
from evalkit.reporting.decimals import fixed, signed_number
from evalkit.reporting.report import Report
from evalkit.reporting.table import Table, filled_table, simple_table
from evalkit.reporting.terminal import coloured
from evalkit.runs.notes import TRUNCATED, notes_of_runs, rule_note

_OPTION, _LISTED_OPTION, _LISTED_TEXT = 40, 24, 60
"""Most characters of an option, of one in a list (or of an answer), and of the beginning of a text there."""


def prompt_text(selected: SelectedDocument) -> str:
    """Return the prompt for a terminal, with segments in colour; empty if the run does not have it."""
    document, lines = selected[0], list[str]()
    for number, pieces in enumerate(document.prompts, -1):  # the first is common to all choices
        mark = f"[{number}]{'*' if number == document.gold else ' '} " if number >= 0 else ""
        lines.append(mark + coloured(pieces))
    return "\n".join(lines)


def document_report(selected: SelectedDocument, names: Sequence[str], with_prompt: bool) -> Report:
    """Return the report of a document in runs with `names`; with its prompt as a table, for formats without colours."""
    record, first = _document_record(selected), selected[0]
    tables = [_prompt_table(record)] if with_prompt else []
    notes: list[str] = []
    for document, letter, name, of_run in zip(selected, "AB", names, record["runs"], strict=False):
        title = f"{letter}: {name}" if len(names) > 1 else ""
        if isinstance(document.task.view, ChoiceView):
            view = document.task.view
            of_run["rules"] = [{"rule": rule} | decisions(view, rule).of(document.number) for rule in view.rules]
            tables += [_choices_table(document, of_run, title), _rules_table(document, of_run["rules"], title)]
            notes += _notes(document)
        elif answer := document.answer:
            rows = [["answer", answer.answer], *(["reference", text] for text in answer.references)]
            metric = document.task.view.scale.name
            rows += [[f"score ({metric})", fixed(answer.score, 3)], *map(list, answer.facts.items())]
            tables.append(simple_table("answer", ["", ""], rows, texts=2, title=title))
    if first.task.view.problem:
        notes.append(f"texts: {first.task.view.problem}")
    gold = f": the gold answer is {_option(first, first.gold, _OPTION)}" if first.task.decided else ""
    shown = tuple(table for table in tables if any(table.lines))
    records = list(_segment_records(record))
    return Report(shown, (first.name + gold,), (), tuple(dict.fromkeys(notes)), record, records)


def list_report(selection: Selection, limit: int, names: Sequence[str]) -> Report:
    """Return the list of the first selected documents, at most `limit`, of runs with these names."""
    tasks, selected = selection.tasks, selection.documents
    shown = selected[:limit]
    begins = _beginnings([first for first, *_ in shown])
    part = f"; the first {limit:,} of these" if len(shown) < len(selected) else ""
    facts = [f"{len(selected):,} of {selection.searched:,} documents{part}"]
    if len(names) > 1:
        facts += [f"{letter}: {name}" for letter, name in zip("AB", names, strict=False)]
    rule = next((first.rule for first, *_ in tasks if first.rule), None)
    notes = tuple(_list_notes(selection, shown, rule))
    ids, listed = [of_run.run.manifest["id"] for of_run in tasks[0]], [first.view.task for first, *_ in tasks]
    content: dict[str, Any] = {"runs": ids, "rule": rule, "tasks": listed, "count": len(selected)}
    content |= {"of": selection.searched, "notes": notes, "documents": list(map(_document_record, shown))}
    tables = (_list_table(shown, begins, len(names)),)
    return Report(tables, (), facts, notes, content, list(map(_flat_record, shown, begins)))


def _option(document: DocumentOutcome, choice: int, most: int) -> str:
    """Return the number of a choice, with at most `most` characters of its option where texts are known."""
    text = document.text
    return str(choice) if text is None else f"{choice} {_shortened(text.options[choice], most)}"


def _shortened(text: str, most: int) -> str:
    """Return the beginning of a text on one line, with … where it is cut."""
    line = " ".join(text[: 4 * most].split())
    return line if len(line) <= most and len(text) <= 4 * most else f"{line[: most - 1]}…"


def _beginnings(documents: Sequence[DocumentOutcome]) -> list[str]:
    """Return the beginning of each document's context, on one line.

    The paragraphs with which all contexts of its subtask begin are left out: MMLU's heading, solved examples.
    """
    shared: dict[tuple[str, str], int] = {}
    beginnings = []
    for document in documents:
        subtask = document.task.view.task, document.key[0]
        if subtask not in shared:
            members = [other for (name, _), other in document.task.documents.items() if name == subtask[1]]
            common = common_prefix(list(map(_context, members)))
            shared[subtask] = common.rfind("\n\n") + 1 if len(members) > 1 else 0
        beginnings.append(_shortened(_context(document)[shared[subtask] :], _LISTED_TEXT))
    return beginnings


def _context(document: DocumentOutcome) -> str:
    """Return the context of a document, of its first choice if the choices have different ones."""
    pieces = (piece for prompt in document.prompts[:2] for piece in prompt)
    return "".join(piece.text for piece in pieces if piece.segment == "context")


def _document_record(selected: SelectedDocument) -> dict[str, Any]:
    document = selected[0]
    record: dict[str, Any] = {"name": document.name} | _named(document)
    text, problem = document.text, document.task.view.problem
    prompts = [[piece._asdict() for piece in prompt] for prompt in document.prompts]
    record |= {"options": list(text.options)} if text else {}
    record |= {"prompt": prompts[0]} if prompts else {}
    record |= {"continuations": prompts[1:]} if text else {}
    if not document.answer and (problem or text is None):
        record["problem"] = problem
    return record | {"runs": [of_run.record() for of_run in selected]}


def _named(document: DocumentOutcome) -> dict[str, Any]:
    return {"task": document.task.view.task, "subtask": document.key[0], "document": document.key[1]}


def _flat_record(selected: SelectedDocument, beginning: str) -> dict[str, Any]:
    """Return a row of a CSV: a document with the beginning of its text, and its outcome in each run."""
    row = _named(selected[0])
    if selected[0].task.decided is not None:
        row["gold"] = selected[0].gold
    for letter, document in zip("AB", selected, strict=False):
        suffix = "" if len(selected) == 1 else f" {letter}"
        outcome = document.outcome().items()
        row |= {f"{name}{suffix}": value for name, value in outcome if name not in ("gold", "references")}
    return row | {"text": beginning}


def _segment_records(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row of a CSV for each run, choice and segment; for answers, one for each run."""
    about = {name: record[name] for name in ("task", "subtask", "document")}
    for run in record["runs"]:
        if "choices" not in run:
            yield about | {name: value for name, value in run.items() if not isinstance(value, list)}
        for choice, segments in enumerate(run.get("choices", ())):
            named = {"run": run["run"], "choice": choice, "gold": choice == run["gold"]}
            yield from (about | named | {"segment": segment} | scores for segment, scores in segments.items())


def _prompt_table(record: dict[str, Any]) -> Table:
    common = "all" if "continuations" in record else ""
    parts = [(common, record.get("prompt", [])), *enumerate(record.get("continuations", []))]
    rows = [[str(choice), piece["segment"], piece["text"]] for choice, pieces in parts for piece in pieces]
    return simple_table("prompt", ["choice", "segment", "text"], rows, texts=3)


def _choices_table(document: DocumentOutcome, record: dict[str, Any], title: str) -> Table:
    rows: list[list[str]] = []
    ruled = set()
    for choice, segments in enumerate(record["choices"]):
        ruled.add(len(rows))
        label = _option(document, choice, _OPTION) + "*" * (choice == document.gold)
        for segment, scores in segments.items():
            tokens = "–" if scores["tokens"] is None else f"{scores['tokens']:,}"
            rows.append([label, segment, fixed(scores["log_likelihood"], 3), tokens, fixed(scores["perplexity"], 2)])
            label = ""
    headers = ["choice", "segment", "log-likelihood", "tokens", "perplexity"]
    return simple_table("choices", headers, rows, texts=2, ruled=ruled, title=title)


def _rules_table(document: DocumentOutcome, by_rule: Sequence[dict[str, Any]], title: str) -> Table:
    rows = []
    for made in by_rule:
        rule = made["rule"] + " <" * (made["rule"] == document.task.rule)
        verdict = ("right" if made["right"] else "wrong") + ", a tie" * made["tie"]
        rows.append([rule, _option(document, made["prediction"], _OPTION), verdict, signed_number(made["margin"], 3)])
    return simple_table("rules", ["rule", "chooses", "verdict", "margin"], rows, texts=3, title=title)


def _notes(document: DocumentOutcome) -> Iterator[str]:
    yield "*: the gold answer; <: the rule of the list"
    yield "log-likelihoods are natural logarithms; perplexity: exp(-log-likelihood / tokens); –: not scored"
    if document.truncated:
        cut = [f"{int(row['truncated']):,} tokens of choice {choice}" for choice, row in enumerate(document.rows)]
        yield f"the context was {TRUNCATED}: {', '.join(cut)}"


def _list_table(shown: Sequence[SelectedDocument], begins: Sequence[str], runs: int) -> Table:
    """Return a line for each document; columns that are empty are left out."""
    answers = bool(shown) and all(document.answer for document, *_ in shown)
    predicted, gold, value = ("answer", "reference", "score") if answers else ("predicted", "gold", "margin")
    letters = ["A ", "B "] if runs > 1 else [""]
    headers = ["document", *(letter + predicted for letter in letters), gold, "text"]
    headers += [letter + value for letter in letters]
    rows = []
    for documents, begin in zip(shown, begins, strict=True):
        predictions, golds, values = zip(*map(_prediction, documents), strict=True)
        rows.append([documents[0].name, *predictions, golds[0], begin, *values])
    return filled_table("documents", headers, rows, texts=len(headers) - len(letters))


def _prediction(document: DocumentOutcome) -> tuple[str, str, str]:
    """Return what a run predicts of a document, its gold answer, and the margin or score."""
    if answer := document.answer:
        given, right = (_shortened(text, _LISTED_OPTION) for text in (answer.answer, " | ".join(answer.references)))
        return given, right, fixed(document.value, 3)
    predicted = _option(document, document.outcome()["prediction"], _LISTED_OPTION) + " (tie)" * document.tie
    return predicted, _option(document, document.gold, _LISTED_OPTION), signed_number(document.value, 3)


def _list_notes(selection: Selection, shown: Sequence[SelectedDocument], rule: str | None) -> Iterator[str]:
    if rule is not None:
        yield rule_note(rule)
        margin = "score of the gold choice less the highest score of another choice, by the rule"
        yield f"margin: {margin}; log-likelihoods are in nats"
    yield from notes_of_runs((of_run.run.model, of_run.run.manifest) for of_run in selection.tasks[0])
    views = [first.view for first, *_ in selection.tasks]
    if metrics := dict.fromkeys(view.scale.name for view in views if isinstance(view, AnswerView)):
        yield f"score: {', '.join(metrics)}"
    problems = dict.fromkeys(first.task.view.problem for first, *_ in shown)
    yield from (f"texts: {problem}" for problem in problems if problem)
    if dropped := sum(len(in_runs[0].documents.keys() ^ in_runs[-1].documents.keys()) for in_runs in selection.tasks):
        yield f"{dropped:,} documents are in one run only and are left out"
