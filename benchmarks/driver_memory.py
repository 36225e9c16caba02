"""Memory of a cluster's driver with many finished rows, 125,000 for each checkpoint, and the seconds that it takes.

    python benchmarks/driver_memory.py --checkpoints 32

Makes small checkpoints whose journals have random scores of all official documents but the last twenty of each task,
has two workers compute the rest, and prints the peak resident memory of the driver.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

_LEFT = 20
"""Documents of each task that are not finished."""
_BATCH = 60
"""Documents of a journal's line."""


def main() -> None:
    """Make the journals in another process, so that its memory does not count, and run the driver."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--data-dir", type=Path)
    arguments = parser.parse_args()
    import multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        maker = multiprocessing.get_context("spawn").Process(target=make, args=(root, arguments))
        maker.start()
        maker.join()
        assert maker.exitcode == 0
        drive(root, arguments)


def options(root: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of every run."""
    return {"output": root / "runs", "device": "cpu", "dtype": "float32", "data_dir": arguments.data_dir}


def make(root: Path, arguments: argparse.Namespace) -> None:
    """Make the checkpoints and their journals."""
    from evalkit.benchmarks.run import planned
    from evalkit.benchmarks.session import Prepared, opened
    from evalkit.cache import remembering
    from evalkit.models.loading.spec import model_spec
    from evalkit.requests.requests import Facts
    from evalkit.requests.rows import ScoredRow
    from evalkit.runs.journal import Entry
    from evalkit.runs.traits import place_of

    rng = np.random.default_rng(0)
    place = place_of("cpu", "tiles")
    spec = model_spec("demo")
    tokenizer = spec.load(spec.locate(), print).tokenizer
    with remembering():
        for number in range(arguments.checkpoints):
            write_checkpoint(root / f"model{number}", number, tokenizer)
            plan: Any = planned(root / f"model{number}", options(root, arguments), lambda _: None)
            facts = Facts(2048, 2048, True)
            with opened(plan, print) as run:
                run.start(Prepared(facts, {"token_budget": 2048}, place, None))
                for task, questions in plan.questions.items():
                    for start in range(0, len(questions) - _LEFT, _BATCH):
                        part = questions[start : min(start + _BATCH, len(questions) - _LEFT)]
                        rows = [random_row(one, choice, rng) for one in part for choice in range(len(one.choices))]
                        run.finished.append(Entry(task, start // _BATCH, 1.0, place), rows, ScoredRow)
            print(f"journal {number + 1} of {arguments.checkpoints}", flush=True)


def random_row(question: Any, choice: int, rng: np.random.Generator) -> Any:
    """Return a row of a choice with random log-likelihoods of its five segments."""
    from evalkit.requests.rows import ScoredRow

    return ScoredRow(
        document=question.identity,
        choice=choice,
        part=0,
        parts=1,
        texts=question.texts_digest,
        segments=[0, 1, 2, 3, 4],
        tokens=[3, 9, 40, 5, 1],
        bytes=[],
        likelihoods=(-rng.random(5) * 50).tolist(),
        greedy=None,
        truncated=0,
        straddles=0,
    )


def write_checkpoint(folder: Path, seed: int, tokenizer: Any) -> None:
    """Write a small Llama with random weights and a real tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=2048, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def drive(root: Path, arguments: argparse.Namespace) -> None:
    """Run the driver and print its memory."""
    from evalkit.benchmarks.run import planned
    from evalkit.cache import remembering
    from evalkit.display import Progress
    from evalkit.studies.cluster.driver import ClusterRunner
    from evalkit.studies.cluster.resources import ClusterOptions
    from evalkit.studies.running import Job

    progress = Progress(live=False)
    with remembering():
        names = [f"model{number}" for number in range(arguments.checkpoints)]
        jobs = [Job(name, planned(root / name, options(root, arguments), lambda _: None)) for name in names]
        started = time.perf_counter()
        ends: list[float] = []
        outcomes = ClusterRunner(ClusterOptions(workers=arguments.workers))(
            jobs, progress, lambda _: ends.append(time.perf_counter() - started)
        )
    assert {one.state for one in outcomes} == {"finished"}, [one.message for one in outcomes]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{arguments.checkpoints} checkpoints: {ends[-1]:.0f} s, peak memory of the driver {peak:.0f} MiB")


if __name__ == "__main__":
    main()
