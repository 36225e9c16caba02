"""Names with arbitrary characters on a terminal line, in a spreadsheet and in LaTeX, and the markup of labels."""

from __future__ import annotations

import re
import string
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalkit.errors import TableError
from evalkit.escape import in_csv, in_latex, printable
from evalkit.reporting.table import Span, literal, parse, plain

any_text = given(st.text())


@any_text
def test_any_text_is_on_one_line_and_is_obeyed_by_no_terminal(text: str) -> None:
    shown = printable(text)
    assert shown == printable(shown) == plain(literal(text))
    assert len(shown.splitlines()) <= 1
    assert not {unicodedata.category(c) for c in shown} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    shown.encode()
    assert printable("a\x1b[2J\u202e 東京 🌊 \\ é\n") == "a\\x1b[2J\\u202e 東京 🌊 \\ é\\n"


@pytest.mark.parametrize("text", ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "-1.5 points"])
def test_a_spreadsheet_runs_no_name(text: str) -> None:
    assert in_csv(text) == f"'{printable(text)}"
    for value in (-1.5, -3, None, True, "-1.5", "+0.3", "-1e-5", "5", "", "-", "a=1", "'=1"):
        assert in_csv(value) is value


@any_text
def test_nothing_that_latex_obeys_is_left(text: str) -> None:
    escaped = in_latex(text)
    bare = re.sub(r"\\(text[a-z]+\{\}|[{}$&#%_])|\$\\?[a-z]+\$|\$-\$|\{[\[\]*]\}|-\{\}|'\{\}", "", escaped)
    assert not set(bare) & set('\\{}$&#%_^~<>|"`[]*\n\r\0'), escaped
    assert "--" not in escaped.replace(r"-{}-", "")
    unchanged = string.ascii_letters + string.digits + " .,:;!?()/+=@"
    assert in_latex(unchanged) == unchanged


@any_text
def test_markup(text: str) -> None:
    """A backslash takes the sign itself, and is itself before any other; an open style is an error that says where."""
    assert parse("**~Intg~ with** *8* heads, $S$", "x") == (
        Span("Intg", bold=True, small_caps=True),
        Span(" with", bold=True),
        Span(" "),
        Span("8", italic=True),
        Span(" heads, "),
        Span("S", math=True),
    )
    assert parse("***both***", "x") == (Span("both", bold=True, italic=True),)
    assert plain(parse("".join(f"\\{c}" if c in "\\*~$" else c for c in text), "x")) == printable(text)
    for path in ("C:\\new\\runs", "\\alpha", "a\\"):
        assert plain(parse(path, "x")) == path
    for unclosed in ("**bold", "*", "~caps", "costs $5", "a ** b"):
        with pytest.raises(TableError, match=r"layout my\.yaml: caption: "):
            parse(unclosed, "layout my.yaml: caption")
