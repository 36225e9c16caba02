"""Run the tests marked `gpu`; print the result and the message of each as soon as it ends.

    python benchmarks/gpu_tests.py --seconds 40

A test that takes longer than the limit fails, so that one does not keep the others from running. Prints a list in
Markdown; whole messages go to standard error. Exits with 1 if a test failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import IO, Any

import pytest

ROOT = Path(__file__).parents[1]
ORDER = ("scoring", "benchmarks", "generation", "models")
"""Folders whose tests come first."""
MARKS = ("CUDA", "mark.gpu")
"""Files with tests on a GPU have one of these texts."""


class AtOnce:
    """Prints results as they come, and limits the time of each test."""

    def __init__(self, output: IO[str], seconds: int) -> None:
        self.counts = Counter[str]()
        self._output = output
        self._seconds = seconds

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, Any, Any]:
        """Run a test for so many seconds at most."""

        def stop(*_: Any) -> None:
            raise TimeoutError(f"longer than {self._seconds} s")

        before = signal.signal(signal.SIGALRM, stop)
        signal.alarm(self._seconds)
        try:
            return (yield)
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print the result of a test, or of a set-up that failed or skipped it."""
        if report.when != "call" and report.outcome == "passed":
            return
        self.counts[report.outcome] += 1
        message = ""
        if report.failed:
            lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
            message = f": {' '.join(lines[0].split()[1:])[:300]}" if lines else ""
            print(f"{report.nodeid}\n{report.longreprtext}\n", file=sys.stderr, flush=True)
        print(f"- {report.outcome}, {report.duration:.1f} s, {report.nodeid}{message}", file=self._output, flush=True)


def main() -> int:
    """Run the tests and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=40, help="time limit of a test")
    arguments = parser.parse_args()
    # pytest captures what is printed to the standard streams
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    results = AtOnce(output, arguments.seconds)
    options = ["-q", "-m", "gpu", "--tb=no", "-p", "no:cacheprovider"]
    code = pytest.main([*options, *files()], plugins=[results])
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(results.counts.items()))
    print(f"\n{counts or 'no tests'}", file=output, flush=True)
    return int(code)


def files() -> list[str]:
    """Return the files with tests on a GPU."""
    found = [path for path in (ROOT / "tests").rglob("test_*.py") if any(text in path.read_text() for text in MARKS)]
    ranks = {folder: rank for rank, folder in enumerate(ORDER)}

    def place(path: Path) -> tuple[int, str]:
        folder = path.relative_to(ROOT / "tests").parts[0]
        return ranks.get(folder, len(ORDER)), str(path)

    return [str(path.relative_to(ROOT)) for path in sorted(found, key=place)]


if __name__ == "__main__":
    sys.exit(main())
