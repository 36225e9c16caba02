"""Tables as LaTeX: booktabs environments for a paper, or a complete document. All text of labels is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from evalkit.escape import PACKAGES, SHRUNK, in_latex, printable
from evalkit.reporting.table import Cell, Span, Table, Text, marked

_WIDE = 9
"""Minimum columns of a table that spans both columns of a page."""
_DAGGER = r"$^{\dagger}$"
_MINUS, _NEGATIVE = re.compile(r"(?<![^ ])-(?=\d| )"), re.compile(r"(?<![^ (])-(?=\d)")
"""A hyphen that is meant as a minus in a cell; in a sentence."""


def latex_comments(lines: Iterable[str]) -> str:
    """Return sentences as comments, for writing the caption."""
    return "\n".join(f"% {printable(line)}" for line in lines)


def latex_document(body: str) -> str:
    preamble = [r"\documentclass[11pt]{article}", *PACKAGES.split(" "), r"\usepackage[margin=2.5cm]{geometry}"]
    document = [r"\usepackage{times}", r"\pagestyle{empty}", r"\begin{document}", body, r"\end{document}"]
    return "\n".join([*preamble, *document])


def latex_table(table: Table) -> str:
    """Return the table environment."""
    return "\n".join(_environment(table))


def _environment(table: Table) -> Iterator[str]:
    kind = "table*" if table.width >= _WIDE else "table"
    yield rf"\begin{{{kind}}}[ht]"
    yield r"\centering"
    yield SHRUNK
    if any(cell.spread or cell.difference for line in table.lines for cell in line.cells):
        yield r"\setlength{\tabcolsep}{3pt}%"
    facts, numbers = len(table.facts), table.numbers
    side = "c" if table.by_point else "r"
    yield rf"\begin{{tabular}}{{l{('c' if numbers and table.by_point else 'l') * facts}{side * numbers}}}"
    yield r"\toprule"
    yield from _heading(table)
    columns = list(zip(*(line.cells for line in table.lines), strict=True))
    # Digits before the decimal point of a column's longest number, to which the others are padded
    digits = [max(map(_integer_digits, cells)) if table.by_point else 0 for cells in columns]
    daggers = [any(cell.significant for cell in cells) for cells in columns]
    for number, section in enumerate(table.sections):
        if number == 0 or section.style != "heading":
            yield r"\midrule"
        if section.title:
            ruled = section.style == "ruled"
            yield rf"\multicolumn{{{table.width}}}{{{'c' if ruled else 'l'}}}{{{_text(section.title)}}} \\"
            if ruled:
                yield r"\midrule"
        for line in section.lines:
            label, *texts = map(_text, line.texts)
            yield _row([r"\hspace{4mm}" * line.indent + label, *texts, *map(_cell, line.cells, digits, daggers)])
    yield r"\bottomrule"
    yield r"\end{tabular}}"
    if table.notes:
        yield r"\par\smallskip\begin{minipage}{\linewidth}\footnotesize\raggedright"
        yield from (rf"{_text(note)}\par" for note in table.notes)
        yield r"\end{minipage}"
    if table.caption:  # without one a label would refer to the section
        yield rf"\caption{{{_text(table.caption)}}}"
        yield rf"\label{{tab:{''.join(c for c in table.name if c.isascii() and (c.isalnum() or c in '_-'))}}}"
    yield rf"\end{{{kind}}}"


def _heading(table: Table) -> Iterator[str]:
    corner, *facts = map(_text, table.headings)
    labels = [_text(label) for group in table.columns for label in group.labels]
    if not any(group.title for group in table.columns):
        yield _row([corner, *facts, *labels])
        return
    titles, rules = [""] * len(facts), []
    start = 2 + len(facts)
    for group in table.columns:
        count = len(group.labels)
        title = rf"\multicolumn{{{count}}}{{c}}{{\textbf{{{_text(group.title)}}}}}"
        titles += [title] if group.title else [""] * count
        rules += [rf"\cmidrule(lr){{{start}-{start + count - 1}}}"] if group.title else []
        start += count
    yield _row([rf"\multirow{{2}}{{*}}{{{corner}}}" if corner else "", *titles])
    yield " ".join(rules)
    yield _row(["", *facts, *labels])


def _row(cells: list[str]) -> str:
    return " & ".join(cells) + r" \\"


def _integer_digits(cell: Cell) -> int:
    return len(cell.value.partition(".")[0].rstrip("%").lstrip("-"))


_COMMANDS = {"superscript": "textsuperscript", "small_caps": "textsc", "italic": "textit", "bold": "textbf"}
_MARKUP = {style: (rf"\{command}{{", "}") for style, command in (_COMMANDS | {"underline": "underline"}).items()}


def _cell(cell: Cell, digits: int, dagger: bool) -> str:
    number = cell.value[:1].isdigit()
    fill = max(0, digits - _integer_digits(cell)) if number else 0
    value = marked(cell, in_latex(_MINUS.sub("−", cell.value)), _MARKUP)
    value = (rf"\phantom{{{'0' * fill}}}" if fill else "") + value
    if cell.significant:
        value += _DAGGER
    elif dagger and number:
        value += rf"\phantom{{{_DAGGER}}}"
    if cell.spread:
        value += rf"\,{{\scriptsize$\pm${cell.spread}}}"
    if not cell.difference:
        return value
    sign = cell.difference[0]
    difference = rf"{{\scriptsize({f'${sign}${cell.difference[1:]}' if sign in '+-' else cell.difference})}}"
    if not cell.spread:
        return value + difference
    # All three side by side would make a table of eight tasks too wide to read
    return rf"\begin{{tabular}}[t]{{@{{}}c@{{}}}}{value}\\{difference}\end{{tabular}}"


def _text(text: Text) -> str:
    return "".join(map(_span, text))


def _span(span: Span) -> str:
    if span.math:
        return marked(span, f"${span.text}$", _MARKUP)
    return marked(span, in_latex(span.text if span.superscript else _NEGATIVE.sub("−", span.text)), _MARKUP)
