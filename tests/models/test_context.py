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

from evalkit.errors import CheckpointError, UsageError
from evalkit.models.context.extension import (
    METHODS,
    ContextSettings,
    Extension,
    configured_window,
    plan_extension,
    rotary_frequencies,
    yarn_ramp,
)
from evalkit.models.loading.spec import context_settings

PLAIN = {"max_position_embeddings": 2048, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
YARNED = {
    "max_position_embeddings": 8192,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
}
FLOAT32 = 5e-7
"""Of the unstretched frequency: transformers computes in float32, whose steps are 1.2e-7, and takes a few of them."""
UNSTRETCHED = 1e4 ** (-np.arange(0, 64, 2) / 64)


def planned(config: dict[str, Any] = PLAIN, **settings: Any) -> Extension:
    extension = plan_extension(config, ContextSettings(**({"target": 8192} | settings)))
    assert extension is not None
    return extension


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
    shape = {"hidden_size": 2 * size, "num_attention_heads": 2, "max_position_embeddings": 4 * original}
    for method, betas in (("yarn", {"beta_fast": fast, "beta_slow": slow}), ("linear", {})):
        config = LlamaConfig(**shape, rope_parameters=rope | betas | {"rope_type": method})
        expected, scaling = ROPE_INIT_FUNCTIONS[method](config)
        extension = planned(target=10**7, method=method, original=original, factor=factor, **betas)
        frequencies, own_scaling = rotary_frequencies(extension, size, theta)
        plain = theta ** (-np.arange(0, size, 2) / size)
        assert np.abs((frequencies - expected.double().numpy()) / plain).max() <= FLOAT32
        assert own_scaling == pytest.approx(scaling, rel=1e-12)


def test_ntk_changes_the_base_so_that_the_slowest_channel_is_interpolated_in_full() -> None:
    """The fastest keeps its frequency, the slowest has it divided by the factor (arXiv 2309.00071, section 3.1)."""
    frequencies, scaling = rotary_frequencies(planned(method="ntk"), 64, 1e4)
    assert (frequencies[0], scaling) == (1.0, 1.0)
    assert frequencies[-1] == pytest.approx(UNSTRETCHED[-1] / 4, rel=1e-12)
    assert np.all(np.diff(frequencies) < 0)
    with pytest.raises(CheckpointError, match="two rotating channels"):
        rotary_frequencies(planned(method="ntk"), 2, 1e4)


def test_dynamic_yarn_is_plain_within_the_window_and_yarn_past_it() -> None:
    """s = max(1, l / L) for every length l."""
    dynamic = planned(method="dynamic-yarn")
    for length in (1, 2048):
        frequencies, scaling = rotary_frequencies(dynamic, 64, 1e4, length)
        assert (np.array_equal(frequencies, UNSTRETCHED), scaling) == (True, 1.0)
    for length in (2049, 8192, 20000):
        frequencies, scaling = rotary_frequencies(dynamic, 64, 1e4, length)
        expected, expected_scaling = rotary_frequencies(planned(target=length), 64, 1e4)
        np.testing.assert_array_equal(frequencies, expected)
        assert scaling == expected_scaling == pytest.approx(0.1 * math.log(length / 2048) + 1)


def test_a_factor_of_one_changes_nothing_and_a_specification_is_the_extension_again() -> None:
    for method in METHODS:
        extension = planned(method=method, factor=1.0 if method in ("yarn", "linear", "ntk") else None)
        frequencies, scaling = rotary_frequencies(extension, 64, 1e4, 2048 if extension.by_length else None)
        np.testing.assert_allclose(frequencies, UNSTRETCHED, rtol=1e-15)
        assert scaling == 1.0
        assert Extension(**extension.specification()) == extension


def said_of(config: dict[str, Any], settings: ContextSettings) -> tuple[Extension | None, str]:
    said: list[str] = []
    return plan_extension(config, settings, said.append), "; ".join(said)


def test_windows() -> None:
    """Within the window nothing is stretched; the original window is reported, and may be given."""
    for target in (1, 2048):
        extension, said = said_of(PLAIN, ContextSettings(target))
        assert extension is None and "2,048 tokens already" in said
    assert plan_extension(PLAIN, ContextSettings(2048, original=2048)) is None
    assert "2,048 tokens (config.json, max_position_embeddings)" in said_of(PLAIN, ContextSettings(8192))[1]
    extension, said = said_of(PLAIN, ContextSettings(8192, original=1024, factor=4.0))
    assert extension is not None and (extension.original, extension.factor) == (1024, 4.0)
    assert "factor 4 extends 1,024 tokens to 4,096, not to 8,192" in said
    assert planned({"text_config": PLAIN}).original == 2048
    with pytest.raises(CheckpointError, match="--context-original"):
        planned({})
    for window in (-1, 0, None):
        assert configured_window({"max_position_embeddings": window}) == ("", None)
        assert configured_window({"max_position_embeddings": window, "n_positions": 64}) == ("n_positions", 64)


@pytest.mark.parametrize("kind", ["yarn", "llama3", "longrope", "dynamic", "linear"])
def test_what_is_stretched_already_is_not_stretched_twice(kind: str) -> None:
    config = {"max_position_embeddings": 8192, "rope_parameters": {"rope_type": kind, "factor": 4.0}}
    with pytest.raises(CheckpointError, match=f"rope_type {kind}.*--context-original"):
        planned(config, target=16384)
    extension, said = said_of(config, ContextSettings(16384, original=2048))
    assert extension is not None and extension.factor == 8.0 and "this is replaced" in said
    extension, said = said_of(config, ContextSettings(8192))
    assert extension is None and f"by the stretching in config.json (rope_type {kind}" in said


@pytest.mark.parametrize("target", [1024, 4096])
@pytest.mark.parametrize("config", [PLAIN, YARNED, {}], ids=["plain", "yarn", "silent"])
def test_a_given_original_window_replaces_that_of_the_config(config: dict[str, Any], target: int) -> None:
    """Also one shorter than config.json's; the config's own extension is removed, with unscaled frequencies."""
    assert planned(config, target=target, original=4096) == Extension("none", 4096, 4096, 1.0)


def test_several_kinds_of_rotary_embeddings_are_refused() -> None:
    nested = {"sliding_attention": {"rope_type": "default"}, "full_attention": {"rope_type": "default"}}
    with pytest.raises(CheckpointError, match="several kinds"):
        planned({"max_position_embeddings": 2048, "rope_parameters": nested})


@pytest.mark.parametrize(
    ("settings", "noun"),
    [
        ({"method": "yarm"}, "'yarm'"),
        ({"factor": 0.5}, "factor is 0.5"),
        ({"method": "dynamic-yarn", "factor": 4.0}, "factor has no meaning"),
        ({"method": "linear", "beta_fast": 32.0}, "beta_fast has no meaning"),
        ({"beta_fast": 1.0}, "beta_fast"),
        ({"attention_factor": math.nan}, "attention_factor"),
        # More tokens than float32 tells apart
        ({"target": 2**24 + 1}, "--context 16777217"),
        ({"target": 0}, "--context 0"),
        ({"original": 10**12}, "--context-original 1000000000000"),
    ],
)
def test_invalid_settings(settings: dict[str, Any], noun: str) -> None:
    with pytest.raises(UsageError, match=noun):
        planned(**settings)
    assert planned(PLAIN, target=2**24).target == 2**24


def test_flags_come_before_a_file(tmp_path: Path) -> None:
    """Numbers stay as they are written, since run ids depend on it."""
    assert context_settings() is None
    assert context_settings(4096) == ContextSettings(4096)
    path = tmp_path / "own.yaml"
    for factor in ("3", "3.0"):
        path.write_text(f"context: 8192\nmethod: linear\nfactor: {factor}\noriginal:\n", encoding="utf-8")
        settings = context_settings(config=path)
        assert settings is not None and str(settings.factor) == factor
        assert settings == ContextSettings(8192, "linear", None, 3)
        assert context_settings(4096, "ntk", 1024, path) == ContextSettings(4096, "ntk", 1024, 3)
    shipped = context_settings(config="yarn_2k_8k")
    assert shipped is not None and plan_extension(PLAIN, shipped) == planned()


@pytest.mark.parametrize(
    ("content", "noun"),
    [
        ("method: yarn", "--context"),
        ("kontext: 8192", "'kontext'"),
        ("context: 8k", "'context'"),
        ("context: 8192\nfactor: four", "'factor'"),
        ("context: 0", "'context'"),
        ("context: 8192\nbeta_fast: true", "'beta_fast'"),
        ("- 8192", "own.yaml"),
        ("{", "own.yaml"),
        (None, "own.yaml"),
    ],
)
def test_a_file_that_says_something_else(tmp_path: Path, content: str | None, noun: str) -> None:
    path = tmp_path / "own.yaml"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=noun):
        context_settings(config=path)
    with pytest.raises(UsageError, match="'yarn_2k'"):
        context_settings(config="yarn_2k")
