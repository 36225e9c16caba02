"""What `evalkit cost` measures of attention equals loops over transformers' own maps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from evalkit.models.quantisation import calibration_ids
from evalkit.studies.cost import outliers
from tests.attention import plainly
from tests.models.loading import load_folder
from tests.tiny import tiny_checkpoint


def test_means_over_heads_equal_loops(tmp_path: Path) -> None:
    loaded = load_folder(tiny_checkpoint(tmp_path / "tiny", layers=3), attention="eager")
    ids = calibration_ids(loaded.model, loaded.tokenizer, 70)
    table = outliers(loaded, ids, print)
    for layer, maps in enumerate(loaded.model(ids, output_attentions=True).attentions):
        heads = [plainly.of_head(seen, None, (), 69, True) for seen in maps[0].double().numpy()]
        for name in ("sink_abs_rate", "sparsity"):
            assert table[name][layer] == pytest.approx(np.mean([head[name] for head in heads]), abs=1e-6)


def test_sinks_need_64_tokens(tmp_path: Path) -> None:
    loaded = load_folder(tiny_checkpoint(tmp_path / "tiny"))
    table = outliers(loaded, calibration_ids(loaded.model, loaded.tokenizer, 40), print)
    assert table["sink_abs_rate"].isna().all()
