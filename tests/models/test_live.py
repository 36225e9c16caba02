"""Models in memory: evaluated in place, and restored afterwards."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from tokenizers.normalizers import Lowercase
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import evalkit
import evalkit.models.auto
from evalkit.benchmarks.run_listing import list_found, runs_report
from evalkit.display import Progress
from evalkit.errors import CheckpointError, UsageError
from evalkit.models.modules import state_digest
from evalkit.runs.folder import Run
from tests.benchmarks.longbench.made import record, write
from tests.models.small import small
from tests.printed import printed
from tests.tiny import tiny_checkpoint, tiny_tokenizer

FAMILIES = ("llama", "gpt_neox", "qwen2")


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


def loaded(folder: Path, **options: Any) -> Any:
    """A model as a user loads it, in training."""
    return AutoModelForCausalLM.from_pretrained(folder, attention_dropout=0.1, **options).train()


def tables(run: Run) -> list[Any]:
    return [run.table(name, ()).drop(columns="seconds", errors="ignore") for name in run.files if "parquet" in name]


@pytest.mark.parametrize("suite", ["zeroshot8", "lm_eval", "longbench", "needle"])
def test_it_has_the_numbers_of_its_checkpoint(
    suite: str, folder: Path, tokenizer: Any, asked: dict[str, Any], tmp_path: Path
) -> None:
    if suite == "longbench":
        text = " ".join(f"word{number}" for number in range(100))
        write(tmp_path / "rows" / "qasper.jsonl", [record("qasper", number, context=text) for number in range(2)])
        asked = asked | {"tasks": "qasper", "data_dir": tmp_path / "rows"}
        del asked["allow_unofficial_data"]
    if suite == "needle":
        asked = {"output": asked["output"], "settings": {"lengths": (200,), "depths": (50,), "repeats": 2}}
    model = AutoModelForCausalLM.from_pretrained(folder)
    live = evalkit.evaluate(model, tokenizer=tokenizer, suite=suite, **asked)
    saved = evalkit.evaluate(folder, suite=suite, **(asked | ({"context": "none"} if suite == "longbench" else {})))
    assert live.folder != saved.folder
    assert live.stored["tasks"] or suite == "zeroshot8"
    for one, other in zip(tables(live), tables(saved), strict=True):
        assert one.equals(other)
    assert without_seconds(live.stored["tasks"]) == without_seconds(saved.stored["tasks"])


def without_seconds(tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in task.items() if key != "seconds"} for task in tasks]


def test_evalkits_own_classes_have_the_numbers_of_their_checkpoints(
    tokenizer: Any, folder: Path, asked: dict[str, Any], tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**small(tmp_path, "integral", window=1024).config))
    model.save_pretrained(tmp_path / "saved")
    live = evalkit.evaluate(model, tokenizer=tokenizer, **asked)
    saved = evalkit.evaluate(tmp_path / "saved", tokenizer=folder, **asked)
    assert live.scores.equals(saved.scores)


def test_its_run_says_so_and_is_listed(model: Any, tokenizer: Any, asked: dict[str, Any]) -> None:
    run = evalkit.evaluate(model, tokenizer=tokenizer, name="step 1000", **asked)
    assert (run.manifest["live"], run.manifest["model"], run.manifest["path"]) == (True, "step 1000", None)
    assert run.folder.name.startswith("step_1000-zeroshot8-inst-float32-")
    assert "step 1000" in printed(runs_report(list_found(run.folder.parent), run.folder.parent))
    assert evalkit.load_run("step 1000", root=run.folder.parent).folder == run.folder
    unnamed = evalkit.evaluate(model, tokenizer=tokenizer, **asked)
    assert unnamed.manifest["model"] == "LlamaForCausalLM"
    assert unnamed.manifest["id"] == run.manifest["id"]


def test_the_same_state_opens_its_run_without_being_run(
    model: Any, tokenizer: Any, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = evalkit.evaluate(model, tokenizer=tokenizer, name="a", **asked)
    again = copy.deepcopy(model)
    monkeypatch.setattr(type(model), "forward", None)  # running it raises
    tokenizer("A text", truncation=True, max_length=1)  # which the tokenizer keeps as a setting
    assert evalkit.evaluate(again, tokenizer=tokenizer, name="a", **asked).folder == first.folder


def test_what_no_fingerprint_covers_is_a_run_of_its_own(model: Any, tokenizer: Any, asked: dict[str, Any]) -> None:
    """Hooks, another forward and changed attributes change scores and leave the state as it is."""

    def upside_down(module: Any, inputs: Any, output: Any) -> Any:
        return -output

    plain = evalkit.evaluate(model, tokenizer=tokenizer, **asked)
    hook = model.lm_head.register_forward_hook(upside_down)
    hooked = [evalkit.evaluate(model, tokenizer=tokenizer, **asked) for _ in range(2)]
    hook.remove()
    assert len({run.manifest["id"] for run in (plain, *hooked)}) == 3
    assert evalkit.evaluate(model, tokenizer=tokenizer, **asked).folder == plain.folder
    scale = model.model.layers[0].self_attn.scaling
    model.model.layers[0].self_attn.scaling = 5 * scale
    assert evalkit.evaluate(model, tokenizer=tokenizer, **asked).manifest["id"] != plain.manifest["id"]
    model.model.layers[0].self_attn.scaling = scale
    assert evalkit.evaluate(model, tokenizer=tokenizer, **asked).folder == plain.folder


def test_each_name_has_its_folder(model: Any, tokenizer: Any, asked: dict[str, Any]) -> None:
    names = ["run/1", "run_1", "run 1", "ビ", "ピ", "." * 3, "a" * 60, "b" + "a" * 59]
    runs = [evalkit.evaluate(model, tokenizer=tokenizer, name=name, **asked) for name in names]
    assert [run.manifest["model"] for run in runs] == names
    assert len({run.folder for run in runs}) == len(names)


def test_another_weight_is_another_run(model: Any, tokenizer: Any, asked: dict[str, Any]) -> None:
    first = evalkit.evaluate(model, tokenizer=tokenizer, name="a", **asked)
    with torch.no_grad():
        model.lm_head.weight[-1, -1] += 1e-3
    other = evalkit.evaluate(model, tokenizer=tokenizer, name="a", **asked)
    assert other.folder != first.folder


def test_an_interrupted_run_resumes(
    model: Any, tokenizer: Any, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked |= {"tasks": "piqa,boolq", "token_budget": 256}
    expected = evalkit.evaluate(model, tokenizer=tokenizer, name="a", **asked).scores
    asked |= {"output": asked["output"].parent / "others"}

    class Stopping(Progress):
        def advance(self, work: float, documents: int) -> None:
            raise KeyboardInterrupt

    before = state_of(model)
    with pytest.raises(KeyboardInterrupt):
        evalkit.evaluate(model, tokenizer=tokenizer, name="a", **(asked | {"progress": Stopping(live=False)}))
    assert_same(state_of(model), before)
    [begun] = evalkit.list_runs(asked["output"])
    assert not begun.complete
    run = evalkit.evaluate(model, tokenizer=tokenizer, name="a", **asked)
    assert run.folder == begun.folder
    assert run.scores.equals(expected)


def state_of(model: Any) -> dict[str, Any]:
    """Return all state on which a trainer may rely, of a model and of the process."""
    modules = dict(model.named_modules())
    return {
        "training": {name: part.training for name, part in modules.items()},
        "hooks": {name: list(part._forward_hooks.items()) for name, part in modules.items()},
        "forward": {name: part.__dict__.get("forward") for name, part in modules.items()},
        "attributes": {name: sorted(vars(part)) for name, part in modules.items()},
        "parameters": {name: id(one) for name, one in model.named_parameters(remove_duplicate=False)},
        "requires_grad": {name: one.requires_grad for name, one in model.named_parameters()},
        "grad": {name: id(one.grad) for name, one in model.named_parameters()},
        "buffers": {name: (id(one), one.tolist()) for name, one in model.named_buffers()},
        "placed": {name: (one.dtype, one.device) for name, one in model.state_dict().items()},
        "digest": state_digest(model),
        "config": (id(model.config), model.config.to_dict(), model.config._attn_implementation),
        "generation_config": (id(model.generation_config), model.generation_config.to_dict()),
        "random": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
        "autograd": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for what, value in expected.items():
        assert found[what] == value, what


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("suite", ["zeroshot8", "lm_eval", "needle"])
def test_it_comes_back_as_it_was(suite: str, family: Any, asked: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / family, family, window=1024, tied=True, bos=None)
    model, tokenizer = loaded(folder, attn_implementation="eager"), AutoTokenizer.from_pretrained(folder)
    first = model.base_model.layers[0]
    first.eval()
    next(first.parameters()).requires_grad_(False)
    seen: list[int] = []
    first.register_forward_hook(lambda *_: seen.append(1))
    if suite == "needle":
        asked = {"output": asked["output"], "settings": {"lengths": (200,), "depths": (50,), "repeats": 1}}
    before, words = state_of(model), (len(tokenizer), tokenizer.special_tokens_map)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = state_of(model)
        run = evalkit.evaluate(model, tokenizer=tokenizer, suite=suite, **asked)
        assert_same(state_of(model), inside)
    assert_same(state_of(model), before)
    assert run.complete
    assert seen
    assert (len(tokenizer), tokenizer.special_tokens_map) == words


def test_training_continues_unchanged(folder: Path, tokenizer: Any, asked: dict[str, Any]) -> None:
    def trained(evaluates: Callable[[Any, int], Any]) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        model = loaded(folder)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(4):
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
    losses, found = trained(
        lambda model, step: runs.append(evalkit.evaluate(model, tokenizer=tokenizer, name=f"step {step}", **asked))
    )
    assert losses == alone
    assert all(torch.equal(one, other) for one, other in zip(found.parameters(), expected.parameters(), strict=True))
    assert len({run.manifest["id"] for run in runs}) == 4


@contextmanager
def in_a_group_of_one(folder: Path) -> Iterator[None]:
    """Distributed training in one process."""
    torch.distributed.init_process_group("gloo", f"file://{folder / 'store'}", rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def test_wrappers_are_taken_off(model: Any, tokenizer: Any, asked: dict[str, Any], tmp_path: Path) -> None:
    expected = evalkit.evaluate(model, tokenizer=tokenizer, **asked)
    wrapped = torch.nn.DataParallel(torch.compile(model, backend="eager"))
    assert evalkit.evaluate(wrapped, tokenizer=tokenizer, **asked).folder == expected.folder
    with in_a_group_of_one(tmp_path):
        parallel = torch.nn.parallel.DistributedDataParallel(model)
        assert evalkit.evaluate(parallel, tokenizer=tokenizer, **asked).folder == expected.folder
    model.compile(backend="eager")
    assert evalkit.evaluate(model, tokenizer=tokenizer, **asked).folder == expected.folder
    assert model._compiled_call_impl is not None


def test_it_computes_in_its_own_dtype_whatever_accelerate_does(
    model: Any, tokenizer: Any, asked: dict[str, Any]
) -> None:
    expected = evalkit.evaluate(copy.deepcopy(model), tokenizer=tokenizer, name="plain", **asked)
    AcceleratorState._reset_state(reset_partial_state=True)  # lm-eval's model class sets it in other tests
    try:
        prepared = Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
        patched = prepared.forward
        run = evalkit.evaluate(prepared, tokenizer=tokenizer, name="prepared", **asked)
        assert prepared.forward == patched
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    assert run.manifest["id"] == expected.manifest["id"]
    assert run.scores.equals(expected.scores)


def test_it_is_refused_if_it_looks_ahead(model: Any, tokenizer: Any, asked: dict[str, Any]) -> None:
    def ahead(module: Any, inputs: Any, output: Any) -> Any:
        return output + output.mean(dim=1, keepdim=True)

    model.model.embed_tokens.register_forward_hook(ahead)
    with pytest.raises(CheckpointError, match="change with the tokens that follow"):
        evalkit.evaluate(model, tokenizer=tokenizer, **asked)


def test_files_are_named_by_the_model(model: Any, folder: Path, tmp_path: Path, asked: dict[str, Any]) -> None:
    small = AutoTokenizer.from_pretrained(folder)
    small.add_tokens([f"<more{number}>" for number in range(100)])
    with pytest.raises(CheckpointError, match=r"^mine: the tokenizer has ids up to"):
        evalkit.evaluate(model, tokenizer=small, name="mine", **asked)


def test_a_tokenizer_that_is_read_back_as_another_is_refused(
    model: Any, tokenizer: Any, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(tokenizer), "save_pretrained", lambda _, folder: tiny_tokenizer(folder, adds_bos=False))
    tokenizer.backend_tokenizer.normalizer = Lowercase()
    with pytest.raises(CheckpointError, match=r"^mine: its tokenizer splits text differently after it is saved"):
        evalkit.evaluate(model, tokenizer=tokenizer, name="mine", **asked)


def test_its_tokenizer_may_sample_in_training(
    model: Any, tokenizer: Any, asked: dict[str, Any], tmp_path: Path
) -> None:
    expected = evalkit.evaluate(model, tokenizer=tokenizer, **asked)
    tokenizer.backend_tokenizer.model.dropout = 0.5
    run = evalkit.evaluate(model, tokenizer=tokenizer, **(asked | {"output": tmp_path / "others"}))
    assert run.scores.equals(expected.scores)
    assert tokenizer.backend_tokenizer.model.dropout == 0.5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"context": 4096}, "context: does not apply to a model in memory"),
        ({"revision": "main"}, "revision: does not apply"),
        ({"allow_pickle": True}, "allow_pickle: does not apply"),
        ({"device": "cuda"}, "device cuda: the model is evaluated in place, in cpu"),
        ({"dtype": "bfloat16"}, "dtype bfloat16: the model is evaluated in place, in float32"),
        ({"name": ""}, "name is empty"),
        ({"tokenizer": "CKPT"}, "tokenizer is 'CKPT'; expected the tokenizer of the model in memory"),
        ({"tokenizer": None}, "tokenizer is None; expected"),
    ],
)
def test_what_does_not_apply_is_refused(model: Any, tokenizer: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        evalkit.evaluate(model, **({"tokenizer": tokenizer} | options))


def test_a_checkpoint_has_no_name_of_its_own(folder: Path, asked: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="name mine: names a model in memory"):
        evalkit.evaluate(folder, name="mine", **asked)
