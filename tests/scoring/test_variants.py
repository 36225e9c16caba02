"""The paper's attentions through the engine: by tiles, with the same scores as one by one."""

from __future__ import annotations

import numpy as np
import pytest

from evalkit.scoring.engine import Engine
from evalkit.scoring.pack import batches_of
from evalkit.scoring.sequences import Sequences, SequenceSet
from tests.marks import fast
from tests.models.variants.building import FAMILIES, VARIANTS, VOCABULARY, model_of

RELATIVE = 1e-4
"""Of a sequence's log-likelihood, in float32: sums of the same numbers in another order."""


def items() -> Sequences:
    """Questions with four choices each, after one instruction that is long enough to be a trunk."""
    rng = np.random.default_rng(0)
    instruction = rng.integers(0, VOCABULARY, 40)
    made = []
    for index in range(12):
        context = np.concatenate((instruction, rng.integers(0, VOCABULARY, int(rng.integers(5, 30)))))
        sequences = tuple(
            np.concatenate((context, rng.integers(0, VOCABULARY, int(rng.integers(1, 9))))).astype(np.int32)
            for _ in range(4)
        )
        mask = tuple(np.arange(len(s)) >= len(context) for s in sequences)
        made.append(SequenceSet(f"question {index}", "task", sequences, mask))
    return Sequences.of(made)


@pytest.mark.parametrize("kernel", ["tiles", "dense"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", fast(["llama"], FAMILIES))
def test_shared_scores_are_those_of_each_sequence_by_itself(family: str, variant: str, kernel: str) -> None:
    engine = Engine(model_of(family, VARIANTS[variant]), 200, pytest.fail, kernels=(kernel,))
    engine.check(items())
    assert (engine.shares, engine.kernel, engine.dropped) == (True, kernel, [])
    batches = batches_of(items(), engine.budget)
    assert any(len(batch.trunk) for batch in batches) and len(batches) > 1
    for batch in batches:
        for item, (_, members) in zip(batch.sets, engine.score(batch), strict=True):
            for sequence, mask, scores in zip(item.sequences, item.is_scored, members, strict=True):
                alone = engine._forward.score_alone(sequence).logprobs[mask]
                assert abs(scores.logprobs[mask].sum() - alone.sum()) <= RELATIVE * abs(alone.sum())
