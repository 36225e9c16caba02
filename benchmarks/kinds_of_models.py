"""Models of different kinds with random weights: trees, recurrent and hybrid ones, code of their own, a plain module.

In: a kind, a size, and a tokenizer, which gives the vocabulary. Out: the model as evalkit takes it, and as lm-eval
takes it; both compute with the same weights.

- `llama`: prefixes are shared in trees;
- `mamba`: recurrent; `qwen3_next`: linear attention in three of four layers, experts; `falcon_h1`: attention and
  Mamba in each layer;
- `remote`: a checkpoint with code of its own (`modeling_own.py`), whose attention takes no mask;
- `plain`: a torch module that is only called, as in `evalkit.InLoop`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from modeling_own import LogitsOf, OwnCausal, OwnConfig, PlainGPT
from transformers import AutoConfig, AutoModelForCausalLM

from evalkit.compatibility.transformers import quiet
from evalkit.models.called import CalledModel
from evalkit.models.loading.load import LoadedModel, load
from evalkit.models.loading.locate import locate
from evalkit.scoring.architecture import auto_budget

WINDOW = 2048
_CODE = "modeling_own"


@dataclass(frozen=True)
class Size:
    """Width and depth; `hybrid` and `recurrent` are the layers of models that have more or larger matrices in each."""

    hidden: int
    layers: int
    heads: int
    hybrid: int
    recurrent: int


SIZES = {"tiny": Size(64, 2, 4, 4, 2), "small": Size(256, 8, 4, 8, 6), "large": Size(2048, 22, 32, 24, 48)}
"""`small`: 15 to 40 million parameters with a vocabulary of 49,152; `large`: `llama` has 1.3 billion."""


def _llama(size: Size) -> dict[str, Any]:
    inner = size.hidden * 11 // 4
    return {"intermediate_size": inner, "num_hidden_layers": size.layers, "num_attention_heads": size.heads}


def _mamba(size: Size) -> dict[str, Any]:
    return {"num_hidden_layers": size.recurrent}


def _qwen3_next(size: Size) -> dict[str, Any]:
    return {
        "num_hidden_layers": size.hybrid,
        "intermediate_size": size.hidden * 11 // 4,
        "num_attention_heads": size.heads,
        "num_key_value_heads": max(1, size.heads // 2),
        "head_dim": size.hidden // size.heads,
        "linear_num_key_heads": size.heads,
        "linear_num_value_heads": 2 * size.heads,
        "linear_key_head_dim": size.hidden // size.heads // 2,
        "linear_value_head_dim": size.hidden // size.heads // 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": size.hidden,
        "shared_expert_intermediate_size": size.hidden,
    }


def _falcon_h1(size: Size) -> dict[str, Any]:
    inner = size.hidden * 3 // 2
    return {
        "num_hidden_layers": size.hybrid,
        "intermediate_size": 2 * size.hidden,
        "num_attention_heads": size.heads,
        "num_key_value_heads": max(1, size.heads // 2),
        "head_dim": size.hidden // size.heads,
        "mamba_d_ssm": inner,
        "mamba_d_head": 32,
        "mamba_n_heads": inner // 32,
        "mamba_d_state": 64,
        "mamba_n_groups": 1,
    }


_TYPES: Mapping[str, Callable[[Size], dict[str, Any]]] = {
    "llama": _llama,
    "mamba": _mamba,
    "qwen3_next": _qwen3_next,
    "falcon_h1": _falcon_h1,
}
"""Model types of transformers → keys of their configs."""
KINDS = (*_TYPES, "remote", "plain")


@dataclass(frozen=True)
class ModelOfKind:
    """A model as evalkit takes it, and as lm-eval takes it."""

    kind: str
    ours: LoadedModel
    theirs: LoadedModel

    def budget(self) -> int:
        """Return the tokens of a batch, as a run chooses them."""
        model = self.ours.model
        return model.token_budget() if isinstance(model, CalledModel) else auto_budget(model)


def model_of(
    kind: str, size: str, tokenizer: Any, folder: Path, dtype: str = "float32", device: str = "cpu"
) -> ModelOfKind:
    """Build a model of a kind; one of transformers is written to a folder and loaded from there."""
    if kind == "plain":
        return _plain_model(plain_gpt(size, tokenizer, dtype, device), tokenizer, dtype, device)
    write_checkpoint(kind, size, tokenizer, folder, dtype, device)
    checkpoint = locate(str(folder), trust_remote_code=kind == "remote")
    loaded = load(checkpoint, dtype=dtype, device=device)
    return ModelOfKind(kind, loaded, loaded)


def write_checkpoint(
    kind: str, size: str, tokenizer: Any, folder: Path, dtype: str = "float32", device: str = "cpu"
) -> None:
    """Write a checkpoint with random weights, which are drawn on the device."""
    shape = SIZES[size]
    torch.manual_seed(0)
    with torch.device(device), quiet():
        if kind == "remote":
            model: Any = OwnCausal(_own_config(shape, tokenizer))
        else:
            model = AutoModelForCausalLM.from_config(_config(kind, shape, tokenizer))
        _disturb_vectors(model)
        model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if kind == "remote":
        shutil.copy(Path(__file__).with_name(f"{_CODE}.py"), folder)
        classes = {"AutoConfig": f"{_CODE}.OwnConfig", "AutoModelForCausalLM": f"{_CODE}.OwnCausal"}
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": classes}))


def _config(kind: str, shape: Size, tokenizer: Any) -> Any:
    settings = _TYPES[kind](shape) | {"vocab_size": len(tokenizer), "hidden_size": shape.hidden}
    settings |= {"max_position_embeddings": WINDOW, "pad_token_id": None}
    settings |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return AutoConfig.for_model(kind, **settings)


def plain_gpt(size: str, tokenizer: Any, dtype: str, device: str, kind: type[PlainGPT] = PlainGPT) -> PlainGPT:
    """Return a plain module with random weights; `kind` may be a subclass."""
    shape = SIZES[size]
    torch.manual_seed(0)
    with torch.device(device):
        module = kind(*_own_config(shape, tokenizer).sizes)
        _disturb_vectors(module)
    return module.to(dtype=getattr(torch, dtype)).eval().requires_grad_(False)


def _own_config(shape: Size, tokenizer: Any) -> OwnConfig:
    return OwnConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        max_position_embeddings=WINDOW,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def _plain_model(module: PlainGPT, tokenizer: Any, dtype: str, device: str) -> ModelOfKind:
    called = CalledModel(module, None, before=lambda: None)
    called.probe()
    ours = LoadedModel.of(called, tokenizer, name="plain", dtype=dtype, device=device, window=WINDOW, stock=False)
    adapter = LogitsOf(OwnConfig(max_position_embeddings=WINDOW), module).eval()
    return ModelOfKind("plain", ours, replace(ours, model=adapter))


@torch.no_grad()
def _disturb_vectors(model: torch.nn.Module) -> None:
    """Add noise to the weights of norms, biases and gates, which begin as 0 or 1 and would hide what they do."""
    for weight in model.parameters():
        if weight.ndim == 1:
            weight.add_(0.05 * torch.randn_like(weight))
