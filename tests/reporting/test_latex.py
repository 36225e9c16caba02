"""LaTeX: every table compiles beside the paper's packages and prints correctly."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from evalkit.reporting.report import Report, render
from evalkit.reporting.table import Cell, ColumnGroup, Line, Section, Table, literal
from evalkit.tables.layout import layout_names
from evalkit.tables.request import TableRequest, make
from tests.printed import printed

NASTY = r"my_model-50%_{x}^2~$5 & #1 \input{secret} <a|b> [c] *d* --e ''f'' `g` \\"

needs_tex = pytest.mark.skipif(
    not (shutil.which("pdflatex") and shutil.which("pdftotext")),
    reason="pdflatex or pdftotext is not installed (Debian: texlive-latex-extra, poppler-utils)",
)

# The paper's packages that tables use, in its order
PREAMBLE = r"""\documentclass[11pt,twocolumn]{article}
\usepackage{times}\usepackage{latexsym}\usepackage[T1]{fontenc}\usepackage[utf8]{inputenc}\usepackage{microtype}
\usepackage{graphicx}\usepackage{xcolor}\usepackage{multirow}\usepackage{booktabs}\usepackage{amsmath}
"""


def compiled(folder: Path, document: str) -> str:
    """The text of the document's pages; fails with TeX's own complaint."""
    (folder / "it.tex").write_text(document, encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", "it.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=120)
    assert done.returncode == 0, "\n".join(line for line in done.stdout.splitlines() if line.startswith(("!", "l.")))
    assert not re.search(r"Overfull \\hbox|Missing character", (folder / "it.log").read_text(errors="replace"))
    command = ["pdftotext", "-layout", "it.pdf", "-"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def of_rows(*rows: tuple[str, Cell], name: str = "") -> Table:
    """A table of one column; title, note and caption are `name`."""
    text = literal(name)
    lines = tuple(Line(str(number), literal(label), bool(name), (text,) * bool(name), (cell,))
                  for number, (label, cell) in enumerate(rows))  # fmt: skip
    group, section = ColumnGroup(text, (literal(name or "a"),)), Section(text, "ruled" if name else "line", lines)
    return Table("a_b c}%", text, text, (text,) * bool(name), (group,), (section,), (text,) * bool(name))


@pytest.mark.latex
@needs_tex
def test_every_table_compiles_beside_the_papers_packages(tmp_path: Path) -> None:
    tables = [make(TableRequest(name, as_printed=own)) for name in layout_names() for own in (True, False)]
    pages = "\\clearpage\n".join(printed(table, "latex") for table in tables)
    text = compiled(tmp_path, f"{PREAMBLE}\\begin{{document}}\n{pages}\n\\end{{document}}")
    for number in ("51.3", "49.6", "19.26", "100%", "38.9"):
        assert number in text


@pytest.mark.latex
@needs_tex
def test_any_name_is_printed_as_it_is(tmp_path: Path) -> None:
    """A nasty name wherever a name of others can stand; every Latin letter, and a code for what has no glyph."""
    cell = Cell("1.0", bold=True, underline=True, significant=True)
    text = compiled(tmp_path, printed(of_rows((NASTY, cell), name=NASTY), "latex", standalone=True))
    expected = re.sub(r"\s", "", NASTY).replace("'", "’")
    assert re.sub(r"\s", "", text).replace("'", "’").count(expected) >= 3, text
    letters = "".join(map(chr, [*range(0x20, 0x180), 0x2013, 0x2014, 0x2020, 0x4E2D, 0x1F600]))
    parts = [letters[start : start + 16] for start in range(0, len(letters), 16)]
    text = compiled(tmp_path, printed(of_rows(*((part, Cell()) for part in parts)), "latex", standalone=True))
    for shown in ("é", "Ø", "ß", "[U+0100]", "[U+4E2D]", "[U+1F600]", "{|}"):
        assert shown in text


def test_a_dagger_is_given_room_in_every_number_of_its_column() -> None:
    cells = Cell("9.3", "1.4"), Cell("52.9", "1.2", bold=True, significant=True), Cell()
    text = printed(of_rows(*(("x", cell) for cell in cells)), "latex")
    assert r"x & \phantom{0}9.3\phantom{$^{\dagger}$}\,{\scriptsize$\pm$1.4} \\" in text
    assert r"x & \textbf{52.9}$^{\dagger}$\,{\scriptsize$\pm$1.2} \\" in text
    assert r"x & - \\" in text


def test_a_hyphen_before_a_number_is_a_minus() -> None:
    """In captions, labels and notes, after a bracket too; ranges and names keep their hyphen."""
    for name, shown in (("abl_top_main", r"bottom 50\% ($-$50\%)"), ("anly_rank_main", "the last layer ($-$1)")):
        assert shown in printed(make(TableRequest(name)), "latex")
    text = printed(of_rows(("-0.5", Cell("-1.5")), name="layers 2-3 of run-4 (at -2)"), "latex")
    assert r"\caption{layers 2-3 of run-4 (at $-$2)}" in text and "$-$0.5" in text and "$-$1.5" in text


def test_without_a_caption_there_is_no_label() -> None:
    """A label without one refers to the section."""
    assert r"\label{" not in printed(of_rows(("a", Cell("1.0"))), "latex")
    named = printed(of_rows(("a", Cell("1.0")), name="named"), "latex")
    assert named.index(r"\caption{named}") < named.index(r"\label{tab:a_bc}")


def test_comments_have_no_folders_of_this_machine() -> None:
    """Neither of notes nor of the sides of a comparison; texts with a slash stay."""
    notes = ("checkpoints are in /home/me/my_models", 'taken from "/data/runs/a.yaml": bits/byte, 1 / 2, and/or')
    facts = ("A: base (/home/me/runs/base-zeroshot8-1a2b3c)",)
    text = render(Report((of_rows(("a", Cell("1.0"))),), ("It is better.",), facts, notes), "latex")
    assert "home" not in text and "/data" not in text
    assert "% checkpoints are in my_models" in text and '% taken from "a.yaml": bits/byte, 1 / 2, and/or' in text
