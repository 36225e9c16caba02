"""The README's examples: the script rounds as documented, and its files are valid."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from evalkit.models.loading.locate import locate
from evalkit.models.quantisation import rounded
from evalkit.tables.layout import load_layout

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """The script's functions."""
    return runpy.run_path(str(EXAMPLES / "round_weights.py"))


@pytest.mark.parametrize(("bits", "group"), [(1, 4), (4, 32)])
def test_each_group_has_so_many_values_at_equal_distances(bits: int, group: int) -> None:
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    groups, exact = rounded(weight, bits, group).unflatten(1, (-1, group)), weight.unflatten(1, (-1, group))
    low, high = exact.amin(-1, keepdim=True), exact.amax(-1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    torch.testing.assert_close((groups - low) / step, ((groups - low) / step).round(), atol=1e-4, rtol=0)
    assert ((groups - exact).abs() <= step / 2 + 1e-6).all()
    torch.testing.assert_close((groups.amin(-1), groups.amax(-1)), (low[..., 0], high[..., 0]))
    equal = torch.full((2, group), 0.25)
    assert rounded(equal, bits, group).equal(equal)


def test_the_script_writes_a_checkpoint(
    script: dict[str, Any], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [str(checkpoint), str(tmp_path / "rounded"), "--bits", "2", "--group", "16"]
    monkeypatch.setattr(sys, "argv", ["round_weights.py", *arguments])
    script["main"]()
    assert locate(str(tmp_path / "rounded")).config() == locate(str(checkpoint)).config()
    before, after = (load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path / "rounded"))
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        if name.endswith("_proj.weight"):
            assert tensor.equal(rounded(before[name], 2, 16))
        else:
            assert tensor.equal(before[name]), name


def test_layout_and_mapping_fit() -> None:
    layout = load_layout(str(EXAMPLES / "rounding.yaml"))
    assert layout.model_items.keys() == {"before", "after"}
    text = (EXAMPLES / "rounding_runs.yaml").read_text(encoding="utf-8")
    assert "rows: {before: demo, after: rounded-4-bit}" in text


def test_weights_are_read_as_cog(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["as_cog.py", str(checkpoint), str(tmp_path / "cog")])
    runpy.run_path(str(EXAMPLES / "as_cog.py"), run_name="__main__")
    before, after = (load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path / "cog"))
    assert before.keys() == after.keys()
    assert all(tensor.equal(before[name]) for name, tensor in after.items())
    assert locate(str(tmp_path / "cog")).config()["attention_variant"] == "cog"
