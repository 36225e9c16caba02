"""Estimated costs of an analysis before a model is loaded: tokens, rows, and the time of the singular values.

In: a plan and a tokenizer. Out: `TaskTokens` of each task. The passes over the maps are not estimated: with all
measures but the rank, they took about half the time of the model's own forward pass (docs/attention.md).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from evalkit.analysis.groups import MEASURES, RANK, RANKED_LAYERS
from evalkit.analysis.layer_numbers import chosen_layers
from evalkit.benchmarks.attention.documents import sequences_of, text_work
from evalkit.benchmarks.attention.plan import TEXT, AttentionPlan
from evalkit.benchmarks.base import Say
from evalkit.benchmarks.multiple_choice.prompts import Prompter
from evalkit.benchmarks.task_tokens import TaskTokens, spread
from evalkit.models.context_settings import config_of
from evalkit.models.locate import silent
from evalkit.models.tokenizer_alone import window_of

_VALUE_BYTES = 22
"""Bytes of a value in journal and tables together: of runs of all measures."""
_SIZES = (64, 256, 1024)
"""Tokens of the maps whose singular values are timed."""


def task_costs(plan: AttentionPlan, tokenizer: Any, sample: int, say: Say) -> list[TaskTokens]:
    """Estimate the costs of each task from at most `sample` of its documents; a text's tokens are counted.

    Raises:
        EvalkitError: the window is unknown, the text has no tokens, or the model lacks a requested layer.
    """
    window, heads = window_of(plan.request.model, plan.checkpoint, tokenizer, say), _heads(plan)
    if plan.choices is None:
        window = min(window, plan.manifest["specification"].get("window", window))
        lengths = list(text_work(plan, window, tokenizer).values())
        return [_costs(plan, heads, TEXT, lengths, 1.0, len(lengths), len(lengths))]
    prompter = Prompter(plan.choices.template, tokenizer, window - 1, say)
    found = []
    for task, questions in plan.questions.items():
        taken = [questions[place] for place in spread(len(questions), sample)]
        lengths = [len(one.tokens) for one in sequences_of(plan, prompter, taken, None, tokenizer.bos_token_id)]
        found.append(_costs(plan, heads, task, lengths, len(questions) / len(taken), len(questions), len(taken)))
    return found


def _costs(
    plan: AttentionPlan,
    shape: tuple[int, int],
    task: str,
    lengths: Sequence[int],
    scale: float,
    documents: int,
    sampled: int,
) -> TaskTokens:
    """Return the costs of a task whose sampled sequences have these lengths, in tokens."""
    groups = plan.manifest["specification"]["measures"]
    layers, heads = shape
    tokens = scale * sum(lengths)
    measures = sum(info.group in groups for info in MEASURES.values())
    seconds = 0.0
    if RANK in groups:
        ranked = layers if plan.request.layers else min(layers, RANKED_LAYERS)
        seconds = scale * ranked * heads * float(np.sum(_rank_seconds(lengths)))
    return TaskTokens(
        task,
        documents,
        sampled,
        rows=scale * len(lengths),
        alone=tokens,
        distinct=tokens,
        row_bytes=float(layers * heads * measures * _VALUE_BYTES),
        seconds=seconds,
    )


def _heads(plan: AttentionPlan) -> tuple[int, int]:
    """Return the layers that are read, and the heads of each; 1 where the config does not say.

    Raises:
        UsageError: a layer is requested that the model does not have.
    """
    config = config_of(plan.checkpoint, silent)
    layers, heads = (config.get(name) for name in ("num_hidden_layers", "num_attention_heads"))
    requested = plan.manifest["specification"]["layers"]
    read = len(chosen_layers(requested, range(layers))) if isinstance(layers, int) and layers > 0 else 1
    return read, heads if isinstance(heads, int) else 1


def _rank_seconds(lengths: Sequence[int]) -> np.ndarray:
    """Return the time of the singular values of one map of each length, from times of three lengths."""
    sizes = np.log(_SIZES)
    found = np.interp(np.log(lengths), sizes, np.log([_timed(size) for size in _SIZES]))
    beyond = 3 * np.maximum(np.log(lengths) - sizes[-1], 0.0)
    return np.asarray(np.exp(found + beyond))


@cache
def _timed(size: int) -> float:
    """Return the seconds of a map's singular values, the faster of two."""
    import torch

    seen, times = torch.rand(size, size).tril(), []
    for _ in range(2):
        started = time.perf_counter()
        torch.linalg.svdvals(seen)
        times.append(time.perf_counter() - started)
    return min(times)
