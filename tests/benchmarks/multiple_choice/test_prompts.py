"""Token sequences and the segment of each token, compared with the bytes of each token."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from evalkit.benchmarks.multiple_choice.encoded import (
    CONTEXT,
    CONTINUATION,
    END,
    INSTRUCTION,
    SPECIAL,
    TokenSequence,
)
from evalkit.benchmarks.multiple_choice.prompts import Prompter
from evalkit.benchmarks.multiple_choice.tasks import Question
from evalkit.benchmarks.multiple_choice.templates import SEGMENTS, Part, Template, load_template
from evalkit.errors import ScoringError, TemplateError
from tests.questions import question, token_bytes
from tests.tiny import tiny_tokenizer

WIDE = 10_000
ICE = question("Why does ice float on water?", ["Ice is less dense", "It is cold.", ""])
STATED = question("Why does ice float on water?", ["Ice is less dense"])
RIVERS = [
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


JOINED = made(("context", "{context}"), ("continuation", "{continuation}"))


def encode(
    tokenizer: Any, template: Template, asked: Question, window: int = WIDE, **options: Any
) -> list[TokenSequence]:
    (encoded,) = Prompter(template, tokenizer, window).encode([asked], **options)
    return list(encoded.sequences + encoded.unconditional)


def text_of(tokenizer: Any, sequence: TokenSequence, *codes: int) -> str:
    """Return the text of the tokens of some segments, without special ids."""
    kept = [t for t, s in zip(sequence.tokens.tolist(), sequence.segments.tolist(), strict=True) if s in codes]
    special = set(tokenizer.all_special_ids)
    return b"".join(token_bytes(tokenizer, t) for t in kept if t not in special).decode()


def by_bytes(tokenizer: Any, tokens: list[int], pieces: list[tuple[int, str]]) -> tuple[list[int], int]:
    """(segment of each token, how many reach over a boundary), from the bytes alone: a token's last byte decides."""
    owner = [code for code, text in pieces for _ in text.encode()]
    sizes = [len(token_bytes(tokenizer, t)) for t in tokens]
    ends = list(itertools.accumulate(sizes))
    assert ends[-1:] in ([], [len(owner)])
    firsts = [end - size for end, size in zip(ends, sizes, strict=True)]
    return [owner[end - 1] for end in ends], sum(owner[a] != owner[b - 1] for a, b in zip(firsts, ends, strict=True))


@pytest.mark.parametrize("asked", [ICE, *RIVERS], ids=lambda asked: asked.contexts[0][:12])
def test_inst_is_the_text_to_the_letter_between_bos_and_eos(tokenizer: Any, asked: Question) -> None:
    for choice, sequence in enumerate(encode(tokenizer, load_template("inst"), asked)):
        assert sequence.tokens[0] == tokenizer.bos_token_id
        assert sequence.tokens[-1] == tokenizer.eos_token_id
        head = "[INST] You are a knowledgeable assistant. Give the continuation that fits best. [/INST] "
        text = head + asked.contexts[choice] + asked.gaps[choice] + asked.continuations[choice]
        assert text_of(tokenizer, sequence, *range(len(SEGMENTS))) == text
        alone = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert sequence.tokens[1:-1].tolist() == alone
        assert [name for name, _, _ in sequence.spans()][:4] == ["special", "instruction", "special", "context"]
        assert sequence.segments[-1] == END


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
    pieces = prompter.render(asked, 0)
    (sequence,) = next(prompter.encode([asked])).sequences
    stood_in = int(sequence.tokens[0] == tokenizer.bos_token_id)
    segments, straddles = by_bytes(tokenizer, sequence.tokens[stood_in:].tolist(), pieces)
    assert sequence.segments[stood_in:].tolist() == segments
    # Offsets exclude a token's leading space, so such a straddle is not counted
    assert sequence.straddles <= straddles
    assert bool(stood_in) == (segments[0] == CONTINUATION)


def test_a_token_over_the_boundary_counts_with_the_continuation(tokenizer: Any) -> None:
    """ " water" is one token, so the context "ice and wa" ends inside it."""
    assert tokenizer.tokenize("ice and water")[-2:] == ["Ġand", "Ġwater"]
    (sequence,) = encode(tokenizer, JOINED, question("ice and wa", ["ter rose"]))
    assert text_of(tokenizer, sequence, CONTEXT) == "ice and"
    assert text_of(tokenizer, sequence, CONTINUATION) == " water rose"
    assert sequence.straddles == 1


def test_space_at_the_contexts_end_moves_to_the_continuation(tokenizer: Any) -> None:
    (moved,) = encode(tokenizer, JOINED, question("She counted ", ["the coins"]))
    (plain,) = encode(tokenizer, JOINED, question("She counted", [" the coins"]))
    assert moved.tokens.tolist() == plain.tokens.tolist()
    assert moved.segments.tolist() == plain.segments.tolist()
    assert text_of(tokenizer, moved, CONTINUATION) == " the coins"


def test_plain_starts_as_the_tokenizer_does(tokenizer: Any, tmp_path: Path) -> None:
    """lm-eval's request: context, then " " + choice; a begin token only from a tokenizer that adds one."""
    adding = load(tmp_path, adds_bos=True)
    for choice, text in enumerate(ICE.continuations[:2]):
        whole = f"{ICE.contexts[0]} {text}"
        for own in (tokenizer, adding):
            sequence = encode(own, load_template("plain"), ICE)[choice]
            assert sequence.tokens.tolist() == own(whole)["input_ids"]
            assert text_of(own, sequence, CONTINUATION) == f" {text}"
    assert encode(adding, load_template("plain"), ICE)[0].tokens[0] == adding.bos_token_id
    assert encode(tokenizer, load_template("plain"), ICE)[0].tokens[0] != tokenizer.bos_token_id


@pytest.mark.parametrize(
    ("bos", "eos", "said"),
    [
        (None, "</s>", ["the tokenizer has no BOS token: sequences start without one"]),
        ("<s>", None, ["the tokenizer has no EOS token: sequences end without one"]),
        ("<|endoftext|>", "<|endoftext|>", []),
    ],
)
def test_what_the_tokenizer_lacks_is_left_out_and_said_once(
    tmp_path: Path, bos: str | None, eos: str | None, said: list[str]
) -> None:
    own, news = load(tmp_path, bos=bos, eos=eos), []
    encoded = list(Prompter(load_template("inst"), own, WIDE, news.append).encode([ICE, *RIVERS]))
    assert news == said
    for sequence in (s for e in encoded for s in e.sequences):
        text = text_of(own, sequence, *range(len(SEGMENTS)))
        ids = own(text, add_special_tokens=False)["input_ids"]
        first = [] if bos is None else [own.bos_token_id]
        last = [] if eos is None else [own.eos_token_id]
        assert sequence.tokens.tolist() == first + ids + last
        assert (sequence.segments == END).sum() == len(last)


@pytest.mark.parametrize(("bos", "eos", "stands_in"), [("<s>", "</s>", "<s>"), (None, "</s>", "</s>")])
def test_an_empty_context_is_replaced_by_bos_or_eos(tmp_path: Path, bos: str | None, eos: str, stands_in: str) -> None:
    own = load(tmp_path, bos=bos, eos=eos)
    (sequence,) = encode(own, load_template("plain"), question("", ["Ice"]))
    assert own.convert_ids_to_tokens(sequence.tokens.tolist()[:1]) == [stands_in]
    assert sequence.segments.tolist()[0] == SPECIAL
    assert text_of(own, sequence, CONTINUATION) == " Ice"


def test_an_empty_context_with_nothing_to_replace_it(tmp_path: Path) -> None:
    own = load(tmp_path, bos=None, eos=None)
    with pytest.raises(ScoringError, match="made_up document 4: the context is empty"):
        encode(own, load_template("plain"), question("", ["Ice"], doc_id=4))


@pytest.mark.parametrize("template", ["inst", "plain"])
def test_the_window_cuts_the_context_on_its_left(tokenizer: Any, template: str) -> None:
    asked = question("one two three four five six seven eight nine", ["ten", "eleven, twelve, thirteen"])
    for choice, whole in enumerate(encode(tokenizer, load_template(template), asked)):
        context = (whole.segments == CONTEXT).sum()
        for cut in (1, context - 1):
            # The last token is only predicted: a window holds one token less than the sequence
            window = len(whole.tokens) - 1 - cut
            one = question(asked.contexts[0], [asked.choices[choice]])
            (sequence,) = encode(tokenizer, load_template(template), one, window)
            assert sequence.truncated == cut
            assert len(sequence.tokens) == window + 1
            rest = whole.segments != CONTEXT
            assert sequence.tokens[sequence.segments != CONTEXT].tolist() == whole.tokens[rest].tolist()
            assert sequence.tokens[sequence.segments == CONTEXT].tolist() == whole.tokens[~rest].tolist()[cut:]
    assert not any(sequence.truncated for sequence in encode(tokenizer, load_template(template), asked))


@pytest.mark.parametrize(("template", "left"), [("inst", -1), ("plain", 0)])
def test_a_window_too_small_without_the_context(tokenizer: Any, template: str, left: int) -> None:
    """`plain` has no begin token, so its continuation also needs one token of context to be predicted from."""
    asked = question("one two three", ["four five six"], doc_id=7)
    (whole,) = encode(tokenizer, load_template(template), asked)
    window = int((whole.segments != CONTEXT).sum()) - 1 + left
    with pytest.raises(ScoringError, match=f"made_up document 7: .* the context window of {window}"):
        encode(tokenizer, load_template(template), asked, window)
    (sequence,) = encode(tokenizer, load_template(template), asked, window + 1)
    assert text_of(tokenizer, sequence, CONTINUATION) == " four five six"
    assert sequence.segments[0] != CONTINUATION


def test_unconditional_sequences_lack_the_context_alone(tokenizer: Any) -> None:
    for name, text in (("inst", None), ("plain", "")):
        template = load_template(name)
        sequences = encode(tokenizer, template, ICE, unconditional=True)
        assert len(sequences) == 6
        for whole, alone in zip(sequences[:3], sequences[3:], strict=True):
            assert CONTEXT not in alone.segments
            for code in (INSTRUCTION, CONTINUATION):
                assert text_of(tokenizer, alone, code) == text_of(tokenizer, whole, code)
            assert alone.tokens[0] == tokenizer.bos_token_id
            assert text is None or text_of(tokenizer, alone, SPECIAL) == text


def test_order_and_number_survive_chunks(tokenizer: Any) -> None:
    asked = [question(f"River {i}", [f"{i}.{k}" for k in range(2 + i % 4)], doc_id=i) for i in range(300)]
    encoded = list(Prompter(load_template("inst"), tokenizer, WIDE).encode(asked, unconditional=True))
    assert [e.question for e in encoded] == asked
    for one in encoded[::37]:
        assert len(one.sequences) == len(one.unconditional) == len(one.question.choices)
        for choice, sequence in zip(one.question.choices, one.sequences, strict=True):
            assert text_of(tokenizer, sequence, CONTINUATION) == f" {choice}"


CHAT = (
    "{% for m in messages %}{{ '<|' + m.role + '|>{' }}{{ m.content }}{{ '}' }}"
    "{% if m.role == 'assistant' %}{{ eos_token + '\n' }}{% endif %}{% endfor %}"
)
REFUSES_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHAT
DROPS_SYSTEM = CHAT.replace("in messages", "in messages if m.role != 'system'")


@pytest.fixture
def chatty(tmp_path: Path) -> PreTrainedTokenizerFast:
    return load(tmp_path)


def test_the_tokenizers_chat_template(chatty: Any) -> None:
    """Braces of the template and of the question are literal; text after the end token is removed."""
    chatty.chat_template = CHAT
    asked = question("What is {x}?", ["{y}", "a set"])
    template = load_template("chat")
    for choice, sequence in enumerate(encode(chatty, template, asked)):
        turns = [
            {"role": "system", "content": template.system},
            {"role": "user", "content": asked.contexts[0]},
            {"role": "assistant", "content": asked.choices[choice]},
        ]
        text = chatty.apply_chat_template(turns, tokenize=False).removesuffix("\n")
        assert sequence.tokens.tolist() == chatty(text, add_special_tokens=False)["input_ids"]
        assert text_of(chatty, sequence, INSTRUCTION) == template.system
        assert text_of(chatty, sequence, CONTEXT) == "What is {x}?"
        assert text_of(chatty, sequence, CONTINUATION) == asked.choices[choice]
        assert text_of(chatty, sequence, SPECIAL) == "<|system|>{}<|user|>{}<|assistant|>{"
        assert sequence.tokens[-1] == chatty.eos_token_id
        assert sequence.segments[-1] == END


@pytest.mark.parametrize("form", [REFUSES_SYSTEM, DROPS_SYSTEM], ids=["refuses", "drops"])
def test_a_chat_template_without_a_system_turn(chatty: Any, form: str) -> None:
    chatty.chat_template = form
    news: list[str] = []
    (encoded,) = Prompter(load_template("chat"), chatty, WIDE, news.append).encode([STATED])
    assert news == ["the tokenizer's chat template has no system turn: the instruction is left out"]
    assert text_of(chatty, encoded.sequences[0], SPECIAL) == "<|user|>{}<|assistant|>{"
    assert INSTRUCTION not in encoded.sequences[0].segments


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (None, "the tokenizer has no chat template"),
        ("{{ raise_exception('never') }}", "chat template fails: never"),
        (CHAT.replace("{{ m.content }}", ""), "omits the context"),
    ],
)
def test_a_chat_template_that_will_not_do(chatty: Any, form: str | None, words: str) -> None:
    chatty.chat_template = form
    with pytest.raises(TemplateError, match=words):
        Prompter(load_template("chat"), chatty, WIDE)


def test_a_chat_template_that_writes_the_date_writes_the_same_one_every_day(chatty: Any) -> None:
    chatty.chat_template = "{{ strftime_now('%d %b %Y') }} " + CHAT
    (encoded,) = encode(chatty, load_template("chat"), STATED)[:1]
    assert text_of(chatty, encoded, SPECIAL).startswith("26 Jul 2024 ")
