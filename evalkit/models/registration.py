"""Register evalkit's model types with transformers on first use, without importing transformers.

`import evalkit` must be fast, and importing transformers takes seconds. The classes cannot be registered while it is
being imported either, because they need it complete. So the first use of its auto classes, by any code, registers them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any


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
def register_models() -> None:
    """Register the model types with transformers' auto classes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from evalkit.models.variants.modeling import CLASSES

    for model in CLASSES:
        AutoConfig.register(model.config_class.model_type, model.config_class, exist_ok=True)
        AutoModelForCausalLM.register(model.config_class, model, exist_ok=True)


def _hook_configs(auto: ModuleType) -> None:
    import wrapt

    wrapt.wrap_function_wrapper(auto, "AutoConfig.from_pretrained", _register_first)
    wrapt.wrap_function_wrapper(auto, "AutoConfig.for_model", _register_first)


def _hook_models(auto: ModuleType) -> None:
    import wrapt

    wrapt.wrap_function_wrapper(auto, "AutoModelForCausalLM.from_config", _register_first)
    wrapt.wrap_function_wrapper(auto, "AutoModelForCausalLM.from_pretrained", _register_first)


def _register_first(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
    register_models()
    return wrapped(*args, **settings)
