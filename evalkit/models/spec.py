"""Which model, and how it is loaded: what is asked of whatever takes a checkpoint. No torch before it is loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from evalkit.activity import doing, imports
from evalkit.errors import UnknownNameError, UsageError
from evalkit.inputs.fields import WORD, check_field_names, fitted
from evalkit.inputs.values import name_or_path
from evalkit.models.context import Extension
from evalkit.models.context_settings import UNSTRETCHED, context_settings, extension_of
from evalkit.models.locate import ATTENTION, Checkpoint, Say, locate, silent

if TYPE_CHECKING:
    from evalkit.models.load import LoadedModel

_DEVICE = re.compile(r"auto|(cpu|mps)(:0)?|cuda(:\d{1,3})?")


@dataclass(frozen=True)
class ModelSpec:
    """A model, as a user names it and wants it loaded; see `model_spec`."""

    model: str
    """A checkpoint folder, a hub name, a GGUF file, or "demo"."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    tokenizer: str | None = None
    """Another folder or hub name to take the tokenizer from."""
    device: str = "auto"
    """"auto" (a CUDA device if there is one, else the processor), "cpu", "cuda", "cuda:1", …"""
    dtype: str = "auto"
    """"auto" (the checkpoint's own), "float32", "bfloat16" or "float16"."""
    attention: str = "auto"
    """"auto", "sdpa" or "eager"."""
    context: int | Literal["none"] | None = field(default=None, metadata={WORD: UNSTRETCHED})
    """Tokens that the model is to take at once, by stretching its context; "none": as many as it was trained on; None:
    the same, but for LongBench the paper's 8,192 where it was trained on fewer."""
    context_method: str | None = None
    """How: "yarn" (None), "dynamic-yarn", "linear", "ntk" or "none"."""
    context_original: int | None = None
    """Tokens of the window that it was trained on; None: what the checkpoint says."""
    context_config: str | None = None
    """All of this and more in a YAML file, or the name of one in `configs/context`."""
    allow_pickle: bool = False
    """Whether pickled weights are read, which can run code."""
    trust_remote_code: bool = False
    """Whether the checkpoint's own Python files may run."""

    @property
    def named(self) -> str:
        """The checkpoint with the revision that is asked for."""
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
        """How the context of the checkpoint is stretched, if it is.

        Raises:
            UsageError, CheckpointError: it cannot be.
        """
        settings = context_settings(self.context, self.context_method, self.context_original, self.context_config)
        return extension_of(checkpoint, settings, say)

    def load(self, checkpoint: Checkpoint, say: Say) -> LoadedModel:
        """Load model and tokenizer of the checkpoint that `locate` has found. Raises as `models.load.load` does."""
        with doing(f"loading {self.named}", slow=imports("torch")):
            from evalkit.models.load import load

            return load(
                checkpoint,
                device=self.device,
                dtype=self.dtype,
                attention=self.attention,
                extension=self.extension(checkpoint),
                say=say,
            )


def model_spec(model: str | Path, **options: Any) -> ModelSpec:
    """A model from keyword arguments, with paths and numbers in the forms in which people write them.

    Args:
        model: see `ModelSpec`.
        **options: its other fields; None stands for the default.

    Raises:
        UsageError: an option that does not exist, or a value that it cannot have.
    """
    check_field_names(options, ModelSpec)
    spec = ModelSpec(name_or_path("--model", model), **fitted(ModelSpec, options))
    # Whether this machine has the device is known when the model is loaded
    if not _DEVICE.fullmatch(spec.device):
        raise UsageError(f"--device {spec.device}: not a device; expected auto, cpu, cuda, cuda:N or mps")
    if spec.attention not in ATTENTION:
        raise UnknownNameError("attention implementation", spec.attention, ATTENTION)
    return spec
