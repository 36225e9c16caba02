"""Root command: parse, call, print. It has no logic, and imports heavy modules only when needed.

Every option can also be given as an environment variable (`--data-dir` as `EVALKIT_DATA_DIR`) and in a YAML file
(`--config`, keys named as the options). The command line overrides the environment, which overrides the file.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import platform
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pkgutil import resolve_name
from tempfile import NamedTemporaryFile
from types import FrameType
from typing import Any

import click

from evalkit import __version__
from evalkit.cli.lm_eval import in_long_form, option_in
from evalkit.cli.parameters import SETTINGS, Commands, ResumableAbort
from evalkit.display import shown_activity
from evalkit.errors import EvalkitError, SeveralErrors
from evalkit.escape import printable

_COMMANDS = {
    "run": "evalkit.cli.benchmarks:run",
    "decide": "evalkit.cli.benchmarks:decide",
    "needle": "evalkit.longcontext.ruler.commands:needle",
    "attention": "evalkit.attention.commands:attention",
    "perplexity": "evalkit.longcontext.perplexity.commands:perplexity",
    "cost": "evalkit.cli.cost:cost",
    "longbench": "evalkit.longcontext.longbench.commands:longbench",
    "ruler": "evalkit.longcontext.ruler.commands:ruler",
    "study": "evalkit.cli.study:study",
    "compare": "evalkit.cli.comparing:compare",
    "plan": "evalkit.cli.comparing:plan",
    "noise": "evalkit.cli.noise:noise",
    "figure": "evalkit.attention.commands:figure",
    "report": "evalkit.cli.report:report",
    "show": "evalkit.cli.results:show",
    "rescore": "evalkit.cli.results:rescore",
    "table": "evalkit.cli.results:table",
    "integrity": "evalkit.cli.results:integrity",
    "export": "evalkit.cli.results:export",
    "import": "evalkit.cli.models:import_",
    "models": "evalkit.cli.models:models",
    "ls": "evalkit.cli.models:list_",
    "data": "evalkit.cli.models:data",
    "doctor": "evalkit.cli.models:doctor",
}
"""Command → where it is defined; a command is imported when it is used."""


class Root(Commands):
    """The root command; options of `evalkit run` may be given without its name, as in lm-eval."""

    def __init__(self, *arguments: Any, **declared: Any) -> None:
        super().__init__(*arguments, **declared)
        del self.commands  # click's empty mapping

    @cached_property
    def commands(self) -> dict[str, click.Command]:  # type: ignore[override]
        return {name: resolve_name(path) for name, path in _COMMANDS.items()}

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return resolve_name(_COMMANDS[cmd_name]) if cmd_name in _COMMANDS else None

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = [name for param in self.get_params(ctx) for name in param.opts]
        if args and args[0].startswith("-") and args[0] not in own:
            from evalkit.cli.benchmarks import run

            of_run = {name for param in run.params for name in param.opts}
            if of_run & set(map(option_in, in_long_form(args))):
                args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(cls=Root, context_settings=SETTINGS)
@click.version_option(__version__)
@click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error; with every command.")
def cli() -> None:
    """Evaluate language-model checkpoints: the same numbers as lm-eval, several times faster.

    \b
    Start here:
      evalkit run --model demo --sample 25       a small real checkpoint on real documents
      evalkit run --model FOLDER                 your own, on all eight zero-shot tasks
      evalkit table main_res                     the paper's tables, filled from it or from your runs
      evalkit compare RUN_A RUN_B                is B better than A?
      evalkit decide CKPT_A CKPT_B               the same, on as few documents as it takes
      evalkit plan --accuracy 40 --difference 1  how many documents show a difference?
      evalkit noise STUDY.yaml                   which tasks and outcomes carry a decision?
      evalkit report RUN_A RUN_B -o report.html  a page to look at, with every document
      evalkit show RUN --task boolq --wrong      the documents that it gets wrong
      evalkit study run STUDY.yaml               many checkpoints and benchmarks
      evalkit ls                                 suites, tasks, templates, rules and your runs
      evalkit models ls                          the paper's models, by name
      evalkit doctor                             versions, device, data and disk
    """


_LONGEST, _LONGEST_REASON = 2000, 300
"""Maximum characters of a message, and of another library's message within one."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    0 done, 1 failed, 2 usage, 3 worse and 4 undecided (compare), 130 interrupted (Ctrl-C), 143 terminated (SIGTERM).
    """
    # At the exit, Python would search all objects for cyclic garbage, whose memory is released anyway
    atexit.register(gc.freeze)
    given = sys.argv[1:] if arguments is None else list(arguments)
    ends = given.index("--") if "--" in given else len(given)
    kept = [text for number, text in enumerate(given) if text != "--debug" or number > ends]
    is_debug = len(kept) < len(given) or os.environ.get("EVALKIT_DEBUG", "") not in ("", "0", "false")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names may contain characters that the terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")
    with _handlers(is_debug) as signals, shown_activity():
        code = _exit_code(kept, is_debug)
    # click, and Ray while it waits, raise another exception in place of the handler's
    sys.exit(143 if signals and code == 130 else code)


@contextmanager
def _handlers(is_debug: bool) -> Iterator[list[int]]:
    """Make SIGTERM, which schedulers send at the end of a job's time limit, end the process as Ctrl-C does.

    A second one ends it at once, without loss of a finished batch, as the first does in a forked process. The list has
    the signal once it has come. An exception that ends a thread is printed as one line, too.
    """
    signals: list[int] = []
    installer = os.getpid()

    def terminate(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != installer:  # of a pool that a library has forked
            os.kill(os.getpid(), number)
        signals.append(number)
        raise KeyboardInterrupt

    def report(ended: threading.ExceptHookArgs) -> None:
        if ended.exc_value is not None:
            _print_error(_unexpected(ended.exc_value))

    with ExitStack() as before:
        if not is_debug:
            before.callback(setattr, threading, "excepthook", threading.excepthook)
            threading.excepthook = report
        # Python handles signals in the main thread only; a signal that is ignored or handled already is not changed
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            before.callback(signal.signal, signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, terminate)
        yield signals


def _exit_code(arguments: Sequence[str], is_debug: bool) -> int:
    try:
        code = cli.main(args=arguments, prog_name="evalkit", standalone_mode=False)
    except (SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of a library in Rust is no Exception
        if is_debug:
            traceback.print_exception(error)
        lines, code = _explained(error)
        for line in lines:
            _print_error(line)
    return code if isinstance(code, int) else 0


def _explained(error: BaseException) -> tuple[Sequence[str], int]:
    match error:
        case SeveralErrors():
            return (f"{error.summary}:", *error.problems), error.exit_code
        case EvalkitError():
            return (str(error),), error.exit_code
        case click.exceptions.NoArgsIsHelpError():
            error.show()
            return (), error.exit_code
        case click.ClickException():
            command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "evalkit"
            return (f"{error.format_message().rstrip('.')}; see {command} --help",), error.exit_code
        case OSError():  # also when a path is only looked up: it may be too long
            return (f"{error.filename}: {error.strerror}" if error.filename else str(error),), 1
        case MemoryError():
            return ("out of memory; close other programs, or give a smaller file, model or batch",), 1
        case ResumableAbort():
            return ("interrupted; finished batches are saved: run the same command again to resume",), 130
        case click.Abort() | KeyboardInterrupt():
            return ("interrupted",), 130
        case _:
            return (_unexpected(error),), 1


def _unexpected(error: BaseException) -> str:
    """Write a report about an error that nobody expected, and return the line that names it."""
    reason = f"{type(error).__name__}: {error}"
    shown = reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]}…"
    command = shlex.join(["evalkit", *sys.argv[1:]])
    about = f"evalkit {__version__}, Python {platform.python_version()}, {platform.platform()}\n{command}\n\n"
    try:
        with NamedTemporaryFile(
            "w", prefix="evalkit-error-", suffix=".txt", encoding="utf-8", errors="backslashreplace", delete=False
        ) as file:
            file.write(about + "".join(traceback.format_exception(error)))
        showing = f"a report is in {file.name}"
    except OSError as cause:
        showing = f"no report could be written ({cause.strerror})"
    return f"unexpected error ({shown}); {showing}; --debug shows the traceback"


def _print_error(message: str) -> None:
    """Print an error as one line on standard error; a long one is shortened in the middle, since its end has advice."""
    line = printable(message)
    if len(line) > _LONGEST:
        line = f"{line[: _LONGEST // 2]} … {line[-_LONGEST // 2 :]}"
    click.echo(f"evalkit: {line}", err=True)
