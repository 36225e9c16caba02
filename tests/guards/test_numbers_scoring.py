"""Guards of numbers, scoring: causal models, shared prefixes, the window and its extension."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.lm_eval.made import CHOICE, write_task
from tests.guards.bench import Bench, Guard, Guards, Outcome, lines, longbench, write

GUARDS = Guards()


@pytest.mark.parametrize("guard", GUARDS)
def test_scoring(guard: Guard, bench: Bench) -> None:
    guard.check(bench)


# Scoring


def _hooked(bench: Bench, hook: Callable[[Any, Any, Any], Any], **options: Any) -> Outcome:
    """Score a model in memory whose first layer's MLP passes through a hook."""
    given = bench.module()
    given["model"].model.layers[0].mlp.register_forward_hook(hook)
    return bench.evaluate(**given, **options)


GUARDS.add("causality", "A model whose predictions change with later tokens is not scored.",
    lambda bench: _hooked(bench, lambda _, __, output: output + output.mean(1, keepdim=True)),
    "not a causal language model")  # fmt: skip


@GUARDS("causality-of-the-head", "So is one whose logits alone do.", "not a causal language model")
def _(bench: Bench) -> Outcome:
    given = bench.module()
    given["model"].lm_head.register_forward_hook(lambda _, __, logits: logits + 0.5 * logits.roll(-1, 1))
    return bench.evaluate(**given)


@GUARDS("causality-when-long", "So is one that looks ahead in long sequences only, once one is scored.",
        "not a causal language model")  # fmt: skip
def _(bench: Bench) -> Outcome:
    folder = Path(shutil.copytree(bench.shared.documents, "documents"))
    lines(folder / "piqa.jsonl", lambda records: records[3].update(goal="the river rose " * 60))

    def long_only(_: Any, __: Any, output: Any) -> Any:
        return output if output.shape[1] < 150 else output + output.mean(1, keepdim=True)

    return _hooked(bench, long_only, data_dir=folder)


GUARDS.add("nan", "A model that computes NaN is not scored (by a document; then by random tokens).",
    lambda bench: _hooked(bench, lambda _, __, output: output * float("nan")), "piqa document 0", "NaN")  # fmt: skip


@GUARDS("nan-generated", "Nor does it generate text (two guards: the check at the start, each token).", "not numbers")
def _(bench: Bench) -> Outcome:
    return _hooked(bench, lambda _, __, output: output * float("nan"), suite="longbench", tasks="trec",
                   data_dir=longbench({}), allow_unofficial_data=False)  # fmt: skip


@GUARDS("memory-meta", "A model in memory whose weights have no data is not scored.", "without data")
def _(bench: Bench) -> Outcome:
    given = bench.module()
    given["model"].lm_head.to("meta")
    return bench.evaluate(**given)


@GUARDS("memory-tokenizer", "Nor a text with a token that it has no row for.", "piqa document", "'the night'")
def _(bench: Bench) -> Outcome:
    given = bench.module()
    given["tokenizer"].add_tokens([*(f"<{number}>" for number in range(40)), "the night"])
    return bench.evaluate(**given)


@GUARDS("infinite", "A log-likelihood that is not finite is not stored.", "piqa document", "not a finite number")
def _(bench: Bench) -> Outcome:
    given = bench.module()
    [token, *_] = given["tokenizer"]("towel", add_special_tokens=False)["input_ids"]

    def never(_: Any, __: Any, logits: Any) -> Any:
        logits[..., token] = float("-inf")
        return logits

    given["model"].lm_head.register_forward_hook(never)
    folder = Path(shutil.copytree(bench.shared.documents, "documents"))
    lines(folder / "piqa.jsonl", lambda records: records[2].update(sol1="towel"))
    return bench.evaluate(**given, data_dir=folder)


def _as_alone(bench: Bench, given: dict[str, Any], outcome: Outcome) -> None:
    """Compare a run under template plain with the model's own forward pass over each sequence."""
    import torch

    model, tokenizer = given["model"], given["tokenizer"]
    table = bench.scores_of(outcome).set_index(["doc_id", "choice"])["ll_continuation"]
    records = (bench.shared.documents / "piqa.jsonl").read_text(encoding="utf-8").splitlines()
    for (document, choice), found in table.items():
        record = json.loads(records[document])
        context = f"Question: {record['goal']}\nAnswer:"
        encoded = tokenizer(f"{context} {record[f'sol{choice + 1}']}", return_offsets_mapping=True)
        tokens = torch.tensor([encoded["input_ids"]])
        with torch.inference_mode():
            logs = model(input_ids=tokens).logits[0].log_softmax(-1)
        places = [at for at, (_, end) in enumerate(encoded["offset_mapping"]) if end > len(context)]
        assert found == pytest.approx(sum(float(logs[at - 1, tokens[0, at]]) for at in places), rel=1e-4)


@GUARDS("sharing", "Shared prefixes give the log-likelihood of each sequence alone, to 1e-4.")
def _(bench: Bench) -> None:
    given = bench.module()
    outcome = bench.evaluate(**given, template="plain")
    assert "one sequence at a time" not in outcome.err and "scored alone" not in outcome.err
    _as_alone(bench, given, outcome)


@GUARDS("sharing-check", "A model that counts by rows is not scored in a tree, and right.")
def _(bench: Bench) -> None:
    import torch

    def by_rows(_: Any, given: Any, output: Any) -> Any:
        """Add to each token the mean of the row up to it: causal, and wrong where a row is a tree."""
        return output + output.cumsum(1) / torch.arange(1, output.shape[1] + 1)[:, None]

    given = bench.module()
    given["model"].model.layers[0].mlp.register_forward_hook(by_rows)
    outcome = bench.evaluate(**given, template="plain")
    assert "cannot be shared in a tree" in outcome.err
    _as_alone(bench, given, outcome)


@GUARDS("window-truncated", "A context longer than the window loses its left, and the run counts the tokens.")
def _(bench: Bench) -> None:
    folder = bench.config(max_position_embeddings=48)
    boolq = bench.score(folder, "--tasks", "boolq", "--template", "plain")
    assert (bench.scores_of(boolq)["truncated"] > 0).any()
    assert bench.scores_of(boolq)["n_continuation"].gt(0).all()


GUARDS.add("window-instruction", "A prompt that the window does not hold without its context is an error.",
    lambda bench: bench.score(bench.config(max_position_embeddings=16)), "piqa document 0",
    "context window of 16")  # fmt: skip


@GUARDS("window-lm-eval", "So is a continuation of an lm-eval task that the window does not hold.",
        "made_choice document 0", "window of 16")  # fmt: skip
def _(bench: Bench) -> Outcome:
    write_task(Path("tasks"), CHOICE, [{"question": "Why?", "choices": ["the river rose " * 20, "a"], "gold": 1}])
    return bench("run", bench.config(max_position_embeddings=16), "--include-path", "tasks", "--tasks", "made_choice")


@GUARDS("window-generation", "LongBench's prompt and answer fit the window.", "--max-prompt-tokens 510", code=2)
def _(bench: Bench) -> Outcome:
    return bench("longbench", bench.shared.model, "--tasks", "trec", "--data-dir", longbench({}), "--context", "none",
                 "--max-prompt-tokens", 510)  # fmt: skip


@GUARDS("window-stride", "A perplexity's stride beyond the window, which would skip tokens, is an error.",
        "--stride 600", code=2)  # fmt: skip
def _(bench: Bench) -> Outcome:
    text = write("a.txt", "the river rose " * 600)
    return bench("perplexity", bench.shared.model, "--text", text, "--stride", 600)


def _stretched(identity: str, text: str, *nouns: str, **changes: Any) -> None:
    act = lambda bench: bench.score(bench.config(**changes), "--context", 2048)  # noqa: E731
    GUARDS.add(identity, text, act, *nouns)


STRETCHED = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 256}
_stretched("yarn-twice", "What the config stretches is not stretched twice.", "stretched twice",
    rope_parameters=STRETCHED)  # fmt: skip
_stretched("yarn-several", "Rotary embeddings of several kinds are not stretched by guess.", "several kinds",
    rope_parameters={"full": {"rope_type": "default"}, "sliding": {"rope_type": "default"}})  # fmt: skip
_stretched("yarn-no-window", "Without a window of training there is no factor.", "--context-original",
    max_position_embeddings=None)  # fmt: skip


@GUARDS("yarn-method", "A setting of YaRN does not apply to another method.", "beta_fast", code=2)
def _(bench: Bench) -> Outcome:
    own = {"context": 2048, "method": "linear", "beta_fast": 32}
    return bench.score(None, "--context-config", write("own.yaml", own))


GUARDS.add("yarn-factor", "A factor below 1 is an error.",
    lambda bench: bench.score(None, "--context-config", write("own.yaml", {"context": 2048, "factor": 0.5})),
    "factor is 0.5", code=2)  # fmt: skip
GUARDS.add("yarn-short-factor", "A factor that does not reach the context is reported.",
    lambda bench: bench.score(None, "--context-config", write("own.yaml", {"context": 2048, "factor": 2.0})),
    "not to 2,048", code=0)  # fmt: skip


def _other_yarn(bench: Bench, change: Callable[[Any, float], Any]) -> Outcome:
    """A version of transformers whose YaRN has other frequencies or another scaling."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    real = ROPE_INIT_FUNCTIONS["yarn"]
    bench.patch.setitem(ROPE_INIT_FUNCTIONS, "yarn", lambda *given, **options: change(*real(*given, **options)))
    return bench.score(None, "--context", 2048)


GUARDS.add("yarn-frequencies", "A model whose frequencies are not YaRN's is not scored as stretched.",
    lambda bench: _other_yarn(bench, lambda found, scaling: (found * 1.01, scaling)),
    "rotary frequencies")  # fmt: skip
GUARDS.add("yarn-scaling", "Nor one whose attention scaling is not YaRN's.",
    lambda bench: _other_yarn(bench, lambda found, _: (found, 1.0)), "attention scaling")  # fmt: skip


@GUARDS("yarn-generation", "No text is generated under frequencies that change with its length.", "generates text",
        code=2)  # fmt: skip
def _(bench: Bench) -> Outcome:
    rows = ["--tasks", "trec", "--data-dir", longbench({})]
    return bench("longbench", bench.shared.model, *rows, "--context-method", "dynamic-yarn")
