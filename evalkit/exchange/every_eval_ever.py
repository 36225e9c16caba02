"""Export to the Every Eval Ever schema, version 0.3.0: one JSON document for each run, shares as fractions.

The file name is derived from the run and the rule, so that the same export is the same file.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from typing import Any

from evalkit.exchange.content import Content, ExportedScore

SCHEMA_VERSION = "0.3.0"


def files(content: Content) -> dict[str, str]:
    """Return file name → text; the name is a UUID of version 4, as the collection requires."""
    digest = hashlib.sha256(f"{content.run.manifest['id']} {content.rule}".encode()).digest()
    name = uuid.UUID(bytes=digest[:16], version=4)
    return {f"{name}.json": json.dumps(document(content), indent=2, ensure_ascii=False) + "\n"}


def document(content: Content) -> dict[str, Any]:
    """Return the run as a document of the schema; every value under additional_details is a string."""
    manifest = content.run.manifest
    versions, stamp = manifest["versions"], str(content.created.timestamp())
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
        "model_info": _model(content),
        "evaluation_results": [_result(content, score) for score in content.scores],
    }


def _model(content: Content) -> dict[str, Any]:
    manifest = content.run.manifest
    loaded = manifest.get("loaded", {})
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
        "name": content.model.rstrip("/").rsplit("/", 1)[-1],
        "id": content.model,
        "inference_engine": {"name": "transformers", "version": manifest["versions"]["transformers"]},
        "additional_details": {key: str(value) for key, value in details.items() if value is not None},
    }


def _result(content: Content, score: ExportedScore) -> dict[str, Any]:
    metric = score.metric
    uncertainty: dict[str, Any] = {"num_samples": metric.n}
    if score.stderr is not None:
        uncertainty["standard_error"] = {"value": score.stderr, "method": "analytic"}
    unit = {"metric_unit": "proportion"} if metric.whole else {}
    least, most = (0, 1) if metric.whole else metric.bounds or (None, None)
    bounds = {} if most is None else {"score_type": "continuous", "min_score": least, "max_score": most}
    about = {"rule": content.rule} | ({} if metric.layer is None else {"layer": metric.layer})
    return {
        "evaluation_result_id": "/".join(filter(None, (metric.task, content.rule, score.distinct))),
        "evaluation_name": metric.task,
        "source_data": _source(score),
        "evaluation_timestamp": content.created.isoformat(),
        "metric_config": {
            "evaluation_description": _description(content, score),
            "metric_id": metric.name,
            "metric_name": f"{metric.name} ({content.rule})",
            "metric_kind": metric.name,
            **unit,
            "metric_parameters": about,
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


def _description(content: Content, score: ExportedScore) -> str:
    if content.run.rule is None:
        where = "" if score.metric.layer is None else f" in layer {score.metric.layer}"
        neither = "; neither higher nor lower is better" * (score.metric.higher_is_better is None)
        return f"mean {score.metric.name} over documents{where}{neither}"
    if content.run.manifest["specification"].get("prompts"):
        return f"{score.metric.name} by {content.rule}, mean over documents"
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
