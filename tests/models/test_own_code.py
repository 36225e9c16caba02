"""Checkpoints that carry their code: the model is the one that this code builds, with the weights of the files."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from string import Template
from typing import Any

import pytest
import torch

from evalkit.compatibility.transformers import quiet
from tests.models.loading import load_folder, refused, rewrite
from tests.tiny import VOCABULARY, tiny_tokenizer

CODE = Template('''
import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

SLOPES = [0.5, 0.25, 0.125, 0.0625]


class Config(PretrainedConfig):
    model_type = "own_of_a_test"

    def __init__(self, vocab_size=$vocabulary, hidden_size=32, max_position_embeddings=64, **others):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**others)


class Table:
    def __init__(self, slopes):
        self.slopes = slopes


class Distance(nn.Module):
    """ALiBi: a bias of attention that grows with the distance, by the slope of each head."""

    def __init__(self, config):
        super().__init__()
        $init

    def forward(self, length):
        places = torch.arange(length)
        distance = places[None] - places[:, None]
        slopes = $use
        return (slopes[:, None, None] * distance).masked_fill(distance > 0, -torch.inf)


class Base(PreTrainedModel):
    config_class = Config
    base_model_prefix = "model"
    _supports_sdpa = True
    _keys_to_ignore_on_load_missing = ["optional"]

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.3)
        if isinstance(module, Distance):
            $weights


class Model(Base):
    def __init__(self, config):
        super().__init__(config)
        size = config.hidden_size
        self.embed = nn.Embedding(config.vocab_size, size)
        self.inputs = nn.Linear(size, 3 * size, bias=False)
        self.distance = Distance(config)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids=None, **others):
        states = self.embed(input_ids)
        parts = self.inputs(states).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        bias = self.distance(input_ids.shape[1]).to(states.dtype)
        mixed = nn.functional.scaled_dot_product_attention(*parts, attn_mask=bias)
        return BaseModelOutput(last_hidden_state=states + mixed.transpose(1, 2).flatten(2))


class Causal(Base):
    _tied_weights_keys = {"lm_head.weight": "model.embed.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.model = Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids=None, **others):
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids).last_hidden_state))
''')
BUFFER = 'self.register_buffer("slopes", {}, persistent=False)'
HIDDEN = f"module = nn.Module(); {BUFFER.replace('self', 'module').format('torch.tensor(SLOPES)')}"
FILLED = "module.slopes.copy_(torch.tensor(SLOPES))"
"""How the slopes are kept, and where they are read from."""
RIGHT: dict[str, dict[str, Any]] = {
    "buffer": {"init": BUFFER.format("torch.tensor(SLOPES)")},
    "attribute": {"init": "self.slopes = torch.tensor(SLOPES)"},
    "containers": {"init": "self.all = [{'slopes': (torch.tensor(SLOPES),)}]", "use": "self.all[0]['slopes'][0]"},
    "object": {"init": "self.table = Table(torch.tensor(SLOPES))", "use": "self.table.slopes"},
    "module-in-list": {"init": f"{HIDDEN}; self.hidden = [module]", "use": "self.hidden[0].slopes"},
    "closure": {"init": "slopes = torch.tensor(SLOPES); self.get = lambda: slopes", "use": "self.get()"},
    "read-by-numpy": {"init": "self.slopes = torch.from_numpy(np.sqrt(torch.tensor(SLOPES).numpy()))"},
    "set-by-init-weights": {"init": BUFFER.format("torch.empty(4)"), "weights": FILLED},
    "set-when-run": {"init": BUFFER.format("torch.empty(4)"), "use": "self.slopes.copy_(torch.tensor(SLOPES))"},
    "beside-a-parameter": {
        "init": f"{BUFFER.format('torch.tensor(SLOPES)')}; self.scale = nn.Parameter(torch.ones(4))",
        "use": "self.slopes * self.scale",
        "weights": "module.scale.data.normal_()",  # as written for transformers 4
    },
    "weight-norm": {
        "init": "self.slopes = torch.tensor(SLOPES); self.linear = nn.utils.weight_norm(nn.Linear(4, 4))",
        "use": "self.slopes + self.linear(self.slopes)",
    },
    "complex": {"init": "self.slopes = torch.polar(torch.tensor(SLOPES), torch.ones(4))", "use": "self.slopes.real"},
    "seeded": {"init": BUFFER.format("torch.rand(4, generator=torch.Generator().manual_seed(5))")},
    "may-be-missing": {"init": 'self.register_buffer("optional", torch.tensor(SLOPES))', "use": "self.optional"},
    "parameter-in-list": {
        "init": "self.scale = nn.Parameter(torch.tensor(SLOPES)); self.kept = [self.scale, self.scale.detach]",
        "use": "self.scale",
    },
    "tied": {"init": BUFFER.format("torch.tensor(SLOPES)"), "tied": True},
    "bfloat16": {"init": BUFFER.format("1 / torch.arange(3, 7).float()"), "dtype": torch.bfloat16},
}  # fmt: skip


def own_checkpoint(
    folder: Path, *, init: str, use: str = "self.slopes", weights: str = "pass",
    tied: bool = False, dtype: torch.dtype = torch.float32,
) -> Any:  # fmt: skip
    """Write a checkpoint with its code, and return the model that is saved there, as its code has built it."""
    tiny_tokenizer(folder)
    code = folder / "modeling_own.py"
    code.write_text(CODE.substitute(vocabulary=VOCABULARY, init=init, use=use, weights=weights))
    spec: Any = importlib.util.spec_from_file_location(f"own_{folder.name}", code)
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(0)
        model = module.Causal._from_config(module.Config(tie_word_embeddings=tied), dtype=dtype).eval()
        model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "modeling_own.Config", "AutoModelForCausalLM": "modeling_own.Causal"}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": names}))
    return model


@pytest.fixture(autouse=True)
def _own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.arange(40, 60)[None]).logits
    return logits


@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_what_files_do_not_hold_is_what_the_code_computes(tmp_path: Path, kind: str) -> None:
    model = own_checkpoint(tmp_path / "own", **RIGHT[kind])
    rewrite(tmp_path / "own", lambda tensors: tensors.pop("model.distance.optional", None))
    loaded = load_folder(tmp_path / "own", trust_remote_code=True)
    assert torch.equal(_logits(loaded.model), _logits(model))


@pytest.mark.parametrize(
    ("init", "name"),
    [
        (BUFFER.format("torch.rand(4)"), "model.distance.slopes"),
        ("self.slopes = torch.from_numpy(np.random.rand(4)).float()", "model.distance.slopes"),
        (f"self.w = nn.Parameter(torch.ones(4)); {BUFFER.format('2 * self.w.detach()')}", "model.distance.slopes"),
        ("self.linear = nn.Linear(4, 4); self.slopes = self.linear.weight[0].detach()", "model.distance.slopes"),
        ("self.hidden = [nn.Linear(4, 4)]; self.slopes = 1", "model.distance.hidden.0.weight"),
    ],
)
def test_what_neither_files_nor_code_determine_is_refused(tmp_path: Path, init: str, name: str) -> None:
    own_checkpoint(tmp_path / "own", init=init)
    refused(tmp_path / "own", name, trust_remote_code=True)


def test_memory_that_the_code_leaves_uninitialised_is_nan_and_named(tmp_path: Path) -> None:
    own_checkpoint(tmp_path / "own", init=BUFFER.format("torch.empty(4)"))
    said: list[str] = []
    loaded = load_folder(tmp_path / "own", trust_remote_code=True, say=said.append)
    assert "model.distance.slopes" in said[0]
    assert _logits(loaded.model).isnan().any()


def test_two_checkpoints_with_one_config_and_other_code(tmp_path: Path) -> None:
    """transformers keeps the class of the first for the config of both."""
    for number in (2, 3):
        folder = tmp_path / f"own-{number}"
        model = own_checkpoint(folder, init=f"self.slopes = torch.tensor(SLOPES) * {number}")
        (folder / "configuration_own.py").write_text(
            "from transformers import PretrainedConfig\n\n\nclass Config(PretrainedConfig):\n"
            "    model_type = 'own_of_a_test'\n"
        )
        text = (folder / "config.json").read_text()
        (folder / "config.json").write_text(text.replace("modeling_own.Config", "configuration_own.Config"))
        loaded = load_folder(folder, trust_remote_code=True)
        assert torch.equal(_logits(loaded.model), _logits(model))
