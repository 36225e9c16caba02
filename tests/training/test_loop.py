"""`evalkit.InLoop` in plain training loops of one process."""

from __future__ import annotations

import csv
import logging
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from tensorboardX import SummaryWriter
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

import evalkit
from evalkit.comparison.curves import curve
from evalkit.comparison.naming import find_runs
from evalkit.comparison.sides import Side, trainings_of
from evalkit.display import Progress
from evalkit.errors import CheckpointError, EvalkitError, UsageError
from evalkit.models.called import CalledModel
from evalkit.models.live import LiveSpec, live_model
from evalkit.models.loading.fingerprint import fingerprint
from evalkit.models.module_state import state_digest
from evalkit.requests.computer import RequestComputer
from evalkit.runs.folder import JOURNAL
from evalkit.studies.watch import GrowingCurve
from tests.documents import made_up
from tests.marks import fast
from tests.tiny import VOCABULARY, tiny_checkpoint
from tests.training.loops import Nano, asked, built, in_loop, train
from tests.training.trainers import equal


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("start") / "tiny", window=1024)


class Plain(nn.Module):
    """A model of transformers in another form: it takes ids and returns its logits in one of several ways."""

    def __init__(self, model: Any, form: Any) -> None:
        super().__init__()
        self.model, self._form = model, form
        self.config = {"block_size": 1024}

    def forward(self, ids: torch.Tensor) -> Any:
        return self._form(self.model(input_ids=ids, use_cache=False).logits)


FORMS: dict[str, Any] = {
    "logits": lambda logits: logits,
    "a tuple": lambda logits: (logits, None),
    "an object": lambda logits: SimpleNamespace(logits=logits, loss=None),
}


@pytest.mark.parametrize("form", fast(["a tuple"], FORMS))
def test_a_plain_module_has_the_numbers_of_the_model_inside(
    form: str, folder: Path, documents: Path, tmp_path: Path
) -> None:
    """Both in float32: sharing prefixes and another order of sums round differently, by less than 2e-5 relative."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    given = asked(documents, tmp_path / "plain", folder)
    metrics = in_loop(given)(Plain(model, FORMS[form]), 5)
    options = {"tasks": given["tasks"], "data_dir": documents, "allow_unofficial_data": True}
    expected = evalkit.evaluate(folder, output=tmp_path / "model", progress=Progress(live=False), **options)
    [run] = evalkit.list_runs(tmp_path / "plain")
    assert run.manifest["model"] == "x step 5" and run.manifest["sharing"]["way"] == "rows"
    assert run.manifest["loaded"]["architecture"] == "Plain" and run.manifest["loaded"]["window"] == 1024
    same_rows(run, expected)
    for task in run.results().tasks:
        assert metrics[f"evalkit/zeroshot8/{task.task}/accuracy"] == task.value


def test_a_plain_module_is_scored_in_few_passes(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the largest passes are the fastest: no more than one for 1,000 tokens, and one for each batch."""
    monkeypatch.setattr("evalkit.scoring.engine._PASS_PARTS", ())
    called, real = [], RequestComputer.compute
    batches: list[list[tuple[int, int]]] = []

    def noted(own: CalledModel, ids: torch.Tensor, inputs: Any) -> Any:
        called.append(tuple(ids.shape))
        return call(own, ids, inputs)

    def compute(own: RequestComputer, batch: Any) -> Any:
        called.clear()
        rows = real(own, batch)
        batches.append([*called])
        return rows

    call = CalledModel._pass
    monkeypatch.setattr(CalledModel, "_pass", noted)
    monkeypatch.setattr(RequestComputer, "compute", compute)
    in_loop(asked(made_up(tmp_path / "documents", 50), tmp_path / "runs", folder))(built("nano"), 1)
    assert batches and all(passes for passes in batches)
    for passes in batches:
        tokens = sum(rows * length for rows, length in passes)
        assert len(passes) <= tokens / 1000 + 1
        assert all(rows > 1 for rows, length in passes[:-1] if length < 500)


def same_rows(run: evalkit.Run, expected: evalkit.Run) -> None:
    """Assert that two runs have the same documents, choices and tokens, and log-likelihoods up to rounding."""
    names = [name for name in expected.scores if name.startswith("ll_")]
    assert names and len(run.scores) == len(expected.scores)
    for name in expected.scores:
        if name in names:
            torch.testing.assert_close(torch.tensor(run.scores[name]), torch.tensor(expected.scores[name]),
                                       rtol=2e-5, atol=0, equal_nan=True)  # fmt: skip
        else:
            assert run.scores[name].equals(expected.scores[name]), name


def test_a_training_of_nanogpts_form_ends_as_without_it(folder: Path, documents: Path, tmp_path: Path) -> None:
    """Its runs, curve, CSV and TensorBoard have the same numbers. One random number would change its weights."""
    expected, _ = train(built("nano"), 6)
    state, logged = train(built("nano"), 6, 0, in_loop(asked(documents, tmp_path / "runs", folder, every=3)))
    assert all(equal(state[what], expected[what]) for what in expected)
    drawing, _ = train(built("nano"), 6, 0, lambda *_: {"drawn": float(torch.rand(1))})
    assert not equal(drawing["weights"], expected["weights"])
    assert sorted(logged) == [3, 6]

    names = [str(run.folder) for run in evalkit.list_runs(tmp_path / "runs")]
    [side] = trainings_of(find_runs(names, tmp_path / "runs"), [])
    points = curve(side).tasks["piqa"]
    key = "evalkit/zeroshot8/piqa/accuracy"
    assert [(point.step, point.value) for point in points] == [(step, logged[step][key]) for step in (3, 6)]
    growing = GrowingCurve(tmp_path, tmp_path / "curve.png", lambda _: None)
    lines = [growing.add(point.step, run, "ppl") for point, run in zip(points, side.runs, strict=True)]
    assert "since step 3" in str(lines[1]) and (tmp_path / "curve.png").stat().st_size > 1000
    [table] = (tmp_path / "runs").glob("*.csv")
    written = csv.DictReader(table.read_text().splitlines())
    assert [(int(line["step"]), float(line[key])) for line in written] == [(p.step, p.value) for p in points]
    with SummaryWriter(str(tmp_path / "board")) as board:
        for step, metrics in logged.items():
            for name, value in metrics.items():
                board.add_scalar(name, value, step)
    [events] = (tmp_path / "board").iterdir()
    assert key.encode() in events.read_bytes()


def test_a_killed_training_goes_on_without_double_rows(folder: Path, documents: Path, tmp_path: Path) -> None:
    class Stopping(Progress):
        def advance(self, work: float, documents: int) -> None:
            raise KeyboardInterrupt

    given = asked(documents, tmp_path / "runs", folder)
    inloop = evalkit.InLoop(**(given | {"tokenizer": tokenizer_of(folder), "progress": Stopping(live=False)}))
    model = built("nano")
    before = state_digest(model)
    with pytest.raises(KeyboardInterrupt):
        inloop(model, 2)
    assert state_digest(model) == before and model.training
    [run] = evalkit.list_runs(tmp_path / "runs")
    stored = (run.folder / JOURNAL).read_bytes()
    assert stored and not run.complete
    first = in_loop(given)(model, 2)
    [run] = evalkit.list_runs(tmp_path / "runs")
    assert run.complete and not run.scores.duplicated(["task", "subtask", "doc_id", "choice"]).any()
    assert (run.folder / JOURNAL).read_bytes().startswith(stored)
    whole = in_loop(given | {"output": str(tmp_path / "other")})(built("nano"), 2)
    assert first == whole == in_loop(given)(model, 2)
    [table] = (tmp_path / "runs").glob("*.csv")
    assert len(table.read_text().splitlines()) == 2


def tokenizer_of(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def about(model: nn.Module, folder: Path) -> Any:
    """Return the fingerprint of a model that is only called, with its dtype."""
    given = {"tokenizer": tokenizer_of(folder), "device": "auto", "dtype": "auto", "attention": "auto"}
    with live_model(model, "x", before=lambda: None, **given) as spec:
        probed = spec.probed()
        return SimpleNamespace(**asdict(fingerprint(probed.locate())), dtype=probed.dtype)


def test_its_identity_is_its_state_settings_and_code(folder: Path) -> None:
    model = built("nano")
    first = about(model, folder)
    assert about(built("nano"), folder) == first
    other = Nano()
    other.load_state_dict(model.state_dict())
    other.config.block_size = 256
    assert about(other, folder).weights == first.weights and about(other, folder).config != first.config

    class Changed(Nano):
        """The same weights, and other code."""

    changed = Changed()
    changed.load_state_dict(model.state_dict())
    assert about(changed, folder) != first
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1e-3  # type: ignore[operator]
    assert about(model, folder).weights != first.weights


def changed_heads(model: Any) -> None:
    model.blocks[0].heads = 2


def changed_rope(model: Any) -> None:
    model.config.rope["theta"] = 500.0


def changed_table(model: Any) -> None:
    model.positions[0] = 1


def changed_scale(model: Any) -> None:
    model.scale = np.float32(2.0)


def changed_pair(model: Any) -> None:
    model.pairs[1, 2] = 5


def changed_activation(model: Any) -> None:
    model.activation = partial(nn.functional.gelu, approximate="tanh")


def changed_plan(model: Any) -> None:
    model.plan.window = 3


class Plan:
    """Settings of an ordinary class."""

    def __init__(self) -> None:
        self.window, self.owner, self._path = 2, self, object()


def attributed() -> Any:
    model: Any = built("nano")
    model.config.rope = {"theta": 10000.0, "scaling": SimpleNamespace(kind="none", of=model.config)}
    model.positions, model.scale, model.pairs = torch.arange(8), np.float32(0.5), {(1, 2): 4}
    model.activation, model.plan = partial(nn.functional.gelu, approximate="none"), Plan()
    return model


CHANGES = (changed_heads, changed_rope, changed_table, changed_scale, changed_pair, changed_activation, changed_plan)


@pytest.mark.parametrize("change", CHANGES)
def test_what_weights_do_not_tell_is_in_the_identity(change: Any, folder: Path) -> None:
    model = attributed()
    first = about(model, folder)
    assert about(attributed(), folder) == first
    change(model)
    assert about(model, folder).config != first.config


class Wide(Nano):
    """As nanochat's model: logits are float32, whatever it computes in."""

    def __init__(self) -> None:
        super().__init__(width=64, layers=4)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        logits, loss = super().forward(idx, targets)
        return logits.float(), loss


def test_half_precision_within_a_model_is_its_dtype(folder: Path, documents: Path, tmp_path: Path) -> None:
    """Of autocast around the evaluation or, by accelerate, the model; its rounding is no look at later tokens."""
    torch.manual_seed(0)
    model = Wide()
    exact = about(model, folder)
    with torch.autocast("cpu", torch.bfloat16):
        half = about(model, folder)
        assert in_loop(asked(documents, tmp_path / "runs", folder, tasks=["piqa"]))(model, 1)
    [run] = evalkit.list_runs(tmp_path / "runs")
    assert run.manifest["specification"]["dtype"] == "bfloat16"
    with torch.autocast("cpu", torch.float16):
        other = about(model, folder)
    assert (exact.dtype, half.dtype, other.dtype) == ("float32", "bfloat16", "float16")
    assert len({exact.config, half.config, other.config}) == 3
    # Of a trainer that ran in this process before
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        prepared = Accelerator(mixed_precision="bf16", cpu=True).prepare(Wide())
        assert about(prepared, folder).dtype == "bfloat16"
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_weights_that_autocast_has_cast_before_an_update_are_not_scored(folder: Path) -> None:
    """It keeps casts until its outermost context ends."""
    model, ids = built("nano").eval(), torch.arange(8)[None]
    given = {"tokenizer": tokenizer_of(folder), "device": "auto", "dtype": "auto", "attention": "auto"}
    with torch.autocast("cpu", torch.bfloat16):
        model(ids, ids)[1].backward()
        with torch.no_grad():
            model.lm_head.weight += 1.0  # type: ignore[operator]
        with live_model(model, "x", before=lambda: None, **given) as spec:
            logits = spec.probed().module(ids).logits
        with torch.enable_grad():
            loss = model(ids, ids)[1]
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert logits.equal(model(ids, ids)[0])
    loss.backward()


@pytest.fixture
def _alone() -> Iterator[None]:
    """A process group of this process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_alone")
def test_a_model_that_is_compiled_before_it_is_sharded(folder: Path, documents: Path, tmp_path: Path) -> None:
    """As accelerate does; it is not compiled for the evaluation. The policy is in its identity."""

    def never(*_: Any) -> Any:
        raise AssertionError("compiled")

    sharded = fully_shard(torch.compile(AutoModelForCausalLM.from_pretrained(folder), backend=never))
    metrics = in_loop(asked(documents, tmp_path / "runs", folder))(sharded, 1)
    assert metrics == in_loop(asked(documents, tmp_path / "whole", folder))(
        AutoModelForCausalLM.from_pretrained(folder), 1
    )
    [run] = evalkit.list_runs(tmp_path / "runs")
    assert run.manifest["loaded"]["architecture"] == "LlamaForCausalLM" and run.manifest["sharing"]["way"] == "tree"
    policies = [MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=kind)
                for kind in (torch.float32, torch.bfloat16)]  # fmt: skip
    kinds = [about(fully_shard(built("nano"), mp_policy=policy), folder) for policy in policies]
    assert [kind.dtype for kind in kinds] == ["bfloat16"] * 2
    assert kinds[0].config != kinds[1].config


def test_logits_of_a_batch_fit_into_the_free_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"tokenizer": tokenizer_of(folder), "device": "auto", "dtype": "auto", "attention": "auto"}
    with live_model(built("nano"), "x", before=lambda: None, **given) as spec:
        module, copies = spec.probed().module, 4 * 4 * VOCABULARY
        for free, tokens in ((2**40, 2048), (4 * copies * 500, 500), (0, 128)):
            monkeypatch.setattr("evalkit.models.called.free_bytes", lambda _, free=free: free)
            assert module.token_budget() == tokens


@pytest.mark.training
def test_gradients_of_a_first_backward_pass_stay(folder: Path, documents: Path, tmp_path: Path) -> None:
    expected, _ = train(built("nano"), 3)
    state, logged = train(built("nano"), 3, 0, in_loop(asked(documents, tmp_path / "runs", folder)), between=True)
    assert all(equal(state[what], expected[what]) for what in expected) and len(logged) == 3


@pytest.mark.parametrize("slow", [1e-6, 0.05])
def test_a_budget_bounds_all_of_an_evaluation(
    slow: float, folder: Path, documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the hash of the weights, on a clock that advances by it and by each document; never more than there are."""
    clock, hashing = SimpleNamespace(now=0.0), 3.0
    compute, identity = RequestComputer.compute, LiveSpec.identity

    def slowly(computer: Any, batch: Any) -> Any:
        clock.now += slow * batch.documents
        return compute(computer, batch)

    def hashed(*given: Any) -> Any:
        clock.now += hashing
        return identity(*given)

    monkeypatch.setattr("evalkit.studies.loop.time.monotonic", lambda: clock.now)
    monkeypatch.setattr(RequestComputer, "compute", slowly)
    monkeypatch.setattr(LiveSpec, "identity", hashed)
    inloop = in_loop(asked(documents, tmp_path / "runs", folder, every=10, budget="5%", tasks=["piqa"]))
    inloop(built("nano"), 0)
    clock.now += 10 * 8.0
    began = clock.now
    assert inloop(built("nano"), 10)
    [run] = evalkit.list_runs(tmp_path / "runs")
    documents_of_task = run.manifest["documents"]["piqa"]["total"]
    fitting = int((0.05 * 80.0 - hashing) / slow)
    assert run.manifest["specification"]["sample"] == min(documents_of_task, fitting)
    assert clock.now - began <= hashing + 4 * slow * 8 + 0.05 * 80


@pytest.mark.training
def test_a_budget_chooses_the_sample_once(folder: Path, documents: Path, tmp_path: Path) -> None:
    """By the time of a step and of a document; a training that goes on keeps it."""
    said: list[str] = []

    class Listening(Progress):
        def say(self, line: str) -> None:
            said.append(line)

    def loop(**more: Any) -> evalkit.InLoop:
        given = asked(documents, tmp_path / "runs", folder, every=2, **more)
        return evalkit.InLoop(**(given | {"tokenizer": tokenizer_of(folder), "progress": Listening(live=False)}))

    model, inloop = built("nano"), loop(budget="50%")
    assert inloop(model, 0) == {} and "no step has been timed" in said[-1]
    assert inloop(model, 1) == {}
    time.sleep(1.5)
    assert inloop(model, 2)
    [line] = [line for line in said if "documents of each task" in line]
    [run] = evalkit.list_runs(tmp_path / "runs")
    size = run.manifest["specification"]["sample"]
    assert f"a sample of {size:,} documents" in line and size >= 1
    said.clear()
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1e-3  # type: ignore[operator]
    for other in (inloop, loop(budget="1%")):
        assert other(model, 4)
    runs = evalkit.list_runs(tmp_path / "runs")
    assert {run.manifest["specification"]["sample"] for run in runs} == {size} and len(runs) == 2
    assert not [line for line in said if "documents of each task" in line]
    # Another sample is another curve; runs of both are compared on the documents that they share
    assert loop(sample=2)(model, 4)
    assert len(list((tmp_path / "runs").glob("*.csv"))) == 2
    kept = {("x step 2", size), ("x step 4", 2)}
    every = evalkit.list_runs(tmp_path / "runs")
    both = [run for run in every if (run.manifest["model"], run.manifest["specification"]["sample"]) in kept]
    assert curve(Side("x", tuple(both))).documents == dict.fromkeys(("piqa", "boolq"), min(size, 2))


def test_failures(
    folder: Path,
    documents: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A failed evaluation is a warning, and the training goes on, unless it is to end."""

    class Failing(Nano):
        def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
            if self.training:
                return super().forward(idx, targets)
            torch.rand(1)
            raise ValueError("a defect of the model")

    def failing() -> nn.Module:
        torch.manual_seed(0)
        return Failing().train()

    given = asked(documents, tmp_path / "runs", folder, every=2)
    expected, _ = train(built("nano"), 3)
    with caplog.at_level(logging.WARNING):
        state, logged = train(failing(), 3, 0, in_loop(given | {"on_error": "warn"}))
    assert all(equal(state[what], expected[what]) for what in expected) and not logged
    assert "step 2 failed" in caplog.records[-1].getMessage() and "a defect" in caplog.records[-1].getMessage()
    with pytest.raises((ValueError, EvalkitError), match="a defect"):
        train(failing(), 3, 0, in_loop(given))
    monkeypatch.setattr("evalkit.studies.loop.Ranks", mock.Mock(side_effect=RuntimeError("no connection")))
    assert in_loop(given | {"on_error": "warn"})(built("nano"), 2) == {}
    assert "no connection" in caplog.records[-1].getMessage()


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"every": 0}, "every is 0"),
    ({"on_error": "ignore"}, "on_error is 'ignore'"),
    ({"budget": "2"}, "budget is '2'"),
    ({"budget": "2%", "every": None}, "every="),
    ({"budget": "2%", "sample": 5}, "sample"),
    ({"window": "x"}, "window"),
    ({"suite": "zeroshot9"}, "zeroshot9"),
]


@pytest.mark.parametrize(("changed", "noun"), INVALID)
def test_invalid_arguments(changed: dict[str, Any], noun: str, folder: Path, documents: Path, tmp_path: Path) -> None:
    given = asked(documents, tmp_path / "runs", folder, every=2)
    with pytest.raises(UsageError, match=noun):
        in_loop(given | changed)
    with pytest.raises(UsageError, match="tokenizer"):
        evalkit.InLoop("zeroshot8", tokenizer=str(folder))  # type: ignore[arg-type]


def test_modules_that_cannot_be_evaluated(folder: Path, documents: Path, tmp_path: Path) -> None:
    inner = AutoModelForCausalLM.from_pretrained(folder)
    no_window, no_logits = Plain(inner, lambda logits: logits), Plain(inner, lambda logits: logits[:, -1])
    no_window.config = {}
    given = asked(documents, tmp_path / "runs", folder)
    for module, error, noun in (
        (no_window, UsageError, "window=…"),
        (no_logits, CheckpointError, r"\(1, 2, vocabulary\)"),
        (Nano().to("meta"), CheckpointError, "meta"),
        (Plain(inner, lambda logits: logits.flip(1)), CheckpointError, "not a causal"),
    ):
        with pytest.raises(error, match=noun):
            in_loop(given)(module, 1)
    with pytest.raises(UsageError, match="needle"):
        needles = {"suite": "needle", "settings": {"lengths": [300], "depths": [50], "repeats": 1}}
        in_loop(needles | {name: given[name] for name in ("tokenizer", "output", "on_error")})(built("nano"), 1)
    assert in_loop(given | {"window": 1024})(no_window, 1)
