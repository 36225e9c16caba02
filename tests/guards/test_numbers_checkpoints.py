"""Guards of numbers, checkpoints: all weights, no others, finite, and what was hashed is what was scored."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.data.samples import sample
from tests.data.samples import write as write_documents
from tests.guards.bench import Bench, Guard, Guards, Outcome, audited, edit, once, run_is_opened, write
from tests.tiny import VOCABULARY, add_tokens

GUARDS = Guards()


@pytest.mark.parametrize("guard", GUARDS)
def test_checkpoints(guard: Guard, bench: Bench) -> None:
    guard.check(bench)


# Weights: all that the model needs, none that it does not use, and numbers


def weights(identity: str, text: str, change: Callable[[dict[str, Any]], Any], *nouns: str, **config: Any) -> None:
    """A checkpoint with other tensors and another config.json."""
    GUARDS.add(identity, text, lambda bench: bench.score(bench.config(folder=bench.weights(change), **config)), *nouns)


def config(identity: str, text: str, changes: dict[str, Any], *nouns: str) -> None:
    """A checkpoint with another config.json."""
    GUARDS.add(identity, text, lambda bench: bench.score(bench.config(**changes)), *nouns)


def _ones(*shape: int, dtype: str = "float32") -> Any:
    import torch

    return torch.ones(shape, dtype=getattr(torch, dtype))


NORM, HEAD, QUERY = "model.norm.weight", "lm_head.weight", "model.layers.0.self_attn.q_proj"

weights("weights-missing", "A weight that no file has is not scored at its random initialisation.",
    lambda w: w.pop(NORM), "missing and would be random", NORM)  # fmt: skip
weights("weights-mismatched", "A weight of another shape than the config's is not replaced by a random one.",
    lambda w: w.update({NORM: _ones(65)}), "shapes", NORM)  # fmt: skip
weights("weights-more-layers", "Layers in the files that the config does not count are not dropped.", lambda w: None,
    "more layers than config.json has", num_hidden_layers=1)  # fmt: skip
weights("weights-unexpected", "A weight of a module of the model, such as a bias, is not left out.",
    lambda w: w.update({f"{QUERY}.bias": _ones(64)}), "left out of modules", f"{QUERY}.bias")  # fmt: skip
weights("weights-differential", "Differential layers are not scored as vanilla ones.",
    lambda w: w.update({f"{QUERY[:24]}.lambda_q1": _ones(16)}), "variant_layers", "lambda_q1")  # fmt: skip
weights("weights-twice", "Of two tensors for one weight none is chosen silently.",
    lambda w: w.update({"norm.weight": _ones(64)}), "two tensors for one weight", NORM)  # fmt: skip
weights("weights-nan", "NaN weights are not scored.", lambda w: w[NORM].fill_(float("nan")),
    "holds NaN or infinite values", NORM)  # fmt: skip
weights("weights-tied", "A head that differs from the embedding that it is tied to is not replaced by it.",
    lambda w: None, "output head differs from its embedding", tie_word_embeddings=True)  # fmt: skip
weights("weights-codes", "Integer codes without a quantization_config are not read as weights.",
    lambda w: w.update({f"{QUERY}.weight": _ones(64, 64, dtype="int8")}), "quantization_config", QUERY)  # fmt: skip
weights("weights-scales", "Quantised weights without their scales are not read as weights.",
    lambda w: w.update({f"{QUERY}.weight": _ones(64, 64, dtype="int8")}), "lack their scales", QUERY,
    quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})  # fmt: skip
config("quantised-plain", "Plain weights are not loaded as quantised ones.",
    {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "no weight is stored as integers")  # fmt: skip
config("quantised-unknown", "Weights of an unknown quantisation are not loaded as plain ones.",
    {"quantization_config": {"quant_method": "unheard_of"}}, "quant_method", "'unheard_of'")  # fmt: skip
config("weights-file-named", "Weights are read from the file that is hashed, not from one that the config names.",
    {"transformers_weights": "other.safetensors"}, "transformers_weights")  # fmt: skip
config("config-infinite", "A config with an infinite number is not scored.", {"rms_norm_eps": float("inf")},
    "config.json", "rms_norm_eps")  # fmt: skip
config("config-type", "A config value of another type is not taken for a number.", {"num_hidden_layers": "2"},
    "config.json", "num_hidden_layers is '2'")  # fmt: skip
config("config-window", "A window of more positions than float32 represents exactly is not scored.",
    {"max_position_embeddings": 2**24 + 1}, "max_position_embeddings")  # fmt: skip
config("not-causal-config", "A model that attends in both directions is not scored.", {"is_causal": False},
    "attends in both directions")  # fmt: skip
config("not-causal-class", "A classifier's checkpoint is not scored as a language model.",
    {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification")  # fmt: skip
config("encoder-decoder", "An encoder-decoder is not scored.", {"is_encoder_decoder": True}, "encoder-decoder")
config("config-window-zero", "A window that hides every token is not scored.", {"model_type": "mistral",
    "architectures": ["MistralForCausalLM"], "sliding_window": 0}, "config.json", "sliding_window is 0")  # fmt: skip
config("config-factor", "A factor with which tokens have no distinct positions is not scored.",
    {"rope_parameters": {"rope_type": "linear", "factor": 1e9}}, "config.json", "factor is 1e+09")  # fmt: skip
GUARDS.add("config-unread", "Settings of patched code that the model's class does not read are reported.",
    lambda bench: bench.score(bench.config(my_attention={"kind": "integral"})), "my_attention", "LlamaConfig",
    code=0)  # fmt: skip
GUARDS.add("config-rope-untyped", "A factor of rotary positions without its type is not dropped silently.",
    lambda bench: bench.score(bench.config(rope_parameters=None, rope_scaling={"factor": 2.0})),
    "rope_scaling.factor", code=0)  # fmt: skip
GUARDS.add("weights-unused", "Weights that no module uses are reported.",
    lambda bench: bench.score(bench.weights(lambda w: w.update({"value_head.weight": _ones(3)}))), "value_head.weight",
    code=0)  # fmt: skip


@GUARDS("config-twice", "Of a key with two values in config.json none is chosen.", "'rms_norm_eps' occurs twice")
def _(bench: Bench) -> Outcome:
    path = bench.copy() / "config.json"
    path.write_text(path.read_text(encoding="utf-8").replace("{", '{"rms_norm_eps": 0.5,', 1), encoding="utf-8")
    return bench.score(path.parent)


@GUARDS("weights-truncated", "A truncated file of weights is not scored.", "model.safetensors", "damaged")
def _(bench: Bench) -> Outcome:
    path = bench.copy() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-64])
    return bench.score(path.parent)


@GUARDS("weights-overlapping", "Tensors whose header gives them each other's bytes are not read.", "invalid offset")
def _(bench: Bench) -> Outcome:
    path = bench.copy() / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    first, second = "model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"
    header[first]["data_offsets"] = header[second]["data_offsets"]
    text = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return bench.score(path.parent)


def _sharded(bench: Bench, change: Callable[[Any], Any]) -> Outcome:
    from safetensors.torch import load_file, save_file

    folder = bench.copy()
    stored = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(stored, folder / "model-1.safetensors", metadata={"format": "pt"})
    index = {"weight_map": dict.fromkeys(stored, "model-1.safetensors")}
    change(index["weight_map"])
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return bench.score(folder)


GUARDS.add("shard-missing", "A checkpoint that lacks a shard is not scored.",
    lambda bench: _sharded(bench, lambda names: names.update({NORM: "model-2.safetensors"})), "model-2.safetensors",
    "missing, but listed")  # fmt: skip
GUARDS.add("index-lists-more", "An index that lists weights of no file, as after a mixed copy, is an error.",
    lambda bench: _sharded(bench, lambda names: names.update({"lost": "model-1.safetensors"})),
    "model.safetensors.index.json", "'lost'")  # fmt: skip


@GUARDS("adapter-beside", "An adapter beside whole weights is not left out silently.", "adapter_config.json")
def _(bench: Bench) -> Outcome:
    folder = bench.copy()
    write(folder / "adapter_config.json", "{}")
    write(folder / "adapter_model.safetensors", b"")
    return bench.score(folder)


@GUARDS("vocabulary", "Ids of the tokenizer beyond the embedding are an error.", f"{VOCABULARY} rows", "ids up to")
def _(bench: Bench) -> Outcome:
    def grow(content: Any) -> None:
        content["model"]["vocab"]["<far>"] = 520

    return bench.score(edit(bench.copy() / "tokenizer.json", grow).parent)


@GUARDS("vocabulary-added", "A text with an added token beyond the embedding is not scored.",
        "piqa document", f"'the night' (id {VOCABULARY})", "embedding has no row")  # fmt: skip
def _(bench: Bench) -> Outcome:
    def add(content: Any) -> None:
        add_tokens(content, "the night")

    return bench.score(edit(bench.copy() / "tokenizer.json", add).parent)


@GUARDS("tokenizer-ids", "A tokenizer that makes nothing of a text is not used.", "the tokenizer turns any text into")
def _(bench: Bench) -> Outcome:
    def empty(content: Any) -> None:
        content["normalizer"] = {"type": "Replace", "pattern": {"Regex": "[\\s\\S]"}, "content": ""}

    return bench.score(edit(bench.copy() / "tokenizer.json", empty).parent)


# What was hashed is what was scored


def _other_weights(bench: Bench, model: Path) -> None:
    shutil.copy(bench.shared.other / "model.safetensors", model)


def _other_config(_: Bench, model: Path) -> None:
    edit(model / "config.json", lambda content: content.update(rms_norm_eps=0.5))


def _other_tokenizer(_: Bench, model: Path) -> None:
    def swap(content: Any) -> None:
        words = content["model"]["vocab"]
        words["e"], words["t"] = words["t"], words["e"]

    edit(model / "tokenizer.json", swap)


for _name, _change in {"weights": _other_weights, "config": _other_config, "tokenizer": _other_tokenizer}.items():

    @GUARDS(f"changed-{_name}", f"A checkpoint whose {_name} change between hashing and loading is not scored under "
            "the old hash.", "changed since this run was started", _name)  # fmt: skip
    def _(bench: Bench, change: Any = _change) -> Outcome:
        model = bench.copy()
        with once(run_is_opened, lambda: change(bench, model)):
            outcome = bench.score(model)
        assert not list(Path("runs").glob("*"))
        return outcome


@GUARDS("changed-while-read",
        "Weights that change while they are read are not scored: by content here, by status after it.",
        "model.safetensors: changed while it was read")  # fmt: skip
def _(bench: Bench) -> Outcome:
    model = bench.copy()
    write("cache", "a file, so that no digest is remembered")
    opened: list[str] = []

    def second_reading(event: str, given: tuple[Any, ...]) -> None:
        if event == "open" and str(given[0]) == str(model / "model.safetensors") and "r" in str(given[1]):
            opened.append("")
            if len(opened) == 3:  # hashed before, read, and hashed again
                _other_weights(bench, model)

    with audited(second_reading):
        return bench.score(model)


@GUARDS("changed-built", "What changes once it has been read does not change the numbers.")
def _(bench: Bench) -> None:
    import transformers

    model = bench.copy()
    expected = bench.scores_of(bench.score(model, "--output", "expected"))
    build = transformers.AutoConfig.from_pretrained

    def changing(*given: Any, **options: Any) -> Any:
        for change in (_other_weights, _other_config, _other_tokenizer):
            change(bench, model)
        return build(*given, **options)

    bench.patch.setattr(transformers.AutoConfig, "from_pretrained", changing)
    outcome = bench.score(model)
    assert json.loads((model / "config.json").read_text(encoding="utf-8"))["rms_norm_eps"] == 0.5
    assert bench.scores_of(outcome).equals(expected)


@GUARDS("cached-digest", "A digest that is remembered of a file is not used for its next content.")
def _(bench: Bench) -> None:
    model = bench.copy()
    first = bench.score(model)
    _other_weights(bench, model)
    other = bench.score(model)
    assert other.code == 0 and bench.folder_of(first) != bench.folder_of(other)
    assert not bench.scores_of(first).equals(bench.scores_of(other))


@GUARDS("cached-swapped", "A file of the cache that stands under another's key is not used.")
def _(bench: Bench) -> None:
    def documents(name: str, choice: str) -> Path:
        """Enough tokens to be stored; of each name as many."""
        goals = [f"{number} {'the river rose ' * 80}" for number in range(30)]
        write_documents(folder := bench.copy(bench.shared.documents, name), "piqa",
                        *(sample("piqa", goal=goal, sol1=choice, sol2="a") for goal in goals))  # fmt: skip
        return folder

    first, second = documents("first", "at night"), documents("second", "in a boat")
    expected = bench.scores_of(bench.score(None, "--data-dir", first))
    bench.score(None, "--data-dir", second)
    folders = [folder for folder in Path("cache").iterdir() if len(list(folder.iterdir())) > 1]
    assert folders
    for folder in folders:
        paths = sorted(path for path in folder.iterdir() if path.is_file())
        contents = [path.read_bytes() for path in paths]
        for path, content in zip(paths, contents[1:] + contents[:1], strict=True):
            path.write_bytes(content)
    assert bench.scores_of(bench.score(None, "--data-dir", first, "--output", "again")).equals(expected)
