"""A model in memory that is only called: any `torch.nn.Module` that returns logits, and modules that are sharded.

In: a module whose forward takes token ids, [1, length], and returns logits, [1, length, vocabulary], alone, first in a
tuple, or as `logits`; as nanoGPT's, given `targets` if it returns only the last position's without; or a transformers
model whose parameters torch's `fully_shard` distributes. Out: a `CalledModel`, which the scoring engine uses as a
transformers model whose final states are its logits. Its weights are never read, so that sharded ones stay where they
are; each forward pass is one call of the outermost module, as in training.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig, PreTrainedModel

from evalkit.compatibility.torch import end_forward, hooks_of, uncompiled
from evalkit.compatibility.transformers import changes_no_number, select_attention
from evalkit.errors import CheckpointError, UsageError
from evalkit.models.loading.files import WINDOW_KEYS
from evalkit.models.memory import free_bytes, logit_tokens
from evalkit.models.module_state import attributes_digest, class_of

_WINDOW_KEYS = (*WINDOW_KEYS, "block_size", "sequence_len", "context_length")
"""Names of the context window in configs: transformers', nanoGPT's, nanochat's, and those of other projects."""
_TOKENS = {"cpu": 2048}
_MOST_TOKENS = 65536
_SHARDING = "torch.distributed.fsdp"


class WholeLogits(torch.nn.Identity):
    """Output head of a model whose final states are logits already, [positions, vocabulary]."""

    def __init__(self, vocabulary: int, like: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        # Its shape, dtype and device are read; it has one number
        self.weight = like.new_empty((), dtype=dtype).expand(vocabulary, vocabulary)


class CalledModel(torch.nn.Module):
    """See the module. `before` is called before each forward pass of a sharded module: processes keep in step by it.

    Raises:
        UsageError: the context window is unknown.
    """

    _tied_weights_keys = ()

    def __init__(self, module: torch.nn.Module, window: int | None, before: Callable[[], object]) -> None:
        super().__init__()
        self.module: Any = module
        self.inner = uncompiled(module)
        self.is_sharded = is_sharded(module)
        self._before = before
        self.takes_masks = isinstance(self.inner, PreTrainedModel)
        self._targets = False
        self._head: Any = None
        """Known once `probe` has run."""
        self.device = next(module.parameters()).device
        self.config = self.inner.config if self.takes_masks else _described(self.inner, window)
        self.base_model: Any = torch.nn.Module()
        self.base_model.forward = self.states

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._head.weight.dtype
        return dtype

    def is_backend_compatible(self) -> bool:
        return self.takes_masks and bool(self.module.is_backend_compatible())

    def can_generate(self) -> bool:
        return False

    def get_input_embeddings(self) -> Any:
        return self._head

    get_output_embeddings = get_input_embeddings

    def probe(self) -> None:
        """Find out in which form the module returns logits, and the dtype in which it computes them.

        The least precise dtype of its weights and of its modules' results counts: logits may be float32 again.

        Raises:
            CheckpointError: the module returns no logits.
        """
        dtypes = {weight.dtype for weight in self.module.parameters() if weight.is_floating_point()}

        def note(_: Any, __: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor) and output.is_floating_point():
                dtypes.add(output.dtype)

        for with_targets in (False,) if self.takes_masks else (False, True):
            self._targets = with_targets
            with ExitStack() as hooks:
                for part in self.module.modules():
                    hooks.enter_context(part.register_forward_hook(note))
                logits = self._logits(torch.zeros(1, 2, dtype=torch.long, device=self.device))
            shape = tuple(getattr(logits, "shape", ()))
            if len(shape) == 3 and shape[:2] == (1, 2):
                # Products in 8 bits have results, and sums, of more
                kinds = (dtype for dtype in (*dtypes, logits.dtype) if dtype.itemsize > 1)
                coarsest = max(kinds, key=lambda dtype: torch.finfo(dtype).eps)
                # Of weights that are kept on the CPU, logits are where they are computed
                self._head, self.device = WholeLogits(shape[2], logits, coarsest), logits.device
                return
            if shape[1:2] != (1,) or "targets" not in inspect.signature(self.inner.forward).parameters:
                break
        raise CheckpointError(
            f"{class_of(self.module).__name__}: for two tokens its forward returns {shape or type(logits).__name__}; "
            "expected logits of shape (1, 2, vocabulary), alone, first in a tuple, or as .logits"
        )

    def fill(self) -> None:
        """Run one token, in step with other processes whose batches are longer; the result is not needed."""
        self._pass(torch.zeros(1, 1, dtype=torch.long, device=self.device), {})

    def states(self, input_ids: torch.Tensor, **inputs: Any) -> Any:
        if not self.takes_masks and inputs.keys() - {"use_cache"}:
            raise TypeError("its forward takes no attention mask")
        given = inputs if self.takes_masks else {}
        return SimpleNamespace(last_hidden_state=self._logits(input_ids, given))

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> Any:
        states = self.states(input_ids, use_cache=use_cache).last_hidden_state
        return SimpleNamespace(logits=self._head(states))

    def token_budget(self) -> int:
        """Return the tokens of a batch whose logits fit into the memory that is free now, by a rough estimate."""
        processes = distributed.get_world_size() if distributed.is_initialized() and self.device.type == "cpu" else 1
        fitting = logit_tokens(free_bytes(self.device) / processes, self._head.weight.shape[0])
        return min(_TOKENS.get(self.device.type, _MOST_TOKENS), fitting)

    def _logits(self, ids: torch.Tensor, inputs: Mapping[str, Any] | None = None) -> Any:
        if self.is_sharded:
            self._before()
        output = self._pass(ids, inputs or {})
        output = getattr(output, "logits", output)
        return output[0] if isinstance(output, (tuple, list)) else output

    def _pass(self, ids: torch.Tensor, inputs: Mapping[str, Any]) -> Any:
        # Gathered weights are kept for the training, which cannot use tensors of the inference mode
        with torch.inference_mode(False), torch.no_grad():
            try:
                if self.takes_masks:
                    return self.module(input_ids=ids, **inputs)
                return self.module(ids, targets=ids) if self._targets else self.module(ids)
            except BaseException:
                end_forward(self.module)
                raise


def is_sharded(module: Any) -> bool:
    return isinstance(module, FSDPModule)


def why_not_callable(module: Any) -> str:
    """Return why a module cannot be evaluated by calls, or ""."""
    parameters = list(module.parameters())
    kinds = {type(part).__name__ for part in (*module.modules(), *parameters)}
    if kinds & {"FullyShardedDataParallel", "ShardedTensor"}:
        return "is sharded by FullyShardedDataParallel; use fully_shard (FSDP2), or save it whole"
    if any(hasattr(parameter, "ds_id") for parameter in parameters):
        return "is sharded by DeepSpeed ZeRO-3; use fully_shard, or evaluate its checkpoints: evalkit run --watch"
    if not parameters or any(parameter.is_meta for parameter in parameters):
        return "has no weights, or weights without data (device meta); load them first"
    placements = [getattr(parameter, "placements", ()) for parameter in parameters]
    split = any(sum(placement.is_shard() for placement in of_parameter) > 1 for of_parameter in placements)
    if split or (any(placements) and not is_sharded(module)):
        return "has tensors that several processes compute together; only fully_shard of the whole model is supported"
    return ""


def is_only_sharded(module: Any) -> bool:
    """Return whether a module has no hooks but those of `fully_shard`, and of transformers that change no number."""
    hooks = (hook for part in module.modules() for hook in hooks_of(part) if not changes_no_number(hook))
    return all(str(getattr(hook, "__module__", "")).startswith(_SHARDING) for hook in hooks)


def _described(module: Any, window: int | None) -> Any:
    """Return a config for a module without one of transformers: its own settings, window, and a digest of attributes.

    The modules' attributes determine the scores of equal weights, as their code does.
    """
    own = getattr(module, "config", None)
    settings = own if isinstance(own, Mapping) else getattr(own, "__dict__", {})
    settings = {key: value for key, value in settings.items() if isinstance(value, (bool, int, float, str, type(None)))}
    windows = (window, *(settings.get(key) for key in _WINDOW_KEYS))
    length = next((value for value in windows if isinstance(value, int) and value > 0), None)
    if length is None:
        raise UsageError(
            f"window: the config of {class_of(module).__name__} has none of {', '.join(_WINDOW_KEYS)}; give window=…, "
            "the longest sequence in tokens"
        )
    attributes = attributes_digest(module)
    config = PreTrainedConfig(max_position_embeddings=length, own_settings=settings, attributes=attributes)
    select_attention(config, "own")
    return config
