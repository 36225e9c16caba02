"""Load a checkpoint's files as a causal language model, with the requested dtype and device.

In: a `Checkpoint`. Out: a `LoadedModel`. Everything that would silently make scores wrong (missing weights or wrong
shapes, a tokenizer that does not fit) is an error here.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evalkit.compatibility.transformers import attention_of
from evalkit.display import Say
from evalkit.errors import CheckpointError, reading_as
from evalkit.escape import brief, printable
from evalkit.models.context.extension import Extension, configured_window, context_window
from evalkit.models.loading.checks import (
    check_numbers,
    check_report,
    check_stored,
    check_supported,
    natively_known,
    warn_of_name,
)
from evalkit.models.loading.files import generation_settings, quantization
from evalkit.models.loading.fingerprint import Fingerprint, combine, hash_file
from evalkit.models.loading.locate import DTYPES, Checkpoint, resolve_dtype, silent
from evalkit.models.loading.tokenizer import REMARKS
from evalkit.models.zoo.shapes import shape_facts

if TYPE_CHECKING:
    from evalkit.models.memory import Placement

_FACTS = ("architecture", "parameters", "dtype", "device", "window", "bos_id", "eos_id", "attention")


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for scoring, with the facts that a run needs."""

    model: Any
    tokenizer: Any
    name: str
    architecture: str
    parameters: int
    dtype: str
    device: str
    """Of the weights: "cpu", "cuda"; "cuda:0+cuda:1" of a model that is spread over both."""
    window: int
    bos_id: int | None
    eos_id: int | None
    attention: str
    extension: Extension | None = None
    fingerprint: Fingerprint | None = None
    """Of the bytes that it was loaded from; None if it was not created by `load`."""
    generation: Mapping[str, Any] | None = None
    """The checkpoint's generation_config.json, if any; None for a GGUF file, whose fingerprint covers it."""
    placement: Placement | None = None
    remarks: tuple[str, ...] = ()
    """On settings of config.json that are not computed; see `configuration.own_config`."""
    stock: bool = True
    """Whether the model is unmodified, so that a cached start-up check of its class and config applies."""
    files: str | None = None
    """Digest of the files that it was loaded from, if they determine all that it computes; None with code of the
    checkpoint, quantised weights, several devices, or for a model in memory."""

    @classmethod
    def of(cls, model: Any, tokenizer: Any, **others: Any) -> LoadedModel:
        from evalkit.models.loading.tokenizer import tokens_without_rows

        rows = int(model.get_input_embeddings().weight.shape[0])
        model.tokens_without_rows = tokens_without_rows(tokenizer, rows)
        return cls(
            model=model,
            tokenizer=tokenizer,
            architecture=type(model).__name__,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            bos_id=tokenizer.bos_token_id,
            eos_id=tokenizer.eos_token_id,
            attention=str(attention_of(model.config)),
            **others,
        )

    def __repr__(self) -> str:
        return brief(self, *self.summary)

    @property
    def summary(self) -> tuple[str, ...]:
        size = f"{_scaled(self.parameters)} parameters"
        return self.name, self.architecture, size, f"{self.dtype} on {self.device}"

    def describe(self) -> str:
        name, *facts = self.summary
        tokens = ", ".join(
            f"{role} none"
            if token is None
            else f"{role} {printable(self.tokenizer.convert_ids_to_tokens(token))} ({token})"
            for role, token in (("BOS", self.bos_id), ("EOS", self.eos_id))
        )
        stretched = "" if self.extension is None else f"\n{self.extension.describe()}"
        return (
            f"{printable(name)}: {', '.join(facts)}, {self.attention} attention\n"
            f"context window {self.window:,} tokens, {tokens}{stretched}"
        )

    def facts(self) -> dict[str, Any]:
        extension = None if self.extension is None else self.extension.specification()
        shape = shape_facts(self.model.config.to_dict())
        placed = {} if self.placement is None else {"device_map": self.placement.summary()}
        remarks = [*self.remarks, *getattr(self.tokenizer, REMARKS, ())]
        facts = {name: getattr(self, name) for name in _FACTS}
        remarked = {"remarks": remarks} if remarks else {}
        return facts | {"context_extension": extension, "shape": shape} | placed | remarked


def load(
    checkpoint: Checkpoint,
    *,
    device: str = "auto",
    spread_over_gpus: bool = False,
    dtype: str = "auto",
    attention: str = "auto",
    extension: Extension | None = None,
    quantise: str | None = None,
    say: Say = silent,
) -> LoadedModel:
    """Load model and tokenizer of a checkpoint from `locate`; `device`, `dtype` and `attention` may be "auto".

    With `spread_over_gpus`, a model larger than the first GPU is spread over all; `say` is called with warnings.

    Raises:
        CheckpointError: the checkpoint is incomplete, not causal, has no matching tokenizer, or cannot be extended.
    """
    import torch

    from evalkit.models.context.stretch import finish, stretch
    from evalkit.models.loading import gguf
    from evalkit.models.loading.build import build_model, copied, read_weights
    from evalkit.models.loading.configuration import naming_rotary_keys, own_config
    from evalkit.models.loading.tokenizer import load_tokenizer
    from evalkit.models.memory import keep_few_kernels, place_model
    from evalkit.models.parts import resolve_device
    from evalkit.models.quantisation import Rounding

    keep_few_kernels()
    given, computed_in, main_device = checkpoint.given, resolve_dtype(checkpoint, dtype), resolve_device(device)
    torch_dtype = getattr(torch, computed_in)
    # transformers raises errors of any type; the checkpoint is the cause
    with reading_as(given, "a causal language model", CheckpointError), ExitStack() as stack:
        source = checkpoint
        if checkpoint.gguf is not None:
            source = stack.enter_context(gguf.dequantised(checkpoint, say))
        copies = stack.enter_context(copied(source))
        config, folder = copies.config(), copies.folder
        check_supported(source, config)
        warn_of_name(source, config, say)
        generation, files = generation_settings(folder), source.weights()
        # The scales of quantised weights stay as stored
        weights = read_weights(files, None if quantization(config) else torch_dtype)
        check_stored(source, config, weights.tensors)
        fingerprint = combine(copies, weights.digests, hash_file)
        if checkpoint.gguf is not None:
            fingerprint = gguf.file_fingerprint(source, copies, fingerprint)
        stored = next((str(kind).removeprefix("torch.") for kind, _ in weights.stored.most_common(1)), computed_in)
        if dtype == "auto" and stored in DTYPES and stored != computed_in != "float32":
            say(f"weights are stored in {stored} and rounded to {computed_in}, the dtype in config.json; see --dtype")
        # transformers' own code takes precedence over the checkpoint's, trusted or not
        remote = checkpoint.trust_remote_code and not natively_known(config)
        model_config, remarks = own_config(folder, config, remote)
        for remark in remarks:
            say(f"warning: {given}: {remark}")
        stretched = None
        if extension is not None and not _sets_window_only(config, extension):
            stretched = stretch(given, model_config, extension)
        with naming_rotary_keys(folder, model_config):
            built = build_model(copies, files, weights, model_config, torch_dtype, attention, remote)
        check_report(given, built, say)
        model = built.model
        check_numbers(given, config, model)
        model.eval().requires_grad_(False)
        rounding = None if quantise is None else Rounding(given, model, quantise)
        placement = place_model(given, model, main_device, spread_over_gpus, say)
        if stretched is not None:
            finish(given, model, stretched)
        tokenizer = load_tokenizer(
            copies.tokenizer or folder,
            int(model.get_input_embeddings().weight.shape[0]),
            trust_remote_code=checkpoint.trust_remote_code,
            say=say,
        )
        text = model.config.get_text_config().to_dict()
        window = context_window(given, text, tokenizer, say) if extension is None else extension.target
        if rounding is not None:
            rounding.round_activations(tokenizer, window)
    # Not the temporary folders that they were read from
    model.name_or_path = model.config.name_or_path = str(checkpoint.folder)
    tokenizer.name_or_path = str(checkpoint.tokenizer or checkpoint.folder)
    determined = not checkpoint.trust_remote_code and placement is None and not getattr(model, "is_quantized", False)
    return LoadedModel.of(
        model,
        tokenizer,
        name=checkpoint.name,
        dtype=computed_in,
        device=main_device if placement is None else "+".join(placement.devices),
        window=window,
        extension=extension,
        fingerprint=fingerprint,
        generation=generation if checkpoint.gguf is None else None,
        placement=placement,
        remarks=remarks,
        files=fingerprint.combined if determined and quantise is None else None,
    )


def _sets_window_only(config: Mapping[str, Any], extension: Extension) -> bool:
    """Return whether an extension only sets the window, for a config without positions (ALiBi, Mamba)."""
    if extension.target > extension.original:
        return False
    return configured_window(config)[1] is None and not config.get("rope_parameters") and not config.get("rope_scaling")


def _scaled(count: int) -> str:
    for size, letter, digits in ((10**9, "B", 2), (10**6, "M", 1), (10**3, "K", 1)):
        if count >= size:
            return f"{count / size:.{digits}f}{letter}"
    return str(count)
