"""Read context settings from flags and a YAML file, and plan the extension of a checkpoint.

In: the values of `--context`, `--context-method`, `--context-original` and `--context-config`. Out: the
`ContextSettings`, and for a checkpoint its `Extension`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from evalkit.display import Say
from evalkit.errors import CheckpointError, UnknownNameError, UsageError
from evalkit.inputs import values
from evalkit.inputs.validated import FileSettings, Number, read_settings
from evalkit.models.context import YARN, ContextSettings, Extension, plan_extension
from evalkit.models.locate import Checkpoint, read_config, silent
from evalkit.paths import resource

UNSTRETCHED: Literal["none"] = "none"
"""Value of `--context` that disables context extension."""


class _ContextFile(FileSettings):
    """Keys of a file in `configs/context` or of a user's file; None counts as absent."""

    context: Annotated[int, Field(ge=1)] | None = None
    original: Annotated[int, Field(ge=1)] | None = None
    method: str | None = None
    factor: Number | None = None
    beta_fast: Number | None = None
    beta_slow: Number | None = None
    attention_factor: Number | None = None


def context_names() -> list[str]:
    """Return the names of the context files shipped with evalkit."""
    return sorted(path.stem for path in resource("configs", "context").glob("*.yaml"))


def context_settings(
    context: int | Literal["none"] | None = None,
    method: str | None = None,
    original: int | None = None,
    config: str | Path | None = None,
    default: int | None = None,
) -> ContextSettings | None:
    """Merge flags and a file into settings; return None if the context is not to be extended.

    Args:
        context: context window to extend to, in tokens, or "none": no extension, even if a file asks for one.
        method: one of `context.METHODS`; None: the file's, else "yarn".
        original: context window of training, in tokens; None: the file's, else the checkpoint's.
        config: a name in `configs/context`, or a YAML file of the same form. The other arguments take precedence.
        default: the context if neither flag nor file gives one; None: the model's own.

    Raises:
        UsageError: the file does not exist or has the wrong form, no context is given, or another flag is combined
            with the context "none".
    """
    if context == UNSTRETCHED:
        if flag := "--context-method" if method is not None else "--context-original" if original is not None else "":
            raise UsageError(f"--context none leaves the model as it is; leave out {flag}, or give a number of tokens")
        return None
    given: dict[str, Any] = {
        "context": None if context is None else values.whole("--context", context, 1, ", or none"),
        "method": method,
        "original": None if original is None else values.whole("--context-original", original, 1),
    }
    found = {} if config is None else _read(str(config))
    found |= {name: value for name, value in given.items() if value is not None}
    target = found.pop("context", default)
    if not found and target is None:
        return None
    if target is None:
        raise UsageError("the context to extend to is not given; give --context, e.g. --context 8192")
    return ContextSettings(target=target, **({"method": YARN} | found))


def extension_of(checkpoint: Checkpoint, settings: ContextSettings | None, say: Say = silent) -> Extension | None:
    """Plan the extension of a checkpoint from its config.

    Raises:
        UsageError, CheckpointError: see `plan_extension`; a GGUF file cannot be dequantised, so its config is unknown.
    """
    if settings is None:
        return None
    try:
        return plan_extension(config_of(checkpoint, say), settings, say)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.given}: {error}") from error


def config_of(checkpoint: Checkpoint, say: Say) -> dict[str, Any]:
    """Return a checkpoint's parsed config.json; of a GGUF file, that of its dequantised copy."""
    if checkpoint.gguf is None:
        return checkpoint.config()
    from evalkit.models.gguf import dequantised

    folder = dequantised(checkpoint.gguf, say)
    if folder is None:
        raise CheckpointError(
            "the context of a GGUF file can be stretched only if the cache folder has room for its dequantised copy"
        )
    return read_config(folder)


def _read(name: str) -> dict[str, Any]:
    path = values.path("--context-config", name).expanduser()
    if path.suffix not in (".yaml", ".yml"):
        if name not in context_names():
            raise UnknownNameError("context file", name, context_names())
        path = resource("configs", "context", f"{name}.yaml")
    content = read_settings(path, _ContextFile, UsageError, "context file")
    return {key: value for key, value in content if value is not None}
