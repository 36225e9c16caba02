"""The tokenizer is the one in tokenizer.json, whatever class transformers has; a trained one loses no text."""

from __future__ import annotations

import copy
import json
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from evalkit.errors import CheckpointError, DataError, UsageError
from evalkit.models.loading.tokenizer import REMARKS, added_tokens, fed_text, load_tokenizer
from evalkit.models.zoo.train_tokenizer import FEWEST, train_tokenizer
from tests.tiny import TOKENS, TRAINING_TEXT, Family, tiny_checkpoint, tiny_tokenizer

TEXTS = (*TRAINING_TEXT, "In 1987 it's 12,345.60  (twice)\n\n\tdone", "e\u0301 é ﬁ Ａ", " leading", "")


@pytest.mark.parametrize(("family", "dropout"), [("llama", 0.5), ("qwen2", 0.0)])
def test_ids_are_those_of_tokenizer_json(tmp_path: Path, family: Family, dropout: float) -> None:
    """Without the dropout of training. A difference from transformers' class is reported."""
    path = tiny_checkpoint(tmp_path, family)
    reference = Tokenizer.from_file(str(path / "tokenizer.json"))
    rewrite_tokenizer(path, lambda content: content["model"].update(dropout=dropout))
    said: list[str] = []
    tokenizer = load_tokenizer(path, TOKENS, say=said.append)
    assert any("dropout" in line for line in said) == (dropout > 0)
    assert any("tokenizer.json is used as written" in line for line in said) == (family == "qwen2")
    # Tokens that transformers adds for Qwen2 do not count against the embedding
    assert max(tokenizer.get_vocab().values()) == TOKENS - 1
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    for text in TEXTS:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        assert encoded["input_ids"] == reference.encode(text, add_special_tokens=False).ids
        assert encoded["offset_mapping"] == reference.encode(text, add_special_tokens=False).offsets


def test_special_tokens_that_only_the_class_knows(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "gpt_neox", bos="<|endoftext|>", eos="<|endoftext|>")
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPTNeoXTokenizer"}))
    tokenizer = load_tokenizer(path, 512)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 0)


RANDOM_CODE = """
import random
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    def _encode_plus(self, text, *arguments, **options):
        return super()._encode_plus(text[random.randrange(2) :], *arguments, **options)
"""


def test_code_that_samples_is_refused(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "llama")
    (path / "tokenization_own.py").write_text(RANDOM_CODE)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "OwnTokenizer"}
    settings |= {"auto_map": {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="differently each time"):
        load_tokenizer(path, 512, trust_remote_code=True)


def test_a_panic_of_the_tokenizer_is_an_error(tmp_path: Path) -> None:
    """In Rust; at loading, or at a text on which a regular expression takes too many steps."""
    path = tiny_checkpoint(tmp_path, "llama")
    add_split(path, "(.+)+$(?<=x)")
    with pytest.raises(CheckpointError, match="retry-limit"):
        load_tokenizer(path, 512)
    add_split(path, "(a+)+$")
    tokenizer = load_tokenizer(path, 512)
    copied = pickle.loads(pickle.dumps(tokenizer))
    assert copied("A text") == tokenizer("A text")
    for encode in (tokenizer, tokenizer.encode, tokenizer.tokenize, copied, copy.deepcopy(tokenizer)):
        with pytest.raises(CheckpointError, match="retry-limit"):
            encode("a" * 40 + " b")


def replacing(*pairs: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"type": "Replace", "pattern": {"String": old}, "content": new} for old, new in pairs]


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


@pytest.mark.parametrize(
    ("part", "steps"),
    [
        ("normalizers", replacing(("e", 2000 * "e")) * 3),
        ("normalizers", [{"type": "Sequence", "normalizers": replacing(("é", 20 * "e"), ("e", 20 * "é"))}]),
        ("normalizers", [*replacing(("e", 50 * "E")), {"type": "Lowercase"}] * 3),
        ("normalizers", replacing(("e", "ee")) * 33),
        ("pretokenizers", [BYTES] * 40),
        ("decoders", replacing((" ", 50 * " ")) * 3),
    ],
)
def test_steps_that_make_texts_far_longer_are_refused(tmp_path: Path, part: str, steps: list[Any]) -> None:
    """Rust would compute for hours, and no signal ends it."""
    path = tiny_checkpoint(tmp_path, "llama")
    name = "pre_tokenizer" if part == "pretokenizers" else part.removesuffix("s")
    rewrite_tokenizer(path, lambda content: content.update({name: {"type": "Sequence", part: steps}}))
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json: its {name} makes more than"):
        load_tokenizer(path, 512)


def test_steps_that_make_texts_somewhat_longer_are_not_refused(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "llama")
    steps = replacing(*((mark, "<" + 10 * "'") for mark in ",;:?!()[]-"), (20 * "'", '"'), (" ", 20 * " "))
    rewrite_tokenizer(path, lambda content: content.update(normalizer={"type": "Sequence", "normalizers": steps}))
    spaces = load_tokenizer(path, 512).backend_tokenizer.normalizer.normalize_str("a b, c")
    assert spaces == "a" + 20 * " " + "b<" + 10 * "'" + 20 * " " + "c"


def add_split(path: Path, pattern: str) -> None:
    """Split text by a regular expression before anything else."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    parts = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    rewrite_tokenizer(path, lambda content: content.update(pre_tokenizer=parts))


def rewrite_tokenizer(path: Path, change: Callable[[Any], None]) -> None:
    file = path / "tokenizer.json"
    content = json.loads(file.read_text("utf-8"))
    change(content)
    file.write_text(json.dumps(content), "utf-8")


# Special tokens that a tokenizer adds


def adding(single: str) -> Any:
    return processors.TemplateProcessing(single=single, special_tokens=[("<s>", 0), ("</s>", 1)])


UNTRIMMED = processors.ByteLevel(trim_offsets=False)
ENDINGS: dict[str, tuple[Any, list[int], str]] = {
    "BOS": (adding("<s> $A"), [0], ""),
    "EOS": (adding("$A </s>"), [], "</s>"),
    "BOS and EOS": (adding("<s> $A </s>"), [0], "</s>"),
    "two on each side": (adding("</s> <s> $A <s> </s>"), [1, 0], "<s> </s>"),
    "after offsets": (processors.Sequence([UNTRIMMED, adding("<s> $A </s>")]), [0], "</s>"),
    "RoBERTa": (processors.RobertaProcessing(("</s>", 1), ("<s>", 0)), [0], "</s>"),
    "BERT": (processors.BertProcessing(("</s>", 1), ("<s>", 0)), [0], "</s>"),
}


def with_ending(folder: Path, kind: str) -> Path:
    path = tiny_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.post_processor = ENDINGS[kind][0]
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.mark.parametrize("kind", ENDINGS)
def test_no_token_is_added_after_a_text(tmp_path: Path, kind: str) -> None:
    """Those before it stay, and so do the offsets."""
    path = with_ending(tmp_path, kind)
    _, before, ending = ENDINGS[kind]
    said: list[str] = []
    tokenizer = load_tokenizer(path, TOKENS, say=said.append)
    assert [ending in line for line in said] == [True] * bool(ending)
    assert list(getattr(tokenizer, REMARKS, ())) == said
    assert added_tokens(tokenizer) == (before, [])
    reference = AutoTokenizer.from_pretrained(path)
    for text in TEXTS:
        encoded, whole = (each(text, return_offsets_mapping=True) for each in (tokenizer, reference))
        kept = len(whole["input_ids"]) - len(ending.split())
        assert encoded["input_ids"] == whole["input_ids"][:kept]
        assert encoded["offset_mapping"] == whole["offset_mapping"][:kept]
    for copied in (copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        assert copied("A text")["input_ids"] == tokenizer("A text")["input_ids"]


def test_a_part_of_a_sequence_as_text(tmp_path: Path) -> None:
    """With special tokens, and with the space before its first word, which decoding a ▁ tokenizer's part strips."""
    path = tiny_tokenizer(tmp_path)
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("<s>", 0.0), ("▁a", -1.0), ("▁bc", -1.0), ("d", -1.0)], 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(path / "tokenizer.json"))
    loaded = load_tokenizer(path, TOKENS)
    ids = loaded("a bcd a")["input_ids"]
    assert loaded.convert_ids_to_tokens(ids) == ["<s>", "▁a", "▁bc", "d", "▁a"]
    assert [fed_text(loaded, ids[start:end]) for start, end in ((0, 2), (2, 3), (3, 5))] == ["<s> a", " bc", "d a"]


# Trained tokenizers

TEXT = "\n".join(TRAINING_TEXT * 3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    train_tokenizer([folder / "text.txt"], 512, folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(trained: Path) -> Any:
    return AutoTokenizer.from_pretrained(trained)


def test_form(tokenizer: Any) -> None:
    """Words are learnt with their space; digits stand alone."""
    assert (len(tokenizer), tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (512, 0, 1, 2)
    assert tokenizer("The river")["input_ids"][0] == 1
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("the 1234", add_special_tokens=False)["input_ids"])
    assert tokens == ["▁the", "▁", "1", "2", "<0x33>", "<0x34>"]


@given(st.text() | st.text(alphabet=" \n▁abthe1,."))
@example("🌊🏳️‍🌈 <0x0A> a\r\n\tb\x00\u2028")
def test_no_text_is_lost(tokenizer: Any, text: str) -> None:
    """Except ▁ itself, which encodes a space, as in Llama's. Offsets cover the text."""
    encoded = tokenizer(text, return_offsets_mapping=True)
    ids, starts = encoded["input_ids"], [start for start, _ in encoded["offset_mapping"]]
    assert 0 not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text.replace("▁", " ")
    assert starts == sorted(starts) and encoded["offset_mapping"][-1][1] == len(text)


def test_files_folders_and_json_lines_are_the_same_text(trained: Path, tmp_path: Path) -> None:
    train_tokenizer([trained / "text.txt"], 512, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (trained / name).read_bytes()
    texts = tmp_path / "texts" / "inner"
    texts.mkdir(parents=True)
    lines = TEXT.splitlines(keepends=True)
    (texts / "a.txt").write_text("".join(lines[:20]), encoding="utf-8")
    (texts / "b.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines[20:]), encoding="utf-8")
    (texts / ".hidden").write_bytes(b"\xff\xff")
    train_tokenizer([tmp_path / "texts"], 512, tmp_path)
    vocabularies = [Tokenizer.from_file(str(where / "tokenizer.json")).get_vocab() for where in (trained, tmp_path)]
    assert vocabularies[0] == vocabularies[1]


@pytest.mark.parametrize("text", ["so so so so", ("a" * 999 + " ") * 3000, "<0x0A> " * 50],
                         ids=["little", "words", "bytes"])  # fmt: skip
def test_texts_that_are_hard_to_train_on(tmp_path: Path, text: str) -> None:
    """Too little; words without end, which would take minutes; text that spells the token of a byte."""
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    started = time.process_time()
    reached = train_tokenizer([tmp_path / "text.txt"], 400, tmp_path)
    assert time.process_time() - started < 5
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert FEWEST < reached == len(tokenizer) < 400
    part = text[-2000:].strip()
    assert tokenizer.decode(tokenizer(part)["input_ids"], skip_special_tokens=True) == part


def test_invalid_texts(tmp_path: Path) -> None:
    for name, content, kind, noun in (
        ("nowhere.txt", None, DataError, "nowhere"),
        ("binary", b"ab\xff\xfe", DataError, "binary.*UTF-8"),
        ("blank", b"  ", UsageError, "blank"),
        ("lines.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', DataError, "line 2.*'text'"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(kind, match=noun):
            train_tokenizer([tmp_path / name], 512, tmp_path)
