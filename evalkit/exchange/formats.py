"""Files of a finished run in the formats of the Hugging Face hub and of Every Eval Ever.

In: a run, and a rule. Out: `Content`, which does not depend on the format: the tasks' scores, their datasets and the
protocol; and from it file name → text. Caveats of a score that is not of all published documents are in the dataset's
name, and in the note of the hub's newer format, which the hub shows.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import yaml

from evalkit.benchmarks.outcomes import Metric
from evalkit.benchmarks.registry import results_of
from evalkit.data import HubSplit
from evalkit.errors import UsageError
from evalkit.reporting.numbers import NumberFormat, following
from evalkit.runs.folder import Run
from evalkit.runs.traits import caveats, is_imported, origin, traits

SCHEMA_VERSION = "0.3.0"
"""Of Every Eval Ever."""


@dataclass(frozen=True)
class ExportedScore:
    """One task under one rule."""

    metric: Metric
    dataset: HubSplit | None
    """The dataset in which its documents are published, if known."""
    documents: int
    """Number of documents in the task; those that were scored, where a log does not say it."""
    caveats: tuple[str, ...]
    """What makes the score doubtful, such as documents that are not the official ones, or are a part of them."""
    source: str
    """Provenance of the documents."""
    distinct: str = ""
    """Metric and layer, if this is not the task's first metric."""

    @property
    def named(self) -> str:
        """The task's name with its caveats."""
        return f"{self.metric.task} ({'; '.join(self.caveats)})" if self.caveats else self.metric.task

    @property
    def score(self) -> float:
        """The value: from 0 to 1 where it is a share, else in its own unit."""
        return float(self.metric.value or 0.0) / (self.metric.whole or 1.0)

    @property
    def stderr(self) -> float | None:
        """The standard error of the score."""
        return None if self.metric.stderr is None else self.metric.stderr / (self.metric.whole or 1.0)


@dataclass(frozen=True)
class Content:
    """What is exported of a run, in whatever format."""

    run: Run
    rule: str
    scores: tuple[ExportedScore, ...]
    protocol: dict[str, str]
    """Settings that determine the scores, as text: rule, template, examples, limit, dtype, context extension, suite."""

    @property
    def model(self) -> str:
        """The model's name as given: a folder, a file, or a hub name without its revision."""
        model = str(self.run.manifest["model"])
        return model if self.run.manifest.get("path") is not None else model.partition("@")[0]

    @property
    def short_model(self) -> str:
        return self.model.rstrip("/").rsplit("/", 1)[-1]

    @property
    def created(self) -> datetime:
        return datetime.fromisoformat(self.run.manifest["created"])


def content_of(run: Run, rule: str | None) -> Content:
    """Collect what is exported; an `UnknownNameError` if the run was not scored for that rule."""
    results, of_run, documents = results_of(run), traits(run, rule), run.manifest["documents"]
    protocol = {
        **({"rule": of_run["rule"].value} if run.rule else {"benchmark": run.kind}),
        "template": of_run["template"].value,
        **({"num_fewshot": of_run["solved examples"].value} if run.rule else {}),
        "limit": of_run["limit"].words,
        "dtype": of_run["dtype"].value,
        "context_extension": of_run["context extension"].value,
        "suite": run.suite,
        **({"control": control} if (control := run.manifest["specification"].get("control")) else {}),
        **({"origin": origin(run.manifest)} if is_imported(run.manifest) else {}),
    }
    scores: list[ExportedScore] = []
    seen: set[str] = set()
    for metric in results.metrics(rule):
        distinct = metric.name + ("" if metric.layer is None else f"/layer {metric.layer}")
        distinct = distinct if metric.task in seen else ""
        seen.add(metric.task)
        if metric.value is None:
            continue
        total, source = documents[metric.task]["total"] or metric.n, documents[metric.task]["source"]
        part = [f"{metric.n:,} of {total:,} documents"] if metric.n < total else []
        about = (*caveats(run.manifest).get(metric.task, ()), *part)
        scores.append(ExportedScore(metric, results.dataset(metric.task), total, about, source, distinct))
    return Content(run, protocol.get("rule", run.kind), tuple(scores), protocol)


def hub_files(content: Content) -> dict[str, str]:
    """Return both formats of the hub: the metadata of a model card, and a file in the model's repository.

    `model_card.md` has the metadata block (`model-index`) at the start of a model's README.md; the newer format is
    `.eval_results/evalkit.yaml`. Shares are in percent. Averages are omitted, since they have no dataset.

    Raises:
        UsageError: a task has no dataset, which both formats require.
    """
    if "control" in content.protocol:
        raise UsageError("the hub's model cards are for results of tasks, and this run is a control (--control)")
    from huggingface_hub import EvalResult, ModelCardData

    task_name = content.run.kind
    if content.run.rule is not None:
        task_name = "multiple choice" + ", zero-shot" * (content.protocol["num_fewshot"] == "0")
    results, entries = [], []
    for score in content.scores:
        metric, dataset = score.metric, score.dataset
        if dataset is None:
            raise UsageError(
                f"task {metric.task} of run {content.run.folder} has no dataset on the hub, which the format "
                "requires; export it with --to every_eval_ever"
            )
        results.append(
            EvalResult(
                task_type="text-generation",
                task_name=task_name,
                dataset_type=dataset.path,
                dataset_name=score.named,
                dataset_config=dataset.config,
                dataset_split=dataset.split,
                metric_type=metric.name,
                metric_name=f"{metric.name} ({content.rule})",
                metric_value=_shown(score, score.score),
                metric_args=content.protocol | {"n": metric.n, "stderr": score.stderr and _shown(score, score.stderr)},
            )
        )
        notes = "".join(f"{caveat}; " for caveat in score.caveats)
        error = following(NumberFormat(4, metric.whole).spread(metric.stderr))
        how = ", ".join(f"{key} {value}" for key, value in content.protocol.items())
        unit = " in %" if metric.whole else ""
        entries.append(
            {
                "dataset": {"id": dataset.path, "task_id": metric.task},
                "value": _shown(score, score.score),
                "date": content.created.isoformat(),
                "notes": f"{notes}evalkit: {metric.name}{unit}{error}, n {metric.n}, {how}",
            }
        )
    # The hub requires the repository's name; a folder's or a file's name replaces it until upload
    card = ModelCardData(model_name=content.short_model, eval_results=results).to_yaml().strip()
    return {
        "model_card.md": f"---\n{card}\n---\n",
        ".eval_results/evalkit.yaml": yaml.safe_dump(entries, sort_keys=False, allow_unicode=True),
    }


def _shown(score: ExportedScore, value: float) -> float:
    return round(100 * value if score.metric.whole else value, 4)


def every_eval_ever_files(content: Content) -> dict[str, str]:
    """Return one document of the schema; its UUID follows from run and rule: the same export is the same file."""
    digest = hashlib.sha256(f"{content.run.manifest['id']} {content.rule}".encode()).digest()
    name = uuid.UUID(bytes=digest[:16], version=4)
    return {f"{name}.json": json.dumps(_document(content), indent=2, ensure_ascii=False) + "\n"}


def _document(content: Content) -> dict[str, Any]:
    manifest = content.run.manifest
    versions, stamp, loaded = manifest["versions"], str(content.created.timestamp()), manifest.get("loaded", {})
    details = {
        "deployment_type": "self_deployed",
        "model_availability": "unknown",
        "weights_sha256": manifest["specification"]["checkpoint"].get("weights"),
        "revision": manifest["revision"],
        "dtype": content.protocol["dtype"],
        "parameters": loaded.get("parameters"),
        "architecture": loaded.get("architecture"),
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "evaluation_id": f"{content.protocol['suite']}/{content.model}/{stamp}",
        "evaluation_timestamp": content.created.isoformat(),
        "retrieved_timestamp": stamp,
        "source_metadata": {
            "source_name": "evalkit",
            "source_type": "evaluation_run",
            "source_organization_name": "not stated",
            "evaluator_relationship": "other",
        },
        "eval_library": {
            "name": "evalkit",
            "version": versions["evalkit"],
            "additional_details": {"run": manifest["id"], "lm-eval": versions["lm-eval"]},
        },
        "model_info": {
            "name": content.short_model,
            "id": content.model,
            "inference_engine": {"name": "transformers", "version": versions["transformers"]},
            "additional_details": {key: str(value) for key, value in details.items() if value is not None},
        },
        "evaluation_results": [_result(content, score) for score in content.scores],
    }


def _result(content: Content, score: ExportedScore) -> dict[str, Any]:
    metric = score.metric
    uncertainty: dict[str, Any] = {"num_samples": metric.n}
    if score.stderr is not None:
        uncertainty["standard_error"] = {"value": score.stderr, "method": "analytic"}
    least, most = (0, 1) if metric.whole else metric.bounds or (None, None)
    bounds = {} if most is None else {"score_type": "continuous", "min_score": least, "max_score": most}
    return {
        "evaluation_result_id": "/".join(filter(None, (metric.task, content.rule, score.distinct))),
        "evaluation_name": metric.task,
        "source_data": _source(score),
        "evaluation_timestamp": content.created.isoformat(),
        "metric_config": {
            "evaluation_description": _description(content, metric),
            "metric_id": metric.name,
            "metric_name": f"{metric.name} ({content.rule})",
            "metric_kind": metric.name,
            **({"metric_unit": "proportion"} if metric.whole else {}),
            "metric_parameters": {"rule": content.rule} | ({} if metric.layer is None else {"layer": metric.layer}),
            "lower_is_better": metric.higher_is_better is False,
            **bounds,
        },
        "score_details": {
            "score": score.score,
            **({} if metric.chance is None else {"details": {"chance": str(metric.chance)}}),
            "uncertainty": uncertainty,
        },
        "generation_config": {"additional_details": content.protocol},
    }


def _description(content: Content, metric: Metric) -> str:
    if content.run.rule is None:
        where = "" if metric.layer is None else f" in layer {metric.layer}"
        neither = f"; {metric.scale.direction}" * (metric.higher_is_better is None)
        return f"mean {metric.name} over documents{where}{neither}"
    if content.run.manifest["specification"].get("prompts"):
        return f"{metric.name} by {content.rule}, mean over documents"
    return f"share of questions whose right answer has the best score under {content.rule}"


def _source(score: ExportedScore) -> dict[str, Any]:
    """Return the published dataset; unofficial documents have no repository."""
    official = {True: "yes", False: "no", None: "none are published"}[score.metric.official]
    details = {"obtained_from": score.source, "official_documents": official}
    if not score.metric.official or score.dataset is None:
        counted = {"samples_number": str(score.documents)}
        return {"dataset_name": score.named, "source_type": "other", "additional_details": details | counted}
    config = {"config": score.dataset.config} if score.dataset.config else {}
    return {
        "dataset_name": score.named,
        "source_type": "hf_dataset",
        "hf_repo": score.dataset.path,
        "hf_split": score.dataset.split,
        "samples_number": score.documents,
        "additional_details": details | config,
    }
