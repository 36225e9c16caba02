"""LaTeX: escaping, and every table compiles and prints correctly."""

from __future__ import annotations

import re
import shutil
import string
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalkit.escape import in_latex as escape
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
    shown = subprocess.run(
        ["pdftotext", "-layout", "it.pdf", "-"], cwd=folder, capture_output=True, text=True, check=True
    )
    return shown.stdout


def one_row(label: str) -> Table:
    """A table of one number whose row, column, title, note and caption are a foreign name."""
    name = literal(label)
    line = Line("x", name, True, (name,), (Cell("1.0", bold=True, underline=True, significant=True),))
    group = ColumnGroup(name, (name,))
    return Table("a_b c}%", name, name, (name,), (group,), (Section(name, "ruled", (line,)),), (name,))


@given(st.text())
def test_nothing_special_is_left(text: str) -> None:
    escaped = escape(text)
    bare = re.sub(r"\\(text[a-z]+\{\}|[{}$&#%_])|\$\\?[a-z]+\$|\$-\$|\{[\[\]*]\}|-\{\}|'\{\}", "", escaped)
    assert not set(bare) & set('\\{}$&#%_^~<>|"`[]*\n\r\0'), escaped
    assert "--" not in escaped.replace(r"-{}-", "")


@given(st.text(alphabet=string.ascii_letters + string.digits + " .,:;!?()/+=@"))
def test_plain_text_stays(text: str) -> None:
    assert escape(text) == text


@pytest.mark.latex
@needs_tex
def test_every_table_compiles_beside_the_papers_packages(tmp_path: Path) -> None:
    tables = [
        make(TableRequest(name, as_printed=as_printed)) for name in layout_names() for as_printed in (True, False)
    ]
    pages = "\\clearpage\n".join(printed(table, "latex") for table in tables)
    text = compiled(tmp_path, f"{PREAMBLE}\\begin{{document}}\n{pages}\n\\end{{document}}")
    for number in ("51.3", "49.6", "19.26", "100%", "38.9"):
        assert number in text


@pytest.mark.latex
@needs_tex
def test_a_nasty_name_is_printed_as_it_is(tmp_path: Path) -> None:
    """In every place of a table where a name of others can stand."""
    text = compiled(tmp_path, printed(one_row(NASTY), "latex", standalone=True))
    expected = re.sub(r"\s", "", NASTY).replace("'", "’")
    assert re.sub(r"\s", "", text).replace("'", "’").count(expected) >= 3, text


def daggers() -> Table:
    """Numbers with and without a dagger under each other, all with their spread."""
    cells = (Cell("9.3", "1.4"), Cell("52.9", "1.2", bold=True, significant=True), Cell())
    lines = tuple(Line(str(place), literal("x"), False, (), (cell,)) for place, cell in enumerate(cells))
    return Table("t", (), (), (), (ColumnGroup((), (literal("a"),)),), (Section((), "line", lines),), ())


def test_a_dagger_is_given_room_in_every_number_of_its_column() -> None:
    text = printed(daggers(), "latex")
    assert r"x & \phantom{0}9.3\phantom{$^{\dagger}$}\,{\scriptsize$\pm$1.4} \\" in text
    assert r"x & \textbf{52.9}$^{\dagger}$\,{\scriptsize$\pm$1.2} \\" in text
    assert r"x & - \\" in text


@pytest.mark.latex
@needs_tex
def test_every_latin_letter_compiles(tmp_path: Path) -> None:
    letters = "".join(map(chr, [*range(0x20, 0x180), 0x2013, 0x2014, 0x2020, 0x4E2D, 0x1F600]))
    parts = [letters[start : start + 16] for start in range(0, len(letters), 16)]
    lines = tuple(Line(str(i), literal(part), False, (), (Cell(),)) for i, part in enumerate(parts))
    table = Table("t", (), (), (), (ColumnGroup((), (literal("a"),)),), (Section((), "line", lines),), ())
    text = compiled(tmp_path, printed(table, "latex", standalone=True))
    for shown in ("é", "Ø", "ß", "[U+0100]", "[U+4E2D]", "[U+1F600]", "{|}"):
        assert shown in text
