"""Ratios of evalkit's speed and memory, kept from run to run, so that no regression goes unseen.

    python benchmarks/track.py                       # all measurements, about five minutes on two cores
    python benchmarks/track.py --only help journal   # some of them
    python benchmarks/track.py --strict              # exit code 1 also if a ratio is worse by more than 10 %

Each measurement is a ratio of two numbers of the same run on the same machine, never a time, since other work on the
machine slows both sides. Each has a process of its own. The ratios of the last 20 runs are kept in a JSON file with
date, version and machine. A ratio more than 10 % from the median of earlier runs on the same kind of machine is marked.
Times are the shortest of three, alternating between the two sides. The exit code is 1 if a measurement fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

KEPT = 20
"""Runs in the file."""
MOVED = 0.1
"""Relative difference from the median that is marked."""
EVALKIT = [sys.executable, "-m", "evalkit"]


@dataclass(frozen=True)
class Measured:
    """The ratios of one run."""

    date: str
    version: str
    machine: str
    """Processor and threads; only runs with the same are compared."""
    ratios: dict[str, float]


@dataclass(frozen=True)
class Change:
    """A ratio beside those of earlier runs."""

    name: str
    ratio: float
    median: float | None
    """Of earlier runs on the same kind of machine; None without any."""
    runs: int
    """Number of those runs."""

    @property
    def moved(self) -> float:
        """Return the relative difference from the median; 0 without one."""
        return self.ratio / self.median - 1 if self.median else 0.0

    @property
    def verdict(self) -> str:
        """Return "better" or "worse" where the ratio has moved, else ""."""
        if abs(self.moved) <= MOVED:
            return ""
        return "better" if (self.moved > 0) == MEANINGS[self.name].more_is_better else "worse"


@dataclass(frozen=True)
class Meaning:
    """What a ratio is."""

    text: str
    more_is_better: bool = False


MEANINGS = {
    "lm_eval": Meaning("lm-eval's seconds of scoring beside evalkit's, plain, float32", more_is_better=True),
    "matrix_share": Meaning("arithmetic of that scoring beside the machine's matrix rate", more_is_better=True),
    "memory": Meaning("peak memory of that scoring, without the weights, beside the weights"),
    "one_document": Meaning("command for one document beside the imports of torch, lm_eval and a Llama"),
    "help": Meaning("`evalkit --help` beside an empty Python program"),
    "planning": Meaning("time of encoding and planning 1,000 questions beside the tokenizer's own, one thread"),
    "journal": Meaning("bytes of the journal for each row of the score table"),
    "report": Meaning("`evalkit report` of 100 documents beside the import of pandas and scipy"),
}
"""Ratio → what it is."""


def main() -> int:
    """Measure, print what moved, and store; return the exit code."""
    arguments = parse()
    if arguments.measure:
        print(json.dumps(MEASUREMENTS[arguments.measure]()))
        return 0
    history = read(arguments.file)
    parts = {name: measured(name) for name in arguments.only or MEASUREMENTS}
    ratios = {name: ratio for part in parts.values() for name, ratio in part.items()}
    now = Measured(datetime.now(UTC).isoformat(timespec="seconds"), version(), machine(), ratios)
    found = changes(now, history)
    print(table(found))
    if ratios:
        write(arguments.file, [*history, now])
    worse = arguments.strict and any(one.verdict == "worse" for one in found)
    return int(worse or not all(parts.values()))


def parse() -> argparse.Namespace:
    """Parse the command line."""
    meanings = "\n".join(f"  {name:13} {meaning.text}" for name, meaning in MEANINGS.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nratios:\n{meanings}\n", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(MEASUREMENTS)
    parser.add_argument("--only", nargs="+", choices=MEASUREMENTS, metavar="NAME", help=f"some of: {names}")
    parser.add_argument("--file", type=Path, default=Path(__file__).with_name("track.json"), help="the stored ratios")
    parser.add_argument("--strict", action="store_true", help="exit code 1 also if a ratio is worse by more than 10 %%")
    parser.add_argument("--measure", choices=MEASUREMENTS, help=argparse.SUPPRESS)
    return parser.parse_args()


def changes(now: Measured, history: Sequence[Measured]) -> list[Change]:
    """Compare the ratios of a run with those of earlier runs on the same kind of machine."""
    found = []
    for name, ratio in now.ratios.items():
        earlier = [one.ratios[name] for one in history if one.machine == now.machine and name in one.ratios]
        found.append(Change(name, ratio, median(earlier) if earlier else None, len(earlier)))
    return found


def table(found: Sequence[Change]) -> str:
    """Return the comparison as a Markdown table, with what moved in the last column."""
    lines = ["| ratio | now | median before | runs | moved | |", "|---|---|---|---|---|---|"]
    for one in found:
        before = "–" if one.median is None else f"{one.median:.3g}"
        moved = "–" if one.median is None else f"{one.moved:+.0%}"
        cells = (one.name, f"{one.ratio:.3g}", before, one.runs, moved, one.verdict)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", *(f"{one.name}: {MEANINGS[one.name].text}" for one in found if one.verdict)]
    return "\n".join(lines).rstrip()


def read(path: Path) -> list[Measured]:
    """Read the stored runs; none where the file does not exist."""
    return [Measured(**one) for one in json.loads(path.read_text())] if path.exists() else []


def write(path: Path, history: Sequence[Measured]) -> None:
    """Store the latest runs."""
    path.write_text(json.dumps([asdict(one) for one in history[-KEPT:]], indent=1) + "\n")


def measured(name: str) -> dict[str, float]:
    """Return the ratios of one measurement, made in a process of its own; none, with a message, if it fails."""
    command = [sys.executable, __file__, "--measure", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if done.returncode:
        print(f"{name}: failed with exit code {done.returncode}", file=sys.stderr)
        return {}
    ratios: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return ratios


def machine() -> str:
    """Return the kind of machine."""
    from versus_lm_eval import cpu_name

    return f"{cpu_name()}, {os.cpu_count()} threads"


def version() -> str:
    """Return evalkit's version."""
    from evalkit import __version__

    return __version__


def beside(ours: Callable[[], Any], theirs: Callable[[], Any], turns: int = 3) -> float:
    """Return the shortest time of one call beside that of another, alternating."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(turns):
        for work, found in zip((ours, theirs), times, strict=True):
            started = time.perf_counter()
            work()
            found.append(time.perf_counter() - started)
    return min(times[0]) / min(times[1])


def run_command(*command: str | Path) -> None:
    """Run a command without its output."""
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def run_documents(folder: str | Path, limit: int) -> Path:
    """Run `evalkit run` on some documents of OpenBookQA; return the run's folder."""
    output = Path(tempfile.mkdtemp(dir=folder))
    options = ["--model", "demo", "--tasks", "openbookqa", "--limit", str(limit), "--output", output]
    run_command(*EVALKIT, "run", *options)
    return next(output.glob("*/results.json")).parent


def scoring() -> dict[str, float]:
    """Score some documents by evalkit and by lm-eval's model."""
    from versus_lm_eval import compare, memory_now, note

    from evalkit.models.loading.load import load
    from evalkit.models.loading.locate import locate

    loaded = load(locate("demo", say=note), dtype="float32", device="cpu", say=note)
    chosen = argparse.Namespace(tasks=["openbookqa"], limit=40, num_fewshot=0, subjects=(), data_dir=None)
    [row] = compare(loaded, "float32", "plain", chosen, {}, {"baseline": memory_now(loaded.model.device)})
    weights = sum(one.numel() * one.element_size() for one in loaded.model.parameters())
    share = row.flops / row.rate / row.ours
    return {"lm_eval": row.theirs / row.ours, "matrix_share": share, "memory": row.memory / weights}


def one_document() -> dict[str, float]:
    """Start a run of one document."""
    from startup import BARE

    with tempfile.TemporaryDirectory() as folder:
        return {
            "one_document": beside(lambda: run_documents(folder, 1), lambda: run_command(sys.executable, "-c", BARE))
        }


def show_help() -> dict[str, float]:
    """Print the help."""
    ours, theirs = (*EVALKIT, "--help"), (sys.executable, "-c", "pass")
    return {"help": beside(lambda: run_command(*ours), lambda: run_command(*theirs), turns=7)}


def planning() -> dict[str, float]:
    """Encode and plan questions, on one thread."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from suite_documents import choice_requests, encoded, sequences_of

    from evalkit.models.loading.load import load
    from evalkit.models.loading.locate import locate
    from evalkit.scoring.pack import plan

    tokenizer = load(locate("demo"), device="cpu").tokenizer
    [requests] = choice_requests("inst", ("hellaswag",), 1000).values()

    def ours() -> None:
        plan(sequences_of(encoded(requests, tokenizer, 2048)), 2048)

    documents = encoded(requests, tokenizer, 2048)
    texts = [tokenizer.decode(score.tokens) for document in documents for score in document.scores]
    return {"planning": beside(ours, lambda: tokenizer.backend_tokenizer.encode_batch(texts))}


def journal() -> dict[str, float]:
    """Measure the journal of a run."""
    from evalkit.comparison.comparison import load_run

    with tempfile.TemporaryDirectory() as folder:
        run = load_run(run_documents(folder, 25))
        size = sum(path.stat().st_size for path in run.folder.glob("journal*"))
        return {"journal": size / len(run.scores)}


def report() -> dict[str, float]:
    """Write the page of a run."""
    imports = (sys.executable, "-c", "import pandas, scipy.stats")
    with tempfile.TemporaryDirectory() as folder:
        run, page = run_documents(folder, 100), Path(folder) / "page.html"
        return {
            "report": beside(lambda: run_command(*EVALKIT, "report", run, "-o", page), lambda: run_command(*imports))
        }


MEASUREMENTS: dict[str, Callable[[], dict[str, float]]] = {
    "scoring": scoring,
    "one_document": one_document,
    "help": show_help,
    "planning": planning,
    "journal": journal,
    "report": report,
}
"""Measurement → the function that makes it; one may give several ratios."""

if __name__ == "__main__":
    sys.exit(main())
