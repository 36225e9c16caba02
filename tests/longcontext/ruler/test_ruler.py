"""RULER's runs: both scores of every sample, models of which the scores are known, reports, comparisons, refusals."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from evalkit.benchmarks.registry import results_of
from evalkit.benchmarks.request import request_of
from evalkit.benchmarks.run import evaluate
from evalkit.comparison.comparison import compare
from evalkit.display import Progress
from evalkit.longcontext.ruler.benchmark import Ruler, RulerRequest, match_score
from evalkit.longcontext.ruler.data import TASKS
from evalkit.longcontext.ruler.results import effective_length, weighted
from evalkit.longcontext.ruler.results import results_of as results_of_table
from evalkit.models.loading.locate import silent
from evalkit.runs.folder import Run
from tests.cli.test_root import Command, _no_settings, complains, evalkit
from tests.generation.made import by_transformers
from tests.longcontext.ruler.made import few_data, tokenizer_of_texts
from tests.models.loading import load_folder
from tests.tiny import tiny_checkpoint

__all__ = ["_no_settings", "evalkit"]  # fixtures

FEW = ("niah_single_2", "niah_multikey_2", "vt", "cwe", "qa_1")
SETTINGS = {"lengths": (2048,), "samples": 2, "tasks": FEW}
ALL = {"lengths": (2048,), "samples": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("ruler")
    for seed in (0, 1):
        tiny_checkpoint(place / f"model{seed}", seed=seed, window=2048, adds_bos=True)
        tokenizer_of_texts(place / f"model{seed}")
    with few_data(place):
        yield place


def made(folder: Path, model: Any = "model0", settings: Any = SETTINGS, **more: Any) -> Run:
    model = folder / model if isinstance(model, str) else model
    settings, progress = dict(settings), Progress(live=False)
    more |= {"tasks": settings.pop("tasks")} if "tasks" in settings else {}
    return evaluate(model, suite="ruler", settings=settings, output=folder / "runs", progress=progress, **more)


def answers(run: Run) -> pd.DataFrame:
    return run.table("answers.parquet", ())


def test_both_scores_are_those_of_plain_passes(folder: Path) -> None:
    """The generated text is transformers'; log-likelihoods agree to 1e-4, as choices do in shared trees (float32)."""
    run = made(folder)
    table, loaded = answers(run), load_folder(folder / "model0")
    assert [*dict.fromkeys(table["task"])] == [f"{task}@2k" for task in FEW]
    plan = Ruler().plan(request_of(RulerRequest, folder / "model0", SETTINGS), silent)
    documents = [document for task in plan.tasks.values() for document in task]
    for row, document in zip(table.itertuples(), documents, strict=True):
        ids = np.array(loaded.tokenizer(document.text).input_ids)
        assert row.tokens == len(ids) <= 2048
        assert row.score == match_score(row.answer, document.references, row.task.startswith("qa"))
        if row.task in ("niah_multikey_2@2k", "qa_1@2k"):
            tokens = by_transformers(loaded.model, ids, min(40, 2048 - len(ids)), [1])
            whole = loaded.tokenizer.decode(tokens, skip_special_tokens=True)
            assert whole.startswith(row.answer.rstrip("�")) and (row.ended == "enough" or row.answer == whole)
        assert json.loads(row.choices) == [*document.choices] and len({*document.choices}) == 8
        scored = 8 if row.id == "0" else 1
        expected = plain_logprobs(loaded, document.text, document.choices, scored)
        assert json.loads(row.logprobs)[:scored] == pytest.approx(expected, rel=1e-4)
        bits = [
            -nats / math.log(2) / len(text.encode()) for nats, text in zip(expected, document.choices, strict=False)
        ]
        assert row.bits_per_byte == pytest.approx(bits[0], rel=1e-4)
        assert scored == 1 or row.choice == (bits[0] < min(bits[1:]))


def plain_logprobs(loaded: Any, text: str, choices: Any, count: int) -> list[float]:
    """Score choices from the first token in which any of them differs from the prompt, by one pass each."""
    prompt, *sequences = loaded.tokenizer([text, *(text + choice for choice in choices)]).input_ids
    first = next(
        place for place in range(len(prompt) + 1)
        if any(sequence[: place + 1] != prompt[: place + 1] for sequence in sequences)
    )  # fmt: skip
    scores = []
    for ids in map(torch.tensor, sequences[:count]):
        with torch.inference_mode():
            logprobs = loaded.model(ids[None]).logits[0, first - 1 : -1].double().log_softmax(-1)
        scores.append(float(logprobs.gather(-1, ids[first:, None]).sum()))
    return scores


def test_an_answer_does_not_change_what_is_generated(folder: Path) -> None:
    """Keys and values of the prompt are as before: also where the tokenizer joins prompt and answer."""
    from evalkit.generation.generator import Generator
    from evalkit.generation.prompts import Prompt

    loaded = load_folder(folder / "model0")
    generator, tokens = Generator(loaded.model, tokenizer=loaded.tokenizer), np.arange(5, 45)
    for shared in (40, 37):
        several = tuple(np.arange(start, start + 60) for start in (100, 200))
        prompts = [Prompt(0, tokens, 20), Prompt(0, tokens, 20, answers=several, shared=shared)]
        alone, beside = (generator.generate([prompt])[0] for prompt in prompts)
        assert alone.tokens == beside.tokens
        for answer, logprob in zip(several, beside.logprobs, strict=True):
            ids = torch.tensor([[*tokens[:shared], *answer]])
            with torch.inference_mode():
                expected = loaded.model(ids).logits[0, shared - 1 : -1].double().log_softmax(-1)
            assert logprob == pytest.approx(float(expected.gather(-1, ids[0, shared:, None]).sum()), rel=1e-4)


class Planted(LlamaForCausalLM):
    """A model that continues given texts as they are, and any other text uniformly; it has no key-value cache."""

    texts: Any = ()

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **_: Any) -> CausalLMOutputWithPast:
        logits = torch.zeros(*input_ids.shape, self.config.vocab_size)
        for row, ids in zip(logits, input_ids.tolist(), strict=True):
            for text in self.texts:
                same = next((n for n, (a, b) in enumerate(zip(ids, text, strict=False)) if a != b), len(ids))
                for place in range(min(same, len(text) - 1)):
                    row[place, text[place + 1]] = 30.0
        return CausalLMOutputWithPast(logits=logits)

    def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> dict[str, Any]:
        return {"input_ids": input_ids}


@pytest.mark.slow
def test_a_planted_model_has_100_and_an_untrained_one_chance(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model0")
    plan = Ruler().plan(request_of(RulerRequest, folder / "model0", ALL), silent)
    planted = Planted.from_pretrained(folder / "model0")
    planted.texts = [
        [*tokenizer(document.text + document.choices[0]).input_ids, 1]
        for task in plan.tasks.values()
        for document in task
    ]
    run = made(folder, planted, ALL, tokenizer=tokenizer, name="planted")
    assert len(run.stored["tasks"]) == 13
    for task in run.stored["tasks"]:
        assert (task["task"], task["value"], task["choice"]) == (task["task"], 1.0, 1.0) and task[
            "bits_per_byte"
        ] < 1e-6
    # 13 right answers of 13 do not show that 85.6 % are; see `test_means_of_lengths`
    assert run.stored["effective"] == {"length": 2048, "low": None, "high": None}
    untrained = made(folder, settings={"lengths": (1024,), "samples": 40, "tasks": "niah_multikey_2,niah_single_1"})
    table = answers(untrained)
    assert (table["reused"] > 0).any()  # samples of one haystack
    # A uniform guess among eight: 80 documents, 4 standard errors
    assert table["score"].max() == 0 and set(table["chance"]) == {1 / 8}
    assert abs(table["choice"].mean() - 1 / 8) < 4 * math.sqrt(7 / 64 / len(table))
    assert untrained.stored["effective"]["length"] == 0


def test_runs_are_printed_drawn_and_compared(folder: Path, evalkit: Command, tmp_path: Path) -> None:
    first, second = made(folder), made(folder, "model1")
    options = ("--lengths", "2k", "--samples", 2, "--tasks", ",".join(FEW), "--output", folder / "runs")
    printed = evalkit("ruler", "--model", folder / "model0", *options).out
    assert printed.splitlines()[-1] == str(first.folder) and "bits per byte of the gold answer" in printed
    for task in first.stored["tasks"]:
        assert f"{100 * task['choice']:.1f}" in printed and f"{task['bits_per_byte']:.3f}" in printed
    shown = evalkit("ruler", "show", first.folder, second.folder, "--rule", "choice", "--plot", "lengths.pdf",
                    "--format", "csv").out.splitlines()  # fmt: skip
    assert [line.split(",")[0][-6:] for line in shown] == ["name", "model0", "model1"]
    assert Path("lengths.pdf").stat().st_size > 1000
    latex = evalkit("ruler", "show", first.folder, second.folder, "--format", "latex").out
    assert r"\toprule" in latex and "2k (5 of 13)" in latex
    for rule, name in ((None, "score"), ("choice", "choice accuracy"), ("bits_per_byte", "bits_per_byte")):
        compared = compare(first, second, rule=rule)
        tables = [answers(run).groupby("task")[rule or "score"].mean() for run in (first, second)]
        for line in compared.tasks:
            assert line.difference == pytest.approx(tables[1][line.name] - tables[0][line.name], abs=1e-9)
        metrics = results_of(first).metrics(rule)
        assert metrics[0].name == name and len(metrics) == len(FEW) * (3 if rule is None else 1)


@pytest.mark.slow
def test_questions_at_two_lengths_are_one_sample(folder: Path) -> None:
    """Of the average difference their standard errors add: (SE + SE) / 2. Those of other tasks are independent."""
    for task, sums in (("qa_1", sum), ("niah_multikey_2", lambda errors: math.hypot(*errors))):
        settings = {"lengths": (1536, 2048), "samples": 4, "tasks": (task,)}
        compared = compare(made(folder, "model0", settings), made(folder, "model1", settings), rule="bits_per_byte")
        assert compared.average.stderr == pytest.approx(sums([line.stderr for line in compared.tasks]) / 2)


def test_several_checkpoints_have_a_line_each(folder: Path, evalkit: Command) -> None:
    """Of finished runs nothing is computed."""
    runs = [made(folder, "model0"), made(folder, "model1")]
    common = ["--lengths", "2k", "--samples", 2, "--tasks", ",".join(FEW), "--output", folder / "runs"]
    outcome = evalkit("ruler", folder / "model0", folder / "model1", *common, "--format", "json", "--plot", "two.png")
    assert outcome.code == 0, outcome.err
    assert [entry["folder"] for entry in json.loads(outcome.out)] == [str(run.folder) for run in runs]
    assert Path("two.png").exists()


def test_what_cannot_be_made_is_said(folder: Path, evalkit: Command) -> None:
    """Texts are never cut: lengths beyond the window are refused, and tasks without samples of a length named."""
    common = ("ruler", folder / "model0", "--output", folder / "runs", "--samples", 1)
    complains(evalkit(*common, "--lengths", "1k,4k"), 2, "--lengths 4096")
    complains(evalkit(*common, "--lengths", "64", "--tasks", "qa_1"), 1, "qa_1 cannot be built at 64")
    complains(evalkit(*common, "--lengths", "1k", "--tasks", "niah"), 2, "niah_single_1")
    tiny_checkpoint(folder / "narrow", window=1400, adds_bos=True)  # prompts of fwe leave no room for an answer
    tokenizer_of_texts(folder / "narrow")
    narrow = evalkit("ruler", folder / "narrow", "--samples", 2, "--lengths", 1400, "--tasks", "fwe")
    complains(narrow, 1, "fwe cannot be built at 1400: a prompt and its answer have 1,404 tokens")
    complains(evalkit("ruler", "show", "nowhere", "--in", folder / "nothing"), 2, "nowhere")
    run = made(folder, settings={"lengths": (300,), "samples": 1})
    assert run.manifest["not_built"] and "niah_single_2" in run.manifest["not_built"][0]
    assert run.stored["averages"][0]["name"] == f"300 ({len(run.stored['tasks'])} of 13)"
    assert all(line in evalkit(*common, "--lengths", "300").out for line in run.manifest["not_built"])


def test_means_of_lengths() -> None:
    """GPT-4's published means, averages and effective length (RULER, table 3), and intervals of known tables."""
    lengths = [4096 << power for power in range(6)]
    gpt4 = dict(zip(lengths, (96.6, 96.3, 95.2, 93.2, 87.0, 81.2), strict=True))
    assert [round(weighted(gpt4, increasing), 1) for increasing in (True, False)] == [89.0, 94.1]
    assert effective_length({length: score / 100 for length, score in gpt4.items()}) == 65536
    rng = np.random.default_rng(0)
    rows = [
        {"task": f"{task}@{length // 1024}k", "length": length, "score": float(rng.random() < share), "choice": 0.0,
         "bits_per_byte": 1.0, "chance": 0.125, "source": str(number)}
        for length, share in ((4096, 0.99), (8192, 0.86), (16384, 0.2)) for task in ("a", "b") for number in range(50)
    ]  # fmt: skip
    stored = results_of_table(pd.DataFrame(rows), 2)
    assert (stored["effective"]["low"], stored["effective"]["high"]) == (4096, 8192)
    assert [average["name"] for average in stored["averages"]] == ["4k", "8k", "16k", "Average"]
    for n, known in ((12, True), (11, False)):  # of each of two tasks; 0.025^(1/24) = 0.857
        alike = pd.DataFrame([row | {"score": 1.0} for row in rows if row["length"] == 4096])
        few = alike[alike["source"].astype(int) < n]
        assert results_of_table(few, 2)["effective"] == {"length": 4096} | dict.fromkeys(
            ("low", "high"), 4096 if known else None
        )
    names = ["4k (2 of 3)", "8k (2 of 3)", "16k (2 of 3)", "Average (6 of 9)"]
    assert [average["name"] for average in results_of_table(pd.DataFrame(rows), 3)["averages"]] == names
    # The same questions at two lengths are one sample: their errors add; those of other tasks are independent
    for task, errors in (("qa_1", "sum"), ("vt", "root of squares")):
        twice = pd.DataFrame(
            [row | {"task": f"{task}@{row['length'] // 1024}k"} for row in rows if row["length"] < 9999]
        )
        stored = results_of_table(twice, 1)
        one, two = (part["stderr"] for part in stored["tasks"])
        expected = one + two if errors == "sum" else math.hypot(one, two)
        assert stored["averages"][-1]["stderr"] == pytest.approx(expected / 2)


@pytest.mark.slow
def test_scores_are_those_of_the_wheels_evaluator(tmp_path: Path) -> None:
    """500 predictions a task: parts of the references in other letters, among control characters and other words."""
    from tests.longcontext.ruler.wheels import environment, evaluated

    rng = np.random.default_rng(0)
    expected: dict[str, list[float]] = {}
    pieces = ["Straße", "İstanbul", "12", " ", "\x07", "\t", "K", "42 B.C.", "naïve", "\u2028", "\x1f"]
    (tmp_path / "predictions").mkdir()
    for task in TASKS:
        lines, scores = [], []
        for number in range(500):
            references = ["".join(rng.choice(pieces, rng.integers(1, 4))) for _ in range(rng.integers(1, 5))]
            said = [*rng.choice(pieces, 3), *(str(rng.choice([reference, reference.upper(), reference[:-1], ""]))
                                              for reference in references)]  # fmt: skip
            rng.shuffle(said)
            prediction = str(rng.choice(["", " ", ","])).join(said)
            lines.append({"index": number, "input": "", "outputs": references, "pred": prediction, "others": {}})
            scores.append(match_score(prediction, references, task.startswith("qa_")))
        file = tmp_path / "predictions" / f"{task}.jsonl"
        file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        expected[task] = scores
    theirs = evaluated(tmp_path, environment(tmp_path), tmp_path / "predictions")
    for task, scores in expected.items():
        assert theirs[task] == [100 * score for score in scores]
        assert 0 < np.mean(scores) < 1
        assert str(round(100 * float(np.mean(scores)), 2)) in theirs["summary"]
