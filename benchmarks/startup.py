"""Time of a run of one document beside that of the bare imports it needs.

    python benchmarks/startup.py --repeats 5

The bare imports (`torch`, `lm_eval` and transformers' Llama module) and `evalkit run` with one document of one task run
alternately, each in a new process with warm caches. Prints Markdown: minima and medians of wall time and of CPU time
(user and system) with their ratios to the bare imports', and the stages of one further run. Other work on the machine
affects CPU time less than wall time. Also timed: the same command again, which opens the finished run, and `--help`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

BARE = "import torch; import lm_eval; import transformers.models.llama.modeling_llama"
STAGES = (
    ("evalkit.benchmarks.run", "planned", "planning"),
    ("evalkit.benchmarks.session", "OpenRun.__init__", "journal and documents"),
    ("evalkit.benchmarks.session", "OpenRun.finish", "results"),
)
"""Module, function, and title of each timed stage."""
LATER_STAGES = (
    ("evalkit.models.loading.build", "read_weights", "weights, beside imports"),
    ("evalkit.models.loading.build", "build_model", "building the model"),
    ("evalkit.models.loading.tokenizer", "load_tokenizer", "tokenizer"),
    ("evalkit.scoring.engine", "Engine.check", "start-up check"),
    ("evalkit.scoring.engine", "Engine.score", "scoring"),
)
"""Stages whose modules import torch."""


class Times(NamedTuple):
    """Seconds of one process."""

    wall: float
    cpu: float


def main() -> None:
    """Measure all commands alternately and print the tables."""
    arguments = parse()
    if arguments.stages:
        print_stages(arguments.stages)
        return
    with tempfile.TemporaryDirectory() as folder:
        run = [
            *("run", "--model", arguments.model, "--limit", "1", "--tasks", arguments.task),
            *("--dtype", arguments.dtype, "-o", str(Path(folder) / "runs")),
        ]
        evalkit = [sys.executable, "-m", "evalkit"]
        commands = {
            "bare imports": [sys.executable, "-c", BARE],
            "one document": [*evalkit, *run],
            "the finished run": [*evalkit, *run],
            "--help": [*evalkit, "--help"],
        }
        found: dict[str, list[Times]] = {name: [] for name in commands}
        for repeat in range(arguments.repeats + 1):
            shutil.rmtree(Path(folder) / "runs", ignore_errors=True)
            for name, command in commands.items():
                times = timed(command)
                if repeat:  # the first one fills the caches
                    found[name].append(times)
        print_table(found)
        shutil.rmtree(Path(folder) / "runs", ignore_errors=True)
        subprocess.run([sys.executable, __file__, "--stages", *run], check=True, env=environment())


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--task", default="piqa")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--stages", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser.parse_args()


def environment() -> dict[str, str]:
    """Return the environment, in which Python keeps compiled modules: a warm cache that users have."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def timed(command: Sequence[str]) -> Times:
    """Run a command without its output."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=environment())
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - started
    return Times(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def print_table(found: dict[str, list[Times]]) -> None:
    """Print minima, medians and ratios to the bare imports, of alternating runs."""
    print("| command | wall min | median | ratio | CPU min | median | ratio |\n|---|---|---|---|---|---|---|")
    bare = found["bare imports"]
    for name, times in found.items():
        cells = []
        for field in Times._fields:
            own, base = ([getattr(one, field) for one in several] for several in (times, bare))
            cells += [f"{min(own):.2f}", f"{statistics.median(own):.2f}", f"{min(own) / min(base):.2f}"]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def print_stages(arguments: Sequence[str]) -> None:
    """Run a command in this process and print the seconds of its stages."""
    from evalkit.cli import main as command
    from evalkit.models.loading.spec import ModelSpec

    seconds: dict[str, Times] = {}
    for stage in STAGES:
        time_calls(*stage, seconds)
    load = ModelSpec.load

    def loading(*given: Any) -> Any:
        with stopwatch("imports of torch and transformers", seconds):
            import transformers.modeling_utils  # noqa: F401

            # These modules import torch
            for stage in LATER_STAGES:
                time_calls(*stage, seconds)
        return load(*given)

    ModelSpec.load = loading
    with (
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.suppress(SystemExit),
        stopwatch("whole command but the interpreter's start and exit", seconds),
    ):
        command(list(arguments))
    print("\n| stage | wall | CPU |\n|---|---|---|")
    for title, times in seconds.items():
        print(f"| {title} | {times.wall:.2f} | {times.cpu:.2f} |")


def time_calls(module: str, name: str, title: str, seconds: dict[str, Times]) -> None:
    """Replace a function of a module by one that adds its time to `seconds`."""
    owner: Any = importlib.import_module(module)
    *parents, last = name.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    real = getattr(owner, last)

    @functools.wraps(real)
    def timing(*arguments: Any, **options: Any) -> Any:
        with stopwatch(title, seconds):
            return real(*arguments, **options)

    setattr(owner, last, timing)


@contextlib.contextmanager
def stopwatch(title: str, seconds: dict[str, Times]) -> Iterator[None]:
    """Add the block's time, of all threads, to `seconds`."""
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        yield
    finally:
        before = seconds.get(title, Times(0.0, 0.0))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        seconds[title] = Times(before.wall + wall, before.cpu + cpu)


if __name__ == "__main__":
    main()
