"""What runs that generate have in common without torch: the model's context, their manifest, what to say of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evalkit.benchmarks.request import Request, circumstances
from evalkit.errors import UsageError
from evalkit.models.context import MOST_TOKENS, Extension, configured_window, refuse_generation
from evalkit.models.context_settings import config_of
from evalkit.models.files import generation_settings
from evalkit.models.locate import Checkpoint, silent
from evalkit.models.spec import ModelSpec
from evalkit.runs.batch_devices import mixture
from evalkit.runs.finding import run_folder
from evalkit.runs.folder import Run, specification_id
from evalkit.runs.traits import max_prompt_tokens


class GeneratedPlan:
    """What plans have in common of runs whose texts are generated."""

    request: Request
    checkpoint: Checkpoint
    manifest: dict[str, Any]

    @property
    def folder(self) -> Path:
        """The run's folder, whether it exists yet or not."""
        suite, template = self.manifest["specification"]["suite"], self.manifest["template"]["name"]
        return run_folder(self.request.output, self.checkpoint, suite, template, self.manifest)


def context_of(model: ModelSpec, checkpoint: Checkpoint, what: str) -> int:
    """Tokens that the model takes at once while it generates: the stretched window, or the checkpoint's own.

    Args:
        what: the command that generates, for the message.

    Raises:
        UsageError: its window is unknown, or stretched in a way that cannot generate.
    """
    extension = model.extension(checkpoint)
    if extension is not None:
        refuse_generation(extension, what)
        return extension.target
    _, window = configured_window(config_of(checkpoint, silent))
    if window is None:
        raise UsageError(
            f"{checkpoint.given}: its config tells no context window; give --context with --context-original"
        )
    if window > MOST_TOKENS:
        raise UsageError(
            f"{checkpoint.given}: its config tells a context window of {window:,} tokens, past the {MOST_TOKENS:,} "
            "that float32 tells apart; give the real one as --context and --context-original"
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
    """The manifest of a run whose texts are generated.

    Args:
        kind: the benchmark, which stands for a rule too.
        context: tokens that the model takes at once, see `context_of`.
        specification: all that determines the texts, but for the chat template and the device.
        chat: whether prompts go into the chat template.
        documents: of each task the source, whether it is official, and how many.
    """
    # The device too: a last bit may change a text
    specification = {**specification, "chat": chat, "device": model.device, "end": _named_ends(checkpoint)}
    return {
        "id": specification_id(specification),
        "kind": kind,
        "specification": specification,
        "rule": kind,
        "groups": {},
        "group_sizes": {},
        "template": {"name": "chat" if chat else "plain"},
        "documents": documents,
        "context": context,
        **circumstances(model, checkpoint),
    }


def about_run(run: Run) -> tuple[str, ...]:
    """What the reader of a run's results should know of it, in lines: checkpoint, precision, prompts, context."""
    manifest, specification = run.manifest, run.manifest["specification"]
    parts = [str(manifest["model"]), specification["dtype"], f"{run.template} prompts"]
    if (most := max_prompt_tokens(specification)) is not None:
        parts.append(f"cut above {most:,} tokens of a context of {manifest['context']:,}")
    extension = specification["context_extension"]
    return (", ".join(parts), *([Extension(**extension).describe()] if extension else []), *mixture(manifest))


def _named_ends(checkpoint: Checkpoint) -> Any:
    """What a checkpoint's generation config says that ends a text; of a GGUF file, whose content counts, nothing."""
    settings = None if checkpoint.gguf is not None else generation_settings(checkpoint.folder)
    return (settings or {}).get("eos_token_id")
