"""Tables as printed by commands, as text."""

from __future__ import annotations

from evalkit.reporting.report import Report, render
from evalkit.reporting.table import Format, Table


def printed(shown: Table | Report, form: Format = "terminal", standalone: bool = False) -> str:
    """A table by itself, or a report, in a format."""
    return render(Report((shown,)) if isinstance(shown, Table) else shown, form, standalone=standalone)
