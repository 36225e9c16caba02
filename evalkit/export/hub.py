"""The Hugging Face hub's evaluation results, in both of its forms.

`model_card.md` has the metadata block (`model-index`) that a model's README.md begins with;
`.eval_results/evalkit.yaml` is the newer form, a file in the model's repository. Values are percent. Averages are left
out: they are of no data set. What is no score of the published documents, all of them, says so in the data set's name
of the first and in the note of the second, which are what the hub shows.
"""

from __future__ import annotations

from typing import Any

import yaml

from evalkit.export.content import Content, TaskScore


def files(content: Content) -> dict[str, str]:
    """File name → text."""
    return {
        "model_card.md": f"---\n{_model_index(content)}\n---\n",
        ".eval_results/evalkit.yaml": yaml.safe_dump(
            [_entry(content, score) for score in content.scores], sort_keys=False, allow_unicode=True
        ),
    }


def _model_index(content: Content) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    results = [
        EvalResult(
            task_type="text-generation",
            task_name="multiple choice, zero-shot" if content.protocol["num_fewshot"] == "0" else "multiple choice",
            dataset_type=score.dataset.path,
            dataset_name=score.named,
            dataset_config=score.dataset.config,
            dataset_split=score.dataset.split,
            metric_type="accuracy",
            metric_name=f"accuracy ({content.rule})",
            metric_value=_percent(score.accuracy),
            metric_args=content.protocol | {"n": score.n, "stderr": score.stderr and _percent(score.stderr)},
        )
        for score in content.scores
    ]
    # The hub wants the repository's own name here; a folder's or a file's is what there is until then
    name = content.model.rstrip("/").rsplit("/", 1)[-1]
    return ModelCardData(model_name=name, eval_results=results).to_yaml().strip()


def _entry(content: Content, score: TaskScore) -> dict[str, Any]:
    how = ", ".join(f"{key} {value}" for key, value in content.protocol.items())
    caveats = "".join(f"{caveat}; " for caveat in score.caveats)
    error = "" if score.stderr is None else f" ± {_percent(score.stderr)}"
    return {
        "dataset": {"id": score.dataset.path, "task_id": score.task},
        "value": _percent(score.accuracy),
        "date": content.created.isoformat(),
        "notes": f"{caveats}evalkit: accuracy in %{error}, n {score.n}, {how}",
    }


def _percent(fraction: float) -> float:
    return round(100 * fraction, 4)
