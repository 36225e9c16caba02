"""Plain training loops, in one process or in those that torchrun starts with this file; and a model of nanoGPT's form.

A job names a model (or transformers' Trainer), how it is distributed, and the arguments of `evalkit.InLoop` (or
`TrainerCallback`), or none. Its results are in files named after it: of each rank, the state after the last update; and
what the loop returned.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from accelerate import DistributedType, FullyShardedDataParallelPlugin, PartialState
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoTokenizer

import evalkit
from evalkit.compatibility.torch import shard_of
from evalkit.display import Progress
from evalkit.errors import CheckpointError
from evalkit.models.loading.load import LoadedModel
from evalkit.requests.computer import RequestComputer
from evalkit.scoring import engine
from tests.models.variants.building import COG, DIFFERENTIAL, INTEGRAL, VANILLA, model_of
from tests.tiny import VOCABULARY
from tests.training.trainers import state_of, trainer_of

ROOT = Path(__file__).parents[2]
ATTENTIONS = {"vanilla": VANILLA, "cog": COG, "differential": DIFFERENTIAL, "integral": INTEGRAL}
"""The four of the recipe (docs/pretraining.md)."""


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.attention(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.projection(scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Nano(nn.Module):
    """As nanoGPT's model: logits of the last position only, unless targets are given, and the loss beside them."""

    def __init__(self, width: int = 32, layers: int = 2, window: int = 512) -> None:
        super().__init__()
        self.config = SimpleNamespace(block_size=window, n_layer=layers)
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(window, width)
        self.blocks = nn.ModuleList([Block(width, 4) for _ in range(layers)])
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> tuple[torch.Tensor, Any]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        if targets is None:
            return self.lm_head(x[:, [-1]]), None
        logits = self.lm_head(x)
        return logits, cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


def built(name: str) -> nn.Module:
    """A model in training, with dropout where its attention has it, of the same weights in every process."""
    torch.manual_seed(0)
    if name == "nano":
        return Nano().train()
    model: nn.Module = model_of(
        "llama", ATTENTIONS[name], vocab_size=VOCABULARY, max_position_embeddings=1024,
        num_attention_heads=4, num_key_value_heads=2, attention_dropout=0.1 if name == "vanilla" else 0.0,
        tie_word_embeddings=name == "vanilla",
    )  # fmt: skip
    return model.train()


def distributed(model: nn.Module, kind: str, half: bool = False) -> nn.Module:
    """Wrap or shard a model: each block, then the whole."""
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp":
        policy: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if half else {}
        for block in getattr(model, "blocks", None) or model.model.layers:  # type: ignore[union-attr]
            fully_shard(block, **policy)
        fully_shard(model, **policy)
    return model


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    if hasattr(getattr(model, "module", model), "wte"):
        loss: torch.Tensor = model(tokens, tokens)[1]
        return loss
    output: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return output


def train(
    model: nn.Module,
    steps: int,
    rank: int = 0,
    evaluates: Callable[[nn.Module, int], dict[str, float]] | None = None,
    between: bool = False,
    unsynced: bool = False,
) -> tuple[dict[str, Any], dict[int, dict[str, float]]]:
    """Train; return all state that a further update depends on, and what evaluations returned.

    Gradients add up over two backward passes, of which the first is `unsynced` in sharded models; an evaluation is
    after an update, or `between` the two.
    """
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for draw in (torch.manual_seed, random.seed, np.random.seed):
        draw(100 + rank)
    logged, losses = {}, []
    for step in range(1, steps + 1):
        for part in range(2):
            if unsynced:
                model.set_requires_gradient_sync(part == 1)  # type: ignore[operator]
            loss = loss_of(model, torch.randint(VOCABULARY, (2, 24), device=device))
            loss.backward()
            losses.append(float(loss.detach()))
            if evaluates is not None and (part == 0) == between and (between or part == 1):
                if not between:
                    optimizer.step()
                    optimizer.zero_grad()
                if metrics := evaluates(model, step):
                    logged[step] = metrics
            if part == 1 and (between or evaluates is None):
                optimizer.step()
                optimizer.zero_grad()
    moments = [shard_of(value) for state in optimizer.state.values() for value in state.values()]
    state = {
        "weights": {name: shard_of(weight.detach()).cpu() for name, weight in model.named_parameters()},
        "buffers": {name: buffer.cpu() for name, buffer in model.named_buffers()},
        "optimizer": [value.cpu() for value in moments],
        "random": (random.getstate(), np.random.get_state()[1], torch.get_rng_state()),
        "hooks": {name: len(module._state_dict_pre_hooks) for name, module in model.named_modules()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "losses": losses,
    }
    return state, logged


def asked(documents: Path, output: Path, tokenizer: Path, **more: Any) -> dict[str, Any]:
    """Return the arguments of small evaluations."""
    given = {"tasks": ["piqa", "boolq"], "data_dir": str(documents), "allow_unofficial_data": True,
             "output": str(output), "tokenizer": str(tokenizer), "name": "x", "on_error": "raise"}  # fmt: skip
    return given | more


def in_loop(arguments: dict[str, Any]) -> evalkit.InLoop:
    tokenizer = AutoTokenizer.from_pretrained(arguments["tokenizer"])
    return evalkit.InLoop(**(arguments | {"tokenizer": tokenizer, "progress": Progress(live=False)}))


class Slow(Progress):
    """Makes the first evaluation last longer than the training's timeout."""

    seconds = 0.0

    def start(self, total: float, done: float) -> None:
        """Wait."""
        time.sleep(Slow.seconds)
        Slow.seconds = 0.0


def shard(trainer: Any) -> None:
    """Make a trainer shard its model by `fully_shard`, which accelerate does on accelerators only unless told."""
    state = trainer.accelerator.state
    state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False,
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )  # fmt: skip
    if trainer.args.bf16:
        state.fsdp_plugin.set_mixed_precision("bf16")
    trainer.is_fsdp_enabled = True


def run_trainer(job: dict[str, Any], folder: Path) -> None:
    """Train with transformers' Trainer, with the callback if it has arguments."""

    def failing(*_: Any, **__: Any) -> Any:
        raise CheckpointError("no space")

    warnings.simplefilter("ignore")
    AcceleratorState._reset_state(reset_partial_state=True)
    Slow.seconds = job.get("seconds", 0.0)
    is_sharded = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"} if job["kind"] == "fsdp" else {}
    with mock.patch.dict(os.environ, is_sharded), ExitStack() as stack:
        if job.get("fails"):
            stack.enter_context(mock.patch.object(LoadedModel, "of", failing))
        trainer = trainer_of(Path(job["start"]), folder / "x", **({"max_steps": 4} | job["training"]))
        if is_sharded and trainer.args.use_cpu:
            shard(trainer)
        if job["arguments"] is not None:
            trainer.add_callback(evalkit.TrainerCallback(trainer, progress=Slow(live=False), **job["arguments"]))
        trainer.train()
    rank = torch.distributed.get_rank()
    kinds = {"wrapper": type(trainer.model_wrapped).__name__, "model": type(trainer.model).__name__}
    torch.save(state_of(trainer) | {"all": trainer.state.log_history} | kinds, folder / f"{job['name']}-{rank}.pt")


def run_job(job: dict[str, Any], folder: Path) -> None:
    """Do one job as one of the processes; without steps, evaluate the model that no update has changed.

    Under `largest`, passes are as large as the budget, whatever is the fastest. A fault is in `compute` at the count-th
    batch of a rank, or in the first pass of all ranks in evaluation mode.
    """
    if job["model"] == "trainer":
        run_trainer(job, folder)
        return
    rank = torch.distributed.get_rank()
    cuda = job.get("device") == "cuda"
    model = built(job["model"]).to("cuda" if cuda else "cpu")
    if job.get("differs"):
        model.config.device = f"cuda:{rank}"  # type: ignore[union-attr]
    model = distributed(model, job["kind"], job.get("half", False))
    inloop = None if job["arguments"] is None else in_loop(job["arguments"])
    fault, computed = job.get("fault", {}), Counter[str]()
    whole, forward = RequestComputer.compute, Nano.forward
    rows: list[int] = []
    is_scoring = False

    def noting(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if isinstance(module, Nano) and not module.training:
            computed["passes"] += 1
            if is_scoring:
                rows.append(len(inputs[0]))

    def counting(*given: Any) -> Any:
        computed["batches"] += 1
        if (fault.get("rank"), fault.get("count")) == (rank, computed["batches"]):
            if fault["kind"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise CheckpointError("no space")
        nonlocal is_scoring
        is_scoring = True
        try:
            return whole(*given)
        finally:
            is_scoring = False

    def breaking(self: Nano, idx: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        if fault.get("kind") == "forward" and not self.training and not computed["broken"]:
            computed["broken"] += 1
            self.blocks[0](self.wte(idx))
            raise ValueError("a defect of the model")
        return forward(self, idx, targets)

    RequestComputer.compute = counting  # type: ignore[method-assign]
    parts = engine._PASS_PARTS
    if job.get("largest"):
        engine._PASS_PARTS = ()
    # A hook of the module itself would be part of its identity
    hook = register_module_forward_pre_hook(noting)
    # Changed code is part of a model's identity
    if fault.get("kind") == "forward":
        Nano.forward = breaking  # type: ignore[method-assign, assignment]
    try:
        if job["steps"]:
            if job.get("first") and inloop is not None:
                inloop(model, 0)
            options = {name: job.get(name, False) for name in ("between", "unsynced")}
            state, logged = train(model, job["steps"], rank, inloop, **options)
            torch.save(state, folder / f"{job['name']}-{rank}.pt")
        elif inloop is not None:
            logged = {0: inloop(model, 0)}
    finally:
        RequestComputer.compute, Nano.forward = whole, forward  # type: ignore[method-assign]
        engine._PASS_PARTS = parts
        hook.remove()
    report = {"logged": logged, "batches": computed["batches"], "passes": computed["passes"], "rows": rows}
    (folder / f"{job['name']}-{rank}.json").write_text(json.dumps(report))


def launch(
    folder: Path, jobs: list[dict[str, Any]], processes: int = 2, backend: str | None = "gloo"
) -> subprocess.CompletedProcess[str]:
    """Do jobs in processes of torchrun."""
    folder.mkdir(exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps({"jobs": jobs, "backend": backend}))
    call = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run([*call, __file__, str(folder)], env=environment, capture_output=True, text=True, timeout=280)


def states(folder: Path, name: str, processes: int = 2) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{name}-{rank}.pt", weights_only=False) for rank in range(processes)]


def reports(folder: Path, name: str, processes: int = 2) -> tuple[dict[str, dict[str, float]], list[int]]:
    """Return step → metrics, which are the same in all processes, and how many batches each has computed."""
    every = [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(processes)]
    assert all(report["logged"] == every[0]["logged"] for report in every)
    return every[0]["logged"], [report["batches"] for report in every]


def passes(folder: Path, name: str, processes: int = 2) -> list[tuple[int, list[int]]]:
    """Return of each process how many forward passes a plain module made, and the rows of those that scored."""
    every = [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(processes)]
    return [(report["passes"], report["rows"]) for report in every]


def main(root: Path) -> None:
    # Processes that wait for each other end with their tracebacks
    faulthandler.dump_traceback_later(int(os.environ.get("EVALKIT_TEST_SECONDS", "240")), exit=True)
    given = json.loads((root / "jobs.json").read_text())
    if given["backend"]:
        torch.distributed.init_process_group(given["backend"])
    for each in given["jobs"]:
        run_job(each, root)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    # The classes of this module, as a test has them, not those of __main__
    from tests.training import loops

    loops.main(Path(sys.argv[1]))
