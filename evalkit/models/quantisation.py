"""Simulated quantisation: linear layers that compute with rounded weights and activations.

In: a setting such as "w4g64" or "w8a8", and a model. Out: the model with the weights of its linear layers rounded in
place, and hooks that round their inputs. Embeddings, norms and the output head are not changed. Rounding is computed in
float32 and its result has the model's dtype: it shows what fewer bits break, and saves neither time nor memory.

Weights are rounded to nearest, asymmetric: a row, or each group of neighbouring weights of a row, to 2^bits values at
equal distances from its smallest to its largest. Activations are rounded to whole multiples, from -127 to 127, of a
scale: the largest absolute value of a token over 127 (a8); or for all tokens of a layer that of a short English text
that evalkit has, beyond which values are clipped (a8t). A scale of the tensor at hand would depend on later tokens and
on the batch, and the model would not be causal.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from evalkit.errors import CheckpointError
from evalkit.models.loading.locate import QUANTISATION
from evalkit.models.parts import base_of
from evalkit.paths import resource

_LARGEST = 127.0
_exact: ContextVar[bool] = ContextVar("exact", default=False)


def rounded(weight: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Round each group of a row to 2^bits values, [rows, columns] → [rows, columns]; `group` divides the columns."""
    groups = weight.float().unflatten(1, (-1, group))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (high - low).div_(torch.full_like(low, 2**bits - 1)).clamp_min_(torch.finfo(torch.float32).tiny)
    new: torch.Tensor = (groups - low).div_(step).round_().mul_(step).add_(low).flatten(1)
    return new.to(weight.dtype)


def rounded_activations(states: torch.Tensor, largest: torch.Tensor | None = None) -> torch.Tensor:
    """Round states, [..., channels], to 8 bits; `largest` is the absolute value of 127, by default each token's."""
    wide = states.float()
    largest = wide.abs().amax(-1, keepdim=True) if largest is None else largest
    # Not over a number, which a GPU multiplies by its reciprocal
    scale = (largest / torch.full_like(largest, _LARGEST)).clamp_min_(torch.finfo(torch.float32).tiny)
    return (wide / scale).round_().clamp_(-_LARGEST, _LARGEST).mul_(scale).to(states.dtype)


class Rounding:
    """Rounds the weights of a model's linear layers in place, and on request the inputs of these.

    Raises a `CheckpointError` if the model has other matrices, but for embeddings, or rows without groups of that size.
    """

    def __init__(self, given: str, model: Any, setting: str) -> None:
        self._given, self._model, head = given, model, model.get_output_embeddings()
        parts: Any = QUANTISATION.fullmatch(setting)
        bits, group, self._activations = parts.groups()
        modules = [module for module in base_of(model).modules() if isinstance(module, (nn.Linear, nn.Embedding))]
        self.layers = [module for module in modules if isinstance(module, nn.Linear) and module is not head]
        known = {id(module.weight) for module in modules}
        others = [name for name, part in base_of(model).named_parameters() if part.dim() > 1 and id(part) not in known]
        if others or not self.layers or getattr(model, "is_quantized", False):
            why = f"{others[0]} is no linear layer" if others else "it has no linear layers with whole weights"
            raise CheckpointError(f"{given}: {why}, and --quantise rounds only these; leave it out")
        for weight in {id(layer.weight): layer.weight for layer in self.layers}.values() if bits else ():
            size = int(group or weight.shape[1])
            if weight.shape[1] % size:
                raise CheckpointError(f"{given}: rows of {weight.shape[1]} weights have no groups of {size}")
            weight.data = rounded(weight.data, int(bits), size)

    def round_activations(self, tokenizer: Any, window: int) -> None:
        """Make the layers round their inputs, by tensor with the scales of the text in the model as it is now."""
        if not self._activations:
            return
        largest = dict[Any, torch.Tensor]()

        def measure(layer: Any, inputs: tuple[Any, ...]) -> None:
            own = inputs[0].float().abs().amax()
            largest[layer] = torch.maximum(own, largest.get(layer, own))

        def round_inputs(layer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return inputs if _exact.get() else (rounded_activations(inputs[0], largest.get(layer)), *inputs[1:])

        if self._activations == "a8t":
            hooks = [layer.register_forward_pre_hook(measure) for layer in self.layers]
            with torch.inference_mode():
                base_of(self._model)(input_ids=calibration_ids(self._model, tokenizer, window), use_cache=False)
            for hook in hooks:
                hook.remove()
            if missed := len(self.layers) - len(largest):
                raise CheckpointError(f"{self._given}: the text for a8t misses {missed} layers; give a8")
        for layer in self.layers:
            layer.register_forward_pre_hook(round_inputs)
        self._model.rounds_activations = True


def calibration_ids(model: Any, tokenizer: Any, window: int, text: str | None = None) -> torch.Tensor:
    """Return [1, tokens] of a text, by default evalkit's short English one, with BOS; at most 512, and the window."""
    text = (resource("configs", "models") / "check.txt").read_text(encoding="utf-8") if text is None else text
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    ids = [*([] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]), *ids][: min(512, window)]
    return torch.tensor([ids], device=model.get_input_embeddings().weight.device)


@contextmanager
def exact_activations() -> Iterator[None]:
    """Compute without rounding of activations inside the context."""
    token = _exact.set(True)
    try:
        yield
    finally:
        _exact.reset(token)
