"""Speed of evalkit and of lm-eval's Hugging Face model: one process, one model, the same documents, task by task.

    python benchmarks/versus_lm_eval.py --limit 100 --out docs/measurements/performance
    python benchmarks/versus_lm_eval.py --kinds llama mamba qwen3_next falcon_h1 remote plain --limit 60 \\
        --tasks arc_easy piqa openbookqa

Both score the same token sequences: under `plain` lm-eval's own requests, under `inst` the paper's sequences, which
lm-eval receives whole. lm-eval runs unmodified, at the best of its batch sizes, found on the first task. Times are of
scoring; ours include planning and the building of trees (the next while one is scored, as in a run), and neither
includes tokenising.

The machine's matrix rate is measured in the same run, on the model's own weights at the batch that evalkit uses. "Of
machine" is the necessary arithmetic over that rate and the wall time: distinct tokens × 2 × the parameters of the
layers' matrices, and scored positions × 2 × those of the output head. Attention's own products are excluded, so it
understates. Memory is the peak resident (on a GPU: allocated) memory beyond the loaded model.

Writes tables.md, figures.json and speed.svg.

With `--kinds`, models of several kinds with random weights take the checkpoint's place; see `versus_lm_eval_kinds.py`.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from kinds_of_models import KINDS, SIZES
from suite_documents import choice_requests, encoded, score, sequences_of

from evalkit import __version__
from evalkit.models.loading.load import load
from evalkit.models.loading.locate import locate
from evalkit.requests.requests import ScoreDocument
from evalkit.requests.rows import ScoredRow
from evalkit.runs.score_table import CONTINUATION
from evalkit.scoring.architecture import auto_budget
from evalkit.scoring.engine import Engine
from evalkit.scoring.pack import TreeBatch

BATCH_SIZES = (4, 8, 16, 32)
"""Batch sizes of lm-eval's model; the fastest is used."""
GPU_BATCH_SIZES = (16, 32, 64, 128)
CLOCK: Callable[[], float] = time.perf_counter
"""Of `timed`. `time.process_time` counts a single thread's seconds on a CPU that other processes use too."""


@dataclass
class Row:
    """Measurements of one task under one protocol and dtype, in seconds, tokens and bytes; log-likelihoods in nats."""

    protocol: str
    dtype: str
    task: str
    documents: int
    ours: float
    theirs: float
    tokens: int
    """Distinct tokens, including those of the trunks."""
    batches: int
    flops: float
    rate: float
    """The machine's matrix rate in this dtype, FLOP/s."""
    memory: int
    difference: float
    """Largest relative difference of a log-likelihood."""
    agree: tuple[int, int]
    """Documents with evalkit's float32 prediction: ours, lm-eval's. (0, 0) if unknown."""


def main() -> None:
    """Run the comparison and write its tables and picture."""
    arguments = parse()
    if arguments.kinds:
        from versus_lm_eval_kinds import compare_kinds

        compare_kinds(arguments)
    else:
        compare_checkpoint(arguments)
    note(f"written: {arguments.out}")


def compare_checkpoint(arguments: argparse.Namespace) -> None:
    """Compare by one checkpoint."""
    rows, exact = [], {}
    about = {"limit": arguments.limit, "shots": arguments.num_fewshot, **machine(arguments)}
    for dtype in arguments.dtypes or ("float32", "bfloat16"):
        loaded = load(locate(arguments.model, say=note), dtype=dtype, device=arguments.device, say=note)
        about["baseline"] = memory_now(loaded.model.device)
        about["model"] = f"{loaded.name}, {loaded.parameters / 1e6:.0f} M parameters"
        for protocol in arguments.protocols:
            rows += list(compare(loaded, dtype, protocol, arguments, exact, about))
            write(arguments.out, rows, about)
        del loaded


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--kinds", nargs="+", default=(), choices=KINDS, help="--model gives their tokenizer only")
    parser.add_argument("--size", default="small", choices=SIZES, help="of the kinds")
    parser.add_argument("--repeats", type=int, default=3, help="passes of the kinds, of which medians are taken")
    parser.add_argument("--cpu-seconds", action="store_true", help="of the kinds: one thread, its seconds")
    parser.add_argument("--limit", type=int, default=100, help="documents of each task")
    parser.add_argument("--tasks", nargs="*", default=(), help="tasks of zeroshot8; default: all")
    parser.add_argument("--num-fewshot", type=int, default=0)
    parser.add_argument("--subjects", nargs="*", default=(), help="only these subjects, such as mmlu_anatomy")
    parser.add_argument("--protocols", nargs="+", default=("plain", "inst"), choices=("plain", "inst"))
    parser.add_argument("--dtypes", nargs="+", default=(), help="default: float32, of a checkpoint bfloat16 too")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=(), help="of lm-eval, of which the best is used")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out"))
    return parser.parse_args()


def note(line: str) -> None:
    """Print a message on standard error."""
    print(line, file=sys.stderr, flush=True)


def machine(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return a description of the machine and versions."""
    name = torch.cuda.get_device_name() if arguments.device.startswith("cuda") else cpu_name()
    return {
        "machine": name,
        "threads": torch.get_num_threads(),
        "versions": {"evalkit": __version__} | {p: version(p) for p in ("lm-eval", "torch", "transformers")},
        "python": platform.python_version(),
    }


def cpu_name() -> str:
    """Return the name of the processor."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def compare(
    loaded: Any, dtype: str, protocol: str, arguments: argparse.Namespace, exact: dict[Any, int], about: dict[str, Any]
) -> Iterator[Row]:
    """Measure one protocol in one dtype, task by task; `exact` collects the predictions in float32."""
    engine = Engine(loaded.model, auto_budget(loaded.model), note)
    documents = documents_of(loaded, protocol, arguments)
    sample = next(iter(documents.values()))
    engine.check(sequences_of(sample[:2]))
    rate = matrix_rate(loaded.model, engine.budget)
    about[f"rate_{dtype}"], about["bandwidth"] = rate, bandwidth(loaded.model.device)
    about["budget"], about["kernel"] = engine.budget, engine.kernel
    peer = best_peer(loaded, sample, protocol)
    for task, members in documents.items():
        row = Row(protocol, dtype, task, len(members), 0, 0, 0, 0, 0, rate, 0, 0, (0, 0))
        with watching(loaded.model.device) as peak:
            row.ours, (mine, batches) = timed(lambda members=members: score(engine, members))
        row.memory = peak[0] - about["baseline"]
        count(row, batches, loaded.model)
        row.theirs, theirs = timed(lambda members=members: peer(members))
        ours = [likelihood(row, protocol) for rows in mine for row in rows]
        row.difference = largest_difference(ours, theirs)
        counts = [1 if protocol == "plain" else len(s.tokens) - 1 for one in members for s in one.scores]
        key = (protocol, task)
        if dtype == "float32":
            exact[key] = decisions(members, ours, counts)
        elif key in exact:
            agreed = [decisions(members, found, counts) == exact[key] for found in (ours, theirs)]
            row.agree = (int(agreed[0].sum()), int(agreed[1].sum()))
        note(f"{protocol} {dtype} {task}: {row.ours:.1f} s against {row.theirs:.1f} s, {row.theirs / row.ours:.2f}x")
        yield row


def documents_of(loaded: Any, protocol: str, arguments: argparse.Namespace) -> dict[str, list[ScoreDocument]]:
    """Return the documents of each task."""
    given = (arguments.tasks, arguments.limit, arguments.data_dir, arguments.num_fewshot)
    documents = {}
    for task, requests in choice_requests(protocol, *given).items():
        subjects = arguments.subjects or {question.subtask for question in requests.questions}
        chosen = [question for question in requests.questions if question.subtask in subjects]
        documents[task] = encoded(replace(requests, questions=chosen), loaded.tokenizer, loaded.window)
    return documents


def largest_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the largest relative difference of a log-likelihood; those below 1 nat count in nats."""
    return max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(ours, theirs, strict=True))


def count(row: Row, batches: list[TreeBatch], model: Any) -> None:
    """Count the tokens of a task's batches, and the arithmetic that they need."""
    trunk: Any = None
    layers, head = matrices(model)
    for batch in batches:
        tokens = len(batch.tree.tokens)
        if trunk is None or not np.array_equal(trunk, batch.trunk):
            trunk = batch.trunk
            tokens += len(trunk)
        row.tokens += tokens
        row.batches += 1
        row.flops += 2.0 * (tokens * layers + len(np.unique(batch.tree.pair_nodes)) * head)


def decisions(members: list[ScoreDocument], likelihoods: list[float], counts: list[int]) -> Any:
    """Return [documents] the choice with the highest log-likelihood over its count (tokens, or 1)."""
    scores = iter(np.array(likelihoods) / np.array(counts))
    return np.array([int(np.argmax([next(scores) for _ in one.scores])) for one in members])


def likelihood(row: ScoredRow, protocol: str) -> float:
    """Return the log-likelihood that both score: the continuation's, or the whole sequence's."""
    if protocol == "plain":
        return row.of(CONTINUATION)[1] or 0.0
    return sum(value for value in row.likelihoods if value is not None)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return (seconds, result)."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = CLOCK()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return CLOCK() - started, result


def memory_now(device: Any) -> int:
    """Return the bytes in use: allocated by torch on a GPU, else resident memory of the process."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss


@contextmanager
def watching(device: Any) -> Iterator[list[int]]:
    """Measure the peak memory in use during the block, as a list of one."""
    peak, done = [memory_now(device)], threading.Event()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        peak[0] = torch.cuda.max_memory_allocated(device)
        return

    def watch() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], memory_now(device))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()


class Peer:
    """lm-eval's model at one batch size."""

    def __init__(self, loaded: Any, protocol: str, batch_size: int) -> None:
        from lm_eval.models.huggingface import HFLM

        # It warns at each batch size that the model is already loaded
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        self.batch_size = batch_size
        self._protocol = protocol
        self._model = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=batch_size)

    def __call__(self, members: Sequence[ScoreDocument]) -> list[float]:
        """Return the log-likelihood of each sequence."""
        requests: list[Any] = []
        for member in members:
            for sequence in member.scores:
                ids = sequence.tokens.tolist()
                cut = int(np.argmax(sequence.segments == CONTINUATION)) if self._protocol == "plain" else 1
                requests.append((("", str(len(requests))), ids[:cut], ids[cut:]))
        return [found for found, _ in self._model._loglikelihood_tokens(requests, disable_tqdm=True)]


def best_peer(loaded: Any, sample: list[ScoreDocument], protocol: str, sizes: Sequence[int] = ()) -> Peer:
    """Return lm-eval's model at the fastest of its batch sizes, by default `BATCH_SIZES` or `GPU_BATCH_SIZES`."""
    # Four choices a question, so that the largest batch is a full one
    defaults, asked = (GPU_BATCH_SIZES, 64) if loaded.model.device.type == "cuda" else (BATCH_SIZES, 24)
    times: dict[int, float] = {}
    for size in sizes or defaults:
        peer = Peer(loaded, protocol, size)
        try:
            times[size], _ = timed(lambda peer=peer: peer(sample[:asked]))
        except torch.OutOfMemoryError:
            note(f"lm-eval: out of memory at batches of {size}")
            break
    best = min(times, key=lambda size: times[size])
    note(f"lm-eval's best batch size: {best} ({', '.join(f'{s}: {t:.1f} s' for s, t in times.items())})")
    return Peer(loaded, protocol, best)


def matrices(model: Any) -> tuple[int, int]:
    """Return the numbers of parameters of the layers' matrices and of the output head."""
    head = model.get_output_embeddings().weight
    embedding = model.get_input_embeddings().weight
    others = sum(p.numel() for p in model.parameters() if p.ndim == 2 and p is not head and p is not embedding)
    return others, head.numel()


def matrix_rate(model: Any, tokens: int) -> float:
    """Measure FLOP/s of the model's own weight shapes, in the order of a forward pass, best of three passes."""
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    weights = [p for p in model.parameters() if p.ndim == 2 and (p is head or p is not embedding)]
    inputs = {p.shape[1]: torch.randn(tokens, p.shape[1], dtype=p.dtype, device=p.device) for p in weights}
    best = 0.0
    with torch.inference_mode():
        for _ in range(3):
            seconds, _ = timed(
                lambda: [None for p in weights if torch.nn.functional.linear(inputs[p.shape[1]], p) is None]
            )
            best = max(best, sum(2.0 * tokens * p.numel() for p in weights) / seconds)
    return best


def bandwidth(device: Any) -> float:
    """Measure bytes/s read from memory: the sum of a tensor larger than any cache, best of three."""
    large = torch.zeros(2**27, device=device)
    return max(large.numel() * 4 / timed(large.sum)[0] for _ in range(3))


def total(rows: list[Row]) -> Row:
    """Return the total over the tasks of one table."""
    summed = {
        name: sum(getattr(r, name) for r in rows) for name in ("documents", "ours", "theirs", "tokens", "batches")
    }
    return Row(
        rows[0].protocol, rows[0].dtype, "all", **summed, flops=sum(r.flops for r in rows), rate=rows[0].rate,
        memory=max(r.memory for r in rows), difference=max(r.difference for r in rows),
        agree=(sum(r.agree[0] for r in rows), sum(r.agree[1] for r in rows)),
    )  # fmt: skip


def tables(rows: list[Row]) -> Iterator[list[Row]]:
    """Group rows by protocol and dtype."""
    for key in dict.fromkeys((row.protocol, row.dtype) for row in rows):
        yield [row for row in rows if (row.protocol, row.dtype) == key]


def write(out: Path, rows: list[Row], about: dict[str, Any]) -> None:
    """Write the results so far, so that an interrupted benchmark is not lost."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "figures.json").write_text(
        json.dumps({"about": about, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"
    )
    (out / "tables.md").write_text(markdown(rows, about))
    picture(out / "speed.svg", rows, about)


def markdown(rows: list[Row], about: dict[str, Any]) -> str:
    """Return the tables as Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    shots = f", {about['shots']}-shot" if about["shots"] else ""
    lines = [
        f"{about['model']}; {about['machine']}, {about['threads']} threads; {versions}; at most {about['limit']} "
        f"documents of each task{shots}; {about['budget']} tokens a batch, attention by {about['kernel']}.",
    ]
    for members in tables(rows):
        first = members[0]
        bf16 = any(sum(row.agree) for row in members)
        lines += ["", f"### `{first.protocol}`, {first.dtype}: matrix rate {first.rate / 1e9:.0f} GFLOP/s", ""]
        head = (
            "task | documents | evalkit s | lm-eval s | ratio | documents/s | tokens/s | of machine | MiB | difference"
        )
        lines.append(f"| {head} |" + (" decided as in float32: evalkit, lm-eval |" if bf16 else ""))
        lines.append("|---" * (head.count("|") + 1 + bf16) + "|")
        for row in [*members, *([total(members)] if len(members) > 1 else [])]:
            agree = f" {row.agree[0]}, {row.agree[1]} |" if bf16 else ""
            lines.append(
                f"| {row.task} | {row.documents} | {row.ours:.1f} | {row.theirs:.1f} | {row.theirs / row.ours:.2f}× "
                f"| {row.documents / row.ours:.1f} | {row.tokens / row.ours:.0f} "
                f"| {row.flops / row.ours / row.rate:.0%} | {row.memory / 2**20:.0f} | {row.difference:.1e} |{agree}"
            )
    return "\n".join(lines) + "\n"


def picture(path: Path, rows: list[Row], about: dict[str, Any]) -> None:
    """Draw seconds per document of each task, and each task under the machine's roofline."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False})
    groups = list(tables(rows))
    figure, axes = plt.subplots(len(groups), 2, figsize=(10, 2.9 * len(groups)), squeeze=False, width_ratios=(3, 2))
    for (left, right), members in zip(axes, groups, strict=True):
        first, places = members[0], np.arange(len(members))
        left.bar(places - 0.2, [r.theirs / r.documents for r in members], 0.4, label="lm-eval", color="#b8b8b8")
        left.bar(places + 0.2, [r.ours / r.documents for r in members], 0.4, label="evalkit", color="#1f6f8b")
        for place, row in zip(places, members, strict=True):
            top = max(row.ours, row.theirs) / row.documents
            left.annotate(f"{row.theirs / row.ours:.1f}×", (place, top), ha="center", va="bottom")
        left.set_xticks(places, [row.task for row in members], rotation=20)
        left.set(ylabel="seconds a document", title=f"{first.protocol}, {first.dtype}")
        left.legend(frameon=False)
        # A weight is read once per batch: FLOPs per byte are 2 × tokens per batch over its size
        size = 4 if first.dtype == "float32" else 2
        intensity = [2 * row.tokens / row.batches / size for row in members]
        axis = np.geomspace(1, 2 * max(intensity), 100)
        right.loglog(axis, np.minimum(first.rate, axis * about["bandwidth"]) / 1e9, color="black", lw=1)
        right.loglog(intensity, [row.flops / row.ours / 1e9 for row in members], "o", color="#1f6f8b")
        ticks = [tick for tick in (20, 50, 100, 200, 500, 1000) if tick < 1.2 * first.rate / 1e9]
        right.set_yticks(ticks, list(map(str, ticks)))
        right.minorticks_off()
        right.set(xlabel="FLOPs a byte of weights", ylabel="GFLOP/s", title="under the machine's roof")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    main()
