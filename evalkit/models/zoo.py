"""Models by name: the paper's, of which evalkit ships the configs, and a user's own.

In: `configs/models/*.yaml`, or a file of the same form. Out: a `NamedModel`. The form:

    backbone: llama | qwen2 | gpt_neox
    base: {all keys of the backbone's config.json, none left to a default}
    attentions: {cog: {…}, differential: {…}, integral: {…}}    # the open readings, once for each attention
    models:
      NAME: {description: …, attention_variant: …, variant_layers: all | top 50% | [10, 11], …}

A model's own keys win over its attention's, and these over the base. In a user's file `base` may be the name of one of
evalkit's (`base: llama_125m`), which then gives the backbone and the attentions too. Nothing heavy is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from evalkit.errors import UnknownNameError, UsageError
from evalkit.inputs.settings import FileSettings, Named, read_settings
from evalkit.models.shapes import Backbone, ModelShape, layer_count, read_shape
from evalkit.models.variants.settings import ALL_KEYS, VANILLA, layers_of
from evalkit.resources import resource

_EVERYWHERE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act",
    "max_position_embeddings", "initializer_range", "rope_parameters", "tie_word_embeddings", "attention_dropout",
)  # fmt: skip
_KEYS: dict[str, tuple[str, ...]] = {
    "llama": (*_EVERYWHERE, "num_key_value_heads", "rms_norm_eps", "attention_bias", "mlp_bias"),
    "qwen2": (*_EVERYWHERE, "num_key_value_heads", "rms_norm_eps", "use_sliding_window"),
    "gpt_neox": (*_EVERYWHERE, "layer_norm_eps", "attention_bias", "hidden_dropout", "use_parallel_residual"),
}
"""What a backbone's config has to say."""
_OPTIONAL = {"llama": ("head_dim",), "qwen2": ("head_dim",), "gpt_neox": ()}
_STOCK = ("llama", "gpt_neox")
"""Backbones whose vanilla models are of transformers' own type, so that they load without evalkit. Under Qwen2's,
transformers reads any tokenizer as Qwen2's, and splits text as no model with Mixtral's has seen it."""
SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class NamedModel:
    """A model that can be built."""

    name: str
    description: str
    source: Path
    """The file that names it."""
    config: dict[str, Any]
    """Keys of its config.json."""
    shape: ModelShape


class _ModelsFile(FileSettings):
    """See the module. What configs have under their keys is judged as a checkpoint's is (`shapes.py`)."""

    backbone: Backbone | None = None
    base: str | dict[str, Any] | None = None
    attentions: dict[str, dict[str, Any]] = Field(default_factory=dict)
    models: Annotated[Named[dict[str, Any]], Field(min_length=1)]


def models() -> list[NamedModel]:
    """The models that evalkit ships, in the order of their files."""
    return [model for path in sorted(_shipped().values()) for model in read_models(path)]


def named_model(given: str) -> NamedModel:
    """A model by its name, or from a user's file: `FILE.yaml`, or `FILE.yaml:NAME` where that holds several.

    Raises:
        UnknownNameError: there is no such model.
        UsageError: the file cannot be read, or what it describes cannot be.
    """
    file, _, name = given.partition(":")
    own = file.endswith(SUFFIXES)
    found = {model.name: model for model in (read_models(Path(file)) if own else models())}
    if own and not name:
        if len(found) > 1:
            raise UsageError(f"{file} holds {len(found)} models; name one, such as {file}:{next(iter(found))}")
        return next(iter(found.values()))
    wanted = name if own else given
    if wanted not in found:
        raise UnknownNameError("model", wanted, found)
    return found[wanted]


def read_models(path: Path) -> list[NamedModel]:
    """All models of a file.

    Raises:
        UsageError: not a file of this form; names the model and the key.
    """
    content = read_settings(path, _ModelsFile, UsageError)
    base, backbone, attentions = content.base, content.backbone, content.attentions
    if isinstance(base, str):
        if base not in _shipped():
            raise UsageError(f"{path}: {UnknownNameError('base', base, _shipped())}")
        if backbone is not None:
            raise UsageError(f"{path}: base {base} decides the backbone; leave 'backbone' out")
        beneath = read_settings(_shipped()[base], _ModelsFile, UsageError)
        base, backbone = beneath.base, beneath.backbone
        attentions = beneath.attentions | {
            name: beneath.attentions.get(name, {}) | own for name, own in attentions.items()
        }
    if not isinstance(base, dict) or backbone is None:
        raise UsageError(f"{path}: write 'base' and 'backbone', or name one of evalkit's in 'base', such as llama_125m")
    return [_model(path, name, backbone, base, attentions, own) for name, own in content.models.items()]


def _model(
    path: Path, name: str, backbone: str, base: dict[str, Any], attentions: dict[str, Any], own: dict[str, Any]
) -> NamedModel:
    where = f"{path}: model '{name}'"
    variant = str(own.get("attention_variant"))
    config = base | attentions.get(variant, {}) | own
    description = str(config.pop("description", ""))
    _check_keys(where, backbone, config)
    try:
        layers = layers_of(config["variant_layers"], layer_count(config))
        if config.get("cog_keep_last"):  # so that "all" and "top 50%" can be said beside it
            layers = tuple(layer for layer in layers if layer != config["num_hidden_layers"] - 1)
        config["variant_layers"] = list(layers)
        # As a type of evalkit's first, so that what is said of the attention is judged for vanilla too
        shape = read_shape({"model_type": f"evalkit_{backbone}"} | config)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from error
    model_type = f"evalkit_{backbone}"
    if variant == VANILLA and backbone in _STOCK:
        model_type = backbone
        config = {key: value for key, value in config.items() if key not in ALL_KEYS}
    return NamedModel(name, description, path, {"model_type": model_type} | config, shape)


def _check_keys(where: str, backbone: str, config: dict[str, Any]) -> None:
    known = (*_KEYS[backbone], *_OPTIONAL[backbone], *ALL_KEYS, "description")
    for key in config:
        if key not in known:
            raise UsageError(f"{where}: {UnknownNameError('key', str(key), known)}")
    for key in (*_KEYS[backbone], "attention_variant", "variant_layers"):
        if config.get(key) is None:
            raise UsageError(f"{where}: '{key}' is missing")


def _shipped() -> dict[str, Path]:
    return {path.stem: path for path in resource("configs", "models").glob("*.yaml")}
