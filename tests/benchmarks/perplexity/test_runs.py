"""Perplexity runs from the command line to the run folder, compared with transformers and with lm-eval."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from evalkit.benchmarks.perplexity.results import DOCUMENTS, POSITIONS
from evalkit.benchmarks.perplexity.windows import spans
from evalkit.reporting.decimals import fixed
from evalkit.runs.folder import JOURNAL, Run, load_run
from tests.arguments import arguments
from tests.cli.test_root import Command, _no_settings, evalkit
from tests.test_kills import batches_in, wait_for
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
    found = [" ".join(dice.choice(TRAINING_TEXT, count)) for count in (1, 3, 40, 12, 2, 25, 7)]
    return [*found, "  👍🏽 \n\n", "夜", " \t"]


@pytest.fixture(scope="module")
def file(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "odd.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture
def perplexity(evalkit: Command, model: Path, file: Path) -> Command:
    """Run `evalkit perplexity`; later options override these."""
    common = {"--model": model, "--text": file, "--output": "runs", "--device": "cpu"}
    return lambda *more: evalkit("perplexity", *arguments(common, more))


def run_of(outcome: Any) -> Run:
    assert outcome.code == 0, outcome.err
    return load_run(outcome.out.splitlines()[-1])


def expected_nats(model: Path, text: str, window: int, stride: int) -> np.ndarray:
    """Return -ln p of each token, by transformers alone: a whole forward pass in float64 for each window."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    tokens = [tokenizer.bos_token_id, *tokenizer(text)["input_ids"]]
    found = np.full(len(tokens) - 1, np.nan)
    for start, context, stop in spans(len(tokens) - 1, window, stride):
        sequence = torch.tensor(tokens[start + 1 : stop + 1])
        with torch.no_grad():
            logits = loaded(sequence[None, :-1]).logits[0].log_softmax(-1)
        nats = -logits.gather(1, sequence[1:, None])[:, 0]
        found[start + context : stop] = nats[context - 1 :]
    assert not np.isnan(found).any()
    return found


@pytest.mark.parametrize("more", [(), ("--stride", "50"), ("--context", "70"), ("--token-budget", "40")])
def test_bits_per_byte_are_those_of_transformers(
    perplexity: Command, model: Path, texts: list[str], more: tuple[str, ...]
) -> None:
    run = run_of(perplexity(*more))
    given = dict(zip(more[::2], map(int, more[1::2]), strict=True))
    window = given.get("--context", WINDOW)
    table, positions = run.table(DOCUMENTS, ()), run.table(POSITIONS, ())
    nats = [expected_nats(model, text, window, given.get("--stride", window)) for text in texts]
    assert table["tokens"].tolist() == list(map(len, nats))
    assert table["bytes"].tolist() == [len(text.encode()) for text in texts]
    assert table["nats"].tolist() == pytest.approx([one.sum() for one in nats], rel=1e-6)
    bits = [one.sum() / math.log(2) / len(text.encode()) for one, text in zip(nats, texts, strict=True)]
    assert table["bits_per_byte"].tolist() == pytest.approx(bits, rel=1e-6)
    whole, size = sum(one.sum() for one in nats), sum(len(text.encode()) for text in texts)
    stored = run.stored["whole"]
    assert stored["bits_per_byte"] == pytest.approx(whole / math.log(2) / size, rel=1e-6)
    assert stored["token_perplexity"] == pytest.approx(math.exp(whole / sum(map(len, nats))), rel=1e-5)
    assert stored["document_bits_per_byte"] == pytest.approx(np.mean(bits), rel=1e-6)
    # By position: nothing is lost or counted twice
    assert positions["bytes"].sum() == size
    by_document = positions.groupby("document")[["nats", "tokens"]].sum()
    assert by_document["nats"].tolist() == pytest.approx(table["nats"].tolist(), rel=1e-12)
    assert by_document["tokens"].tolist() == table["tokens"].tolist()
    # A token's position is the number of tokens before it in its window
    longest = nats[2]
    expected: dict[int, float] = {}
    for start, context, stop in spans(len(longest), window, given.get("--stride", window)):
        for token in range(start + context, stop):
            first = (token - start - 1) // 64 * 64 + 1
            expected[first] = expected.get(first, 0.0) + longest[token]
    found = positions[positions["document"] == 2].set_index("position")["nats"]
    assert found.to_dict() == pytest.approx(expected, rel=1e-6)
    assert len(expected) > 1


@pytest.mark.parametrize("adds_bos", [False, True])
def test_the_perplexities_are_lm_evals(
    evalkit: Command, file: Path, tmp_path: Path, adds_bos: bool, texts: list[str]
) -> None:
    """A task of lm-eval's own type, run by lm-eval with its own model class."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    checkpoint = tiny_checkpoint(tmp_path / "tiny", window=WINDOW, adds_bos=adds_bos, seed=3)
    names = ["word_perplexity", "byte_perplexity", "bits_per_byte"]
    task = {
        "task": "odd",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}, "cache_dir": str(tmp_path)},
        "output_type": "loglikelihood_rolling",
        "test_split": "test",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [{"metric": name} for name in names],
    }
    theirs = HFLM(pretrained=str(checkpoint), device="cpu", batch_size=1, dtype="float32")
    manager = TaskManager(include_defaults=False)
    expected = simple_evaluate(theirs, tasks=[task], task_manager=manager, bootstrap_iters=2)["results"]["odd"]
    run = run_of(evalkit("perplexity", checkpoint, "--text", file, "-o", "runs"))
    [found] = run.stored["tasks"]
    assert found["n"] == len(texts)
    for name in names:
        assert found[name] == pytest.approx(expected[f"{name},none"], rel=1e-6), name
    noted = "the tokenizer adds tokens" in evalkit("perplexity", checkpoint, "--text", file, "-o", "runs").out
    assert noted is adds_bos


@pytest.mark.slow
def test_killed_and_given_again(perplexity: Command, model: Path, file: Path) -> None:
    """In the middle of a document of several batches; the tables are the same to the last bit."""
    budget = ("--token-budget", "128")
    whole = run_of(perplexity(*budget, "--output", "undisturbed"))
    batches = (whole.folder / JOURNAL).read_bytes().count(b"\n")
    assert batches > len(whole.table(DOCUMENTS, ()))
    output = Path("disturbed")
    script = (
        "import time; from evalkit.runs.journal import Journal; append = Journal.append\n"
        "def slow(*given): found = append(*given); time.sleep(0.5); return found\n"
        "Journal.append = slow; from evalkit.cli import main; main()"
    )
    command = [sys.executable, "-c", script, "perplexity", str(model), "--text", str(file), "-o", str(output), *budget]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: batches_in(output) >= 3 or process.poll() is not None, 120)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    kept = batches_in(output)
    assert 3 <= kept < batches
    journal = next(output.glob(f"*/{JOURNAL}")).read_bytes()
    run = run_of(perplexity(*budget, "--output", output))
    for name in (DOCUMENTS, POSITIONS):
        pd.testing.assert_frame_equal(run.table(name, ()), whole.table(name, ()), check_exact=True)
    assert (run.folder / JOURNAL).read_bytes().startswith(journal)
    assert batches_in(output) == batches


def test_the_batches_do_not_change_the_numbers(perplexity: Command) -> None:
    tables = [
        run_of(perplexity("--token-budget", budget, "--output", f"runs {budget}")).table(DOCUMENTS, ())
        for budget in ("30", "500")
    ]
    pd.testing.assert_frame_equal(*tables, check_exact=False, rtol=1e-6)


@pytest.mark.parametrize("stride", [None, 30])
def test_a_model_with_a_sliding_window(evalkit: Command, file: Path, tmp_path: Path, stride: int | None) -> None:
    """Windows longer than the sliding one, and a checkpoint in bfloat16: as its own forward pass has them."""
    from evalkit.models.loading.spec import model_spec
    from evalkit.scoring.forward import Forward

    checkpoint = tiny_checkpoint(tmp_path / "tiny", "qwen2", window=96, dtype="bfloat16", bos=None)
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    config |= {"use_sliding_window": True, "sliding_window": 20, "layer_types": ["sliding_attention"] * 2}
    (checkpoint / "config.json").write_text(json.dumps(config), encoding="utf-8")
    more = () if stride is None else ("--stride", stride)
    run = run_of(evalkit("perplexity", checkpoint, "--text", file, "--device", "cpu", "-o", "runs", *more))
    spec = model_spec(checkpoint, device="cpu")
    loaded = spec.load(spec.locate(), lambda _: None)
    assert loaded.model.config.sliding_window == 20
    forward, nats = Forward(loaded.model), []
    for line in file.read_text(encoding="utf-8").splitlines():
        tokens = [loaded.eos_id, *loaded.tokenizer(json.loads(line)["text"])["input_ids"]]
        scored = [
            forward.score_alone(np.array(tokens[start + 1 : stop + 1], np.int32)).logprobs[context:]
            for start, context, stop in spans(len(tokens) - 1, 96, stride or 96)
        ]
        nats.append(-float(np.concatenate(scored).astype(np.float64).sum()))
    # A tree and a sequence alone differ by bfloat16's rounding
    assert run.table(DOCUMENTS, ())["nats"].tolist() == pytest.approx(nats, rel=5e-3)


def test_long_windows_need_no_comparison_of_shared_prefixes(
    evalkit: Command, file: Path, model: Path, tmp_path: Path
) -> None:
    """One document has no windows to share a batch with; it is scored alone, in both settings to the same number."""
    (tmp_path / "one.txt").write_text(" ".join(TRAINING_TEXT), encoding="utf-8")
    run = run_of(evalkit("perplexity", model, "--text", tmp_path / "one.txt", "-o", "runs", "--token-budget", 300))
    assert run.manifest["sharing"]["why_not"] == "nothing to share"
    assert {one["kernel"] for one in run.manifest["devices"]} == {"alone"}
    several = run_of(evalkit("perplexity", model, "--text", file, "-o", "runs"))
    assert several.manifest["sharing"]["shares"]
    assert "tiles" in {one["kernel"] for one in several.manifest["devices"]}
    tokens = AutoTokenizer.from_pretrained(model)
    nats = expected_nats(model, (tmp_path / "one.txt").read_text(encoding="utf-8"), WINDOW, WINDOW)
    assert run.stored["whole"]["nats"] == pytest.approx(nats.sum(), rel=1e-6)
    assert run.stored["whole"]["tokens"] == len(tokens(" ".join(TRAINING_TEXT))["input_ids"])


def test_from_python(model: Path, file: Path, perplexity: Command) -> None:
    from evalkit import evaluate
    from evalkit.display import Progress

    found = evaluate(model, suite="perplexity", settings={"text": [file], "stride": 100}, limit=3, device="cpu",
                     output="runs", progress=Progress(live=False))  # fmt: skip
    assert found.folder.name == run_of(perplexity("--stride", 100, "--limit", 3)).folder.name
    assert len(found.table(DOCUMENTS, ())) == 3


@pytest.mark.parametrize("method", ["none", "linear", "ntk", "yarn", "dynamic-yarn"])
def test_a_stretched_model(perplexity: Command, model: Path, texts: list[str], method: str) -> None:
    """The windows are as long as the context; each is as the model's own forward pass has it."""
    from evalkit.models.loading.spec import model_spec
    from evalkit.scoring.forward import Forward

    run = run_of(perplexity("--context", "320", "--context-method", method))
    spec = model_spec(model, context=320, context_method=method, device="cpu")
    loaded = spec.load(spec.locate(), lambda _: None)
    forward = Forward(loaded.model)
    nats = []
    for text in texts:
        tokens = [loaded.tokenizer.bos_token_id, *loaded.tokenizer(text)["input_ids"]]
        total = 0.0
        for start, context, stop in spans(len(tokens) - 1, 320, 320):
            scores = forward.score_alone(np.array(tokens[start + 1 : stop + 1], np.int32))
            total -= float(scores.logprobs[context:].astype(np.float64).sum())
        nats.append(total)
    assert run.table(DOCUMENTS, ())["nats"].tolist() == pytest.approx(nats, rel=1e-6)
    assert run.manifest["facts"]["window"] == 320


def test_methods_in_one_table_and_one_picture(perplexity: Command, evalkit: Command) -> None:
    plot = Path("curves.svg")
    given = ("--context", "640", "--methods", "none,yarn,linear", "--plot", plot)
    shown = perplexity(*given)
    assert shown.code == 0, shown.err
    names = [line.split()[0] for line in shown.out.splitlines()[2:5]]
    assert names == ["none", "yarn", "linear"]
    assert "context stretched from 160 to 640 tokens by linear: factor 4" in shown.out
    assert "*: past the 160 tokens" in shown.out
    drawn = plot.read_text(encoding="utf-8")
    for text in ("none", "yarn", "linear", "bits per byte", ">160<"):
        assert text in drawn
    assert "95 % intervals" in re.sub(r"<[^>]*>|\s+", " ", drawn)
    content = json.loads(perplexity(*given[:-2], "--format", "json").out)
    runs = [load_run(one["folder"]) for one in content["methods"]]
    assert [one.manifest["specification"]["context_extension"]["method"] for one in runs] == names
    # Each is the run of the method by itself
    alone = json.loads(perplexity("--context", "640", "--context-method", "linear", "--format", "json").out)
    assert alone["folder"] == str(runs[2].folder)
    compared = evalkit("compare", runs[0].folder, runs[2].folder)
    assert compared.code == 0, compared.err
    tables = [run.table(DOCUMENTS, ())["bits_per_byte"] for run in (runs[0], runs[2])]
    found = json.loads(evalkit("compare", runs[0].folder, runs[2].folder, "--format", "json").out)
    [task] = found["comparisons"][0]["tasks"]
    assert task["difference"] == pytest.approx((tables[1] - tables[0]).mean())
    assert task["won"] == int((tables[1] < tables[0]).sum())
    assert "means over documents" in compared.out.replace("\n", " ")


def test_one_document_has_no_band(perplexity: Command, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(" ".join(TRAINING_TEXT), encoding="utf-8")
    shown = perplexity("--text", tmp_path / "one.txt", "--plot", "one.svg")
    assert "there is no standard error" in shown.out
    assert "*: past" not in shown.out
    assert "so there are no bands" in re.sub(r"<[^>]*>|\s+", " ", Path("one.svg").read_text(encoding="utf-8"))
    assert load_run(shown.out.splitlines()[-1]).stored["whole"]["stderr"] is None


def test_lists_and_pages(perplexity: Command, evalkit: Command, model: Path, file: Path) -> None:
    run = run_of(perplexity("--limit", 4))
    listed = evalkit("ls", "runs", "-o", "runs").out
    assert fixed(run.stored["whole"]["bits_per_byte"], 4) in listed
    assert "limit 4" in listed
    assert evalkit("report", run.folder, "-o", "page.html").code == 0
    assert "Bits per byte by position in the context window" in Path("page.html").read_text(encoding="utf-8")
    # The same run by the general command
    again = evalkit("run", model, "--suite", "perplexity", "--set", f"text={file}", "--limit", 4, "-o", "runs",
                    "--device", "cpu")  # fmt: skip
    assert again.out.splitlines()[-1] == str(run.folder)


def test_a_limit_pairs_with_the_whole(perplexity: Command, evalkit: Command) -> None:
    few, every = run_of(perplexity("--limit", 4)), run_of(perplexity())
    shown = evalkit("compare", few.folder, every.folder)
    assert shown.code == 0, shown.err
    assert "6 documents" in shown.out


def test_the_tokens_of_a_dry_run(model: Path, file: Path, texts: list[str]) -> None:
    from evalkit.benchmarks.registry import benchmark
    from evalkit.benchmarks.run import planned

    plan = planned(model, {"suite": "perplexity", "text": (file,), "stride": 40}, lambda _: None)
    tokenizer = AutoTokenizer.from_pretrained(model)
    [task] = benchmark("perplexity").token_counts(plan, tokenizer, 80, lambda _: None)
    windows = [cut for text in texts for cut in spans(len(tokenizer(text)["input_ids"]), WINDOW, 40)]
    assert (task.documents, task.sampled) == (len(texts), len(texts))
    assert task.rows == len(windows)
    assert task.alone == task.distinct == sum(stop - start - 1 for start, _, stop in windows)


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (["--stride", "161"], 2, "--stride 161: more than the context window of 160 tokens"),
        (["--stride", "0"], 2, "--stride is 0"),
        (["--text", "nowhere.txt"], 1, "nowhere.txt cannot be read: No such file"),
        (["--key", "body"], 1, "line 1: has no key 'body', but 'text'"),
        (["--methods", "yarn,none"], 2, "name the longer context window too"),
        (["--methods", "yarm", "--context", "300"], 2, "did you mean 'yarn'"),
        (["--methods", "yarn,yarn", "--context", "300"], 2, "yarn occurs twice"),
        (["--methods", "yarn", "--context", "300", "--context-method", "ntk"], 2, "leave out --context-method"),
        (["--methods", "yarn,none", "--context", "100"], 2, "no method changes anything"),
        (["--plot", "curves.gif"], 2, "--plot curves.gif: figures are written as .png"),
    ],
)
def test_bad_input(perplexity: Command, more: list[str], code: int, said: str) -> None:
    found = perplexity(*more)
    assert found.code == code
    assert said in found.err.replace("\n", " ")
    assert "Traceback" not in found.err
