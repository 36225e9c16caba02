"""Write a named model with random weights as a checkpoint folder that evalkit and transformers load.

In: a `NamedModel`, a seed, and the source of its tokenizer. Out: config.json, model.safetensors, the tokenizer's
files and generation_config.json. The same seed gives bit-identical weights; another dtype gives the same weights,
rounded.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from evalkit.display import Say, doing, imports
from evalkit.errors import CheckpointError, UnknownNameError, UsageError, first_line
from evalkit.models import variants
from evalkit.models.config_check import check_sizes
from evalkit.models.files import GENERATION_CONFIG, copy_files, safetensors_header, tokenizer_files
from evalkit.models.locate import DTYPES, Checkpoint, silent, tokenizer_folder
from evalkit.models.shapes import read_shape
from evalkit.models.snapshot import ChangeDetector
from evalkit.models.train_tokenizer import train_tokenizer
from evalkit.models.zoo import NamedModel

_MODULES = ("settings.py", "signed.py", "attention.py", "modeling.py")
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


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yield a folder to write to; rename it to `output` at the end, or remove it on failure.

    Raises:
        UsageError: `output` exists and is not empty, or is the working directory.
        CheckpointError: the folder cannot be written.
    """
    if output.exists() and output.samefile(Path.cwd()):
        # Replacing it would invalidate the shell's working directory
        raise UsageError(f"--output {output}: is the working directory; choose another folder, such as one inside it")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"--output {output}: already exists; choose another folder, or remove it first")
    part = output.with_name(f".{output.name}.partial")
    try:
        # Left behind by a killed process
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        yield part
        part.replace(output)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or first_line(error)
        raise CheckpointError(
            f"--output {output}: cannot be written ({why}); free space, or choose another --output"
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_random(
    model: NamedModel,
    output: Path,
    *,
    seed: int,
    dtype: str = "float32",
    tokenizer: str | None = None,
    texts: Sequence[Path] = (),
    say: Say = silent,
) -> None:
    """Write a checkpoint with random weights.

    Args:
        model: the model to build.
        output: the folder to write; must not exist or be empty.
        seed, dtype: of the weights.
        tokenizer: a folder or a hub name whose tokenizer files are copied.
        texts: files or folders to train a tokenizer on instead.
        say: called with warnings.

    Raises:
        UsageError: not exactly one of `tokenizer` and `texts` is given, `output` exists and is not empty, or
            transformers cannot build the model.
        CheckpointError: the tokenizer is larger than the model's vocabulary, or `output` cannot be written.
    """
    if dtype not in DTYPES:
        raise UnknownNameError("dtype", dtype, DTYPES)
    if (tokenizer is None) == (not texts):
        raise UsageError("a checkpoint needs a tokenizer: either --tokenizer FOLDER|HUB-NAME or --train-tokenizer TEXT")
    with new_folder(output) as folder:
        with doing("training a tokenizer" if texts else "reading the tokenizer", slow=imports("transformers")):
            written = _write_tokenizer(folder, model.shape.vocabulary, tokenizer, texts, say)
        with doing(f"making the weights of {model.name}", slow=imports("torch")):
            _write_model(folder, model, written, seed, dtype)


def _write_tokenizer(folder: Path, vocabulary: int, tokenizer: str | None, texts: Sequence[Path], say: Say) -> Any:
    """Write the tokenizer files to the folder and return the loaded tokenizer."""
    from evalkit.models.tokenizer import load_tokenizer

    if tokenizer is not None:
        given = tokenizer_folder(tokenizer, say)
        copy_files(tokenizer_files(given), given, folder)
        # Read from the user's folder, because errors name it
        return load_tokenizer(given, vocabulary)
    reached = train_tokenizer(texts, vocabulary, folder)
    if reached < vocabulary:
        say(
            f"the text yields only {reached:,} tokens; the model's vocabulary stays at {vocabulary:,}, "
            f"whose last {vocabulary - reached:,} rows are unused"
        )
    return load_tokenizer(folder, vocabulary)


def _write_model(folder: Path, model: NamedModel, tokenizer: Any, seed: int, dtype: str) -> None:
    import torch

    import evalkit.models.auto  # noqa: F401
    from evalkit.compatibility.transformers import quiet

    with quiet():
        from transformers import AutoConfig, AutoModelForCausalLM

        ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                config = AutoConfig.for_model(**model.config, **ids)
                built: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            except Exception as error:  # transformers raises errors of any type; the model's keys are the cause
                raise UsageError(
                    f"{model.source}: model '{model.name}' cannot be built ({first_line(error)})"
                ) from error
        built.to(getattr(torch, dtype)).save_pretrained(folder)
