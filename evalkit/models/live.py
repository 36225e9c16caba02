"""Evaluate a model in memory, in place.

In: a `transformers.PreTrainedModel`, optionally in a wrapper that only calls it, or, where processes keep in step, any
module that `called.py` can call; and its tokenizer. Out: a `LiveSpec`, a `ModelSpec` whose checkpoint is a folder with
everything but the weights, and whose fingerprint is computed from the module's tensors. The module is used without a
copy and its state is restored afterwards; the tokenizer is saved to the folder and loaded from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers import PreTrainedModel

from evalkit.compatibility.torch import policies_of, uncompiled, unwrap_forward
from evalkit.compatibility.transformers import attention_of, quiet
from evalkit.display import Say
from evalkit.errors import CheckpointError, UsageError, reading_as, writing
from evalkit.inputs import values
from evalkit.inputs.settings import given_settings
from evalkit.inputs.values import text_digest
from evalkit.models.called import CalledModel, is_only_sharded, is_sharded, why_not_callable
from evalkit.models.context.extension import context_window
from evalkit.models.loading.checks import check_causal, check_numbers
from evalkit.models.loading.files import GENERATION_CONFIG, generation_settings
from evalkit.models.loading.fingerprint import fingerprint
from evalkit.models.loading.load import LoadedModel
from evalkit.models.loading.locate import DTYPES, Checkpoint, silent
from evalkit.models.loading.spec import UNSTRETCHED, ModelSpec
from evalkit.models.loading.tokenizer import disable_sampling, load_tokenizer, probe_ids
from evalkit.models.module_state import changed_code, class_of, is_stock, preserved, saved_weights, state_digest
from evalkit.paths import temporary_folder

_DEVICES = ("cpu", "cuda", "mps")
_ADAPTED = "peft."
State: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class LiveSpec(ModelSpec):
    module: Any = field(default=None, repr=False)
    folder: Path = Path()
    given_tokenizer: Any = field(default=None, repr=False)
    stock: bool = True
    saved_as: Path | None = None
    state: State | None = None
    """What identifies its weights, if processes have agreed on it; None: `identity`."""

    def identity(self, say: Say, digests: Sequence[str] = ()) -> State:
        """Return names and digests that identify the weights; given are the `state_digest`s of several processes."""
        is_called = isinstance(self.module, CalledModel)
        if len(set(digests)) > 1 and not (is_called and self.module.is_sharded):
            raise CheckpointError(f"{self.model}: weights or buffers differ between the processes of the training")
        is_saved = self.stock and not is_called and not self._changed_code
        saved = saved_weights(self.module, self.folder) if is_saved else ()
        of_all = text_digest(" ".join(digests)) if len(set(digests)) > 1 else ""
        state = saved or (("state", of_all or state_digest(self.module)),)
        if not self.stock:
            say(
                f"{self.model}: has hooks, another forward or changed attributes, which no fingerprint covers; this "
                "evaluation is a run of its own and is not resumed"
            )
            state = (*state, ("evaluation", uuid4().hex))
        return state

    @property
    def _changed_code(self) -> dict[str, Any]:
        return changed_code(map(class_of, self.module.modules()))

    def probed(self) -> LiveSpec:
        """Return the spec with the dtype and the device in which a called model computes; it runs the model."""
        self.module.probe()
        dtype = str(self.module.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise CheckpointError(f"{self.model}: computes in {dtype}; expected {', '.join(DTYPES)}")
        return replace(self, dtype=dtype, device=str(self.module.device))

    def locate(self, say: Say = silent) -> Checkpoint:
        state = self.state or self.identity(say)
        checkpoint = Checkpoint(given=self.model, kind="live", folder=self.folder, state=state, saved_as=self.saved_as)
        check_causal(checkpoint, checkpoint.config())
        return checkpoint

    def check_device(self) -> None:
        """Do nothing: the model is on its device."""

    def load(self, checkpoint: Checkpoint, say: Say) -> LoadedModel:
        module, name = self.module, self.model
        is_called = isinstance(module, CalledModel)
        if isinstance(inner := module.inner if is_called else module, PreTrainedModel):
            _set_attention(name, inner, self.attention)
        check_numbers(name, checkpoint.config(), module)
        tokenizer = load_tokenizer(self.folder, int(module.get_input_embeddings().weight.shape[0]), say=say)
        tokenizer.name_or_path = name
        if probe_ids(tokenizer) != probe_ids(self.given_tokenizer):
            raise CheckpointError(
                f"{name}: its tokenizer splits text differently after it is saved and loaded; use AutoTokenizer's"
            )
        loaded = LoadedModel.of(
            module,
            tokenizer,
            name=checkpoint.name,
            dtype=self.dtype,
            device=self.device,
            window=context_window(name, module.config.get_text_config().to_dict(), tokenizer, say),
            fingerprint=fingerprint(checkpoint),
            generation=generation_settings(self.folder),
            stock=self.stock and not is_called and not self._changed_code,
        )
        return replace(loaded, architecture=class_of(module.module).__name__) if is_called else loaded


@contextmanager
def live_model(
    model: torch.nn.Module, name: str | None, *, tokenizer: Any, device: str, dtype: str, attention: Any,
    saved_as: Path | None = None, window: int | None = None, before: Callable[[], object] | None = None, **others: Any,
) -> Iterator[LiveSpec]:  # fmt: skip
    """Yield the `LiveSpec` of a `PreTrainedModel`, by default named after its class; restore the model at the end.

    Given `before`, see `CalledModel`, any other module, and a sharded one, is only called: its spec has no dtype until
    `LiveSpec.probed`. Such a model computes under the autocast of the caller, as in training.

    The wrappers of DDP, DataParallel and torch.compile are removed. `device` and `dtype` are "auto" or the model's own;
    the other fields of `ModelSpec` must have their defaults. `saved_as` is the folder to which this state is saved.
    """
    module = unwrapped(model, any_module=before is not None)
    is_called = before is not None and (is_sharded(module) or not isinstance(module, PreTrainedModel))
    shown_name = class_of(module).__name__ if name is None else values.text("name", name)
    for option, value in given_settings(others, ModelSpec).items():
        if (option, value) != ("context", UNSTRETCHED):
            raise UsageError(
                f"{option}: does not apply to a model in memory; leave it out, or save the model and give its folder"
            )
    why = "has adapters (peft); evaluate a copy in which they are merged into the weights"
    is_adapted = any(type(part).__module__.startswith(_ADAPTED) for part in module.modules())
    if is_adapted or (why := why_not_callable(module) if is_called else _why_unsupported(module)):
        raise CheckpointError(f"{shown_name}: {why}")
    own_device = str(next(module.parameters()).device)
    own_dtype = "auto" if is_called else str(module.dtype).removeprefix("torch.")
    for option, requested, own in (("device", device, own_device), ("dtype", dtype, own_dtype)):
        if requested not in ("auto", own, own.partition(":")[0]):
            raise UsageError(
                f"{option} {requested}: the model is evaluated in place, in {own}; omit {option}, or convert it"
            )
    with temporary_folder() as folder, preserved(module, autocast=is_called):
        try:
            given_tokenizer, stock = deepcopy(tokenizer), is_only_sharded(module) if is_called else is_stock(module)
            # Compiled calls are removed, and autocast that is not the caller's; `preserved` restores them
            module.eval()
            for part in module.modules():
                unwrap_forward(part, keep_autocast=is_called)
            if is_called and before is not None:
                module = CalledModel(module, window, before)
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
                stock=stock,
                saved_as=saved_as,
            )
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(str(folder), shown_name)) from error


def _save_config_and_tokenizer(name: str, module: Any, tokenizer: Any, folder: Path) -> None:
    config = deepcopy(module.config)
    if isinstance(module, CalledModel):
        config.architectures = [class_of(module.module).__name__]
        kinds = [kind for kind in _DEVICES if torch.is_autocast_enabled(kind)]
        config.precision = {kind: str(torch.get_autocast_dtype(kind)) for kind in kinds} | policies_of(module.module)
    else:
        config.architectures, config.dtype = [type(module).__name__], str(module.dtype).removeprefix("torch.")
    form = "a model with a config and a tokenizer that can be saved"
    with reading_as(name, form, CheckpointError), quiet(), writing(folder):
        (folder / "config.json").write_text(config.to_json_string(), encoding="utf-8")
        if module.can_generate():
            content = module.generation_config.to_json_string()
            (folder / GENERATION_CONFIG).write_text(content, encoding="utf-8")
        disable_sampling(tokenizer)
        tokenizer.save_pretrained(folder)


def _set_attention(name: str, module: Any, attention: str) -> None:
    accepted = ("eager", "sdpa") if attention == "auto" else (attention,)
    with quiet():
        for implementation in accepted:  # the last one that the architecture has
            with suppress(ValueError):
                module.set_attn_implementation(implementation)
    if (own := attention_of(module.config)) not in accepted:
        raise CheckpointError(
            f"{name}: its attention is {own}; build the model with attn_implementation={accepted[-1]!r}"
        )


def unwrapped(model: Any, any_module: bool = False) -> Any:
    """Return the transformers model inside the wrappers of DDP, DataParallel and torch.compile, or any module."""
    module, outer = model, None
    while module is not outer and isinstance(module, torch.nn.Module) and not isinstance(module, PreTrainedModel):
        is_parallel = isinstance(module, (DistributedDataParallel, DataParallel))
        outer, module = module, module.module if is_parallel else module if is_sharded(module) else uncompiled(module)
    if not isinstance(module, torch.nn.Module if any_module else PreTrainedModel):
        raise UsageError(
            f"model is a {type(model).__module__}.{type(model).__qualname__}; expected a checkpoint folder, a hub "
            "name, a GGUF file, 'demo', or a transformers.PreTrainedModel, into which adapters are merged"
        )
    return module


def _why_unsupported(module: Any) -> str:
    if why := why_not_callable(module):
        return why
    if is_sharded(module):
        return "is sharded over processes; call evalkit.InLoop in all of them, or save it whole"
    if getattr(module, "is_quantized", False) or getattr(module.config, "quantization_config", None):
        return "is quantised; quantised models are evaluated from files only; give the checkpoint folder"
    tensors = [*module.parameters(), *module.buffers()]
    hooked = {str(device) for device in getattr(module, "hf_device_map", {}).values()}
    devices = sorted(hooked if len(hooked) > 1 or hooked == {"disk"} else {str(tensor.device) for tensor in tensors})
    if len(devices) != 1 or devices[0].partition(":")[0] not in _DEVICES:
        return f"is on {', '.join(devices)}; evaluate its folder, or move it to one of {', '.join(_DEVICES)}"
    if str(module.dtype).removeprefix("torch.") not in DTYPES:
        return f"computes in {module.dtype}; expected {', '.join(DTYPES)}"
    if module.get_output_embeddings() is None:
        return f"{type(module).__name__} has no output head; give a causal language model"
    return ""
