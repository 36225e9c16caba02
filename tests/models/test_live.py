"""Models in memory: evaluated in place with the numbers of their checkpoint, and restored afterwards."""

from __future__ import annotations

import copy
import functools
import importlib.util
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from tokenizers.normalizers import Lowercase
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

import evalkit
from evalkit.compatibility.transformers import causal_language_models, imported_layers
from evalkit.display import Progress
from evalkit.errors import CheckpointError, EvalkitError
from evalkit.models.live import live_model
from evalkit.models.loading.fingerprint import Fingerprint, fingerprint
from evalkit.models.loading.locate import locate
from evalkit.models.loading.spec import model_spec
from evalkit.models.module_state import changed_code, is_stock, state_digest
from evalkit.runs.folder import Run
from tests.marks import fast
from tests.tiny import VOCABULARY, tiny_checkpoint, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a checkpoint whose attention has dropout. Not to be changed."""
    return tiny_checkpoint(tmp_path_factory.mktemp("live") / "tiny", window=1024)


@pytest.fixture
def model(folder: Path) -> Any:
    return loaded(folder)


@pytest.fixture
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def asked(documents: Path, tmp_path: Path) -> dict[str, Any]:
    """Return the arguments of a small run."""
    return {"tasks": "piqa", "data_dir": documents, "allow_unofficial_data": True, "output": tmp_path / "runs",
            "progress": Progress(live=False)}  # fmt: skip


def of_suite(suite: str, asked: dict[str, Any]) -> dict[str, Any]:
    cells = {"suite": suite, "settings": {"lengths": (300,), "depths": (50,), "repeats": 1}}
    common = {key: asked[key] for key in ("output", "progress")}
    return cells | common if suite == "needle" else asked | {"suite": suite}


def loaded(folder: Path, **options: Any) -> Any:
    """A model as a user loads it, in training."""
    return AutoModelForCausalLM.from_pretrained(folder, attention_dropout=0.1, **options).train()


def tables(run: Run) -> list[Any]:
    return [run.table(name, ()).drop(columns="seconds", errors="ignore") for name in run.files if "parquet" in name]


@pytest.mark.parametrize("suite", fast(["zeroshot8"], ["zeroshot8", "lm_eval", "needle"]))
def test_it_has_the_numbers_of_its_checkpoint(suite: str, folder: Path, tokenizer: Any, asked: dict[str, Any]) -> None:
    asked = of_suite(suite, asked)
    live = evalkit.evaluate(AutoModelForCausalLM.from_pretrained(folder), tokenizer=tokenizer, **asked)
    saved = evalkit.evaluate(folder, **asked)
    assert live.folder != saved.folder and live.manifest["live"] and live.manifest["model"] == "LlamaForCausalLM"
    for mine, expected in zip(tables(live), tables(saved), strict=True):
        assert mine.equals(expected)


def test_its_identity_is_its_state(
    model: Any, tokenizer: Any, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of equal states the run is opened; hooks and changed attributes change scores and leave the state as it is."""

    def evaluated(module: Any = model, **more: Any) -> Run:
        return evalkit.evaluate(module, tokenizer=tokenizer, **(asked | {"name": "a"} | more))

    first = evaluated()
    assert first.folder.name.startswith("a-zeroshot8-inst-float32-")
    assert evalkit.load_run("a", root=first.folder.parent).folder == first.folder
    with monkeypatch.context() as without:
        without.setattr(torch.nn.Module, "__call__", lambda *_, **given: pytest.fail("the model ran"))
        tokenizer("A text", truncation=True, max_length=1)  # which the tokenizer keeps as a setting
        assert evaluated(copy.deepcopy(model)).folder == first.folder
    names = ["run/1", "run_1", "a" * 60]
    runs = [evaluated(name=name) for name in names]
    assert [run.manifest["model"] for run in runs] == names and len({run.folder for run in runs}) == len(names)
    hook = model.lm_head.register_forward_hook(lambda *given: -given[-1])
    hooked = [evaluated() for _ in range(2)]
    hook.remove()
    scale = model.model.layers[0].self_attn.scaling
    model.model.layers[0].self_attn.scaling = 5 * scale
    scaled = evaluated()
    model.model.layers[0].self_attn.scaling = scale
    assert evaluated().folder == first.folder
    with torch.no_grad():
        model.lm_head.weight[-1, -1] += 1e-3
    others = {run.manifest["id"] for run in (first, *hooked, scaled, evaluated())}
    assert len(others) == 5


@pytest.mark.parametrize("family", fast(["llama"], ["llama", "gpt_neox", "qwen2"]))
@pytest.mark.parametrize("tied", fast([True], [True, False]))
def test_its_identity_is_that_of_its_checkpoint(family: Any, tied: bool, tmp_path: Path) -> None:
    """Of the files that `save_pretrained` writes, mixed dtypes and several files among them; not with other buffers."""

    def identities(folder: Path, **options: Any) -> tuple[Fingerprint, Fingerprint]:
        model.save_pretrained(folder, **options)
        tokenizer.save_pretrained(folder)
        with live_model(model, None, tokenizer=tokenizer, device="auto", dtype="auto", attention="auto") as spec:
            return fingerprint(spec.locate()), fingerprint(locate(str(folder)))

    source = tiny_checkpoint(tmp_path / "source", family, window=1024, tied=tied)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    tokenizer.pad_token = tokenizer.eos_token
    for name in ("float32", "mixed"):
        live, saved = identities(tmp_path / name)
        assert live == saved
        # Settings of a call, which a trainer saves with the tokenizer
        tokenizer("A text", truncation=True, max_length=7, padding="max_length")
        for weight in list(model.parameters())[1::3]:
            weight.data = weight.data.to(torch.bfloat16)
    rotary = model.base_model.rotary_emb
    rotary.inv_freq = 2 * rotary.inv_freq
    live, saved = identities(tmp_path / "frequencies")
    assert live.weights != saved.weights and (live.config, live.tokenizer) == (saved.config, saved.tokenizer)


@pytest.mark.parametrize(("family", "output"), [("llama", "output_hidden_states"), ("mixtral", "output_router_logits")])
def test_its_identity_does_not_change_when_outputs_are_captured(family: str, output: str, tmp_path: Path) -> None:
    """transformers keeps the hooks of such a call. The model is one of transformers, or part of another module."""

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.inner(ids).logits)

    def identities() -> list[Any]:
        options = {"tokenizer": tokenizer, "device": "auto", "dtype": "auto", "attention": "auto"}
        found = list[Any]()
        for module, before in ((model, None), (Outer(), lambda: None)):
            with live_model(module, None, window=64, before=before, **options) as spec:
                found.append(fingerprint(spec.locate()))
        return found

    source = tiny_checkpoint(tmp_path / "source")
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 4}  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    tokenizer = AutoTokenizer.from_pretrained(source)
    before = identities()
    ids = torch.arange(40, 60)[None]
    model(ids, labels=ids, **{output: True}).loss.backward()
    assert identities() == before
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    assert before[0] == fingerprint(locate(str(tmp_path / "saved")))


def state_of(model: Any) -> dict[str, Any]:
    """Return all state on which a trainer may rely, of a model and of the process."""
    modules = dict(model.named_modules())
    return {
        "training": {name: part.training for name, part in modules.items()},
        "hooks": {name: list(part._forward_hooks.items()) for name, part in modules.items()},
        "attributes": {name: sorted(vars(part)) for name, part in modules.items()},
        "parameters": {name: id(weight) for name, weight in model.named_parameters(remove_duplicate=False)},
        "requires_grad": {name: weight.requires_grad for name, weight in model.named_parameters()},
        "grad": {name: id(weight.grad) for name, weight in model.named_parameters()},
        "buffers": {name: (id(buffer), buffer.tolist()) for name, buffer in model.named_buffers()},
        "digest": state_digest(model),
        "config": (id(model.config), model.config.to_dict(), model.config._attn_implementation),
        "generation_config": (id(model.generation_config), model.generation_config.to_dict()),
        "random": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
        "autograd": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
    }


def assert_same(state: dict[str, Any], expected: dict[str, Any]) -> None:
    for what, value in expected.items():
        assert state[what] == value, what


@pytest.mark.parametrize("family", fast(["gpt_neox"], ("llama", "gpt_neox", "qwen2")))
@pytest.mark.parametrize("suite", fast(["needle"], ["zeroshot8", "needle"]))
def test_it_comes_back_as_it_was(suite: str, family: Any, asked: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / family, family, window=1024, tied=True, bos=None)
    model, tokenizer = loaded(folder, attn_implementation="eager"), AutoTokenizer.from_pretrained(folder)
    first = model.base_model.layers[0]
    first.eval()
    next(first.parameters()).requires_grad_(False)
    seen: list[int] = []
    first.register_forward_hook(lambda *_: seen.append(1))
    before, words = state_of(model), (len(tokenizer), tokenizer.special_tokens_map)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = state_of(model)
        run = evalkit.evaluate(model, tokenizer=tokenizer, **of_suite(suite, asked))
        assert_same(state_of(model), inside)
    assert_same(state_of(model), before)
    assert run.complete and seen

    class Stopping(Progress):
        def advance(self, work: float, documents: int) -> None:
            raise KeyboardInterrupt

    interrupted = {"progress": Stopping(live=False), "output": tmp_path / "interrupted"}
    with pytest.raises(KeyboardInterrupt):
        evalkit.evaluate(model, tokenizer=tokenizer, **of_suite(suite, asked) | interrupted)
    assert_same(state_of(model), before)
    assert (len(tokenizer), tokenizer.special_tokens_map) == words


def test_training_continues_unchanged(folder: Path, tokenizer: Any, asked: dict[str, Any]) -> None:
    def trained(evaluates: Callable[[Any, int], Any]) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        model = loaded(folder)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(2):
            tokens = torch.randint(0, 500, (2, 16))
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            # Between the backward pass and the optimizer's step
            evaluates(model, step)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses, model

    runs: list[Run] = []
    alone, expected = trained(lambda *_: None)
    losses, model = trained(
        lambda model, step: runs.append(evalkit.evaluate(model, tokenizer=tokenizer, name=f"step {step}", **asked))
    )
    assert losses == alone and len({run.manifest["id"] for run in runs}) == 2
    assert all(torch.equal(mine, other) for mine, other in zip(model.parameters(), expected.parameters(), strict=True))


def test_wrappers_are_taken_off(model: Any, tokenizer: Any, asked: dict[str, Any], tmp_path: Path) -> None:
    """Of torch, and of accelerate, which would compute in another dtype."""
    expected = evalkit.evaluate(model, tokenizer=tokenizer, **asked)
    wrapped = torch.nn.DataParallel(torch.compile(model, backend="eager"))
    assert evalkit.evaluate(wrapped, tokenizer=tokenizer, **asked).folder == expected.folder
    torch.distributed.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        parallel = torch.nn.parallel.DistributedDataParallel(model)
        assert evalkit.evaluate(parallel, tokenizer=tokenizer, **asked).folder == expected.folder
    finally:
        torch.distributed.destroy_process_group()
    model.compile(backend="eager")
    assert evalkit.evaluate(model, tokenizer=tokenizer, **asked).folder == expected.folder
    assert model._compiled_call_impl is not None
    AcceleratorState._reset_state(reset_partial_state=True)  # lm-eval's model class sets it in other tests
    try:
        prepared = Accelerator(mixed_precision="bf16", cpu=True).prepare(copy.deepcopy(model))
        patched = prepared.forward
        run = evalkit.evaluate(prepared, tokenizer=tokenizer, name="prepared", **asked)
        assert prepared.forward == patched
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    assert run.manifest["id"] == expected.manifest["id"] and run.scores.equals(expected.scores)


def test_its_tokenizer_is_the_one_that_is_saved(
    model: Any, tokenizer: Any, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = evalkit.evaluate(model, tokenizer=tokenizer, **asked)
    tokenizer.backend_tokenizer.model.dropout = 0.5  # which may be on in training
    other = asked | {"output": asked["output"].parent / "others"}
    assert evalkit.evaluate(model, tokenizer=tokenizer, **other).scores.equals(expected.scores)
    assert tokenizer.backend_tokenizer.model.dropout == 0.5
    larger = copy.deepcopy(tokenizer)
    larger.add_tokens([f"<more{number}>" for number in range(100)])
    assert evalkit.evaluate(model, tokenizer=larger, name="mine", **asked).scores.equals(expected.scores)
    monkeypatch.setattr(type(tokenizer), "save_pretrained", lambda _, folder: tiny_tokenizer(folder, adds_bos=False))
    tokenizer.backend_tokenizer.normalizer = Lowercase()
    with pytest.raises(CheckpointError, match=r"^mine: its tokenizer splits text differently"):
        evalkit.evaluate(model, tokenizer=tokenizer, name="mine", **asked)


def test_what_does_not_apply_is_refused(model: Any, tokenizer: Any) -> None:
    """Options about files, of a model without any."""
    for options in ({"context": 4096}, {"revision": "main"}, {"dtype": "bfloat16"}, {"name": ""}, {"tokenizer": None}):
        with pytest.raises(EvalkitError, match=next(iter(options))):
            evalkit.evaluate(model, **({"tokenizer": tokenizer} | options))


class FullyShardedDataParallel(torch.nn.Module):
    """A module with torch's name."""


class LoraLayer(torch.nn.Module):
    """A module with peft's name."""

    __module__ = "peft.tuners.lora.layer"


def changes() -> dict[str, tuple[Callable[[Any], Any], str]]:
    """Of a copy of a model, each with what the error names."""
    return {
        "other module": (lambda model: torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
        "base model": (lambda model: model.model, "output head"),
        "float64": (lambda model: model.to(torch.float64), "torch.float64"),
        "quantised": (lambda model: setattr(model.config, "quantization_config", {"a": 1}), "quantised"),
        "sharded": (lambda model: setattr(model.model, "more", FullyShardedDataParallel()), "sharded"),
        "adapted": (lambda model: setattr(model.model, "more", LoraLayer()), "adapters"),
        "spread": (lambda model: setattr(model, "hf_device_map", {"a": "cpu", "b": "disk"}), "cpu, disk"),
        "nan": (lambda model: model.lm_head.weight.data.fill_(torch.nan), "lm_head.weight"),
        "both directions": (lambda model: setattr(model.config, "is_causal", False), "both directions"),
        "looks ahead": (
            lambda model: model.model.embed_tokens.register_forward_hook(
                lambda *given: given[-1] + given[-1].mean(dim=1, keepdim=True)
            ),
            "tokens that follow",
        ),
    }


@pytest.mark.parametrize("change", changes())
def test_unsupported_models_are_rejected(change: str, model: Any, tokenizer: Any, asked: dict[str, Any]) -> None:
    make, noun = changes()[change]
    made = make(model)
    module = model if made is None or isinstance(made, (torch.Tensor, torch.utils.hooks.RemovableHandle)) else made
    with pytest.raises(EvalkitError, match=noun):
        evalkit.evaluate(module, tokenizer=tokenizer, **asked)


def test_a_model_that_was_changed_is_checked_by_itself(folder: Path) -> None:
    """transformers adds a hook for activation checkpointing, which only marks the embeddings."""
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    model.activation_checkpointing_enable({"use_reentrant": True})
    assert is_stock(model)
    model.config.pad_token_id = 0  # as Trainer sets it
    assert is_stock(model)
    model.config.pad_token_id = None
    hooked, replaced = copy.deepcopy(model), copy.deepcopy(model)
    hooked.get_input_embeddings().register_forward_hook(lambda *_: None)
    replaced.model.layers[0].mlp.act_fn = torch.nn.ReLU()
    assert not is_stock(hooked) and not is_stock(replaced)
    assert state_digest(replaced) != state_digest(model)


def scaled_attention(scale: float) -> Callable[..., Any]:
    original = LlamaAttention.forward

    def forward(self: Any, *given: Any, **named: Any) -> Any:
        output, weights = original(self, *given, **named)
        return output * scale, weights

    return forward


def patches() -> dict[str, tuple[Any, str, Any]]:
    """Return what users put in place of a library's code, as object, attribute and value."""
    scaled = scaled_attention(0.5)
    wrapping = functools.wraps(LlamaAttention.forward)(scaled_attention(2.0))
    eager, sdpa = modeling_llama.eager_attention_forward, ALL_ATTENTION_FUNCTIONS["sdpa"]
    return {
        "method": (LlamaAttention, "forward", scaled),
        "another number": (LlamaAttention, "forward", scaled_attention(0.25)),
        "named as the original": (LlamaAttention, "forward", wrapping),
        "in a decorator of torch": (LlamaAttention, "forward", torch.no_grad()(scaled)),
        "another class's": (LlamaAttention, "forward", Qwen2Attention.forward),
        "layer of torch": (torch.nn.Linear, "forward", lambda self, given: given @ self.weight.T),
        "eager": (modeling_llama, "eager_attention_forward", lambda *given, **named: eager(*given, **named)),
        "rotary": (modeling_llama, "apply_rotary_pos_emb", lambda query, key, *_: (query, key)),
        "sdpa": (ALL_ATTENTION_FUNCTIONS, "sdpa", lambda *given, **named: sdpa(*given, **named)),
        "softmax": (torch.nn.functional, "softmax", lambda *given, **named: torch.softmax(*given, **named)),
    }  # fmt: skip


def put(monkeypatch: pytest.MonkeyPatch, target: Any, name: str, value: Any) -> None:
    if isinstance(target, type(ALL_ATTENTION_FUNCTIONS)):
        monkeypatch.setitem(target, name, value)
    else:
        monkeypatch.setattr(target, name, value)


def test_a_changed_class_is_part_of_the_identity(
    folder: Path, tokenizer: Any, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is changed in the library; where only the files identify a run, it is refused."""

    def identity() -> Fingerprint:
        with live_model(model, "own", tokenizer=tokenizer, device="auto", dtype="auto", attention="auto") as spec:
            return fingerprint(spec.locate())

    model = AutoModelForCausalLM.from_pretrained(folder)
    identities = [identity()]
    for target, name, value in patches().values():
        with monkeypatch.context() as patched:
            put(patched, target, name, value)
            own = identity()
            assert own == identity() and own not in identities
            with pytest.raises(CheckpointError, match=rf"changed code .*{name}.*evalkit\.evaluate\(model"):
                model_spec(folder).locate()
        identities.append(own)
    assert identity() == identities[0]
    assert identities[0].weights == fingerprint(locate(str(folder))).weights
    model_spec(folder).locate()
    before = evalkit.evaluate(model, tokenizer=tokenizer, **asked)
    monkeypatch.setattr(LlamaAttention, "forward", scaled_attention(-1.0))
    after = evalkit.evaluate(model, tokenizer=tokenizer, **asked)
    assert after.folder != before.folder
    assert not any(mine.equals(other) for mine, other in zip(tables(after), tables(before), strict=True))


def test_a_changed_class_of_another_type_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Qwen2Attention, "forward", scaled_attention(0.5))
    model_spec(folder).locate()


@pytest.mark.slow
def test_no_class_of_transformers_is_taken_for_a_changed_one() -> None:
    for name in set(causal_language_models().values()):
        getattr(transformers, name)
    layers = imported_layers(None)
    assert len(layers) > 1000 and not changed_code(layers)


def test_a_state_is_its_numbers_under_their_names(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    digest = state_digest(model)
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.t().contiguous().t()
    assert not weight.is_contiguous() and state_digest(model) == digest
    with torch.no_grad():
        model.model.rotary_emb.inv_freq[-1] *= 2  # a buffer that no checkpoint has
    assert state_digest(model) != digest != state_digest(model.to(torch.bfloat16))
    tied = AutoModelForCausalLM.from_pretrained(tiny_checkpoint(tmp_path / "tied", tied=True))
    before = state_digest(tied)
    tied.lm_head.weight = torch.nn.Parameter(tied.lm_head.weight.detach().clone())
    assert state_digest(tied) == before


def test_its_identity_is_that_of_its_code(folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    """Of a class outside of transformers, also of one that it derives from."""

    def identity(scale: int) -> Fingerprint:
        code = tmp_path / f"own_{scale}.py"
        code.write_text(
            "from transformers import LlamaForCausalLM\n\n\nclass Base(LlamaForCausalLM):\n"
            "    def forward(self, *given, **named):\n"
            f"        return {scale} * super().forward(*given, **named).logits\n"
            "\n\nclass Own(Base):\n    pass\n"
        )
        spec: Any = importlib.util.spec_from_file_location("own", code)
        module: Any = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "own", module)
        spec.loader.exec_module(module)
        model = module.Own.from_pretrained(folder)
        with live_model(model, None, tokenizer=tokenizer, device="auto", dtype="auto", attention="auto") as spec:
            return fingerprint(spec.locate())

    with pytest.MonkeyPatch.context() as monkeypatch:
        first, again, other = map(identity, (1, 1, 2))
    assert first == again != other
