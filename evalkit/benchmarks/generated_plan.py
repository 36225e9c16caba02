"""Plans of benchmarks with generated answers: context window, manifest and report notes. No torch.

In: a `ModelSpec`, its checkpoint and the settings. Out: the run folder, the manifest, and lines about a finished run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evalkit.benchmarks.request import Request, plain_manifest
from evalkit.errors import UsageError
from evalkit.models.context import MOST_TOKENS, Extension, configured_window, refuse_generation
from evalkit.models.files import generation_settings
from evalkit.models.locate import Checkpoint, silent
from evalkit.models.spec import ModelSpec, config_of
from evalkit.runs.batch_devices import mixture
from evalkit.runs.finding import run_folder
from evalkit.runs.folder import Run
from evalkit.runs.traits import max_prompt_tokens


class GeneratedPlan:
    """Base class of the plans of benchmarks with generated answers."""

    request: Request
    checkpoint: Checkpoint
    manifest: dict[str, Any]

    @property
    def folder(self) -> Path:
        """The run folder, which may not exist yet."""
        suite, template = self.manifest["specification"]["suite"], self.manifest["template"]["name"]
        return run_folder(self.request.output, self.checkpoint, suite, template, self.manifest)


def context_of(model: ModelSpec, checkpoint: Checkpoint, what: str) -> int:
    """Return the context window for generation by a command, in tokens: the extended one, or the checkpoint's own.

    Raises:
        UsageError: the window is unknown or implausible, or its extension does not support generation.
    """
    extension = model.extension(checkpoint)
    if extension is not None:
        refuse_generation(extension, what)
        return extension.target
    _, window = configured_window(config_of(checkpoint, silent))
    if window is None:
        raise UsageError(
            f"{checkpoint.given}: its config has no context window; give --context with --context-original"
        )
    if window > MOST_TOKENS:
        raise UsageError(
            f"{checkpoint.given}: its config has a context window of {window:,} tokens, above the {MOST_TOKENS:,} "
            "positions that float32 can distinguish; give the real one as --context and --context-original"
        )
    return window


def generated_manifest(
    kind: str,
    model: ModelSpec,
    checkpoint: Checkpoint,
    context: int,
    specification: Mapping[str, Any],
    chat: bool,
    documents: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the manifest of a run with generated answers, whose rule is the kind of benchmark.

    Args:
        kind: the benchmark.
        model: the model and how it is loaded.
        checkpoint: its checkpoint.
        context: see `context_of`.
        specification: everything that determines the texts, except the chat template, the device and the end tokens.
        chat: whether prompts go into the chat template.
        documents: task → source, whether it is official, and number of documents.
    """
    # The device is included, since rounding differences may change a text
    specification = {**specification, "chat": chat, "device": model.device, "end": _end_tokens(checkpoint)}
    template = {"name": "chat" if chat else "plain"}
    about = {"template": template, "documents": documents, "context": context}
    return plain_manifest(kind, model, checkpoint, specification, **about)


def about_run(run: Run) -> tuple[str, ...]:
    """Return the notes below a run's results: checkpoint, precision, prompts and context."""
    manifest, specification = run.manifest, run.manifest["specification"]
    parts = [str(manifest["model"]), specification["dtype"], f"{run.template} prompts"]
    if (most := max_prompt_tokens(specification)) is not None:
        parts.append(f"cut above {most:,} tokens of a context of {manifest['context']:,}")
    extension = specification["context_extension"]
    return (", ".join(parts), *([Extension(**extension).describe()] if extension else []), *mixture(manifest))


def _end_tokens(checkpoint: Checkpoint) -> Any:
    """Return the end tokens of a checkpoint's generation config; None for GGUF files, whose content is hashed."""
    settings = None if checkpoint.gguf is not None else generation_settings(checkpoint.folder)
    return (settings or {}).get("eos_token_id")
