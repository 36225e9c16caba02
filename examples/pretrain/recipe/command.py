"""How a command of the recipe ends: errors as one line, an exit code, and what to do after Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from evalkit.errors import EvalkitError


@contextmanager
def reported(name: str) -> Iterator[None]:
    """Print a user's errors on one line, as the command `name`, and exit with evalkit's codes."""
    try:
        yield
    except EvalkitError as error:
        code, line = error.exit_code, str(error)
    except OSError as error:
        code, line = 1, f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except KeyboardInterrupt:
        code, line = 130, "interrupted; the same command resumes from the newest checkpoint"
    else:
        return
    print(f"{name}: {line}", file=sys.stderr, flush=True)
    sys.exit(code)
