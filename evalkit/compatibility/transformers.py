"""Uses of transformers' private API; works with transformers 5.23.0.

transformers is imported when a function is called, so that its callers can be imported without it. Each function says
why no public name serves.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from evalkit.compatibility.names import replaced

_CAPTURING = "transformers.utils.output_capturing"
_OF_CHECKPOINTS = "transformers_modules."
_LIBRARY = "transformers."
_MODELS = "transformers.models."
_READ = re.compile(
    r"""config(?:uration)?(?:\.get_text_config\([^()]*\))?\.(\w+)"""
    r"""|attr\(\s*[\w.]*(?:config|self)[\w.()]*,\s*["'](\w+)["']"""
    r"""|(?:kwargs|config)\.(?:get|pop|setdefault)\(\s*["'](\w+)["']"""
    r"""|["'](\w+)["'] (?:not )?in \w*(?:kwargs|config)|kwargs\[["'](\w+)["']\]"""
)
"""Names that code reads from a config or from its keyword arguments."""
_OWN = re.compile(r"\bself\.(\w+)")
"""Attributes that the code of a config reads."""
_NAME = re.compile(r"""\.(\w+)|["']([\w.]+)["']""")
"""Names in other code, which may read a config in other ways: attributes and strings."""
_INPUT_GRADIENTS = "PreTrainedModel.enable_input_require_grads.<locals>.make_inputs_require_grads"


def attention_of(config: Any) -> str | None:
    """Return the name of the attention function that a model's config selects, if any; only its setter is public."""
    implementation: str | None = config._attn_implementation
    return implementation


def select_attention(config: Any, name: str | None) -> None:
    """Select the attention function that a model's modules look up by name; it need not be one of transformers'.

    The public `set_attn_implementation` checks the name and walks through all modules each time, which is too slow to
    do before every batch.
    """
    attention_of(config)  # an error if a release has renamed it
    config._attn_implementation = name


def keeps_state(model: Any) -> bool:
    """Return whether a model keeps a state (Mamba, RecurrentGemma) in place of each token's keys and values.

    transformers' `generate` reads the same attribute; there is no public one.
    """
    return bool(getattr(model, "_is_stateful", False))


class CachedTensor(NamedTuple):
    """A tensor of a cache layer: `holder[key]`."""

    name: str
    holder: dict[Any, Any]
    key: Any

    @property
    def tensor(self) -> Any:
        return self.holder[self.key]


def cached_tensors(layer: Any) -> list[CachedTensor]:
    """Return the tensors of a layer of transformers' caches, attributes or in dicts of them, without single numbers."""
    import torch

    kept = []
    for name, value in vars(layer).items():
        places = [(value, key) for key in value] if isinstance(value, dict) else [(vars(layer), name)]
        for holder, key in places:
            if isinstance(holder[key], torch.Tensor) and holder[key].dim():
                kept.append(CachedTensor(name, holder, key))
    return kept


def generation_config_of(model: Any, settings: dict[str, Any]) -> Any:
    """Return a copy of a model's generation config with some settings replaced, as `generate` does.

    Only this method defines the precedence of the model's own settings, those of its config and the defaults.
    """
    config, _ = model._prepare_generation_config(None, **settings)
    return config


def logits_processors(model: Any, config: Any, ids: Any) -> Any:
    """Return the logits processors that `generate` would apply to the tokens after a prompt.

    The processors' classes are public; which of them apply, in what order and with which token ids is not. `config` is
    from `generation_config_of`, with `max_length` set; its special tokens become tensors. `ids` are [1, tokens], on the
    model's device. Raises `ValueError`, `TypeError` or `IndexError` if transformers rejects a setting.
    """
    model._prepare_special_tokens(config, True, device=model.device)
    return model._get_logits_processor(config, ids.shape[1], encoder_input_ids=ids, device=model.device)


def replace_encoding(tokenizer: Any, encode: Callable[..., Any]) -> None:
    """Replace the method of a tokenizer that encodes every text by a function of the tokenizer and its arguments.

    Its public callers are several, and `__call__` cannot be replaced on an instance. The function is a module's own, so
    that the tokenizer can be pickled.
    """
    original_encoding(tokenizer)  # an error if a release has renamed it
    tokenizer._encode_plus = partial(encode, tokenizer)


def original_encoding(tokenizer: Any) -> Callable[..., Any]:
    """Return the method that `replace_encoding` replaced."""
    return partial(type(tokenizer)._encode_plus, tokenizer)


def register_rotary(name: str, frequencies: Callable[..., Any]) -> None:
    """Add a function to the table in which rotary modules look up frequencies, and configs validate a `rope_type`."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    ROPE_INIT_FUNCTIONS[name] = frequencies


def quantization_methods() -> Collection[str]:
    """Return the values of `quant_method` that transformers supports, which no public function lists."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    return list(AUTO_QUANTIZATION_CONFIG_MAPPING)


def config_class(kind: Any) -> Any:
    """Return the config class of a model type, including registered ones; None if there is none.

    The public `AutoConfig.for_model` creates a config, whose defaults may be slow or raise.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    # Not get(), which this mapping inherits from a base class that is empty
    return CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else None  # noqa: SIM401


def declared_settings(kind: Any) -> Collection[str]:
    """Return the settings that a config class declares: fields, parameters, other names of these, and attributes.

    No public function lists them: a config also stores any other key that it is given.
    """
    declared = {field.name for field in dataclasses.fields(kind)} | {*dir(kind), *chain(*kind.attribute_map.items())}
    for base in kind.__mro__:
        declared.update(inspect.signature(vars(base).get("__init__", object.__init__)).parameters)
    return declared


@cache
def settings_read(kind: Any) -> Collection[str]:
    """Return the settings that the files of a config class and of its models read, declared or not."""
    names = set[str]()
    for base in kind.__mro__:
        is_library = base.__module__.startswith(_LIBRARY)
        if base.__module__ == "builtins" or (is_library and not base.__module__.startswith(f"{_LIBRARY}models.")):
            continue
        patterns = ("configuration_*.py", "modeling_*.py") if is_library else ("*.py",)
        folder = Path(inspect.getfile(base)).parent
        for path in (path for pattern in patterns for path in folder.glob(pattern)):
            content = path.read_text(encoding="utf-8", errors="replace")
            forms = [_READ, *([_OWN] if path.name.startswith("configuration_") else [])] if is_library else [_NAME]
            for match in chain.from_iterable(form.finditer(content) for form in forms):
                names.update(filter(None, match.groups()))
    return names


def masked_language_models() -> Collection[str]:
    """Return the model types that have a masked language model, and so attend in both directions by default.

    The keys of the public `MODEL_FOR_MASKED_LM_MAPPING` are config classes, which it imports.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return list(MODEL_FOR_MASKED_LM_MAPPING_NAMES)


def causal_language_models() -> Mapping[str, str]:
    """Return the name of the causal language model of each model type that has one, without importing it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def imported_layers(kind: str | None) -> list[type]:
    """Return torch's common layers and the classes beside the causal language model of a type; None: of all types.

    Classes that are not imported, which nothing can have changed, are left out.
    """
    from torch.nn import Embedding, LayerNorm, Linear, Module

    known = causal_language_models()
    names = set(known.values()) if kind is None else {known.get(kind)}
    layers: list[type] = [Embedding, LayerNorm, Linear]
    for path, module in [*sys.modules.items()]:
        if path.startswith(_MODELS) and ".modeling_" in path:
            defined = [part for part in vars(module).values() if getattr(part, "__module__", "") == path]
            if any(getattr(part, "__name__", "") in names for part in defined):
                layers += [part for part in defined if isinstance(part, type) and issubclass(part, Module)]
    return layers


def ties_head(model: Any) -> bool:
    """Return whether a model's class can tie its output head to its embedding, whatever its config requests."""
    head = model.get_output_embeddings()
    name = next((f"{name}.weight" for name, module in model.named_modules() if module is head), "")
    return any(re.search(pattern, name) for pattern in model._tied_weights_keys or ())


def changes_no_number(hook: Any) -> bool:
    """Return whether a hook is one of transformers' own that leaves all results as they are.

    These mark embeddings for activation checkpointing (`enable_input_require_grads`), or capture states, attention or
    router logits where a call requests them, after which they stay. If a version names them differently, a model with
    them counts as changed, and its evaluations are not resumed.
    """
    module = getattr(hook, "__module__", "")
    is_of_gradients = (module, getattr(hook, "__qualname__", "")) == ("transformers.modeling_utils", _INPUT_GRADIENTS)
    return is_of_gradients or module == _CAPTURING


@contextmanager
def saving_weights_with(save: Callable[..., None]) -> Iterator[None]:
    """Call a function in place of `safetensors.torch.save_file` within the block, whenever a model is saved.

    Only `save_pretrained` knows which tensors it writes, under which names, and into which files.
    """
    from transformers import modeling_utils

    with replaced(modeling_utils, safe_save_file=lambda _: save):
        yield


@contextmanager
def without_code_of_checkpoints() -> Iterator[None]:
    """Forget, within the block, the classes that code of checkpoints defines, and afterwards those defined in it.

    transformers keeps such a class for its config's class, and builds it for other checkpoints whose code has the same
    config, whatever else their code is.
    """
    from transformers import AutoModelForCausalLM

    def is_of_library(kind: Any) -> bool:
        return not kind.__module__.startswith(_OF_CHECKPOINTS)

    def others(known: Mapping[Any, Any]) -> dict[Any, Any]:
        return {config: kind for config, kind in known.items() if is_of_library(config) and is_of_library(kind)}

    with replaced(AutoModelForCausalLM._model_mapping, _extra_content=others):
        yield


@contextmanager
def built_by_its_code(kind: Any) -> Iterator[None]:
    """Build models of a class on the CPU within the block, without parameters, which `from_pretrained` loads.

    It builds them on the meta device and gives memory to what files do not hold: transformers' own classes initialise
    it, others leave buffers uninitialised, and tensors in attributes on the meta device. Here what is not loaded stays
    as the class builds it; missing parameters stay on the meta device.
    """
    from transformers import PreTrainedModel

    from evalkit.compatibility.torch import built_without_parameters, unsaved_buffers

    def contexts(original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        # After `torch.device("meta")`, which is among transformers' own
        return lambda *arguments: [*original(*arguments), built_without_parameters()]

    def only_of_unsaved(original: Callable[..., None]) -> Callable[..., None]:
        def initialise(model: Any, module: Any, *arguments: Any) -> None:
            if unsaved_buffers(module):
                original(model, module, *arguments)

        return initialise

    def nothing(_: Any) -> Callable[..., None]:
        return lambda *_: None

    with (
        replaced(PreTrainedModel, _initialize_weights=only_of_unsaved),
        replaced(
            kind,
            get_init_context=contexts,
            _move_missing_keys_from_meta_to_device=nothing,
            _initialize_missing_keys=nothing,
        ),
    ):
        yield


@contextmanager
def without_gguf_bar() -> Iterator[None]:
    """Hide the progress bar of reading GGUF files within the block; it ignores transformers' public switch."""
    from transformers import modeling_gguf_pytorch_utils

    with replaced(modeling_gguf_pytorch_utils, tqdm=lambda bar: partial(bar, disable=True)):
        yield


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Collect transformers' warnings within the block in place of printing them."""
    from transformers.utils import logging as library

    texts = list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    # Otherwise a second model with the same setting causes no warning; there is no public way
    library.warning_once.cache_clear()
    with quiet(), ExitStack() as after:
        library.set_verbosity_warning()
        library.disable_default_handler()
        after.callback(library.enable_default_handler)
        library.add_handler(handler)
        after.callback(library.remove_handler, handler)
        yield texts


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress transformers' progress bars, log lines below errors and Python warnings; restore them at the end."""
    with warnings.catch_warnings(), ExitStack() as after:
        warnings.simplefilter("ignore")
        from transformers.utils import logging

        after.callback(logging.set_verbosity, logging.get_verbosity())
        logging.set_verbosity_error()
        if logging.is_progress_bar_enabled():
            logging.disable_progress_bar()
            after.callback(logging.enable_progress_bar)
        yield
