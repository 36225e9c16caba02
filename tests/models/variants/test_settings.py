"""Valid settings of a config and errors of invalid ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalkit.models.variants.settings import (
    ALL_KEYS,
    KEYS,
    Cog,
    Differential,
    Integral,
    Shape,
    Variant,
    layers_of,
    read_variant,
)
from tests.models.variants.building import COG, DIFFERENTIAL, INTEGRAL, VANILLA, config_of

SHAPE = Shape(layers=3, heads=8, kv_heads=4, head_size=16)
CONFIGS = {"vanilla": VANILLA, "cog": COG, "differential": DIFFERENTIAL, "integral": INTEGRAL}
KEPT = DIFFERENTIAL | {"diff_heads": "keep"}
EIGHT = INTEGRAL | {"num_signals": 8}


def refused(config: dict[str, Any], shape: Shape = SHAPE) -> str:
    with pytest.raises(ValueError) as caught:
        read_variant(config, shape)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_read() -> None:
    settings = {
        "vanilla": None,
        "cog": Cog(cog_keep_last=False),
        "differential": Differential("halve", "adjacent", "affine", 1e-5, "absolute"),
        "integral": Integral(2, "per_signal", "contiguous", "signal", "logits"),
    }
    for name, config in CONFIGS.items():
        assert read_variant(config, SHAPE) == Variant(name, () if name == "vanilla" else (1, 2), settings[name])
    assert read_variant(COG | {"cog_keep_last": True, "variant_layers": [1]}, SHAPE).settings == Cog(cog_keep_last=True)
    assert set(ALL_KEYS) == {key for config in CONFIGS.values() for key in config}


@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_has_a_default_nor_a_meaning_elsewhere(name: str) -> None:
    """Absent, or None: refused by the key's name, in a model's config too. Another variant's config refuses it."""
    for key in CONFIGS[name]:
        without = {other: value for other, value in CONFIGS[name].items() if other != key}
        assert f"'{key}'" in refused(without) and refused(without | {key: None}) == refused(without)
        with pytest.raises(ValueError, match=f"'{key}'"):
            config_of("llama", without).variant()
        for other, config in CONFIGS.items():
            if key in KEYS[name] and key not in KEYS[other]:
                assert f"'{key}'" in refused(config | {key: CONFIGS[name][key]})
                read_variant(config | {key: None}, SHAPE)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("attention_variant", ["diff"]),
        ("signal_rope", ["per-signal"]),
        ("signal_layout", [["tiled"]]),
        ("num_signals", [0, True, 2.0, "2", 5, 32]),
        ("diff_subln", [True]),
        ("diff_subln_eps", [0, "1e-5", float("nan"), True]),
        ("lambda_index", [1]),
        ("cog_keep_last", [1, True]),  # the last layer is a cog layer
        ("variant_layers", ["top 50%", [1.0], [True], [1, 3], [-1], [1, 1], [2, 1], []]),
    ],
)
def test_invalid_values(key: str, values: list[Any]) -> None:
    config = next(config for config in (INTEGRAL, DIFFERENTIAL, COG) if key in config)
    for value in values:
        message = refused(config | {key: value})
        assert key in message or "signal" in message
    assert "variant_layers" in refused(VANILLA | {"variant_layers": [0]})


def test_shapes() -> None:
    """Those of the paper are possible, and what is not says why, with the numbers."""
    for head_size, signals, size in ((96, 8, 12), (48, 8, 6), (64, 8, 8), (96, 2, 48)):
        settings = read_variant(INTEGRAL | {"num_signals": signals}, Shape(20, 8, 8, head_size)).settings
        assert isinstance(settings, Integral) and settings.size(head_size) == size
    # Pythia: a quarter of a head rotates, of signals of 12 channels 3; with the paper's two signals, 12 of 48
    pythia = Shape(12, 8, 8, 96, rotary_share=0.25)
    assert "12 channels, of which 0.25 rotate: 3" in refused(EIGHT, pythia)
    read_variant(INTEGRAL, pythia)
    config = config_of("gpt_neox", EIGHT, hidden_size=768, rope_parameters={"partial_rotary_factor": 0.25})
    assert config.shape() == Shape(3, 8, 8, 96, 0.25)
    # 0.1 × 20 is 2, though 0.1 in binary is a little more
    read_variant(INTEGRAL | {"num_signals": 4}, Shape(3, 8, 8, 80, 0.1))
    for heads, kv_heads, noun in ((9, 9, "9 heads"), (6, 3, "3 key-value heads")):
        assert noun in refused(DIFFERENTIAL, Shape(3, heads, kv_heads, 16))
        read_variant(KEPT, Shape(3, heads, kv_heads, 16))
    for shape, noun in ((Shape(3, 8, 8, 15), "15 is odd"), (Shape(3, 8, 8, 6), "3 channels"),
                        (Shape(3, 8, 8, 24, 0.25), "12 channels")):  # fmt: skip
        assert noun in refused(KEPT, shape)


@given(
    signals=st.integers(1, 40),
    head_size=st.integers(1, 128),
    quarters=st.integers(1, 4),
    rope=st.sampled_from(["per_signal", "full_head"]),
)
def test_what_is_read_can_be_built(signals: int, head_size: int, quarters: int, rope: str) -> None:
    """Accepted exactly where signals are whole and what rotates of one is even, counted in quarters of channels."""
    config = INTEGRAL | {"num_signals": signals, "signal_rope": rope}
    shape = Shape(3, 8, 8, head_size, quarters / 4)
    turning = head_size // signals * quarters  # of four
    if head_size % signals == 0 and (rope == "full_head" or (turning % 8 == 0 and turning > 0)):
        assert read_variant(config, shape).name == "integral"
    else:
        message = refused(config, shape)
        assert str(head_size) in message and str(signals) in message


@given(percent=st.integers(1, 100), layers=st.integers(1, 100))
def test_shares_of_layers(percent: int, layers: int) -> None:
    """Either top and bottom are whole and meet end to end, or both are refused."""
    if percent * layers % 100:
        for end in ("top", "bottom"):
            with pytest.raises(ValueError, match="list the layers"):
                layers_of(f"{end} {percent}%", layers)
        return
    top, bottom = (layers_of(f"{end} {percent}%", layers) for end in ("top", "bottom"))
    assert len(top) == len(bottom) == percent * layers // 100
    rest = layers_of(f"bottom {100 - percent}%", layers) if percent < 100 else ()
    assert rest + top == tuple(range(layers)) and bottom == tuple(range(len(bottom)))


def test_other_layers() -> None:
    """Layers 10–19 of 20 and 11–21 of 22 are the paper's."""
    assert layers_of("top 50%", 20) == tuple(range(10, 20)) and layers_of("top 50 %", 22) == tuple(range(11, 22))
    assert layers_of("all", 3) == (0, 1, 2) and layers_of("none", 3) == () and layers_of([2, 0], 3) == (2, 0)
    for nonsense in ("", "top", "top 50", "half", "top 0%", "top 101%", "middle 50%", "top -5%"):
        with pytest.raises(ValueError, match="variant_layers"):
            layers_of(nonsense, 20)
