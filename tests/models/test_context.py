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
    plan_extension,
    rotary_frequencies,
    yarn_ramp,
)
from evalkit.models.loading.spec import context_settings

PLAIN = {"max_position_embeddings": 2048, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
FLOAT32 = 5e-7
"""Of the unstretched frequency: transformers computes in float32, whose steps are 1.2e-7, and takes a few of them."""
UNSTRETCHED = 1e4 ** (-np.arange(0, 64, 2) / 64)


def planned(config: dict[str, Any] = PLAIN, say: Any = lambda _: None, **settings: Any) -> Extension:
    extension = plan_extension(config, ContextSettings(**({"context": 8192} | settings)), say)
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
        extension = planned(context=10**7, method=method, original=original, factor=factor, **betas)
        frequencies, own_scaling = rotary_frequencies(extension, size, theta)
        plain = theta ** (-np.arange(0, size, 2) / size)
        assert np.abs((frequencies - expected.double().numpy()) / plain).max() <= FLOAT32
        assert own_scaling == pytest.approx(scaling, rel=1e-12)


def test_ntk_and_dynamic_yarn() -> None:
    """ntk keeps the fastest frequency and divides the slowest by the factor (arXiv 2309.00071, section 3.1).

    dynamic-yarn is yarn with s = max(1, l / L) for every length l. A factor of one changes nothing.
    """
    frequencies, scaling = rotary_frequencies(planned(method="ntk"), 64, 1e4)
    assert (frequencies[0], scaling) == (1.0, 1.0) and np.all(np.diff(frequencies) < 0)
    assert frequencies[-1] == pytest.approx(UNSTRETCHED[-1] / 4, rel=1e-12)
    with pytest.raises(CheckpointError, match="two rotating channels"):
        rotary_frequencies(planned(method="ntk"), 2, 1e4)
    for length in (1, 2048, 2049, 8192, 20000):
        frequencies, scaling = rotary_frequencies(planned(method="dynamic-yarn"), 64, 1e4, length)
        expected = (UNSTRETCHED, 1.0) if length <= 2048 else rotary_frequencies(planned(context=length), 64, 1e4)
        np.testing.assert_array_equal(frequencies, expected[0])
        assert scaling == expected[1] == pytest.approx(0.1 * math.log(max(length / 2048, 1)) + 1)
    for method in METHODS:
        extension = planned(method=method, factor=1.0 if method in ("yarn", "linear", "ntk") else None)
        frequencies, scaling = rotary_frequencies(extension, 64, 1e4, 2048 if extension.by_length else None)
        np.testing.assert_allclose(frequencies, UNSTRETCHED, rtol=1e-15)
        assert scaling == 1.0 and Extension(**extension.specification()) == extension


def test_windows() -> None:
    """Within the window nothing is stretched; the original window is reported, and may be given."""
    said: list[str] = []
    for target, original in ((1, None), (2048, None), (2048, 2048)):
        assert plan_extension(PLAIN, ContextSettings(context=target, original=original), said.append) is None
        assert "2,048 tokens already" in said[-1]
    extension = planned(original=1024, factor=4.0, say=said.append)
    assert (extension.original, extension.factor) == (1024, 4.0)
    assert "1,024 tokens" in said[-2] and "to 4,096, not to 8,192" in said[-1]
    assert planned({"text_config": PLAIN}).original == planned({"n_positions": 2048}).original == 2048
    with pytest.raises(CheckpointError, match="--context-original"):
        planned({})


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_what_is_stretched_already_is_not_stretched_twice(kind: str) -> None:
    config = {"max_position_embeddings": 8192, "rope_parameters": {"rope_type": kind, "factor": 4.0}}
    with pytest.raises(CheckpointError, match=f"rope_type {kind}.*--context-original"):
        planned(config, context=16384)
    assert planned(config, context=16384, original=2048).factor == 8.0
    assert plan_extension(config, ContextSettings(context=8192)) is None
    # A given window replaces that of the config, also a shorter one, and removes its own stretching
    for target in (1024, 4096):
        assert planned(config, context=target, original=4096) == Extension("none", 4096, 4096, 1.0)
    nested = {"sliding_attention": {"rope_type": kind}, "full_attention": {"rope_type": "default"}}
    with pytest.raises(CheckpointError, match="several kinds"):
        planned({"max_position_embeddings": 2048, "rope_parameters": nested})


def test_invalid_settings() -> None:
    for settings, noun in (
        ({"method": "yarm"}, "'yarm'"),
        ({"factor": 0.5}, "factor is 0.5"),
        ({"factor": 1e9}, r"factor is 1e\+09"),
        ({"method": "linear", "factor": 8193}, "factor is 8193"),  # of 8192 tokens: none has a position of its own
        ({"method": "dynamic-yarn", "factor": 4.0}, "factor has no meaning"),
        ({"method": "linear", "beta_fast": 32.0}, "beta_fast has no meaning"),
        ({"beta_fast": 1.0}, "beta_fast"),
        ({"context": 2**24 + 1}, "--context 16777217"),  # more tokens than float32 tells apart
    ):
        with pytest.raises(UsageError, match=noun):
            planned(**settings)


def test_flags_come_before_a_file(tmp_path: Path) -> None:
    """Numbers stay as they are written, since run ids depend on it."""
    assert context_settings() == ContextSettings()
    assert context_settings(4096) == ContextSettings(context=4096)
    path = tmp_path / "own.yaml"
    for factor in ("3", "3.0"):
        path.write_text(f"context: 8192\nmethod: linear\nfactor: {factor}\noriginal:\n", encoding="utf-8")
        settings = context_settings(config=path)
        assert settings == ContextSettings(context=8192, method="linear", factor=3) and str(settings.factor) == factor
        assert context_settings(4096, "ntk", 1024, path) == ContextSettings(
            context=4096, method="ntk", original=1024, factor=3
        )
    shipped = context_settings(config="yarn_2k_8k")
    assert plan_extension(PLAIN, shipped) == planned()
    for content, noun in (("method: yarn", "--context"), ("kontext: 8192", "'kontext'"),
                          ("context: 8192\nattention_factor: .nan", "'attention_factor'")):  # fmt: skip
        path.write_text(content, encoding="utf-8")
        with pytest.raises(UsageError, match=noun):
            context_settings(config=path)
    with pytest.raises(UsageError, match="'yarn_2k'"):
        context_settings(config="yarn_2k")
