"""GGUF files with one checkpoint's weights in several types, and their comparison with those of a loaded model.

In: a GGUF file of a Llama. Out: GGUF files with the same vocabulary and settings. One-dimensional tensors (the norms'
weights) stay float32, as llama.cpp's own converter leaves them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf import get_tensor_name_map as tensor_name_map
from gguf.quants import dequantize, quantize

FILE_TYPES = {
    "F32": LlamaFileType.ALL_F32,
    "F16": LlamaFileType.MOSTLY_F16,
    "BF16": LlamaFileType.MOSTLY_BF16,
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
}
"""Types of the files that can be written."""
_EMBEDDING = "token_embd.weight"
_FILE_TYPE = "general.file_type"
_ROUNDED = {GGMLQuantizationType.F16: torch.float16, GGMLQuantizationType.BF16: torch.bfloat16}


def main_type(path: Path) -> str:
    """Return the type of most matrices of a file, such as "Q4_1"."""
    kinds = Counter(tensor.tensor_type.name for tensor in GGUFReader(path).tensors if len(tensor.shape) > 1)
    return kinds.most_common(1)[0][0]


def write_gguf(source: Path, target: Path, kind: str) -> None:
    """Write a file's weights in another type; a quantised file keeps the embedding's own type."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name == "general.architecture" or name.startswith("GGUF."):
            continue  # written by the writer itself
        first, last = field.types[0], field.types[-1]
        value = int(FILE_TYPES[kind]) if name == _FILE_TYPE else field.contents()
        writer.add_key_value(name, value, first, sub_type=last if first is GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        new = _new_type(tensor, GGMLQuantizationType[kind])
        data = tensor.data if new is tensor.tensor_type else quantize(dequantize(tensor.data, tensor.tensor_type), new)
        writer.add_tensor(tensor.name, data, raw_dtype=new)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _new_type(tensor: Any, kind: GGMLQuantizationType) -> GGMLQuantizationType:
    if len(tensor.shape) == 1:
        return GGMLQuantizationType.F32
    if tensor.name == _EMBEDDING and kind is GGMLQuantizationType.Q4_0:
        return GGMLQuantizationType(tensor.tensor_type)
    return kind


def check_weights(path: Path, model: Any) -> None:
    """Check that a file holds a float32 model's weights, rounded to the type of each tensor if that is a float type.

    Raises:
        ValueError: a tensor differs, or the model is not a Llama.
    """
    for name, parameter, values, kind in _weights(path, model):
        if not torch.equal(parameter.to(_ROUNDED.get(kind, torch.float32)).float(), values):
            raise ValueError(f"{path}: its tensor for {name} differs from the model's")


def set_weights(path: Path, model: Any) -> None:
    """Give a model a file's weights, dequantised. Raises `ValueError` if it is not a Llama."""
    for _, parameter, values, _ in _weights(path, model):
        parameter.copy_(values)


def _weights(path: Path, model: Any) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, GGMLQuantizationType]]:
    """Yield each parameter's name, its data, the file's values for it in float32, and their type."""
    config = model.config
    if config.model_type != "llama":
        raise ValueError(f"the model is a {config.model_type}, not a llama, whose rows can be reordered")
    stored = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    names = tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        tensor = stored[names.get_name(name, (".weight",))]
        values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        yield name, parameter.detach(), _halves(values, heads) if heads else values, tensor.tensor_type


def _halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder [heads × size, d_model]: llama.cpp rotates neighbouring rows, transformers rows half a head apart."""
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
