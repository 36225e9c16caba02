"""Model specification: which model, and how it is loaded.

In: the options of commands and functions that take a checkpoint. Out: a `ModelSpec`, which locates and loads it. torch
is imported only for loading.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from evalkit.display import Say, doing, imports
from evalkit.errors import UnknownNameError, UsageError
from evalkit.inputs.values import WORD, check_field_names, fitted, name_or_path
from evalkit.models.context import Extension
from evalkit.models.context_settings import UNSTRETCHED, context_settings, extension_of
from evalkit.models.locate import ATTENTION, Checkpoint, locate, silent

if TYPE_CHECKING:
    from evalkit.models.load import LoadedModel


NONE, AUTO = "none", "auto"
"""Values of `--device-map`."""
_DEVICE = re.compile(r"auto|(cpu|mps)(:0)?|cuda(:\d{1,3})?")


@dataclass(frozen=True)
class ModelSpec:
    """A model and the settings to load it with; created by `model_spec`."""

    model: str
    """A checkpoint folder, a hub name, a GGUF file, or "demo"."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    tokenizer: str | None = None
    """Folder or hub name of a tokenizer that replaces the model's own."""
    device: str = "auto"
    """"auto" (CUDA if available, else the CPU), "cpu", "cuda", "cuda:1", …"""
    device_map: str = NONE
    """"none" (one device) or "auto" (spread over all GPUs, the rest in the CPU's memory, if the first is too small)."""
    dtype: str = "auto"
    """"auto" (the checkpoint's own), "float32", "bfloat16" or "float16"."""
    attention: str = "auto"
    """"auto", "sdpa" or "eager"."""
    context: int | Literal["none"] | None = field(default=None, metadata={WORD: UNSTRETCHED})
    """Context window to extend to, in tokens; "none": the window of training; None: the same, except that LongBench
    extends shorter windows to the paper's 8,192."""
    context_method: str | None = None
    """Extension method: "yarn" (None), "dynamic-yarn", "linear", "ntk" or "none"."""
    context_original: int | None = None
    """Context window of training, in tokens; None: the checkpoint's."""
    context_config: str | None = None
    """YAML file with these and further context settings, or the name of one in `configs/context`."""
    allow_pickle: bool = False
    """Whether pickled weights are read, which can run code."""
    trust_remote_code: bool = False
    """Whether the checkpoint's own Python files may run."""

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
                spread_over_gpus=self.device_map == AUTO,
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
    check_field_names(options, ModelSpec)
    spec = ModelSpec(name_or_path("--model", model), **fitted(ModelSpec, options))
    # Whether this machine has the device is checked when the model is loaded
    if not _DEVICE.fullmatch(spec.device):
        raise UsageError(f"--device {spec.device}: not a device; expected auto, cpu, cuda, cuda:N or mps")
    if spec.device_map not in (NONE, AUTO):
        raise UsageError(f"--device-map {spec.device_map}: expected none or auto")
    if spec.device_map == AUTO and spec.device != "auto":
        raise UsageError(f"--device {spec.device} and --device-map auto both choose the device; leave one of them out")
    if spec.attention not in ATTENTION:
        raise UnknownNameError("attention implementation", spec.attention, ATTENTION)
    return spec
