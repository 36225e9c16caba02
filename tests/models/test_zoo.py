"""Named models are the paper's, with its sizes; random checkpoints are deterministic; exports load without evalkit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import evalkit.models.auto  # noqa: F401
from evalkit.cli.model_reports import models_report
from evalkit.errors import CheckpointError, UnknownNameError, UsageError
from evalkit.models.loading.locate import locate
from evalkit.models.variants.settings import KEYS, Differential, Integral
from evalkit.models.zoo.convert import export
from evalkit.models.zoo.named import NamedModel, models, named_model, read_models, write_random
from evalkit.models.zoo.shapes import cache_bytes_per_token, flops_per_token, parameters, read_shape
from tests.marks import fast
from tests.models.loading import edit_config, load_folder
from tests.models.small import ATTENTIONS, BASES, TEXT, small
from tests.printed import printed
from tests.tiny import tiny_tokenizer

UPPER, ALL = tuple(range(10, 20)), tuple(range(20))
NAMES = [model.name for model in models()]


def of(model: NamedModel) -> tuple[str, int, tuple[int, ...], int | None]:
    """Attention, heads, layers and signals."""
    shape = model.shape
    signals = getattr(shape.variant.settings, "num_signals", None)
    return shape.variant.name, shape.attention.heads, shape.variant.layers, signals


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-125m-cog", ("cog", 8, UPPER, None)),
        ("llama-125m-intg-2s-top25", ("integral", 8, tuple(range(15, 20)), 2)),
        ("llama-125m-intg-16h-8s", ("integral", 16, UPPER, 8)),
        ("llama-1.2b-intg", ("integral", 32, tuple(range(11, 22)), 8)),
    ],
)
def test_the_papers_tables(name: str, expected: tuple[str, int, tuple[int, ...], int | None]) -> None:
    assert of(named_model(name)) == expected


def test_every_grid_of_the_paper_is_whole() -> None:
    """Heads × signals, shares of layers, backbones: each cell is a model."""
    others = [model for model in models() if "-prob" not in model.name]
    cells = {(model.shape.backbone, model.shape.attention.layers, *of(model)) for model in others}
    expected = {("llama", 20, "integral", heads, UPPER, signals) for heads in (8, 16) for signals in (2, 4, 8)}
    for layers in (ALL, UPPER, tuple(range(15, 20)), tuple(range(5, 20)), tuple(range(10))):
        expected.add(("llama", 20, "integral", 8, layers, 2))
    for backbone in ("llama", "qwen2", "gpt_neox"):
        expected |= {(backbone, 20, "integral", 8, ALL, signals) for signals in (2, 8)}
        expected.add((backbone, 20, "vanilla", 8, (), None))
    assert cells >= expected | {("llama", 20, "vanilla", heads, (), None) for heads in (4, 8, 16, 32)}


def test_readings_that_the_papers_leave_open() -> None:
    """Every one is in the config; other readings of the main table differ in nothing else."""
    for model in models():
        rope = model.config["rope_parameters"]
        assert (rope["rope_theta"], model.config["max_position_embeddings"]) == (10000.0, 2048)
        if model.shape.variant.layers:
            assert set(KEYS[model.shape.variant.name]) <= set(model.config)
            assert model.config["model_type"] == f"evalkit_{model.shape.backbone}"
    settings = [named_model(f"llama-125m-{name}").shape.variant.settings for name in ("diff", "intg")]
    assert settings[0] == Differential("halve", "adjacent", "affine", 1e-5, "absolute")
    assert settings[1] == Integral(8, "per_signal", "contiguous", "signal", "logits")
    for name in ("llama-125m-diff", "llama-125m-diff-all", "llama-1.2b-diff"):
        assert named_model(f"{name}-keep").config == named_model(name).config | {"diff_heads": "keep"}
    for name in ("llama-125m-intg", "llama-125m-intg-all", "llama-1.2b-intg", "llama-1.2b-intg-all"):
        assert named_model(f"{name}-full-head").config == named_model(name).config | {"signal_rope": "full_head"}
    for name in ("llama-125m-intg-2s", "llama-125m-intg-2s-all"):
        changed = named_model(name).config | {"signal_domain": "probabilities"}
        assert named_model(f"{name}-prob").config == changed


def test_vanilla_loads_without_evalkit_where_transformers_reads_its_tokenizer_right() -> None:
    kinds = {name: named_model(f"{name}-125m-vanilla").config["model_type"] for name in ("llama", "pythia", "qwen2")}
    assert kinds == {"llama": "llama", "pythia": "gpt_neox", "qwen2": "evalkit_qwen2"}
    assert "attention_variant" not in named_model("llama-125m-vanilla").config


def test_the_documentation_has_the_table() -> None:
    documented = (Path(__file__).parents[2] / "docs" / "reference" / "models.md").read_text(encoding="utf-8")
    assert "".join(f"    {line}\n" for line in printed(models_report()).splitlines()) in documented


# Sizes


def built(config: dict[str, Any]) -> Any:
    """Return the model itself, without memory for its weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


def counted(model: Any) -> tuple[int, int]:
    """In the embedding and head, and in the rest; by the real parameters, tied ones once."""
    every = sum(parameter.numel() for parameter in model.parameters())
    ends = {id(end.weight): end.weight.numel() for end in (model.get_input_embeddings(), model.get_output_embeddings())}
    return sum(ends.values()), every - sum(ends.values())


@pytest.mark.parametrize(
    "name", fast(["llama-125m-diff-all-keep", "llama-125m-intg", "qwen2-125m-vanilla", "pythia-125m-vanilla"], NAMES)
)
def test_parameters_are_those_of_the_built_model(name: str) -> None:
    model = named_model(name)
    assert counted(built(model.config)) == tuple(parameters(model.shape))


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("llama-125m-vanilla", 125_015_808),
        ("llama-125m-diff", 125_015_808 + 5_760),
        # λ's four vectors and the norm's weight over maps of 48 channels in place of 96
        ("llama-125m-diff-all-keep", 125_015_808 + 5_760),
        ("pythia-125m-vanilla", 125_020_416),
        ("llama-1.2b-vanilla", 1_195_993_088),
        # Of 64 channels to a head: 11 layers of 4 × 32 + 2 × 32
        ("llama-1.2b-diff-keep", 1_195_993_088 + 2_112),
    ],
)
def test_published_sizes(name: str, total: int) -> None:
    assert parameters(named_model(name).shape).total == total


def config_of(kind: str, **changes: object) -> dict[str, Any]:
    sizes = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
             "num_attention_heads": 4, "max_position_embeddings": 64}  # fmt: skip
    return {"model_type": kind} | sizes | changes


DIFF = {"attention_variant": "differential", "diff_subln_eps": 1e-5, "diff_pairing": "halves"}


@pytest.mark.parametrize(
    "config",
    [
        config_of("llama", num_key_value_heads=2, head_dim=20, attention_bias=True, mlp_bias=True),
        config_of("gpt_neox", attention_bias=False, tie_word_embeddings=True),
        config_of("evalkit_llama", num_key_value_heads=2, variant_layers=[0, 2], diff_heads="halve", diff_subln="plain",
                  lambda_index="relative", **DIFF),
        config_of("evalkit_qwen2", num_key_value_heads=1, variant_layers=[1], diff_heads="keep", diff_subln="affine",
                  lambda_index="absolute", **DIFF),
    ],
)  # fmt: skip
def test_parameters_of_other_shapes(config: dict[str, Any]) -> None:
    """Keys missing from a config have transformers' defaults."""
    assert counted(built(config)) == tuple(parameters(read_shape(config)))


def test_flops_and_cache_by_hand() -> None:
    """One layer, written out: products, and pairs of a triangle."""
    shape = read_shape(config_of("llama", num_hidden_layers=1, num_key_value_heads=2, tie_word_embeddings=True))
    length, head = 10, 12
    matrices = 48 * 48 * 2 + 48 * 24 * 2 + 3 * 48 * 80
    pairs = length * (length + 1) // 2
    whole = length * 2 * (matrices + 96 * 48) + pairs * 4 * (2 * head + 2 * head)
    assert flops_per_token(shape, length) * length == whole
    assert cache_bytes_per_token(named_model("llama-125m-intg").shape, "bfloat16") == 2 * 20 * 768 * 2
    assert cache_bytes_per_token(shape, "float32") == 2 * 1 * 2 * 12 * 4


def test_invalid_configs() -> None:
    for config, noun in (
        (config_of("gpt2"), "'gpt2'"),
        (config_of("llama", hidden_size=None), "'hidden_size'"),
        (config_of("gpt_neox", hidden_size=50), "hidden_size 50"),
        (config_of("llama", num_hidden_layers=10**12), "num_hidden_layers"),
    ):
        with pytest.raises(ValueError, match=noun):
            read_shape(config)


# A user's file

MINE = {"attention_variant": "integral", "variant_layers": "top 25%", "num_signals": 4}
OWN: dict[str, Any] = {"base": "llama_125m", "models": {"mine": MINE}}


def written(folder: Path, content: object) -> Path:
    path = folder / "own.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
    return path


def test_a_users_model_is_a_few_lines(tmp_path: Path) -> None:
    path = written(tmp_path, OWN | {"attentions": {"integral": {"signal_layout": "tiled"}}})
    mine, ours = named_model(str(path)), named_model("llama-125m-intg")
    assert mine == named_model(f"{path}:mine") and (mine.name, mine.source) == ("mine", path)
    changes = {"num_signals": 4, "variant_layers": [15, 16, 17, 18, 19], "signal_layout": "tiled"}
    assert mine.config == ours.config | changes
    base = {key: value for key, value in named_model("llama-125m-vanilla").config.items() if key != "model_type"}
    own = {"backbone": "llama", "base": base, "models": {"a": {"attention_variant": "vanilla", "variant_layers": []}}}
    assert named_model(str(written(tmp_path, own))).config == {"model_type": "llama"} | base
    entry = {"attention_variant": "cog", "variant_layers": "top 50%", "cog_keep_last": True}
    kept = named_model(str(written(tmp_path, {"base": "llama_125m", "models": {"kept": entry}})))
    assert kept.shape.variant.layers == tuple(range(10, 19))


def changed(**keys: object) -> dict[str, Any]:
    return {"base": "llama_125m", "models": {"mine": MINE | keys}}


@pytest.mark.parametrize(
    ("content", "noun"),
    [
        (OWN | {"modls": {}}, "'modls'"),
        (changed(num_signal=3), "'mine': unknown key 'num_signal'"),
        (changed(variant_layers="top 33%"), "'mine': variant_layers"),
        (changed(num_attention_heads=7), "num_attention_heads 7"),
        # A quarter of a head rotates: of signals of 12, 3 channels
        ({"base": "pythia_125m", "models": {"eight": MINE | {"num_signals": 8}}}, "'eight': .*even number"),
    ],
)
def test_invalid_files(tmp_path: Path, content: object, noun: str) -> None:
    with pytest.raises(UsageError, match=noun) as caught:
        read_models(written(tmp_path, content))
    assert "own.yaml" in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_are_not_there_or_hold_several(tmp_path: Path) -> None:
    path = written(tmp_path, OWN | {"models": {"a": MINE, "b": MINE}})
    for name, noun in (("nowhere.yaml", r"nowhere\.yaml"), (str(path), "own.yaml:a"), (f"{path}:c", "'c'")):
        with pytest.raises(UsageError, match=noun):
            named_model(name)
    with pytest.raises(UnknownNameError, match="'llama-125m-intg'"):
        named_model("llama-125m-int")
    assert [model.name for model in read_models(path)] == ["a", "b"]


# Random checkpoints


@pytest.fixture
def words(tmp_path: Path) -> str:
    return str(tiny_tokenizer(tmp_path / "words"))


@pytest.mark.parametrize("backbone", fast(["gpt_neox"], BASES))
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_attention_loads(tmp_path: Path, attention: str, backbone: str) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    model = small(tmp_path, attention, backbone)
    said: list[str] = []
    write_random(model, tmp_path / "out", seed=1, texts=[tmp_path / "text.txt"], say=said.append)
    loaded = load_folder(tmp_path / "out", say=said.append)
    assert loaded.parameters == parameters(model.shape).total
    assert (loaded.bos_id, loaded.eos_id, loaded.window) == (1, 2, 256)
    assert len(said) == 1 and "vocabulary stays at 512" in said[0]
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert {key: config[key] for key in model.config} == model.config
    logits = loaded.model(torch.arange(20)[None]).logits
    assert torch.isfinite(logits).all() and logits.std() > 0.1


def test_the_seed_decides_every_bit(tmp_path: Path, words: str) -> None:
    model = small(tmp_path, "differential")
    state = torch.get_rng_state()
    for name, seed, dtype in (("a", 3, "float32"), ("b", 3, "float32"), ("c", 4, "float32"), ("d", 3, "bfloat16")):
        write_random(model, tmp_path / name, seed=seed, dtype=dtype, tokenizer=words)
    assert torch.equal(torch.get_rng_state(), state)
    a, _, c, d = (load_file(tmp_path / name / "model.safetensors") for name in "abcd")
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    assert not torch.equal(a["model.layers.0.self_attn.lambda_q1"], c["model.layers.0.self_attn.lambda_q1"])
    assert all(torch.equal(weight.bfloat16(), d[name]) for name, weight in a.items())
    for path in Path(words).iterdir():
        assert (tmp_path / "a" / path.name).read_bytes() == path.read_bytes()


def test_what_transformers_cannot_build(tmp_path: Path, words: str) -> None:
    model = small(tmp_path, "integral")
    for key, value in (("hidden_act", "sillu"), ("rope_parameters", {"rope_type": "yarn"})):
        with pytest.raises(UsageError, match="'integral'") as caught:
            write_random(replace(model, config=model.config | {key: value}), tmp_path / "out", seed=0, tokenizer=words)
        assert str(caught.value).startswith(str(model.source)) and not (tmp_path / "out").exists()


def test_outputs_and_tokenizers_that_are_refused(tmp_path: Path, words: str) -> None:
    model, output = small(tmp_path, "vanilla"), tmp_path / "out"
    (tmp_path / "file").write_text(TEXT)
    for wrong in ({}, {"tokenizer": words, "texts": [tmp_path]}, {"dtype": "fp32", "tokenizer": words}):
        with pytest.raises(UsageError):
            write_random(model, output, seed=0, **wrong)
    output.mkdir()
    write_random(model, output, seed=0, tokenizer=words)
    before = (output / "model.safetensors").read_bytes()
    for taken in (output, tmp_path / "file"):
        with pytest.raises(UsageError, match="already exists"):
            write_random(model, taken, seed=1, tokenizer=words)
    assert (output / "model.safetensors").read_bytes() == before


# Exports# Exports

STRANGER = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "evalkit":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse())
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    model.save_pretrained(folder + "-again")  # transformers writes the names of the code anew
    again = AutoModelForCausalLM.from_pretrained(folder + "-again", trust_remote_code=True).eval()
    assert AutoTokenizer.from_pretrained(folder, trust_remote_code=True)("the river")["input_ids"]
    with torch.no_grad():
        logits, of_again = (each(torch.arange(2, 60)[None]).logits for each in (model, again))
    save_file({"logits": logits, "again": of_again}, folder + "/logits")
"""


@pytest.mark.slow
def test_a_process_without_evalkit_gives_the_same_logits(tmp_path: Path, words: str) -> None:
    folders = []
    for attention, backbone in (("integral", "gpt_neox"), ("differential", "qwen2"), ("cog", "llama")):
        own, folder = tmp_path / f"own-{backbone}", tmp_path / backbone
        write_random(small(tmp_path, attention, backbone), own, seed=0, tokenizer=words)
        export(locate(str(own)), folder)
        folders.append((own, folder))
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    # Isolated (-I): neither this folder nor the user's packages are on the path
    done = subprocess.run(
        [sys.executable, "-I", "-c", STRANGER, *(str(folder) for _, folder in folders)],
        env=clean | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    ids = torch.arange(2, 60)[None]
    for own, folder in folders:
        expected = load_folder(own).model(ids).logits
        stored = load_file(folder / "logits")
        assert torch.equal(stored["logits"], expected) and torch.equal(stored["again"], expected)
        # And evalkit, which trusts no code by default
        loaded = load_folder(folder)
        assert type(loaded.model).__module__ == "evalkit.models.variants.modeling"
        assert torch.equal(loaded.model(ids).logits, expected)


def test_everything_else_stays_shards_and_pickles_too(tmp_path: Path, words: str) -> None:
    own = tmp_path / "own"
    write_random(small(tmp_path, "integral"), own, seed=0, tokenizer=words)
    stored = load_file(own / "model.safetensors")
    names = sorted(stored)
    shards = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for name, inside in shards.items():
        save_file({key: stored[key] for key in inside}, own / name, metadata={"format": "pt"})
    weight_map = {key: name for name, inside in shards.items() for key in inside}
    (own / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (own / "model.safetensors").unlink()
    export(locate(str(own)), tmp_path / "out")
    for path in own.iterdir():
        if path.name != "config.json":
            assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("own", "out"))
    assert after.pop("auto_map").keys() == {"AutoConfig", "AutoModelForCausalLM"} and after == before
    for path in own.glob("model*"):
        path.unlink()
    torch.save(stored, own / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="--allow-pickle"):
        export(locate(str(own)), tmp_path / "pickled")
    export(locate(str(own), allow_pickle=True), tmp_path / "pickled")
    assert (tmp_path / "pickled" / "pytorch_model.bin").is_file()
    edit_config(own, "signal_rope")
    with pytest.raises(CheckpointError, match="'signal_rope'"):
        export(locate(str(own), allow_pickle=True), tmp_path / "lacking")
