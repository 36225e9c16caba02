"""Converted checkpoints give the logits of the original code."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy, embedding, silu
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DiffLlamaConfig, DiffLlamaForCausalLM

import evalkit.models.auto
from evalkit.errors import CheckpointError, UnknownNameError, UsageError
from evalkit.models.loading.locate import locate
from evalkit.models.variants.settings import ALL_KEYS, Differential
from evalkit.models.zoo.convert import convert
from evalkit.models.zoo.named import attention_settings
from evalkit.models.zoo.readings import GivenReading, ScoredReading, StoredModel, with_attention
from tests.cli.conftest import Command, _no_settings, evalkit
from tests.models.loading import edit_config, load_folder
from tests.tiny import tiny_tokenizer

__all__ = ["_no_settings", "evalkit"]  # fixtures

IDS = torch.arange(3, 60)[None]
FIRST = "model.layers.0.self_attn"
READINGS = {(True, True), (True, False), (False, True), (False, False)}
VOCABULARY, HIDDEN, INNER, LAYERS, SIZE = 96, 48, 80, 3, 8

# transformers' DiffLlama


def diffllama(folder: Path, *, kv_heads: int = 2, tied: bool = False) -> Path:
    torch.manual_seed(1)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": kv_heads, "max_position_embeddings": 128}
    more = {"initializer_range": 0.2, "rms_norm_eps": 3e-5, "tie_word_embeddings": tied}
    model = DiffLlamaForCausalLM(DiffLlamaConfig(vocab_size=VOCABULARY, **sizes, **heads, **more))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lambda" in name:
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    return folder


def both(source: Path, output: Path, attention: str) -> list[torch.Tensor]:
    """Return the logits of a folder and of its conversion."""
    models = [AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention) for path in (source, output)]
    assert [type(model).__name__ for model in models] == ["DiffLlamaForCausalLM", "EvalkitLlamaForCausalLM"]
    with torch.no_grad():
        return [model.eval()(IDS).logits for model in models]


@pytest.mark.parametrize(("kv_heads", "tied", "attention"), [(4, True, "sdpa"), (2, False, "eager")])
def test_diffllama(tmp_path: Path, kv_heads: int, tied: bool, attention: str) -> None:
    source = diffllama(tmp_path / "source", kv_heads=kv_heads, tied=tied)
    convert(locate(str(source)), tmp_path / "out")
    # The same operations in the same order: equal bits
    assert torch.equal(*both(source, tmp_path / "out", attention))


def test_what_diffllamas_config_leaves_out_is_diffllamas_default(tmp_path: Path) -> None:
    source = diffllama(tmp_path / "source")
    edit_config(source, "rms_norm_eps", "max_position_embeddings")
    convert(locate(str(source)), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["rms_norm_eps"], config["max_position_embeddings"], config["diff_subln_eps"]) == (1e-5, 2048, 1e-5)
    assert torch.equal(*both(source, tmp_path / "out", "eager"))
    edit_config(source, num_hidden_layers=20)
    with pytest.raises(CheckpointError, match=r"model\.layers\.3"):
        convert(locate(str(source)), tmp_path / "deep")
    assert not (tmp_path / "deep").exists()


# The authors' layout


def authors(folder: Path, *, kv_pairs: int = 3, affine: bool = True, pairs: int = 3) -> Path:
    """Random weights in the authors' layout."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    weights = {
        "model.embed_tokens.weight": random(VOCABULARY, HIDDEN),
        "model.norm.weight": 1 + random(HIDDEN),
        "lm_head.weight": random(VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        attention, at = f"model.layers.{layer}.self_attn", f"model.layers.{layer}"
        weights |= {
            f"{attention}.q_proj.weight": random(2 * pairs * SIZE, HIDDEN),
            f"{attention}.k_proj.weight": random(2 * kv_pairs * SIZE, HIDDEN),
            f"{attention}.v_proj.weight": random(2 * kv_pairs * SIZE, HIDDEN),
            f"{attention}.out_proj.weight": random(HIDDEN, 2 * pairs * SIZE),
            **{f"{attention}.lambda_{name}": 2 * random(SIZE) for name in ("q1", "k1", "q2", "k2")},
            f"{at}.mlp.gate_proj.weight": random(INNER, HIDDEN),
            f"{at}.mlp.up_proj.weight": random(INNER, HIDDEN),
            f"{at}.mlp.down_proj.weight": random(HIDDEN, INNER),
            f"{at}.input_layernorm.weight": 1 + random(HIDDEN),
            f"{at}.post_attention_layernorm.weight": 1 + random(HIDDEN),
        }
        if affine:
            weights[f"{attention}.subln.weight"] = 1 + random(2 * SIZE)
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # As the authors count them: pairs
    config = {"model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": INNER,
              "num_hidden_layers": LAYERS, "num_attention_heads": pairs, "num_key_value_heads": kv_pairs,
              "rms_norm_eps": 1e-6, "max_position_embeddings": 128, "tie_word_embeddings": False,
              "rope_theta": 10000.0}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def rms(hidden: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    normed = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * weight


def turn(states: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotary embeddings of [tokens, heads, size] as complex numbers: of neighbouring channels, or of two halves."""
    half = states.shape[-1] // 2
    pairs = states.unflatten(-1, (half, 2)) if interleaved else states.unflatten(-1, (2, half)).transpose(-1, -2)
    angles = torch.arange(len(states))[:, None] * 10000.0 ** (-torch.arange(half) / half)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)[:, None]
    real = torch.view_as_real(turned)
    return (real if interleaved else real.transpose(-1, -2)).flatten(-2)


def written_out(weights: dict[str, Any], interleaved: bool, adjacent: bool) -> torch.Tensor:
    """The authors' formula, a pair at a time; [tokens, vocabulary]."""
    hidden = embedding(IDS[0], weights["model.embed_tokens.weight"])
    length = len(hidden)
    late = torch.full((length, length), -torch.inf).triu(1)
    for layer in range(LAYERS):
        own = {
            name.removeprefix(f"model.layers.{layer}."): weight
            for name, weight in weights.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        inside = rms(hidden, own["input_layernorm.weight"], 1e-6)
        query, key, value = (
            (inside @ own[f"self_attn.{part}_proj.weight"].T).unflatten(-1, (-1, SIZE)) for part in "qkv"
        )
        query, key = turn(query, interleaved), turn(key, interleaved)
        start = 0.8 - 0.6 * math.exp(-0.3 * layer)
        vectors = {name: own[f"self_attn.lambda_{name}"] for name in ("q1", "k1", "q2", "k2")}
        first, second = ((vectors[f"q{i}"] * vectors[f"k{i}"]).sum().exp() for i in (1, 2))
        weight = first - second + start
        pairs, kv_pairs = query.shape[1] // 2, key.shape[1] // 2
        outs = []
        for pair in range(pairs):
            group = pair // (pairs // kv_pairs)
            mine = (2 * pair, 2 * pair + 1) if adjacent else (pair, pair + pairs)
            theirs = (2 * group, 2 * group + 1) if adjacent else (group, group + kv_pairs)
            maps = [
                (query[:, q] @ key[:, k].T / math.sqrt(SIZE) + late).softmax(-1)
                for q, k in zip(mine, theirs, strict=True)
            ]
            values = torch.cat([value[:, k] for k in theirs], dim=-1)
            out = rms((maps[0] - weight * maps[1]) @ values, own.get("self_attn.subln.weight"), 1e-5)
            outs.append(out * (1 - start))
        hidden = hidden + torch.cat(outs, dim=-1) @ own["self_attn.out_proj.weight"].T
        inside = rms(hidden, own["post_attention_layernorm.weight"], 1e-6)
        gate = silu(inside @ own["mlp.gate_proj.weight"].T) * (inside @ own["mlp.up_proj.weight"].T)
        hidden = hidden + gate @ own["mlp.down_proj.weight"].T
    return rms(hidden, weights["model.norm.weight"], 1e-6) @ weights["lm_head.weight"].T


@pytest.mark.parametrize(("kv_pairs", "affine", "pairing", "rope"), [
    (3, True, "adjacent", "interleaved"), (1, False, "adjacent", "rotate_half"),
    (1, False, "halves", "interleaved"), (3, True, "halves", "rotate_half"),
])  # fmt: skip
def test_the_authors_layout(tmp_path: Path, kv_pairs: int, affine: bool, pairing: str, rope: str) -> None:
    source = authors(tmp_path / "source", kv_pairs=kv_pairs, affine=affine)
    convert(locate(str(source)), tmp_path / "out", GivenReading(rope=rope, pairing=pairing))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        logits = model(IDS).logits[0]
    weights, chosen = load_file(source / "model.safetensors"), (rope == "interleaved", pairing == "adjacent")
    expected = written_out(weights, *chosen)
    assert all((written_out(weights, *other) - expected).abs().max() > 0.1 for other in READINGS - {chosen})
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    variant = model.config.variant()
    assert variant.layers == (0, 1, 2)
    assert variant.settings == Differential("halve", pairing, "affine" if affine else "plain", 1e-5, "absolute")


def test_vanilla_layers_between(tmp_path: Path) -> None:
    """Layers without λ's vectors stay vanilla, and their heads rotate as the others' do."""
    source = authors(tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    for name in [name for name in weights if ".1.self_attn." in name and ("lambda" in name or "subln" in name)]:
        del weights[name]
    weights["model.layers.1.self_attn.o_proj.weight"] = weights.pop("model.layers.1.self_attn.out_proj.weight")
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    edit_config(source, num_attention_heads=6, num_key_value_heads=6)
    convert(locate(str(source)), tmp_path / "half")
    config = json.loads((tmp_path / "half" / "config.json").read_text())
    assert (config["variant_layers"], config["diff_heads"], config["head_dim"]) == ([0, 2], "halve", 8)
    # Of heads twice as wide a pair of maps is one
    edit_config(source, num_attention_heads=3, num_key_value_heads=3)
    convert(locate(str(source)), tmp_path / "keep")
    config = json.loads((tmp_path / "keep" / "config.json").read_text())
    assert (config["variant_layers"], config["diff_heads"], config["head_dim"]) == ([0, 2], "keep", 16)
    edit_config(source, num_attention_heads=12, num_key_value_heads=12)
    with pytest.raises(CheckpointError, match=r"size mismatch for .*lambda_q1"):
        convert(locate(str(source)), tmp_path / "neither")


# Both layouts


def test_the_tokenizer_comes_along_and_evalkit_loads_it(tmp_path: Path) -> None:
    source = diffllama(tmp_path / "source")
    said: list[str] = []
    convert(locate(str(source)), tmp_path / "bare", say=said.append)
    assert len(said) == 1 and "--tokenizer" in said[0]
    tiny_tokenizer(source)
    model = DiffLlamaForCausalLM.from_pretrained(source)
    model.resize_token_embeddings(512)
    model.save_pretrained(source)
    convert(locate(str(source)), tmp_path / "out", say=said.append)
    assert len(said) == 1
    assert load_folder(tmp_path / "out").architecture == "EvalkitLlamaForCausalLM"
    assert (tmp_path / "out" / "generation_config.json").is_file()
    with pytest.raises(CheckpointError, match="'evalkit_llama'"):
        convert(locate(str(tmp_path / "out")), tmp_path / "again")
    with pytest.raises(UsageError, match="--variant"):
        convert(locate(str(source)), tmp_path / "again", GivenReading(rope="interleaved"))


def test_checkpoints_that_are_not_convertible(tmp_path: Path) -> None:
    source = authors(tmp_path / "source")
    config, weights = (source / "config.json").read_text(), load_file(source / "model.safetensors")

    def without(part: str) -> Any:
        return {name: None for name in weights if part in name}

    for change, noun in (
        (without("1.self_attn.lambda_k2"), r"layers\.1\.self_attn\.lambda_k2"),
        ({"extra": torch.ones(2)}, "extra"),
        ({f"{FIRST}.q_proj.weight": torch.ones(41, 48)}, "num_attention_heads 5"),
        ({f"{FIRST}.lambda_q1": torch.ones(4)}, "lambda_k1"),
    ):
        changed = {name: weight for name, weight in (weights | change).items() if weight is not None}
        save_file(changed, source / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=noun):
            convert(locate(str(source)), tmp_path / "out")
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    for key, value in (("rms_norm_eps", None), ("tie_word_embeddings", True)):
        (source / "config.json").write_text(config)
        edit_config(source, *([key] if value is None else []), **{key: value})
        with pytest.raises(CheckpointError, match=rf"{key}|config\.json"):
            convert(locate(str(source)), tmp_path / "out")
    edit_config(source, **json.loads(config))
    save_file({name: weight for name, weight in weights.items() if "lambda_q1" not in name},
              source / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    with pytest.raises(UsageError, match=r"lambda_q1.*--variant"):
        convert(locate(str(source)), tmp_path / "out")
    with pytest.raises(UsageError, match="--signals"):
        convert(locate(str(source)), tmp_path / "out", GivenReading("integral"))
    assert not (tmp_path / "out").exists()


# Patched code, whose attention leaves no trace


LAYERS_4: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "cog": {"layers": "top 50%"},
    "integral": {"layers": "top 50%", "signals": 4},
    "differential": {},
}


def interleaved(weight: torch.Tensor, size: int) -> torch.Tensor:
    """Rows of queries or keys for code that rotates neighbouring channels, from rows for transformers'."""
    heads = [head.view(2, size // 2, -1).transpose(0, 1).reshape(size, -1) for head in weight.split(size)]
    return torch.cat(heads)


def as_patched(model: Any, folder: Path) -> Path:
    """Save a model as the patched code of a Llama would: without a word about its attention."""
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in ALL_KEYS}
    kept |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    weights = load_file(folder / "model.safetensors")
    if model.config.attention_variant == "differential":
        # The authors' layers rotate neighbours, and the vanilla ones are transformers'
        for layer in model.config.variant_layers:
            at = f"model.layers.{layer}.self_attn"
            weights |= {f"{at}.{part}.weight": interleaved(weights[f"{at}.{part}.weight"], 16)
                        for part in ("q_proj", "k_proj")}  # fmt: skip
            weights[f"{at}.out_proj.weight"] = weights.pop(f"{at}.o_proj.weight")
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def of_attention(attention: str, seed: int = 0) -> Any:
    """A model of four layers whose upper two have an attention of the paper."""
    torch.manual_seed(seed)
    own = {} if attention == "vanilla" else attention_settings(attention)
    own |= {"num_signals": 4} if attention == "integral" else {}
    layers = [] if attention == "vanilla" else [2, 3]
    config = AutoConfig.for_model(
        "evalkit_llama", vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256, tie_word_embeddings=True,
        initializer_range=0.02, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=0, eos_token_id=1, attention_variant=attention, variant_layers=layers, **own,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("attention", ["cog", "integral", "differential"])
def test_patched_checkpoints_compute_what_their_code_did(attention: str, tmp_path: Path) -> None:
    """With vanilla layers that rotate otherwise; integral and cog models also in memory."""
    model = of_attention(attention)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.3 if weight.dim() == 1 else 0.1)
        expected = model(IDS).logits
    source = as_patched(model, tmp_path / "source")
    given, ropes = LAYERS_4[attention], {"rope": "interleaved", "vanilla_rope": "rotate_half"}
    ropes = ropes if attention == "differential" else {}
    convert(locate(str(source)), tmp_path / "out", GivenReading(None if ropes else attention, **given, **ropes))
    wrong = {"vanilla_rope": "interleaved"}
    convert(locate(str(source)), tmp_path / "wrong", GivenReading(None if ropes else attention, **given, **wrong))
    results = [AutoModelForCausalLM.from_pretrained(tmp_path / name)(IDS).logits for name in ("out", "wrong")]
    assert (results[0] - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (results[1] - expected).abs().max() > 1e-2 * expected.abs().max()
    if not ropes:
        with pytest.raises(UnknownNameError, match="signal_ropee"):
            convert(
                locate(str(source)), tmp_path / "typo", GivenReading(attention, settings={"signal_ropee": "full_head"})
            )
        vanilla = AutoModelForCausalLM.from_pretrained(source)
        assert (vanilla(IDS).logits - expected).abs().max() > 1e-2 * expected.abs().max()
        in_memory = with_attention(vanilla, variant=attention, **given)
        assert torch.equal(in_memory(IDS).logits, results[0])
        vanilla.model.layers[1].self_attn.gate = torch.nn.Parameter(torch.ones(3))
        with pytest.raises(CheckpointError, match="gate"):
            with_attention(vanilla, variant=attention, **given)


@pytest.mark.parametrize("attention", LAYERS_4)
def test_every_reading_can_be_given(
    attention: str, tmp_path: Path, evalkit: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The options that are printed with a reading are those of the command: read again, they mean that reading."""
    folder = as_patched(of_attention(attention), tmp_path / "source")
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    taken: list[GivenReading] = []
    monkeypatch.setattr("evalkit.models.zoo.convert.convert", lambda _, __, given, *more: taken.append(given) or [])

    def source_of(given: GivenReading) -> StoredModel:
        if attention == "differential":
            keys = attention_settings(attention) | given.differential_keys()
            named = {"attention_variant": attention, "variant_layers": [2, 3]}
            return StoredModel("llama", weights, config | keys | named, rope="interleaved")
        return StoredModel("llama", weights, given.keys("source", "llama", config))

    first = GivenReading(None if attention == "differential" else attention, **LAYERS_4[attention])
    source = source_of(first)
    readings = [first.reading(source), *source.others(first.reading(source))]
    assert len(readings) > (2 if attention == "vanilla" else 8)
    for reading in readings:
        outcome = evalkit("models", "convert", folder, "-o", tmp_path / "out", *reading.options(4))
        assert outcome.code == 0, outcome.err
        given = taken.pop()
        assert given.reading(source_of(given)) == reading


@pytest.fixture(scope="module")
def trained(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four models after 400 updates on a textbook, saved as patched code saves them, and a text that they never saw."""
    root = tmp_path_factory.mktemp("trained")
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer(root / "tokenizer"))
    textbook = shared_data / "corpora" / "openstax_cc-by.jsonl"
    text = "\n".join(json.loads(line)["text"] for line in textbook.read_text("utf-8").splitlines())
    (root / "held_out.txt").write_text(text[500_000:512_000], encoding="utf-8")
    ids = torch.tensor(tokenizer(text[:400_000], verbose=False).input_ids)
    for attention in LAYERS_4:
        model, generator = of_attention(attention).train(), torch.Generator().manual_seed(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
        for step in range(400):
            starts = torch.randint(0, len(ids) - 129, (8,), generator=generator)
            batch = torch.stack([ids[start : start + 129] for start in starts])
            loss = cross_entropy(model(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * min(1, (step + 1) / 50) * (1 - step / 400)
            optimizer.step()
            optimizer.zero_grad()
        tokenizer.save_pretrained(as_patched(model, root / attention))
    return root


@pytest.mark.training
def test_a_wrong_reading_of_a_trained_model_is_told_from_the_right_one(trained: Path, tmp_path: Path) -> None:
    """In both directions: each model under its own attention and under others."""

    def converted(attention: str, **given: Any) -> list[ScoredReading]:
        output = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        source = locate(str(trained / attention))
        return convert(source, output, GivenReading(**given), trained / "held_out.txt")

    rope = {"rope": "interleaved", "vanilla_rope": "rotate_half"}
    right = {name: {"variant": name, **LAYERS_4[name]} for name in ("cog", "integral")} | {"differential": rope}
    for attention, given in right.items():
        readings = converted(attention, **given)
        assert len(readings) > 8 and not any(reading.is_better for reading in readings)
        assert all(reading.difference > 0 for reading in readings[1:])
    for attention, given in {
        "vanilla": right["integral"], "integral": right["cog"], "cog": right["integral"],
        "differential": {"rope": "interleaved"},
    }.items():  # fmt: skip
        best = min(converted(attention, **given), key=lambda reading: reading.difference)
        assert "--rope" in best.options
        about = best.settings
        rotated = "interleaved" if attention == "differential" else "rotate_half"
        assert best.is_better and about["attention"] == attention
        assert (about["rope"], about["vanilla_rope"]) == (rotated, "rotate_half")
