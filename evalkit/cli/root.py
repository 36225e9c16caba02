"""The command line: parse, call, print. No logic, and nothing heavy is imported before it is needed.

Every option can also be given as an environment variable (`--data-dir` as `EVALKIT_DATA_DIR`) and in a YAML file
(`--config`, keys named as the options); the command line wins over the environment, and that over the file.
"""

from __future__ import annotations

import io
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click

from evalkit import __version__
from evalkit.activity import shown_activity
from evalkit.cli import comparing, longbench, looking, models, needle, scoring, tables
from evalkit.cli.options import SETTINGS, Commands
from evalkit.errors import EvalkitError
from evalkit.reporting.escape import printable


@click.group(cls=Commands, context_settings=SETTINGS)
@click.version_option(__version__)
def cli() -> None:
    """Evaluate language-model checkpoints: the same numbers as lm-eval, several times sooner.

    \b
    Start here:
      evalkit run --model demo --limit 25        a small real checkpoint on real documents
      evalkit run --model FOLDER                 your own, on all eight zero-shot tasks
      evalkit table main_res                     the paper's tables, filled from it or from your runs
      evalkit compare RUN_A RUN_B                is B better than A?
      evalkit ls                                 suites, tasks, templates, rules and your runs
      evalkit models ls                          the paper's models, by name
      evalkit doctor                             versions, device, data and disk at a glance
    """


for command in (
    scoring.run,
    scoring.rescore,
    longbench.longbench,
    needle.needle,
    comparing.compare,
    tables.table,
    tables.integrity,
    tables.export,
    models.models,
    looking.list_,
    looking.data,
    looking.doctor,
):
    cli.add_command(command)

_LONGEST = 2000
"""Characters of a message."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    0 done, 1 failed, 2 usage, 3 worse and 4 undecided (compare), 130 interrupted (Ctrl-C), 143 terminated (SIGTERM).
    """
    with _termination_as_interrupt(), shown_activity():
        code = _exit_code(arguments)
    sys.exit(code)


class _Terminated(KeyboardInterrupt):
    """SIGTERM, as a scheduler sends it at the end of a job's time."""


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """Have SIGTERM end the process as Ctrl-C does; a second one ends it at once, which costs no finished batch."""

    def terminate(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise _Terminated

    # Python takes signals in the main thread alone; one that is ignored or handled already stays so
    in_main = threading.current_thread() is threading.main_thread()
    before: Any = signal.getsignal(signal.SIGTERM)
    if not in_main or before is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit_code(arguments: Sequence[str] | None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names may hold what the terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")
    try:
        code = cli.main(args=arguments, prog_name="evalkit", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except EvalkitError as error:
        _complain(str(error))
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        message = error.format_message().rstrip(".")
        command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "evalkit"
        _complain(f"{message}; see {command} --help")
        return error.exit_code
    except OSError as error:  # where a name is only looked up, too: it may be too long
        _complain(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        return 1
    except MemoryError:
        _complain("out of memory; close other programs, or give a smaller file, model or batch")
        return 1
    except (click.Abort, KeyboardInterrupt) as error:
        # click makes an Abort of it
        terminated = isinstance(error, _Terminated) or isinstance(error.__cause__, _Terminated)
        click.echo("evalkit: interrupted; what was scored is saved: run the same command again to go on", err=True)
        return 143 if terminated else 130


def _complain(message: str) -> None:
    """One line on standard error, of a length that somebody reads; advice stands at its end."""
    line = printable(message)
    if len(line) > _LONGEST:
        line = f"{line[: _LONGEST // 2]} … {line[-_LONGEST // 2 :]}"
    click.echo(f"evalkit: {line}", err=True)
