"""Read a checkpoint's weights and build its model from config.json and these, with transformers' `from_pretrained`.

In: a `Checkpoint`. Out: the model, and transformers' report on each weight. The loaded bytes are the hashed bytes, even
if files change meanwhile: the small files are copied to a temporary folder, and only hashed ones, so transformers finds
no others; the weights are hashed as they are read, and no tensor stays mapped to a file. The model is first built on
the meta device, so that one far larger than its weights is rejected before memory is allocated.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from safetensors import safe_open
from transformers import AutoModelForCausalLM, GenerationConfig

from evalkit.compatibility.torch import built_without_parameters
from evalkit.compatibility.transformers import (
    attention_of,
    built_by_its_code,
    quiet,
    without_code_of_checkpoints,
)
from evalkit.errors import CheckpointError, reading_as
from evalkit.models.loading.files import copy_files, generation_files, quantization
from evalkit.models.loading.fingerprint import file_sha256
from evalkit.models.loading.locate import Checkpoint
from evalkit.models.module_state import content_digest, unsaved_tensors
from evalkit.paths import temporary_folder

_LARGE = 2**18
"""Bytes from which a tensor is rounded as it is read."""
_WIDE = (torch.float64, torch.float32)
_EXCESS, _PACKED = 2, 32
"""Most parameters of a model as a multiple of the numbers in its files, plain and quantised. Below a factor of two,
missing weights and wrong shapes are reported by name after loading; quantised weights are packed."""
_MOST_BUFFERED = 2**31
"""Limit on the numbers in buffers, such as a mask over all positions."""
_KEPT = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
_LIBRARY = "transformers."
"""Beginning of the modules' names of classes that transformers builds on the meta device without loss."""
_FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass
class Weights:
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    digests: list[tuple[str, str]] = field(default_factory=list)
    """Name and SHA-256 of each file, in order."""
    stored: Counter[torch.dtype] = field(default_factory=Counter)
    """Numbers stored in each floating-point dtype."""
    are_rounded: bool = False
    """Whether a tensor was rounded as it was read."""

    def add(self, name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> None:
        if tensor.is_floating_point():
            self.stored[tensor.dtype] += tensor.numel()
        is_wider = dtype is not None and tensor.dtype in _WIDE and tensor.itemsize > dtype.itemsize
        if is_wider and tensor.nbytes >= _LARGE:
            tensor, self.are_rounded = tensor.to(dtype), True
        self.tensors[name] = tensor


@contextmanager
def copied(checkpoint: Checkpoint) -> Iterator[Checkpoint]:
    """Copy a checkpoint's small files for the duration of the context, whose errors name the checkpoint's own paths."""
    with temporary_folder() as folder:
        copies = replace(
            checkpoint, folder=folder / "checkpoint", tokenizer=checkpoint.tokenizer and folder / "tokenizer"
        )
        try:
            config, others = checkpoint.folder / "config.json", generation_files(checkpoint.folder)
            copy_files((config, *others, *checkpoint.trusted_code()), checkpoint.folder, copies.folder)
            source, target = checkpoint.tokenizer or checkpoint.folder, copies.tokenizer or copies.folder
            copy_files(checkpoint.tokenizer_files(), source, target)
            yield copies
        except CheckpointError as error:
            text = str(error).replace(str(copies.folder), str(checkpoint.folder))
            if checkpoint.tokenizer is not None:
                text = text.replace(str(copies.tokenizer), str(checkpoint.tokenizer))
            raise CheckpointError(text) from error


def read_weights(files: Iterable[Path], dtype: torch.dtype | None = None) -> Weights:
    """Read and hash weight files; if two contain a tensor of the same name, the later file takes precedence.

    Large wider floating-point tensors of safetensors files are rounded to `dtype`, so that memory never holds all of
    them as stored; None: all tensors stay as stored. Raises `CheckpointError` if a file is damaged, or changes while it
    is read.
    """
    weights = Weights()
    for path in files:
        with reading_as(path, "undamaged weights", CheckpointError):
            if path.suffix == ".safetensors":
                content = _read_safetensors(path, weights, dtype)
            else:
                content = _read_pickled(path, weights)
        weights.digests.append((path.name, file_sha256(path, content)))
    return weights


def _read_safetensors(path: Path, weights: Weights, dtype: torch.dtype | None) -> str:
    """Read a file's tensors; return the xxh3 of its content: the header, then the tensors in the order of the file."""
    digest = xxhash.xxh3_128()
    # Read, not mapped: a process that has mapped a file is killed when the file is truncated
    with safe_open(path, "pt", backend="pread") as shard, path.open("rb") as file:
        length = file.read(8)
        digest.update(length + file.read(int.from_bytes(length, "little")))
        for name in shard.offset_keys():
            tensor = shard.get_tensor(name)
            if tensor.numel():
                digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
            weights.add(name, tensor, dtype)
    return digest.hexdigest()


def _read_pickled(path: Path, weights: Weights) -> str:
    content = path.read_bytes()
    for name, tensor in dict(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)).items():
        if isinstance(tensor, torch.Tensor):
            weights.add(str(name), tensor, None)
    return xxhash.xxh3_128(content).hexdigest()


# The model


class BuiltModel(NamedTuple):
    model: Any
    report: dict[str, Any]
    """transformers' `loading_info`."""
    codes: tuple[str, ...]
    """Names of weights in integers or 8 bits that were loaded without dequantisation."""
    undetermined: tuple[str, ...]
    """Names of tensors that neither the files nor the code of the model's class determine."""
    unset: tuple[str, ...]
    """Names of tensors with NaN in place of memory that the code leaves uninitialised, and may set later."""


class _ReadOnceTensor:
    """A tensor that is freed when transformers, to which it is a lazy slice of a file, has read `tensor[...]` once."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.shape = tensor.dtype, tensor.shape
        self.was_read = False
        self._tensor: torch.Tensor | None = tensor

    def __getitem__(self, _: Any) -> torch.Tensor | None:
        tensor, self._tensor, self.was_read = self._tensor, None, True
        return tensor


def build_model(
    checkpoint: Checkpoint,
    files: Iterable[Path],
    weights: Weights,
    config: Any,
    dtype: torch.dtype,
    attention: str,
    remote: bool,
) -> BuiltModel:
    """Build a causal language model on the CPU from a transformers config.

    `checkpoint` has copies of the small files, `weights` are those of `files`. `remote`: the model class is defined by
    code in the folder. The tensors of `weights` are emptied, so that each is freed once it is converted.
    """
    given, tensors = checkpoint.given, weights.tensors
    with quiet(), torch.random.fork_rng(devices=[]), without_code_of_checkpoints():
        is_quantised = bool(quantization(checkpoint.config()))
        meta_model = _unloaded_model(config, dtype, attention, remote, on_meta=True)
        _check_against(given, meta_model, tensors, _PACKED if is_quantised else _EXCESS)
        floating = [weight.dtype for weight in meta_model.state_dict().values() if weight.is_floating_point()]
        keeps_wider = any(getattr(meta_model, name, None) for name in _KEPT)
        if weights.are_rounded and (keeps_wider or any(wide.itemsize > dtype.itemsize for wide in floating)):
            tensors.clear()
            again = read_weights(files)
            if again.digests != weights.digests:
                raise CheckpointError(f"{given}: its weights changed while they were read")
            tensors = again.tensors
        # transformers inspects quantised tensors before it reads them, so they cannot be read-once
        state_dict = {name: tensor if is_quantised else _ReadOnceTensor(tensor) for name, tensor in tensors.items()}
        tensors.clear()
        kind = type(meta_model)
        is_own_code = not kind.__module__.startswith(_LIBRARY)
        # Never a folder: transformers would apply adapters, fall back to pickles, and read files that nobody hashed
        with built_by_its_code(kind) if is_own_code else nullcontext():
            model, report = kind.from_pretrained(
                None,
                config=meta_model.config,
                state_dict=state_dict,
                dtype=dtype,
                attn_implementation=attention_of(meta_model.config),
                local_files_only=True,
                ignore_mismatched_sizes=True,  # otherwise the error names no tensor
                output_loading_info=True,
            )
        unsaved = dict[str, torch.Tensor]()
        undetermined: tuple[str, ...] = ()
        if is_own_code:
            unsaved = unsaved_tensors(model)
            rebuilt = unsaved_tensors(_unloaded_model(config, dtype, attention, remote, on_meta=False))
            undetermined = _undetermined(model, unsaved, rebuilt)
        if model.can_generate():
            # As for a folder, but without code that it may hold for generation
            model.generation_config = (
                GenerationConfig.from_pretrained(str(checkpoint.folder), local_files_only=True)
                if generation_files(checkpoint.folder)
                else GenerationConfig.from_model_config(checkpoint.config())
            )
    codes = () if is_quantised else _codes(model, state_dict)
    numbers = {} if undetermined else {name: tensor for name, tensor in unsaved.items() if not tensor.is_meta}
    unset = tuple(name for name, tensor in numbers.items() if tensor.isnan().any())
    return BuiltModel(model, report, codes, undetermined, unset)


def _unloaded_model(config: Any, dtype: torch.dtype, attention: str, remote: bool, on_meta: bool) -> Any:
    """Build the model without parameters, and on the meta device if its code can be built there.

    The attention "auto" selects sdpa, or eager for architectures without sdpa.
    """

    def build(implementation: str) -> Any:
        settings = {"dtype": dtype, "attn_implementation": implementation, "trust_remote_code": remote}
        if on_meta:
            # Code that reads the numbers of tensors fails there
            with suppress(Exception), torch.device("meta"):
                return AutoModelForCausalLM.from_config(config, **settings)
        with built_without_parameters():
            return AutoModelForCausalLM.from_config(config, **settings)

    try:
        return build("sdpa" if attention == "auto" else attention)
    except ValueError as error:
        # Part of transformers' message about an architecture without this implementation
        if attention != "auto" or "scaled_dot_product_attention" not in str(error):
            raise
    return build("eager")


def _check_against(given: str, model: Any, tensors: Mapping[str, torch.Tensor], excess: int) -> None:
    """Raise a `CheckpointError` for a model far larger than its weights, or for two tensors of one weight."""
    stored = sum(tensor.numel() for tensor in tensors.values())
    buffered = sum(buffer.numel() for buffer in model.buffers())
    if sum(weight.numel() for weight in model.parameters()) > excess * stored or buffered > _MOST_BUFFERED:
        raise CheckpointError(
            f"{given}: config.json describes a far larger model than its files hold ({stored:,} numbers in "
            f"{len(tensors):,} weights); its sizes, or its number of layers or positions, are wrong"
        )
    base = model.base_model_prefix
    for name in tensors:  # layers.0… and model.layers.0…; transformers could load either
        if name.startswith(f"{base}.") and (bare := name.removeprefix(f"{base}.")) in tensors:
            raise CheckpointError(f"{given}: holds {name} and {bare}, two tensors for one weight; remove one of them")


def _undetermined(
    model: Any, unsaved: Mapping[str, torch.Tensor], again: Mapping[str, torch.Tensor]
) -> tuple[str, ...]:
    """Return the names of tensors that neither files nor the code of a model determine.

    They have no numbers, or others in `again`, the unsaved tensors of a second model of the same config. A parameter
    that the code keeps in an attribute too is not in `again`, and stays there without numbers when it is loaded.
    """

    def is_random(name: str) -> bool:
        if name not in again:
            return not unsaved[name].is_meta
        return again[name].is_meta or content_digest(unsaved[name]) != content_digest(again[name])

    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors |= {name: unsaved[name] for name in unsaved.keys() & again}
    empty = [name for name, tensor in tensors.items() if tensor.is_meta]
    return (*empty, *(name for name in unsaved if name not in empty and is_random(name)))


def _codes(model: Any, state_dict: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of loaded integer or 8-bit tensors that no integer tensor of the model takes as they are.

    transformers may rename tensors when it loads them, but not their last parts.
    """
    state = model.state_dict().items()
    integers = {_last_part(name, tensor) for name, tensor in state if not tensor.is_floating_point()}
    codes = {name: tensor for name, tensor in state_dict.items() if tensor.was_read and tensor.dtype not in _FLOATING}
    return tuple(name for name, tensor in codes.items() if _last_part(name, tensor) not in integers)


def _last_part(name: str, tensor: Any) -> tuple[str, tuple[int, ...]]:
    return name.rpartition(".")[2], tuple(tensor.shape)
