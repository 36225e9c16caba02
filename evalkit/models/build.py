"""A model of a config.json and of weights that are in memory, by transformers' own `from_pretrained`.

In: a folder with config.json and without weights, and the weights. Out: the model, and transformers' report of what it
did with each weight. The model is first built without numbers, so that one that the weights cannot fill is refused
before memory is allocated for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from evalkit.compatibility.transformers import attention_of
from evalkit.errors import CheckpointError, first_line
from evalkit.models.quiet import quiet

_EXCESS, _PACKED = 2, 32
"""How many times the numbers in its files a model may have: below twice as many, what is missing or of another shape is
reported by name after loading; of quantised ones, several stand together in one."""
_REPLACED = 2
"""How many times as many it may have while it is built: heads are tied and attention modules replaced afterwards."""
_MOST_PARAMETERS = 10_000
"""Named parameters that any model may have; beyond, sixteen times as many as its files hold."""
_MOST_BUFFERED = 2**31
"""Numbers in buffers, such as a mask over all positions."""
_FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Built:
    """A model with its weights."""

    model: Any
    report: dict[str, Any]
    """transformers' `loading_info`."""
    codes: tuple[str, ...]
    """Weights that the model took as they are, though they are stored as integers or in 8 bits."""


def build_model(
    given: str, folder: Path, tensors: dict[str, torch.Tensor], config: Any, *, dtype: str, attention: str, remote: bool
) -> Built:
    """Build a causal language model.

    Args:
        given: the checkpoint's name for messages.
        folder: of its config.json, generation_config.json and code.
        tensors: by name; emptied, so that what another dtype is made of can go at once.
        config: the transformers config; None: that of the folder.
        dtype: "float32", "bfloat16" or "float16".
        attention: "auto", "sdpa" or "eager".
        remote: whether the model's class is the folder's own code.

    Raises:
        CheckpointError: transformers cannot build it, or the weights are far too few for it.
    """
    with quiet(), _refusing(given):
        from transformers import AutoConfig

        kind = getattr(torch, dtype)
        own = config or AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=remote)
        quantised = any(getattr(part, "quantization_config", None) for part in (own, own.get_text_config()))
        sizes = {name: tensor.numel() for name, tensor in tensors.items()}
        excess = _PACKED if quantised else _EXCESS
        skeleton = _skeleton(given, own, kind, attention, remote, sizes, excess)
        if sum(weight.numel() for weight in skeleton.parameters()) > excess * sum(sizes.values()):
            raise _too_many(given, sizes)
        _check_once(given, tensors, skeleton.base_model_prefix)
        # A quantised tensor is looked at before it is taken
        held = {name: tensor if quantised else Handed(tensor) for name, tensor in tensors.items()}
        tensors.clear()
        model, report = type(skeleton).from_pretrained(
            None,
            config=skeleton.config,
            state_dict=held,
            dtype=kind,
            attn_implementation=attention_of(skeleton.config),
            local_files_only=True,
            ignore_mismatched_sizes=True,  # else an error names no tensor
            output_loading_info=True,
        )
        if model.can_generate():
            _read_generation_config(model, folder)
    return Built(model, report, () if quantised else _codes(model, held))


class Handed:
    """A tensor that is given away once, so that it goes when another dtype has been made of it.

    What transformers takes for a tensor that is still in its file: it asks for `tensor[...]`, once.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self.taken = False
        self._tensor: torch.Tensor | None = tensor

    def __getitem__(self, _: Any) -> torch.Tensor | None:
        tensor, self._tensor, self.taken = self._tensor, None, True
        return tensor


@contextmanager
def _refusing(given: str) -> Iterator[None]:
    """Turn whatever transformers raises into a `CheckpointError`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # transformers raises what its parts raise; the checkpoint is the cause
        raise CheckpointError(f"{given}: cannot be loaded ({first_line(error)})") from error


def _skeleton(
    given: str, config: Any, dtype: Any, attention: str, remote: bool, sizes: Mapping[str, int], excess: int
) -> Any:
    """The model without numbers, with the attention asked for, or eager under "auto" where there is no other."""
    from transformers import AutoModelForCausalLM

    def built(implementation: str) -> Any:
        with torch.device("meta"), _bounded(given, sizes, excess):
            return AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=implementation, trust_remote_code=remote
            )

    try:
        return built("sdpa" if attention == "auto" else attention)
    except ValueError as error:
        # What transformers says, at length, of an architecture without that implementation
        if "scaled_dot_product_attention" not in str(error):
            raise
        if attention != "auto":
            raise CheckpointError(
                f"{given}: its architecture has no {attention} attention; use --attention eager"
            ) from error
        return built("eager")


@contextmanager
def _bounded(given: str, sizes: Mapping[str, int], excess: int) -> Iterator[None]:
    """Refuse a model with far more parameters than there are weights, as soon as it has them."""
    most, most_named = _REPLACED * excess * sum(sizes.values()), max(_MOST_PARAMETERS, 16 * len(sizes))
    numbers = named = buffered = 0

    def parameter(_: Any, __: str, value: Any) -> None:
        nonlocal numbers, named
        numbers, named = numbers + value.numel(), named + 1
        if numbers > most or named > most_named:
            raise _too_many(given, sizes)

    def buffer(_: Any, name: str, value: Any) -> None:
        nonlocal buffered
        buffered += 0 if value is None else value.numel()
        if buffered > _MOST_BUFFERED:
            raise CheckpointError(
                f"{given}: config.json describes a model whose buffers ({name}) have more than {_MOST_BUFFERED:,} "
                "numbers; its number of positions is wrong"
            )

    hooks = (register_module_parameter_registration_hook(parameter), register_module_buffer_registration_hook(buffer))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _too_many(given: str, sizes: Mapping[str, int]) -> CheckpointError:
    return CheckpointError(
        f"{given}: config.json describes a far larger model than its files hold ({sum(sizes.values()):,} numbers in "
        f"{len(sizes):,} weights); its sizes or its number of layers are wrong"
    )


def _check_once(given: str, names: Collection[str], base: str) -> None:
    """Refuse two tensors for one parameter, of which transformers would take either: layers.0… and model.layers.0…"""
    for name in names:
        if name.startswith(f"{base}.") and (bare := name.removeprefix(f"{base}.")) in names:
            raise CheckpointError(f"{given}: holds {name} and {bare}, two tensors for one weight; remove one of them")


def _read_generation_config(model: Any, folder: Path) -> None:
    """As `from_pretrained` does for a folder; code of the checkpoint's own that would generate is not run."""
    model.adjust_generation_fn(
        generation_config=None,
        from_auto_class=True,
        from_pipeline=None,
        pretrained_model_name_or_path=str(folder),
        cache_dir=None,
        force_download=False,
        proxies=None,
        local_files_only=True,
        token=None,
        revision="main",
        subfolder="",
        trust_remote_code=False,
    )


def _codes(model: Any, held: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of taken tensors that are not floating-point numbers, though what they became is."""
    state = model.state_dict()
    taken = [name for name, tensor in held.items() if tensor.taken and tensor.dtype not in _FLOATING]
    return tuple(name for name in taken if name not in state or state[name].is_floating_point())
