"""Costs of a planned run before anything is computed: tokens, operations, memory, disk.

In: a plan and a sample of its documents. Out: a `RunCost`. Only the tokenizer is loaded, not the model.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from evalkit.benchmarks.base import Plan
from evalkit.benchmarks.registry import benchmark
from evalkit.benchmarks.remembered import remembered
from evalkit.benchmarks.request import TaskTokens
from evalkit.display import Say
from evalkit.models.locate import silent
from evalkit.models.shapes import (
    BYTES,
    ModelShape,
    cache_bytes_per_token,
    flops_per_token,
    parameter_count,
    parameters,
    read_shape,
)
from evalkit.models.spec import config_of, tokenizer_alone, window_of

EFFICIENCY = 0.5
"""Share of the matrix product's speed that scoring is assumed to reach."""
_SIZE = {"cpu": 1024, "cuda": 8192}
"""Rows of the square matrices: as large as a batch's, and timed in milliseconds."""
_LONGEST = 0.3
"""Seconds of timing for each of the two products."""


@dataclass(frozen=True)
class Speed:
    """Speed of a device in a dtype."""

    operations: float
    """Floating-point operations per second of a matrix product."""
    bytes: float
    """Bytes of weights read per second, by a matrix-vector product."""


def measured_speed(device: str, dtype: str) -> Speed:
    """Time both products on a device.

    Args:
        device: of torch, such as "cpu" or "cuda:0".
        dtype: "float32", "bfloat16" or "float16".
    """
    import torch

    size = _SIZE.get(device.partition(":")[0], _SIZE["cpu"])
    matrix = torch.ones(size, size, device=device, dtype=getattr(torch, dtype))
    large = torch.ones(4 * size, 4 * size, device=device, dtype=matrix.dtype)
    seconds = _seconds(lambda: matrix @ matrix, device)
    reading = _seconds(lambda: large @ large[0], device)
    return Speed(2 * size**3 / seconds, large.numel() * large.element_size() / reading)


def _seconds(product: Any, device: str) -> float:
    """Return the mean time of a product, which includes what other processes take of the device."""
    import torch

    def timed() -> float:
        started = time.perf_counter()
        product()
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    timed()
    times = [timed()]
    while sum(times) < _LONGEST:
        times.append(timed())
    return max(fmean(times), 1e-9)


SAMPLE = 80
"""Documents of each task that are tokenised; a quarter of them where answers are generated."""
_ROW_BYTES, _ANSWER_BYTES = 150, 2000
"""Bytes of a scored choice and of a generated answer in journal and tables together: of runs of zeroshot8 and
LongBench."""
_FOLDER_BYTES = 60_000
"""Bytes of a run's other files."""


@dataclass(frozen=True)
class RunCost:
    """Estimated costs of a run."""

    tasks: tuple[TaskTokens, ...]
    parameters: int | None
    dtype: str
    operations: float | None
    """Floating-point operations of all distinct input tokens; None without parameters."""
    weight_bytes: int | None
    batch_bytes: int | None
    """Memory of a batch beside the weights; None if the architecture is unknown."""

    @property
    def documents(self) -> int:
        """Return the number of documents."""
        return sum(task.documents for task in self.tasks)

    @property
    def alone(self) -> float:
        """Return the input tokens, each sequence by itself."""
        return sum(task.alone for task in self.tasks)

    @property
    def distinct(self) -> float:
        """Return the input tokens without those that are shared."""
        return sum(task.distinct for task in self.tasks)

    @property
    def generated(self) -> float:
        """Return the most generated tokens."""
        return sum(task.generated for task in self.tasks)

    @property
    def memory(self) -> int | None:
        """Return the bytes of the weights and of a batch."""
        if self.weight_bytes is None or self.batch_bytes is None:
            return None
        return self.weight_bytes + self.batch_bytes

    @property
    def disk(self) -> float:
        """Return the bytes of the run folder."""
        size = sum(
            task.rows * (task.row_bytes or (_ANSWER_BYTES if task.generated else _ROW_BYTES)) for task in self.tasks
        )
        return _FOLDER_BYTES + size

    def seconds(self, speed: Speed) -> float | None:
        """Return the computing time at a device's speed; each generated token reads all weights."""
        if self.operations is None or self.weight_bytes is None:
            return None
        products = self.operations / (speed.operations * EFFICIENCY)
        return products + self.generated * self.weight_bytes / speed.bytes + sum(task.seconds for task in self.tasks)


def cost_of(plan: Plan, device: str | None, say: Say, tokenizer: Any = None) -> RunCost:
    """Estimate the costs of a run.

    Args:
        plan: its plan.
        device: torch's name of the device that will compute it; None: a batch's memory is not estimated, without torch.
        say: called with messages for the user.
        tokenizer: the run's tokenizer; None: it is loaded.

    Raises:
        EvalkitError: the benchmark cannot estimate its tokens, or the tokenizer cannot be loaded.
    """
    specification, checkpoint = plan.manifest["specification"], plan.checkpoint
    digest = specification["checkpoint"]["tokenizer"]
    if tokenizer is None:
        tokenizer = remembered("tokenizer", digest, lambda: tokenizer_alone(checkpoint, say))
    kind = benchmark(plan.manifest["kind"])
    # What the prompts of two checkpoints with one tokenizer may differ in
    about = {name: value for name, value in specification.items() if name not in ("checkpoint", "dtype", "attention")}
    limit, window = getattr(plan.request, "limit", None), window_of(plan.request.model, checkpoint, tokenizer, silent)
    config, dtype = config_of(checkpoint, silent), str(specification["dtype"])
    heads = (config.get("num_hidden_layers"), config.get("num_attention_heads"))
    key = (digest, kind.kind, repr(about), repr((limit, window, heads)))
    tasks = remembered("tokens", key, lambda: kind.token_counts(plan, tokenizer, SAMPLE, silent), most=64)
    shape = _shape(config)
    count = parameter_count(checkpoint) if shape is None else parameters(shape).total
    return RunCost(
        tasks=tuple(tasks),
        parameters=count,
        dtype=dtype,
        operations=_operations(tasks, shape, count),
        weight_bytes=None if count is None else count * BYTES[dtype],
        batch_bytes=None if device is None else _batch_bytes(plan, config, shape, dtype, device, tasks),
    )


def _shape(config: dict[str, Any]) -> ModelShape | None:
    try:
        return read_shape(config)
    except ValueError:
        return None


def _operations(tasks: list[TaskTokens], shape: ModelShape | None, count: int | None) -> float | None:
    """Return the operations of all distinct tokens, at the mean length of the task's sequences."""
    if shape is None:
        return None if count is None else 2.0 * count * sum(task.distinct for task in tasks)
    return float(sum(task.distinct * flops_per_token(shape, int(task.alone / max(task.rows, 1.0))) for task in tasks))


def _batch_bytes(
    plan: Plan, config: dict[str, Any], shape: ModelShape | None, dtype: str, device: str, tasks: list[TaskTokens]
) -> int | None:
    from evalkit.scoring.architecture import CPU_TOKENS, GPU_TOKENS, activation_bytes

    hidden, inner = config.get("hidden_size"), config.get("intermediate_size")
    if not isinstance(hidden, int):
        return None
    budget = plan.request.token_budget or (GPU_TOKENS if device.startswith("cuda") else CPU_TOKENS)
    size = budget * activation_bytes(hidden, inner if isinstance(inner, int) else 4 * hidden, BYTES[dtype])
    if shape is not None and (generating := [task for task in tasks if task.generated]):
        longest = max((task.alone + task.generated) / max(task.rows, 1.0) for task in generating)
        size = max(size, int(longest * cache_bytes_per_token(shape, dtype)))
    return size
