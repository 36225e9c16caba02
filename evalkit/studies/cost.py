"""`evalkit cost`: how fast models read and write, in how much memory, and the outliers in their states.

In: loaded models. Out: tables of seconds and bytes by round, and of measures by layer; a `Report` and a figure of both.
A model runs as transformers runs it, with its key-value cache and without shared prefixes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from inspect import signature
from itertools import product
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from evalkit.compatibility.torch import HeldBytes
from evalkit.display import Say
from evalkit.errors import CheckpointError
from evalkit.models.loading.load import LoadedModel
from evalkit.models.memory import tensor_bytes
from evalkit.models.parts import base_of, dynamic_modules, forget_lengths, layers_of
from evalkit.reporting.decimals import fixed
from evalkit.reporting.figures import FigurePanel, draw_panels
from evalkit.reporting.report import Report
from evalkit.reporting.table import Table, simple_table
from evalkit.stats.estimates import Floats, interval, mean
from evalkit.studies.dry_run import measured_speed, now

OUTLIER = 6.0
"""Standard deviations from the mean of a layer's states beyond which a value is an outlier."""
_KEYS = ["step", "batch", "tokens", "checkpoint"]
_Columns = Mapping[str, tuple[str, float, int]]
_RATES: _Columns = {
    "seconds": ("ms", 1e3, 1), "rate": ("tokens/s", 1, 1), "ratio": ("× as fast", 1, 2), "low": ("from", 1, 2),
    "high": ("to", 1, 2), "of_floor": ("of floor, %", 100, 0), "peak": ("peak, MiB", 2**-20, 1),
    "cache": ("cache, MiB", 2**-20, 1),
}  # fmt: skip
_LAYERS: _Columns = {
    "kurtosis": ("kurtosis", 1, 1), "largest": ("largest |x|", 1, 1), "channels": ("outlier channels, %", 100, 1),
}  # fmt: skip
"""Number → its heading, the factor of its printed unit, and decimals."""
_OTHERS = [
    "evalkit.attention.cost:MAPS",
]
"""`LayerMeasures` of capabilities, which are imported when a cost is measured."""


class LayerMeasures(NamedTuple):
    """Further measures of a model's layers."""

    columns: _Columns
    note: str
    measure: Callable[[LoadedModel, torch.Tensor, Say], Mapping[int, Mapping[str, float]]]
    """Layer → measure → value of a loaded model on [1, tokens] of a text; a measure that a layer lacks is NaN."""


@cache
def _others() -> list[LayerMeasures]:
    return [resolve_name(name) for name in _OTHERS]


def _layer_columns() -> _Columns:
    columns = dict(_LAYERS)
    for others in _others():
        columns |= others.columns
    return columns


@torch.inference_mode()
def generate(model: Any, ids: torch.Tensor, new: int) -> tuple[float, float, int]:
    """Read [batch, tokens] and write a first new token, then `new` further ones, each the argmax.

    Returns the seconds to the first one and for each further one, and the bytes of the cache between.
    """
    last = {"logits_to_keep": 1} if "logits_to_keep" in signature(model.forward).parameters else {}
    forget_lengths(dynamic_modules(model))
    started = now(ids.device)
    output = model(input_ids=ids, use_cache=True, **last)
    token = output.logits[:, -1:].argmax(-1)
    first, cache = now(ids.device), getattr(output, "past_key_values", None)
    if not (size := sum(_state_bytes(vars(layer)) for layer in getattr(cache, "layers", ()))):
        raise CheckpointError(f"{type(model).__name__} has no key-value cache, whose cost could be measured")
    between = now(ids.device)
    for _ in range(new):
        token = model(input_ids=token, past_key_values=cache, use_cache=True, **last).logits[:, -1:].argmax(-1)
    return first - started, (now(ids.device) - between) / new, size


def _state_bytes(stored: Any) -> int:
    """Return the bytes of keys, values and states in what a cache stores; integers are its bookkeeping."""
    if isinstance(stored, Mapping):
        return sum(map(_state_bytes, stored.values()))
    return stored.nbytes if isinstance(stored, torch.Tensor) and stored.is_floating_point() else 0


def floors(
    model: Any, batch: int, tokens: int, new: int, cache: int, speed: tuple[float, float]
) -> tuple[float, float]:
    """Return the least seconds of both steps of `generate` at so many operations and bytes a second.

    Operations: 2 for each token and parameter of the layers' matrices, of the head for one token of each sequence; and
    4 × heads × head size for each layer, query and earlier key in the layer's window. Decoding reads these parameters
    and the cache, too, which grows by as much as the windows do.
    """
    config, ends = model.config.get_text_config(), (model.get_input_embeddings(), model.get_output_embeddings())
    others, head = {id(end.weight) for end in ends}, ends[1].weight
    layers = sum(part.numel() for part in base_of(model).parameters() if part.dim() > 1 and id(part) not in others)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pair, length, windows = 4 * config.num_attention_heads * width, tokens + (new + 1) / 2, _windows(config)
    # Queries before a window is full, and those after
    pairs = sum(n * (n + 1) / 2 + (tokens - n) * n for n in (min(tokens, window) for window in windows))
    before, keys = (sum(min(count, window) for window in windows) for count in (tokens, length))
    prefill = batch * (2 * layers * tokens + 2 * head.numel() + pair * pairs)
    step = batch * (2 * layers + 2 * head.numel() + pair * keys)
    read = (layers + head.numel()) * head.element_size() + cache * keys / before
    return prefill / speed[0], max(step / speed[0], read / speed[1])


def _windows(config: Any) -> list[float]:
    """Keys that a query sees in each layer, at most."""
    window = getattr(config, "sliding_window", None) or math.inf
    kinds = getattr(config, "layer_types", None) or ["sliding"] * config.num_hidden_layers
    return [window if "sliding" in kind else math.inf for kind in kinds]


def rates(
    models: Mapping[str, LoadedModel], batches: Sequence[int], lengths: Sequence[int], new: int, rounds: int, say: Say
) -> pd.DataFrame:
    """Time models in turn on random tokens, in another order each round; before these, each runs once for its memory.

    Returns a row for each step, batch, length, round and checkpoint: seconds, the least of them at the rates that were
    measured in the round, and bytes.
    """
    rows = []
    for batch, tokens in product(batches, lengths):
        say(f"{batch} × {tokens:,} tokens")
        inputs, peaks, dice = dict[str, torch.Tensor](), dict[str, int](), torch.Generator().manual_seed(0)
        names, order = [*models], [*range(len(models))]
        for name, loaded in models.items():
            vocabulary = loaded.model.get_input_embeddings().weight.shape[0]
            inputs[name] = torch.randint(vocabulary, (batch, tokens), generator=dice).to(loaded.model.device)
            with HeldBytes() as held:
                generate(loaded.model, inputs[name], new)
            peaks[name] = tensor_bytes(loaded.model) + held.peak
        for number in range(rounds):
            speeds = {(of.device, of.dtype): measured_speed(of.device, of.dtype) for of in models.values()}
            # Reversed, then another random order, so that no model always follows the same one
            if number:
                order = order[::-1] if number % 2 else torch.randperm(len(names), generator=dice).tolist()
            for name in (names[index] for index in order):
                model, speed = models[name].model, speeds[models[name].device, models[name].dtype]
                *seconds, cache = generate(model, inputs[name], new)
                least = floors(model, batch, tokens, new, cache, speed)
                for step, taken, floor in zip(("prefill", "decode"), seconds, least, strict=True):
                    sizes = (step, batch, tokens, name, number, peaks[name], cache)
                    rows.append((*sizes, batch * (tokens if step == "prefill" else 1), taken, floor, *speed))
    columns = [*_KEYS, "round", "peak", "cache", "written", "seconds", "floor", "operations", "read"]
    return pd.DataFrame(rows, columns=columns).sort_values("step", ascending=False, kind="stable")


def times_as_fast(ours: Floats, theirs: Floats) -> dict[str, float]:
    """Return the geometric mean of theirs / ours over rounds, with its 95 % interval of t."""
    estimate = mean(np.log(theirs / ours))
    values = np.exp((estimate.value, *interval(estimate))).tolist()
    return dict(zip(("ratio", "low", "high"), values, strict=True))


def summarised(timings: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a record for each step, batch, length and checkpoint: medians over rounds, ratios to the first one."""
    by_round, first = timings.pivot(index="round", columns=_KEYS, values="seconds"), timings["checkpoint"].iloc[0]
    shares = timings.assign(
        of_floor=timings["floor"] / timings["seconds"], rate=timings["written"] / timings["seconds"]
    )
    medians = shares.groupby(_KEYS, sort=False)[["seconds", "rate", "of_floor", "peak", "cache"]].median()
    records: list[dict[str, Any]] = medians.reset_index().to_dict("records")  # type: ignore[assignment]
    for record in records:
        seconds, theirs = (
            by_round[*(record[key] for key in _KEYS[:-1]), name] for name in (record["checkpoint"], first)
        )
        record |= {} if record["checkpoint"] == first else times_as_fast(seconds.to_numpy(), theirs.to_numpy())
    return records


def outliers(loaded: LoadedModel, ids: torch.Tensor, say: Say) -> pd.DataFrame:
    """Measure the states after each layer, and what capabilities measure of it, on [1, tokens] of a text.

    Of the values x of all tokens and channels: the kurtosis, 3 of a normal distribution; the largest |x|; and the share
    of channels with an outlier.
    """
    rows = list[dict[str, float]]()

    def measure(_: Any, __: Any, output: Any) -> None:
        states = (output[0] if isinstance(output, tuple) else output)[0].double()
        deviation = states - states.mean()
        variance = deviation.square().mean()
        channels = (deviation.abs() > OUTLIER * variance.sqrt()).any(0).double().mean()
        values = deviation.pow(4).mean() / variance.square(), states.abs().max(), channels
        rows.append(dict(zip(_LAYERS, map(float, values), strict=True)))

    if not (layers := layers_of(loaded.model)):
        raise CheckpointError(f"{loaded.name}: its layers are no list of modules, whose states could be measured")
    hooks = [layer.register_forward_hook(measure) for layer in layers]
    try:
        with torch.inference_mode():
            base_of(loaded.model)(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    for others in _others():
        for layer, measured in others.measure(loaded, ids, say).items():
            rows[layer] |= measured
    return pd.DataFrame(rows, columns=[*_layer_columns()]).rename_axis("layer").reset_index()


def cost_report(timings: pd.DataFrame, layers: pd.DataFrame) -> Report:
    """Build the report of `rates` and of the `outliers` of all models."""
    records, by_layer, first = summarised(timings), layers.to_dict("records"), timings["checkpoint"].iloc[0]
    operations, read = (fixed(timings[name].median() / 1e9, 1) for name in ("operations", "read"))
    about_states = f"outlier: over {OUTLIER:g} standard deviations from the layer's mean; kurtosis: 3 if normal"
    notes = (
        "prefill: to the first new token; decode: each further one; peak: weights and all tensors; cache: keys, values "
        "and states",
        f"medians of {timings['round'].nunique()} rounds in which checkpoints take turns; × as fast as {first}: mean "
        "ratio of the rounds; from, to: its 95 % interval over rounds, which covers the machine's noise",
        f"of floor: time of the arithmetic at the rates of each round ({operations} GFLOP/s of matrix products, {read} "
        f"GB/s read, {torch.get_num_threads()} threads) over the time taken",
        "; ".join([about_states, *(others.note for others in _others())]),
    )
    of_layers = _table("layers", by_layer, ["checkpoint", "layer"], _layer_columns())
    tables = (_table("rates", records, _KEYS, _RATES), of_layers)
    content = {"rates": records, "layers": by_layer, "rounds": timings.to_dict("records"), "notes": notes}
    return Report(tables, notes=notes, records=records, content=content)


def _table(name: str, records: Sequence[Mapping[Any, Any]], labels: list[str], numbers: _Columns) -> Table:
    """Return a table of records, ruled where the last label has its first value again."""
    shown = [key for key in numbers if any(key in record for record in records)]
    body = [
        [*(str(record[label]) for label in labels)]
        + [fixed(numbers[key][1] * record.get(key, math.nan), numbers[key][2]) for key in shown]
        for record in records
    ]
    last = [record[labels[-1]] for record in records]
    ruled = [number for number, value in enumerate(last) if value == last[0] and len({*last}) > 1]
    return simple_table(name, [*labels, *(numbers[key][0] for key in shown)], body, ruled=ruled)


def draw_cost(report: Report, path: Path) -> None:
    """Draw rates by length, and kurtosis and largest values by layer."""
    drawn = [pd.DataFrame(report.content[part]).rename(columns={"checkpoint": "run"}) for part in ("rates", "layers")]
    rates, layers = (table.assign(spread=math.nan) for table in drawn)
    panels = [
        FigurePanel(f"{step}, batch {batch}".capitalize(), rows.assign(value=rows["rate"]), "tokens", "tokens/s")
        for (batch, step), rows in rates.groupby(["batch", "step"], sort=False)
    ]
    for name in ("kurtosis", "largest"):
        panels.append(FigurePanel("States after a layer", layers.assign(value=layers[name]), "layer", _LAYERS[name][0]))
    draw_panels(panels, {name: name for name in layers["run"].unique()}, 2, "", path)
