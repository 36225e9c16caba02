"""Evaluate a model in memory, in place.

In: a `transformers.PreTrainedModel`, optionally in a wrapper that only calls it, and its tokenizer. Out: a `LiveSpec`,
a `ModelSpec` whose checkpoint is a folder with everything but the weights, and whose fingerprint is computed from the
module's tensors. The module is used without a copy and its state is restored afterwards; the tokenizer is saved to the
folder and loaded from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from transformers import PreTrainedTokenizerBase

from evalkit.compatibility.torch import unwrap_forward
from evalkit.compatibility.transformers import attention_of, quiet
from evalkit.display import Say
from evalkit.errors import CheckpointError, UnknownNameError, UsageError, reading_as
from evalkit.inputs import values
from evalkit.inputs.settings import given_settings
from evalkit.models.context.extension import context_window
from evalkit.models.loading.checks import check_causal, check_numbers
from evalkit.models.loading.files import GENERATION_CONFIG, generation_settings
from evalkit.models.loading.fingerprint import fingerprint
from evalkit.models.loading.load import LoadedModel
from evalkit.models.loading.locate import ATTENTION, Checkpoint, silent
from evalkit.models.loading.spec import UNSTRETCHED, ModelSpec
from evalkit.models.loading.tokenizer import disable_sampling, load_tokenizer, probe_ids
from evalkit.models.modules import check_module, is_stock, preserved, state_digest, unwrapped
from evalkit.paths import temporary_folder


@dataclass(frozen=True)
class LiveSpec(ModelSpec):
    """A model in memory; created by `live_model`."""

    module: Any = field(default=None, repr=False)
    """The transformers model itself."""
    folder: Path = Path()
    """Folder of its config.json, generation_config.json and tokenizer."""
    given_tokenizer: Any = field(default=None, repr=False)
    """A copy of the user's tokenizer."""
    stock: bool = True
    """See `is_stock`."""

    def locate(self, say: Say = silent) -> Checkpoint:
        """Return its checkpoint, with the digest of the current weights."""
        state = state_digest(self.module)
        if not self.stock:
            say(
                f"{self.model}: has hooks, another forward or changed attributes, which no fingerprint covers; this "
                "evaluation is a run of its own and is not resumed"
            )
            state = f"{state}-{uuid4().hex}"
        checkpoint = Checkpoint(given=self.model, kind="live", folder=self.folder, state=state)
        check_causal(checkpoint, checkpoint.config())
        return checkpoint

    def load(self, checkpoint: Checkpoint, say: Say) -> LoadedModel:
        """Prepare the module for scoring: evaluation mode and a supported attention implementation."""
        module, name = self.module, self.model
        # Compiled calls and autocast wrappers are removed; `preserved` restores them
        module.eval()
        for part in module.modules():
            unwrap_forward(part)
        _set_attention(name, module, self.attention)
        check_numbers(name, checkpoint.config(), module)
        tokenizer = load_tokenizer(self.folder, int(module.get_input_embeddings().weight.shape[0]), say=say)
        tokenizer.name_or_path = name
        if probe_ids(tokenizer) != probe_ids(self.given_tokenizer):
            raise CheckpointError(
                f"{name}: its tokenizer splits text differently after it is saved and loaded; pass the tokenizer that "
                "AutoTokenizer loads from its files"
            )
        return LoadedModel.of(
            module,
            tokenizer,
            name=checkpoint.name,
            dtype=self.dtype,
            device=self.device,
            window=context_window(name, module.config.get_text_config().to_dict(), tokenizer, say),
            fingerprint=fingerprint(checkpoint),
            generation=generation_settings(self.folder),
            stock=self.stock,
        )


@contextmanager
def live_model(
    model: torch.nn.Module, name: str | None, *, tokenizer: Any, device: str, dtype: str, attention: str, **others: Any
) -> Iterator[LiveSpec]:
    """Yield the `LiveSpec` of a model in memory; restore the model at the end.

    Args:
        model: a `PreTrainedModel`; the wrappers of DDP, DataParallel and torch.compile are removed.
        name: the model's name; None: the name of its class.
        tokenizer: a `PreTrainedTokenizerBase`.
        device, dtype: "auto", or the model's own.
        attention: see `ModelSpec`.
        **others: the other fields of `ModelSpec`, which must have their defaults.
    """
    module = unwrapped(model)
    shown_name = type(module).__name__ if name is None else values.text("name", name)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise UsageError(
            f"tokenizer is {tokenizer!r:.60}; expected the tokenizer of the model in memory, as AutoTokenizer loads it"
        )
    if attention not in ATTENTION:
        raise UnknownNameError("attention implementation", attention, ATTENTION)
    for option, value in given_settings(others, ModelSpec).items():
        if (option, value) != ("context", UNSTRETCHED):
            raise UsageError(
                f"{option}: does not apply to a model in memory; leave it out, or save the model and give its folder"
            )
    check_module(shown_name, module)
    own_device, own_dtype = str(module.device), str(module.dtype).removeprefix("torch.")
    for option, requested, own in (("device", device, own_device), ("dtype", dtype, own_dtype)):
        if requested not in ("auto", own, own.partition(":")[0]):
            raise UsageError(
                f"{option} {requested}: the model is evaluated in place, in {own}; omit {option}, or convert it"
            )
    with temporary_folder() as folder, preserved(module):
        try:
            given_tokenizer = _tokenizer_copy(tokenizer)
            _save_config_and_tokenizer(shown_name, module, given_tokenizer, folder)
            yield LiveSpec(
                model=shown_name,
                device=own_device,
                dtype=own_dtype,
                attention=attention,
                context=UNSTRETCHED,
                module=module,
                folder=folder,
                given_tokenizer=given_tokenizer,
                stock=is_stock(module),
            )
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(str(folder), shown_name)) from error


def _tokenizer_copy(tokenizer: Any) -> Any:
    """Copy a tokenizer without sampling, and without truncation and padding of its last call, which would be saved."""
    copy = deepcopy(tokenizer)
    disable_sampling(copy)
    if backend := getattr(copy, "backend_tokenizer", None):
        backend.no_truncation()
        backend.no_padding()
    return copy


def _save_config_and_tokenizer(name: str, module: Any, tokenizer: Any, folder: Path) -> None:
    """Write everything that `save_pretrained` writes, except the weights."""
    config = deepcopy(module.config)
    config.architectures = [type(module).__name__]
    config.dtype = str(module.dtype).removeprefix("torch.")
    with reading_as(name, "a model whose config and tokenizer can be saved", CheckpointError), quiet():
        (folder / "config.json").write_text(config.to_json_string(), encoding="utf-8")
        if module.can_generate():
            content = module.generation_config.to_json_string()
            (folder / GENERATION_CONFIG).write_text(content, encoding="utf-8")
        tokenizer.save_pretrained(folder)


def _set_attention(name: str, module: Any, attention: str) -> None:
    accepted = ("sdpa", "eager") if attention == "auto" else (attention,)
    with quiet():
        for implementation in accepted:
            try:
                module.set_attn_implementation(implementation)
            except ValueError:
                continue
            break
    if (own := attention_of(module.config)) not in accepted:
        raise CheckpointError(
            f"{name}: its attention is {own} and cannot be changed to {' or '.join(accepted)}; build the model with "
            f"attn_implementation={accepted[0]!r}"
        )
