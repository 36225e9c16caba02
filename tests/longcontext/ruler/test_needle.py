"""Needle tests: texts with needles, and runs from the command line to the run folder, compared with transformers."""

from __future__ import annotations

import json
import math
import re
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from evalkit.benchmarks.request import request_of
from evalkit.errors import DataError
from evalkit.generation.generator import Generator
from evalkit.generation.prompts import Prompt
from evalkit.generation.rows import Generation
from evalkit.longcontext.ruler.haystack import BUILT_IN, Haystack, NeedleCase
from evalkit.longcontext.ruler.needle import Needle, NeedleRequest
from evalkit.models.loading.locate import silent
from evalkit.runs.folder import load_run
from tests.arguments import arguments
from tests.cli.test_root import Command, _no_settings, complains, evalkit
from tests.generation.made import by_transformers
from tests.models.loading import load_folder
from tests.tiny import tiny_checkpoint, tiny_tokenizer

CASE = NeedleCase(1000, 50.0, 0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), adds_bos=True))


def prompt(tokenizer: Any, case: NeedleCase, cue: bool = True, factor: float = 1.0) -> np.ndarray:
    size = cache(lambda text: round(factor * len(tokenizer(text, add_special_tokens=False).input_ids)))
    text = Haystack(None).prompt(case, lambda text: len(tokenizer(text).input_ids), size, cue=cue)
    return np.asarray(tokenizer(text).input_ids)


@pytest.mark.parametrize(("length", "depth"), [(400, 0.0), (777, 60.0), (1500, 100.0)])
def test_length_and_depth(tokenizer: Any, length: int, depth: float) -> None:
    case = NeedleCase(length, depth, 1)
    tokens = prompt(tokenizer, case)
    assert length - 80 < len(tokens) <= length  # a sentence of this tokenizer has up to 70
    text = str(tokenizer.decode(tokens, skip_special_tokens=True))
    needle = f"The secret number of {case.city} is {case.secret}."
    assert text.count(needle) == text.count(case.secret) == 1
    question = f"\n\nQuestion: What is the secret number of {case.city}?"
    assert text.endswith(f"{question}\nAnswer: The secret number of {case.city} is")
    before, after = (len(tokenizer(part).input_ids) for part in text.split("\n\n")[1].split(needle))
    assert depth / 100 == pytest.approx(before / (before + after), abs=40 / (before + after))
    without_cue = tokenizer.decode(prompt(tokenizer, case, cue=False), skip_special_tokens=True)
    assert without_cue.endswith(f"{question} Answer with the number alone.")
    for factor in (0.7, 1.5):  # sentences alone may be more or fewer tokens than in a text
        assert length - 80 < len(prompt(tokenizer, case, factor=factor)) <= length


def test_the_built_in_text(tokenizer: Any) -> None:
    """Another secret, or another text, would be another test: raise the number in `BUILT_IN`."""
    assert (BUILT_IN, CASE.secret, CASE.city) == ("built-in 1", "2220526", "Warsaw")
    sentences = list(islice(Haystack(None).sentences(0), 1000))
    assert sentences[0] == "The mirror beside the mill was more dusty than the teacher remembered. "
    assert len(set(sentences)) > 980
    assert not re.search(r"\d|secret|[{}]", "".join(sentences))
    assert all(re.fullmatch(r"[A-Z].*[.?] ", sentence) for sentence in sentences)
    secrets = [NeedleCase(length, depth, n).secret for length in (1, 2, 3) for depth in range(10) for n in range(10)]
    assert len(set(secrets)) == len(secrets)
    assert all(re.fullmatch(r"[1-9]\d{6}", secret) for secret in secrets)
    # Texts of a repeat begin alike, so that the text before the needle is shared, also between lengths
    cases = ((900, 75, 2), (900, 100, 2), (1800, 90, 2), (900, 75, 3))
    late, later, longer, other = (prompt(tokenizer, NeedleCase(*case))[:500] for case in cases)
    assert (late == later).all() and (late == longer).all() and not (late == other).all()


def test_a_users_text_is_kept_to_the_letter(tmp_path: Path) -> None:
    """It is repeated, with another start for each repeat."""
    path = tmp_path / "text.txt"
    for text in ("\ufeffOne. Two! Three?\n\nfour", "x" * 1300 + " y", "夜里河水上涨。🌊\r\nEnd"):
        path.write_text(text, encoding="utf-8", newline="")
        haystack = Haystack(path)
        assert (haystack.source, len(haystack.identity)) == (str(path), 64)
        pieces = list(islice(haystack.sentences(0), 6))
        assert max(map(len, pieces)) <= 500
        letters = re.sub(r"\s+", "", text).removeprefix("\ufeff")
        assert re.sub(r"\s+", "", "".join(pieces)).startswith(letters)
    path.write_bytes(b" \n\t")
    with pytest.raises(DataError, match=r"--text .*text\.txt"):
        Haystack(path)


__all__ = ["_no_settings", "evalkit"]  # fixtures

GRID = {"--lengths": "700,400", "--depths": "0,90", "--repeats": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny", window=1024)


@pytest.fixture
def needle(evalkit: Command, model: Path) -> Command:
    return lambda *more: evalkit("needle", *arguments({"--model": model, "--output": "runs"} | GRID, more))


def test_answers_are_what_transformers_generates(needle: Command, model: Path) -> None:
    run = load_run(needle().out.splitlines()[-1])
    assert [(task["task"], task["length"], task["n"]) for task in run.stored["tasks"]] == [
        ("needle@400", 400, 2), ("needle@700", 700, 2)]  # fmt: skip
    table, loaded = Needle.read(run).answers(), load_folder(model)
    options = {"lengths": (700, 400), "depths": (0, 90), "repeats": 1}
    plan = Needle().plan(request_of(NeedleRequest, model, options), silent)
    documents = [(task, document) for task, documents in plan.tasks.items() for document in documents]
    for (task, document), row in zip(documents, table.itertuples(), strict=True):
        ids = np.asarray(loaded.tokenizer(document.text).input_ids)
        expected = by_transformers(loaded.model, ids, 32, [1])
        answer = loaded.tokenizer.decode(expected, skip_special_tokens=True)
        assert (row.task, row.answer, row.tokens, row.depth) == (task, answer, len(ids), document.depth)
        assert row.tokens + 32 <= row.length and row.score == (document.references[0] in answer)


def test_needles_that_are_found(needle: Command, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that answers short prompts correctly and continues, and omits a digit for long ones."""
    tokenizer = AutoTokenizer.from_pretrained(model)

    def answered(prompt: Prompt) -> Generation:
        secret = "".join(re.findall(r"is (\d{7})\.", tokenizer.decode(prompt.tokens)))
        said = tokenizer(f" {secret if len(prompt.tokens) <= 400 else secret[:-1]}. And so on").input_ids
        ends = (n for n in range(1, len(said)) if re.search(prompt.stops.pattern, tokenizer.decode(said[: n - 1])))
        generation = Generation(prompt, None, None)
        generation.tokens, generation.ended = list(said[: next(ends, len(said))]), "enough"
        generation.logprobs = [-2.0 * (number > 0) - 1 for number in range(len(prompt.answers))]
        return generation

    monkeypatch.setattr(Generator, "_generate", lambda _, prompts: list(map(answered, prompts)))
    printed = needle("--plot", "grid.pdf").out
    assert re.search(r"90 % +100 +0\n", printed) and Path("grid.pdf").stat().st_size > 1000
    run = load_run(printed.splitlines()[-1])
    assert [average["value"] for average in run.stored["averages"]] == [1.0, 0.0, 0.5]
    for task in run.stored["tasks"]:
        assert (task["choice"], task["chance"]) == (1.0, 1 / 8)
        assert task["bits_per_byte"] == pytest.approx(1 / math.log(2) / 8)
    table = Needle.read(run).answers()
    right = table["score"] == 1
    assert list(right) == list(table["length"] == 400)
    # Generation ends with the secret's last digit and one more token
    assert table[right]["answer"].str.len().max() < 12
    assert table[~right]["answer"].str.endswith("And so on").all()


def test_a_needle_is_a_number_by_itself() -> None:
    """And generation ends only where the rest of the text cannot change that."""
    needle, secret = Needle(), [CASE.secret]
    for answer in (" 2220526.", "It is 2,220,526", "1 2220526 3", "2220526,1234567", "1,2220526"):
        assert needle.score("needle@1k", answer, secret) == 1
    for answer in ("22205261", "12220526", "2 220 526", "2,2205260"):
        assert needle.score("needle@1k", answer, secret) == 0
    ends = re.compile(needle.pattern("needle@1k", secret))
    assert ends.search("It is 2220526.") and not any(map(ends.search, ("2220526", "2220526,", "12220526 ")))


def test_a_chat_template_surrounds_the_prompt(needle: Command, tmp_path: Path) -> None:
    """The answer is scored as the beginning of the assistant's turn; a tokenizer without a template is an error."""
    complains(needle("--chat", None), 1, "--chat")
    chat = tiny_checkpoint(tmp_path / "chat", window=1024)
    template = "{% for m in messages %}<u>{{ m['content'] }}</u>{% endfor %}<a>"
    (chat / "chat_template.jinja").write_text(template)
    run = load_run(needle("--chat", None, "--model", chat).out.splitlines()[-1])
    plan = Needle().plan(
        request_of(NeedleRequest, chat, {"lengths": (400,), "depths": (0,), "repeats": 1, "chat": True}), silent
    )
    loaded, [document] = load_folder(chat), plan.tasks["needle@400"]
    assert document.text.endswith("Answer with the number alone.")
    ids = loaded.tokenizer(f"<u>{document.text}</u><a>", add_special_tokens=False).input_ids
    row = next(Needle.read(run).answers().query("length == 400 and depth == 0").itertuples())
    assert row.tokens == len(ids)
    # The answer has no space before it, neither in its tokens nor in its bytes
    assert json.loads(row.choices)[0] == document.references[0]
    assert row.bits_per_byte == pytest.approx(-json.loads(row.logprobs)[0] / math.log(2) / 7)


def test_what_makes_another_run(model: Path, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("It was a dark night. Nobody came. " * 9, encoding="utf-8")

    def identity(**options: object) -> str:
        request = request_of(NeedleRequest, model, {"lengths": "400", "depths": "50"} | options)
        return str(Needle().plan(request, silent).manifest["id"])

    assert len({identity(**other) for other in ({}, {"text": book}, {"depths": "50,60"}, {"repeats": 1})}) == 4
    assert identity(depths="50,50.0") == identity()  # repetition of a value
    request = request_of(NeedleRequest, model, {"context": 2100})
    assert Needle().plan(request, silent).manifest["specification"]["lengths"] == [1024, 2048]


def test_bad_input(needle: Command) -> None:
    for option, value, code, noun in (
        ("--lengths", "2000", 2, "--lengths 2000"),
        ("--lengths", "40", 2, "--lengths 40"),
        ("--depths", "0,101", 2, "--depths 0, 101"),
        ("--text", "nowhere.txt", 1, "--text nowhere.txt"),
    ):
        complains(needle(option, value), code, noun)


def test_a_tokenizer_that_ends_texts(needle: Command, tmp_path: Path) -> None:
    """Its prompts do not end with EOS, after which a model would continue with another text."""
    answers = []
    for name in ("plain", "ends"):
        folder = tiny_checkpoint(tmp_path / name, window=1024, adds_bos=True, adds_eos=name == "ends")
        run = load_run(needle("--model", folder).out.splitlines()[-1])
        answers.append(Needle.read(run).answers().drop(columns="seconds"))
    assert answers[0].equals(answers[1])
