"""What models cost: measures of states equal loops, floors and bytes those of the config, ratios a t interval's."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

import evalkit.models.auto  # noqa: F401
from evalkit.compatibility.torch import HeldBytes
from evalkit.models.quantisation import calibration_ids
from evalkit.models.zoo.shapes import cache_bytes_per_token, flops_per_token, read_shape
from evalkit.studies.cost import floors, generate, outliers, rates, summarised, times_as_fast
from evalkit.studies.dry_run import now
from tests.cli.conftest import Command, complains
from tests.models.loading import load_folder, rewrite
from tests.models.small import ATTENTIONS, small
from tests.tiny import tiny_checkpoint


def literal_measures(states: torch.Tensor) -> tuple[float, float, float]:
    """Kurtosis, largest absolute value, and share of channels beyond 6 deviations of [tokens, channels]."""
    rows = states.tolist()
    values = [value for row in rows for value in row]
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / len(values)
    fourth = math.fsum((value - mean) ** 4 for value in values) / len(values)
    outlying = {channel for row in rows for channel, value in enumerate(row) if abs(value - mean) > 6 * variance**0.5}
    return fourth / variance**2, max(map(abs, values)), len(outlying) / len(rows[0])


def test_measures_of_states_equal_loops(tmp_path: Path) -> None:
    loaded = load_folder(tiny_checkpoint(tmp_path / "tiny", layers=3))
    ids = calibration_ids(loaded.model, loaded.tokenizer, 70)
    table, inputs = outliers(loaded, ids, print), list[torch.Tensor]()
    # transformers' last hidden state comes after the norm
    loaded.model.model.norm.register_forward_pre_hook(lambda _, states: inputs.append(states[0]))
    states = [*loaded.model(ids, output_hidden_states=True).hidden_states[1:-1], *inputs]
    for layer, of_layer in enumerate(states):
        row = table.iloc[layer]
        assert (row["kurtosis"], row["largest"], row["channels"]) == pytest.approx(literal_measures(of_layer[0]), 1e-10)
    assert table["layer"].tolist() == [0, 1, 2]


def test_planted_outliers_are_found(tmp_path: Path) -> None:
    """One channel of layer 1's output is 500 times as large, and stays in the residual stream."""
    folder = tiny_checkpoint(tmp_path / "tiny", layers=4)
    before = load_folder(folder)
    ids = calibration_ids(before.model, before.tokenizer, 40)
    plain = outliers(before, ids, print)
    rewrite(folder, lambda stored: stored["model.layers.1.mlp.down_proj.weight"][5].mul_(500))
    planted = outliers(load_folder(folder), ids, print)
    assert planted["channels"].tolist() == [0, 1 / 64, 1 / 64, 1 / 64]
    assert plain["channels"].tolist() == [0, 0, 0, 0]
    assert (planted["kurtosis"][1:] > 10 * plain["kurtosis"][1:]).all()
    assert (planted["largest"][1:] > 10 * plain["largest"][1:]).all()
    pd.testing.assert_series_equal(plain.iloc[0], planted.iloc[0])


@pytest.mark.parametrize("variant", ATTENTIONS)
def test_floors_and_bytes_are_those_of_the_config(variant: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**small(tmp_path, variant).config)).eval()
    shape, batch, tokens, new = read_shape(model.config.to_dict()), 2, 24, 4
    ids = torch.arange(batch * tokens).reshape(batch, tokens)
    with HeldBytes() as held:
        *_, cache = generate(model, ids, new)
    assert cache == batch * tokens * cache_bytes_per_token(shape, "float32")
    head = 2 * shape.vocabulary * shape.hidden * (tokens - 1)  # of all tokens but the last one
    prefill, _ = floors(model, batch, tokens, new, cache, (1.0, math.inf))
    assert prefill == batch * (tokens * flops_per_token(shape, tokens) - head)
    _, decode = floors(model, batch, tokens, new, cache, (math.inf, 4.0))
    attention = shape.attention
    matrices = (flops_per_token(shape, 0) - 2 * attention.layers * attention.heads * attention.head_size) / 2
    assert decode == pytest.approx(matrices + cache / 4 * (tokens + 2.5) / tokens, 1e-12)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        generate(model, ids, new)
    events = [(event.start_ns(), event.nbytes()) for event in profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
              if event.name() == "[memory]"]  # fmt: skip
    assert held.peak == pytest.approx(np.cumsum([size for _, size in sorted(events)]).max(), rel=0.01)
    assert held.peak > cache


@pytest.mark.parametrize("tokens", [24, 100])
def test_floors_count_the_keys_in_windows_only(tokens: int) -> None:
    window, new = 32, 4
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": window, "num_hidden_layers": 2}
    config = AutoConfig.for_model("gemma3_text", vocab_size=64, hidden_size=32, intermediate_size=32, head_dim=8,
                                  num_attention_heads=4, num_key_value_heads=2, **layers)  # fmt: skip
    model, ids = AutoModelForCausalLM.from_config(config).eval(), torch.arange(tokens)[None] % 64
    caches = [generate(model, ids[:, :length], 1)[2] for length in (tokens, tokens - 1)]
    pairs = sum(min(query + 1, window) + query + 1 for query in range(tokens))
    matrices = sum(part.numel() for part in model.parameters() if part.dim() > 1) - 64 * 32
    prefill, _ = floors(model, 1, tokens, new, caches[0], (1.0, math.inf))
    assert prefill == 2 * matrices * tokens + 2 * 64 * 32 + 4 * 4 * 8 * pairs
    read = [floors(model, 1, tokens, length, caches[0], (math.inf, 1.0))[1] for length in (1, 3)]
    # Of one further token the cache of the other layer grows only, once the window is full
    assert read[1] - read[0] == pytest.approx(caches[0] - caches[1], rel=0.05)


def small_model(kind: str, layers: list[str], **more: int) -> AutoModelForCausalLM:
    config = AutoConfig.for_model(
        kind,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=len(layers),
        layer_types=layers,
        **more,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def test_the_cache_is_keys_values_and_states() -> None:
    """In float32: 100 keys and values of a full layer and 31 of a window of 32; a convolution's last 3 inputs."""
    a_key = 2 * 8 * 4  # two heads of 8 numbers of 4 bytes
    sliding = small_model("gemma3_text", ["sliding_attention", "full_attention"], head_dim=8, sliding_window=32)
    assert generate(sliding, torch.arange(100)[None] % 64, 1)[2] == 2 * a_key * (100 + 31) == 16_768
    hybrid = small_model("lfm2", ["conv", "full_attention"], conv_L_cache=3)
    assert generate(hybrid, torch.arange(20)[None], 1)[2] == 2 * a_key * 20 + 32 * 3 * 4 == 2_944


def test_times_end_when_the_device_of_the_model_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever device is the current one."""
    waited = list[str]()
    monkeypatch.setattr("torch.accelerator.synchronize", lambda device: waited.append(str(device)))
    assert now("cuda:1") > 0
    assert now(torch.device("mps")) > 0
    assert now("cpu") > 0
    assert waited == ["cuda:1", "mps"]


def test_ratios_are_of_rounds_with_a_t_interval() -> None:
    dice = np.random.default_rng(0)
    noise, ratio = dice.lognormal(0, 0.5, 9), dice.lognormal(math.log(2), 0.03, 9)
    found = times_as_fast(noise, ratio * noise)  # the machine's noise is common to a round
    expected = stats.ttest_1samp(np.log(ratio), 0).confidence_interval(0.95)
    assert found["low"] == pytest.approx(math.exp(expected.low))
    assert found["high"] == pytest.approx(math.exp(expected.high))
    assert found["ratio"] == pytest.approx(stats.gmean(ratio))


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's rates are measured in milliseconds."""
    monkeypatch.setattr("evalkit.studies.dry_run._LONGEST", 0.001)


@pytest.mark.usefixtures("_short")
def test_models_take_turns_and_are_compared_by_round(tmp_path: Path) -> None:
    models = {name: load_folder(tiny_checkpoint(tmp_path / name, layers=layers)) for name, layers in
              (("a", 1), ("b", 2))}  # fmt: skip
    timings = rates(models, [2], [16], 2, 2, lambda _: None)
    order = timings[timings["step"] == "decode"].groupby(["batch", "round"])["checkpoint"].agg("".join)
    first, second = order.tolist()
    assert first == second[::-1]
    records = summarised(timings)
    shown = [(record["step"], record["checkpoint"]) for record in records]
    assert shown == [("prefill", "a"), ("prefill", "b"), ("decode", "a"), ("decode", "b")]
    for record in records:
        keys = ["step", "batch", "checkpoint"]
        own = timings[(timings[keys] == [record[key] for key in keys]).all(axis=1)]
        assert record["seconds"] == pytest.approx(own["seconds"].mean())  # the median of two
        tokens = 16 if record["step"] == "prefill" else 1
        assert record["rate"] == pytest.approx(np.mean(record["batch"] * tokens / own["seconds"]))
        assert ("ratio" in record) == (record["checkpoint"] == "b")


@pytest.mark.usefixtures("_short")
def test_the_command(evalkit: Command, tmp_path: Path) -> None:
    for seed, name in enumerate(("first", "second")):
        tiny_checkpoint(tmp_path / name, seed=seed, layers=1)
    given = ("cost", "first", "second", "--lengths", 8, "--rounds", 2, "--new", 1)
    done = evalkit(*given, "--format", "json", "--plot", "cost.svg")
    content = json.loads(done.out)
    assert (done.code, len(content["rates"]), len(content["layers"])) == (0, 4, 2)
    assert len(content["rounds"]) == 2 * 4
    drawn = (tmp_path / "cost.svg").read_text(encoding="utf-8")
    for text in ("first", "second", "Prefill, batch 1", "Decode, batch 1", "kurtosis"):
        assert text in drawn
    alone = json.loads(evalkit("cost", "first", "first", *given[5:], "--lengths", "8,8", "--format", "json").out)
    assert [record["checkpoint"] for record in alone["rates"]] == ["first", "first #2"] * 2
    assert all(("ratio" in record) == (record["checkpoint"] == "first #2") for record in alone["rates"])
    complains(evalkit("cost", "first", "--lengths", "250"), 2, "--lengths 250", "first has a window of 256")
    complains(evalkit("cost", "first", "--batches", "none"), 2, "--batches", "whole number")
    complains(evalkit("cost", "first", "--quantise", "w8"), 2, "--quantise")
