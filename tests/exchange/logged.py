"""Logs that lm-eval itself writes, for imports."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from evalkit.data import Library
from evalkit.paths import resource


def lm_eval_log(
    checkpoint: Path, folder: Path, tasks: tuple[str, ...], limit: int | None = None, **manager: Any
) -> list[Path]:
    """Evaluate tasks with lm-eval's own model class and logger; return its sample files.

    `manager` are arguments of lm-eval's `TaskManager`: by default evalkit's task files.
    """
    from lm_eval import simple_evaluate
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager

    logger = EvaluationTracker(output_path=str(folder))
    found = simple_evaluate(
        "hf",
        model_args={"pretrained": str(checkpoint), "dtype": "float32"},
        tasks=list(tasks),
        task_manager=TaskManager(include_defaults=False, **manager),
        limit=limit,
        bootstrap_iters=2,
        log_samples=True,
        evaluation_tracker=logger,
        device="cpu",
        batch_size=8,
    )
    samples = found.pop("samples")
    logger.save_results_aggregated(results=found, samples=samples)
    for task, members in samples.items():
        logger.save_results_samples(task_name=task, samples=members)
    return sorted(folder.rglob("samples_*.jsonl"))


def own_tasks(library: Library) -> dict[str, Any]:
    """Arguments of a `TaskManager` with evalkit's task files and a library's documents."""
    return {"include_path": str(resource("tasks")), "metadata": {"library": library}}


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a sample file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def rewrite(path: Path, content: list[dict[str, Any]]) -> None:
    """Write the lines of a sample file."""
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in content), encoding="utf-8")


def rehash(line: dict[str, Any]) -> None:
    """Write lm-eval's hashes of a line's document, prompt and target anew."""
    texts = {
        "doc_hash": json.dumps(line["doc"], indent=2, ensure_ascii=False),
        "prompt_hash": line["arguments"]["gen_args_0"]["arg_0"],
        "target_hash": line["target"],
    }
    line |= {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
