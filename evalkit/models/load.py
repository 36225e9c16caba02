"""A checkpoint's files become a model that scores: causal, whole, in the dtype and on the device asked for.

In: a `Checkpoint`. Out: a `LoadedModel`. Whatever would make the numbers wrong without a word (weights that
are missing or of another shape, a tokenizer that does not fit) is an error here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalkit.errors import CheckpointError, UnknownNameError, UsageError, first_line
from evalkit.escape import printable
from evalkit.models.checks import check_causal, check_report, check_trust, check_weights, natively_known
from evalkit.models.context import WINDOW_KEYS, Extension, configured_window
from evalkit.models.context_settings import config_of
from evalkit.models.locate import ATTENTION, Checkpoint, Say, resolve_dtype, silent

_FALLBACK_WINDOW = 2048
_SANE_WINDOW = 1_000_000
"""A tokenizer without a limit reports 10³⁰; anything past this is not a window."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to score, and what a run has to know about it."""

    model: Any
    """The transformers model: evaluation mode, no gradients."""
    tokenizer: Any
    """The transformers tokenizer, with character offsets."""
    name: str
    """Short name for tables."""
    architecture: str
    """Name of the model's class."""
    parameters: int
    """Number of parameters; tied ones count once."""
    dtype: str
    """What the weights are in: "float32", "bfloat16" or "float16"."""
    device: str
    """Where the weights are, e.g. "cpu" or "cuda"."""
    window: int
    """Context window in tokens."""
    bos_id: int | None
    """Id of the begin token; None if the tokenizer has none."""
    eos_id: int | None
    """Id of the end token; None if the tokenizer has none."""
    attention: str
    """Attention implementation: "sdpa" or "eager"."""
    extension: Extension | None = None
    """How its context was stretched, if it was; `window` is then the stretched one."""

    def describe(self) -> str:
        """Two lines for the terminal, and a third if the context is stretched."""
        stretched = "" if self.extension is None else f"\n{self.extension.describe()}"
        return (
            f"{printable(self.name)}: {self.architecture}, {_scaled(self.parameters)} parameters, "
            f"{self.dtype} on {self.device}, {self.attention} attention\n"
            f"context window {self.window:,} tokens, "
            f"BOS {self._token(self.bos_id)}, EOS {self._token(self.eos_id)}{stretched}"
        )

    def facts(self) -> dict[str, Any]:
        """The same for a run's manifest."""
        names = ("architecture", "parameters", "dtype", "device", "window", "bos_id", "eos_id", "attention")
        extension = None if self.extension is None else self.extension.specification()
        return {name: getattr(self, name) for name in names} | {"context_extension": extension}

    def _token(self, token_id: int | None) -> str:
        if token_id is None:
            return "none"
        return f"{printable(self.tokenizer.convert_ids_to_tokens(token_id))} ({token_id})"


def load(
    checkpoint: Checkpoint,
    *,
    device: str = "auto",
    dtype: str = "auto",
    attention: str = "auto",
    extension: Extension | None = None,
    say: Say = silent,
) -> LoadedModel:
    """Load model and tokenizer of a checkpoint.

    Args:
        checkpoint: from `locate`, which also says where the tokenizer is and what is trusted.
        device: "auto" (a CUDA device if there is one, else the processor) or a torch device.
        dtype: "auto" (the checkpoint's own), "float32", "bfloat16" or "float16".
        attention: "auto", "sdpa" or "eager".
        extension: of the context, from `context_settings.extension_of`; None to leave it as it is.
        say: told what the user should know but need not mend.

    Raises:
        UsageError: a device, dtype or attention that does not exist.
        CheckpointError: the checkpoint is not a whole causal language model with a fitting tokenizer, or its context
            cannot be stretched.
    """
    if attention not in ATTENTION:
        raise UnknownNameError("attention implementation", attention, ATTENTION)
    wanted = resolve_dtype(checkpoint, dtype)
    config = checkpoint.config()
    if checkpoint.gguf is None:
        check_weights(checkpoint)
        check_trust(checkpoint, config)
        check_causal(checkpoint, config)
    place = resolve_device(device)
    folder, options = _source(checkpoint, config, say)
    stretched = None
    if extension is not None and not _only_told(checkpoint, extension, say):
        from evalkit.models.stretch import finish, stretched_config

        remote = bool(options.get("trust_remote_code"))
        stretched = stretched_config(checkpoint.given, folder, extension, trust_remote_code=remote)
        options["config"] = stretched.config
    model = _move(checkpoint, _load_model(checkpoint, folder, wanted, attention, options, say), place)
    if stretched is not None:
        finish(checkpoint.given, model, stretched)
    tokenizer = _tokenizer_of(checkpoint, folder, model, say)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=checkpoint.name,
        architecture=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        dtype=wanted,
        device=place,
        window=extension.target if extension is not None else context_window(model.config, tokenizer, say),
        bos_id=tokenizer.bos_token_id,
        eos_id=tokenizer.eos_token_id,
        attention=str(model.config._attn_implementation),
        extension=extension,
    )


def resolve_device(device: str) -> str:
    """The torch device that a flag's value stands for.

    Raises:
        UsageError: not a device, or one that this machine lacks.
    """
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind, index = torch.device(device).type, torch.device(device).index
    except RuntimeError as error:
        raise UsageError(f"--device {device}: not a device; expected auto, cpu, cuda, cuda:N or mps") from error
    count = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if kind not in count:
        raise UsageError(f"--device {device}: expected auto, cpu, cuda, cuda:N or mps")
    if (index or 0) >= count[kind]:
        raise UsageError(f"--device {device}: this machine has {count[kind] or 'no'} {kind} device(s) for torch")
    return device


def _only_told(checkpoint: Checkpoint, extension: Extension, say: Say) -> bool:
    """Whether an extension only tells the window of a model whose config tells nothing of positions (ALiBi, Mamba)."""
    if extension.target > extension.original:
        return False
    config = config_of(checkpoint, say)
    return configured_window(config)[1] is None and not config.get("rope_parameters") and not config.get("rope_scaling")


def context_window(config: Any, tokenizer: Any, say: Say) -> int:
    """Tokens that the model takes at once: from its configuration, else the tokenizer, else 2048.

    Args:
        config: the model's transformers configuration.
        tokenizer: asked for `model_max_length` if the configuration is silent.
        say: told when neither knows.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for key in WINDOW_KEYS:
        value = getattr(text, key, None)
        if isinstance(value, int) and value > 0:
            return value
    if 0 < tokenizer.model_max_length < _SANE_WINDOW:
        return int(tokenizer.model_max_length)
    say(f"neither config.json nor the tokenizer tells the context window; {_FALLBACK_WINDOW} is assumed")
    return _FALLBACK_WINDOW


def _source(checkpoint: Checkpoint, config: dict[str, Any], say: Say) -> tuple[Path, dict[str, Any]]:
    """The folder to load from, and what `from_pretrained` must be told about it."""
    if checkpoint.gguf is None:
        pickled = checkpoint.weights()[0].suffix != ".safetensors"
        # Code that transformers has itself is preferred to the checkpoint's, trusted or not.
        remote = checkpoint.trust_remote_code and not natively_known(config)
        return checkpoint.folder, {"use_safetensors": not pickled, "trust_remote_code": remote}
    from evalkit.models.gguf import dequantised, reading_options

    folder = dequantised(checkpoint.gguf, say)
    if folder is not None:
        return folder, {"use_safetensors": True}
    return checkpoint.folder, reading_options(checkpoint.gguf)


def _load_model(
    checkpoint: Checkpoint, folder: Path, dtype: str, attention: str, options: dict[str, Any], say: Say
) -> Any:
    import torch

    from evalkit.models.quiet import quiet

    with quiet():
        from transformers import AutoModelForCausalLM

        def read(implementation: str) -> Any:
            return AutoModelForCausalLM.from_pretrained(
                str(folder),
                dtype=getattr(torch, dtype),
                attn_implementation=implementation,
                local_files_only=True,
                ignore_mismatched_sizes=True,  # else only the first is told, and not which
                output_loading_info=True,
                **options,
            )

        try:
            try:
                model, report = read("sdpa" if attention == "auto" else attention)
            except ValueError as error:
                # What transformers says, at length, of an architecture without that implementation
                if "scaled_dot_product_attention" not in str(error):
                    raise
                if attention != "auto":
                    raise CheckpointError(
                        f"{checkpoint.given}: its architecture has no {attention} attention; use --attention eager"
                    ) from error
                model, report = read("eager")
        except CheckpointError:
            raise
        except Exception as error:  # transformers raises what its parts raise; the checkpoint is the cause
            raise CheckpointError(f"{checkpoint.given}: cannot be loaded ({first_line(error)})") from error
    check_report(checkpoint, report, say)
    return model.eval().requires_grad_(False)


def _tokenizer_of(checkpoint: Checkpoint, folder: Path, model: Any, say: Say) -> Any:
    from evalkit.models.tokenizer import load_tokenizer

    rows = int(model.get_input_embeddings().weight.shape[0])
    # A GGUF file whose dequantised copy could not be kept is its own tokenizer file.
    inside = checkpoint.gguf if folder == checkpoint.folder and checkpoint.tokenizer is None else None
    return load_tokenizer(
        checkpoint.tokenizer or folder,
        rows,
        gguf=inside.name if inside is not None else None,
        trust_remote_code=checkpoint.trust_remote_code,
        say=say,
    )


def _move(checkpoint: Checkpoint, model: Any, device: str) -> Any:
    import torch

    try:
        return model.to(device)
    except torch.OutOfMemoryError as error:
        raise CheckpointError(f"{checkpoint.given}: does not fit into the memory of {device}") from error


def _scaled(count: int) -> str:
    """A count as 134.5M, 1.20B."""
    for size, letter, digits in ((10**9, "B", 2), (10**6, "M", 1), (10**3, "K", 1)):
        if count >= size:
            return f"{count / size:.{digits}f}{letter}"
    return str(count)
