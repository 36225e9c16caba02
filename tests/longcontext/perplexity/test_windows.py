"""Texts, bytes of tokens, windows and bins of positions, compared with lm-eval, sums by hand and a simulation."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from evalkit.errors import CheckpointError, EvalkitError, RunError, ScoringError, UsageError
from evalkit.longcontext.perplexity.results import position_bins, ratio
from evalkit.longcontext.perplexity.windows import (
    WIDTH,
    TextDocument,
    TextRequests,
    position_rows,
    read_texts,
    spans,
    token_bytes,
)
from evalkit.requests.encoded import EncodedDocuments, scored_rows
from evalkit.requests.planner import packed
from evalkit.requests.requests import Encoder, Facts, Score, ScoreDocument
from evalkit.requests.rows import ScoredRow
from evalkit.runs.columns import record_batch
from evalkit.scoring.forward import Scores
from tests.tiny import TRAINING_TEXT, tiny_tokenizer

PREFIX = -7


def lines(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n", encoding="utf-8")
    return path


def test_files_and_folders(tmp_path: Path) -> None:
    """The .txt files of a folder are documents of one task, in numeric order; other files are not read."""
    (tmp_path / "book.part.txt").write_bytes("\ufeffEin Fluß.\r\nUnd\n".encode())
    folder = tmp_path / "v1.0"
    folder.mkdir()
    for number in (10, 9, 1):
        (folder / f"chapter{number}.txt").write_text(f"chapter {number}", encoding="utf-8")
    (folder / "notes.md").write_text("no", encoding="utf-8")
    wiki = lines(folder / "wiki.jsonl", {"body": "a 👍"}, {"body": "b", "more": 1})
    tasks = read_texts([tmp_path / "book.part.txt", folder], "body")
    assert list(tasks) == ["book.part", "v1.0", "wiki"]
    [book] = tasks["book.part"].documents
    assert book.content == "Ein Fluß.\r\nUnd\n".encode()  # line ends count, a byte order mark does not
    assert [document.text for document in tasks["v1.0"].documents] == ["chapter 1", "chapter 9", "chapter 10"]
    assert [(document.number, document.text, document.place) for document in tasks["wiki"].documents] == [
        (0, "a 👍", f"{wiki}, line 1"),
        (1, "b", f"{wiki}, line 2"),
    ]

    def digest(*texts: str) -> str:
        return read_texts([lines(tmp_path / "a.jsonl", *({"text": text} for text in texts))], "text")["a"].digest

    assert len({digest("ab", "c"), digest("a", "bc"), digest("c", "ab"), digest("abc")}) == 4


def test_texts_that_cannot_be_read(tmp_path: Path) -> None:
    for name, content, noun in (
        ("a.txt", b"", "a.txt"),
        ("a.txt", b"one\ntw\xff\n", "a.txt: line 2"),
        ("a.txt", b"x" * (2**23 + 1), "a.txt"),  # too long for a tokenizer
        ("a.jsonl", b'{"text": "x"}\n\n{"text": ""}', "a.jsonl, line 3: .*'text'"),
        ("a.jsonl", b'{"text": "x"}\n{"body": "x"}', "a.jsonl, line 2: .*'text'.*--key"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(EvalkitError, match=noun):
            read_texts([tmp_path / name], "text")
    same = [tmp_path / "a.txt", lines(tmp_path / "a.jsonl", {"text": "x"})]
    same[0].write_text("x", encoding="utf-8")
    with pytest.raises(UsageError, match="task a;"):
        read_texts(same, "text")


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, int, int]:
    window = draw(st.integers(1, 20))
    return draw(st.integers(0, 70)), window, draw(st.integers(1, window))


@given(cuts())
def test_windows_are_lm_evals(cut: tuple[int, int, int]) -> None:
    """A stride is lm-eval's window less its context, which is one token by default. Each token is scored once."""
    count, window, stride = cut
    tokens = list(range(count))
    theirs = get_rolling_token_windows(tokens, PREFIX, window, window - stride + 1)
    expected = [(context, scored) for context, scored in map(make_disjoint_window, theirs)]
    whole, cut_spans = [PREFIX, *tokens], list(spans(count, 1, window, stride))
    assert expected == [
        (whole[start : start + context], whole[start + context : stop]) for start, context, stop in cut_spans
    ]
    assert [token for start, context, stop in cut_spans for token in whole[start + context : stop]] == tokens
    for number, (start, context, stop) in enumerate(cut_spans):
        assert stop - start <= window + 1  # the last one is only predicted
        assert context == 1 if not number else context >= window - stride + 1


def windows_of(document: TextDocument, tokenizer: Any, window: int = 16, stride: int | None = None) -> list[Score]:
    requests = TextRequests(document.task, [document], window, stride)
    documents = list(requests.scored(Encoder(tokenizer, Facts(1024))))
    assert {scored.document for scored in documents} == {str(document.number)}
    assert [scored.is_last for scored in documents] == [False] * (len(documents) - 1) + [True]
    assert sum(scored.work for scored in documents) == len(document.content)
    assert sum(cost for _, cost in requests.costs()) == len(document.content)
    return [score for scored in documents for score in scored.scores]


def scored_in(windows: list[Score]) -> list[int]:
    return [token for window in windows for token in window.tokens[window.is_scored].tolist()]


def sizes_in(windows: list[Score]) -> list[int]:
    return [size for window in windows for size in window.bytes[window.is_scored].tolist()]  # type: ignore[index]


def test_the_windows_of_a_document(tmp_path: Path) -> None:
    stride = 5
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path / "plain"))
    text = " ".join(TRAINING_TEXT)
    windows = windows_of(TextDocument("t", 3, text, "t.txt"), tokenizer, stride=stride)
    assert scored_in(windows) == tokenizer(text)["input_ids"]
    sizes = sizes_in(windows)
    assert (len(sizes), sum(sizes)) == (len(scored_in(windows)), len(text.encode()))
    assert all(not window.bytes[~window.is_scored].any() for window in windows)  # type: ignore[index]
    assert [(window.part, window.parts) for window in windows] == [(n, len(windows)) for n in range(len(windows))]
    assert len(windows) > 10 and windows[0].tokens[0] == 0
    # A prefix of several tokens is context, of the first window
    adding = AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path / "adding", adds_bos=True))
    adding.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="</s> <s> $A", special_tokens=[("</s>", 1), ("<s>", 0)]
    )
    longer = windows_of(TextDocument("t", 3, text, "t.txt"), adding, stride=stride)
    assert (longer[0].tokens[:2].tolist(), len(longer[0].tokens)) == ([1, 0], 17)
    assert longer[0].is_scored.tolist() == [False] * 2 + [True] * 15
    assert (scored_in(longer), sizes_in(longer)) == (scored_in(windows), sizes)
    # What the tokenizer adds is not scored, what the text spells is
    plain, spelled = (windows_of(TextDocument("t", 0, text, "t"), adding)[0] for text in ("river", "<s>river"))
    assert spelled.tokens.tolist() == [1, 0, 0, *plain.tokens.tolist()[2:]]
    assert sizes_in([spelled]) == [3, *sizes_in([plain])]


def test_texts_without_windows(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path / "tokenizer"))

    class Nothing:
        """A tokenizer that makes no token of a text."""

        bos_token_id = eos_token_id = 0

        def __call__(self, text: str, **_: Any) -> dict[str, list[Any]]:
            return {"input_ids": [], "offset_mapping": []} if text == "\u200b" else tokenizer(text, **_)

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

    with pytest.raises(ScoringError, match=r"a\.jsonl, line 4"):
        windows_of(TextDocument("a", 3, "\u200b", "a.jsonl, line 4"), Nothing())
    with pytest.raises(UsageError, match="--stride 17"):
        windows_of(TextDocument("a", 3, "river", "a"), tokenizer, stride=17)
    bare = AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path / "bare", bos=None, eos=None))
    with pytest.raises(CheckpointError, match="BOS"):
        windows_of(TextDocument("a", 3, "river", "a"), bare)


def window_of(tokens: int, context: int = 1, sizes: Any = None, part: int = 0) -> ScoreDocument:
    """A window of a document whose segments are bins of 64 positions, by hand."""
    positions = np.arange(tokens)
    segments = np.array([0 if at < context else 1 + (at - 1) // 64 for at in positions], np.int32)
    counted = np.zeros(tokens, np.int32) if sizes is None else sizes
    score = Score(0, "", np.zeros(tokens, np.int32), segments, positions >= context, part=part, parts=3, bytes=counted)
    return ScoreDocument("4", "t document 4", "t", [score], 1.0)


@given(st.lists(st.integers(1, 60), max_size=20), st.integers(1, 50))
def test_batches_hold_all_windows_in_order(lengths: list[int], budget: int) -> None:
    windows = [window_of(size + 1) for size in lengths]
    batches = list(packed(iter(windows), budget))
    assert [id(window) for members in batches for window in members] == list(map(id, windows))
    for members in batches:
        sizes = [len(window.scores[0].tokens) - 1 for window in members]
        assert len(members) == 1 or (sum(sizes) <= budget and max(sizes) < budget / 2)


def test_the_sums_of_a_window() -> None:
    """A token with p tokens before it is in the bin that begins at p rounded down to 1, 65, 129, …"""
    dice = np.random.default_rng(0)
    length, context = 300, 70
    logprobs = -dice.exponential(size=length).astype(np.float32)
    logprobs[:context] = np.nan
    sizes = dice.integers(0, 5, length).astype(np.int32)
    sizes[:context] = 0
    encoded = EncodedDocuments.of([window_of(length, context, sizes, part=2)])
    rows = scored_rows(encoded.head(0), [Scores(logprobs, np.zeros(length, bool))])
    found = position_rows(pa.Table.from_batches([record_batch(rows, ScoredRow)]))
    expected: dict[int, list[float]] = {}
    for position in range(context, length):
        sums = expected.setdefault((position - 1) // 64 * 64 + 1, [0, 0, 0.0])
        sums[0] += 1
        sums[1] += int(sizes[position])
        sums[2] -= float(logprobs[position])
    assert found["position"].tolist() == list(expected) == [65, 129, 193, 257]
    for row in found.itertuples():
        assert [row.tokens, row.bytes, row.nats] == pytest.approx(expected[row.position], rel=1e-12)
        assert (row.document, row.window) == (4, 2)
    [row] = rows
    lacking = row._replace(likelihoods=[*row.likelihoods[:-1], None])
    with pytest.raises(RunError, match="log-likelihood"):
        position_rows(pa.Table.from_batches([record_batch([lacking], ScoredRow)]))


def table(documents: int, bins: int) -> pd.DataFrame:
    dice = np.random.default_rng(0)
    rows = [(number, WIDTH * b + 1) for number in range(documents) for b in range(bins)]
    about = pd.DataFrame(rows, columns=["document", "position"]).assign(task="t", tokens=WIDTH)
    sizes = dice.integers(100, 400, len(rows))
    return about.assign(bytes=sizes, nats=sizes * dice.uniform(0.5, 1.0, len(rows)))


def test_bins_are_merged_for_readers() -> None:
    positions = table(3, 33)
    [merged] = position_bins([positions], 16)
    assert [(bin.first, bin.last) for bin in merged] == [(start, start + 255) for start in range(1, 2200, 256)]
    assert sum(bin.nats for bin in merged) == pytest.approx(positions["nats"].sum(), rel=1e-12)
    inside = positions[(positions["position"] >= 257) & (positions["position"] <= 512)]
    value = inside["nats"].sum() / math.log(2) / inside["bytes"].sum()
    assert merged[1].bits_per_byte == pytest.approx(value, rel=1e-12)
    assert (merged[1].documents, merged[1].tokens, merged[1].freedom) == (3, 12 * WIDTH, 2)
    # The error by hand: residuals of three documents
    sums = inside.groupby("document")[["nats", "bytes"]].sum()
    residuals = sums["nats"] / math.log(2) - value * sums["bytes"]
    error = math.sqrt(3 / 2 * (residuals**2).sum()) / inside["bytes"].sum()
    assert merged[1].stderr == pytest.approx(error, rel=1e-12)
    [[single]] = position_bins([table(1, 1)])
    assert (single.stderr, single.freedom) == (None, None)


def test_the_error_is_the_spread_of_the_ratio() -> None:
    """Over many samples of 40 documents whose lengths and losses are related."""
    dice = np.random.default_rng(1)
    sizes = dice.lognormal(6, 0.7, (2000, 40))
    bits = sizes * (1.0 + 0.2 * dice.standard_normal(sizes.shape)) + 20 * np.log(sizes)
    estimates = [ratio(sample, weights) for sample, weights in zip(bits, sizes, strict=True)]
    spread = np.std([estimate.value for estimate in estimates])
    assert np.sqrt(np.mean([estimate.variance for estimate in estimates])) == pytest.approx(spread, rel=0.06)


ODD = "Hé 👍🏽 夜里  x\n\n朝 क्षि\u200d👩\u200d👩\u200d👧 \ufeffend \t"
BYTES = {character: number for number, character in bytes_to_unicode().items()}


def counted(tokenizer: Any, text: str) -> tuple[list[int], list[str]]:
    encoding = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    spelled = tokenizer.convert_ids_to_tokens(encoding["input_ids"])
    return token_bytes(text, np.array(encoding["offset_mapping"]).reshape(-1, 2), spelled).tolist(), spelled


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The vocabulary spells each byte as one character; the second, as GPT-2's, leaves out the space before a token."""
    folder, tokenizers = tiny_tokenizer(tmp_path_factory.mktemp("bytes")), []
    for trims in (False, True):
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=trims)
        tokenizers.append(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    return tokenizers


@pytest.fixture(scope="module")
def fallback() -> Any:
    """As Llama 2's: characters, with bytes for those that it does not know, and BOS."""
    kinds = [f"<0x{number:02X}>" for number in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", "<s>", *kinds], show_progress=False)
    tokenizer.train_from_iterator(TRAINING_TEXT[:5], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


@pytest.fixture(scope="module")
def pieces() -> Any:
    """As BERT's: lower case without accents, white space dropped, unknown words as one token."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(TRAINING_TEXT[:8], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


@settings(max_examples=100)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@example(ODD)
@example("👍")
def test_every_byte_is_counted_once(byte_level: list[Any], fallback: Any, pieces: Any, text: str) -> None:
    """The bytes of byte-level tokens are known without offsets."""
    for tokenizer in byte_level:
        sizes, tokens = counted(tokenizer, text)
        assert b"".join(bytes(BYTES[character] for character in token) for token in tokens) == text.encode()
        assert sizes == [len(token) for token in tokens]
    for tokenizer in (fallback, pieces):
        sizes, tokens = counted(tokenizer, text)
        assert min(sizes, default=0) >= 0
        assert sum(sizes) == (len(text.encode()) if tokens else 0)


def test_tokens_by_hand(fallback: Any) -> None:
    sizes, tokens = counted(fallback, "a 👍b")
    assert sum(sizes) == 7
    assert [size for size, token in zip(sizes, tokens, strict=True) if token.startswith("<0x")] == [1, 1, 1, 1]

    def count(text: str, spans: list[tuple[int, int]], pieces: list[str]) -> list[int]:
        return token_bytes(text, np.array(spans), pieces).tolist()

    # What no token covers belongs to the next one, and at the end to the last
    assert count("  é b  ", [(2, 3), (4, 5)], ["é", "b"]) == [4, 4]
    # A character whose parts are spelled in an unknown way is divided evenly; nothing is lost
    assert count("x👍", [(0, 1), (1, 2), (1, 2), (1, 2)], ["x", "?", "??", "????"]) == [1, 1, 1, 2]
