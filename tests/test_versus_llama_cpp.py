"""The parts of benchmarks/versus_llama_cpp.py: llama.cpp's task form, its output, its rule, and the GGUF files."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from gguf_files import check_weights, main_type, set_weights, write_gguf
from llama_perplexity import (
    Peer,
    Settings,
    TextQuestion,
    bit_labels,
    computed_tokens,
    decisions_from_bits,
    is_scorable,
    own_token_means,
    parse_output,
    rounds_needed,
    run_watched,
    task_file,
    text_question,
)

PROGRAM = os.environ.get("EVALKIT_LLAMA_PERPLEXITY")
QUESTIONS = [
    TextQuestion("Question: wo liegt Köln?\nAnswer:", ("am Rhein", "in 東京", "🌊")),
    TextQuestion("The sky is", ("blue", "a\nsquare")),
]


def test_task_file_is_read_back_at_its_offsets() -> None:
    """As llama-perplexity reads it: each question where the table of offsets says, with its labels."""
    labels = [[0, 1, 0], [1, 0]]
    file = io.BytesIO(task_file(QUESTIONS, labels))

    def number() -> int:
        return int.from_bytes(file.read(4), "little", signed=True)

    def text() -> str:
        return file.read(number()).decode()

    offsets = [number() for _ in range(number())]
    assert len(offsets) == len(QUESTIONS)
    for offset, question, expected in zip(offsets, QUESTIONS, labels, strict=True):
        file.seek(offset)
        assert text() == question.question
        assert tuple(text() for _ in range(number())) == question.answers
        # The part with several right answers is empty
        assert ([number() for _ in expected], number()) == (expected, 0)
    assert file.read() == b""


def test_a_question_joined_by_a_space_is_the_sequence() -> None:
    """Others cannot be expressed in the form."""
    joined = text_question(("a b", "a b"), (" c", "  d"))
    assert [f"{joined.question} {answer}" for answer in joined.answers] == ["a b c", "a b  d"]
    for contexts, continuations in (("ab", (" c", " d")), ("aa", (" c", "d")), (("", ""), (" c", " d")),
                                    ("aa", (" c", " "))):  # fmt: skip
        with pytest.raises(ValueError, match=r"contexts differ|begin with a space|empty"):
            text_question(tuple(contexts), continuations)


def test_decisions_follow_from_the_bits_that_runs_print() -> None:
    """Simulated: a run says whether the chosen answer has label 1."""
    counts, chosen = [2, 5, 4, 5, 1], [1, 4, 2, 3, 0]
    bits = [
        np.array([labels[choice] == 1 for labels, choice in zip(bit_labels(counts, bit), chosen, strict=True)])
        for bit in range(rounds_needed(counts))
    ]
    assert len(bits) == 3
    assert decisions_from_bits(bits).tolist() == chosen


def test_output_is_parsed() -> None:
    log = (
        "0.00.431.250 I multiple_choice_score : calculating TruthfulQA score over 3 tasks.\n"
        "1.02.500.750 I Final result: 66.6667 +/- 33.3333\n"
        "1.02.501.000 I llama_perf_context_print: prompt eval time =  1.00 ms /   192 tokens ( 1 ms per token)\n"
    )
    found = parse_output("\ntask\tacc_norm\n1\t100.00000000\n2\t50.00000000\n3\t66.66666667\n\n", log, 3)
    assert found.is_correct.tolist() == [True, False, True]
    assert (found.scoring, found.before, found.tokens) == pytest.approx((62.0695, 0.43125, 192))
    with pytest.raises(RuntimeError, match="1 of 3"):
        parse_output("1\t100.00000000\n", log, 3)


def test_shared_tokens_are_computed_once_and_not_scored() -> None:
    """Two choices share [5, 6, 7]; of the second only token 9 is scored, of the first 8 and 1."""
    sequences = [np.array([5, 6, 7, 8, 1], np.int32), np.array([5, 6, 7, 9], np.int32)]
    logprobs = [np.array([np.nan, np.nan, -9, -1, -2], np.float32), np.array([np.nan, np.nan, -9, -4], np.float32)]
    assert computed_tokens(sequences) == 6
    assert own_token_means(sequences, logprobs).tolist() == [-1.5, -4.0]
    assert is_scorable(sequences)
    assert not is_scorable([sequences[0], sequences[0][:3]])


def test_memory_is_that_of_the_child() -> None:
    """A small child of this process, which has torch in memory, and one that holds 200 MiB."""
    small = run_watched([sys.executable, "-S", "-c", "import time; time.sleep(0.1)"])
    large = run_watched([sys.executable, "-S", "-c", "import time; x = b'1' * (200 << 20); time.sleep(0.1)"])
    assert small.peak < 60 << 20 and 200 << 20 < large.peak < 260 << 20
    assert small.seconds > 0.1
    with pytest.raises(RuntimeError, match="ended with 3"):
        run_watched([sys.executable, "-S", "-c", "raise SystemExit(3)"])


@pytest.fixture
def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def interleaved(name: str, weight: Any) -> Any:
    """Return a weight with the rows of each head as llama.cpp stores them: 0, size / 2, 1, size / 2 + 1, …"""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return weight
    heads = weight.reshape(-1, 16, weight.shape[1])
    return heads[:, [row for first in range(8) for row in (first, first + 8)]].reshape(weight.shape)


def stored(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a GGUF file of a tiny Llama."""
    parts = {"self_attn": "attn", "mlp": "ffn", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    words = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "output"}
    words |= {name: name.removesuffix("_proj") for name in ("gate_proj", "up_proj", "down_proj")}
    for name, parameter in model.named_parameters():
        values = interleaved(name, parameter.detach()).numpy()
        inner = name.split(".")
        if inner[1] == "layers":
            yield f"blk.{inner[2]}.{'_'.join((parts[inner[3]], *(words[w] for w in inner[4:-1])))}.weight", values
        else:
            yield {"embed_tokens": "token_embd.weight", "norm": "output_norm.weight"}[inner[1]], values


def test_files_hold_the_weights_of_the_model(tmp_path: Path, llama: Any) -> None:
    """In every type; and a changed weight, or the order of rows in transformers, is found."""
    from gguf import GGUFReader, GGUFWriter

    source = tmp_path / "source.gguf"
    writer = GGUFWriter(source, "llama")
    writer.add_file_type(0)
    writer.add_token_list(["a", "ö"])
    for name, values in stored(llama):
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for kind in ("F32", "F16", "BF16"):
        write_gguf(source, tmp_path / kind, kind)
        assert main_type(tmp_path / kind) == kind
        check_weights(tmp_path / kind, llama)
    assert GGUFReader(tmp_path / "BF16").fields["tokenizer.ggml.tokens"].contents() == ["a", "ö"]
    write_gguf(source, tmp_path / "Q4_0", "Q4_0")
    with pytest.raises(ValueError, match="differs from the model's"):
        check_weights(tmp_path / "Q4_0", llama)
    set_weights(tmp_path / "Q4_0", llama)
    check_weights(tmp_path / "Q4_0", llama)
    set_weights(tmp_path / "BF16", llama)
    with torch.no_grad():
        llama.model.layers[1].self_attn.k_proj.weight[3, 5] += 0.25
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.k_proj\.weight differs"):
        check_weights(tmp_path / "BF16", llama)


@pytest.mark.slow
@pytest.mark.skipif(not PROGRAM, reason="EVALKIT_LLAMA_PERPLEXITY names no llama-perplexity")
def test_the_program_reads_the_form_and_decides(demo: Path) -> None:
    """Easy questions, the right answer at each place; the program reports tokens and decisions."""
    right, wrong = "Paris", ("qwrtz purple", "seventeen xylophones", "of of of", "Kgbn")
    questions = [
        TextQuestion("The capital of France is", (*wrong[:place], right, *wrong[place:])) for place in range(5)
    ]
    peer = Peer(Path(PROGRAM or ""), demo, 1, Settings(512, 512))
    runs = [peer.run(task_file(questions, bit_labels([5] * 5, bit)))[1] for bit in range(3)]
    assert decisions_from_bits([run.is_correct for run in runs]).tolist() == [0, 1, 2, 3, 4]
    assert len({run.tokens for run in runs}) == 1 and 0 < runs[0].scoring < 60
