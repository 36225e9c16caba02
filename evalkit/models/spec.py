"""Model specification: which model, and how it is loaded.

In: the options of commands and functions that take a checkpoint. Out: a `ModelSpec`, which locates and loads it. torch
is imported only for loading.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from evalkit.display import Say, doing, imports
from evalkit.errors import UnknownNameError, UsageError
from evalkit.inputs.settings import check_names, fitted, setting
from evalkit.inputs.values import name_or_path
from evalkit.models.context import Extension
from evalkit.models.context_settings import UNSTRETCHED, context_settings, extension_of
from evalkit.models.locate import ATTENTION, Checkpoint, locate, silent
from evalkit.models.parts import check_device_map

if TYPE_CHECKING:
    from evalkit.models.load import LoadedModel


NONE, AUTO = "none", "auto"


_DEVICE = re.compile(r"auto|(cpu|mps)(:0)?|cuda(:\d{1,3})?")


@dataclass(frozen=True)
class ModelSpec:
    """A model and the settings to load it with; created by `model_spec`."""

    model: str
    """A checkpoint folder, a hub name, a GGUF file, or "demo"."""
    revision: str | None = setting(None, "Branch, tag or commit of a hub model.")
    tokenizer: str | None = setting(None, "Another folder or hub name to take the tokenizer from.", names="folder")
    device: str = setting("auto", "auto, cpu, cuda, cuda:1, …")
    device_map: str = setting(
        NONE,
        "For a model larger than one GPU: auto spreads its layers over all GPUs and the CPU's memory.",
        metavar="none|auto|DEVICE=LAYERS,…",
    )
    dtype: str = setting("auto", "auto (the checkpoint's own), float32, bfloat16 or float16.")
    attention: str = setting("auto", "auto, sdpa or eager.")
    context: int | Literal["none"] | None = setting(
        None,
        "Context window in tokens, extended by scaling rotary positions; none: no extension.",
        "the trained context window",
        metavar="TOKENS",
        word=UNSTRETCHED,
    )
    context_method: str | None = setting(None, "yarn, dynamic-yarn, linear, ntk, or none.", "yarn")
    context_original: int | None = setting(None, "Context window of its training.", "the checkpoint's")
    context_config: str | None = setting(
        None, "A name in configs/context, or a YAML file, with these and YaRN's parameters.", names="file"
    )
    allow_pickle: bool = setting(False, "Read pickled weights; they can run code.")
    trust_remote_code: bool = setting(False, "Let the checkpoint's own Python files run.")

    @property
    def named(self) -> str:
        """Return the model's name with the requested revision."""
        return f"{self.model}@{self.revision}" if self.revision else self.model

    def locate(self, say: Say = silent) -> Checkpoint:
        """Find the checkpoint. Raises `CheckpointError`, see `models.locate.locate`."""
        return locate(
            self.named,
            tokenizer=self.tokenizer,
            allow_pickle=self.allow_pickle,
            trust_remote_code=self.trust_remote_code,
            say=say,
        )

    def extension(self, checkpoint: Checkpoint, say: Say = silent) -> Extension | None:
        """Plan the context extension of the checkpoint; return None if there is none.

        Raises:
            UsageError, CheckpointError: the context cannot be extended.
        """
        settings = context_settings(self.context, self.context_method, self.context_original, self.context_config)
        return extension_of(checkpoint, settings, say)

    def load(self, checkpoint: Checkpoint, say: Say) -> LoadedModel:
        """Load model and tokenizer of a checkpoint from `locate`. Raises as `models.load.load`."""
        with doing(f"loading {self.named}", slow=imports("torch")):
            from evalkit.models.load import load

            return load(
                checkpoint,
                device=self.device,
                device_map=self.device_map,
                dtype=self.dtype,
                attention=self.attention,
                extension=self.extension(checkpoint),
                say=say,
            )


def model_spec(model: str | Path, **options: Any) -> ModelSpec:
    """Build a `ModelSpec` from keyword arguments; paths and numbers may be given as strings.

    Args:
        model: see `ModelSpec`.
        **options: the other fields of `ModelSpec`; None: the default.

    Raises:
        UsageError: an option does not exist, or its value is invalid.
    """
    check_names(options, ModelSpec)
    spec = ModelSpec(name_or_path("--model", model), **fitted(ModelSpec, options))
    # Whether this machine has the device is checked when the model is loaded
    if not _DEVICE.fullmatch(spec.device):
        raise UsageError(f"--device {spec.device}: not a device; expected auto, cpu, cuda, cuda:N or mps")
    check_device_map(spec.device, spec.device_map)
    if spec.attention not in ATTENTION:
        raise UnknownNameError("attention implementation", spec.attention, ATTENTION)
    return spec
