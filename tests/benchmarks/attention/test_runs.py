"""Runs of the benchmark on small models: its tables compared with whole eager maps, in float64 and by plain loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import evalkit
from evalkit.benchmarks.attention.documents import AttentionRequest, batches_of, plan_attention
from evalkit.benchmarks.attention.groups import MEASURES
from evalkit.benchmarks.attention.map_blocks import stream_attention_maps
from evalkit.benchmarks.attention.results import ALL, DOCUMENTS, HEADS
from evalkit.benchmarks.request import request_of
from evalkit.display import Progress
from evalkit.errors import OutOfMemoryError, ScoringError, UsageError
from evalkit.models.memory import whole_batches
from evalkit.models.variants.modeling import EvalkitLlamaConfig, EvalkitLlamaForCausalLM
from evalkit.runs.folder import Run
from tests.analysis.test_maps import VARIANTS
from tests.tiny import tiny_checkpoint, tiny_tokenizer

WITHOUT_TAGGER = "bos,entropy,negative,sink,distance,similarity,rank,all_tokens"


def silent(_: str) -> None:
    """Nothing."""


def checkpoint_of(variant: str, folder: Path) -> Path:
    """Save a small random model."""
    if variant == "vanilla":
        return tiny_checkpoint(folder / "vanilla", window=1024)
    tiny_tokenizer(folder / variant)
    rows = len(AutoTokenizer.from_pretrained(folder / variant))
    torch.manual_seed(3)
    config = EvalkitLlamaConfig(
        vocab_size=rows,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=1024,
        variant_layers=[1],
        **VARIANTS[variant],
    )
    EvalkitLlamaForCausalLM(config).save_pretrained(folder / variant)
    return folder / variant


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, documents: Path) -> dict[str, Run]:
    """A finished run of each attention, on documents of two tasks. Do not modify."""
    folder = tmp_path_factory.mktemp("attention")
    found = {}
    for variant in ("vanilla", *VARIANTS):
        options = {
            "settings": {"measures": WITHOUT_TAGGER, "layers": "0,1,-1"},
            "sample": 4,
            "dtype": "float32",
        }
        found[variant] = run_of(checkpoint_of(variant, folder), documents, folder / "runs", **options)
    return found


def run_of(checkpoint: Path, documents: Path, output: Path, **options: Any) -> Run:
    """Analyse documents of two tasks."""
    return evalkit.evaluate(
        checkpoint,
        suite="attention",
        tasks="piqa,boolq",
        data_dir=documents,
        allow_unofficial_data=True,
        device="cpu",
        output=output,
        progress=Progress(live=False),
        **options,
    )


def plain_measures(seen: np.ndarray, readers: np.ndarray) -> dict[str, list[float]]:
    """Compute the measures of a layer's map, [heads, tokens, tokens] in float64, one head and row after the other."""
    heads, tokens, _ = seen.shape
    found: dict[str, list[float]] = {}
    for head in range(heads):
        a = seen[head]
        shares = [np.abs(a[i, : i + 1]) / np.abs(a[i, : i + 1]).sum() for i in range(tokens)]
        last = int(readers[-1])
        lifted = a[last, : last + 1] - a[last, : last + 1].min()
        sigma = np.linalg.svd(a, compute_uv=False)
        values = {
            "bos": np.mean([a[i, 0] for i in range(1, tokens)]),
            "bos_abs": np.mean([shares[i][0] for i in range(1, tokens)]),
            "entropy": entropy(shares[last]),
            "entropy_shifted": entropy(lifted / lifted.sum()),
            "bos_negative": np.mean([a[i, 0] < 0 for i in range(1, tokens)]),
            "bos_all": a[:, 0].mean(),
            "bos_negative_all": (a[:, 0] < 0).mean(),
            "distance": np.mean([(shares[i] * (i - np.arange(i + 1))).sum() for i in range(1, tokens)]),
            "rank": np.exp(entropy(sigma / sigma.sum())),
            "rank_squares": np.exp(entropy(sigma**2 / (sigma**2).sum())),
            "rank_stable": (sigma**2).sum() / sigma[0] ** 2,
            "similarity": np.mean(
                [
                    (a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum())
                    for number, b in enumerate(seen)
                    if number != head
                ]
            ),
        }
        if tokens >= 64:
            values["sink"] = np.mean([a[i, 0] for i in range(64)])
            values["sink_abs"] = np.mean([shares[i][0] for i in range(64)])
            values |= {f"{name}_rate": float(values[name] > 0.3) for name in ("sink", "sink_abs")}
        for name, value in values.items():
            found.setdefault(name, []).append(float(value))
    return found


def entropy(shares: np.ndarray) -> float:
    """Entropy in nats."""
    return float(-sum(share * np.log(share) for share in shares if share > 0))


@pytest.mark.parametrize("variant", ["vanilla", *VARIANTS])
def test_every_value_equals_that_of_whole_maps_in_float64(variant: str, runs: dict[str, Run], documents: Path) -> None:
    """Of every document, layer and head. The run is in float32 with sums in float64; the expected values are of a model
    in float64. Weights differ by 1e-7, and a rank counts some hundred singular values: relative 2e-4; a share of
    negative weights may differ by a weight that rounds to the other sign, of which there are none here."""
    run = runs[variant]
    model = AutoModelForCausalLM.from_pretrained(run.manifest["path"], dtype=torch.float64).eval()
    tokenizer = AutoTokenizer.from_pretrained(run.manifest["path"])
    given = {
        "measures": "bos",
        "sample": 4,
        "tasks": "piqa,boolq",
        "data_dir": documents,
        "allow_unofficial_data": True,
    }
    plan = plan_attention(request_of(AttentionRequest, run.manifest["path"], given), silent)
    table = run.table(ALL)
    whole = table[table["position"].isna()].set_index(["task", "doc_id", "layer", "measure"]).sort_index()
    compared = set()
    for batch in batches_of(plan, 1024, tokenizer, set(), silent):  # type: ignore[arg-type]
        for one in batch.content:
            maps: dict[int, torch.Tensor] = {}
            ids = torch.tensor(one.tokens[None].astype(np.int64))
            stream_attention_maps(model, ids, lambda layer, seen, maps=maps: maps.update({layer: seen[0]}))
            for layer, seen in maps.items():
                for name, expected in plain_measures(seen.numpy(), one.readers).items():
                    found = whole.loc[[(batch.task, one.doc_id, layer, name)]].sort_values("head")["value"]
                    assert found.to_numpy() == pytest.approx(expected, rel=2e-4, abs=2e-6), (name, layer)
                    compared.add(name)
    assert compared >= {name for name, info in MEASURES.items() if info.group not in ("mass", "sink")}
    assert set(table["measure"]) == compared


def test_positions_are_means_over_bins_of_queries(runs: dict[str, Run]) -> None:
    """The bins' means, weighted by their sizes, are the mean over all positions."""
    table = runs["cog"].table(ALL)
    lengths = runs["cog"].table(DOCUMENTS).groupby(["task", "doc_id"], observed=True)["tokens"].first()
    for (task, doc_id, _, _), rows in table[table["measure"] == "bos"].groupby(
        ["task", "doc_id", "layer", "head"], observed=True
    ):
        binned = rows.dropna(subset=["position"]).sort_values("position")
        starts = binned["position"].to_numpy(int)
        assert starts.tolist() == [2**n for n in range(len(starts))]
        sizes = np.diff([*starts, lengths[task, doc_id]])
        [mean] = rows[rows["position"].isna()]["value"]
        assert (binned["value"].to_numpy() * sizes).sum() / sizes.sum() == pytest.approx(mean, abs=1e-6)


def test_the_other_tables_are_group_bys_of_the_first(runs: dict[str, Run]) -> None:
    for run in runs.values():
        words = {"task": str, "subtask": str, "measure": str, "position": float, "value": float}
        table = run.table(ALL).astype(words).fillna({"position": -1})
        for name, keys, made in (
            (DOCUMENTS, ["task", "subtask", "doc_id", "choice", "layer", "measure", "position"], ["mean", "median"]),
            (HEADS, ["task", "layer", "head", "measure", "position"], ["mean"]),
        ):
            own = {key: kind for key, kind in words.items() if key in keys}
            found = run.table(name).astype(own).fillna({"position": -1}).set_index(keys).sort_index()
            expected = table.groupby(keys, observed=True)["value"].agg(made).sort_index()
            assert found.index.equals(expected.index)
            for column in made:
                assert np.allclose(found[column], expected[column], rtol=1e-9, atol=1e-12)
        heads = run.table(HEADS)
        assert heads["n"].max() == 4


def test_results_are_means_over_documents(runs: dict[str, Run]) -> None:
    run = runs["differential"]
    rows = run.table(DOCUMENTS)
    rows = rows[rows["position"].isna()]
    for task in run.stored["tasks"]:
        assert (task["n"], task["truncated"]) == (4, 0)
        own = rows[rows["task"] == task["task"]]
        for name, found in task["measures"].items():
            column = "median" if name.startswith("rank") else "mean"
            values = own[own["measure"] == name].groupby("doc_id")[column].mean()
            assert found["value"] == pytest.approx(values.mean(), rel=1e-6)
            assert found["stderr"] == pytest.approx(values.sem(), rel=1e-6)
    assert [one["layer"] for one in run.stored["layers"]] == [0, 1, 2]


def test_the_rank_is_of_the_last_four_layers_unless_layers_are_named(tmp_path: Path, documents: Path) -> None:
    model = tiny_checkpoint(tmp_path / "six", window=1024, layers=6)
    settings = {"measures": "rank,bos"}
    every = run_of(model, documents, tmp_path, sample=1, settings=settings).table(HEADS)
    assert set(every[every["measure"] == "rank"]["layer"]) == {2, 3, 4, 5}
    assert set(every[every["measure"] == "bos"]["layer"]) == {*range(6)}
    named = run_of(model, documents, tmp_path, sample=1, settings=settings | {"layers": "1,-1"}).table(HEADS)
    assert set(named["layer"]) == {1, 5}
    with pytest.raises(UsageError, match=r"--layers: the model has no attention layer 6; its layers are 0 to 5, or -1"):
        run_of(model, documents, tmp_path, sample=1, settings=settings | {"layers": "6"})


def test_every_continuation(tmp_path: Path, documents: Path, checkpoint: Path) -> None:
    settings = {"measures": "entropy", "continuation": "all"}
    run = run_of(checkpoint, documents, tmp_path, sample=2, settings=settings)
    table = run.table(DOCUMENTS)
    choices = table[table["task"] == "piqa"].groupby("doc_id")["choice"].unique()
    assert [sorted(one) for one in choices] == [[0, 1]] * 2
    assert {task["task"]: task["n"] for task in run.stored["tasks"]} == {"piqa": 2, "boolq": 2}


def test_documents_that_no_measure_applies_to(tmp_path: Path, documents: Path, checkpoint: Path) -> None:
    """They are finished too, so that the run ends, and with a reason if nothing remains."""
    settings = {"measures": "sink"}
    short = run_of(checkpoint, documents, tmp_path, sample=2, seed=1, settings=settings, template="plain")
    assert [(task["task"], task["n"]) for task in short.stored["tasks"]] == [("piqa", 2), ("boolq", 2)]
    assert short.stored["tasks"][0]["measures"] == {}
    without_bos = tiny_checkpoint(tmp_path / "model", bos=None)
    for _ in range(2):
        with pytest.raises(ScoringError, match="bos and negative need sequences that begin with BOS"):
            run_of(without_bos, documents, tmp_path, sample=2, settings={"measures": "bos,negative"})


def test_a_text(tmp_path: Path, checkpoint: Path) -> None:
    text = tmp_path / "book.txt"
    text.write_text(" ".join(f"word{n}" for n in range(300)), encoding="utf-8")
    run = evalkit.evaluate(
        checkpoint,
        suite="attention",
        settings={"text": text, "measures": "bos,entropy"},
        sample=2,
        context=None,
        device="cpu",
        output=tmp_path / "runs",
        progress=Progress(live=False),
    )
    assert set(run.table(DOCUMENTS)["task"]) == {"text"}
    assert pd.Index(run.table(DOCUMENTS)["doc_id"]).nunique() >= 1
    # Windows may be shorter than the model's
    shorter = evalkit.evaluate(
        checkpoint,
        suite="attention",
        settings={"text": text, "measures": "bos"},
        sample=2,
        context=100,
        device="cpu",
        output=tmp_path / "runs",
        progress=Progress(live=False),
    )
    assert set(shorter.table(DOCUMENTS)["tokens"]) == {100}
    assert shorter.table(DOCUMENTS)["doc_id"].nunique() == 2


def test_a_worker_without_memory_leaves_the_document_to_another(
    tmp_path: Path, documents: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("evalkit.benchmarks.attention.measures.measures_of", fail)
    settings = {"measures": "bos"}
    with pytest.raises(ScoringError, match=r"out of memory on \d+ tokens; leave rank out") as found:
        run_of(checkpoint, documents, tmp_path, sample=1, settings=settings)
    assert not isinstance(found.value, OutOfMemoryError)
    with whole_batches(), pytest.raises(OutOfMemoryError, match=r"out of memory on piqa document \d+, \d+ tokens"):
        run_of(checkpoint, documents, tmp_path, sample=1, settings=settings)
