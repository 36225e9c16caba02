"""Write docs/reference/messages.md, errors as users see them, for reading: `python -m tests.guards.messages`."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import fill

import pytest

from tests.guards.bench import MESSAGES

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "messages.md"
INDENT = 6 * " "
HEAD = """# Messages

What evalkit says when it refuses, for one guard in three (`tests/guards/`). The wording is no contract; the exit code
and what is named are. This page is written by `python -m tests.guards.messages`.
"""


def main() -> None:
    """Check the fast guards in this process and write the messages of every third that refuses."""
    failed = pytest.main(
        ["-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow and not cluster", str(Path(__file__).parent)]
    )
    refused = [pair for pair in MESSAGES.values() if pair[1].startswith("evalkit: ")]
    with PAGE.open("w", encoding="utf-8") as page:
        page.write(HEAD)
        for text, message in refused[::3]:
            page.write(f"\n- {text}\n\n{fill(message, 120, initial_indent=INDENT, subsequent_indent=INDENT)}\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
