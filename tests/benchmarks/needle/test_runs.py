"""Needle tests from the command line to the run folder, compared with transformers."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from evalkit.benchmarks.needle import Needle, NeedleRequest
from evalkit.benchmarks.request import request_of
from evalkit.generation.generator import Generator
from evalkit.generation.prompts import Prompt
from evalkit.generation.rows import Generation
from evalkit.runs.folder import load_run
from tests.arguments import arguments
from tests.cli.test_root import Command, _no_settings, complains, evalkit
from tests.generation.made import by_transformers
from tests.models.loading import load_folder
from tests.tiny import tiny_checkpoint

__all__ = ["_no_settings", "evalkit"]  # fixtures

GRID = {"--lengths": "700,400", "--depths": "0,90", "--repeats": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny", window=1024)


@pytest.fixture
def needle(evalkit: Command, model: Path) -> Command:
    """Run `evalkit needle` on a small grid; later options override these."""
    return lambda *more: evalkit("needle", *arguments({"--model": model, "--output": "runs"} | GRID, more))


def test_answers_are_what_transformers_generates(needle: Command, model: Path) -> None:
    run = load_run(needle().out.splitlines()[-1])
    assert (run.stored["lengths"], np.shape(run.stored["found"])) == ([400, 700], (2, 2))
    table = Needle().answers(run)
    assert (table["tokens"] <= table["length"]).all()
    options = {"lengths": (700, 400), "depths": (0, 90), "repeats": 1}
    plan, loaded = Needle().plan(request_of(NeedleRequest, model, options), lambda _: None), load_folder(model)

    def size(text: str) -> int:
        return len(loaded.tokenizer(text, add_special_tokens=False).input_ids)

    for case, row in zip(plan.tasks["needle"], table.itertuples(), strict=True):
        ids = plan.haystack.prompt(case, lambda text: loaded.tokenizer(text).input_ids, size, cue=True)
        expected = by_transformers(loaded.model, np.asarray(ids), 32, [1])
        answer = loaded.tokenizer.decode(expected, skip_special_tokens=True)
        assert (row.answer, row.secret, row.tokens) == (answer, case.secret, len(ids))
        assert (row.length, row.depth, row.repeat, row.found) == (case.length, case.depth, 0, case.is_found(answer))


def test_needles_that_are_found(needle: Command, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that answers short prompts correctly and continues, and omits a digit for long ones."""
    tokenizer = AutoTokenizer.from_pretrained(model)

    def answered(prompt: Prompt) -> Generation:
        secret = "".join(re.findall(r"is (\d{7})\.", tokenizer.decode(prompt.tokens)))
        said = tokenizer(f" {secret if len(prompt.tokens) <= 400 else secret[:-1]}. And so on").input_ids
        ends = (n for n in range(1, len(said)) if re.search(prompt.stops.pattern, tokenizer.decode(said[: n - 1])))
        generation = Generation(prompt, None, None)
        generation.tokens, generation.ended = list(said[: next(ends, len(said))]), "enough"
        return generation

    monkeypatch.setattr(Generator, "_generate", lambda _, prompts: list(map(answered, prompts)))
    run = load_run(needle().out.splitlines()[-1])
    assert run.stored["found"] == [[1.0, 0.0]] * 2
    assert run.stored["averages"][0]["accuracy"] == 0.5
    table = Needle().answers(run)
    assert list(table["found"]) == list(table["length"] == 400)
    # Stopped after the character that follows the secret, which could have been a digit, and one more token
    short = table[table["found"]]
    assert [said[: said.index(".")] for said in short["answer"]] == [f" {secret}" for secret in short["secret"]]
    assert short["answer"].str.len().max() < 12
    assert table.loc[~table["found"], "answer"].str.endswith("And so on").all()


def test_a_heatmap_is_drawn_anew_where_the_disk_was_full(needle: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    small = ("--lengths", "200", "--depths", "0,50")
    with monkeypatch.context() as during:
        during.setattr("evalkit.reporting.figures.replace_file", full)
        complains(needle(*small), 1, "heatmap.png", "No space left on device", "results are saved")
    [folder] = Path("runs").iterdir()
    monkeypatch.setattr("evalkit.benchmarks.session.load_checked", pytest.fail)
    assert needle(*small).code == 0
    assert (folder / "heatmap.png").is_file()


def test_what_makes_another_run(model: Path, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("It was a dark night. Nobody came. " * 9, encoding="utf-8")

    def identity(**options: object) -> str:
        request = request_of(NeedleRequest, model, {"lengths": "400", "depths": "50"} | options)
        return str(Needle().plan(request, lambda _: None).manifest["id"])

    others: list[dict[str, object]] = [{}, {"text": book}, {"depths": "50,60"}, {"context": 2048}, {"repeats": 1}]
    assert len({identity(**other) for other in others}) == 5
    assert identity(depths="50,50.0") == identity()  # repetition of a value
    request = request_of(NeedleRequest, model, {"context": 2100})
    assert Needle().plan(request, lambda _: None).manifest["specification"]["lengths"] == [1000, 2000]


def test_bad_input(needle: Command) -> None:
    for option, value, code, noun in (
        ("--lengths", "1000", 2, "100 to 992"),
        ("--depths", "0,101", 2, "--depths 0, 101"),
        ("--text", "nowhere.txt", 1, "--text nowhere.txt"),
    ):
        complains(needle(option, value), code, noun)
