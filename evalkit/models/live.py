"""A model in memory, evaluated where it is: from a module and a tokenizer to what is asked of any checkpoint.

In: a `transformers.PreTrainedModel`, as it is or in a wrapper that only calls it, and its tokenizer. Out: a `LiveSpec`,
a `ModelSpec` whose checkpoint is a folder with everything but the weights, and whose fingerprint is of the module's own
tensors. The module is used in place, without a copy, and is given back as it was; the tokenizer is read from the folder
it was saved to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from evalkit.compatibility.transformers import attention_of
from evalkit.errors import CheckpointError, UnknownNameError, UsageError, first_line
from evalkit.inputs import values
from evalkit.models.checks import check_causal, check_numbers
from evalkit.models.context_settings import UNSTRETCHED
from evalkit.models.files import GENERATION_CONFIG, generation_settings
from evalkit.models.fingerprint import fingerprint
from evalkit.models.load import LoadedModel, context_window
from evalkit.models.locate import ATTENTION, Checkpoint, Say, silent
from evalkit.models.modules import check_module, is_stock, unwrapped
from evalkit.models.preserved import computing_plainly, preserved
from evalkit.models.quiet import quiet
from evalkit.models.spec import ModelSpec
from evalkit.models.state import state_digest
from evalkit.models.temporary import temporary_folder
from evalkit.models.tokenizer import load_tokenizer, probe_ids

_OF_FILES = ("revision", "context", "context_method", "context_original", "context_config", "allow_pickle",
             "trust_remote_code")  # fmt: skip
"""Fields of `ModelSpec` that say how files are read, or what model is made of them."""


@dataclass(frozen=True)
class LiveSpec(ModelSpec):
    """A model in memory; made by `live_model`."""

    module: Any = field(default=None, repr=False)
    """The transformers model itself."""
    folder: Path = Path()
    """Its config.json, generation_config.json and tokenizer."""
    given_tokenizer: Any = field(default=None, repr=False)
    """A copy of the user's."""

    def locate(self, say: Say = silent) -> Checkpoint:
        """Return its checkpoint, with the digest of the weights as they are now."""
        found = Checkpoint(given=self.model, kind="live", folder=self.folder, state=state_digest(self.module))
        check_causal(found, found.config())
        return found

    def load(self, checkpoint: Checkpoint, say: Say) -> LoadedModel:
        """Make the module ready to score: evaluation mode and an attention that evalkit knows.

        Raises:
            CheckpointError: a weight is not a number, the tokenizer does not fit, or its attention cannot be replaced.
        """
        module, name = self.module, self.model
        _make_plain(module)
        _set_attention(name, module, self.attention)
        check_numbers(name, checkpoint.config(), module)
        tokenizer = load_tokenizer(self.folder, int(module.get_input_embeddings().weight.shape[0]), say=say)
        tokenizer.name_or_path = name
        if probe_ids(tokenizer) != probe_ids(self.given_tokenizer):
            raise CheckpointError(
                f"{name}: its tokenizer splits text otherwise once it is saved and loaded again; give the one that "
                "AutoTokenizer loads from its own files"
            )
        return LoadedModel(
            model=module,
            tokenizer=tokenizer,
            name=checkpoint.name,
            architecture=type(module).__name__,
            parameters=sum(parameter.numel() for parameter in module.parameters()),
            dtype=self.dtype,
            device=self.device,
            window=context_window(name, module.config, tokenizer, say),
            bos_id=tokenizer.bos_token_id,
            eos_id=tokenizer.eos_token_id,
            attention=str(attention_of(module.config)),
            fingerprint=fingerprint(checkpoint),
            generation=generation_settings(self.folder),
            stock=is_stock(module),
        )


@contextmanager
def live_model(
    model: torch.nn.Module, name: str | None, *, tokenizer: Any, device: str, dtype: str, attention: str, **others: Any
) -> Iterator[LiveSpec]:
    """Borrow a model for an evaluation.

    Args:
        model: a `PreTrainedModel`; DDP, DataParallel and torch.compile's wrapper are taken off.
        name: what it is called; None: its class.
        tokenizer: a `PreTrainedTokenizerBase`.
        device, dtype: "auto", or what the model has.
        attention: see `ModelSpec`.
        **others: the other fields of `ModelSpec`, which must have their defaults.

    Raises:
        UsageError: an argument that a model in memory does not have.
        CheckpointError: a model that cannot be evaluated where it is. Those that are raised inside call the folder of
            its files by the model's name.
    """
    module = unwrapped(model)
    called = type(module).__name__ if name is None else values.text("name", name)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise UsageError(
            f"tokenizer is {tokenizer!r:.60}; expected the tokenizer of the model in memory, as AutoTokenizer loads it"
        )
    if attention not in ATTENTION:
        raise UnknownNameError("attention implementation", attention, ATTENTION)
    for argument in _OF_FILES:
        if others[argument] not in (None, False) and (argument, others[argument]) != ("context", UNSTRETCHED):
            raise UsageError(
                f"{argument}: does not apply to a model in memory; leave it out, or save the model and give its folder"
            )
    check_module(called, module)
    place, kind = str(module.device), str(module.dtype).removeprefix("torch.")
    for argument, asked, own in (("device", device, place), ("dtype", dtype, kind)):
        if asked not in ("auto", own, own.partition(":")[0]):
            raise UsageError(
                f"{argument} {asked}: the model is evaluated as it is, in {own}; leave {argument} out, or convert it"
            )
    with temporary_folder() as folder, preserved(module), computing_plainly(place):
        try:
            own = _own_tokenizer(tokenizer)
            _save_beside(called, module, own, folder)
            yield LiveSpec(
                model=called,
                device=place,
                dtype=kind,
                attention=attention,
                context=UNSTRETCHED,
                module=module,
                folder=folder,
                given_tokenizer=own,
            )
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(str(folder), called)) from error


def _own_tokenizer(tokenizer: Any) -> Any:
    """A copy, without the truncation and padding of the last call, which `save_pretrained` would keep."""
    own = deepcopy(tokenizer)
    if backend := getattr(own, "backend_tokenizer", None):
        backend.no_truncation()
        backend.no_padding()
    return own


def _save_beside(name: str, module: Any, tokenizer: Any, folder: Path) -> None:
    """Write what `save_pretrained` would write, but for the weights."""
    config = deepcopy(module.config)
    config.architectures = [type(module).__name__]
    config.dtype = str(module.dtype).removeprefix("torch.")
    try:
        with quiet():
            (folder / "config.json").write_text(config.to_json_string(), encoding="utf-8")
            if module.can_generate():
                content = module.generation_config.to_json_string()
                (folder / GENERATION_CONFIG).write_text(content, encoding="utf-8")
            tokenizer.save_pretrained(folder)
    except Exception as error:  # whatever a config or a tokenizer of the user's own raises
        raise CheckpointError(f"{name}: its config or tokenizer cannot be saved ({first_line(error)})") from error


def _make_plain(module: Any) -> None:
    """Put it into evaluation mode, and take off what compiles it or casts its inputs; `preserved` puts it back."""
    module.eval()
    for part in module.modules():
        own = vars(part)
        own.pop("_compiled_call_impl", None)
        # accelerate's, which computes under autocast
        if original := own.pop("_original_forward", None):
            own["forward"] = original
            if getattr(original, "__func__", None) is type(part).forward:
                del own["forward"]


def _set_attention(name: str, module: Any, attention: str) -> None:
    """Have it attend as a checkpoint loaded from files would.

    Raises:
        CheckpointError: it cannot.
    """
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
