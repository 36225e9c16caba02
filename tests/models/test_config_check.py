"""A config.json with values of the wrong type ends in a one-line error with the key, or loads."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalkit.benchmarks.generated import context_of
from evalkit.cli.model_reports import model_report
from evalkit.errors import CheckpointError, EvalkitError, UsageError
from evalkit.generation.prompts import end_tokens
from evalkit.models.context.extension import ContextSettings
from evalkit.models.loading.fingerprint import fingerprint
from evalkit.models.loading.locate import locate, resolve_dtype
from evalkit.models.loading.spec import ModelSpec, extension_of
from tests.models.loading import edit_config, load_folder, refused
from tests.tiny import tiny_checkpoint

OBJECTS = ("auto_map", "text_config", "quantization_config", "rope_scaling", "rope_parameters")
WRONG: list[tuple[str, Any]] = [
    *((key, value) for key in ("model_type", "dtype", "torch_dtype") for value in ([], {}, 3)),
    *(
        (key, value)
        for key in ("num_hidden_layers", "max_position_embeddings", "n_positions", "num_labels")
        for value in ("2", [], {}, 2.5, True)
    ),
    *((key, value) for key in ("num_hidden_layers", "n_layer") for value in (0, -1, 10_001, 10**15)),
    *((key, value) for key in ("num_labels", "num_experts", "n_routed_experts") for value in (-1, 10**9)),
    *((key, value) for key in ("is_decoder", "tie_word_embeddings") for value in ("false", 0, [])),
    *((key, value) for key in OBJECTS for value in ("x", [1], 3)),
    *(("architectures", value) for value in ({}, "LlamaForCausalLM", [3], [[]])),
    *(("rope_parameters", {"factor": value}) for value in ("x", -1, 0, [2], True)),
    *(("rope_parameters", {"rope_theta": value}) for value in ("x", -1e4, 1, 0.0)),
    *(("rope_theta", value) for value in ("x", -1e4)),
    *(("rope_scaling", {key: -1}) for key in ("beta_fast", "attention_factor", "high_freq_factor")),
    ("rope_scaling", {"long_factor": [1.0, -1.0]}),
    ("rope_parameters", {"full_attention": {"factor": -1}}),
    *((key, value) for key in ("rms_norm_eps", "rope_theta") for value in (math.inf, math.nan)),
    *(("rms_norm_eps", {"__float__": value}) for value in ("Infinity", "NaN")),
    ("rope_parameters", {"factor": math.inf}),
    ("layer_scales", [1.0, -math.inf]),
    ("rope_parameters", {"rope_type": []}),
    *(("rope_parameters", {"partial_rotary_factor": value}) for value in (0, 1.5, "x")),
    ("rotary_pct", -0.25),
]


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_values_of_another_kind(folder: Path, key: str, value: Any) -> None:
    edit_config(folder, **{key: value})
    noun, inner = key, value
    while isinstance(inner, dict) and inner and key.startswith("rope"):
        noun, inner = next(iter(inner.items()))
    with pytest.raises(CheckpointError, match=rf"config\.json: {noun} is .*expected") as caught:
        resolve_dtype(locate(str(folder)), "auto")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("infinity", [math.inf, {"__float__": "Infinity"}])
def test_infinity_where_transformers_writes_it(folder: Path, infinity: Any) -> None:
    edit_config(folder, time_step_limit=[0.0, infinity])
    assert resolve_dtype(locate(str(folder)), "auto") == "float32"


def test_the_part_of_a_model_that_reads_text(folder: Path) -> None:
    edit_config(folder, text_config={"num_hidden_layers": "many"})
    refused(folder, r"num_hidden_layers is 'many'")


def test_a_value_is_shown_in_short(folder: Path) -> None:
    edit_config(folder, model_type=["llama"] * 1000)
    assert len(refused(folder, "model_type is ").partition("config.json: ")[2]) < 120


def test_code_of_another_repository(folder: Path) -> None:
    """It would be run without being in the fingerprint."""
    names = {"AutoConfig": "owner/name--modeling.Config", "AutoModelForCausalLM": "modeling.Model"}
    edit_config(folder, model_type="evalkit_own", auto_map=names)
    refused(folder, r"refers to code in another repository \('owner/name--modeling\.Config'\)", trust_remote_code=True)


@pytest.mark.parametrize("auto_map", [{"AutoTokenizer": ["owner/name--tok.Own", None]}, ["owner/name--tok.Own", None]])
def test_a_tokenizers_code_of_another_repository(folder: Path, auto_map: Any) -> None:
    (folder / "tokenizer.json").write_text("{}")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({"auto_map": auto_map, "tokenizer_class": "Own"}))
    refused(folder, "refers to code in another repository", trust_remote_code=True)


def test_weights_that_the_config_names(folder: Path) -> None:
    """transformers would load these, and the fingerprint counts others."""
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    edit_config(folder, transformers_weights="other.safetensors")
    refused(folder, r"names its weights in transformers_weights \('other\.safetensors'\)")


def test_a_window_beyond_float32_positions(folder: Path) -> None:
    """A needle test would make texts of that length."""
    edit_config(folder, max_position_embeddings=10**12)
    with pytest.raises(UsageError, match="a context window of 1,000,000,000,000 tokens, above the 16,777,216"):
        context_of(ModelSpec(str(folder)), locate(str(folder)), "evalkit needle")
    refused(
        folder, "has max_position_embeddings 1,000,000,000,000, more than the 16,777,216 positions .*--context-original"
    )
    settings = ContextSettings(256, original=256)
    assert load_folder(folder, extension=extension_of(locate(str(folder)), settings)).window == 256


def test_a_generation_config_that_is_no_object(folder: Path) -> None:
    (folder / "generation_config.json").write_text("[1]")
    refused(folder, r"generation_config\.json: expected a JSON object, found list")


@pytest.mark.parametrize("value", [{}, "x", [1, "x"], 1.5])
def test_ends_that_are_no_tokens(folder: Path, value: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(CheckpointError) as caught:
        loaded = load_folder(folder)
        end_tokens(loaded.model, loaded.tokenizer)
    assert "\n" not in str(caught.value)


VALUES = [None, [], {}, "", "x", True, -1, 0, 0.5, 10**12, float("inf"), "1", [1, 2], {"a": 1}, "\ud800"]
MORE = (
    "layer_types",
    "head_dim",
    "sliding_window",
    "id2label",
    "tokenizer_class",
    "_attn_implementation",
    "num_experts",
)


@settings(max_examples=60)
@given(data=st.data())
def test_any_value_anywhere(saved: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """In all three files; 4,000 of these were tried once, on Llama, GPT-NeoX, GPT-J and a differential model."""
    folder = shutil.copytree(saved, tmp_path_factory.mktemp("any") / "small")
    path = folder / data.draw(st.sampled_from(["config.json", "tokenizer_config.json", "generation_config.json"]))
    content = json.loads(path.read_text(encoding="utf-8"))
    keys = [*content, *OBJECTS, *MORE, "eos_token_id", "model_max_length", "chat_template", "repetition_penalty"]
    content[data.draw(st.sampled_from(keys))] = data.draw(st.sampled_from(VALUES))
    path.write_text(json.dumps(content))
    try:
        checkpoint = locate(str(folder))
        fingerprint(checkpoint)
        resolve_dtype(checkpoint, "auto")
        extension_of(checkpoint, ContextSettings(512))
        context_of(ModelSpec(str(folder)), checkpoint, "evalkit needle")
        loaded = load_folder(folder)
        loaded.describe()
        end_tokens(loaded.model, loaded.tokenizer)
    except EvalkitError as error:
        assert "\n" not in str(error)


def test_a_described_folder_of_wrong_kinds(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    edit_config(folder, model_type="evalkit_llama", num_hidden_layers="many")
    with pytest.raises(CheckpointError, match="num_hidden_layers is 'many'"):
        model_report(str(folder))
