"""Needle tests from the command line to the run folder."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from transformers import AutoTokenizer

from evalkit.benchmarks.generated import GeneratedAnswer
from evalkit.benchmarks.needle.benchmark import NEEDLES, Needle, NeedleRequest
from evalkit.benchmarks.request import request_of
from evalkit.generation.generator import Generator
from evalkit.generation.prompts import Prompt
from evalkit.generation.rows import Generation
from evalkit.runs.folder import JOURNAL, RESULTS, load_run
from evalkit.runs.journal import Journal
from tests.arguments import arguments
from tests.cli.test_root import Command, Outcome, _no_settings, complains, evalkit
from tests.generation.made import by_transformers
from tests.journals import entries_of
from tests.models.loading import load_folder
from tests.test_kills import batches_in, journal_of, wait_for
from tests.tiny import tiny_checkpoint

__all__ = ["_no_settings", "evalkit"]  # fixtures

GRID = {"--lengths": "700,400", "--depths": "0,50,90", "--repeats": "2"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny", window=1024)


@pytest.fixture
def needle(evalkit: Command, model: Path) -> Command:
    """Run `evalkit needle` on a small grid; later options override these."""
    return lambda *more: evalkit("needle", *arguments({"--model": model, "--output": "runs"} | GRID, more))


def test_a_run(needle: Command, evalkit: Command, model: Path) -> None:
    first = needle()
    assert first.code == 0
    lines = first.out.splitlines()
    assert lines[0].split() == ["depth", "400", "700"]
    assert [line.split()[0] for line in lines[2:7] if line[0] != "-"] == ["0", "50", "90", "all"]
    assert "of 12 in all, 2 texts a cell" in first.out
    run = load_run(lines[-1])
    assert run.complete
    assert {path.name for path in run.folder.iterdir()} >= {RESULTS, NEEDLES, "heatmap.png", "heatmap.pdf"}
    assert needle() == Outcome(0, first.out, "")
    stored = json.loads(needle("--format", "json").out)
    assert (stored["lengths"], stored["depths"], np.shape(stored["found"])) == ([400, 700], [0, 50, 90], (3, 2))
    line = evalkit("ls", "runs", "--output", "runs").out.splitlines()[2]
    assert line.startswith(run.manifest["id"][:7])
    assert "needles found 0.0  " in line
    complains(evalkit("rescore", run.folder), 2, "has no choices", "benchmark needle has its own metrics")
    complains(evalkit("longbench", "rescore", run.folder), 1, "is not a LongBench run")


def test_answers_are_what_transformers_generates(needle: Command, model: Path) -> None:
    table = Needle().answers(load_run(needle().out.splitlines()[-1]))
    assert len(table) == 12
    assert (table["tokens"] <= table["length"]).all()
    asked = {"lengths": (400,), "depths": (0, 50, 90), "repeats": 2}
    prepared = Needle().plan(request_of(NeedleRequest, model, asked), lambda _: None)
    loaded = load_folder(model)

    def size(text: str) -> int:
        return len(loaded.tokenizer(text, add_special_tokens=False).input_ids)

    for cell in prepared.tasks["needle"]:
        ids = prepared.haystack.prompt(cell, lambda text: loaded.tokenizer(text).input_ids, size, cue=True)
        [row] = table[
            (table["length"] == 400) & (table["depth"] == cell.depth) & (table["repeat"] == cell.repeat)
        ].itertuples()
        answer = loaded.tokenizer.decode(
            by_transformers(loaded.model, np.asarray(ids), 32, [1]), skip_special_tokens=True
        )
        assert (row.answer, row.secret, row.tokens) == (answer, cell.secret, len(ids))


def test_needles_that_are_found(needle: Command, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that answers short prompts correctly and continues, and omits a digit for long ones."""
    tokenizer = AutoTokenizer.from_pretrained(model)

    def read(_: Generator, prompts: list[Prompt]) -> list[Generation]:
        return [answered(prompt) for prompt in prompts]

    def answered(prompt: Prompt) -> Generation:
        generation = Generation(prompt, None, None)
        generation.tokens, generation.ended = answer(prompt), "enough"
        return generation

    def answer(prompt: Prompt) -> list[int]:
        secret = "".join(re.findall(r"is (\d{7})\.", tokenizer.decode(prompt.tokens)))
        said = tokenizer(f" {secret if len(prompt.tokens) <= 400 else secret[:-1]}. And so on").input_ids
        ends = (n for n in range(1, len(said)) if re.search(prompt.stops.pattern, tokenizer.decode(said[: n - 1])))
        return list(said[: next(ends, len(said))])

    monkeypatch.setattr(Generator, "_generate", read)
    run = load_run(needle().out.splitlines()[-1])
    assert run.stored["found"] == [[1.0, 0.0]] * 3
    assert run.stored["averages"][0]["accuracy"] == 0.5
    table = Needle().answers(run)
    assert list(table["found"]) == list(table["length"] == 400)
    short = table[table["found"]]
    # Stopped after the character that follows the secret, which could have been a digit, and one more token
    assert [said[: said.index(".")] for said in short["answer"]] == [f" {secret}" for secret in short["secret"]]
    assert short["answer"].str.len().max() < 12
    assert table.loc[~table["found"], "answer"].str.endswith("And so on").all()


def test_beginnings_are_shared(needle: Command) -> None:
    """Prompts of 2,000 tokens that differ in the last tenth."""
    one = ["--context", "2100", "--lengths", "2000", "--depths", "90,95,100", "--repeats", "1"]
    table = Needle().answers(load_run(needle(*one).out.splitlines()[-1]))
    assert sorted(table["reused"]) == [0, 1536, 1536]


def test_what_makes_another_run(needle: Command, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("It was a dark night. Nobody came. " * 9, encoding="utf-8")
    one = {"--lengths": "400", "--depths": "50", "--repeats": "1"}
    others: list[dict[str, object]] = [{}, {"--text": book}, {"--depths": "50,60"}, {"--context": "2048"}]
    runs = [needle(*arguments(one | other, ())) for other in others]
    assert all(run.code == 0 for run in runs), runs
    assert len({run.out.splitlines()[-1] for run in runs}) == 4
    assert f"text: {book}" in runs[1].out
    # Neither order nor repetition of the values does
    assert needle(*arguments(one | {"--depths": "50,50.0"}, ())).out == runs[0].out


def test_lengths_by_default(needle: Command, evalkit: Command, model: Path) -> None:
    complains(evalkit("needle", "--model", model), 2, "--lengths")
    out = evalkit("needle", "--model", model, "--depths", "50", "--repeats", "1", "--context", "2100").out
    assert out.splitlines()[0].split() == ["depth", "1,000", "2,000"]


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--lengths", "1000"], 2, ["--lengths 1000: the model's context window is 1024 tokens", "100 to 992"]),
        (["--lengths", "0"], 2, ["--lengths 0"]),
        (["--lengths", "50"], 2, ["--lengths 50: no room for a needle and a sentence"]),
        (["--lengths", "1k"], 2, ["--lengths 1k: expected whole numbers, separated by commas"]),
        (["--lengths", ""], 2, ["--lengths is empty; leave it out"]),
        (["--depths", "0,101"], 2, ["--depths 0, 101: expected percentages from 0 to 100"]),
        (["--depths", "-1"], 2, ["--depths -1"]),
        (["--depths", "nan"], 2, ["--depths nan"]),
        (["--depths", "deep"], 2, ["--depths deep: expected numbers"]),
        (["--repeats", "0"], 2, ["--repeats is 0"]),
        (["--text", "nowhere.txt"], 1, ["--text nowhere.txt: cannot be read: No such file"]),
        (["--chat"], 1, ["the tokenizer has no chat template; leave out --chat"]),
        (["--context", "4096", "--context-method", "dynamic-yarn"], 2, ["use yarn"]),
    ],
)
def test_bad_input(needle: Command, options: list[str], code: int, words: list[str]) -> None:
    complains(needle(*options), code, *words)


@pytest.mark.parametrize("lost", [NEEDLES, RESULTS, "heatmap.png"])
def test_files_are_made_anew(needle: Command, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = needle()
    folder = Path(first.out.splitlines()[-1])
    kept = Needle().answers(load_run(folder))
    (folder / lost).unlink()
    monkeypatch.setattr("evalkit.benchmarks.session.load_checked", pytest.fail)
    assert needle().out == first.out
    pd.testing.assert_frame_equal(Needle().answers(load_run(folder)), kept)


def test_a_disk_that_is_full_when_the_picture_is_drawn(needle: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as during:
        during.setattr("evalkit.reporting.figures.replace_file", full)
        outcome = needle()
        complains(outcome, 1, "heatmap.png cannot be written", "No space left on device", "the results are saved")
        assert outcome.err.count("heatmap.png") == 1
    [folder] = Path("runs").iterdir()
    assert load_run(folder).complete
    monkeypatch.setattr("evalkit.benchmarks.session.load_checked", pytest.fail)
    assert needle().code == 0
    assert (folder / "heatmap.png").is_file()


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_an_answer_of_no_cell_stands_for_none(needle: Command) -> None:
    """In a complete line of the journal, in a form that evalkit never writes."""
    folder = Path(needle().out.splitlines()[-1])
    expected = Needle().answers(load_run(folder)).drop(columns="seconds")
    run = load_run(folder)
    *kept, (entry, rows) = entries_of(run, GeneratedAnswer)
    kept_lines = (folder / JOURNAL).read_bytes().splitlines(keepends=True)[: len(kept)]
    (folder / JOURNAL).write_bytes(b"".join(kept_lines))
    others = [row._replace(id=str(int(row.id) + 99)) for row in rows]
    Journal(folder / JOURNAL, run.manifest["id"], GeneratedAnswer, pytest.fail).append(entry, others)
    (folder / RESULTS).unlink()
    assert needle().code == 0
    pd.testing.assert_frame_equal(Needle().answers(load_run(folder)).drop(columns="seconds"), expected)


@pytest.mark.slow
def test_killed_and_given_again(needle: Command, model: Path) -> None:
    budget = ["--token-budget", "800"]
    expected = Needle().answers(load_run(needle(*budget, "--output", "undisturbed").out.splitlines()[-1]))
    output = Path("disturbed")
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "evalkit",
            "needle",
            "--model",
            str(model),
            *arguments(GRID, budget),
            "--output",
            output,
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: batches_in(output) >= 2 or process.poll() is not None, 120)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    kept = journal_of(output).read_bytes()
    run = load_run(needle(*budget, "--output", output).out.splitlines()[-1])
    pd.testing.assert_frame_equal(
        Needle().answers(run).drop(columns="seconds"), expected.drop(columns="seconds"), check_exact=True
    )
    assert journal_of(output).read_bytes().startswith(kept.rpartition(b"\n")[0])
    shutil.rmtree(output)


def test_documents_as_people_read_them(needle: Command, evalkit: Command) -> None:
    run = load_run(needle().out.splitlines()[-1])
    table = Needle().answers(run)
    content = json.loads(evalkit("show", run.folder, "--format", "json", "--limit", 20).out)
    assert content["count"] == 12
    by_name = {one["document"]: one["runs"][0] for one in content["documents"]}
    for _, row in table.iterrows():
        one = by_name[f"{row['length']} {row['depth']} {row['repeat']}"]
        assert (one["answer"], one["references"]) == (row["answer"], [row["secret"]])
        assert (one["score"], one["right"]) == (float(row["found"]), bool(row["found"]))
        assert one["generated tokens"] == str(row["new_tokens"])
    wrong = json.loads(evalkit("show", run.folder, "--wrong", "--format", "json").out)
    assert wrong["count"] == int((~table["found"]).sum())
    name = content["documents"][0]["name"]
    assert "generated tokens" in evalkit("show", run.folder, "--document", name).out
    complains(evalkit("show", run.folder, "--wrong", "--rule", "acc"), 2, "no choices")
