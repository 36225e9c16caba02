"""Named models: the paper's models, shipped as configs, and a user's own.

In: `configs/models/*.yaml`, or a file of the same form. Out: a `NamedModel`. The form:

    backbone: llama | qwen2 | gpt_neox
    base: {all keys of the backbone's config.json, without defaults}
    attentions: {cog: {…}, differential: {…}, integral: {…}}    # settings the papers leave open, per attention
    models:
      NAME: {description: …, attention_variant: …, variant_layers: all | top 50% | [10, 11], …}

A model's own keys take precedence over its attention's, and these over the base. In a user's file, `base` may name one
of evalkit's files (`base: llama_125m`), which then also provides the backbone and the attentions. `write_random` writes
a model with random weights: the same seed gives bit-identical weights, another dtype the same weights, rounded.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from evalkit.display import Say, doing, imports
from evalkit.errors import CheckpointError, UnknownNameError, UsageError, check_known, reading_as, writing
from evalkit.inputs.validated import FileSettings, Named, read_settings
from evalkit.models.loading.files import copy_files, tokenizer_files
from evalkit.models.loading.locate import DTYPES, silent, tokenizer_folder
from evalkit.models.variants.settings import ALL_KEYS, PREFIX, VANILLA, layers_of, positive_integer
from evalkit.models.zoo.shapes import Backbone, ModelShape, read_shape
from evalkit.models.zoo.train_tokenizer import train_tokenizer
from evalkit.paths import resource

_OPTIONAL = {"llama": ("head_dim",), "qwen2": ("head_dim",), "gpt_neox": ()}
"""Keys of each backbone that need not be given."""
_STOCK = ("llama", "gpt_neox")
"""Backbones whose vanilla models have transformers' own model type, so that they load without evalkit. Not Qwen2: with
its model type, transformers reads every tokenizer as Qwen2's, and splits text differently from Mixtral's tokenizer."""
SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class NamedModel:
    """A model that can be built."""

    name: str
    description: str
    source: Path
    config: dict[str, Any]
    shape: ModelShape


class _ModelsFile(FileSettings):
    """A file of models; see the module. Config values are validated like a checkpoint's (`shapes.py`)."""

    backbone: Backbone | None = None
    base: str | dict[str, Any] | None = None
    attentions: dict[str, dict[str, Any]] = Field(default_factory=dict)
    models: Annotated[Named[dict[str, Any]], Field(min_length=1)]


@cache
def models() -> tuple[NamedModel, ...]:
    """Return the models shipped with evalkit, in the order of their files."""
    return tuple(model for path in sorted(_shipped().values()) for model in read_models(path))


def named_model(given: str) -> NamedModel:
    """Return a model by name, or from a user's file: `FILE.yaml`, or `FILE.yaml:NAME` if it defines several."""
    file, _, name = given.partition(":")
    if not file.endswith(SUFFIXES):
        known, name = models(), given
    else:
        known = tuple(read_models(Path(file)))
        if not name and len(known) > 1:
            raise UsageError(f"{file} holds {len(known)} models; name one, such as {file}:{known[0].name}")
    for model in known:
        if name in ("", model.name):
            return model
    raise UnknownNameError("model", name, [model.name for model in known])


def read_models(path: Path) -> list[NamedModel]:
    """Read all models of a file. Raises a `UsageError` that names the model and the key if the form is another one."""
    content = read_settings(path, _ModelsFile, UsageError)
    base, backbone, attentions = content.base, content.backbone, content.attentions
    if isinstance(base, str):
        if base not in _shipped():
            raise UsageError(f"{path}: {UnknownNameError('base', base, _shipped())}")
        if backbone is not None:
            raise UsageError(f"{path}: base {base} determines the backbone; leave 'backbone' out")
        shipped = read_settings(_shipped()[base], _ModelsFile, UsageError)
        base, backbone = shipped.base, shipped.backbone
        attentions = shipped.attentions | {
            name: shipped.attentions.get(name, {}) | keys for name, keys in attentions.items()
        }
    if not isinstance(base, dict) or backbone is None:
        raise UsageError(f"{path}: write 'base' and 'backbone', or name one of evalkit's in 'base', such as llama_125m")
    read = []
    for name, own in content.models.items():
        keys = base | attentions.get(str(own.get("attention_variant")), {}) | own
        description = str(keys.pop("description", ""))
        try:
            config, shape = _config(backbone, keys)
        except (UnknownNameError, ValueError) as error:
            raise UsageError(f"{path}: model '{name}': {error}") from error
        read.append(NamedModel(name, description, path, config, shape))
    return read


def _shipped() -> dict[str, Path]:
    return {path.stem: path for path in resource("configs", "models").glob("*.yaml")}


@cache
def _base_keys() -> dict[str, tuple[str, ...]]:
    """Return the keys that each backbone needs: those of its base in evalkit's files."""
    files = [read_settings(path, _ModelsFile, UsageError) for path in _shipped().values()]
    return {str(file.backbone): tuple(file.base) for file in files if isinstance(file.base, dict)}


def _config(backbone: str, keys: dict[str, Any]) -> tuple[dict[str, Any], ModelShape]:
    required = (*_base_keys()[backbone], "attention_variant", "variant_layers")
    known = (*required, *_OPTIONAL[backbone], *ALL_KEYS, "description")
    check_known("key", map(str, keys), known)
    for key in required:
        if keys.get(key) is None:
            raise ValueError(f"'{key}' is missing")
    count = positive_integer(keys, "num_hidden_layers")
    layers = upto_last(keys, layers_of(keys["variant_layers"], count), count)
    config = {"model_type": f"{PREFIX}{backbone}"} | keys | {"variant_layers": layers}
    # With evalkit's model type, so that attention settings are validated for vanilla models too
    shape = read_shape(config)
    if keys["attention_variant"] == VANILLA and backbone in _STOCK:
        config = {key: value for key, value in config.items() if key not in ALL_KEYS} | {"model_type": backbone}
    return config, shape


def upto_last(keys: Mapping[str, Any], layers: Sequence[int], count: int) -> list[int]:
    """Return the layers of an attention, without the last of `count` where `cog_keep_last` is set."""
    return [layer for layer in layers if not (keys.get("cog_keep_last") and layer == count - 1)]


def attention_settings(variant: str) -> dict[str, Any]:
    """Return the settings of an attention that evalkit's own models have where the papers leave them open."""
    return dict(read_settings(_shipped()["llama_125m"], _ModelsFile, UsageError).attentions[variant])


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yield a folder to write to; rename it to `output` at the end, or remove it on failure.

    Raises a `UsageError` if `output` exists and is not empty, or is the working directory.
    """
    if output.exists() and output.samefile(Path.cwd()):
        # Replacing it would invalidate the shell's working directory
        raise UsageError(f"--output {output}: is the working directory; choose another folder, such as one inside it")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"--output {output}: already exists, and is not empty; choose another folder")
    part = output.with_name(f".{output.name}.partial")
    try:
        # Left behind by a killed process
        shutil.rmtree(part, ignore_errors=True)
        with writing(output):
            part.mkdir(parents=True)
            yield part
            part.replace(output)
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
    """Write a checkpoint with random weights of a seed and a dtype to a new folder.

    Its tokenizer is copied from a folder or a hub name, or trained on `texts`, files or folders.
    """
    check_known("dtype", [dtype], DTYPES)
    if (tokenizer is None) == (not texts):
        raise UsageError("a checkpoint needs a tokenizer: either --tokenizer FOLDER|HUB-NAME or --train-tokenizer TEXT")
    with new_folder(output) as folder:
        with doing("training a tokenizer" if texts else "reading the tokenizer", slow=imports("transformers")):
            from evalkit.models.loading.tokenizer import load_tokenizer, tokens_without_rows

            # Read from the user's folder, because errors name it
            source, vocabulary = folder, model.shape.vocabulary
            if tokenizer is not None:
                source = tokenizer_folder(tokenizer, say)
                copy_files(tokenizer_files(source), source, folder)
            elif (reached := train_tokenizer(texts, vocabulary, folder)) < vocabulary:
                say(
                    f"the text yields only {reached:,} tokens; the model's vocabulary stays at {vocabulary:,}, "
                    f"whose last {vocabulary - reached:,} rows are unused"
                )
            written = load_tokenizer(source, vocabulary)
            if more := tokens_without_rows(written, vocabulary):
                raise CheckpointError(
                    f"{source}: the tokenizer has ids up to {max(more)}, but the model's vocabulary has {vocabulary}; "
                    "take another tokenizer"
                )
        with doing(f"making the weights of {model.name}", slow=imports("torch")):
            _write_model(folder, model, written, seed, dtype)


def _write_model(folder: Path, model: NamedModel, tokenizer: Any, seed: int, dtype: str) -> None:
    import torch

    import evalkit.models.auto  # noqa: F401
    from evalkit.compatibility.transformers import quiet

    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    with quiet(), torch.random.fork_rng(devices=[]):
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(seed)
        # transformers raises errors of any type; the model's keys are the cause
        with reading_as(model.source, f"a file of model '{model.name}'", UsageError):
            config = AutoConfig.for_model(**model.config, **ids)
            built: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        built.to(getattr(torch, dtype)).save_pretrained(folder)
