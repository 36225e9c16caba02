"""Perplexity runs from the command line to the run folder, compared with transformers and with lm-eval."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from evalkit.longcontext.perplexity.results import DOCUMENTS, POSITIONS
from evalkit.longcontext.perplexity.windows import spans
from evalkit.models.loading.spec import model_spec
from evalkit.runs.folder import Run, load_run
from evalkit.scoring.forward import Forward
from tests.arguments import arguments
from tests.cli.test_root import Command, _no_settings, complains, evalkit
from tests.marks import fast
from tests.tiny import TRAINING_TEXT, tiny_checkpoint

__all__ = ["_no_settings", "evalkit"]  # fixtures

WINDOW = 160


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny", window=WINDOW)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Short and long documents: with spaces at their ends, in many scripts, and one longer than four windows."""
    dice = np.random.default_rng(0)
    long = [" ".join(dice.choice(TRAINING_TEXT, count)) for count in (1, 3, 30, 12, 2, 7)]
    return [*long, "  👍🏽 \n\n", "夜", " \t"]


@pytest.fixture(scope="module")
def file(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "odd.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture
def perplexity(evalkit: Command, model: Path, file: Path) -> Command:
    common = {"--model": model, "--text": file, "--output": "runs", "--device": "cpu"}
    return lambda *more: evalkit("perplexity", *arguments(common, more))


def run_of(outcome: Any) -> Run:
    assert outcome.code == 0, outcome.err
    return load_run(outcome.out.splitlines()[-1])


def expected_nats(model: Path, text: str, stride: int) -> np.ndarray:
    """Return -ln p of each token, by transformers alone: a whole forward pass in float64 for each window."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    tokens = [tokenizer.bos_token_id, *tokenizer(text)["input_ids"]]
    expected = np.full(len(tokens) - 1, np.nan)
    for start, context, stop in spans(len(tokens) - 1, 1, WINDOW, stride):
        sequence = torch.tensor(tokens[start:stop])
        with torch.no_grad():
            logits = loaded(sequence[None, :-1]).logits[0].log_softmax(-1)
        nats = -logits.gather(1, sequence[1:, None])[:, 0]
        expected[start + context - 1 : stop - 1] = nats[context - 1 :]
    assert not np.isnan(expected).any()
    return expected


@pytest.mark.parametrize(
    "more", fast([("--stride", "50", "--token-budget", "300")], [("--stride", "50", "--token-budget", "300"), ()])
)
def test_bits_per_byte_are_those_of_transformers(
    perplexity: Command, model: Path, texts: list[str], more: tuple[str, ...]
) -> None:
    run = run_of(perplexity(*more))
    options = dict(zip(more[::2], map(int, more[1::2]), strict=True))
    table, positions = run.table(DOCUMENTS), run.table(POSITIONS)
    stride = options.get("--stride", WINDOW)
    nats = [expected_nats(model, text, stride) for text in texts]
    sizes, sums = [len(text.encode()) for text in texts], np.array([tokens.sum() for tokens in nats])
    assert (table["tokens"].tolist(), table["bytes"].tolist()) == (list(map(len, nats)), sizes)
    assert table["nats"].tolist() == pytest.approx(sums, rel=1e-6)
    bits = sums / math.log(2) / sizes
    assert table["bits_per_byte"].tolist() == pytest.approx(bits, rel=1e-6)
    stored = run.stored["whole"]
    assert stored["value"] == pytest.approx(sums.sum() / math.log(2) / sum(sizes), rel=1e-6)
    assert stored["token_perplexity"] == pytest.approx(math.exp(sums.sum() / sum(map(len, nats))), rel=1e-5)
    assert stored["document_bits_per_byte"] == pytest.approx(np.mean(bits), rel=1e-6)
    # By position: nothing is lost or counted twice
    assert positions["bytes"].sum() == sum(sizes)
    by_document = positions.groupby("document")[["nats", "tokens"]].sum()
    assert by_document["nats"].tolist() == pytest.approx(table["nats"].tolist(), rel=1e-12)
    assert by_document["tokens"].tolist() == table["tokens"].tolist()
    # A token's position is the number of tokens before it in its window
    expected: dict[int, float] = {}
    for start, context, stop in spans(len(nats[2]), 1, WINDOW, stride):
        for token in range(start + context, stop):
            first = (token - start - 1) // 64 * 64 + 1
            expected[first] = expected.get(first, 0.0) + nats[2][token - 1]
    longest = positions[positions["document"] == 2].set_index("position")["nats"]
    assert longest.to_dict() == pytest.approx(expected, rel=1e-6)
    assert len(expected) > 1


ADDED = {"none": (), "BOS": ("adds_bos",), "EOS": ("adds_eos",), "both": ("adds_bos", "adds_eos")}
"""Tokens that a tokenizer adds to each text."""


@pytest.mark.parametrize("added", ADDED)
def test_the_perplexities_are_lm_evals(
    evalkit: Command, file: Path, tmp_path: Path, texts: list[str], added: str
) -> None:
    """Without the tokens that the tokenizer adds, of which none is text."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    checkpoint = tiny_checkpoint(tmp_path / "tiny", window=WINDOW, seed=3, **dict.fromkeys(ADDED[added], True))
    names = ["word_perplexity", "byte_perplexity", "bits_per_byte"]
    data = {"data_files": {"test": str(file)}, "cache_dir": str(tmp_path)}
    task = {"task": "odd", "dataset_path": "json", "dataset_kwargs": data, "output_type": "loglikelihood_rolling",
            "test_split": "test", "doc_to_text": "", "doc_to_target": "text",
            "metric_list": [{"metric": name} for name in names]}  # fmt: skip
    theirs = HFLM(pretrained=str(checkpoint), device="cpu", batch_size=1, dtype="float32", add_bos_token=False)
    manager = TaskManager(include_defaults=False)
    expected = simple_evaluate(theirs, tasks=[task], task_manager=manager, bootstrap_iters=2)["results"]["odd"]
    outcome = evalkit("perplexity", checkpoint, "--text", file, "-o", "runs")
    [stored] = run_of(outcome).stored["tasks"]
    assert stored["n"] == len(texts)
    for name in names:
        ours = stored["value" if name == stored["metric"] else name]
        assert ours == pytest.approx(expected[f"{name},none"], rel=1e-6), name
    assert ("except where a template has it" in outcome.out) == ("adds_eos" in ADDED[added])


def test_windows_of_an_extended_context_are_those_of_the_models_own_forward_pass(
    evalkit: Command, model: Path, file: Path, texts: list[str]
) -> None:
    options: dict[str, Any] = {"context": 320, "context_method": "dynamic-yarn"}
    flags = ("--context", 320, "--context-method", "dynamic-yarn")
    run = run_of(evalkit("perplexity", model, "--text", file, "--device", "cpu", "-o", "runs", *flags))
    loaded = (spec := model_spec(model, device="cpu", **options)).load(spec.locate(), lambda _: None)
    forward = Forward(loaded.model)
    for text, stored in zip(texts, run.table(DOCUMENTS)["nats"], strict=True):
        tokens = np.array([loaded.bos_id, *loaded.tokenizer(text)["input_ids"]], np.int32)
        nats = sum(
            -forward.score_alone(tokens[start:stop]).logprobs[context:].astype(np.float64).sum()
            for start, context, stop in spans(len(tokens) - 1, 1, 320, 320)
        )
        assert stored == pytest.approx(nats, rel=1e-6)
    assert run.manifest["facts"]["window"] == 320


def test_bad_input(perplexity: Command) -> None:
    for more, noun in ((("yarn,none",), "--context"), (("yarm", "--context", "300"), "'yarn'"),
                       (("yarn,none", "--context", "100"), "--context 100")):  # fmt: skip
        complains(perplexity("--methods", *more), 2, noun)
