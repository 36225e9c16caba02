"""evalkit's model types in transformers' tables, without importing transformers.

`import evalkit` has to be quick, and transformers takes seconds. Nor can the classes be registered while it is
being imported, since they need it whole. So the first use of its auto classes registers them, whoever makes it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any


def register_when_used() -> None:
    """Have AutoConfig and AutoModelForCausalLM know evalkit's model types from their first use on."""
    if "transformers" in sys.modules:
        _watch()
    elif not any(isinstance(finder, _AtFirstImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AtFirstImport())


class _AtFirstImport:
    """Finds nothing; sees transformers being imported."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> None:
        """Watch transformers' modules from then on, and let the others find it."""
        if name == "transformers":
            sys.meta_path.remove(self)
            _watch()


def _watch() -> None:
    # Which takes a while to import itself
    import wrapt

    wrapt.register_post_import_hook(_watch_configs, "transformers.models.auto.configuration_auto")
    wrapt.register_post_import_hook(_watch_classes, "transformers.models.auto.modeling_auto")


@cache
def register_models() -> None:
    """Enter the model types into transformers' tables."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from evalkit.models.variants.modeling import CLASSES

    for model in CLASSES:
        AutoConfig.register(model.config_class.model_type, model.config_class, exist_ok=True)
        AutoModelForCausalLM.register(model.config_class, model, exist_ok=True)


def _watch_configs(auto: ModuleType) -> None:
    import wrapt

    wrapt.wrap_function_wrapper(auto, "AutoConfig.from_pretrained", _registering)
    wrapt.wrap_function_wrapper(auto, "AutoConfig.for_model", _registering)


def _watch_classes(auto: ModuleType) -> None:
    import wrapt

    wrapt.wrap_function_wrapper(auto, "AutoModelForCausalLM.from_config", _registering)
    wrapt.wrap_function_wrapper(auto, "AutoModelForCausalLM.from_pretrained", _registering)


def _registering(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
    register_models()
    return wrapped(*args, **settings)
