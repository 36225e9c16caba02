"""Token sequences and the segment of each token, compared with the bytes of each token; and template files."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from evalkit.errors import ScoringError, TemplateError
from evalkit.runs.score_table import CONTEXT, CONTINUATION, END, INSTRUCTION, SPECIAL
from evalkit.suites.prompts import Prompter, TokenSequence
from evalkit.suites.questions import Question
from evalkit.suites.templates import SEGMENTS, Part, Template, load_template, template_names
from tests.questions import question, token_bytes
from tests.tiny import tiny_tokenizer

WIDE = 10_000
ICE = question("Why does ice float on water?", ["Ice is less dense", "It is cold."])
QUESTIONS = [
    ICE,
    question("Der Fluss stieg über Nacht, und", ["am Morgen war die Brücke fort", "niemand hörte das Geräusch"]),
    question("夜里河水上涨，清晨时桥", ["已经不见了。", "還在🌊"], gap=""),
    question("في الصباح كان الجسر", ["قد اختفى."]),
    question("Pierre's clock was old, so", ["he’d  rather\n\nrepair it: 12 — 7", "'s"]),
]


def load(folder: Path, **options: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(str(tiny_tokenizer(folder, **options)))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return load(tmp_path_factory.mktemp("tokenizer"))


def made(*parts: tuple[str, str], **changes: Any) -> Template:
    options = {"bos": "never", "eos": False, "system": "Be brief.", "score": SEGMENTS} | changes
    return Template("made", "", parts=tuple(Part(*part) for part in parts), **options)


def encode(
    tokenizer: Any, template: Template | str, asked: Question, window: int = WIDE, **options: Any
) -> list[TokenSequence]:
    template = load_template(template) if isinstance(template, str) else template
    (encoded,) = Prompter(template, tokenizer, window).encode([asked], **options)
    return list(encoded.sequences + encoded.unconditional)


def text_of(tokenizer: Any, sequence: TokenSequence, *codes: int) -> str:
    """Return the text of the tokens of some segments, without special ids."""
    kept = [t for t, s in zip(sequence.tokens.tolist(), sequence.segments.tolist(), strict=True) if s in codes]
    special = set(tokenizer.all_special_ids)
    return b"".join(token_bytes(tokenizer, t) for t in kept if t not in special).decode()


@pytest.mark.parametrize(
    ("options", "absent"),
    [
        ({"bos": None}, ("BOS",)),
        ({"eos": None}, ("EOS",)),
        ({"adds_bos": True}, ()),
        ({"adds_eos": True}, ()),
        ({"adds_bos": True, "adds_eos": True}, ()),
    ],
)
def test_a_choice_is_tokenised_as_its_text_alone(tmp_path: Path, options: Any, absent: tuple[str, ...]) -> None:
    """Under the paper's template (Appendix A.3), and under lm-eval's own prompt; absent tokens are reported once."""
    own, said = load(tmp_path, **options), list[str]()
    head = "[INST] You are a knowledgeable assistant. Give the continuation that fits best. [/INST] "
    first, last = ([] if token is None else [token] for token in (own.bos_token_id, own.eos_token_id))
    inst = Prompter(load_template("inst"), own, WIDE, said.append).encode(QUESTIONS)
    plain = Prompter(load_template("plain"), own, WIDE, said.append).encode(QUESTIONS)
    for asked, under_inst, under_plain in zip(QUESTIONS, inst, plain, strict=True):
        texts = zip(asked.contexts, asked.gaps, asked.continuations, under_inst.sequences, strict=True)
        for context, gap, continuation, sequence in texts:
            text = f"{head}{context}{gap}{continuation}"
            assert sequence.tokens.tolist() == [*first, *own(text, add_special_tokens=False)["input_ids"], *last]
            assert text_of(own, sequence, *range(len(SEGMENTS))) == text
            assert (sequence.segments == END).sum() == len(last)
        for context, continuation, sequence in zip(
            asked.contexts, asked.continuations, under_plain.sequences, strict=True
        ):
            whole = own(f"{context} {continuation}")["input_ids"]
            assert sequence.tokens.tolist() == whole[: len(whole) - ("adds_eos" in options)]
    assert [line.split()[4] for line in said] == list(absent)


words = st.text(st.sampled_from("river. 'sßé夜🌊-\n12"), max_size=12)


@given(words, words, words, st.sampled_from(["", " ", ":"]))
def test_each_token_belongs_to_the_segment_of_its_last_byte(
    tokenizer: Any, system: str, context: str, continuation: str, between: str
) -> None:
    template = made(
        ("instruction", "{system}" + between),
        ("context", "{context}"),
        ("special", between),
        ("continuation", "{continuation}!"),
        system=system,
    )
    asked = question(context, [continuation])
    prompter = Prompter(template, tokenizer, WIDE)
    (sequence,) = next(prompter.encode([asked])).sequences
    stood_in = int(sequence.tokens[0] == tokenizer.bos_token_id)
    owner = [code for code, text in prompter.render(asked, 0) for _ in text.encode()]
    sizes = [len(token_bytes(tokenizer, token)) for token in sequence.tokens[stood_in:].tolist()]
    ends = list(itertools.accumulate(sizes))
    assert ends[-1:] == [len(owner)]
    segments = [owner[end - 1] for end in ends]
    assert sequence.segments[stood_in:].tolist() == segments
    # Offsets exclude a token's leading space, so such a straddle is not counted
    assert sequence.straddles <= sum(owner[end - size] != owner[end - 1] for size, end in zip(sizes, ends, strict=True))
    assert bool(stood_in) == (segments[0] == CONTINUATION)


def test_a_token_over_the_boundary_counts_with_the_continuation(tokenizer: Any) -> None:
    """ " water" is one token, so the context "ice and wa" ends inside it."""
    joined = made(("context", "{context}"), ("continuation", "{continuation}"))
    (sequence,) = encode(tokenizer, joined, question("ice and wa", ["ter rose"]))
    assert [text_of(tokenizer, sequence, code) for code in (CONTEXT, CONTINUATION)] == ["ice and", " water rose"]
    assert sequence.straddles == 1


def test_an_empty_context_is_replaced_by_bos_or_eos(tmp_path: Path) -> None:
    for bos, stands_in in (("<s>", "<s>"), (None, "</s>")):
        own = load(tmp_path, bos=bos)
        (sequence,) = encode(own, "plain", question("", ["Ice"]))
        assert own.convert_ids_to_tokens(sequence.tokens.tolist()[:1]) == [stands_in]
        assert sequence.segments.tolist()[0] == SPECIAL
        assert text_of(own, sequence, CONTINUATION) == " Ice"
    with pytest.raises(ScoringError, match="made_up document 4"):
        encode(load(tmp_path, bos=None, eos=None), "plain", question("", ["Ice"], doc_id=4))


@pytest.mark.parametrize(("template", "left"), [("inst", -1), ("plain", 0)])
def test_the_window_cuts_the_context_on_its_left(tokenizer: Any, template: str, left: int) -> None:
    """`plain` has no begin token, so its continuation also needs one token of context to be predicted from."""
    asked = question("one two three four five six seven eight nine", ["eleven, twelve, thirteen"], doc_id=7)
    (whole,) = encode(tokenizer, template, asked)
    is_context = whole.segments == CONTEXT
    assert whole.truncated == 0
    # The last token is only predicted: a window holds one token less than the sequence
    smallest = int((~is_context).sum()) + left
    for cut in (1, is_context.sum() - 1, len(whole.tokens) - 1 - smallest):
        (sequence,) = encode(tokenizer, template, asked, len(whole.tokens) - 1 - cut)
        assert (sequence.truncated, len(sequence.tokens)) == (cut, len(whole.tokens) - cut)
        assert sequence.tokens[sequence.segments != CONTEXT].tolist() == whole.tokens[~is_context].tolist()
        assert sequence.tokens[sequence.segments == CONTEXT].tolist() == whole.tokens[is_context].tolist()[cut:]
        assert sequence.segments[0] != CONTINUATION
    with pytest.raises(ScoringError, match=f"made_up document 7: .* window of {smallest - 1}"):
        encode(tokenizer, template, asked, smallest - 1)


def test_the_requests_of_olmes_are_cut_as_there(tokenizer: Any) -> None:
    """Whatever the model's window: what comes first, BOS too; a user's own requests lose their context alone."""
    whole, *_ = encode(tokenizer, "requests", ICE)
    assert whole.tokens[0] == tokenizer.bos_token_id
    for most, window in ((12, WIDE), (WIDE, 12)):
        limited = replace(ICE, leaf=replace(ICE.leaf, most_tokens=most))
        sequence, *_ = encode(tokenizer, "requests", limited, window)
        assert sequence.tokens.tolist() == whole.tokens.tolist()[-13:]
        assert sequence.truncated == len(whole.tokens) - 13
    under_inst, *_ = encode(tokenizer, "inst", ICE)
    limited = replace(ICE, leaf=replace(ICE.leaf, most_tokens=len(under_inst.tokens) - 5))
    cut, *_ = encode(tokenizer, "inst", limited)
    assert cut.tokens.tolist() == encode(tokenizer, "inst", ICE, limited.leaf.most_tokens)[0].tokens.tolist()
    own, *_ = encode(tokenizer, "requests", ICE, 12)
    assert own.tokens.tolist() == [tokenizer.bos_token_id, *whole.tokens.tolist()[-12:]]
    with pytest.raises(ScoringError, match="window of 3"):
        encode(tokenizer, "requests", replace(ICE, leaf=replace(ICE.leaf, most_tokens=3)))


def test_unconditional_sequences_lack_the_context_alone(tokenizer: Any) -> None:
    """In the order of the questions, of which several calls of the tokenizer are made."""
    asked = [question(f"River {i}", [f"{i}.{k}" for k in range(2 + i % 4)], doc_id=i) for i in range(150)]
    encoded = list(Prompter(load_template("inst"), tokenizer, WIDE).encode(asked, unconditional=True))
    assert [member.question for member in encoded] == asked
    for member in encoded[::37]:
        for choice, whole, alone in zip(member.question.choices, member.sequences, member.unconditional, strict=True):
            assert CONTEXT not in alone.segments and alone.tokens[0] == tokenizer.bos_token_id
            for code in (INSTRUCTION, CONTINUATION):
                assert text_of(tokenizer, alone, code) == text_of(tokenizer, whole, code)
            assert text_of(tokenizer, whole, CONTINUATION) == f" {choice}"


CHAT = (
    "{% for m in messages %}{{ '<|' + m.role + '|>{' }}{{ m.content }}{{ '}' }}"
    "{% if m.role == 'assistant' %}{{ eos_token + '\n' }}{% endif %}{% endfor %}"
)
REFUSES_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHAT


def test_the_tokenizers_chat_template(tmp_path: Path) -> None:
    """Braces of the template and of the question are literal; text after the end token is removed."""
    own, template, asked = load(tmp_path), load_template("chat"), question("What is {x}?", ["{y}", "a set"])
    own.chat_template = CHAT
    for choice, sequence in zip(asked.choices, encode(own, template, asked), strict=True):
        texts = {"system": template.system, "user": asked.contexts[0], "assistant": choice}
        turns = [{"role": role, "content": text} for role, text in texts.items()]
        text = own.apply_chat_template(turns, tokenize=False).removesuffix("\n")
        assert sequence.tokens.tolist() == own(text, add_special_tokens=False)["input_ids"]
        for code, of_segment in zip((INSTRUCTION, CONTEXT, CONTINUATION), texts.values(), strict=True):
            assert text_of(own, sequence, code) == of_segment
        assert text_of(own, sequence, SPECIAL) == "<|system|>{}<|user|>{}<|assistant|>{"
        assert (sequence.tokens[-1], sequence.segments[-1]) == (own.eos_token_id, END)
    own.chat_template, said = REFUSES_SYSTEM, list[str]()
    (encoded,) = Prompter(template, own, WIDE, said.append).encode([ICE])
    assert len(said) == 1 and "system" in said[0]
    assert text_of(own, encoded.sequences[0], SPECIAL) == "<|user|>{}<|assistant|>{"
    assert INSTRUCTION not in encoded.sequences[0].segments
    # A date is that of no day
    own.chat_template = "{{ strftime_now('%d %b %Y') }} " + CHAT
    assert text_of(own, encode(own, template, ICE)[0], SPECIAL).startswith("26 Jul 2024 ")
    for broken, noun in ((None, "chat template"), (CHAT.replace("{{ m.content }}", ""), "context")):
        own.chat_template = broken
        with pytest.raises(TemplateError, match=noun):
            Prompter(template, own, WIDE)


# Template files

GOOD = """\
description: for this test
bos: never
eos: false
score: [continuation, context]
parts:
  - context: "{context} {{literal}}"
  - continuation: "{gap}{continuation}"
"""


def written(folder: Path, text: str) -> str:
    (folder / "mine.yaml").write_text(text, encoding="utf-8")
    return str(folder / "mine.yaml")


def test_a_file_and_the_hash_of_what_shapes_a_sequence(tmp_path: Path) -> None:
    template = load_template(written(tmp_path, GOOD))
    assert (template.name, template.bos, template.eos, template.system) == ("mine", "never", False, "")
    assert template.score == ("context", "continuation")
    assert template.parts == (Part("context", "{context} {{literal}}"), Part("continuation", "{gap}{continuation}"))

    def changed(old: str, new: str) -> str:
        return load_template(written(tmp_path, GOOD.replace(old, new))).content_hash

    assert changed("for this test", "renamed") == template.content_hash
    changes = {"never": "always", "false": "true", "[continuation, context]": "[continuation]", "{gap}": "{delimiter}"}
    assert len({template.content_hash, *(changed(old, new) for old, new in changes.items())}) == 5
    assert load_template("inst").scores_all
    assert all(load_template(name).name == name for name in template_names())


def test_an_invalid_file(tmp_path: Path) -> None:
    for old, new, noun in (
        ('  - continuation: "{gap}{continuation}"\n', "", r"\{continuation\}"),
        ("{context} ", "{context}{continuation}", r"parts\[0\]"),
        ("{context} ", "{contxt} ", "contxt.* 'context'"),
        ("[continuation, context]", "[context]", "'score'"),
    ):
        with pytest.raises(TemplateError, match=rf"mine\.yaml.*{noun}"):
            load_template(written(tmp_path, GOOD.replace(old, new)))
