"""Survey of all causal architectures of transformers: each is scored right, or refused for a true reason.

    python benchmarks/architectures.py                      # all model types, three seeds: 20 minutes on a core
    python benchmarks/architectures.py --types doge whisper --seeds 1
    python benchmarks/architectures.py --generate           # texts in batches, three seeds: 10 minutes

A tiny checkpoint with random weights is written for each type of transformers' causal mapping and seed, with short
windows wherever the config has any. evalkit loads it and scores sequences of up to 200 tokens in each way that its
checks allow: in a tree, behind stored states, in padded rows; or else alone. A second copy, loaded by transformers
alone with eager attention, gives the truth: log-probabilities of each whole sequence, and whether those of a prefix are
the same when the sequence ends there.

Prints a table of type → verdict in Markdown:

- agrees: in no way does a token's log-probability differ by more than 1e-4 nats, or the log-likelihood of a sequence by
  more than 2e-5 of its value, and the model is causal;
- refused, true: evalkit refuses the checkpoint, and the truth says that it is not causal;
- REFUSED: evalkit refuses the checkpoint, and the truth does not say why;
- WRONG: evalkit scores, and scores differ or the model is not causal;
- not built: transformers cannot build the model from its config, or cannot run it on tokens alone;
- agrees with passes: generated texts are those of passes without a cache, and `generate` gives others.

Exits with 1 if a verdict is WRONG or REFUSED.

With `--generate`, evalkit generates texts from a batch of prompts of 1 to 41 tokens, in chunks of eight, and scores
answers to them. The truth is transformers' own greedy `generate` on each prompt, and a pass over each prompt with its
answer.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from evalkit.compatibility.transformers import quiet
from evalkit.errors import EvalkitError, first_line
from evalkit.generation.generator import Generator
from evalkit.generation.prompts import Prompt, Stops
from evalkit.models.loading.load import load
from evalkit.models.loading.locate import locate
from evalkit.models.zoo.train_tokenizer import train_tokenizer
from evalkit.scoring.engine import Engine
from evalkit.scoring.pack import Sequences, SequenceSet, batches_of

TOLERANCE = 1e-4
"""Nats of a token's log-probability, in float32."""
RELATIVE = 2e-5
"""Difference of a sequence's log-likelihood, as a share of it, in float32."""
NOT_CAUSAL = 1e-3
"""Nats by which the log-probabilities of a causal model may change with later tokens, by rounding."""
MOST_PARAMETERS = 8_000_000
TEXT = "The river rose in the night, and in the morning the bridge was gone. A whale is no fish; it breathes air.\n"
VOCABULARY, BUDGET = 320, 700


def _each(value: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


SIZES: Mapping[str, Any] = {
    **_each(VOCABULARY, "vocab_size vocab_size_per_layer_input decoder_vocab_size encoder_hash_byte_group_vocab "
            "pronunciation_vocab_size shape_vocab_size"),
    **_each(64, "hidden_size d_model n_embd emb_dim embedding_dim embedding_size input_embedding_size "
            "output_embedding_size attention_hidden_size lru_width word_embed_proj_dim router_hidden_size"),
    **_each(4, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers "
            "num_encoder_layers num_blocks num_layers_per_stack num_attention_heads n_head n_heads num_heads "
            "decoder_attention_heads encoder_attention_heads num_decoder_attention_heads attention_heads "
            "num_encoder_attention_heads swa_num_attention_heads linear_num_value_heads linear_num_heads "
            "num_experts num_local_experts n_routed_experts moe_num_experts"),
    **_each(2, "num_key_value_heads num_kv_heads num_query_groups swa_num_key_value_heads linear_num_key_heads "
            "num_experts_per_tok num_experts_per_token moe_topk moe_k n_group num_expert_group"),
    # With fewer heads, most scores of an indexer are 0, and its selection is among equal ones
    **_each(16, "index_n_heads"),
    **_each(16, "head_dim swa_head_dim dim_head d_head kv_channels v_head_dim qk_nope_head_dim attention_head_size "
            "linear_key_head_dim linear_value_head_dim linear_head_dim index_head_dim mamba_d_state mamba_d_head "
            "mamba_head_dim mamba_headdim ssm_state_size state_size kv_lora_rank q_lora_rank o_lora_rank laurel_rank "
            "hidden_size_per_layer_input mamba_dt_rank time_step_rank adapter_rank pronunciation_embed_dim "
            "shape_embed_dim gated_norm_rank hc_lowrank"),
    # Windows
    **_each(16, "sliding_window attention_window_size local_attention window_size attention_chunk_size "
            "sliding_window_size keep_window_size index_topk local_attention_window_len local_attn_chunk_length "
            "lsh_attn_chunk_length"),
    **_each(8, "qk_rope_head_dim rotary_dim"),
    **_each(96, "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim dff dim_ff d_inner feed_forward_size "
            "ffn_hidden_size intermediate_size_mlp dense_intermediate_size"),
    **_each(32, "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size "
            "moe_shared_expert_intermediate_size shared_experts_intermediate_size shared_intermediate_size"),
    **_each(512, "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length context_length "
            "model_max_length max_target_positions max_source_positions"),
    "qk_head_dim": 24, "topk_group": 1, "initializer_range": 0.1, "is_decoder": True,
}  # fmt: skip
"""Sizes of every config that has these keys."""
_LATENT = {"num_key_value_heads": 4, "head_dim": 8}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16,
            "indexer_compress_ratio": 4}  # fmt: skip
_DOTS3 = {"num_key_value_heads": 4, "head_dim": 24, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4,
          "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16, "swa_head_dim": 24, "swa_qk_nope_head_dim": 16,
          "swa_v_head_dim": 16}  # fmt: skip
_BLT_WIDTH = {"hidden_size_global": 128, "num_hidden_layers": 2}
TYPES: Mapping[str, Mapping[str, Any]] = {
    **_each(_LATENT, "axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa longcat_flash minicpm3 "
            "youtu"),
    **_each({**_LATENT, "layer_types": ["linear_attention", "full_attention"] * 2}, "bailing_hybrid kimi_linear"),
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"] * 2},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "blt": {"encoder_config": _BLT_WIDTH, "decoder_config": _BLT_WIDTH, "patcher_config": {"num_hidden_layers": 2},
            "global_config": {"hidden_size": 128, "head_dim": 32}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _PLAIN_ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "doge": {"sliding_window": None, "keep_window_size": 512},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": _DOTS3,
    "dots3_note": {"text_config": _DOTS3,
                   "vision_config": {"mlp_layer_types": ["dense"] * 4, "adapter_in_dim": 64, "adapter_out_dim": 64},
                   "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64, "num_key_value_heads": 4}},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "gemma4_unified": {"vision_config": None, "audio_config": None},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local"] * 4},
    "xlm": {"causal": True},
    "xlnet": {"attn_type": "uni"},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_key_value_heads": 4, "num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 2,
              "attention_hidden_size": 128, "attention_head_dim": 32},
    "zamba2": {"layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2, "num_hidden_layers": 6,
               "num_key_value_heads": 4, "n_mamba_heads": 8, "mamba_headdim": 16, "attention_hidden_size": 128,
               "attention_head_dim": 32},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""Keys of single types: sizes that must fit each other, and values that their configs lack."""
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "bert:both-ways": {"is_decoder": False},
    "deepseek_v32:ties": {**_LATENT, "index_n_heads": 2},
    "doge:ties": {"sliding_window": None},
    "doge:long-ties": {"sliding_window": None, "keep_window_size": 160},
    "reformer:hashing": {"axial_pos_embds": False, "num_buckets": 4},
    "xlm:both-ways": {"causal": False},
    "xlnet:both-ways": {"attn_type": "bi"},
}
"""Keys of checkpoints that are not causal: by design, by hashing, or since they select among tokens of equal scores."""


class Verdict(NamedTuple):
    """What evalkit does with a checkpoint, beside the truth."""

    word: str
    """One of those in this module's docstring."""
    gap: float = 0.0
    """Largest difference of a token's log-probability from the truth, in nats."""
    ahead: float = 0.0
    """Largest change of a log-probability with later tokens, in nats."""
    relative: float = 0.0
    """Largest difference of a sequence's log-likelihood, as a share of it."""
    way: str = ""
    """In which ways evalkit scores it, the chosen one first, in a tree with the kernel; or its message."""


def main() -> int:
    """Survey the types and print the table."""
    parser = argparse.ArgumentParser(description="Survey of all causal architectures of the installed transformers.")
    parser.add_argument("--types", nargs="+", help="all, and without --generate the variants, if left out")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--generate", action="store_true", help="compare generated texts, not scores")
    arguments = parser.parse_args()
    print("| type | verdict | seeds | nats from the truth | relative | nats by later tokens | scored by, or message |")
    print("|---|---|---|---|---|---|---|")
    counts: dict[str, int] = {}
    compare, variants = (generation_verdict_of, []) if arguments.generate else (verdict_of, [*VARIANTS])
    for kind in arguments.types or [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *variants]:
        verdicts = [compare(kind, seed) for seed in range(arguments.seeds)]
        for word in dict.fromkeys(verdict.word for verdict in verdicts):
            members = [verdict for verdict in verdicts if verdict.word == word]
            gap, relative, ahead = (max(getattr(one, name) for one in members) for name in ("gap", "relative", "ahead"))
            ways = "; ".join(dict.fromkeys(verdict.way for verdict in members)).replace("|", "/")
            print(
                f"| {kind} | {word} | {len(members)} | {gap:.1e} | {relative:.1e} | {ahead:.1e} | {ways} |", flush=True
            )
            counts[word] = counts.get(word, 0) + 1
    print("\n" + ", ".join(f"{word}: {count} types" for word, count in counts.items()))
    return 1 if {"WRONG", "REFUSED"} & counts.keys() else 0


def verdict_of(kind: str, seed: int) -> Verdict:
    """Write a checkpoint of a type, and compare evalkit's scores with those of transformers alone."""
    with tempfile.TemporaryDirectory() as name, quiet(), torch.no_grad():
        folder = Path(name)
        try:
            write_checkpoint(kind, seed, folder)
            truth = Truth(folder)
            expected = [truth.scores(tokens) for item in items() for tokens in item.sequences]
            ahead = max(truth.ahead(tokens) for item in items() for tokens in item.sequences)
        except Exception as error:  # of transformers' code
            return Verdict("not built", way=f"{type(error).__name__}: {first_line(error)[:150]}")
        try:
            found = evalkit_scores(folder)
        except EvalkitError as error:
            message = str(error).replace(name, "…")
            return Verdict("refused, true" if ahead > NOT_CAUSAL else "REFUSED", ahead=ahead, way=message)
        except Exception as error:  # a traceback is a defect of evalkit
            return Verdict("WRONG", ahead=ahead, way=f"{type(error).__name__}: {first_line(error)[:150]}")
    gaps = {way: differences(scores, expected) for way, scores in found.items()}
    gap, relative = (max(values) for values in zip(*gaps.values(), strict=True))
    right = gap <= TOLERANCE and relative <= RELATIVE and ahead <= NOT_CAUSAL
    ways = ", ".join(gaps)
    if not right:
        ways = ", ".join(f"{way} ({nats:.1e} nats, {share:.1e})" for way, (nats, share) in gaps.items())
    return Verdict("agrees" if right else "WRONG", gap, ahead, relative, ways)


def differences(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the largest difference of a log-probability, and of a sequence's log-likelihood as a share of it."""
    pairs = list(zip(found, expected, strict=True))
    nats = max(float(np.abs(scores - truth).max()) for scores, truth in pairs)
    sums = [(scores.sum(dtype=np.float64), truth.sum(dtype=np.float64)) for scores, truth in pairs]
    return nats, max(abs(score - truth) / abs(truth) for score, truth in sums)


def generation_verdict_of(kind: str, seed: int) -> Verdict:
    """Write a checkpoint of a type, and compare evalkit's texts in a batch with transformers' own, one by one."""
    with tempfile.TemporaryDirectory() as name, quiet(), torch.no_grad():
        folder = Path(name)
        try:
            write_checkpoint(kind, seed, folder)
            truth = Truth(folder)
            expected = [truth.text(prompt) for prompt in prompts()]
            answers = [truth.answers(prompt) for prompt in prompts()]
        except Exception as error:  # of transformers' code
            return Verdict("not built", way=f"{type(error).__name__}: {first_line(error)[:150]}")
        try:
            generator = Generator(load(locate(str(folder)), device="cpu", dtype="float32").model, chunk=8)
            made = generator.generate(prompts())
        except EvalkitError as error:
            return Verdict("REFUSED", way=str(error).replace(name, "…"))
        except Exception as error:  # a traceback is a defect of evalkit
            return Verdict("WRONG", way=f"{type(error).__name__}: {first_line(error)[:150]}")
    gap = max(float(np.abs(np.array(row.logprobs) - own).max()) for row, own in zip(made, answers, strict=True))
    texts = [row.tokens for row in made]
    word = "WRONG"
    if gap <= TOLERANCE and texts == expected:
        word = "agrees"
    elif gap <= TOLERANCE and texts == [truth.text(prompt, use_cache=False) for prompt in prompts()]:
        word = "agrees with passes"
    return Verdict(word, gap, way=way_of(generator))


def way_of(generator: Generator) -> str:
    """Return how a generator's texts are generated."""
    if generator.storage is None:
        return f"one by one: {generator.without_cache}"
    whole = "" if generator.storage.keywords["chunk"] else ", whole prompts"
    return f"{generator.storage.func.__name__}{whole}"


def prompts() -> list[Prompt]:
    """Return prompts of 1 to 41 tokens, shorter and longer than the windows; the last two begin alike."""
    dice = np.random.default_rng(0)
    start = dice.integers(3, VOCABULARY - 20, 20)
    made = [dice.integers(3, VOCABULARY - 20, length) for length in (37, 5, 1, 23, 9)]
    made += [np.concatenate((start, dice.integers(3, VOCABULARY - 20, length))) for length in (21, 19)]
    answers = tuple(dice.integers(3, VOCABULARY - 20, length) for length in (4, 1))
    stops = Stops(ends=frozenset([2]))
    return [
        Prompt(index, tokens, 12, stops, answers=answers, shared=max(1, len(tokens) - index % 3))
        for index, tokens in enumerate(made)
    ]


def write_checkpoint(kind: str, seed: int, folder: Path) -> None:
    """Write a tiny checkpoint of a type."""
    config_class = CONFIG_MAPPING[kind.partition(":")[0]]
    config = config_class(**tiny_settings(config_class, VARIANTS.get(kind) or TYPES.get(kind, {})))
    with torch.device("meta"):
        parameters = sum(one.numel() for one in AutoModelForCausalLM.from_config(config).parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"{parameters:,} parameters")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    # Vectors that begin as 0 or 1 would hide what they do
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    (folder / "text.txt").write_text(TEXT)
    train_tokenizer([folder / "text.txt"], VOCABULARY, folder)


def tiny_settings(kind: Any, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a config class that make a tiny model, with those of its parts."""
    try:
        names = set(kind().to_dict())
    except Exception:  # some classes have no defaults that are valid
        names = set(kind.__dataclass_fields__)
    settings = {key: value for key, value in SIZES.items() if key in names}
    settings |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    for name, part in parts_of(kind):
        given = own.get(name, {})
        settings[name] = None if given is None else tiny_settings(part, given) | {"model_type": part.model_type}
    return settings | {key: value for key, value in own.items() if key not in dict(parts_of(kind))}


def parts_of(kind: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and classes of a config's parts."""
    parts = {**kind.sub_configs, **getattr(kind, "sub_configs_defaults", {})}
    for name, part in parts.items():
        model_type = getattr(part, "model_type", None)
        found = getattr(part, "config_class", part)
        if found is None or found.__name__ == "AutoConfig":
            found = CONFIG_MAPPING[model_type] if model_type else None
        if found is not None:
            yield name, found


def items() -> list[SequenceSet]:
    """Return sequences of 9 to 200 tokens that share prefixes, shorter and longer than the windows."""
    dice = np.random.default_rng(0)
    made = []
    start = dice.integers(3, VOCABULARY - 20, 7)
    for index, length in enumerate([1, 9, 33, 90, 180, 120, 60]):
        # The last two repeat a few tokens; behind the state of the last one is a single token
        context = np.concatenate((start, dice.integers(3, VOCABULARY - 20 if index < 5 else 9, length)))
        endings = [dice.integers(3, VOCABULARY - 20, size) for size in ((1, 5, 13) if index < 6 else (2, 2))]
        sequences = tuple(np.concatenate((context, ending)).astype(np.int32) for ending in endings)
        scored = tuple(np.arange(len(tokens)) > 0 for tokens in sequences)
        made.append(SequenceSet(f"document {index}", "task", sequences, scored))
    return made


def evalkit_scores(folder: Path) -> dict[str, list[np.ndarray]]:
    """Return the log-probabilities of the tokens of each sequence, by evalkit, in each way that its checks allow."""
    loaded = load(locate(str(folder)), device="cpu", dtype="float32")
    engine = Engine(loaded.model, BUDGET, lambda _: None)
    engine.check(Sequences.of(items()[:2]))
    sequences = Sequences.of(items())
    longest = int(sequences.lengths.max()) - 1
    possible = [way for way in ("state", "rows") if engine._possible(way, longest) == way]
    found: dict[str, list[np.ndarray]] = {}
    for way in dict.fromkeys((engine.way, *possible)):
        by_item: dict[int, list[np.ndarray]] = {}
        for batch in batches_of(sequences, engine.budget):
            for item, members in engine.score(batch, way):
                by_item[item] = [scores.logprobs[1:] for scores in members]
        name = f"tree by {engine.kernel}" if way == "tree" else way
        found[name] = [scores for item in sorted(by_item) for scores in by_item[item]]
    return found


class Truth:
    """A model that transformers has loaded by itself, on whole sequences."""

    def __init__(self, folder: Path) -> None:
        [name] = json.loads((folder / "config.json").read_text())["architectures"]
        self._model = (
            getattr(transformers, name)
            .from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True)
            .eval()
        )

    def scores(self, tokens: Sequence[int]) -> np.ndarray:
        """Return the log-probabilities of the tokens after the first."""
        ids = torch.as_tensor(np.asarray(tokens)).long()
        return self._logs(ids[:-1]).gather(1, ids[1:, None])[:, 0].numpy()

    def ahead(self, tokens: Sequence[int]) -> float:
        """Return the largest change of any log-probability where the sequence ends earlier."""
        ids = torch.as_tensor(np.asarray(tokens)).long()
        whole, cuts = self._logs(ids), {len(ids) - 1, len(ids) // 2 + 1, len(ids) * 3 // 4, len(ids) // 3, 17}
        gaps = [0.0]
        for cut in sorted(cut for cut in cuts if 2 <= cut < len(ids)):
            gap = (self._logs(ids[:cut]) - whole[:cut]).abs()
            gaps.append(float(gap[:, 3 : VOCABULARY - 20].max()))
        return max(gaps)

    def text(self, prompt: Prompt, use_cache: bool = True) -> list[int]:
        """Return the tokens of the model's own greedy text."""
        ids = torch.from_numpy(prompt.tokens)[None]
        ends = sorted(prompt.stops.ends)
        self._model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=0)
        settings = {"max_new_tokens": prompt.max_new_tokens, "do_sample": False, "use_cache": use_cache}
        text = self._model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        return [int(token) for token in text[0, len(prompt.tokens) :]]

    def answers(self, prompt: Prompt) -> list[float]:
        """Return the log-likelihood of each answer."""
        sequences = [np.concatenate((prompt.tokens[: prompt.shared], answer)) for answer in prompt.answers]
        return [float(self.scores(tokens)[prompt.shared - 1 :].sum()) for tokens in sequences]

    def _logs(self, ids: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities, [length, vocabulary]."""
        logits: torch.Tensor = self._model(input_ids=ids[None], use_cache=False).logits[0]
        if logits.shape[0] != len(ids):
            raise ValueError(f"logits of {logits.shape[0]} of {len(ids)} tokens")
        return logits.float().log_softmax(-1)


if __name__ == "__main__":
    sys.exit(main())
