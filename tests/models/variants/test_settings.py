"""Valid settings of a config, and errors of invalid ones."""

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
from tests.models.variants.building import COG, DIFFERENTIAL, FAMILIES, INTEGRAL, VANILLA, config_of

SHAPE = Shape(layers=3, heads=8, kv_heads=4, head_size=16)
CONFIGS = {"vanilla": VANILLA, "cog": COG, "differential": DIFFERENTIAL, "integral": INTEGRAL}
EVERY_KEY = [(name, key) for name, config in CONFIGS.items() for key in config]


def refused(config: dict[str, Any], shape: Shape = SHAPE) -> str:
    with pytest.raises(ValueError) as caught:
        read_variant(config, shape)
    return str(caught.value)


def test_what_is_read() -> None:
    assert read_variant(VANILLA, SHAPE) == Variant("vanilla", (), None)
    assert read_variant(COG, SHAPE) == Variant("cog", (1, 2), Cog(keep_last=False))
    assert read_variant(DIFFERENTIAL, SHAPE) == Variant(
        "differential", (1, 2), Differential("halve", "adjacent", "affine", 1e-5, "absolute")
    )
    assert read_variant(INTEGRAL, SHAPE) == Variant(
        "integral", (1, 2), Integral(2, "per_signal", "contiguous", "signal", "logits")
    )


def test_every_key_is_known() -> None:
    assert set(ALL_KEYS) == {key for config in CONFIGS.values() for key in config}
    for name, config in CONFIGS.items():
        assert set(config) == {"attention_variant", "variant_layers", *KEYS[name]}


@pytest.mark.parametrize(("name", "key"), EVERY_KEY)
def test_nothing_has_a_default(name: str, key: str) -> None:
    """Absent, or None: refused by the key's name, and with the variant's where that is known."""
    without = {other: value for other, value in CONFIGS[name].items() if other != key}
    message = refused(without)
    assert message.startswith(f"the config lacks '{key}', which ")
    assert key == "attention_variant" or f"{name} attention needs" in message
    assert refused(without | {key: None}) == message


@pytest.mark.parametrize(("name", "key"), EVERY_KEY)
@pytest.mark.parametrize("family", FAMILIES)
def test_nor_in_a_models_config(family: str, name: str, key: str) -> None:
    config = config_of(family, {other: value for other, value in CONFIGS[name].items() if other != key})
    with pytest.raises(ValueError, match=f"the config lacks '{key}'"):
        config.variant()


def test_the_choices_are_in_the_message() -> None:
    assert refused(VANILLA | {"attention_variant": "diff"}) == (
        "attention_variant is 'diff'; expected one of vanilla, cog, differential, integral"
    )
    without = {key: value for key, value in INTEGRAL.items() if key != "signal_rope"}
    assert refused(without).endswith("which integral attention needs (per_signal, full_head)")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            INTEGRAL | {"signal_rope": "per-signal"},
            "signal_rope is 'per-signal'; expected one of per_signal, full_head",
        ),
        (INTEGRAL | {"signal_layout": ["tiled"]}, "signal_layout is ['tiled']; expected one of contiguous, tiled"),
        (INTEGRAL | {"signal_scale": 8}, "signal_scale is 8; expected one of signal, head"),
        (INTEGRAL | {"signal_domain": ""}, "signal_domain is ''; expected one of logits, probabilities"),
        (INTEGRAL | {"num_signals": 0}, "num_signals is 0; expected a whole number from 1"),
        (INTEGRAL | {"num_signals": True}, "num_signals is True; expected a whole number from 1"),
        (INTEGRAL | {"num_signals": 2.0}, "num_signals is 2.0; expected a whole number from 1"),
        (INTEGRAL | {"num_signals": "2"}, "num_signals is '2'; expected a whole number from 1"),
        (DIFFERENTIAL | {"diff_heads": "half"}, "diff_heads is 'half'; expected one of halve, keep"),
        (DIFFERENTIAL | {"diff_pairing": "half"}, "diff_pairing is 'half'; expected one of adjacent, halves"),
        (DIFFERENTIAL | {"diff_subln": True}, "diff_subln is True; expected one of affine, plain, none"),
        (DIFFERENTIAL | {"diff_subln_eps": 0}, "diff_subln_eps is 0; expected a positive number"),
        (DIFFERENTIAL | {"diff_subln_eps": "1e-5"}, "diff_subln_eps is '1e-5'; expected a positive number"),
        (DIFFERENTIAL | {"diff_subln_eps": float("nan")}, "diff_subln_eps is nan; expected a positive number"),
        (DIFFERENTIAL | {"diff_subln_eps": True}, "diff_subln_eps is True; expected a positive number"),
        (DIFFERENTIAL | {"lambda_index": 1}, "lambda_index is 1; expected one of absolute, relative"),
        (COG | {"cog_keep_last": 1}, "cog_keep_last is 1; expected true or false"),
    ],
)
def test_values(config: dict[str, Any], words: str) -> None:
    assert refused(config) == words


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("other", CONFIGS)
def test_keys_without_a_meaning(name: str, other: str) -> None:
    """Each variant's own keys are rejected in any other's config, even with their valid value."""
    for key in set(KEYS[other]) - set(KEYS[name]):
        message = f"'{key}' has no meaning for {name} attention; leave it out"
        assert refused(CONFIGS[name] | {key: CONFIGS[other][key]}) == message
        read_variant(CONFIGS[name] | {key: None}, SHAPE)


def test_a_false_key_is_a_key() -> None:
    assert "'cog_keep_last' has no meaning" in refused(INTEGRAL | {"cog_keep_last": False})


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ("top 50%", "variant_layers is 'top 50%'; expected a list of layer numbers, from 0"),
        ([1.0], "variant_layers is [1.0]; expected a list of layer numbers, from 0"),
        ([True], "variant_layers is [True]; expected a list of layer numbers, from 0"),
        ([1, 3], "variant_layers contains 3, but the layers are 0 to 2"),
        ([-1], "variant_layers contains -1, but the layers are 0 to 2"),
        ([1, 1], "variant_layers is [1, 1]; expected each layer once, in order"),
        ([2, 1], "variant_layers is [2, 1]; expected each layer once, in order"),
        ([], "variant_layers is empty, so no layer has integral attention"),
    ],
)
def test_layers(layers: Any, words: str) -> None:
    assert refused(INTEGRAL | {"variant_layers": layers}) == words


def test_vanilla_has_no_layers() -> None:
    assert refused(VANILLA | {"variant_layers": [0]}) == "variant_layers must be empty for vanilla attention"


def test_cog_keeps_the_last_layer() -> None:
    kept = COG | {"cog_keep_last": True}
    assert refused(kept) == "cog_keep_last is true, but variant_layers contains the last layer, 2; change one"
    assert read_variant(kept | {"variant_layers": [1]}, SHAPE).settings == Cog(keep_last=True)


class TestShapes:
    """The paper's shapes are possible, and what is not says why, with the numbers."""

    @pytest.mark.parametrize(("head_size", "signals", "size"), [(96, 8, 12), (48, 8, 6), (64, 8, 8), (96, 2, 48)])
    def test_of_the_paper(self, head_size: int, signals: int, size: int) -> None:
        settings = read_variant(INTEGRAL | {"num_signals": signals}, Shape(20, 8, 8, head_size)).settings
        assert isinstance(settings, Integral) and settings.size(head_size) == size

    def test_signals_that_do_not_divide_a_head(self) -> None:
        message = refused(INTEGRAL | {"num_signals": 5}, Shape(3, 8, 8, 96))
        assert message == "5 signals do not divide a head of 96 channels: 96 / 5 = 19.2"
        assert "16 / 32 = 0.5" in refused(INTEGRAL | {"num_signals": 32})

    def test_an_odd_signal_cannot_rotate(self) -> None:
        """32 heads of 24, eight signals: 3."""
        message = refused(INTEGRAL | {"num_signals": 8}, Shape(3, 32, 32, 24))
        assert message == "a signal (24 / 8) has 3 channels; rotary embeddings need an even number from 2"
        read_variant(INTEGRAL | {"num_signals": 8, "signal_rope": "full_head"}, Shape(3, 32, 32, 24))

    def test_pythia(self) -> None:
        """A quarter of a head rotates: of signals of 12, 3 channels. With the paper's two signals, 12 of 48."""
        shape = Shape(12, 8, 8, 96, rotary_share=0.25)
        assert refused(INTEGRAL | {"num_signals": 8}, shape) == (
            "a signal (96 / 8) has 12 channels, of which 0.25 rotate: 3; rotary embeddings need an even number from 2"
        )
        read_variant(INTEGRAL | {"num_signals": 2}, shape)
        read_variant(INTEGRAL | {"num_signals": 8, "signal_rope": "full_head"}, shape)
        assert "rotate: 0.5;" in refused(INTEGRAL | {"num_signals": 8}, Shape(12, 8, 8, 16, 0.25))

    def test_pythia_as_a_model(self) -> None:
        config = config_of(
            "gpt_neox", INTEGRAL | {"num_signals": 8}, hidden_size=768, rope_parameters={"partial_rotary_factor": 0.25}
        )
        assert config.shape() == Shape(3, 8, 8, 96, 0.25)
        with pytest.raises(ValueError, match=r"of which 0\.25 rotate: 3;"):
            config.variant()

    def test_a_share_is_the_decimal_that_was_written(self) -> None:
        """0.1 × 20 is 2, though 0.1 in binary is a little more."""
        read_variant(INTEGRAL | {"num_signals": 4}, Shape(3, 8, 8, 80, 0.1))

    @pytest.mark.parametrize(("heads", "kv_heads", "what"), [(9, 9, "9 heads"), (6, 3, "3 key-value heads")])
    def test_pairs_of_heads(self, heads: int, kv_heads: int, what: str) -> None:
        message = refused(DIFFERENTIAL, Shape(3, heads, kv_heads, 16))
        assert message == (
            f"differential attention with diff_heads 'halve' pairs heads, but there are {what}; "
            "use an even number, or diff_heads 'keep'"
        )
        read_variant(DIFFERENTIAL | {"diff_heads": "keep"}, Shape(3, heads, kv_heads, 16))

    def test_halves_of_a_head(self) -> None:
        kept = DIFFERENTIAL | {"diff_heads": "keep"}
        assert refused(kept, Shape(3, 8, 8, 15)) == (
            "differential attention with diff_heads 'keep' halves each head, but its size 15 is odd"
        )
        assert refused(kept, Shape(3, 8, 8, 6)) == (
            "half of a head of 6 has 3 channels; rotary embeddings need an even number from 2"
        )
        assert "half of a head of 24 has 12 channels, of which 0.25 rotate: 3" in refused(
            kept, Shape(3, 8, 8, 24, 0.25)
        )

    @given(
        signals=st.integers(1, 40),
        head_size=st.integers(1, 128),
        quarters=st.integers(1, 4),
        rope=st.sampled_from(["per_signal", "full_head"]),
    )
    def test_what_is_read_can_be_built(self, signals: int, head_size: int, quarters: int, rope: str) -> None:
        """Accepted exactly where signals are whole and what rotates of one is even, counted in quarters of channels."""
        config = INTEGRAL | {"num_signals": signals, "signal_rope": rope}
        shape = Shape(3, 8, 8, head_size, quarters / 4)
        turning = head_size // signals * quarters  # of four
        possible = head_size % signals == 0 and (rope == "full_head" or (turning % 8 == 0 and turning > 0))
        if possible:
            assert read_variant(config, shape).name == "integral"
        else:
            message = refused(config, shape)
            assert str(head_size) in message and str(signals) in message


@given(signals=st.integers(1, 64), size=st.integers(1, 64), domain=st.sampled_from(["signal", "head"]))
def test_the_mean_of_scaled_logits_is_a_scale_of_the_whole(signals: int, size: int, domain: str) -> None:
    """(1/S) Σ q·k × factor = QKᵀ × factor / S; two roundings of float64 are allowed."""
    settings = Integral(signals, "per_signal", "tiled", domain, "logits")
    head = signals * size
    assert settings.factor(head) == pytest.approx((size if domain == "signal" else head) ** -0.5, rel=5e-16)
    assert settings.mean_factor(head) == pytest.approx(settings.factor(head) / signals, rel=5e-16)
    assert Integral(1, "per_signal", "tiled", domain, "logits").mean_factor(head) == head**-0.5


class TestLayersOf:
    def test_of_the_paper(self) -> None:
        """Layers 10–19 of 20 and 11–21 of 22."""
        assert layers_of("top 50%", 20) == tuple(range(10, 20))
        assert layers_of("top 50 %", 22) == tuple(range(11, 22))
        assert layers_of("bottom 50%", 20) == tuple(range(10))
        assert layers_of("top 25%", 20) == tuple(range(15, 20))
        assert layers_of("top 75%", 20) == tuple(range(5, 20))
        assert layers_of("all", 3) == layers_of("top 100%", 3) == (0, 1, 2)
        assert layers_of("none", 3) == ()
        assert layers_of([2, 0], 3) == (2, 0)

    def test_a_share_that_is_no_whole_number(self) -> None:
        with pytest.raises(ValueError) as caught:
            layers_of("top 25%", 22)
        assert str(caught.value) == "variant_layers 'top 25%': 25 % of 22 layers is 5.5; list the layers"

    @pytest.mark.parametrize("nonsense", ["", "top", "top 50", "half", "top 0%", "top 101%", "middle 50%", "top -5%"])
    def test_nonsense(self, nonsense: str) -> None:
        with pytest.raises(ValueError, match="expected all, none, 'top 50%', 'bottom 50%' or a list of layers"):
            layers_of(nonsense, 20)

    @given(percent=st.integers(1, 100), layers=st.integers(1, 100))
    def test_top_and_bottom(self, percent: int, layers: int) -> None:
        """Either both are whole and meet end to end, or both are refused."""
        if percent * layers % 100:
            for end in ("top", "bottom"):
                with pytest.raises(ValueError, match="list the layers"):
                    layers_of(f"{end} {percent}%", layers)
            return
        top, bottom = (layers_of(f"{end} {percent}%", layers) for end in ("top", "bottom"))
        assert len(top) == len(bottom) == percent * layers // 100
        rest = layers_of(f"bottom {100 - percent}%", layers) if percent < 100 else ()
        assert rest + top == tuple(range(layers)) and bottom == tuple(range(len(bottom)))
