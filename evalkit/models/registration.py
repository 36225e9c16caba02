"""Register evalkit's model types with transformers on first use, without importing transformers.

`import evalkit` must be fast, and importing transformers takes seconds. The classes cannot be registered while it is
being imported either, because they need it complete. So the first use of its auto classes, by any code, registers the
configs, and the first use of such a config the models, which need three backbones.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

from evalkit.compatibility.transformers import causal_language_models, config_class


@contextmanager
def quick_imports() -> Iterator[None]:
    """Suspend the search for cyclic garbage within the block."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def import_modeling() -> None:
    """Import what every model class of transformers is made of, while weights are read by another thread."""
    with quick_imports():
        import transformers.modeling_utils  # noqa: F401


def register_when_used() -> None:
    """Register evalkit's model types at the first use of AutoConfig or AutoModelForCausalLM."""
    if "transformers" in sys.modules:
        _install_hooks()
    elif not any(isinstance(finder, _AtFirstImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AtFirstImport())


class _AtFirstImport:
    """Import finder that finds nothing and detects the import of transformers."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> None:
        """Install the hooks when transformers is imported; other finders load it."""
        if name == "transformers":
            sys.meta_path.remove(self)
            _install_hooks()


def _install_hooks() -> None:
    # Slow to import
    import wrapt

    wrapt.register_post_import_hook(_hook_configs, "transformers.models.auto.configuration_auto")
    wrapt.register_post_import_hook(_hook_models, "transformers.models.auto.modeling_auto")


@cache
def register_configs() -> None:
    """Register the configs of the model types with AutoConfig, without the models, which need three backbones."""
    from transformers import AutoConfig

    from evalkit.models.variants.configuration import CONFIGS

    for config in CONFIGS:
        AutoConfig.register(config.model_type, config, exist_ok=True)


@cache
def register_models() -> None:
    """Register the model types with transformers' auto classes."""
    register_configs()
    with quick_imports():
        from transformers import AutoModelForCausalLM

        from evalkit.models.variants.modeling import CLASSES

    for model in CLASSES:
        AutoModelForCausalLM.register(model.config_class, model, exist_ok=True)


def register_type(kind: Any) -> None:
    """Register the configs, and the models if `kind`, a config's model_type, is one of evalkit's."""
    from evalkit.models.variants.configuration import CONFIGS

    register_configs()
    if any(config.model_type == kind for config in CONFIGS):
        register_models()


def register_part(config: Mapping[str, Any]) -> None:
    """Register the class that a checkpoint names for its type, if it is the language model of a larger model's type.

    transformers maps the larger model's type (mllama) to this class, but not the type in its own config
    (mllama_text_model).
    """
    import transformers

    kind, named = config_class(config.get("model_type")), config.get("architectures") or [None]
    if kind is None or kind in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return
    if named[0] in causal_language_models().values():
        model = getattr(transformers, named[0])
        if model.config_class is kind:
            transformers.AutoModelForCausalLM.register(kind, model, exist_ok=True)


def _hook_configs(auto: ModuleType) -> None:
    import wrapt

    wrapt.wrap_function_wrapper(auto, "AutoConfig.from_pretrained", _register_for_result)
    wrapt.wrap_function_wrapper(auto, "AutoConfig.for_model", _register_for_result)


def _hook_models(auto: ModuleType) -> None:
    import wrapt

    wrapt.wrap_function_wrapper(auto, "AutoModelForCausalLM.from_config", _register_for_config)
    wrapt.wrap_function_wrapper(auto, "AutoModelForCausalLM.from_pretrained", _register_all)


def _register_for_result(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
    register_configs()
    found = wrapped(*args, **settings)
    # With return_unused_kwargs, a tuple
    register_type(getattr(found[0] if isinstance(found, tuple) else found, "model_type", None))
    return found


def _register_for_config(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
    config = args[0] if args else settings.get("config")
    register_type(getattr(config, "model_type", None))
    return wrapped(*args, **settings)


def _register_all(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
    register_models()
    return wrapped(*args, **settings)
