"""Speed of three generators on the same token ids in one process: evalkit's, `generate`, `generate_batch`.

    python benchmarks/generators.py --longbench ROWS --documents DOCUMENTS --rounds 2
    python benchmarks/generators.py --states mamba falcon_h1 qwen3_next --rounds 3    # 10 minutes on a core

Long prompts are the first row of some LongBench tasks; short ones are questions of ARC-Easy after four examples, in
lm-eval's format. All use float32, greedy decoding, the same maximum of new tokens and the same stopping criteria, which
transformers' `generate` applies to each row; its batches are padded on the left.
`generate_batch` (continuous batching) takes end tokens only: its output is truncated at a stop. Each round runs the
generators in the opposite order. Prints Markdown: prompts, seconds of each round, and the number of
prompts with equal tokens.

With `--states`, models of these types with random weights generate in evalkit's batches and one by one, by CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from evalkit.data.sampling import FirstDocuments
from evalkit.generation.generator import Generator
from evalkit.generation.prompts import Prompt, Stops, capacity_of, end_tokens
from evalkit.longcontext.longbench.data import load_rows
from evalkit.longcontext.longbench.official import generation_requests
from evalkit.longcontext.longbench.protocol import find_task
from evalkit.models.loading.load import LoadedModel, load
from evalkit.models.loading.locate import locate

TASKS = "qasper,multifieldqa_en,hotpotqa,trec,triviaqa,passage_count,lcc"
Way = Callable[[Sequence[Prompt]], list[list[int]]]


def main() -> None:
    """Time every generator on every kind of prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--longbench", type=Path, help="folder of LongBench's files")
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--max-prompt-tokens", type=int, default=3500)
    parser.add_argument("--documents", type=Path, help="folder with arc_easy.jsonl")
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=16, help="maximum of new tokens of the questions")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--continuous", action="store_true", help="also measure generate_batch, which needs most memory"
    )
    parser.add_argument("--states", nargs="+", default=[], help="model types of which random models are made")
    options = parser.parse_args()
    if options.states:
        compare_states(options.states, options.rounds)
        return
    loaded = load(locate(options.model), dtype="float32")
    ways: dict[str, Way] = {
        "evalkit": evalkit(loaded),
        "generate, 1": by_generate(loaded, 1),
        "generate, 8": by_generate(loaded, 8),
    }
    if options.continuous:
        ways["generate_batch"] = by_generate_batch(loaded)
    print(f"{torch.get_num_threads()} threads\n")
    print("| prompts | tokens | new | " + " | ".join(f"{name}, s" for name in ways) + " | alike |")
    print("|---" * (len(ways) + 4) + "|", flush=True)
    if options.longbench:
        long = rows_of(loaded, options.longbench, options.tasks.split(","), options.max_prompt_tokens)
        compare(f"{len(long)} rows, window {options.max_prompt_tokens:,}", long, ways, options.rounds)
    if options.documents:
        for shots in (0, 4):
            short = questions_of(loaded, options.documents, shots, options.questions, options.new_tokens)
            compare(f"{len(short)} questions, {shots} examples", short, ways, options.rounds)


def compare_states(kinds: Sequence[str], rounds: int) -> None:
    """Time batches and single prompts of random models, in turn."""
    print("| model | prompts | batches, s | one by one, s | alike |\n|---|---|---|---|---|", flush=True)
    for kind in kinds:
        model = state_model(kind)
        batched, single = Generator(model), Generator(model)
        single.storage = None
        dice = np.random.default_rng(0)
        start = dice.integers(3, 2000, 1024)
        short = [dice.integers(3, 2000, size) for size in dice.integers(40, 240, 16)]
        sets = {"16 of 40 to 240 tokens, 32 new": (short, 32)}
        sets["8 that share 1,024 tokens, 8 new"] = ([np.concatenate([start, ids]) for ids in short[:8]], 8)
        for name, (many, most) in sets.items():
            prompts = [Prompt(number, ids, most) for number, ids in enumerate(many)]
            seconds: dict[Generator, list[float]] = {batched: [], single: []}
            texts: dict[Generator, list[list[int]]] = {}
            for number in range(rounds):
                for generator in [batched, single][:: 1 if number % 2 == 0 else -1]:
                    started = time.process_time()
                    texts[generator] = [one.tokens for one in generator.generate(prompts)]
                    seconds[generator].append(time.process_time() - started)
            alike = sum(a == b for a, b in zip(*texts.values(), strict=True))
            times = [", ".join(f"{one:.2f}" for one in seconds[generator]) for generator in seconds]
            print(
                f"| {kind}, {model.num_parameters() / 1e6:.0f} M | {name} | {' | '.join(times)} | {alike} |", flush=True
            )


def state_model(kind: str) -> Any:
    """Return a model of eight layers of 256 channels with random weights."""
    sizes: dict[str, Any] = {"vocab_size": 2048, "hidden_size": 256, "num_hidden_layers": 8, "state_size": 16}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    sizes |= {"mamba_d_ssm": 512, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 64}
    sizes |= {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 64}
    sizes |= {"linear_value_head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    sizes |= {"shared_expert_intermediate_size": 256}
    kind_of = CONFIG_MAPPING[kind]
    torch.manual_seed(0)
    known = {key: value for key, value in sizes.items() if key in kind_of().to_dict()}
    return AutoModelForCausalLM.from_config(kind_of(**known)).eval()


def rows_of(loaded: LoadedModel, folder: Path, tasks: Sequence[str], window: int) -> list[Prompt]:
    """Return the first row of each task."""
    ends = end_tokens(loaded.model, loaded.tokenizer)
    found = []
    for task in map(find_task, tasks):
        rows = load_rows(task, folder, FirstDocuments(1)).documents
        found += [one.prompt for one in generation_requests(task, rows, loaded.tokenizer, ends, window, loaded.window)]
    return [replace(prompt, index=number) for number, prompt in enumerate(found)]


def questions_of(loaded: LoadedModel, folder: Path, shots: int, count: int, most: int) -> list[Prompt]:
    """Return the first questions of ARC-Easy after solved examples from its end; a newline stops the generation."""
    lines = (folder / "arc_easy.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]

    def asked(row: dict[str, Any], answered: bool) -> str:
        choices = row["choices"]
        answer = f" {choices['text'][choices['label'].index(row['answerKey'])]}\n\n" if answered else ""
        return f"Question: {row['question']}\nAnswer:{answer}"

    head = "".join(asked(row, True) for row in rows[len(rows) - shots :])
    stops = Stops(end_tokens(loaded.model, loaded.tokenizer), pattern="\n")
    return [
        Prompt(number, np.array(loaded.tokenizer(head + asked(row, False)).input_ids), most, stops)
        for number, row in enumerate(rows[:count])
    ]


def compare(name: str, prompts: Sequence[Prompt], ways: dict[str, Way], rounds: int) -> None:
    """Run all generators in turn and print a line."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    found: dict[str, list[list[int]]] = {}
    for number in range(rounds):
        for way in list(ways)[:: 1 if number % 2 == 0 else -1]:
            started = time.perf_counter()
            found[way] = ways[way](prompts)
            seconds[way].append(time.perf_counter() - started)
    ours = found["evalkit"]
    times = [", ".join(f"{one:.1f}" for one in seconds[way]) for way in ways]
    alike = [str(sum(a == b for a, b in zip(ours, found[way], strict=True))) for way in ways]
    sizes = (f"{sum(len(prompt.tokens) for prompt in prompts):,}", f"{sum(map(len, ours)):,}")
    print(f"| {' | '.join((name, *sizes, *times, ', '.join(alike)))} |", flush=True)


def evalkit(loaded: LoadedModel) -> Way:
    """Generate by evalkit, in its own batches."""
    generator = Generator(loaded.model, tokenizer=loaded.tokenizer)

    def run(prompts: Sequence[Prompt]) -> list[list[int]]:
        capacity = capacity_of(generator, None, loaded.window)
        made = {
            prompt.index: one.tokens
            for batch in capacity.batches(prompts)
            for prompt, one in zip(batch, generator.generate(batch), strict=True)
        }
        return [made[prompt.index] for prompt in prompts]

    return run


def by_generate(loaded: LoadedModel, size: int) -> Way:
    """Generate by transformers' `generate`, in batches of a size."""

    def run(prompts: Sequence[Prompt]) -> list[list[int]]:
        made: dict[int, list[int]] = {}
        order = sorted(prompts, key=lambda prompt: -len(prompt.tokens))
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            longest = len(batch[0].tokens)
            ids, mask = (torch.zeros(len(batch), longest, dtype=torch.long) for _ in range(2))
            for place, prompt in enumerate(batch):
                ids[place, longest - len(prompt.tokens) :] = torch.from_numpy(prompt.tokens)
                mask[place, longest - len(prompt.tokens) :] = 1
            with torch.inference_mode():
                out = loaded.model.generate(
                    ids,
                    attention_mask=mask,
                    max_new_tokens=max(prompt.max_new_tokens for prompt in batch),
                    do_sample=False,
                    pad_token_id=0,
                    eos_token_id=sorted(set().union(*(prompt.stops.ends for prompt in batch))),
                    stopping_criteria=[_Complete(loaded, batch, longest)],
                )
            made |= {p.index: cut(loaded, p, row[longest:].tolist()) for p, row in zip(batch, out, strict=True)}
        return [made[prompt.index] for prompt in prompts]

    return run


class _Complete(StoppingCriteria):  # type: ignore[misc]
    """Stopping criterion: rows whose scored text is complete."""

    def __init__(self, loaded: LoadedModel, prompts: Sequence[Prompt], start: int) -> None:
        self._loaded, self._prompts, self._start = loaded, prompts, start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        """Return [rows] booleans."""
        new = input_ids[:, self._start :].tolist()
        pairs = zip(self._prompts, new, strict=True)
        return torch.tensor([is_complete(self._loaded, prompt, row) for prompt, row in pairs])


def by_generate_batch(loaded: LoadedModel) -> Way:
    """Generate by transformers' continuous batching."""

    def run(prompts: Sequence[Prompt]) -> list[list[int]]:
        config = GenerationConfig(
            max_new_tokens=max(prompt.max_new_tokens for prompt in prompts),
            do_sample=False,
            pad_token_id=0,
            eos_token_id=sorted(set().union(*(prompt.stops.ends for prompt in prompts))),
        )
        ids = [prompt.tokens.tolist() for prompt in prompts]
        out = loaded.model.generate_batch(ids, generation_config=config, progress_bar=False)
        return [cut(loaded, p, made.generated_tokens) for p, made in zip(prompts, out.values(), strict=True)]

    return run


def cut(loaded: LoadedModel, prompt: Prompt, tokens: Sequence[int]) -> list[int]:
    """Return the tokens up to the prompt's stop."""
    for length in range(1, min(len(tokens), prompt.max_new_tokens) + 1):
        kept = list(tokens[:length])
        if kept[-1] in prompt.stops.ends or is_complete(loaded, prompt, kept):
            return kept
    return list(tokens[: prompt.max_new_tokens])


def is_complete(loaded: LoadedModel, prompt: Prompt, tokens: Sequence[int]) -> bool:
    """Return whether the scored part of a text is complete."""
    if len(tokens) >= prompt.max_new_tokens:
        return True
    pattern = prompt.stops.pattern
    return bool(pattern and re.search(pattern, loaded.tokenizer.decode(tokens, skip_special_tokens=True)))


if __name__ == "__main__":
    main()
