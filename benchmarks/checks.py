"""CPU seconds of the start-up checks, and of the checks that run within scoring: 24 documents of BoolQ.

    OMP_NUM_THREADS=1 python benchmarks/checks.py --dtypes float32 bfloat16 --protocols inst plain

Nothing is taken from evalkit's cache of passed checks. The last two lines of a dtype are of greater lengths: a row of
4,096 tokens with a sequence of 2,048.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from suite_documents import choice_requests, encoded, score, sequences_of

from evalkit.models.loading.load import load
from evalkit.models.loading.locate import locate
from evalkit.scoring.architecture import auto_budget
from evalkit.scoring.engine import Engine
from evalkit.scoring.sharing import BatchLengths, SharingCheck

CHECKS = ("head", "lookahead", "sharing")


def main() -> None:
    """Measure each dtype and protocol, and print a line for each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtypes", nargs="+", default=("float32", "bfloat16"))
    parser.add_argument("--protocols", nargs="+", default=("inst", "plain"))
    arguments = parser.parse_args()
    spent = dict.fromkeys(CHECKS, 0.0)
    for name in CHECKS:
        count_time(name, spent)
    print(f"{torch.get_num_threads()} threads; CPU and wall seconds")
    for dtype in arguments.dtypes:
        loaded = load(locate(arguments.model), dtype=dtype, device=arguments.device)
        for protocol in arguments.protocols:
            requests = choice_requests(protocol, ("arc_easy", "boolq"), 24)
            documents = {task: encoded(own, loaded.tokenizer, loaded.window) for task, own in requests.items()}
            engine = Engine(loaded.model, auto_budget(loaded.model), print)
            first = sequences_of(documents["arc_easy"][:2])
            line(f"{dtype} {protocol}: start", partial(engine.check, first), spent)
            for repeat in ("first", "second"):
                line(f"{dtype} {protocol}: BoolQ, {repeat} pass", partial(score, engine, documents["boolq"]), spent)
        check = SharingCheck(loaded.model)
        line(f"{dtype}: greater lengths", partial(check.sharing, "tiles", BatchLengths(4096, 2048), False), spent)
        line(f"{dtype}: longer sequences", partial(check.lookahead, 2048, True, False, False), spent)


def count_time(name: str, spent: dict[str, float]) -> None:
    """Add the CPU seconds of a check to `spent`."""
    real = getattr(SharingCheck, name)

    def counted(*given: Any, **options: Any) -> str:
        start = time.process_time()
        try:
            result: str = real(*given, **options)
            return result
        finally:
            spent[name] += time.process_time() - start

    setattr(SharingCheck, name, counted)


def line(title: str, work: Callable[[], object], spent: dict[str, float]) -> None:
    """Run a part and print its seconds, and those of the checks in it."""
    before = dict(spent)
    start, wall = time.process_time(), time.perf_counter()
    work()
    seconds, waited = time.process_time() - start, time.perf_counter() - wall
    checks = ", ".join(f"{name} {spent[name] - before[name]:.1f}" for name in CHECKS)
    print(f"{title}: {seconds:.1f} s ({waited:.1f} s); checks: {checks}", flush=True)


if __name__ == "__main__":
    main()
