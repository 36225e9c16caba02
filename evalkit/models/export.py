"""Export a checkpoint that loads without evalkit: copy the variants' modules beside its weights.

In: a checkpoint of one of evalkit's model types. Out: a folder that `from_pretrained(…, trust_remote_code=True)` loads
with torch and transformers alone, and that evalkit loads without running the copied code.
"""

from __future__ import annotations

import json
from pathlib import Path

from evalkit.activity import doing
from evalkit.errors import CheckpointError
from evalkit.models import variants
from evalkit.models.config_check import check_sizes
from evalkit.models.files import GENERATION_CONFIG, copy_files, safetensors_header, tokenizer_files
from evalkit.models.folder import new_folder
from evalkit.models.locate import Checkpoint
from evalkit.models.shapes import read_shape
from evalkit.models.snapshot import ChangeDetector

_MODULES = ("settings.py", "configuration.py", "signed.py", "attention.py", "modeling.py")
"""Modules that a model needs; they import only torch, transformers and each other."""
_CLASSES = {"evalkit_llama": "EvalkitLlama", "evalkit_qwen2": "EvalkitQwen2", "evalkit_gpt_neox": "EvalkitGPTNeoX"}
_OPTIONAL_FILES = (GENERATION_CONFIG, "model.safetensors.index.json", "pytorch_model.bin.index.json")


def export(checkpoint: Checkpoint, output: Path) -> None:
    """Write a checkpoint with its model code to `output`.

    Raises:
        UsageError: `output` exists and is not empty.
        CheckpointError: the model type is not one of evalkit's, the config is invalid, weights are missing, or `output`
            cannot be written.
    """
    config = checkpoint.config()
    kind = str(config.get("model_type"))
    if kind not in _CLASSES:
        raise CheckpointError(
            f"{checkpoint.given}: model type '{kind}' is none of evalkit's ({', '.join(_CLASSES)}); "
            "it loads without evalkit and needs no export"
        )
    try:
        read_shape(config)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.folder / 'config.json'}: {error}") from error
    folder, weights = checkpoint.folder, checkpoint.weights()
    if all(path.suffix == ".safetensors" for path in weights):
        check_sizes(checkpoint.given, config, sum(len(safetensors_header(path)) for path in weights))
    optional = [folder / name for name in _OPTIONAL_FILES if (folder / name).is_file()]
    files = [*weights, *tokenizer_files(folder), *optional]
    changes = ChangeDetector(checkpoint.given, [folder / "config.json", *files])
    name, code = _CLASSES[kind], Path(variants.__path__[0])
    # Both from one module: transformers copies each referenced module separately, and a model does not recognise the
    # settings classes of a config from another copy
    classes = {"AutoConfig": f"modeling.{name}Config", "AutoModelForCausalLM": f"modeling.{name}ForCausalLM"}
    with new_folder(output) as new:
        with doing(f"copying {checkpoint.given}"):
            copy_files(files, folder, new)
        copy_files([code / module for module in _MODULES], code, new)
        content = json.dumps(checkpoint.config() | {"auto_map": classes}, indent=2, ensure_ascii=False)
        (new / "config.json").write_text(content + "\n", encoding="utf-8")
        changes.check()
