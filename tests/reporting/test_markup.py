"""The markup of labels and captions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalkit.errors import TableError
from evalkit.escape import printable
from evalkit.reporting.table import Span, literal, parse, plain


def test_styles() -> None:
    assert parse("**~Intg~ with** *8* heads, $S$", "x") == (
        Span("Intg", bold=True, small_caps=True),
        Span(" with", bold=True),
        Span(" "),
        Span("8", italic=True),
        Span(" heads, "),
        Span("S", math=True),
    )
    assert parse("***both***", "x") == (Span("both", bold=True, italic=True),)


def test_a_backslash_takes_the_sign_itself() -> None:
    assert parse(r"\*\~\$\\ 5\% _x_ & #1", "x") == (Span(r"*~$\ 5% _x_ & #1"),)


@pytest.mark.parametrize("text", ["**bold", "*", "~caps", "costs $5", "a ** b"])
def test_a_style_that_does_not_end_is_named(text: str) -> None:
    with pytest.raises(TableError, match=r"layout my\.yaml: caption: '.+' is not closed"):
        parse(text, "layout my.yaml: caption")


@given(st.text())
def test_names_from_elsewhere_are_taken_as_they_are(text: str) -> None:
    assert plain(literal(text)) == printable(text)
    assert all(span == Span(span.text) for span in literal(text))


@given(st.text())
def test_escaped_text_is_itself(text: str) -> None:
    escaped = "".join(f"\\{c}" if c in "\\*~$" else c for c in text)
    assert plain(parse(escaped, "x")) == printable(text)
