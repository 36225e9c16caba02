"""Model specification: which model, how it is loaded, and how its context is extended.

In: the options of commands and functions that take a checkpoint. Out: a `ModelSpec`, which locates and loads it, and
the `ContextSettings` and `Extension` of `--context…`. torch is imported only for loading.
"""

from __future__ import annotations

import re
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from evalkit.display import Say, doing, imports
from evalkit.errors import CheckpointError, UnknownNameError, UsageError, check_known
from evalkit.inputs import values
from evalkit.inputs.settings import check_names, fitted, setting
from evalkit.inputs.validated import read_settings
from evalkit.inputs.values import name_or_path
from evalkit.models.context.extension import METHODS, ContextSettings, Extension, context_window, plan_extension
from evalkit.models.loading.locate import DTYPES, QUANTISATION, Checkpoint, locate, silent
from evalkit.paths import resource

if TYPE_CHECKING:
    from evalkit.models.loading.load import LoadedModel


_DEVICE = re.compile(r"auto|(cpu|mps)(:0)?|cuda(:\d{1,3})?")
UNSTRETCHED: Literal["none"] = "none"
"""Value of `--context` that disables context extension."""


@dataclass(frozen=True)
class ModelSpec:
    """A model and the settings to load it with; created by `model_spec`."""

    model: str
    """A checkpoint folder, a hub name, a GGUF file, or "demo"."""
    revision: str | None = setting(None, "Branch, tag or commit of a hub model.")
    tokenizer: str | None = setting(None, "Another folder or hub name to take the tokenizer from.", names="folder")
    device: str = setting("auto", "auto, cpu, cuda, cuda:1, …")
    device_map: Literal["none", "auto"] = setting(
        "none",
        "For a model larger than one GPU: auto spreads its layers over all GPUs and the CPU's memory.",
        metavar="none|auto",
    )
    dtype: str = setting("auto", "auto (the checkpoint's own), float32, bfloat16 or float16.")
    attention: Literal["auto", "sdpa", "eager"] = setting("auto", "auto, sdpa or eager.", metavar="TEXT")
    quantise: str | None = setting(
        None,
        "Simulated rounding of linear layers: weights to 2 to 8 bits (w8, in groups w4g64), activations to 8 bits (a8 "
        "by token, a8t by tensor), or both (w8a8).",
        "none",
    )
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
        return f"{self.model}@{self.revision}" if self.revision else self.model

    def locate(self, say: Say = silent) -> Checkpoint:
        trust = {"allow_pickle": self.allow_pickle, "trust_remote_code": self.trust_remote_code}
        checkpoint = locate(self.named, tokenizer=self.tokenizer, say=say, **trust)
        if any(name.startswith("transformers.models.") for name in [*sys.modules]):  # not in commands
            from evalkit.models.loading.checks import check_unchanged

            check_unchanged(checkpoint)
        return checkpoint

    def extension(self, checkpoint: Checkpoint, say: Say = silent) -> Extension | None:
        settings = context_settings(self.context, self.context_method, self.context_original, self.context_config)
        return extension_of(checkpoint, settings, say)

    def check_device(self) -> None:
        """Raise a `UsageError` if this machine does not have the device."""
        if self.device in ("auto", "cpu"):
            return
        with doing("looking for the device", slow=imports("torch")):
            from evalkit.models.parts import resolve_device

            resolve_device(self.device)

    def load(self, checkpoint: Checkpoint, say: Say) -> LoadedModel:
        with doing(f"loading {self.named}", slow=imports("torch")):
            from evalkit.models.loading.load import load

            return load(
                checkpoint,
                device=self.device,
                spread_over_gpus=self.device_map == "auto",
                dtype=self.dtype,
                attention=self.attention,
                extension=self.extension(checkpoint),
                quantise=self.quantise,
                say=say,
            )


def model_spec(model: str | Path, **options: Any) -> ModelSpec:
    """Build a `ModelSpec` from its fields; paths and numbers may be given as strings, None is the default."""
    check_names(options, ModelSpec)
    spec = ModelSpec(name_or_path("--model", model), **fitted(ModelSpec, options))
    check_known("dtype", [spec.dtype], ("auto", *DTYPES))
    if spec.context_method not in (None, *METHODS):
        raise UnknownNameError("context method", spec.context_method, METHODS)
    # Whether this machine has the device is checked when a model is needed: finished runs are read anywhere
    if not _DEVICE.fullmatch(spec.device):
        raise UsageError(f"--device {spec.device}: not a device; expected auto, cpu, cuda, cuda:N or mps")
    if spec.device_map == "auto" and spec.device != "auto":
        raise UsageError(f"--device {spec.device} and --device-map auto both choose the device; leave one of them out")
    if spec.quantise is not None and not QUANTISATION.fullmatch(spec.quantise):
        forms = "weights (w2 to w8, in groups w4g64), activations (a8 by token, a8t by tensor), or both (w8a8)"
        raise UsageError(f"--quantise {spec.quantise}: expected {forms}")
    return spec


def context_settings(
    context: int | Literal["none"] | None = None,
    method: str | None = None,
    original: int | None = None,
    config: str | Path | None = None,
    default: int | None = None,
) -> ContextSettings:
    """Merge flags and a file into settings.

    `context` (the window to extend to; "none": no extension, whatever a file asks for) and `original` (the window of
    training) are in tokens. `config`, a name in `configs/context` or a YAML file, is overridden by the other arguments.
    `default` is the context if neither flag nor file gives one.
    """
    if context == UNSTRETCHED:
        if flag := "--context-method" if method is not None else "--context-original" if original is not None else "":
            raise UsageError(f"--context none leaves the model as it is; leave out {flag}, or give a number of tokens")
        return ContextSettings()
    flags = {
        "context": None if context is None else values.whole("--context", context, 1, ", or none"),
        "method": method,
        "original": None if original is None else values.whole("--context-original", original, 1),
    }
    settings = ContextSettings()
    if config is not None:
        path = values.path("--context-config", str(config)).expanduser()
        if path.suffix not in (".yaml", ".yml"):
            shipped = {path.stem: path for path in resource("configs", "context").glob("*.yaml")}
            if str(config) not in shipped:
                raise UnknownNameError("context file", str(config), shipped)
            path = shipped[str(config)]
        settings = read_settings(path, ContextSettings, UsageError, "context file")
    settings = settings.model_copy(update={name: value for name, value in flags.items() if value is not None})
    if settings.context is None and default is None and settings != ContextSettings():
        raise UsageError("the context to extend to is not given; give --context, e.g. --context 8192")
    return settings.model_copy(update={"context": settings.context or default})


def extension_of(checkpoint: Checkpoint, settings: ContextSettings, say: Say = silent) -> Extension | None:
    """Plan the extension of a checkpoint from its config; raises as `plan_extension` and `config_of`."""
    if settings.context is None:
        return None
    try:
        return plan_extension(config_of(checkpoint, say), settings, say)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.given}: {error}") from error


def config_of(checkpoint: Checkpoint, say: Say) -> dict[str, Any]:
    """Return a checkpoint's parsed config.json; of a GGUF file, that of its dequantised copy."""
    with _as_folder(checkpoint, say) as files:
        return files.config()


def window_of(model: ModelSpec, checkpoint: Checkpoint, tokenizer: Any, say: Say) -> int:
    """Return the context window that a model would be loaded with, in tokens."""
    if (extension := model.extension(checkpoint)) is not None:
        return extension.target
    return context_window(checkpoint.given, config_of(checkpoint, say), tokenizer, silent)


def tokenizer_alone(checkpoint: Checkpoint, say: Say) -> Any:
    """Load the tokenizer of a checkpoint without its weights; of a GGUF file, that of its dequantised copy."""
    from evalkit.models.loading.tokenizer import load_tokenizer

    with _as_folder(checkpoint, say) as files:
        config, folder = files.config(), files.tokenizer or files.folder
        rows = int((config.get("text_config") or config).get("vocab_size") or 1 << 31)
        return load_tokenizer(folder, rows, trust_remote_code=checkpoint.trust_remote_code, say=say)


def _as_folder(checkpoint: Checkpoint, say: Say) -> AbstractContextManager[Checkpoint]:
    if checkpoint.gguf is None:
        return nullcontext(checkpoint)
    from evalkit.models.loading.gguf import dequantised

    return dequantised(checkpoint, say)
