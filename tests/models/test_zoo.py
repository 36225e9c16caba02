"""The named models are the paper's, each can be built, and an invalid user file is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from evalkit.cli.model_reports import models_report
from evalkit.errors import UnknownNameError, UsageError
from evalkit.models.variants.settings import KEYS, Differential, Integral
from evalkit.models.zoo.named import NamedModel, models, named_model, read_models
from tests.printed import printed

UPPER, ALL = tuple(range(10, 20)), tuple(range(20))


def of(name: str) -> tuple[str, int, tuple[int, ...], int | None]:
    """Attention, heads, layers and signals."""
    shape = named_model(name).shape
    signals = getattr(shape.variant.settings, "signals", None)
    return shape.variant.name, shape.attention.heads, shape.variant.layers, signals


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-125m-vanilla", ("vanilla", 8, (), None)),
        ("llama-125m-vanilla-4h", ("vanilla", 4, (), None)),
        ("llama-125m-vanilla-32h", ("vanilla", 32, (), None)),
        ("llama-125m-cog", ("cog", 8, UPPER, None)),
        ("llama-125m-cog-all", ("cog", 8, ALL, None)),
        ("llama-125m-diff", ("differential", 8, UPPER, None)),
        ("llama-125m-intg", ("integral", 8, UPPER, 8)),
        ("llama-125m-intg-all", ("integral", 8, ALL, 8)),
        ("llama-125m-intg-2s-top25", ("integral", 8, tuple(range(15, 20)), 2)),
        ("llama-125m-intg-2s-top75", ("integral", 8, tuple(range(5, 20)), 2)),
        ("llama-125m-intg-2s-bottom50", ("integral", 8, tuple(range(10)), 2)),
        ("llama-125m-intg-16h-8s", ("integral", 16, UPPER, 8)),
        ("llama-1.2b-intg", ("integral", 32, tuple(range(11, 22)), 8)),
        ("qwen2-125m-intg-2s-all", ("integral", 8, ALL, 2)),
        ("pythia-125m-intg-2s-all", ("integral", 8, ALL, 2)),
    ],
)
def test_the_papers_tables(name: str, expected: tuple[str, int, tuple[int, ...], int | None]) -> None:
    assert of(name) == expected


def test_every_grid_of_the_paper_is_whole() -> None:
    """Heads × signals, shares of layers, backbones: each cell is a model."""
    found = {(m.shape.backbone, m.shape.attention.layers, *of(m.name)) for m in models() if "-prob" not in m.name}
    for heads in (8, 16):
        for signals in (2, 4, 8):
            assert ("llama", 20, "integral", heads, UPPER, signals) in found
    for layers in (ALL, UPPER, tuple(range(15, 20)), tuple(range(5, 20)), tuple(range(10))):
        assert ("llama", 20, "integral", 8, layers, 2) in found
    for backbone in ("llama", "qwen2", "gpt_neox"):
        assert (backbone, 20, "integral", 8, ALL, 2) in found
        assert (backbone, 20, "integral", 8, ALL, 8) in found
        assert (backbone, 20, "vanilla", 8, (), None) in found
    for heads in (4, 8, 16, 32):
        assert ("llama", 20, "vanilla", heads, (), None) in found


def test_only_the_domain_of_the_signals_is_another() -> None:
    for name in ("llama-125m-intg-2s", "llama-125m-intg-2s-all"):
        logits, probabilities = named_model(name).config, named_model(f"{name}-prob").config
        assert probabilities == logits | {"signal_domain": "probabilities"}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama-125m-diff", {"diff_heads": "keep"}),
        ("llama-125m-diff-all", {"diff_heads": "keep"}),
        ("llama-1.2b-diff", {"diff_heads": "keep"}),
        ("llama-125m-intg", {"signal_rope": "full_head"}),
        ("llama-125m-intg-all", {"signal_rope": "full_head"}),
        ("llama-1.2b-intg", {"signal_rope": "full_head"}),
        ("llama-1.2b-intg-all", {"signal_rope": "full_head"}),
    ],
)
def test_the_main_table_by_its_other_readings(name: str, changes: dict[str, str]) -> None:
    """Nothing else is another."""
    other = named_model(f"{name}-{next(iter(changes.values())).replace('_', '-')}")
    assert other.config == named_model(name).config | changes


def test_pythia_has_eight_signals_only_where_whole_heads_rotate(tmp_path: Path) -> None:
    entry: dict[str, object] = {"attention_variant": "integral", "variant_layers": "all", "num_signals": 8}
    with pytest.raises(UsageError, match=r"has 12 channels, of which 0\.25 rotate: 3; .* need an even number"):
        read_models(written(tmp_path, {"base": "pythia_125m", "models": {"eight": entry}}))
    assert named_model("pythia-125m-intg-all-full-head").config["signal_rope"] == "full_head"


def test_the_window_and_rotation_are_the_same_for_all_backbones() -> None:
    """docs/reference/models.md: not Qwen2's usual 1,000,000."""
    found = {(m.config["rope_parameters"]["rope_theta"], m.config["max_position_embeddings"]) for m in models()}
    assert found == {(10000.0, 2048)}


def test_every_open_reading_is_in_the_config() -> None:
    for model in models():
        if model.shape.variant.layers:
            assert set(KEYS[model.shape.variant.name]) <= set(model.config)
            assert model.config["model_type"] == f"evalkit_{model.shape.backbone}"
    settings = named_model("llama-125m-diff").shape.variant.settings
    assert settings == Differential("halve", "adjacent", "affine", 1e-5, "absolute")
    settings = named_model("llama-125m-intg").shape.variant.settings
    assert settings == Integral(8, "per_signal", "contiguous", "signal", "logits")


def test_vanilla_loads_without_evalkit_where_transformers_reads_its_tokenizer_right() -> None:
    kinds = {name: named_model(f"{name}-125m-vanilla").config["model_type"] for name in ("llama", "pythia", "qwen2")}
    assert kinds == {"llama": "llama", "pythia": "gpt_neox", "qwen2": "evalkit_qwen2"}
    assert "attention_variant" not in named_model("llama-125m-vanilla").config


def test_the_documentation_has_the_table() -> None:
    documented = (Path(__file__).parents[2] / "docs" / "reference" / "models.md").read_text(encoding="utf-8")
    assert "".join(f"    {line}\n" for line in printed(models_report()).splitlines()) in documented


def test_unknown_name() -> None:
    with pytest.raises(UnknownNameError, match="unknown model 'llama-125m-int': did you mean 'llama-125m-intg'"):
        named_model("llama-125m-int")


# A user's file

OWN: dict[str, Any] = {
    "base": "llama_125m",
    "models": {"mine": {"attention_variant": "integral", "variant_layers": "top 25%", "num_signals": 4}},
}


def written(folder: Path, content: object) -> Path:
    path = folder / "own.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
    return path


def test_a_users_model_is_a_few_lines(tmp_path: Path) -> None:
    path = written(tmp_path, OWN)
    mine = named_model(str(path))
    assert mine == named_model(f"{path}:mine")
    ours = named_model("llama-125m-intg")
    assert mine.config == ours.config | {"num_signals": 4, "variant_layers": [15, 16, 17, 18, 19]}
    assert (mine.name, mine.source) == ("mine", path)


def test_a_users_own_readings(tmp_path: Path) -> None:
    own = OWN | {"attentions": {"integral": {"signal_layout": "tiled"}}}
    config = named_model(str(written(tmp_path, own))).config
    assert (config["signal_layout"], config["signal_rope"]) == ("tiled", "per_signal")


def test_a_file_without_a_base_of_ours(tmp_path: Path) -> None:
    base = {key: value for key, value in named_model("llama-125m-vanilla").config.items() if key != "model_type"}
    own = {"backbone": "llama", "base": base, "models": {"a": {"attention_variant": "vanilla", "variant_layers": []}}}
    assert named_model(str(written(tmp_path, own))).config == {"model_type": "llama"} | base


def test_cog_can_keep_the_last_layer(tmp_path: Path) -> None:
    entry = {"attention_variant": "cog", "variant_layers": "top 50%", "cog_keep_last": True}
    model = named_model(str(written(tmp_path, {"base": "llama_125m", "models": {"kept": entry}})))
    assert model.shape.variant.layers == tuple(range(10, 19))


def changed(**keys: object) -> dict[str, Any]:
    return {"base": "llama_125m", "models": {"mine": OWN["models"]["mine"] | keys}}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a: [", "own.yaml, line 1: not valid YAML"),
        ("- a", r"own.yaml: it is "),
        (OWN | {"modls": {}}, "unknown key 'modls': did you mean 'models'"),
        (OWN | {"models": {}}, "own.yaml: 'models' is "),
        (OWN | {"models": []}, "own.yaml: 'models' is "),
        (OWN | {"base": "llama_125"}, "unknown base 'llama_125': did you mean 'llama_125m'"),
        (OWN | {"backbone": "llama"}, "leave 'backbone' out"),
        ({"base": {}, "models": {"a": {}}}, "own.yaml: write 'base' and 'backbone', or name"),
        (OWN | {"base": 3}, "'base' is "),
        (OWN | {"models": {"a": None}}, "'models.a' is "),
        (OWN | {"attentions": {"cog": 1}}, "'attentions.cog' is "),
        (
            {"base": {}, "backbone": "lama", "models": {"a": {}}},
            "'backbone' is ",
        ),
        (changed(num_signal=3), "model 'mine': unknown key 'num_signal': did you mean 'num_signals'"),
        (changed(num_signals=5), "model 'mine': 5 signals do not divide a head of 96 channels"),
        (changed(num_signals=32), "model 'mine': a signal .* has 3 channels"),
        (changed(num_signals=None), "model 'mine': .*num_signals"),
        (changed(variant_layers="top 33%"), "model 'mine': .*6.6; list the layers"),
        (changed(variant_layers=[20]), "model 'mine': variant_layers contains 20"),
        (changed(variant_layers=7), "model 'mine': variant_layers '7': expected all, none"),
        (changed(hidden_size="big"), "model 'mine': hidden_size is 'big'"),
        (changed(hidden_size=None), "model 'mine': 'hidden_size' is missing"),
        (changed(num_attention_heads=7), "hidden_size 768 is not divisible by num_attention_heads 7"),
        (changed(num_key_value_heads=3), "num_attention_heads 8 is not divisible by num_key_value_heads 3"),
        (changed(num_hidden_layers="20"), "model 'mine': num_hidden_layers is '20'; expected a whole number"),
        (changed(num_hidden_layers=10**12), "model 'mine': num_hidden_layers is 1.*; expected at most 10,000"),
        (
            changed(num_signals=None, attention_variant="cog", attention_dropout=0.1),
            "cog attention has no attention_dropout",
        ),
        (changed(attention_variant="integrl"), "attention_variant is 'integrl'; expected one of"),
        (changed(cog_keep_last=True), "'cog_keep_last' has no meaning for integral attention"),
    ],
)
def test_invalid_files(tmp_path: Path, content: object, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        read_models(written(tmp_path, content))
    assert "own.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_not_there_or_hold_several(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.yaml cannot be read: No such file"):
        named_model("nowhere.yaml")
    two = OWN | {"models": {"a": OWN["models"]["mine"], "b": OWN["models"]["mine"]}}
    path = written(tmp_path, two)
    with pytest.raises(UsageError, match=r"holds 2 models; name one, such as .*own\.yaml:a"):
        named_model(str(path))
    with pytest.raises(UnknownNameError, match="unknown model 'c'"):
        named_model(f"{path}:c")
    found: list[NamedModel] = read_models(path)
    assert [model.name for model in found] == ["a", "b"]
