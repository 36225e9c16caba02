"""Export to the Hugging Face hub's evaluation results, in both of its formats.

`model_card.md` has the metadata block (`model-index`) at the start of a model's README.md; `.eval_results/evalkit.yaml`
is the newer format, a file in the model's repository. Shares are in percent. Averages are omitted, since they have no
dataset. Caveats of a score that is not of all published documents are in the dataset's name of the first format and in
the note of the second, which the hub shows.
"""

from __future__ import annotations

from typing import Any

import yaml

from evalkit.data import HubSplit
from evalkit.errors import UsageError
from evalkit.exchange.content import Content, ExportedScore


def files(content: Content) -> dict[str, str]:
    """Return file name → text."""
    return {
        "model_card.md": f"---\n{_model_index(content)}\n---\n",
        ".eval_results/evalkit.yaml": yaml.safe_dump(
            [_entry(content, *one) for one in _published(content)], sort_keys=False, allow_unicode=True
        ),
    }


def _model_index(content: Content) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    results = [
        EvalResult(
            task_type="text-generation",
            task_name=_task_name(content),
            dataset_type=dataset.path,
            dataset_name=score.named,
            dataset_config=dataset.config,
            dataset_split=dataset.split,
            metric_type=score.metric.name,
            metric_name=f"{score.metric.name} ({content.rule})",
            metric_value=_shown(score, score.score),
            metric_args=content.protocol
            | {"n": score.metric.n, "stderr": score.stderr and _shown(score, score.stderr)},
        )
        for score, dataset in _published(content)
    ]
    # The hub requires the repository's name; a folder's or a file's name replaces it until upload
    name = content.model.rstrip("/").rsplit("/", 1)[-1]
    return ModelCardData(model_name=name, eval_results=results).to_yaml().strip()


def _published(content: Content) -> list[tuple[ExportedScore, HubSplit]]:
    """Return the scores with their datasets; the hub's formats require one for each score."""
    for score in content.scores:
        if score.dataset is None:
            raise UsageError(
                f"task {score.metric.task} of run {content.run.folder} has no dataset on the hub, which the format "
                "requires; export it with --to every_eval_ever"
            )
    return [(score, score.dataset) for score in content.scores if score.dataset is not None]


def _task_name(content: Content) -> str:
    if content.run.rule is None:
        return content.run.kind
    return "multiple choice, zero-shot" if content.protocol["num_fewshot"] == "0" else "multiple choice"


def _entry(content: Content, score: ExportedScore, dataset: HubSplit) -> dict[str, Any]:
    how = ", ".join(f"{key} {value}" for key, value in content.protocol.items())
    caveats = "".join(f"{caveat}; " for caveat in score.caveats)
    error = "" if score.stderr is None else f" ± {_shown(score, score.stderr)}"
    unit = " in %" if score.metric.whole else ""
    return {
        "dataset": {"id": dataset.path, "task_id": score.metric.task},
        "value": _shown(score, score.score),
        "date": content.created.isoformat(),
        "notes": f"{caveats}evalkit: {score.metric.name}{unit}{error}, n {score.metric.n}, {how}",
    }


def _shown(score: ExportedScore, value: float) -> float:
    return round(100 * value if score.metric.whole else value, 4)
