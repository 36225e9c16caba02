"""Seconds and forward passes of `evalkit.InLoop` on a plain torch module, as in a training loop.

    python benchmarks/in_loop.py --documents 50
    python benchmarks/in_loop.py --device cuda --dtype bfloat16 --size large --documents 500

A module of nanoGPT's form with random weights (`kinds_of_models.py`) is evaluated several times on the first documents
of a task, each time as a new run. Passes before the first batch are those of start-up checks; tokens of a pass are its
rows × its length, padding included. Prints Markdown; with --out, also writes in_loop.md and in_loop.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from kinds_of_models import SIZES, plain_gpt
from modeling_own import PlainGPT
from versus_lm_eval import machine, note

import evalkit
from evalkit.display import Progress
from evalkit.models.loading.load import load
from evalkit.models.loading.locate import locate


class Pass(NamedTuple):
    """Shape of the ids of one forward pass."""

    rows: int
    length: int


PASSES: list[Pass] = []
"""All forward passes of `CountedGPT`; not an attribute of it, since attributes are part of a module's identity."""


class CountedGPT(PlainGPT):
    """A plain module whose passes are counted."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        PASSES.append(Pass(*ids.shape))
        return super().forward(ids)


class ScoringStart(Progress):
    """Notes when scoring starts, and after how many passes."""

    def __init__(self) -> None:
        super().__init__(live=False)
        self.time = 0.0
        self.passes = 0

    def start(self, total: float, done: float) -> None:
        """Note it."""
        self.time = time.perf_counter()
        self.passes = len(PASSES)
        super().start(total, done)


@dataclass(frozen=True)
class Evaluation:
    """One evaluation."""

    checks: float
    """Seconds before scoring: plan, documents, start-up checks."""
    scoring: float
    """Seconds from the first batch to the results."""
    check_passes: list[Pass]
    passes: list[Pass]


def main() -> None:
    """Evaluate and print the table."""
    arguments = parse()
    tokenizer = load(locate(arguments.tokenizer, say=note), device="cpu", say=note).tokenizer
    module = plain_gpt(arguments.size, tokenizer, arguments.dtype, arguments.device, CountedGPT)
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(number) for number in range(arguments.repeats)]
        evaluations = [evaluated(module, tokenizer, output, arguments) for output in outputs]
    parameters = sum(weight.numel() for weight in module.parameters())
    about = machine(arguments) | {"parameters": parameters, "dtype": arguments.dtype, "documents": arguments.documents}
    about |= {"task": arguments.task, "template": arguments.template}
    text = table(evaluations, about)
    print(text)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        content = {"about": about, "evaluations": [asdict(one) for one in evaluations]}
        (arguments.out / "in_loop.json").write_text(json.dumps(content) + "\n")
        (arguments.out / "in_loop.md").write_text(text + "\n")


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="small", choices=SIZES)
    parser.add_argument("--tokenizer", default="demo", help="checkpoint to take the tokenizer from")
    parser.add_argument("--task", default="arc_easy")
    parser.add_argument("--template", default="inst")
    parser.add_argument("--documents", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def evaluated(module: CountedGPT, tokenizer: Any, output: Path, arguments: argparse.Namespace) -> Evaluation:
    """Evaluate the module as a training loop does."""
    progress = ScoringStart()
    in_loop = evalkit.InLoop(
        "zeroshot8",
        tokenizer=tokenizer,
        tasks=[arguments.task],
        template=arguments.template,
        limit=arguments.documents,
        data_dir=arguments.data_dir,
        allow_unofficial_data=arguments.data_dir is not None,
        output=output,
        name="benchmark",
        on_error="raise",
        progress=progress,
    )
    PASSES.clear()
    started = time.perf_counter()
    in_loop(module, 0)
    ended = time.perf_counter()
    return Evaluation(
        checks=progress.time - started,
        scoring=ended - progress.time,
        check_passes=PASSES[: progress.passes],
        passes=PASSES[progress.passes :],
    )


def table(evaluations: Sequence[Evaluation], about: dict[str, Any]) -> str:
    """Return a table with a line for each evaluation."""
    head = ["evaluation", "s", "before scoring s", "scoring s", "passes of checks", "passes", "rows a pass",
            "tokens a pass", "tokens"]  # fmt: skip
    lines = [
        f"{about['parameters'] / 1e6:.0f} M parameters, {about['dtype']}; {about['documents']} documents of "
        f"{about['task']}, {about['template']}; {about['machine']}, {about['threads']} threads.",
        "",
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
    ]
    for number, evaluation in enumerate(evaluations, 1):
        rows = sum(one.rows for one in evaluation.passes)
        tokens = sum(one.rows * one.length for one in evaluation.passes)
        count = max(1, len(evaluation.passes))
        seconds = evaluation.checks + evaluation.scoring, evaluation.checks, evaluation.scoring
        cells = [str(number), *(f"{value:.2f}" for value in seconds), str(len(evaluation.check_passes))]
        cells += [str(len(evaluation.passes)), f"{rows / count:.1f}", f"{tokens / count:.0f}", str(tokens)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
