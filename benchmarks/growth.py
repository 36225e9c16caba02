"""Growth of time and memory with the number of documents of one task.

    python benchmarks/growth.py --task arc_easy --limits 100 400 1600

Each size runs in a separate process, so that its memory is measured separately. Prints Markdown: seconds of tokenising,
planning and scoring, milliseconds per document, and the peak resident memory beyond the loaded model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from versus_lm_eval import memory_now, note, watching


def main() -> None:
    """Run every size and print the table."""
    arguments = parse()
    if arguments.one:
        print(json.dumps(measure(arguments, arguments.limits[0])))
        return
    print("| documents | seconds | ms a document | MiB |\n|---|---|---|---|", flush=True)
    for limit in arguments.limits:
        command = [sys.executable, __file__, *sys.argv[1:], "--one", "--limits", str(limit)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        documents, seconds, memory = json.loads(output.splitlines()[-1])
        row = (documents, f"{seconds:.1f}", f"{1000 * seconds / documents:.1f}", f"{memory / 2**20:.0f}")
        print(f"| {' | '.join(map(str, row))} |", flush=True)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--task", default="arc_easy")
    parser.add_argument("--limits", type=int, nargs="+", default=(100, 400, 1600))
    parser.add_argument("--template", default="inst")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(arguments: argparse.Namespace, limit: int) -> tuple[int, float, int]:
    """Return (documents, seconds, bytes) of one size."""
    from suite_documents import choice_requests, encoded, score

    from evalkit.models.loading.load import load
    from evalkit.models.loading.locate import locate
    from evalkit.scoring.architecture import auto_budget
    from evalkit.scoring.engine import Engine

    [requests] = choice_requests(arguments.template, (arguments.task,), limit, arguments.data_dir).values()
    loaded = load(locate(arguments.model, say=note), dtype=arguments.dtype, device=arguments.device, say=note)
    engine = Engine(loaded.model, auto_budget(loaded.model), note)
    baseline = memory_now(loaded.model.device)
    with watching(loaded.model.device) as peak:
        started = time.perf_counter()
        score(engine, encoded(requests, loaded.tokenizer, loaded.window))
        seconds = time.perf_counter() - started
    return len(requests.questions), seconds, peak[0] - baseline


if __name__ == "__main__":
    main()
