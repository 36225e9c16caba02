"""transformers' auto classes know the model types after `import evalkit.models.auto`, in any order of imports."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import evalkit.models.auto
from tests.models.variants.building import COG, DIFFERENTIAL, causal, model_of

AUTO = "from transformers import AutoConfig, AutoModelForCausalLM\n"
LOAD = """
import torch
model = AutoModelForCausalLM.from_pretrained(folder)
assert type(model).__name__ == "EvalkitLlamaForCausalLM", type(model)
given = torch.load(folder + "/given.pt")
with torch.no_grad():
    assert torch.equal(model(given["ids"]).logits, given["logits"])
"""
BUILD = """
assert AutoConfig.for_model("evalkit_qwen2").model_type == "evalkit_qwen2"
config = AutoConfig.from_pretrained(folder)
assert type(config).__name__ == "EvalkitLlamaConfig" and config.variant().name == "differential"
assert type(AutoModelForCausalLM.from_config(config)).__name__ == "EvalkitLlamaForCausalLM"
"""
ORDERS = {
    "evalkit first": "import evalkit.models.auto\n" + AUTO + LOAD + BUILD,
    "a model class first": f"from transformers import LlamaForCausalLM\nimport evalkit.models.auto\n{AUTO}{BUILD}",
    "auto classes first": AUTO + "import evalkit.models.auto\n" + LOAD + BUILD,
    "a config made by hand": """
import evalkit.models.auto, transformers
from evalkit.models.variants.modeling import EvalkitLlamaConfig
config = EvalkitLlamaConfig.from_pretrained(folder)
model = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config)
assert type(model).__name__ == "EvalkitLlamaForCausalLM", type(model)
""",
    "not registered": """
import evalkit, evalkit.models.loading.spec
from transformers import AutoConfig, AutoModelForCausalLM
for auto in (AutoConfig, AutoModelForCausalLM):
    try:
        auto.from_pretrained(folder)
    except ValueError as error:
        assert "evalkit_llama" in str(error)
    else:
        raise AssertionError("known without evalkit.models.auto")
""",
    "light modules": """
import sys, evalkit, evalkit.models, evalkit.models.loading.spec, evalkit.models.zoo.shapes, evalkit.models.zoo.named
heavy = [name for name in ("torch", "transformers", "pandas") if name in sys.modules]
assert not heavy, heavy
""",
    "evalkit alone": """
import sys, evalkit
heavy = [name for name in ("torch", "transformers", "numpy", "pandas") if name in sys.modules]
assert not heavy, heavy
""",
}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Run in parallel, since each takes seconds to import."""
    folder = tmp_path_factory.mktemp("variant")
    model = model_of("llama", DIFFERENTIAL)
    model.save_pretrained(folder)
    with torch.no_grad():
        torch.save({"ids": causal().ids, "logits": model(causal().ids).logits}, folder / "given.pt")
    processes = {
        name: subprocess.Popen(
            [sys.executable, "-W", "error", "-c", f"folder = {str(folder)!r}\n{code}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        for name, code in ORDERS.items()
    }
    yield processes
    for process in processes.values():
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_import_order(order: str, started: dict[str, subprocess.Popen[str]]) -> None:
    _, errors = started[order].communicate(timeout=120)
    assert started[order].returncode == 0, errors


def test_a_saved_cog_checkpoint_loads(tmp_path: Path) -> None:
    model = model_of("llama", COG)
    model.save_pretrained(tmp_path)
    found = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(found).__name__ == "EvalkitLlamaForCausalLM"
    with torch.no_grad():
        assert torch.equal(found(causal().ids).logits, model(causal().ids).logits)


def test_registering_twice_is_nothing() -> None:
    importlib.reload(evalkit.models.auto)
    assert AutoConfig.for_model("evalkit_qwen2").model_type == "evalkit_qwen2"
