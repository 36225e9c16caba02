"""lm-eval task files with small documents, for `--include-path`: one of each supported kind."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tiny import TRAINING_TEXT

WORDS = " ".join(TRAINING_TEXT[:8]).replace("?", "").split()

CHOICE = {
    "task": "made_choice",
    "output_type": "multiple_choice",
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_target": "{{gold}}",
    "doc_to_choice": "{{choices}}",
    "metric_list": [
        {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
        {"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True},
    ],
    "metadata": {"version": 1.0},
}
LAST_WORD = {
    "task": "made_last_word",
    "output_type": "loglikelihood",
    "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
    "doc_to_target": "{{' '+text.split(' ')[-1]}}",
    "metric_list": [
        {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
        {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
    ],
}
TEXTS = {
    "task": "made_texts",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [
        {"metric": name, "aggregation": aggregation, "higher_is_better": False}
        for name, aggregation in (
            ("word_perplexity", "weighted_perplexity"),
            ("byte_perplexity", "weighted_perplexity"),
            ("bits_per_byte", "bits_per_byte"),
        )
    ],
}
ANSWERS = {
    "task": "made_answers",
    "output_type": "generate_until",
    "doc_to_text": "{{text}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False, "temperature": 0.0},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    "filter_list": [
        {"name": "whole", "filter": [{"function": "take_first"}]},
        {"name": "word", "filter": [{"function": "regex", "regex_pattern": r"(\w+)"}, {"function": "take_first"}]},
    ],
}
ALL = ("made_pair", "made_last_word", "made_texts", "made_answers", "made_shots")
"""Names that lead to every task of `made_tasks`."""


def made_tasks(folder: Path, count: int = 6) -> Path:
    """Write a folder with a task of each kind, a few-shot task with a separate split, and a group of two tasks."""
    dice = random.Random(3)
    choices = [_choice(dice) for _ in range(count)]
    last_words = [{"text": _words(dice, 9)} for _ in range(count)]
    texts = [{"text": _words(dice, 400 if place == 0 else 30)} for place in range(count)]
    answers = [{"text": f"{_words(dice, 6)}\n", "answer": _words(dice, 1)} for _ in range(count)]
    write_task(folder, CHOICE, choices)
    write_task(folder, CHOICE | {"task": "made_other"}, [_choice(dice) for _ in range(count + 3)])
    write_task(folder, LAST_WORD, last_words)
    write_task(folder, TEXTS, texts)
    write_task(folder, ANSWERS, answers)
    # A split that is not scored
    examples = folder / "examples.jsonl"
    examples.write_text("".join(json.dumps(_choice(dice)) + "\n" for _ in range(5)), encoding="utf-8")
    shots = CHOICE | {"task": "made_shots", "num_fewshot": 2, "fewshot_split": "examples"}
    write_task(folder, shots, choices, examples=examples)
    group = {
        "group": "made_pair",
        "task": ["made_choice", "made_other"],
        "aggregate_metric_list": [{"metric": "acc", "aggregation": "mean", "weight_by_size": True}],
    }
    (folder / "made_pair.yaml").write_text(yaml.safe_dump(group), encoding="utf-8")
    return folder


def write_task(folder: Path, config: dict[str, Any], documents: list[dict[str, Any]], **splits: Path) -> Path:
    """Write a task file and its documents, as the split `test`."""
    folder.mkdir(parents=True, exist_ok=True)
    name = config["task"]
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(doc, ensure_ascii=False) + "\n" for doc in documents), encoding="utf-8")
    files = {"test": str(data), **{split: str(path) for split, path in splits.items()}}
    content = {"dataset_path": "json", "dataset_kwargs": {"data_files": files}, "test_split": "test", **config}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def _choice(dice: random.Random) -> dict[str, Any]:
    choices = [_words(dice, 4) for _ in range(dice.randint(2, 4))]
    return {"question": _words(dice, 10), "choices": choices, "gold": dice.randrange(len(choices))}


def _words(dice: random.Random, most: int) -> str:
    return " ".join(dice.choices(WORDS, k=dice.randint(max(1, most // 2), most)))


def same_metrics(found: dict[str, Any], expected: dict[str, Any], rel: float = 1e-3) -> None:
    """Check lm-eval's results of the same tasks: names and counts exactly, metrics within rounding."""
    assert found.keys() == expected.keys()
    for task, metrics in expected.items():
        assert found[task].keys() == metrics.keys(), task
        for name, value in metrics.items():
            close = pytest.approx(value, rel=rel) if isinstance(value, float) else value
            assert found[task][name] == close, (task, name)
