"""Everything that evalkit's speed on a GPU is judged by, measured in 10 minutes.

    python benchmarks/gpu.py --out results/gpu                      # on a machine with a GPU
    python benchmarks/gpu.py --device cpu --tiny --out /tmp/tiny    # the same code on tiny models, to test this script

Parts, each a process with a time limit of its own, to which the time is added that the parts before it left; where one
fails or runs out of time, its output so far is kept and the next one begins:

  tests       gpu_tests.py: the tests marked `gpu`
  suite       whole_suite.py: all 34,507 documents with a random model of 1.3 B parameters in bfloat16, by stage
  kinds       versus_lm_eval.py --kinds: that model and a hybrid one beside lm-eval's at its best batch size
  kernels     start-up checks, compilations, synchronisations, and the share of the matrix rate by task
  in_loop     in_loop.py: evaluation in a training loop, of a plain module of 1.3 B parameters
  workers     cluster.py: one process, one worker, two workers
  generation  longbench_generation.py: beside transformers' `generate`, and the prefill's share of the matrix rate
  variants    variant_models.py: a training step and scoring by the four attentions, 1.2 B parameters

Without a network, --tokenizer names a checkpoint's folder and --data-dir the documents. `generation` uses documents of
random words unless --longbench-data names a folder with LongBench's own. Writes gpu.md and gpu.json after each part;
messages of a part are in a .log file named after it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
LIMITS = {
    "tests": 100,
    "suite": 130,
    "kinds": 130,
    "kernels": 50,
    "in_loop": 30,
    "workers": 90,
    "generation": 50,
    "variants": 20,
}
"""Part → its time limit in seconds."""
TINY = ["--layers", "2", "--hidden", "64", "--inner", "96", "--heads", "4"]
GENERATED = ("trec", "hotpotqa")
"""LongBench tasks that are generated."""


@dataclass(frozen=True)
class Result:
    """What a part printed."""

    part: str
    state: str
    """finished, failed, or out of time."""
    seconds: float
    output: str
    """Markdown."""
    figures: Any = None
    """What the part wrote as JSON, if it did."""


@dataclass
class TaskSpeed:
    """Speed of one task's batches, each scored twice."""

    task: str
    documents: int
    batches: int
    first: float = 0.0
    """Seconds of the first passes."""
    again: float = 0.0
    flops: float = 0.0
    """Necessary arithmetic of one pass, without attention."""

    @classmethod
    def total(cls, speeds: Sequence[TaskSpeed]) -> TaskSpeed:
        """Return the sums over tasks."""
        summed = cls("all", 0, 0)
        for name in ("documents", "batches", "first", "again", "flops"):
            setattr(summed, name, sum(getattr(speed, name) for speed in speeds))
        return summed

    def line(self, rate: float) -> str:
        """Return a line of the table; `rate` is the matrix rate in FLOP/s."""
        seconds = f"{self.first:.2f}", f"{self.again:.2f}"
        speeds = f"{self.documents / self.again:.0f}", f"{self.flops / self.again / rate:.0%}"
        return f"| {' | '.join([self.task, str(self.documents), str(self.batches), *seconds, *speeds])} |"


def main() -> int:
    """Run the parts and write what they print; return 1 if one did not finish."""
    arguments = parse()
    if arguments.part:
        print(kernels(arguments), flush=True)
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    found: list[Result] = []
    spare = 600.0 if arguments.tiny else 0.0
    for part in arguments.only or LIMITS:
        print(f"{part} …", file=sys.stderr, flush=True)
        limit = LIMITS[part] + spare
        result = measured(part, command_of(part, arguments), limit, arguments.out / f"{part}.log")
        spare = max(0.0, limit - result.seconds)
        found.append(with_files(result, arguments.out / part))
        (arguments.out / "gpu.md").write_text(markdown(found, arguments.device))
        (arguments.out / "gpu.json").write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    print(markdown(found, arguments.device))
    return int(any(one.state != "finished" for one in found))


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models and a few documents")
    parser.add_argument("--only", nargs="+", choices=LIMITS, metavar="PART", help="some of the parts")
    parser.add_argument("--longbench-data", type=Path, help="a folder of LongBench's documents")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--tokenizer", default="demo", help="checkpoint to take the tokenizer from")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out"))
    parser.add_argument("--part", choices=["kernels"], help=argparse.SUPPRESS)
    return parser.parse_args()


def command_of(part: str, arguments: argparse.Namespace) -> list[str]:
    """Return the command of a part."""
    model, tiny = str(arguments.out / "model"), arguments.tiny
    data = ["--data-dir", str(arguments.data_dir)] if arguments.data_dir else []
    common = ["--device", arguments.device, *data]
    few = ["--limit", "2"]
    out = ["--out", str(arguments.out / part)]
    if part == "tests":
        words = ["gpu_tests.py"]
    elif part == "suite":
        size = [*TINY, *few, "--tasks", "openbookqa"] if tiny else []
        words = ["whole_suite.py", "--keep", model, "--tokenizer", arguments.tokenizer, *common, *size]
    elif part == "kinds":
        size = ["--size", "tiny", *few, "--tasks", "openbookqa", "--batch-sizes", "4"]
        if not tiny:
            size = ["--size", "large", "--limit", "200", "--tasks", "arc_easy", "piqa", "openbookqa"]
            size += ["--batch-sizes", "64", "128"]
        kinds = ["--kinds", "llama", "falcon_h1", "--dtypes", "bfloat16", "--protocols", "inst", "plain"]
        words = ["versus_lm_eval.py", *kinds, "--model", arguments.tokenizer, *out, *common, *size]
    elif part == "in_loop":
        size = ["--size", "tiny", "--documents", "4"] if tiny else ["--size", "large", "--documents", "500"]
        words = ["in_loop.py", "--dtype", "bfloat16", "--tokenizer", arguments.tokenizer, *out, *common, *size]
    elif part == "variants":
        size = ["--length", "128", "--repeats", "1"] if tiny else ["--size", "1.2b", "--length", "2048", "--batch", "4"]
        words = ["variant_models.py", *size, "--device", arguments.device, "--dtype", "bfloat16"]
    elif part == "generation":
        folder = arguments.longbench_data or write_documents(arguments.out / "longbench", 100 if tiny else 6000)
        size = ["--rows", "1" if tiny else "8", "--max-prompt-tokens", "200" if tiny else "1800"]
        tasks = ["--tasks", ",".join(GENERATED), "--data-dir", str(folder), "--dtype", "bfloat16"]
        words = ["longbench_generation.py", "--model", model, "--device", arguments.device, *tasks, *size]
    elif part == "workers":
        size = [*few, "--tasks", "openbookqa"] if tiny else ["--limit", "300"]
        words = ["cluster.py", "--model", model, *common, *size]
    else:
        words = ["gpu.py", "--part", part, "--out", str(arguments.out), *common, *(["--tiny"] if tiny else [])]
    return [sys.executable, str(HERE / words[0]), *words[1:]]


def with_files(result: Result, folder: Path) -> Result:
    """Return a result with the Markdown and the JSON that its part wrote, complete or not."""
    text, figures = folder / f"{folder.name}.md", folder / f"{folder.name}.json"
    if text.exists():
        result = replace(result, output=text.read_text())
    if figures.exists():
        result = replace(result, figures=json.loads(figures.read_text()))
    return result


def measured(part: str, command: list[str], limit: float, log: Path) -> Result:
    """Run a part's command for at most `limit` seconds; messages go to a file."""
    started = time.perf_counter()
    with log.open("w") as messages:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=messages, text=True, start_new_session=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=limit)
            state = "finished" if process.returncode == 0 else f"failed ({last_line(log)})"
        except subprocess.TimeoutExpired:
            # With the processes that it has started
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            state = f"out of time ({limit:.0f} s)"
    return Result(part, state, time.perf_counter() - started, output.strip())


def last_line(path: Path) -> str:
    """Return the last line of a file that is not empty."""
    return next((line for line in reversed(path.read_text().splitlines()) if line.strip()), "no message")


def markdown(found: list[Result], device: str) -> str:
    """Return the results as Markdown, and what is skipped without a GPU."""
    lines = ["| part | state | seconds |", "|---|---|---|"]
    lines += [f"| {one.part} | {one.state} | {one.seconds:.0f} |" for one in found]
    if not device.startswith("cuda"):
        lines += ["", "Skipped without CUDA: FlexAttention and its compilations, synchronisations, memory allocated."]
    for one in found:
        lines += ["", f"## {one.part}", "", one.output]
    return "\n".join(lines) + "\n"


def kernels(arguments: argparse.Namespace) -> str:
    """Score a sample of each task; return tables of checks, compilations and waits, and of speed by task."""
    import torch
    from suite_documents import choice_requests, encoded, sequences_of
    from versus_lm_eval import matrices, matrix_rate, note, timed

    from evalkit.compatibility.torch import compilations
    from evalkit.models.loading.load import load
    from evalkit.models.loading.locate import locate
    from evalkit.scoring.architecture import auto_budget
    from evalkit.scoring.engine import Engine
    from evalkit.scoring.pack import batches_of

    loaded = load(locate(str(arguments.out / "model")), dtype="bfloat16", device=arguments.device, say=note)
    engine = Engine(loaded.model, auto_budget(loaded.model), note)
    names = ("openbookqa", "winogrande") if arguments.tiny else ()
    requests = choice_requests("inst", names, 4 if arguments.tiny else 500, arguments.data_dir)
    documents = {task: encoded(of_task, loaded.tokenizer, loaded.window) for task, of_task in requests.items()}
    sample = sequences_of([member for members in documents.values() for member in members[:2]])
    check_seconds, _ = timed(lambda: engine.check(sample))
    checked = compilations()
    layers, head = matrices(loaded.model)
    rate = matrix_rate(loaded.model, engine.budget)
    waits: list[int] = []
    compiled: list[int] = []
    speeds: list[TaskSpeed] = []
    for task, members in documents.items():
        batches = list(batches_of(sequences_of(members), engine.budget))
        speed = TaskSpeed(task, len(members), len(batches))
        for batch in batches:
            with counting_waits(torch) as count:
                first, _ = timed(lambda batch=batch: engine.score(batch))
            waits.append(count[0])
            compiled.append(compilations())
            # The first pass over a batch compiles and loads kernels
            again, _ = timed(lambda batch=batch: engine.score(batch))
            positions = len(set(batch.tree.pair_nodes.tolist()))
            speed.first += first
            speed.again += again
            speed.flops += 2.0 * (len(batch.tree.tokens) * layers + positions * head)
        speeds.append(speed)
    cuda = arguments.device.startswith("cuda")
    rows = {
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "torch": torch.__version__,
        "attention": engine.kernel,
        "start-up check": f"{check_seconds:.1f} s",
        "batches": len(compiled),
        "compilations: check, first batch, all": f"{checked}, {compiled[0]}, {compiled[-1]}",
        "synchronisations a batch: median, most": f"{median(waits):g}, {max(waits)}" if cuda else "skipped (CUDA)",
        "matrix rate": f"{rate / 1e12:.2f} TFLOP/s",
        "memory allocated": f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if cuda else "skipped (CUDA)",
    }
    lines = ["| | measured |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items()), ""]
    lines += ["| task | documents | batches | first pass s | again s | documents/s | share of the matrix rate |"]
    lines += ["|---|---|---|---|---|---|---|"]
    lines += [speed.line(rate) for speed in [*speeds, TaskSpeed.total(speeds)]]
    return "\n".join(lines)


@contextmanager
def counting_waits(torch: Any) -> Iterator[list[int]]:
    """Count in a list of one how often the CPU waits for the GPU inside the block; 0 without CUDA."""
    count = [0]
    if not torch.cuda.is_available():
        yield count
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield count
        finally:
            torch.cuda.set_sync_debug_mode("default")
    count[0] = sum("synchroniz" in str(one.message) for one in caught)


def write_documents(folder: Path, words: int) -> Path:
    """Write LongBench files of random words; return their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    dice = random.Random(0)
    vocabulary = ["river", "bridge", "morning", "water", "clock", "winter", "letter", "garden", "silver", "number"]
    for task in GENERATED:
        rows = [
            {
                "input": "Question: Who ?\nType:",
                "context": " ".join(dice.choices(vocabulary, k=words)),
                "answers": ["Person"],
                "length": words,
                "dataset": task,
                "language": "en",
                "all_classes": ["Person", "Place"] if task == "trec" else None,
                "_id": f"{task}-{number}",
            }
            for number in range(8)
        ]
        (folder / f"{task}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


if __name__ == "__main__":
    sys.exit(main())
