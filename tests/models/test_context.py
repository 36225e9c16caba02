"""Planned extensions and their frequencies, compared with transformers' own and with the explicit formulas."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from evalkit.errors import CheckpointError, EvalkitError, UnknownNameError, UsageError
from evalkit.models.context.extension import (
    METHODS,
    ContextSettings,
    Extension,
    configured_window,
    plan_extension,
    rotary_frequencies,
    yarn_ramp,
)
from evalkit.models.loading.spec import context_names, context_settings

PLAIN = {"max_position_embeddings": 2048, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
YARNED = {
    "max_position_embeddings": 8192,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
}
FLOAT32 = 5e-7
"""Of the unstretched frequency: transformers computes in float32, whose steps are 1.2e-7, and takes a few of them."""


def planned(config: dict[str, Any] = PLAIN, **settings: Any) -> Extension:
    found = plan_extension(config, ContextSettings(**({"target": 8192} | settings)))
    assert found is not None
    return found


def test_yarn_from_2048_to_8192_is_the_published_one() -> None:
    """Head size 64, theta 1e4: a ramp over channels 8 to 21 of 32, and an attention factor of 0.1 ln 4 + 1."""
    extension = planned()
    assert (extension.original, extension.factor, extension.beta_fast, extension.beta_slow) == (2048, 4.0, 32, 1)
    assert extension.attention_factor == pytest.approx(1.1386294361, abs=1e-10)
    assert yarn_ramp(extension, 64, 1e4) == (8, 21)
    frequencies, scaling = rotary_frequencies(extension, 64, 1e4)
    assert scaling == extension.attention_factor
    for i in range(32):
        own = 10000.0 ** (-2 * i / 64)
        kept = 1 - min(max((i - 8) / 13, 0), 1)
        assert frequencies[i] == pytest.approx((1 - kept) * own / 4 + kept * own, rel=1e-14)
    assert extension.describe() == (
        "context stretched from 2,048 to 8,192 tokens by yarn: factor 4, beta 32/1, attention factor 1.13863"
    )


@given(
    size=st.sampled_from([8, 16, 64, 80, 96, 128]),
    theta=st.sampled_from([1e4, 1e5, 5e5, 1e6]),
    factor=st.floats(1.0, 64.0),
    original=st.sampled_from([256, 2048, 4096, 8192]),
    fast=st.floats(8.0, 64.0),
    slow=st.floats(0.5, 4.0),
)
def test_yarn_and_linear_are_transformers_own(
    size: int, theta: float, factor: float, original: int, fast: float, slow: float
) -> None:
    rope = {"rope_theta": theta, "factor": factor, "original_max_position_embeddings": original}
    betas = {"beta_fast": fast, "beta_slow": slow}
    shape = {"hidden_size": 2 * size, "num_attention_heads": 2, "max_position_embeddings": 4 * original}
    for method in ("yarn", "linear"):
        given_betas = betas if method == "yarn" else {}
        config = LlamaConfig(**shape, rope_parameters=rope | given_betas | {"rope_type": method})
        expected, scaling = ROPE_INIT_FUNCTIONS[method](config)
        settings = ContextSettings(target=10**7, method=method, original=original, factor=factor, **given_betas)
        extension = plan_extension(PLAIN, settings)
        assert extension is not None
        found, own_scaling = rotary_frequencies(extension, size, theta)
        plain = theta ** (-np.arange(0, size, 2) / size)
        assert np.abs((found - expected.double().numpy()) / plain).max() <= FLOAT32
        assert own_scaling == pytest.approx(scaling, rel=1e-12)


def test_ntk_changes_the_base_so_that_the_slowest_channel_is_interpolated_in_full() -> None:
    """The fastest keeps its frequency, the slowest has it divided by the factor (arXiv 2309.00071, section 3.1)."""
    plain = 1e4 ** (-np.arange(0, 64, 2) / 64)
    found, scaling = rotary_frequencies(planned(method="ntk"), 64, 1e4)
    assert (found[0], scaling) == (1.0, 1.0)
    assert found[-1] == pytest.approx(plain[-1] / 4, rel=1e-12)
    assert np.all(np.diff(found) < 0)
    with pytest.raises(CheckpointError, match="more than two rotating channels"):
        rotary_frequencies(planned(method="ntk"), 2, 1e4)


def test_dynamic_yarn_is_plain_within_the_window_and_yarn_past_it() -> None:
    """s = max(1, l / L) for every length l."""
    dynamic = planned(method="dynamic-yarn")
    plain = 1e4 ** (-np.arange(0, 64, 2) / 64)
    for length in (1, 500, 2048):
        found, scaling = rotary_frequencies(dynamic, 64, 1e4, length)
        assert (np.array_equal(found, plain), scaling) == (True, 1.0)
    for length in (2049, 5000, 8192, 20000):
        found, scaling = rotary_frequencies(dynamic, 64, 1e4, length)
        still = planned(target=length)
        expected, expected_scaling = rotary_frequencies(still, 64, 1e4)
        np.testing.assert_array_equal(found, expected)
        assert scaling == expected_scaling == pytest.approx(0.1 * math.log(length / 2048) + 1)


def test_a_factor_of_one_changes_nothing() -> None:
    plain = 1e4 ** (-np.arange(0, 64, 2) / 64)
    for method in METHODS:
        factor = 1.0 if method in ("yarn", "linear", "ntk") else None
        length = 2048 if method == "dynamic-yarn" else None
        found, scaling = rotary_frequencies(planned(method=method, factor=factor), 64, 1e4, length)
        np.testing.assert_allclose(found, plain, rtol=1e-15)
        assert scaling == 1.0


@pytest.mark.parametrize("target", [1, 2000, 2048])
def test_a_context_within_the_window_is_not_stretched(target: int) -> None:
    said: list[str] = []
    assert plan_extension(PLAIN, ContextSettings(target), said.append) is None
    assert said == [f"--context {target}: the window is 2,048 tokens already; nothing is stretched"]


def test_the_original_window_is_reported_and_may_be_given() -> None:
    said: list[str] = []
    plan_extension(PLAIN, ContextSettings(8192), said.append)
    assert said == ["original context window 2,048 tokens (config.json, max_position_embeddings)"]
    said.clear()
    extension = plan_extension(PLAIN, ContextSettings(8192, original=1024, factor=4.0), said.append)
    assert extension is not None
    assert (extension.original, extension.factor) == (1024, 4.0)
    assert said == [
        "original context window 1,024 tokens (--context-original; config.json has max_position_embeddings 2,048)",
        "factor 4 extends 1,024 tokens to 4,096, not to 8,192",
    ]
    assert planned({"text_config": PLAIN}).original == 2048
    with pytest.raises(CheckpointError, match=r"has no context window .* --context-original"):
        planned({})


@pytest.mark.parametrize("kind", ["yarn", "llama3", "longrope", "dynamic", "linear"])
def test_what_is_stretched_already_is_not_stretched_twice(kind: str) -> None:
    config = {"max_position_embeddings": 8192, "rope_parameters": {"rope_type": kind, "factor": 4.0}}
    with pytest.raises(CheckpointError, match=f"stretches the context itself .rope_type {kind}.*--context-original"):
        planned(config, target=16384)
    said: list[str] = []
    extension = plan_extension(config, ContextSettings(16384, original=2048), said.append)
    assert extension is not None
    assert extension.factor == 8.0
    assert said[0] == f"config.json stretches the context itself (rope_type {kind}, factor 4); this is replaced"


def test_a_stretched_checkpoint_within_its_own_reach_is_left_alone() -> None:
    said: list[str] = []
    assert plan_extension(YARNED, ContextSettings(8192), said.append) is None
    assert "by the stretching in config.json (rope_type yarn, from 2,048 tokens, factor 4)" in said[0]


@pytest.mark.parametrize("target", [1024, 4096])
@pytest.mark.parametrize("config", [PLAIN, YARNED, {}], ids=["plain", "yarn", "silent"])
def test_a_given_original_window_replaces_that_of_the_config(config: dict[str, Any], target: int) -> None:
    """Also one shorter than config.json's; the config's own extension is removed, with unscaled frequencies."""
    assert planned(config, target=target, original=4096) == Extension("none", 4096, 4096, 1.0)


def test_the_windows_own_size_changes_nothing() -> None:
    assert plan_extension(PLAIN, ContextSettings(2048, original=2048)) is None


def test_several_kinds_of_rotary_embeddings_are_refused() -> None:
    nested = {"sliding_attention": {"rope_type": "default"}, "full_attention": {"rope_type": "default"}}
    with pytest.raises(CheckpointError, match="several kinds"):
        planned({"max_position_embeddings": 2048, "rope_parameters": nested})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": "yarm"}, "did you mean 'yarn'"),
        ({"factor": 0.5}, "factor is 0.5; expected a number from 1"),
        ({"method": "dynamic-yarn", "factor": 4.0}, "factor has no meaning for --context-method dynamic-yarn"),
        ({"method": "linear", "beta_fast": 32.0}, "beta_fast has no meaning for --context-method linear"),
        ({"beta_fast": 1.0}, "the fast one must be the larger"),
        ({"attention_factor": math.nan}, "attention_factor is nan; expected a number above 0"),
    ],
)
def test_invalid_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        planned(**settings)


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        (ContextSettings(10**12), "--context 1000000000000"),
        (ContextSettings(2**24 + 1), "--context 16777217"),
        (ContextSettings(0), "--context 0"),
        (ContextSettings(8192, original=10**12), "--context-original 1000000000000"),
    ],
)
def test_more_tokens_than_float32_tells_apart(settings: ContextSettings, flag: str) -> None:
    with pytest.raises(UsageError, match=rf"^{flag}: expected 1 to 16,777,216 tokens \(exact in float32\)$"):
        plan_extension(PLAIN, settings)
    assert planned(PLAIN, target=2**24).target == 2**24


@pytest.mark.parametrize("window", [-1, 0, None])
def test_a_config_that_has_no_window(window: int | None) -> None:
    assert configured_window({"max_position_embeddings": window}) == ("", None)
    assert configured_window({"max_position_embeddings": window, "n_positions": 64}) == ("n_positions", 64)


def test_a_specification_is_the_extension_again() -> None:
    for method in METHODS:
        extension = planned(method=method)
        assert Extension(**extension.specification()) == extension


def test_numbers_are_hashed_as_they_are_written(tmp_path: Path) -> None:
    for text in ("4", "4.0"):
        (tmp_path / "own.yaml").write_text(f"context: 8192\nfactor: {text}\n", encoding="utf-8")
        settings = context_settings(config=tmp_path / "own.yaml")
        assert settings is not None
        assert str(settings.factor) == text


def test_flags_come_before_a_file(tmp_path: Path) -> None:
    assert context_settings() is None
    assert context_settings(4096) == ContextSettings(4096)
    path = tmp_path / "own.yaml"
    path.write_text("context: 8192\nmethod: linear\nfactor: 3\noriginal:\n", encoding="utf-8")
    assert context_settings(config=path) == ContextSettings(8192, "linear", None, 3)
    assert context_settings(4096, "ntk", 1024, path) == ContextSettings(4096, "ntk", 1024, 3)


@pytest.mark.parametrize("name", context_names())
def test_what_is_shipped_can_be_planned(name: str) -> None:
    settings = context_settings(config=name)
    assert settings is not None
    assert plan_extension(PLAIN, settings) == planned()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("method: yarn", "give --context"),
        ("kontext: 8192", "unknown key 'kontext'"),
        ("context: 8k", "'context' is "),
        ("context: 8192\nfactor: four", "'factor' is "),
        ("context: 0", "'context' is "),
        ("context: 8192.0", "'context' is "),
        ("context: 8192\nbeta_fast: true", "'beta_fast' is "),
        ("- 8192", r"it is "),
        ("{", "line 1: not valid YAML"),
    ],
)
def test_a_file_that_says_something_else(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=words):
        context_settings(config=path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(EvalkitError, match="cannot be read: No such file"):
        context_settings(config=tmp_path / "own.yaml")
    with pytest.raises(UnknownNameError, match="unknown context file 'yarn_2k'"):
        context_settings(config="yarn_2k")
