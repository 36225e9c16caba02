"""Everything that evalkit's speed on a GPU is judged by, measured in 10 minutes.

    python benchmarks/gpu.py --out results/gpu                      # on a machine with a GPU
    python benchmarks/gpu.py --device cpu --toy --out /tmp/toy      # the same code on a tiny model, to test this script

Parts, each a process with a time limit of its own; where one fails or runs out of time, its output so far is kept and
the next one begins:

  suite       whole_suite.py: all documents with a random model of 1.2 B parameters in bfloat16
  lm_eval     versus_lm_eval.py: beside lm-eval's model at its best batch size, on a sample
  kernels     compilations and synchronisations by batch, and the share of the matrix rate
  variants    variant_models.py: a training step and scoring by the four attentions, 1.2 B parameters
  generation  longbench_generation.py: beside transformers' `generate`, and the prefill's share of the matrix rate
  workers     cluster.py: one process, one worker, two workers

`generation` uses documents of random words unless --longbench-data names a folder with LongBench's own. Writes
gpu.md and gpu.json after each part.
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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
LIMITS = {"suite": 180, "lm_eval": 110, "kernels": 70, "variants": 40, "generation": 70, "workers": 130}
"""Part → its time limit in seconds."""
TOY = ["--layers", "2", "--hidden", "64", "--inner", "96", "--heads", "4"]
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


def main() -> int:
    """Run the parts and write what they print; return 1 if one did not finish."""
    arguments = parse()
    if arguments.part:
        print(kernels(arguments))
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    found: list[Result] = []
    for part in arguments.only or LIMITS:
        print(f"{part} …", file=sys.stderr, flush=True)
        result = measured(part, command_of(part, arguments), LIMITS[part], arguments.out / f"{part}.log")
        tables = arguments.out / part / "tables.md"
        found.append(replace(result, output=tables.read_text()) if tables.exists() else result)
        (arguments.out / "gpu.md").write_text(markdown(found, arguments.device))
        (arguments.out / "gpu.json").write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    print(markdown(found, arguments.device))
    return int(any(one.state != "finished" for one in found))


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--toy", action="store_true", help="a tiny model and a few documents")
    parser.add_argument("--only", nargs="+", choices=LIMITS, metavar="PART", help="some of the parts")
    parser.add_argument("--longbench-data", type=Path, help="a folder of LongBench's documents")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--tokenizer", default="demo", help="checkpoint to take the tokenizer from")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out"))
    parser.add_argument("--part", choices=["kernels"], help=argparse.SUPPRESS)
    return parser.parse_args()


def command_of(part: str, arguments: argparse.Namespace) -> list[str]:
    """Return the command of a part."""
    model, toy = str(arguments.out / "model"), arguments.toy
    data = ["--data-dir", str(arguments.data_dir)] if arguments.data_dir else []
    common = ["--device", arguments.device, *data]
    few = ["--limit", "2"]
    if part == "suite":
        size = [*TOY, *few, "--tasks", "openbookqa"] if toy else []
        words = ["whole_suite.py", "--keep", model, "--tokenizer", arguments.tokenizer, *common, *size]
    elif part == "variants":
        size = ["--length", "128", "--repeats", "1"] if toy else ["--size", "1.2b", "--length", "2048", "--batch", "4"]
        words = ["variant_models.py", *size, "--device", arguments.device, "--dtype", "bfloat16"]
    elif part == "lm_eval":
        size = ["--tasks", "openbookqa", *few] if toy else ["--limit", "60"]
        dtype, out = ["--dtypes", "bfloat16"], ["--out", str(arguments.out / "lm_eval")]
        words = ["versus_lm_eval.py", "--model", model, *dtype, *out, *common, *size]
    elif part == "generation":
        folder = arguments.longbench_data or write_documents(arguments.out / "longbench", 100 if toy else 6000)
        size = ["--rows", "1" if toy else "8", "--max-prompt-tokens", "200" if toy else "1800"]
        tasks = ["--tasks", ",".join(GENERATED), "--data-dir", str(folder), "--dtype", "bfloat16"]
        words = ["longbench_generation.py", "--model", model, "--device", arguments.device, *tasks, *size]
    elif part == "workers":
        size = [*few, "--tasks", "openbookqa"] if toy else ["--limit", "300"]
        words = ["cluster.py", "--model", model, *common, *size]
    else:
        words = ["gpu.py", "--part", part, "--out", str(arguments.out), *common, *(["--toy"] if toy else [])]
    return [sys.executable, str(HERE / words[0]), *words[1:]]


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
            state = f"out of time ({limit:g} s)"
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
    """Score a sample of each task; return a table of compilations, waits and speed by batch."""
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
    names = ("openbookqa", "winogrande") if arguments.toy else ()
    requests = choice_requests("inst", names, 4 if arguments.toy else 500, arguments.data_dir)
    documents = [encoded(task, loaded.tokenizer, loaded.window) for task in requests.values()]
    engine.check(sequences_of(documents[0][:2]))
    checked = compilations()
    layers, head = matrices(loaded.model)
    rate = matrix_rate(loaded.model, engine.budget)
    waits, compiled, flops, total = [], [], 0.0, 0.0
    tasks = [sequences_of(members) for members in documents]
    for batch in (batch for members in tasks for batch in batches_of(members, engine.budget)):
        with counting_waits(torch) as count:
            seconds, _ = timed(lambda batch=batch: engine.score(batch))
        waits.append(count[0])
        compiled.append(compilations())
        # The first batch of a size may compile
        if len(compiled) > 1:
            total += seconds
            flops += 2.0 * (len(batch.tree.tokens) * layers + len(set(batch.tree.pair_nodes.tolist())) * head)
    cuda = arguments.device.startswith("cuda")
    rows = {
        "attention": engine.kernel,
        "batches": len(compiled),
        "compilations: check, first batch, all": f"{checked}, {compiled[0]}, {compiled[-1]}",
        "synchronisations a batch: median, most": f"{median(waits):g}, {max(waits)}" if cuda else "skipped (CUDA)",
        "share of the matrix rate": f"{flops / rate / total:.0%} of {rate / 1e12:.2f} TFLOP/s" if total else "–",
        "memory allocated": f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if cuda else "skipped (CUDA)",
    }
    return "\n".join(["| | measured |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


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
